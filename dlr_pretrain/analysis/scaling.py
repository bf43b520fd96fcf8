"""Estimates of scaling: step time, all-reduce, memory and time to the end of a recipe on any number of GPUs.

A roofline model. Each operation of a micro-batch, as ``work`` counts them, takes as long as the slowest of its
arithmetic, its memory traffic and a kernel launch. Micro-batches run one after another. A ring reduces the gradients,
partly hidden by the last backward pass. The update reads and writes the state. What is not counted is assumed:
``Assumptions`` lists it, and every table prints it. Nothing here is measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace

import torch

from dlr_pretrain.analysis.memory import Memory, memory
from dlr_pretrain.analysis.operations import Operation, work
from dlr_pretrain.analysis.table1 import Counts, counts
from dlr_pretrain.config import MISSING, Config, ConfigError, Problem, did_you_mean
from dlr_pretrain.config.tree import MAX_STREAMS, largest_divisor
from dlr_pretrain.models.flops import flops_per_token
from dlr_pretrain.models.precision import STATE_DTYPE, WORKING_DTYPE
from dlr_pretrain.util.text import amount, fill


def _is(default: float | None, doc: str):
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of an estimate: a GPU's data sheet, the network, shares of these that are reached, latencies."""

    peak_tflops: float = _is(None, "TFLOP/s of dense products (data sheet: of bf16 ones)")
    memory_gbs: float = _is(None, "GB/s of the GPU's memory (data sheet)")
    memory_gb: float = _is(None, "GB of the GPU's memory (data sheet)")
    nvlink_gbs: float = _is(None, "GB/s of a GPU's NVLink in one direction (data sheet)")
    infiniband_gbs: float = _is(50.0, "GB/s of the network adapter that each GPU has (NDR, 400 Gbit/s)")
    node: int = _is(8, "GPUs that NVLink joins")
    gemm: float = _is(0.8, "share of the peak that matrix products reach")
    stream: float = _is(0.9, "share of the memory's bandwidth that kernels reach")
    fused: float = _is(0.2, "share of eager elementwise bytes and kernels that compiled code is left with")
    kernel_us: float = _is(2.0, "microseconds that a kernel takes at least")
    roofline: float = _is(0.7, "share of this roofline's speed that a step reaches")
    network: float = _is(0.8, "share of NVLink's and InfiniBand's bandwidth that a collective reaches")
    hop_us: float = _is(5.0, "microseconds of latency, twice for each doubling of the GPUs")
    overlap: float = _is(0.8, "share of a pass that can hide the collective beside it")
    capacity: float = _is(
        0.92, "share of the GPU's memory for what the plan counts; context and fragments take the rest"
    )


SHARES = ("gemm", "stream", "fused", "roofline", "network", "overlap", "capacity")
DEVICES = {  # peak_tflops, memory_gbs, memory_gb, nvlink_gbs
    "a100": (312.0, 2039.0, 80.0, 300.0),
    "h100": (989.0, 3350.0, 80.0, 450.0),
    "h200": (989.0, 4800.0, 141.0, 450.0),
    "b200": (2250.0, 8000.0, 180.0, 900.0),
}


def assume(device: str, words: Sequence[str] = (), precisions: Collection[str] = ()) -> Assumptions:
    """The assumptions for a GPU of ``DEVICES`` with changes such as ``overlap=0.5``; ConfigError names bad ones.

    ``precisions`` are those of the configurations to be estimated. ``DEVICES`` has the peaks of bf16 products only, so
    fp32 needs ``peak_tflops``, and the two cannot be estimated together.
    """
    given, known, problems = {}, {f.name for f in fields(Assumptions)}, []
    for word in words:
        name, _, text = word.partition("=")
        if name not in known:
            problems.append(Problem(f"--assume {name}", MISSING, "no such assumption", did_you_mean(name, known)))
            continue
        try:
            value = int(text) if name == "node" else float(text)
        except ValueError:
            value = math.nan
        most = 1.0 if name in SHARES else math.inf
        least_is_zero = name in ("overlap", "kernel_us", "hop_us")
        if not (0 < value <= most or (least_is_zero and value == 0)) or math.isinf(value):
            kind, least = "whole number" if name == "node" else "number", "from 0 on" if least_is_zero else "above 0"
            rule = f"must be a {kind} {least}" + (" and at most 1" if name in SHARES else "")
            problems.append(Problem(f"--assume {name}", text, rule))
        given[name] = value
    own = {WORKING_DTYPE[name] for name in precisions}
    if torch.float32 in own and "peak_tflops" not in given:
        rule = f"the peak of {device} that is known is of bf16 products"
        problems.append(
            Problem("precision", "fp32", rule, "Give that of fp32 products by --assume peak_tflops=<number>")
        )
    if len(own) > 1:
        rule = "has another peak than the precisions beside it, and estimates are of one"
        problems.append(Problem("precision", "fp32", rule, "Estimate it by itself"))
    if problems:
        raise ConfigError(problems)
    return replace(Assumptions(*DEVICES[device]), **given)


