"""What a run will take, computed before it starts: parameters, FLOPs, memory, disk, batch, steps and time.

Everything is counted on the meta device, without data, GPU or network. ``plan`` returns plain values with stable keys:

    run               scale, backbone, dlr, optimizer, precision, data, dir
    vocabulary        size; assumed (true if the tokenizer will decide it)
    parameters        total; trainable; folded (of the deployed model)
    flops_per_token   forward and backward, see ``flops_per_token``; flops_total for all steps
    memory            bytes on one GPU, for eager code, see ``models.memory``; total is the peak
    disk              checkpoint: its bytes; to write it, all ranks together pin as many bytes of host memory.
                      run: the most bytes on the disk at any time, reached while a checkpoint is being written
    batch             ranks, shards (of a copy of the state), global_batch, micro_batch, auto (whether it is the largest
                      that the plan fits into the memory of ``speed.gpu``), micro_batches (per rank and update),
                      seq_len, positions
    steps             updates; warmup_steps; tokens of the whole run, padding included
    evaluations       count; tokens of each at most; share (of the FLOPs of training, forward alone, without padding)
    speed             gpu, and estimates on it: mfu, tokens_per_second, hours, and waiting: the seconds of an update in
                      which a GPU waits for others, on top of hours; null in fp32
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial

import numpy as np
import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.tree import GPUS_A_NODE
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.flops import PEAK_FLOPS, by_depth, flops_per_token, parameter_counts
from dlr_pretrain.models.layer import ALIGNMENT
from dlr_pretrain.models.llama import build_model
from dlr_pretrain.models.memory import USABLE_SHARE, Memory, memory
from dlr_pretrain.models.residual import strengths
from dlr_pretrain.optim.optimizer import checkpoint_bytes, state_bytes
from dlr_pretrain.util.tensors import STATE_DTYPE, WORKING_DTYPE
from dlr_pretrain.util.text import amount, fill, plural

GPU = "NVIDIA H100 80GB HBM3"  # the GPU of the paper's measurements, for which the speed is estimated
GPU_BYTES = 80e9
# Utilisation (MFU): what the paper's number for CoLA + DLR at 1b implies, and what our step with CoLA has reached on an
# H100 (benchmarks/gpu.md) at 60m and at 1b, by their hidden sizes.
LEAST_MFU, MFU_AT_60M, MFU_AT_1B = 0.11, 0.21, 0.40
# Seconds in which that H100's host launches a block's work for a micro-batch: on one GPU, at 60m (one graph) and 1b.
# For FSDP they grow with its launches on stand-in ranks, and its own code comes on top (benchmarks/README.md). With few
# sequences the host takes longer than the GPU.
HOST_SECONDS = {"ddp": 2.9e-3, "fsdp": 4.6e-3, "hsdp": 5.1e-3}
# Bytes/s per GPU and direction in large collectives: 0.8 of NVLink 4's, and of a network with 400 Gb/s per GPU.
NVLINK, NETWORK = 360e9, 40e9
# Seconds per step within a node and between nodes, from NCCL's own model (tuning.cc, protocol LL128).
RING, TREE = (1.9e-6, 4.0e-6), (1.2e-6, 8.5e-6)
CAUSES = "The lower MFU is what the paper's throughput implies, the higher what our step with CoLA has reached."
# Measured by tests/fakegpu for cola with DLR, with micro-batches of 64 and of 16 sequences.
COMPILED = "compiled code takes less, for example 0.75 of the peak at 60m and 0.82 at 1b"


def utilisations(cfg: Config, flops: float, ranks: int = 1) -> tuple[float, float]:
    """The least and the most utilisation to expect on ``ranks`` GPUs, for a model of ``flops`` per token.

    Between the measured sizes the most is interpolated. With train.micro_batch=auto a GPU's share of the batch counts
    as one micro-batch.
    """
    rows, micro_batch = cfg.train.global_batch // ranks, cfg.train.micro_batch
    micro_batches = 1 if micro_batch == "auto" else rows // cfg.micro_batch(ranks)
    host_seconds = HOST_SECONDS[cfg.parallel.name] * cfg.scale.num_layers * micro_batches
    by_host = flops * rows * cfg.train.seq_len / (host_seconds * PEAK_FLOPS[GPU])
    by_gpu = float(np.interp(cfg.scale.hidden_size, (512, 2048), (MFU_AT_60M, MFU_AT_1B)))
    most = float(f"{min(by_gpu, by_host):.2g}")
    return min(LEAST_MFU, most), most


def plan(cfg: Config, ranks: int, mfu: float | None = None) -> dict:
    """The plan of ``cfg`` on ``ranks`` GPUs, as described above; its speed at ``mfu`` or at ``utilisations``."""
    vocab_size = cfg.planned_vocab_size
    auto, rows = cfg.train.micro_batch == "auto" and cfg.device != "cpu", cfg.train.global_batch // ranks

    def with_rows(micro_batch: int) -> Config:
        return replace(cfg, train=replace(cfg.train, micro_batch=micro_batch))

    @cache
    def memory_of(micro_batch: int) -> Memory:
        return memory(with_rows(micro_batch), vocab_size, ranks, state_bytes)

    if auto:
        some, room = cfg.micro_batch(ranks), USABLE_SHARE * GPU_BYTES
        each = memory_of(some).activations / some  # more would exceed the room by the activations alone
        sizes = (size for size in range(rows, 0, -1) if rows % size == 0 and size * each <= room)
        fits = next((size for size in sizes if memory_of(size).total <= room), 0)
        auto, cfg = fits > 0, with_rows(fits) if fits else cfg
    batch, micro_batch = cfg.train.global_batch, cfg.micro_batch(ranks)
    positions = batch * cfg.train.seq_len
    tokens, evaluations = cfg.train.steps * positions, -(-cfg.train.steps // cfg.eval.every)
    flops = flops_per_token(cfg, vocab_size, micro_batch)
    shares = dict.fromkeys(utilisations(cfg, flops, ranks)) if mfu is None else [mfu]
    groups, text = ("scale", "backbone", "dlr", "optimizer", "precision"), cfg.data.root or cfg.data.source
    return {
        "run": {group: getattr(cfg, group).name for group in groups} | {"data": text, "dir": cfg.run.dir},
        "vocabulary": {"size": vocab_size, "assumed": cfg.scale.vocab_size is None},
        "parameters": parameters(cfg, vocab_size),
        "flops_per_token": flops,
        "flops_total": flops * tokens,
        "memory": asdict(memory_of(micro_batch)),
        "disk": disk_bytes(cfg, vocab_size),
        "batch": {
            "ranks": ranks,
            "shards": cfg.shards(ranks),
            "global_batch": batch,
            "micro_batch": micro_batch,
            "auto": auto,
            "micro_batches": batch // ranks // micro_batch,
            "seq_len": cfg.train.seq_len,
            "positions": positions,
        },
        "steps": cfg.train.steps,
        "warmup_steps": cfg.warmup_steps,
        "tokens": tokens,
        "evaluations": {
            "count": evaluations,
            "tokens": cfg.eval.tokens,
            "share": evaluations * cfg.eval.tokens / (3 * tokens),
        },
        "speed": _speed(cfg, vocab_size, ranks, flops, shares),
    }


def parameters(cfg: Config, vocab_size: int) -> dict[str, int]:
    """Numbers of parameters: of the model, the trained ones, and of the deployed model."""
    return parameter_counts(cfg, build_model(cfg, vocab_size, torch.device("meta")))


def state_and_moments(cfg: Config, vocab_size: int, alignment: int = ALIGNMENT) -> int:
    """Bytes of a checkpoint: the values and the optimizer's state. ``alignment`` 1 leaves padding out."""

    def count(shallow: Config) -> dict[str, int]:
        model = build_model(shallow, vocab_size, torch.device("meta"), STATE_DTYPE[cfg.precision.name], True, alignment)
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
        state = dict(model.named_parameters()) | dict(model.named_buffers())
        state |= strengths(model, cfg.dlr, like=model.lm_head.weight)
        return {"bytes": checkpoint_bytes(cfg.optimizer, state, trained, partial(split, model))}

    return by_depth(count, cfg)["bytes"]


