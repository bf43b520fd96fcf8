"""Forks: runs that deliberately go on from another run's checkpoint with other settings (``run.fork_from``)."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from dlr_pretrain.config.identity import differences
from dlr_pretrain.config.problems import shown
from dlr_pretrain.config.written import read_record
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Checkpoint
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import sync, sync_all, write_durably
from dlr_pretrain.util.history import read_metrics

METRICS = "metrics.jsonl"
# If a key of DATA changes, the position in the data is void. If only RATES change, the optimizer's state stays valid.
DATA = ("data.", "tokenizer.", "train.global_batch", "train.seq_len")
RATES = (
    *("optimizer.beta", "optimizer.eps", "optimizer.weight_decay", "optimizer.b_lr"),
    *("optimizer.schedule", "optimizer.shift", "optimizer.restart_warmup"),  # loro's
)


def fork(
    fork_from: Path, run_dir: Path, identity: dict, shapes: Mapping[str, tuple[int, ...]], say: Callable[[str], None]
) -> Path:
    """Make the newest valid checkpoint of the run ``fork_from``, or the one it names, the first one of ``run_dir``.

    The metrics up to it are copied too, and ``manifest.json`` records its origin and which keys differ. The checkpoint
    is put in place last and nothing counts before it, so a kill leaves a complete fork or none. Raises UserError if its
    tensors do not have the ``shapes`` of this run's, or if no step is left to train.
    """
    source, found = _source(fork_from.resolve(), say)
    origin = checkpoint.load(found)
    theirs = {name: stored.shape for name, stored in origin.model.items()}
    unfit = [name for name in (shapes | theirs) if shapes.get(name) != theirs.get(name)]
    if unfit:
        name = unfit[0]
        sizes = f"{name} is {theirs.get(name, 'missing')} there, and {shapes.get(name, 'unknown')} here"
        raise UserError(f"run.fork_from={fork_from}: another model ({len(unfit)} tensors differ: {sizes})")
    changed = departures(origin, identity)
    step, steps = checkpoint.step_of(found), identity["train.steps"]
    if step >= steps:
        raise UserError(f"train.steps={steps}: run.fork_from={fork_from} has trained {step} already. Set it above that")
    aside = checkpoint.begin(run_dir / "checkpoints", step)
    shutil.copytree(found, aside, copy_function=_link, dirs_exist_ok=True)
    sync_all(aside)
    count = sum(record["step"] <= step for record in read_metrics(source / METRICS))
    lines = (source / METRICS).read_bytes().splitlines(keepends=True) if count else []
    write_durably(run_dir / METRICS, b"".join(lines[:count]))
    before = read_record(source)  # its starts explain the pauses in the copied metrics
    starts = [*before.get("forked", {}).get("starts", []), *(start["time"] for start in before.get("starts", []))]
    forked = {"checkpoint": str(found), "step": step, "changed": changed, "starts": starts}
    update_record(run_dir, {"forked": forked})
    os.rename(aside, run_dir / "checkpoints" / found.name)
    sync(run_dir / "checkpoints")
    update_record(run_dir, {"saved": step})
    for name, (there, here) in changed.items():
        say(f"fork: {name} was {shown(there)}, and is {shown(here)} after step {step:,}")
    return run_dir / "checkpoints" / found.name


def departures(found: Checkpoint, identity: dict) -> dict[str, tuple[object, object]]:
    """The keys in which the run that made the checkpoint differs from ``identity``, with both values."""
    changed = differences(found.state["identity"], identity)
    changed.pop("run.fork_from", None)
    return changed


def adapt(found: Checkpoint, record: dict, say: Callable[[str], None]) -> None:
    """After a fork, drop from the checkpoint what is not valid under this run's settings; ``record`` is this run's.

    Raises UserError if the checkpoint is of another run, and this run was not forked from it.
    """
    changed, forked = departures(found, record["identity"]), record.get("forked")
    if changed.get("data.shards", ("",))[0] in record.get("regrown", []):
        del changed["data.shards"]
    if changed and (forked is None or found.step != forked["step"]):
        name, (there, here) = next(iter(changed.items()))
        what = f"{len(changed)} keys differ: {name} was {shown(there)} there, and is {shown(here)} here"
        what = f"it is of another run ({what})"
        raise UserError(f"{found.path}: {what}. Move it away, or start from it with run.fork_from")
    if any(name.startswith(("optimizer.", "precision.")) and not name.startswith(RATES) for name in changed):
        found.optimizer.clear(), found.optimizer_layout.clear()
        say("fork: the optimizer's state starts anew")
    if any(name.startswith(DATA) for name in changed):
        found.state["streams"] = None
        say("fork: the data start anew")
    if forked and found.step == forked["step"] and best_after(forked):
        found.state |= {"losses": [], "best": None}


def best_after(forked: dict) -> int:
    """The step up to which evaluations used other text than this run's; 0 if none did."""
    other = any(name.startswith((*DATA, "eval.")) for name in forked["changed"])
    return forked["step"] if other else 0


def _source(given: Path, say: Callable[[str], None]) -> tuple[Path, Path]:
    """The run directory of ``given``, and the checkpoint to fork from."""
    if re.fullmatch(r"step_\d+", given.name):
        if damage := checkpoint.fault(given):
            raise UserError(f"run.fork_from={given}: {damage}. Name another checkpoint")
        return given.parent.parent, given
    found, skipped = checkpoint.newest(given / "checkpoints")
    for reason in skipped:
        say(f"warning: fork: passed over {reason}")
    if found is None:
        raise UserError(f"run.fork_from={given}: no checkpoint there. Name a run, or <run>/checkpoints/step_*")
    return given, found


def _link(source: str, target: str) -> None:
    """Hard-link ``source`` as ``target``, or copy it if that fails. Checkpoints are never changed in place."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