@dataclass(frozen=True)
class Estimate:
    """One configuration on ``gpus`` GPUs. Times are seconds of one update; tokens per second are of all GPUs."""

    gpus: int
    micro_batch: int
    micro_batches: int
    compute: float  # forward and backward passes
    communication: float  # collectives of gradients, and with fsdp of weights, whether hidden or not
    exposed: float  # the part of communication that the step waits for
    update: float
    step: float
    tokens_per_second: float
    mfu: float  # of the data sheet's peak, as perf/mfu
    hours: float  # for the whole recipe, without evaluation, checkpoints and compilation
    memory: int  # peak bytes on a GPU, as ``memory.Memory.total``
    fits: bool
    trains: bool  # whether this version can divide its data streams among so many ranks


class Scaling:
    """Estimates for ``cfg``. Keeps the counts that are the same for several numbers of GPUs."""

    def __init__(self, cfg: Config, given: Assumptions):
        self.cfg, self.given = cfg, given
        self.vocab_size = cfg.planned_vocab_size
        self.entries = counts(cfg, self.vocab_size)
        self._work: dict[int, Counter[Operation]] = {}
        self._memory: dict[tuple, Memory] = {}

    def estimates(self, counts: Sequence[int]) -> dict[int, Estimate | None]:
        return {gpus: self.estimate(gpus) for gpus in counts}

    def estimate(self, gpus: int) -> Estimate | None:
        """The estimate; None if the global batch is not a multiple of ``gpus``."""
        train, given = self.cfg.train, self.given
        if train.global_batch % gpus:
            return None
        cfg = on_paper(self.cfg, gpus, given)
        rows = cfg.train.micro_batch
        count, held = train.global_batch // gpus // rows, self._held(cfg, gpus)
        if rows not in self._work:
            self._work[rows] = work(cfg, self.vocab_size, rows)
        one = roofline(self._work[rows], given) / given.roofline
        moved, hiding = communication(cfg, self.entries, gpus, count, one, given)
        exposed = max(0.0, moved - given.overlap * hiding)
        bytes_moved = update_bytes(cfg, self.entries, held, gpus)
        update = bytes_moved / (1e9 * given.memory_gbs * given.stream * given.roofline)
        step = count * one + exposed + update
        positions = train.global_batch * train.seq_len
        flops = positions * flops_per_token(cfg, self.vocab_size, rows)
        return Estimate(
            gpus=gpus,
            micro_batch=rows,
            micro_batches=count,
            compute=count * one,
            communication=moved,
            exposed=exposed,
            update=update,
            step=step,
            tokens_per_second=positions / step,
            mfu=flops / (step * gpus * given.peak_tflops * 1e12),
            hours=train.steps * step / 3600,
            memory=held.total,
            fits=held.total <= room(given),
            trains=MAX_STREAMS % gpus == 0,
        )

    def _held(self, cfg: Config, gpus: int) -> Memory:
        rows = cfg.train.micro_batch
        alike = gpus if cfg.parallel.name == "fsdp" else (gpus > 1, cfg.train.global_batch > gpus * rows)
        if (rows, alike) not in self._memory:
            self._memory[rows, alike] = memory(cfg, self.vocab_size, gpus)
        return self._memory[rows, alike]


