"""Times training steps of several variants against each other and against the steps of peers."""

import gc
import math
import statistics
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace

import torch

from benchmarks.parity import References, Verdict, difference, losses
from benchmarks.peers import Peer, as_batch, peer_ids
from benchmarks.protocol import best_product, interleaved, paired, seconds, traced, warm_up_products
from benchmarks.results import NOISE
from benchmarks.variants import BY_BRANCH, Variant, drawn_once, fixed_batch, joined, load_comparable
from dlr_pretrain.config import Config
from dlr_pretrain.models.flops import flops_per_token, peak_flops
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import first_line, write_to_stderr
from dlr_pretrain.util.tensors import WORKING_DTYPE


class Comparison:
    """Our variants and the steps of peers, which take turns on one batch. ``keep`` is called after every new result: a
    round of times, or a comparison of losses."""

    def __init__(self, overrides: dict[str, list[str]], peers: list[Peer], ranks: Ranks, configs: dict[str, Config]):
        self.overrides, self.peers, self.ranks, self.configs = overrides, peers, ranks, configs
        self.first, self.cfg = next(iter(configs.items()))
        self.ours = {self.first: self.first, self.first + NOISE: self.first} | {name: name for name in overrides}
        self.batch = fixed_batch(self.cfg, ranks)
        if peers:
            self.batch = as_batch(peer_ids(self.batch))
        self.built: dict[str, Variant] = {}
        rows = {name: overrides[source] for name, source in self.ours.items()} | {peer.name: None for peer in peers}
        self.rows: dict[str, dict] = {n: {"name": n, "overrides": words, "parity": None} for n, words in rows.items()}

    def variant(self, name: str) -> Variant:
        """The built variant of this name, or else a new one."""
        source = self.ours[name]
        by_branch = BY_BRANCH in self.overrides[source]
        return self.built.get(name) or Variant(name, self.configs[source], self.ranks, by_branch=by_branch)

    def build(self) -> None:
        self.built = {name: self.variant(name) for name in self.ours}
        for peer in self.peers:
            peer.build(self.cfg, self.ranks.device)

    def release(self) -> None:
        """Free every variant and peer."""
        self.built.clear()
        for peer in self.peers:
            peer.built = None
        gc.collect()
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()

    def time(self, rounds: int, warmup: int, may_fail: bool, trace: bool, keep: Callable[[], None]) -> None:
        """Time every variant and peer. With ``may_fail``, the row of a failing step holds its error instead."""
        device, ids = self.ranks.device, peer_ids(self.batch)
        steps: dict[str, Callable] = {name: lambda v=built: v.step(self.batch) for name, built in self.built.items()}
        steps |= {peer.name: lambda p=peer: p.built.step(ids) for peer in self.peers}
        for name in list(steps):
            try:
                write_to_stderr(f"first step of {name}: {seconds(steps[name], device):.1f} s")
            except Exception as error:
                if not may_fail or name == self.first:
                    raise
                self.rows[name]["error"] = first_line(error)
                write_to_stderr(f"{name}: {first_line(error)}")
                del steps[name]
                self.built.pop(name, None)
                gc.collect()
        costs = {name: utilisation(self.built[name]) for name in steps if name in self.built}
        write_to_stderr(f"{rounds} rounds of {len(steps)} steps, after {warmup} of each")

        def add(times: dict[str, list[float]]) -> None:
            for name, found in times.items():
                median = statistics.median(found)
                speed = self.cfg.train.global_batch * self.cfg.train.seq_len / median
                cost = costs.get(name)  # a peer has none
                self.rows[name] |= {
                    "seconds": found,
                    "ms": 1e3 * median,
                    "ratio": paired(found, times[self.first]),
                    "tokens_per_second": speed,
                    **(cost | {"mfu": shares(cost["flops_per_token"] * speed, cost["peak_flops"])} if cost else {}),
                }
            last = ", ".join(f"{name} {1e3 * found[-1]:.4g}" for name, found in times.items())
            write_to_stderr(f"round {len(times[self.first])}, ms: {last}")
            keep()

        interleaved(steps, warmup, rounds, device, add)
        for name in steps if trace and device.type == "cuda" else ():
            self.rows[name]["traced"] = traced(steps[name], device)
            keep()

    def check(self, keep: Callable[[], None]) -> None:
        """Compare each variant's losses with the plain model's, and each peer's with ours from the peer's weights."""
        rows = self.cfg.train.global_batch if self.peers else parity_rows(self.configs.values())
        batch = replace(self.batch, tokens=self.batch.tokens[:rows], lengths=self.batch.lengths[:rows])
        references, ids = References(self.ranks, batch), peer_ids(batch)
        for name in filter(self.is_unchecked, self.ours):
            variant = self.variant(name)
            self.judge(name, references.judge(variant.cfg, losses(variant.step, batch)), keep)
        for peer in self.peers:
            if not self.is_unchecked(peer.name):
                continue
            torch.compiler.reset()  # our graphs have other attention kernels; see with_own_code
            if peer.built is None:
                peer.build(self.cfg, self.ranks.device)
            variant = Variant(f"beside {peer.name}", self.configs[peer.name], self.ranks)
            variant.load(peer.built.tensors())
            variant.clip_as_torch_does()
            with getattr(peer.built, "attention", nullcontext)():
                expected = losses(variant.step, batch)
            found = difference(losses(lambda _, p=peer: p.built.step(ids), batch), expected)
            self.judge(peer.name, Verdict("our step", found, references.bound(variant.cfg)), keep)
            torch.compiler.reset()

    def is_unchecked(self, name: str) -> bool:
        return "error" not in self.rows[name] and not self.rows[name]["parity"]

    def judge(self, name: str, v: Verdict, keep: Callable[[], None]) -> None:
        relation = "within" if v.passes else "NOT within"
        write_to_stderr(
            f"parity of {name}: losses {v.difference:.1e} from those of {v.reference}, {relation} {v.bound:.1e}"
        )
        self.rows[name]["parity"] = asdict(v) | {"passes": v.passes}
        keep()


