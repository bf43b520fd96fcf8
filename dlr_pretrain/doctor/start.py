"""Checks that do once what a run does first, on all ranks together: data, an all-reduce, a step, a checkpoint."""

from __future__ import annotations

import math
import os
import socket
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from dlr_pretrain.analysis.memory import peak_bytes
from dlr_pretrain.analysis.plan import disk
from dlr_pretrain.config import Config
from dlr_pretrain.data import TrainLoader, embedding_rows, open_source, open_tokenizer
from dlr_pretrain.doctor import machine
from dlr_pretrain.doctor.checks import Found, in_child
from dlr_pretrain.doctor.machine import gigabytes
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.memory import largest_that_fits
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.trial import noise, trial, trial_loop
from dlr_pretrain.util import sharded
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import available_memory, peak_memory

REDUCED = 256 << 20  # bytes of the all-reduce
SLOW_NETWORK = 10e9  # bytes/s of a ring below which GPUs talk by sockets
WHOLE = 1e9  # bytes of the largest checkpoint that is written whole
HEAD_STD = 0.02  # of a new head's weights; on normed states its logits are normal with this times sqrt(width)


def vocabulary(cfg: Config) -> int:
    """Rows of the embedding; the plan's assumption if the tokenizer cannot be read, which the data check reports."""
    if cfg.scale.vocab_size is not None:
        return cfg.scale.vocab_size
    try:
        return embedding_rows(cfg, open_tokenizer(cfg, open_source(cfg)))
    except UserError:
        return cfg.planned_vocab_size


def disk_of_run(cfg: Config) -> Found:
    sizes = disk(cfg, vocabulary(cfg))
    return machine.disk(cfg, sizes["run"], sizes["checkpoint"])


def data(cfg: Config, ranks: Ranks) -> Found:
    """The source, the tokenizer and this rank's first batch, with some of its text."""
    began = time.perf_counter()
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    embedding_rows(cfg, tokenizer)
    batch = next(TrainLoader(cfg, source, tokenizer, ranks.rank, ranks.world_size, None))
    row = batch.tokens[0, : int(batch.lengths[0])].tolist()
    unknown = source.unknown_share(tokenizer)
    sample = " ".join(tokenizer.decode(row).split())[:48]
    text = (
        f'{source.describe()}; first batch in {time.perf_counter() - began:.1f} s: "{sample}..." '
        f"(vocabulary {tokenizer.vocab_size:,}; data {source.fingerprint[:8]}, tokenizer {tokenizer.fingerprint[:8]})"
    )
    wrong = f"it cannot express {unknown:.0%} of the text, so the tokenizer is of other text: look at tokenizer.path"
    return Found(text, wrong if unknown > 0.02 else "")


def collectives(ranks: Ranks, seconds: float) -> Found:
    """An all-reduce over all ranks and its bandwidth, in a child of each rank, because NCCL may hang."""
    world = ranks.world_size
    if world == 1:
        return Found("one rank, nothing to reduce; start this by torchrun to try more")
    with socket.socket() as free:
        free.bind(("", 0))
        port = ranks.on_main(lambda: free.getsockname()[1])
    meeting = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
    return in_child(partial(_all_reduce, meeting, ranks.rank, world, ranks.device), seconds, "spawn")


