"""Checks that do once what a run does first, outside its directory: disk, data, collectives, a step, a checkpoint."""

from __future__ import annotations

import errno
import math
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from dlr_pretrain.analysis.memory import peak_bytes
from dlr_pretrain.analysis.plan import disk
from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, TrainLoader, open_source, open_tokenizer
from dlr_pretrain.doctor.checks import FAIL, OK, WARN, Outcome
from dlr_pretrain.doctor.machine import existing, file_system
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Keep
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.descent import Descent
from dlr_pretrain.train.memory import largest_that_fits
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.trainer import Trainer
from dlr_pretrain.train.trial import noise, trial
from dlr_pretrain.util import sharded
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import sync
from dlr_pretrain.util.process import available_memory, peak_memory, resident_memory

WRITTEN = 64 << 20  # bytes that the disk test writes, at most
BLOCK = os.urandom(1 << 20)
SLOW_DISK = 100e6  # bytes/s below which the disk check warns
ADAPTER = 50.0  # GB/s of one NDR InfiniBand adapter (400 Gbit/s), which each GPU of a usual node has
REDUCED = 64 << 20  # bytes of the all-reduce test; four times as many on a GPU
SAVED = 1e9  # bytes of the largest checkpoint that the test writes whole
HEAD_STD = 0.02  # of a new head's weights; on normed states its logits are normal with this times sqrt(width)


def amount(size: float) -> str:
    """A number of bytes as text: 12 MB, 1.2 GB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.0f} MB"


def room_of(cfg: Config) -> Path:
    """The nearest folder above ``run.dir`` that exists; never the run directory itself."""
    return existing(Path(cfg.run.dir).absolute().parent)


def vocabulary(cfg: Config) -> int:
    """Rows of the embedding; the plan's assumption if the tokenizer cannot be read, which the data check reports."""
    if cfg.scale.vocab_size is not None:
        return cfg.scale.vocab_size
    try:
        return open_tokenizer(cfg, open_source(cfg)).vocab_size
    except UserError:
        return cfg.planned_vocab_size