def measure(
    overrides: dict[str, list[str]],
    peers: list[Peer],
    rounds: int,
    warmup: int,
    *,
    keep: Callable[[dict], object],
    times_first: bool,
    may_check: Callable[[], bool],
    timed: dict,
    trace: bool,
) -> dict:
    """Time the variants (name -> overrides of train.py) and ``peers``. Ratios are to the first variant, which runs
    twice: the second row shows the noise.

    Losses are compared before anything is timed. With ``times_first`` they are compared afterwards, by newly built
    models, if ``may_check`` returns true; until then the parity of a row is null. ``timed`` holds the results of an
    earlier such call, whose times are kept. ``keep`` receives the results so far after each round and each comparison.

    Returns ``device``; ``batch`` (rows, seq_len, rounds, warmup); and ``variants``, for each: name, overrides (null
    for a peer), parity, seconds of each round, ms (their median), ratio (median of its seconds over the first
    variant's in the same round, with its 95 % interval), tokens_per_second, flops_per_token (structural), mfu by the
    data sheet's peak and by that of large matrix products, and with ``trace`` the kernels of one more step.
    """
    twins = {peer.name: joined(next(iter(overrides.values())), peer.ours) for peer in peers}
    configs = load_comparable(overrides | twins)
    torch._dynamo.config.recompile_limit = 64  # per code object: each variant has a graph of its own
    with Ranks(next(iter(configs.values()))) as ranks, drawn_once():
        ranks.use_device()
        warm_up_products(ranks.device)
        comparison = Comparison(overrides, peers, ranks, configs)
        threads = f"CPU, {torch.get_num_threads()} threads"
        device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else threads
        train = comparison.cfg.train
        about = {"rows": train.global_batch, "seq_len": train.seq_len, "rounds": rounds, "warmup": warmup}

        def found() -> dict:
            return {"device": device, "batch": about, "variants": list(comparison.rows.values())}

        if timed:
            comparison.rows |= {row["name"]: row for row in timed["variants"]}
        else:
            comparison.build()
            if not times_first:
                comparison.check(lambda: None)
                gc.collect()
            comparison.time(rounds, warmup, times_first, trace, lambda: keep(found()))
        if times_first and may_check():
            comparison.release()
            comparison.check(lambda: keep(found()))
        return found()


def parity_rows(configs: Iterable[Config]) -> int:
    """The rows of the parity check: one whole micro-batch of every variant, or two if the batch has two."""
    configs = list(configs)
    micro = math.lcm(*(cfg.micro_batch(1) for cfg in configs))
    return 2 * micro if configs[0].train.global_batch >= 2 * micro else micro


def utilisation(variant: Variant) -> dict:
    """The structural FLOPs per token, and the device's peak FLOP/s in the variant's working dtype."""
    cfg, precision = variant.cfg, variant.cfg.precision.name
    peaks = {
        "datasheet": peak_flops(variant.device, precision),
        "measured": best_product(variant.device, WORKING_DTYPE[precision]),
    }
    flops = flops_per_token(cfg, cfg.planned_vocab_size, variant.trainer.micro_batch)
    return {"flops_per_token": flops, "peak_flops": peaks}


def shares(flops_per_second: float, peaks: dict[str, float | None]) -> dict[str, float | None]:
    return {name: peak and flops_per_second / peak for name, peak in peaks.items()}
