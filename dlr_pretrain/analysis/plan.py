"""What a run will take, computed before it starts: parameters, arithmetic, memory, batch, tokens and schedule.

Everything is counted on the meta device, without data, GPU or network. ``plan`` returns plain values with stable keys:

    run               scale, backbone, dlr, optimizer, precision, data, dir
    vocabulary        size; assumed (true if the tokenizer will decide it)
    parameters        total; trainable; folded (of the model that is deployed)
    flops_per_token   forward and backward, see ``flops``; flops_total for all steps
    memory            bytes on one GPU, see ``memory.Memory``: weights, masters, gradients, optimizer_state,
                      activations, temporaries, total (the peak)
    disk              checkpoint, in bytes; run: bytes of all that it keeps at a time, with a checkpoint being written
    paper_memory      bytes as the DLR paper estimates them: weights (2 each), optimizer_state (in bf16), indices, total
    batch             ranks, global_batch, micro_batch, micro_batches (of a rank, an update), seq_len, positions
    steps             updates; warmup_steps
    tokens            positions of the whole run; paper_budget at this scale, and budget_steps, its updates (or null)
    schedule          update (from 0) and lr, at the corners of the schedule and between them
    restart_every     updates between restarts of the rate (or null)
    probe             if gradient paths are probed (else null): projections; every, the updates between two looks
    resume            if the data are gzipped text (else null): streams of a rank; bytes and seconds that it takes at
                      most to find the place in them again, for shards of C4's size
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch

from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.analysis.table1 import counts, token_budget
from dlr_pretrain.config import Config
from dlr_pretrain.config.probing import probed
from dlr_pretrain.models.dlr import learned_strengths
from dlr_pretrain.models.flops import flops_per_token
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.models.llama import backbone, build
from dlr_pretrain.models.precision import STATE_DTYPE
from dlr_pretrain.optim.build import state_bytes
from dlr_pretrain.optim.schedule import rate, restarts
from dlr_pretrain.util.text import fill

SHARD_BYTES = 319_000_000  # one gzipped shard of the 1,024 of C4's en
SEEK_RATE = 80e6  # gzipped bytes a second that a core decompresses without parsing: scripts/benchmark.py data


def plan(cfg: Config, ranks: int) -> dict:
    """The plan of ``cfg`` on ``ranks`` GPUs, as described above."""
    vocab_size = cfg.planned_vocab_size
    batch = _batch(cfg, ranks)
    positions = cfg.train.steps * batch["positions"]
    flops = flops_per_token(cfg, vocab_size, batch["micro_batch"])
    budget = token_budget(cfg.scale.name)
    of = counts(cfg, vocab_size)
    paper = {"weights": of.weight_bytes, "optimizer_state": of.state, "indices": of.index_bytes}
    groups = ("scale", "backbone", "dlr", "optimizer", "precision")
    return {
        "run": {group: getattr(cfg, group).name for group in groups} | {"data": cfg.data.source, "dir": cfg.run.dir},
        "vocabulary": {"size": vocab_size, "assumed": cfg.scale.vocab_size is None},
        "parameters": {"total": of.total, "trainable": of.trained, "folded": folded_parameters(cfg, vocab_size)},
        "flops_per_token": flops,
        "flops_total": flops * positions,
        "memory": asdict(memory(cfg, vocab_size, ranks)),
        "disk": disk(cfg, vocab_size),
        "paper_memory": paper | {"total": sum(paper.values())},
        "batch": batch,
        "steps": cfg.train.steps,
        "warmup_steps": cfg.warmup_steps,
        "tokens": {
            "positions": positions,
            "paper_budget": budget,
            "budget_steps": budget and round(budget / batch["positions"]),
        },
        "schedule": [{"update": update, "lr": rate(cfg, update)} for update in _corners(cfg)],
        "restart_every": (restarts(cfg) or [None])[0],
        "probe": {"projections": probed(cfg), "every": cfg.probe.every} if cfg.probe.enabled else None,
        "resume": _resume(cfg, ranks),
    }


def folded_parameters(cfg: Config, vocab_size: int) -> int:
    """Parameters of the deployed model, without the learned strengths of residuals.

    A backbone that is deployed dense counts as the dense model.
    """
    if backbone(cfg).deployed_dense:
        cfg = replace(cfg, backbone=DENSE, dlr=replace(cfg.dlr, enabled=False))
    model = build(cfg, vocab_size, torch.device("meta"))
    return sum(p.numel() for p in model.parameters()) - len(learned_strengths(model))


def disk(cfg: Config, vocab_size: int) -> dict[str, int]:
    """Bytes of one checkpoint, and of all checkpoints that exist at a time, with the folded model."""
    model = build(cfg, vocab_size, torch.device("meta"), STATE_DTYPE[cfg.precision.name])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    checkpoint = weights + state_bytes(cfg.optimizer, trained)
    keep, steps = cfg.checkpoint, cfg.train.steps
    count = keep.keep_last + 1 + keep.keep_best + (steps // keep.keep_every if keep.keep_every else 0)
    folded = folded_parameters(cfg, vocab_size) * STATE_DTYPE[cfg.precision.name].itemsize
    return {"checkpoint": checkpoint, "run": min(count, -(-steps // keep.every) + 1) * checkpoint + folded}


def _batch(cfg: Config, ranks: int) -> dict[str, int]:
    batch, micro_batch = cfg.train.global_batch, cfg.micro_batch(ranks)
    return {
        "ranks": ranks,
        "global_batch": batch,
        "micro_batch": micro_batch,
        "micro_batches": batch // ranks // micro_batch,
        "seq_len": cfg.train.seq_len,
        "positions": batch * cfg.train.seq_len,
    }


def _resume(cfg: Config, ranks: int) -> dict[str, float] | None:
    """The cost of a resume in gzipped text, at most: each stream decompresses its shard up to its position."""
    if cfg.data.source not in ("c4", "c4_local") or not cfg.data.train_files.endswith(".gz"):
        return None
    streams = cfg.num_streams // ranks
    return {"streams": streams, "bytes": streams * SHARD_BYTES, "seconds": streams * SHARD_BYTES / SEEK_RATE}


def _corners(cfg: Config) -> list[int]:
    """The updates that show the schedule's shape. All but the last avoid the rise after a restart."""
    steps, warmup = cfg.train.steps, cfg.warmup_steps
    every, rise = restarts(cfg) or (steps, 0)
    falls = steps if cfg.own_schedule else steps - cfg.lr_decay_steps
    corners = (0, warmup // 2, warmup, (warmup + steps) // 2, falls)
    risen = (t + max(0, rise - t % every) if t >= every else t for t in corners)
    return sorted({*(t for t in risen if t < steps), steps - 1})


# ----------------------------------------------------------------------------------------------------
# Showing


def render(p: dict) -> str:
    """A plan as text of 80 columns."""
    return "\n".join(fill(f"{label:<14}{text}", indent=14) for label, text in _lines(p))


def _lines(p: dict) -> Iterator[tuple[str, str]]:
    run, sizes, batch, tokens = p["run"], p["parameters"], p["batch"], p["tokens"]
    yield "run", run["dir"]
    choices = f"{run['scale']}, {run['backbone']}, dlr {run['dlr']}, {run['optimizer']}, {run['precision']}"
    assumed = " assumed: the tokenizer's will be taken" if p["vocabulary"]["assumed"] else ""
    yield "model", f"{choices}; vocabulary {p['vocabulary']['size']:,}{assumed}"
    frozen = "" if sizes["total"] == sizes["trainable"] else f" of {sizes['total']:,}"
    yield "parameters", f"{sizes['trainable']:,}{frozen} trained; {sizes['folded']:,} in the folded model"
    flops = f"{p['flops_per_token'] / 1e9:,.3f} GFLOP a position, {p['flops_total']:.2e} FLOP in all"
    yield "arithmetic", f"{flops}, forward and backward"
    factors = " x ".join(str(batch[key]) for key in ("ranks", "micro_batches", "micro_batch", "seq_len"))
    yield "batch", f"{batch['positions']:,} positions = {factors} (ranks, micro-batches, sequences, length)"
    yield "steps", f"{p['steps']:,} updates, {tokens['positions'] / 1e9:,.2f}B positions"
    if tokens["paper_budget"]:
        yield "", f"the paper's table says {tokens['paper_budget'] / 1e9:g}B tokens: {tokens['budget_steps']:,} updates"
    anew = f"; anew every {p['restart_every']:,} updates" if p["restart_every"] else ""
    yield "learning rate", ", ".join(f"{point['lr']:.3g} at {point['update']:,}" for point in p["schedule"]) + anew
    if probe := p["probe"]:
        names = ", ".join(probe["projections"][:7]) + (", ..." if len(probe["projections"]) > 7 else "")
        looked = f"{len(probe['projections'])} projections before update 1, 2, 4, 11, ... and after every"
        yield "probe", f"{looked} {probe['every']:,}: {names}"
    if resume := p["resume"]:
        streams, minutes, fetched = resume["streams"], resume["seconds"] / 60, resume["bytes"] / 1e9
        passed = f"{streams} shards of {SHARD_BYTES / 1e6:.0f} MB (as C4's) at {SEEK_RATE / 1e6:.0f} MB/s"
        yield "resume", f"the data take a rank up to {minutes:.1f} min of one core, shared by those it has: {passed}"
        if run["data"] == "c4":
            yield "", f"and {fetched:,.1f} GB are fetched for it, where data.cache does not hold them"
        yield "", "data=tokens resumes at once"
    sizes = p["disk"]
    yield (
        "disk",
        f"{sizes['checkpoint'] / 1e9:.2f} GB a checkpoint, {sizes['run'] / 1e9:.2f} GB for what is kept at a time",
    )
    yield "memory", "of one GPU, in GB, as eager code allocates it; torch.compile needs less"
    labels = {"optimizer_state": "optimizer", "total": "peak"}
    notes = {
        "activations": "kept for the backward pass of a micro-batch",
        "temporaries": "beside them at the peak of a micro-batch",
        "total": "not the sum: not all are alive at once",
    }
    for part, size in p["memory"].items():
        if size:
            yield "", f"{labels.get(part, part):<12}{size / 1e9:8.2f}  {notes.get(part, '')}".rstrip()
    paper = p["paper_memory"]
    indices = f" + {paper['indices'] / 1e9:.2f} indices" if paper["indices"] > 5e6 else ""
    yield (
        "",
        f"by the paper's convention {paper['total'] / 1e9:.2f}: {paper['weights'] / 1e9:.2f} weights + "
        f"{paper['optimizer_state'] / 1e9:.2f} optimizer{indices}",
    )