def with_micro_batch(cfg: Config, rows: int) -> Config:
    """``cfg`` with ``train.micro_batch=rows``."""
    return replace(cfg, train=replace(cfg.train, micro_batch=rows))


def room(given: Assumptions) -> float:
    """The bytes of a GPU that are available to the tensors that ``memory`` counts."""
    return given.capacity * given.memory_gb * 1e9


def on_paper(cfg: Config, gpus: int, given: Assumptions) -> Config:
    """``cfg`` with a micro-batch that divides a GPU's share of the batch.

    It is the largest one up to the configured micro-batch, or with ``auto`` the largest one that fits by the estimate
    (1 if none fits).
    """
    asked, share = cfg.train.micro_batch, cfg.train.global_batch // gpus
    if asked == "auto":
        return with_micro_batch(cfg, fitting(cfg, cfg.planned_vocab_size, gpus, room(given)) or 1)
    return with_micro_batch(cfg, largest_divisor(share, asked or cfg.scale.micro_batch))


def fitting(cfg: Config, vocab_size: int, ranks: int, room: float) -> int | None:
    """The largest divisor of a rank's rows whose estimated memory is at most ``room`` bytes; None if none fits."""
    share = cfg.train.global_batch // ranks
    for rows in reversed([n for n in range(1, share + 1) if share % n == 0]):
        if memory(with_micro_batch(cfg, rows), vocab_size, ranks).total <= room:
            return rows
    return None


def roofline(operations: Counter[Operation], given: Assumptions) -> float:
    """Seconds of ``operations``, one after another.

    A product takes the longest of its arithmetic, its memory traffic and a kernel launch; an elementwise operation
    takes the longer of the last two, times ``fused``.
    """
    flops, stream, start = 1e12 * given.peak_tflops * given.gemm, 1e9 * given.memory_gbs * given.stream, given.kernel_us
    seconds = 0.0
    for op, count in operations.items():
        if op.product:
            seconds += count * max(op.flops / flops, op.bytes / stream, start * 1e-6)
        else:
            seconds += count * given.fused * max(op.bytes / stream, start * 1e-6)
    return seconds


def ring(size: float, gpus: int, given: Assumptions, passes: int = 2) -> float:
    """Seconds of a ring collective over ``size`` bytes: an all-reduce makes two passes, a gather or a scatter one.

    In a pass each of W GPUs sends size (W - 1) / W bytes. Between nodes, rings use all adapters of a node at once, so
    the slower of a GPU's NVLink and all adapters of its node sets the pace.
    """
    if gpus == 1:
        return 0.0
    pace = given.nvlink_gbs if gpus <= given.node else min(given.nvlink_gbs, given.node * given.infiniband_gbs)
    latency = 1e-6 * given.hop_us * math.ceil(math.log2(gpus))
    return passes * (size * (gpus - 1) / gpus / (1e9 * pace * given.network) + latency)


def communication(
    cfg: Config, entries: Counts, gpus: int, micro_batches: int, one: float, given: Assumptions
) -> tuple[float, float]:
    """Seconds of an update's collectives, and of the passes that can hide them; a micro-batch takes ``one``."""
    wide, working = cfg.train.accumulate == "fp32", WORKING_DTYPE[cfg.precision.name].itemsize
    gradients = entries.trained * (4 if wide else working)
    if cfg.parallel.name == "fsdp":  # both passes gather the weights; then the gradients are scattered
        each = 2 * ring(entries.total * working, gpus, given, 1) + ring(gradients, gpus, given, 1)
        return micro_batches * each, micro_batches * one
    return ring(gradients, gpus, given), 0.0 if wide else 2 / 3 * one


def update_bytes(cfg: Config, entries: Counts, held: Memory, gpus: int) -> float:
    """Bytes that an update moves: gradients once for the norm, twice to clip, once to update; the state twice."""
    if cfg.parallel.name == "fsdp":
        weights = entries.trained * STATE_DTYPE[cfg.precision.name].itemsize / gpus
    else:
        weights = entries.trained * WORKING_DTYPE[cfg.precision.name].itemsize
    gradients = held.gradients
    return (2 if cfg.train.clip is None else 4) * gradients + 2 * (weights + held.masters + held.optimizer_state)