def _all_reduce(meeting: str, rank: int, world: int, device: torch.device) -> Found:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    size = REDUCED if device.type == "cuda" else REDUCED // 4
    tensor, times = torch.empty(size // 4, device=device), []
    for _ in range(6):
        tensor.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    if not bool((tensor == world).all()):
        raise UserError(f"an all-reduce of ones over {world} ranks is not {world} everywhere. Look at the driver")
    rate = 2 * (world - 1) / world * tensor.nbytes / median(times[1:])
    text = (
        f"all-reduce of {tensor.nbytes / 1e6:.0f} MB over {world} ranks by {backend}: {rate / 1e9:.2f} GB/s of a ring"
    )
    fix = "NCCL_DEBUG=INFO says which links it found: NVLink within a node, and InfiniBand rather than sockets"
    return Found(text, fix if backend == "nccl" and rate < SLOW_NETWORK else "")


def step(cfg: Config, ranks: Ranks) -> Found:
    """Two updates of at most two micro-batches: the first loss, and the peak memory against the plan."""
    vocab_size = vocabulary(cfg)
    ranks.use_device()
    with suppress(OSError):  # the peak of the process is then that of this check
        Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    auto = cfg.train.micro_batch == "auto"
    rows = largest_that_fits(cfg, ranks, vocab_size, peak_bytes) if auto else cfg.micro_batch(ranks.world_size)
    few = min(2, cfg.train.global_batch // ranks.world_size // rows)
    train = replace(cfg.train, global_batch=ranks.world_size * rows * few, micro_batch=rows)
    short = replace(cfg, train=train)
    planned = peak_bytes(short, vocab_size, ranks.world_size)
    updates, batch = trial(short, ranks, vocab_size), noise(short, ranks, vocab_size)
    losses, times = [], []
    try:
        for index in range(2):
            ranks.gather(None)
            began = time.perf_counter()
            losses.append(updates(batch, index, cfg.train.lr)[0].item())
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"out of GPU memory with {rows} sequences at once; the plan says {gigabytes(planned)}. "
            "Use train.micro_batch=auto, or train.activation_checkpointing=latent"
        ) from error
    on_gpu = ranks.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory() - before
    whole = torch.cuda.mem_get_info()[1] if on_gpu else before + available_memory()
    uniform = math.log(vocab_size) + HEAD_STD**2 * cfg.scale.hidden_size / 2  # the mean for normal logits
    text = (
        f"{few} x {rows} x {cfg.train.seq_len} tokens in {times[1]:.2f} s (the first in {times[0]:.1f} s); "
        f"loss {losses[0]:.2f}, of a new model {uniform:.2f}; "
        f"peak {gigabytes(peak)}{'' if on_gpu else ' more in the process'}, planned {gigabytes(planned)}"
    )
    if not abs(losses[0] - uniform) < 1:
        raise UserError(f"{text}. A new model knows nothing: look at the precision and the kernels")
    tight = peak > 0.95 * whole or (on_gpu and peak > 1.1 * planned)
    return Found(text, "Use train.micro_batch=auto, or a smaller one" if tight else "")


def saved_and_read(cfg: Config, ranks: Ranks, scratch: Path | None) -> Found:
    """A checkpoint on the run's disk, read back bit for bit; of a model of one block if a whole one would be large."""
    if scratch is None:
        raise UserError(f"{cfg.run.dir}: nothing can be written there. Set run.root to another disk")
    vocab_size = vocabulary(cfg)
    layers = cfg.scale.num_layers if disk(cfg, vocab_size)["checkpoint"] <= WHOLE else 1
    train = replace(cfg.train, global_batch=ranks.world_size, micro_batch=1, seq_len=min(cfg.train.seq_len, 32))
    short = replace(cfg, train=train, scale=replace(cfg.scale, num_layers=layers), compile=False)
    ranks.use_device()
    loop = trial_loop(short, ranks, vocab_size, scratch)
    loop.update(noise(short, ranks, vocab_size), 0, cfg.train.lr)
    loop.step = 1
    state = loop.snapshot()
    began = time.perf_counter()
    with loop.saver:
        loop.save(final=True)
    seconds = time.perf_counter() - began
    folder, damaged = checkpoint.newest(scratch / "checkpoints")
    if folder is None:
        raise UserError(f"what was written is not valid: {'; '.join(damaged.values())}. Look at the disk")
    found = checkpoint.load(folder)
    pairs = [(name, tensor, found.model[name]) for name, tensor in state.model.items()]
    pairs += [(name, tensor, found.optimizer[name]) for name, tensor in state.optimizer.items()]
    differ = [name for name, tensor, stored in pairs if not _equal(tensor, stored)]
    found.close()
    ranks.gather(None)  # wait until all ranks have read
    if differ:
        raise UserError(f"{len(differ)} tensors are not read as they were written, {differ[0]} first. Look at the disk")
    written = sum(file.stat().st_size for file in folder.iterdir())
    part = "" if layers == cfg.scale.num_layers else " (of one block)"
    return Found(
        f"{gigabytes(written)}{part} written in {seconds:.1f} s and read: {len(pairs)} tensors equal bit for bit"
    )


def _equal(tensor: torch.Tensor, stored: checkpoint.Stored) -> bool:
    return torch.equal(sharded.local_rows(tensor).detach().cpu(), sharded.own_part(tensor, stored).cpu())