def disk_of_the_run(cfg: Config, scratch: Path | None) -> Outcome:
    """Check writing, fsync and renaming on the run's disk, and its free space against what the run will keep."""
    above, sizes = room_of(cfg), disk(cfg, vocabulary(cfg))
    run_dir = Path(cfg.run.dir)
    kept = run_dir / "checkpoints"
    held = sum(f.stat().st_size for f in kept.rglob("*") if f.is_file()) if kept.is_dir() else 0
    usage = shutil.disk_usage(run_dir if run_dir.is_dir() else above)
    text = f"{above} ({file_system(above)}): {amount(usage.free)} free"
    needs = f"the run keeps {amount(sizes['run'])}, of checkpoints of {amount(sizes['checkpoint'])} each"
    fix = "Set run.root to another disk, or keep less (checkpoint.keep_last, checkpoint.keep_every)"
    if scratch is None:
        return Outcome(FAIL, f"{text}, and nothing can be written there; {needs}", fix)
    blocks = min(WRITTEN, max(len(BLOCK), usage.free // 2)) // len(BLOCK)
    began = time.perf_counter()
    path = scratch / "written"
    try:
        with path.open("wb", buffering=0) as file:
            for _ in range(blocks):
                if file.write(BLOCK) != len(BLOCK):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(file.fileno())
        path.rename(scratch / "renamed")
        sync(scratch)
    except OSError as error:
        return Outcome(FAIL, f"{text}, and writing fails: {error.strerror}; {needs}", fix)
    finally:
        for name in ("written", "renamed"):
            (scratch / name).unlink(missing_ok=True)
    rate = blocks * len(BLOCK) / (time.perf_counter() - began)
    text += f", {rate / 1e6:.0f} MB/s with fsync; {needs}"
    if usage.free + held < sizes["run"]:
        return Outcome(FAIL, text, fix)
    if rate < SLOW_DISK:
        return Outcome(WARN, text, f"A save takes {sizes['checkpoint'] / rate:.0f} s: the run goes on meanwhile")
    return Outcome(OK, text)


def data(cfg: Config, rank: int, ranks: int) -> Outcome:
    """Check the source, the tokenizer and this rank's first batch, and show some of its text."""
    began = time.perf_counter()
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    if cfg.scale.vocab_size is not None and tokenizer.vocab_size > cfg.scale.vocab_size:
        rule = f"{tokenizer.path}: {tokenizer.vocab_size} pieces, and scale.vocab_size={cfg.scale.vocab_size}"
        return Outcome(FAIL, rule, f"Set scale.vocab_size={tokenizer.vocab_size} or more")
    loader = TrainLoader(cfg, source, tokenizer, rank, ranks, None)
    batch = next(loader)
    row = batch.tokens[0, : int(batch.lengths[0])].tolist()
    unknown = row.count(tokenizer.unk_id) / len(row)
    sample = " ".join(tokenizer.decode(row).split())[:48]
    prints = f"data {source.fingerprint[:8]}, tokenizer {tokenizer.fingerprint[:8]}"
    took = time.perf_counter() - began
    text = (
        f'{source.describe()}; first batch in {took:.1f} s: "{sample}..." ({tokenizer.vocab_size:,} pieces; {prints})'
    )
    if unknown > 0.02:
        fix = "The tokenizer is of other text: look at tokenizer.path"
        return Outcome(WARN, f"{text}; {unknown:.0%} of its tokens are unknown", fix)
    return Outcome(OK, text)


# ----------------------------------------------------------------------------------------------------
# Ranks


def collectives(cfg: Config) -> Outcome:
    """Check an all-reduce over all ranks and measure its bandwidth."""
    with Runtime(cfg) as runtime:
        world = runtime.world_size
        if world == 1:
            return Outcome(OK, "one rank, nothing to reduce; start this by torchrun to try more")
        runtime.use_device()
        on_gpu = runtime.device.type == "cuda"
        tensor = torch.ones(REDUCED * (4 if on_gpu else 1) // 4, device=runtime.device)
        seconds = []
        for _ in range(6):
            tensor.fill_(1.0)
            runtime.gather(None)
            began = time.perf_counter()
            dist.all_reduce(tensor)
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        if not bool((tensor == world).all()):
            return Outcome(FAIL, f"an all-reduce of ones over {world} ranks is not {world} everywhere")
        rate = 2 * (world - 1) / world * tensor.nbytes / median(seconds[1:]) / 1e9
        backend = "NCCL" if on_gpu else "gloo"
        text = f"all-reduce of {tensor.nbytes / 1e6:.0f} MB over {world} ranks by {backend}: {rate:.2f} GB/s of a ring"
        if on_gpu and rate < ADAPTER:
            fix = "NCCL_DEBUG=INFO says which links it found: NVLink within a node, and IB rather than sockets"
            return Outcome(WARN, f"{text}, less than one adapter's {ADAPTER:g}", fix)
        return Outcome(OK, text)


def step(cfg: Config) -> Outcome:
    """Make two updates of at most two micro-batches, and check the first loss and the peak memory against the plan."""
    vocab_size, before = vocabulary(cfg), resident_memory()
    with Runtime(cfg) as runtime:
        runtime.use_device()
        auto = cfg.train.micro_batch == "auto"
        rows = largest_that_fits(cfg, runtime, vocab_size, peak_bytes) if auto else cfg.micro_batch(runtime.world_size)
        share = cfg.train.global_batch // runtime.world_size
        few = min(2, share // rows)
        train = replace(cfg.train, global_batch=runtime.world_size * rows * few, micro_batch=rows)
        short = replace(cfg, train=train)
        planned = peak_bytes(short, vocab_size, runtime.world_size)
        updates = trial(short, runtime, vocab_size)
        batch = noise(short, runtime, vocab_size)
        try:
            (first, loss), (second, _) = (_timed(updates, batch, index) for index in range(2))
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"out of GPU memory with {rows} sequences at once; the plan says {amount(planned)}. "
                "Use train.micro_batch=auto, or train.activation_checkpointing=latent"
            ) from error
        on_gpu = runtime.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if on_gpu else peak_memory() - before
        whole = torch.cuda.mem_get_info()[1] if on_gpu else before + available_memory()
    uniform = math.log(vocab_size) + HEAD_STD**2 * cfg.scale.hidden_size / 2  # the mean for normal logits
    whole_update = f", a whole update about {second / few * (share // rows):.3g} s" if share // rows > few else ""
    text = (
        f"{'train.micro_batch=auto: ' if auto else ''}{few} x {rows} x {cfg.train.seq_len} positions in {second:.2f} s "
        f"(the first in {first:.1f} s){whole_update}; loss {loss:.2f}, of a new model {uniform:.2f}; "
        f"peak {amount(peak)}{'' if on_gpu else ' more in the process'}, planned {amount(planned)}"
    )
    if not abs(loss - uniform) < 1:
        return Outcome(FAIL, text, "A new model knows nothing: look at the precision and the kernels")
    if peak > 0.95 * whole or (on_gpu and peak > 1.1 * planned):
        return Outcome(WARN, f"{text}; of {amount(whole)}", "Use train.micro_batch=auto, or a smaller one")
    return Outcome(OK, text)


def _timed(updates: Descent, batch: Batch, index: int) -> tuple[float, float]:
    """Seconds of one update, and its loss."""
    updates.runtime.gather(None)
    began = time.perf_counter()
    loss = updates.update(batch, index, updates.cfg.train.lr)[0].item()
    return time.perf_counter() - began, loss


def saved_and_read(cfg: Config, scratch: Path | None) -> Outcome:
    """Check that a checkpoint on the run's disk is read back bit for bit; of one block if it would be large."""
    if scratch is None:
        raise UserError(f"{room_of(cfg)}: nothing can be written there. Set run.root to another disk")
    vocab_size, depth = vocabulary(cfg), cfg.scale.num_layers
    size = disk(cfg, vocab_size)["checkpoint"]
    layers = depth if size <= SAVED else 1
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    train = replace(cfg.train, global_batch=ranks, micro_batch=1, seq_len=min(cfg.train.seq_len, 32))
    short = replace(cfg, train=train, scale=replace(cfg.scale, num_layers=layers), compile=False)
    with Runtime(short) as runtime:
        runtime.use_device()
        with Saver(scratch / "checkpoints", runtime, Keep(1)) as saver:
            updates, console = trial(short, runtime, vocab_size), Console(short, False)
            trainer = Trainer(short, runtime, updates, lambda *_: {}, console, lambda _: None, saver, None)
            trainer.descent.update(noise(short, runtime, vocab_size), 0, cfg.train.lr)
            trainer.step = 1
            began = time.perf_counter()
            trainer.checkpoint(None, wait=True)
            wrote = time.perf_counter() - began
        folder, skipped = checkpoint.newest(scratch / "checkpoints")
        if folder is None:
            return Outcome(FAIL, f"what was written is not valid: {'; '.join(skipped)}", "Look at the disk")
        found = checkpoint.load(folder)
        tensors = {f"model/{n}": t for n, t in trainer.weights.state.items()}
        tensors |= {f"optimizer/{n}": t for n, t in trainer.optimizer.state_tensors().items()}
        stored = {f"model/{n}": s for n, s in found.model.items()} | {
            f"optimizer/{n}": s for n, s in found.optimizer.items()
        }
        differ = [n for n, t in tensors.items() if n not in stored or not _equal(t, stored[n])]
        found.close()
        runtime.gather(None)  # wait until all ranks have read
        written = sum(f.stat().st_size for f in folder.iterdir())
    part = f" (a model of 1 block: the whole one takes {amount(size)})" if layers < depth else ""
    text = f"{amount(written)} written in {wrote:.1f} s and read again{part}"
    if differ:
        return Outcome(
            FAIL, f"{text}, but {len(differ)} tensors are not the same, {differ[0]} first", "Look at the disk"
        )
    return Outcome(OK, f"{text}, {len(tensors)} tensors equal bit for bit")


def _equal(tensor: torch.Tensor, stored: checkpoint.Stored) -> bool:
    return torch.equal(sharded.local_rows(tensor).detach().cpu(), sharded.own_part(tensor, stored).cpu())
