"""Measures training steps of several configurations side by side, and beside steps of peers.

``measure`` returns plain values with stable keys:

    device, batch     batch: rows, seq_len, padding (share of positions), rounds, warmup, loader
    peak_flops        datasheet (null if unknown), measured (of large matrix products), in the working dtype of the
                      first arm
    sm_clock_mhz      before and after the measurement; null on a CPU or without nvidia-smi
    arms              a list; ratios are to the first arm, and the second is the first once more (the noise)

and for each arm

    name; words       words: its overrides of train.py (null for a peer)
    config            scale, backbone, dlr, impl, grouping, precision, optimizer, activation_checkpointing,
                      accumulate, micro_batch, compile
    parity            reference, difference (largest relative one of a loss in 20 updates), bound, passes; null if it
                      was not compared
    seconds           one value per round; ms is their median
    ratio             median, low, high (quartiles) of its seconds over the first arm's of the same round
    tokens_per_second, real_tokens_per_second (null for batches from the loader)
    flops_per_token   structural, see models/flops.py; mfu, hfu: share of each peak in the arm's own working dtype,
                      hfu counts recomputation too
    memory            resident and peak bytes of this arm alone (null on a CPU)
    compile_s         cold, warm; only if asked for
"""

from __future__ import annotations

import gc
import math
import subprocess
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass

import torch

from dlr_pretrain.bench.arms import Arm, fixed_batch, require_comparable
from dlr_pretrain.bench.gate import References, Verdict, difference, losses
from dlr_pretrain.bench.peers import Peer, as_batch, peer_ids
from dlr_pretrain.bench.rounds import best_product, interleaved, paired, quartiles, warm_up_products
from dlr_pretrain.bench.words import joined
from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, TrainLoader
from dlr_pretrain.data.sources import open_source
from dlr_pretrain.data.tokenizer import open_tokenizer
from dlr_pretrain.models.flops import flops_per_token, peak_flops
from dlr_pretrain.models.precision import WORKING_DTYPE
from dlr_pretrain.train.runtime import Runtime

NOISE, LOADED = ", once more", ", from the loader"


@dataclass(frozen=True)
class Protocol:
    """How to measure: rounds, steps before them, share of padding; whether to time the first arm on real data too."""

    rounds: int
    warmup: int
    padding: float
    loader: bool = False


def measure(arms: dict[str, list[str]], peers: list[Peer], how: Protocol, say: Callable[[str], None]) -> dict:
    """Time the ``arms`` (name -> overrides of train.py) and ``peers``; returns the values listed above."""
    configs = {name: load(words) for name, words in arms.items()}
    twins = {peer.name: load(joined(next(iter(arms.values())), peer.ours)) for peer in peers if peer.ours is not None}
    require_comparable([*configs.values(), *twins.values()])
    first, cfg = next(iter(configs.items()))
    torch._dynamo.config.recompile_limit = 64  # per code object: each arm has a graph of its own
    with Runtime(cfg) as runtime:
        runtime.use_device()
        warm_up_products(runtime.device)
        batch = fixed_batch(cfg, runtime, how.padding)
        if peers:
            batch = as_batch(peer_ids(batch), batch.real_tokens)
        ours = {name: Arm(name, c, runtime) for name, c in {first: cfg, first + NOISE: cfg, **configs}.items()}
        beside = {peer.name: Arm(peer.name, twins[peer.name], runtime) for peer in peers if peer.name in twins}
        built = {peer.name: peer.build(cfg, runtime.device) for peer in peers}
        rows = cfg.train.global_batch if peers else gate_rows(configs.values())
        few = Batch(batch.tokens[:rows], batch.lengths[:rows], 0, {})
        verdicts = hold(ours, beside, built, runtime, few, say)
        beside.clear()
        gc.collect()
        acts = {name: arm_step(arm, batch) for name, arm in ours.items()}
        acts |= {name: built[name].on(batch) for name in built}
        clock = sm_clock(runtime.device)
        for arm in ours.values():
            arm.measure_memory(batch)
        say(f"{how.rounds} rounds of {len(acts)} arms, after {how.warmup} steps each")
        times = timed(acts, ours[first], how, runtime)
        clock = [clock, sm_clock(runtime.device)] if clock else None
        peaks = {
            precision: peaks_in(precision, runtime.device) for precision in {c.precision.name for c in configs.values()}
        }
        rows = []
        for name, seconds in times.items():
            arm = ours.get(name, ours[first] if name == first + LOADED else None)
            rows.append(
                {"name": name, "words": arms.get(name.removesuffix(NOISE).removesuffix(LOADED))}
                | of_time(seconds, times[first], batch, of_batch=name != first + LOADED)
                | {"parity": asdict(v) | {"passes": v.passes} if (v := verdicts.get(name)) else None}
                | (of_arm(arm, batch, seconds, peaks[arm.cfg.precision.name]) if arm else {})
            )
        device = describe(runtime.device)
    about = {"rows": cfg.train.global_batch, "seq_len": cfg.train.seq_len, **asdict(how)}
    own = peaks[cfg.precision.name]
    return {"device": device, "batch": about, "peak_flops": own, "sm_clock_mhz": clock, "arms": rows}


