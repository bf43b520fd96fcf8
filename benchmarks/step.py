"""Measures training steps of several variants side by side, and beside steps of peers."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace

import torch

from benchmarks.parity import References, Verdict, difference, losses
from benchmarks.peers import Peer, as_batch, peer_ids
from benchmarks.protocol import best_product, interleaved, paired, warm_up_products
from benchmarks.variants import BY_BRANCH, Variant, fixed_batch, joined, load_comparable
from dlr_pretrain.config import Config
from dlr_pretrain.models.flops import flops_per_token, peak_flops
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import write_to_stderr
from dlr_pretrain.util.tensors import WORKING_DTYPE

NOISE = ", once more"


def measure(overrides: dict[str, list[str]], peers: list[Peer], rounds: int, warmup: int) -> dict:
    """Time the variants (name -> overrides of train.py) and ``peers``. Ratios are to the first variant, which runs
    twice: the second time shows the noise.

    Returns ``device``; ``batch`` (rows, seq_len, rounds, warmup); and ``variants``, for each: name, overrides (null
    for a peer), parity, seconds of each round, ms (their median), ratio (median of its seconds over the first
    variant's of the same round, with its 95 % interval), tokens_per_second, flops_per_token (structural), and mfu by
    the data sheet's peak and by that of large matrix products.
    """
    twins = {peer.name: joined(next(iter(overrides.values())), peer.ours) for peer in peers}
    configs = load_comparable(overrides | twins)
    first, cfg = next(iter(configs.items()))
    timed = {first: first, first + NOISE: first} | {name: name for name in overrides}  # -> the configuration's name
    torch._dynamo.config.recompile_limit = 64  # per code object: each variant has a graph of its own
    with Ranks(cfg) as ranks:
        ranks.use_device()
        warm_up_products(ranks.device)
        batch = fixed_batch(cfg, ranks)
        if peers:
            batch = as_batch(peer_ids(batch))
        ours = {
            name: Variant(name, configs[of], ranks, by_branch=BY_BRANCH in overrides[of]) for name, of in timed.items()
        }
        beside = [Variant(f"beside {peer.name}", configs[peer.name], ranks) for peer in peers]
        for peer in peers:
            peer.build(cfg, ranks.device)
        rows = cfg.train.global_batch if peers else parity_rows(configs.values())
        few = replace(batch, tokens=batch.tokens[:rows], lengths=batch.lengths[:rows])
        verdicts = check(ours, peers, beside, References(ranks, few))
        beside.clear()
        gc.collect()
        acts: dict[str, Callable] = {name: lambda v=variant: v.step(batch) for name, variant in ours.items()}
        ids = peer_ids(batch)
        acts |= {peer.name: lambda p=peer: p.built.step(ids) for peer in peers}
        write_to_stderr(f"{rounds} rounds of {len(acts)} steps, after {warmup} of each")
        times = interleaved(acts, warmup, rounds, ranks.device)
        found = []
        for name, seconds in times.items():
            verdict, variant, median = verdicts[name], ours.get(name), statistics.median(seconds)
            speed = cfg.train.global_batch * cfg.train.seq_len / median
            found.append({
                "name": name,
                "overrides": overrides.get(name.removesuffix(NOISE)),
                "parity": asdict(verdict) | {"passes": verdict.passes},
                "seconds": seconds,
                "ms": 1e3 * median,
                "ratio": paired(seconds, times[first]),
                "tokens_per_second": speed,
                **(utilisation(variant, speed) if variant else {}),
            })  # fmt: skip
        threads = f"CPU, {torch.get_num_threads()} threads"
        device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else threads
    about = {"rows": cfg.train.global_batch, "seq_len": cfg.train.seq_len, "rounds": rounds, "warmup": warmup}
    return {"device": device, "batch": about, "variants": found}


def check(
    ours: dict[str, Variant], peers: list[Peer], beside: list[Variant], references: References
) -> dict[str, Verdict]:
    """Compare each variant with the plain model, and each peer with our variant ``beside`` it, from its start."""
    verdicts, batch = {}, references.batch
    ids = peer_ids(batch)
    for name, variant in ours.items():
        verdicts[name] = references.judge(variant.cfg, losses(variant.step, batch))
    for peer, variant in zip(peers, beside, strict=True):
        variant.load(peer.built.tensors())
        variant.clip_as_torch_does()
        with getattr(peer.built, "attention", nullcontext)():
            expected = losses(variant.step, batch)
        found = difference(losses(lambda _, p=peer: p.built.step(ids), batch), expected)
        verdicts[peer.name] = Verdict("our step", found, references.bound(variant.cfg))
    for name, v in verdicts.items():
        relation = "within" if v.passes else "NOT within"
        write_to_stderr(
            f"parity of {name}: losses {v.difference:.1e} from those of {v.reference}, {relation} {v.bound:.1e}"
        )
    return verdicts


def parity_rows(configs: Iterable[Config]) -> int:
    """Rows of the parity check: whole micro-batches of every variant, two of them if the whole batch has two."""
    configs = list(configs)
    micro = math.lcm(*(cfg.micro_batch(1) for cfg in configs))
    return 2 * micro if configs[0].train.global_batch >= 2 * micro else micro


def utilisation(variant: Variant, tokens_per_second: float) -> dict:
    """The structural FLOPs of a position, and their share of the device's peaks in the variant's working dtype."""
    cfg, precision = variant.cfg, variant.cfg.precision.name
    flops = flops_per_token(cfg, cfg.planned_vocab_size, variant.trainer.micro_batch)
    peaks = {
        "datasheet": peak_flops(variant.device, precision),
        "measured": best_product(variant.device, WORKING_DTYPE[precision]),
    }
    return {
        "flops_per_token": flops,
        "peak_flops": peaks,
        "mfu": {name: peak and flops * tokens_per_second / peak for name, peak in peaks.items()},
    }