# ----------------------------------------------------------------------------------------------------
# Showing

HEADER = f"{'GPUs':>6}{'batch':>9}{'step':>9}{'reduce':>9}{'waits':>9}{'GB':>8}{'tok/s':>8}{'MFU':>6}{'end':>9}"
LEGEND = """\
batch: sequences x micro-batches of a GPU. step: of one update. reduce: its collectives; waits: their part that nothing
hides. GB: peak of a GPU as eager code allocates it; ! where it does not fit. tok/s: positions, all GPUs. MFU: of the
data sheet's peak. end: of the recipe, without evaluation, checkpoints and compilation. *: more ranks than this version
can share its 64 data streams out to"""


def line(gpus: int, e: Estimate | None, cfg: Config) -> str:
    """One row of the table."""
    if e is None:
        return f"{gpus:>6,}  no even share of train.global_batch={cfg.train.global_batch}"
    memory = f"{e.memory / 1e9:.1f}" + (" " if e.fits else "!")
    return (
        f"{gpus:>6,}{f'{e.micro_batch} x {e.micro_batches}':>9}{_time(e.step):>9}{_time(e.communication):>9}"
        f"{_time(e.exposed):>9}{memory:>8}{amount(e.tokens_per_second):>8}{e.mfu:>6.0%}{_span(e.hours):>9}"
        f"{'' if e.trains else '*'}"
    )


def titled(cfg: Config) -> str:
    """The heading of a table: which configuration its rows estimate."""
    names = [cfg.scale.name, cfg.backbone.name, f"dlr {cfg.dlr.name}", cfg.optimizer.name, cfg.precision.name]
    kept = cfg.train.activation_checkpointing
    names += [cfg.parallel.name] * (cfg.parallel.name != "ddp") + [f"checkpointing {kept}"] * (kept != "none")
    return f"{', '.join(names)}: {cfg.train.steps:,} steps of {cfg.train.global_batch} x {cfg.train.seq_len} positions"


def render(found: Sequence[tuple[Config, dict[int, Estimate | None]]], given: Assumptions, device: str) -> str:
    """The table of all configurations at 80 columns, and what it assumes."""
    text = []
    for cfg, estimates in found:
        text += [titled(cfg), HEADER, *(line(gpus, e, cfg) for gpus, e in estimates.items()), ""]
    text += [fill(f"Estimated for {device}, compiled; nothing of it is measured. {LEGEND}."), "", "Assumed:"]
    for f in fields(given):
        text.append(fill(f"  {f'{f.name}={getattr(given, f.name):g}':<20}{f.metadata['doc']}", indent=22))
    return "\n".join(text)


def against(found: dict, configure: Callable[[list[str]], Config], given: Assumptions) -> str:
    """The arms of ``scripts/benchmark.py step --json``, measured on one GPU, beside their estimates.

    ``configure`` makes a configuration from an arm's words. Arms of peers have no words and are left out.
    """
    text = [
        f"measured on {found['device']}: {found['command']}",
        f"{'ms':>10}{'estimate':>10}{'ratio':>8}{'GB':>8}{'plan':>8}",
    ]
    for arm in found["arms"]:
        if arm["words"] is None:
            continue
        cfg = configure(arm["words"])
        train = replace(cfg.train, global_batch=found["batch"]["rows"], seq_len=found["batch"]["seq_len"])
        e = Scaling(replace(cfg, train=train), given).estimate(1)
        peak = arm["memory"]["peak"] / 1e9 if arm.get("memory") else math.nan
        text.append(
            f"{arm['ms']:>10.4g}{1e3 * e.step:>10.4g}{arm['ms'] / 1e3 / e.step:>8.2f}{peak:>8.1f}{e.memory / 1e9:>8.1f}"
            f"  {arm['name']}"
        )
    return "\n".join(
        [*text, "", "Assumed: " + ", ".join(f"{f.name}={getattr(given, f.name):g}" for f in fields(given))]
    )


def _time(seconds: float) -> str:
    if seconds == 0:
        return "-"
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _span(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.1f} min"
    return f"{hours:.1f} h" if hours < 48 else f"{hours / 24:.1f} d"