def disk_bytes(cfg: Config, vocab_size: int) -> dict[str, int]:
    """Bytes of one checkpoint, and of the folded model with all checkpoints that exist at the same time."""
    keep, steps, checkpoint = cfg.checkpoint, cfg.train.steps, state_and_moments(cfg, vocab_size)
    count = keep.keep_last + 1 + (steps // keep.keep_every if keep.keep_every else 0)
    folded = parameters(cfg, vocab_size)["folded"] * STATE_DTYPE[cfg.precision.name].itemsize
    return {"checkpoint": checkpoint, "run": min(count, -(-steps // keep.every) + 1) * checkpoint + folded}


def _speed(cfg: Config, vocab_size: int, gpus: int, flops: float, shares: Iterable[float]) -> dict | None:
    """Tokens/s of all GPUs and hours of the whole run, from FLOPs and utilisation alone, and the waiting."""
    if WORKING_DTYPE[cfg.precision.name] != torch.bfloat16:  # the known peaks are of bf16 products
        return None
    estimates, positions = [], cfg.train.global_batch * cfg.train.seq_len
    for mfu in shares:
        rate = gpus * PEAK_FLOPS[GPU] * mfu / flops
        seconds = positions / rate
        waiting = waiting_seconds(cfg, vocab_size, gpus, seconds)
        hours = cfg.train.steps * seconds / 3600
        estimates.append({"mfu": mfu, "tokens_per_second": rate, "hours": hours, "waiting": waiting})
    return {"gpu": GPU, "estimates": estimates}


def waiting_seconds(cfg: Config, vocab_size: int, gpus: int, seconds: float) -> float:
    """An estimate of the seconds in which a GPU waits for others in an update whose arithmetic takes ``seconds``.

    It follows from the bytes, links and steps of the collectives. Those of blocks overlap with the arithmetic, and a
    GPU waits only for the time that they take beyond it. It waits for the whole time that the last ones take: of
    embedding, final norm and head, or under ddp of embedding, final norm and the first block.
    """
    model = build_model(cfg, vocab_size, torch.device("meta"), WORKING_DTYPE[cfg.precision.name])
    block = sum(p.nbytes for p in model.model.layers[0].parameters())
    depth = cfg.scale.num_layers
    rest = sum(p.nbytes for p in model.parameters()) - depth * block
    early = 0 if cfg.scale.tie_embeddings else model.lm_head.weight.nbytes
    last = rest - early + block if cfg.parallel.name == "ddp" else rest
    shards, micro_batches = cfg.shards(gpus), cfg.train.global_batch // gpus // cfg.micro_batch(gpus)

    def gather(size: float) -> float:
        """Seconds of an all-gather or a reduce-scatter: a ring through the ranks that shard the rows."""
        nodes = math.ceil(shards / GPUS_A_NODE)
        link = NVLINK if nodes == 1 else min(NVLINK, GPUS_A_NODE * NETWORK)
        return (shards - nodes) * RING[0] + (nodes - 1) * RING[1] + size * (shards - 1) / shards / link

    def reduce(size: float) -> float:
        """Seconds of an all-reduce of a rank's rows over its copies: a tree of the nodes that hold them."""
        copies, nodes = gpus // shards, math.ceil(gpus / max(shards, GPUS_A_NODE))
        here = math.ceil(copies / nodes)
        link = NVLINK if nodes == 1 else min(NVLINK, here * NETWORK)
        steps = (here - 1) * TREE[0] + math.log2(nodes) * TREE[1]
        return 2 * (steps + size / shards * (copies - 1) / copies / link)

    each = seconds / micro_batches  # a block is gathered once for both passes, and its gradient reduced
    gathering = 2 * gather(rest) + max(0.0, 2 * depth * gather(block) - each)
    return micro_batches * gathering + reduce(last) + max(0.0, depth * reduce(block) - each * 2 / 3)


# ----------------------------------------------------------------------------------------------------
# As text


def render(p: dict) -> str:
    """A plan as text, 80 columns wide."""
    return "\n".join(fill(f"{label:<14}{text}", indent=14) for label, text in _lines(p))


def _time(hours: float) -> str:
    """A time in the largest unit that gives at least 1: 5.2 hours, 1.4 minutes, 0.04 seconds."""
    for unit, number in (("hours", hours), ("minutes", 60 * hours)):
        if number >= 1:
            return f"{number:,.1f} {unit}"
    return f"{3600 * hours:.2g} seconds"


def _lines(p: dict) -> Iterator[tuple[str, str]]:
    run, sizes, batch, speed = p["run"], p["parameters"], p["batch"], p["speed"]
    yield "run", run["dir"]
    choices = f"{run['scale']}, {run['backbone']}, dlr {run['dlr']}, {run['optimizer']}, {run['precision']}"
    assumed = " assumed: the tokenizer's will be used" if p["vocabulary"]["assumed"] else ""
    yield "model", f"{choices}; vocabulary {p['vocabulary']['size']:,}{assumed}"
    trained = f"{sizes['trainable']:,} of {sizes['total']:,} trained"
    yield "parameters", f"{trained}; {sizes['folded']:,} in the folded model"
    flops = f"{p['flops_per_token'] / 1e9:,.3f} GFLOP per token, {p['flops_total']:.2e} FLOP in all"
    yield "arithmetic", f"{flops}, forward and backward"
    factors = " x ".join(str(batch[key]) for key in ("ranks", "micro_batches", "micro_batch", "seq_len"))
    yield "batch", f"{batch['positions']:,} tokens = {factors} (ranks, micro-batches, sequences, length)"
    if (shards := batch["shards"]) > 1:
        yield "state", f"on {batch['ranks'] // shards} x {shards} ranks (copies, shards)"
    steps = f"{p['steps']:,} updates, {p['warmup_steps']:,} of them warm-up"
    yield "steps", f"{steps}; {amount(p['tokens'])} tokens, padding included"
    checkpoint = f"{p['disk']['checkpoint'] / 1e9:.2f} GB per checkpoint, and as much host memory over all ranks"
    yield "disk", f"{checkpoint}; {p['disk']['run'] / 1e9:.2f} GB at most"
    share = (
        "a rank's whole share"
        if batch["micro_batches"] == 1
        else f"the largest that fits into {GPU_BYTES / 1e9:.0f} GB"
    )
    auto = f" ({share})" if batch["auto"] else ""
    size = f"for micro-batches of {batch['micro_batch']}{auto}"
    yield "memory", f"of one GPU in GB, {size}, counted for eager code; {COMPILED}"
    for part, size in p["memory"].items():
        peak = "  the peak: not all are alive at once" if part == "total" else ""
        if size:
            yield "", f"{part:<16}{size / 1e9:8.2f}{peak}"
    if speed is None:
        yield "time", f"not estimated: the known peaks are for bf16 matrix products, not for {run['precision']}"
    else:
        gpus = f"{batch['ranks']} x {speed['gpu']}, {PEAK_FLOPS[speed['gpu']] / 1e12:.0f} TFLOP/s each"
        means, e = "from FLOPs and an assumed utilisation (MFU), without checkpoints and compilation", p["evaluations"]
        means += f"; {plural(e['count'], 'evaluation')} of {amount(e['tokens'])} tokens add {e['share']:.1%} or more"
        means += "; the estimated waiting for other GPUs comes on top" if batch["ranks"] > 1 else ""
        yield "time", f"on {gpus}, {means}"
        for e in speed["estimates"]:
            share = e["waiting"] * e["tokens_per_second"] / batch["positions"]
            waiting = f"  +{share:.0%} waiting" if share >= 0.005 else ""
            yield "", f"MFU {e['mfu']:<5.3g} {e['tokens_per_second']:>12,.0f} tokens/s {_time(e['hours']):>16}{waiting}"
        if len(speed["estimates"]) > 1:
            yield "", CAUSES