def peaks_in(precision: str, device: torch.device) -> dict[str, float | None]:
    """Peak FLOP/s of products in the working dtype of ``precision``, by source."""
    measured = best_product(device, WORKING_DTYPE[precision])
    return {"datasheet": peak_flops(device, precision), "measured": measured}


def arm_step(arm: Arm, batch: Batch) -> Callable[[], object]:
    return lambda: arm.step(batch)


def hold(
    ours: dict[str, Arm], beside: dict[str, Arm], peers: dict, runtime: Runtime, batch: Batch, say: Callable
) -> dict[str, Verdict]:
    """Compare each arm with the plain model, and each peer with the arm ``beside`` it, from the peer's own start."""
    references, verdicts = References(runtime, batch), {}
    for name, arm in ours.items():
        verdicts[name] = references.judge(arm.cfg, losses(arm.step, batch))
        say(f"parity of {name}: {shown(verdicts[name])}")
    for name, arm in beside.items():
        arm.load(peers[name].tensors())
        arm.clip_as_torch_does()
        expected = losses(arm.step, batch)
        found = difference(losses(peers[name].step, batch), expected)
        verdicts[name] = Verdict("our step", found, references.bound(arm.cfg))
        say(f"parity of {name}: {shown(verdicts[name])}")
    return verdicts


def gate_rows(configs: Iterable[Config]) -> int:
    """Rows of the gate's batch: whole micro-batches of every arm, two of them if the whole batch has two."""
    micro, whole = math.lcm(*(cfg.micro_batch(1) for cfg in configs)), next(iter(configs)).train.global_batch
    return 2 * micro if whole >= 2 * micro else micro


def shown(verdict: Verdict) -> str:
    relation = "within" if verdict.passes else "NOT within"
    return f"losses {verdict.difference:.1e} from those of {verdict.reference}, {relation} {verdict.bound:.1e}"


def timed(acts: dict, first: Arm, how: Protocol, runtime: Runtime) -> dict[str, list[float]]:
    """Seconds of each act. ``how.loader`` adds the first arm on loaded batches, with the wait for each batch."""
    if not how.loader:
        return interleaved(acts, how.warmup, how.rounds, runtime.device)
    source = open_source(first.cfg)
    with closing(TrainLoader(first.cfg, source, open_tokenizer(first.cfg, source), 0, 1, None)) as loader:
        acts = acts | {first.name + LOADED: lambda: first.step(loader.take(lambda: False))}
        return interleaved(acts, how.warmup, how.rounds, runtime.device)


def of_time(seconds: list[float], reference: list[float], batch: Batch, of_batch: bool = True) -> dict:
    """Rates of steps on batches of the size of ``batch``. Without ``of_batch`` their real tokens are not known."""
    median = quartiles(seconds).median
    positions = batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)
    return {
        "seconds": seconds,
        "ms": 1e3 * median,
        "ratio": paired(seconds, reference)._asdict(),
        "tokens_per_second": positions / median,
        "real_tokens_per_second": batch.real_tokens / median if of_batch else None,
    }


def of_arm(arm: Arm, batch: Batch, seconds: list[float], peaks: dict[str, float | None]) -> dict:
    cfg, median = arm.cfg, quartiles(seconds).median
    rows, width = batch.tokens.shape
    counts = [flops_per_token(cfg, cfg.planned_vocab_size, arm.updates.micro_batch, again) for again in (False, True)]
    used = [{n: p and count * rows * (width - 1) / median / p for n, p in peaks.items()} for count in counts]
    memory = {"resident": arm.resident, "peak": arm.peak} if arm.peak else None
    return {"config": choices(cfg), "flops_per_token": counts[0], "mfu": used[0], "hfu": used[1], "memory": memory}


def choices(cfg: Config) -> dict[str, object]:
    return {
        "scale": cfg.scale.name,
        "backbone": cfg.backbone.name,
        "dlr": cfg.dlr.name,
        "impl": cfg.dlr.impl if cfg.dlr.enabled else None,
        "grouping": cfg.dlr.grouping if cfg.dlr.enabled else None,
        "precision": cfg.precision.name,
        "optimizer": cfg.optimizer.name,
        "activation_checkpointing": cfg.train.activation_checkpointing,
        "accumulate": cfg.train.accumulate,
        "micro_batch": cfg.micro_batch(1),
        "compile": cfg.compile,
    }


def describe(device: torch.device) -> str:
    threads = torch.get_num_threads()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {threads} threads"


def sm_clock(device: torch.device) -> int | None:
    """The clock of the GPU's multiprocessors in MHz; None on a CPU or without nvidia-smi."""
    if device.type != "cuda":
        return None
    question = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={device.index or 0}"]
    try:
        return int(subprocess.run(question, capture_output=True, text=True, check=True).stdout)
    except (OSError, ValueError, subprocess.CalledProcessError):
        return None
