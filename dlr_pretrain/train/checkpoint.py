"""Checkpoints: safetensors and JSON in a directory that exists whole or does not count.

checkpoints/step_00001000/
    part_00000_of_00002.safetensors   what rank 0 wrote: model/<parameter>, optimizer/<parameter>/<entry>, random/<rank>
    state.json                        step, data position, tokens, evaluation
    manifest.json                     sizes and checksums of the other files, the rows that they hold of tensors that
                                      ranks share, the layout of quantised optimizer state; written last, it makes the
                                      directory valid

Parameters are the state's (fp32 masters where there are any), B without its residual. A tensor that every rank holds
is written by one of them; of one that is sharded by rows, each rank writes its own. Any number of ranks reads both.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dlr_pretrain import shards
from dlr_pretrain.durable import is_there, sync, write_durably
from dlr_pretrain.errors import UserError
from dlr_pretrain.train.files import Rest, at_once, write_safetensors

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
CHECK_THREADS = 8


@dataclass
class Snapshot:
    """Everything that a run needs to go on as if it had never stopped, as it is in memory."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: list[Tensor]
    state: dict
    optimizer_layout: dict[str, dict] = field(default_factory=dict)  # of block-quantised entries; JSON


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is durable: the newest ``last``, every ``every`` steps one, the best."""

    last: int
    every: int | None = None
    best: bool = False
    best_after: int = 0  # earlier evaluations are of other text


class Piece(NamedTuple):
    """Some rows of a tensor, or all of it."""

    tensor: Tensor
    first: int = 0  # row of the whole at which it begins
    rows: int | None = None  # of the whole; None: it is the whole


# ----------------------------------------------------------------------------------------------------
# Writing


def own_rows(tensor: Tensor) -> Piece:
    """What this rank holds of ``tensor``: all of it, or its rows of a DTensor that is sharded by them."""
    if not shards.is_sharded(tensor):
        return Piece(tensor)
    first, _ = shards.span(tensor)
    return Piece(shards.here(tensor), first, tensor.shape[0])


def share(snapshot: Snapshot, rank: int, world_size: int) -> dict[str, Piece]:
    """What ``rank`` writes: its rows of sharded tensors, and about as many bytes as the others of the whole ones."""
    groups = {"model": snapshot.model, "optimizer": snapshot.optimizer}
    everything = {f"{group}/{name}": own_rows(t.detach()) for group, own in groups.items() for name, t in own.items()}
    everything |= {f"random/{i}": Piece(state) for i, state in enumerate(snapshot.random)}
    pieces = {name: piece for name, piece in everything.items() if piece.rows is not None and len(piece.tensor)}
    loads = [0] * world_size
    whole = {name: piece for name, piece in everything.items() if piece.rows is None}
    for name, piece in sorted(whole.items(), key=lambda item: (-item[1].tensor.nbytes, item[0])):
        writer = loads.index(min(loads))
        loads[writer] += piece.tensor.nbytes
        if writer == rank:
            pieces[name] = piece
    return pieces


def begin(root: Path, step: int) -> Path | None:
    """An empty folder for the parts of ``step``; None where a valid checkpoint of it exists. Clears what kills left."""
    final = root / _name(step)
    if fault(final) is None:
        return None
    if is_there(final):  # damaged, or left by a kill
        _delete(final)
    for left in root.glob(".writing_*"):
        _delete(left, ignore_errors=True)
    for left in directories(root):
        with suppress(OSError):  # of a disk that does not answer: perhaps its marker is there
            if not is_there(left / MANIFEST):
                _delete(left, ignore_errors=True)
    return aside(root, final.name)


def aside(root: Path, name: str) -> Path:
    """An empty folder beside the checkpoints of ``root``; what is left of it counts for nothing."""
    made = root / f".writing_{name}_{uuid.uuid4().hex[:8]}"  # no other start's, should it still write
    made.mkdir(parents=True)
    return made


def write_part(
    aside: Path,
    rank: int,
    world_size: int,
    pieces: Mapping[str, Piece],
    rest: Rest = at_once,
) -> dict[str, dict]:
    """Write ``pieces`` (CPU tensors) durably; returns the file's entry in the manifest. ``rest`` as below."""
    path = aside / f"part_{rank:05d}_of_{world_size:05d}.safetensors"
    by_alignment = sorted(pieces, key=lambda name: -pieces[name].tensor.element_size())
    entry = write_safetensors(path, {name: pieces[name].tensor for name in by_alignment}, rest)
    rows = {name: [piece.first, piece.rows] for name, piece in pieces.items() if piece.rows is not None}
    return {path.name: entry | ({"rows": rows} if rows else {})}


def commit(
    aside: Path,
    step: int,
    parts: dict[str, dict],
    snapshot_state: dict,
    layout: dict[str, dict],
    keep: Keep,
    passed_over: Collection[Path] = (),
) -> Path:
    """Make the parts in ``aside`` the checkpoint of ``step``, durably; then delete what ``keep`` does not keep.

    What was ``passed_over`` as damaged when the run resumed counts for nothing and goes too. Not what is of a later
    step: another start of the run has written it, which took over while this one was away.
    """
    root = aside.parent
    final = root / _name(step)
    content = json.dumps(snapshot_state)
    write_durably(aside / STATE, content)
    described = {"bytes": len(content.encode()), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    manifest = {"format": FORMAT, "step": step, "files": parts | {STATE: described}, "optimizer_layout": layout}
    manifest["sha256"] = _digest(manifest)
    os.rename(aside, final)
    sync(root)
    write_durably(final / MANIFEST, json.dumps(manifest, indent=1))
    with suppress(OSError):  # a disk that does not answer is asked again after the next save; until then all stay
        for directory in _superfluous(final, keep, set(passed_over) - {final}):
            _delete(directory, ignore_errors=True)
    return final


def _superfluous(newest: Path, keep: Keep, stale: set[Path]) -> list[Path]:
    """The directories that may go now that ``newest`` is durable. Raises OSError where the disk does not answer."""
    ours = [d for d in directories(newest.parent) if d in stale or step_of(d) <= step_of(newest)]
    valid = [d for d in ours if is_there(d / MANIFEST) and d not in stale]
    kept = {newest} | _kept(valid, keep)
    return [d for d in ours if d not in kept]


def _kept(valid: list[Path], keep: Keep) -> set[Path]:
    """What ``keep`` keeps of ``valid`` checkpoints, newest first."""
    kept = set(valid[: keep.last])
    if keep.every is not None:
        kept |= {d for d in valid if step_of(d) % keep.every == 0}
    if keep.best:
        evaluated = {d: _evaluation(d) for d in valid if step_of(d) > keep.best_after}
        losses = {d: loss for d, loss in evaluated.items() if loss is not None and math.isfinite(loss)}
        kept |= {min(losses, key=losses.__getitem__)} if losses else set()
    return kept


def _evaluation(directory: Path) -> float | None:
    """The evaluation of a checkpoint's step, if there was one; what is damaged is not the best."""
    try:
        return json.loads((directory / STATE).read_text()).get("eval_loss")
    except (FileNotFoundError, ValueError):
        return None


# ----------------------------------------------------------------------------------------------------
# Reading


class Stored:
    """A tensor in a checkpoint, read as it is asked for."""

    def __init__(self):
        self.pieces: list[tuple[int, int, object, str]] = []  # first row, rows of the whole, open file, name

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        _, rows, file, name = self.pieces[0]
        shape = file.get_slice(name).get_shape()
        return tuple(shape) if rows is None else (rows, *shape[1:])

    def whole(self) -> Tensor:
        _, rows, file, name = self.pieces[0]
        if len(self.pieces) == 1 and rows is None:
            return file.get_tensor(name)
        return self.rows(0, rows)

    def rows(self, first: int, end: int) -> Tensor:
        """The rows first..end, wherever they were written."""
        found = []
        for begins, _, file, name in sorted(self.pieces, key=lambda piece: piece[0]):
            piece = file.get_slice(name)
            ends = begins + piece.get_shape()[0]
            if first < ends and begins < end:
                found.append(piece[max(first, begins) - begins : min(end, ends) - begins])
        if not found:
            return self.pieces[0][2].get_slice(self.pieces[0][3])[0:0]
        return torch.cat(found) if len(found) > 1 else found[0]


@dataclass
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    model: dict[str, Stored]
    optimizer: dict[str, Stored]
    random: list[Tensor]  # of every rank that wrote it
    state: dict
    optimizer_layout: dict[str, dict]

    @property
    def step(self) -> int:
        return self.state["step"]

    def close(self) -> None:
        """Let go of the files, which are mapped while anything refers to them."""
        self.model.clear(), self.optimizer.clear()


def load(directory: Path) -> Checkpoint:
    """Open a checkpoint that ``newest`` has found valid."""
    manifest = json.loads((directory / MANIFEST).read_text())
    groups: dict[str, dict[str, Stored]] = {"model": {}, "optimizer": {}, "random": {}}
    for path, entry in manifest["files"].items():
        if path == STATE:
            continue
        file = safe_open(directory / path, "pt")
        for full in file.keys():  # noqa: SIM118 - not a mapping
            group, name = full.split("/", 1)
            first, rows = entry.get("rows", {}).get(full, (0, None))
            groups[group].setdefault(name, Stored()).pieces.append((first, rows, file, full))
    return Checkpoint(
        directory,
        groups["model"],
        groups["optimizer"],
        [groups["random"][str(i)].whole().clone() for i in range(len(groups["random"]))],
        json.loads((directory / STATE).read_text()),
        manifest["optimizer_layout"],
    )


def fill_(tensor: Tensor, stored: Stored) -> None:
    """Take over this rank's rows of what was stored."""
    shards.here(tensor).copy_(shards.own_part(tensor, stored))


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and why newer ones were passed over.

    Raises UserError where there are checkpoints and none is valid: starting over would bury them.
    """
    skipped = []
    for directory in directories(root):
        damage = fault(directory)
        if damage is None:
            return directory, skipped
        skipped.append(f"{directory}: {damage}")
    if finished(root):
        raise UserError("no valid checkpoint: " + "; ".join(skipped) + ". Move them away to start over")
    return None, skipped


def directories(root: Path) -> list[Path]:
    """Checkpoint directories, newest first, valid or not."""
    try:
        named = [Path(d) for d in os.scandir(root) if re.fullmatch(r"step_\d+", d.name) and d.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(named, key=step_of, reverse=True)


def finished(root: Path) -> list[Path]:
    """Checkpoint directories that have their marker, newest first, damaged or not."""
    return [directory for directory in directories(root) if is_there(directory / MANIFEST)]


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint, or None.

    Raises UserError where it may be sound: written in another format, or on a disk that does not answer.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sealed = manifest.pop("sha256") == _digest(manifest)
    except FileNotFoundError:
        return "was not finished"
    except (ValueError, KeyError, TypeError, AttributeError):  # no JSON, no text at all, or another one
        sealed = False
    except OSError as error:
        raise _unreadable(directory / MANIFEST, error) from error
    if not sealed:
        return f"{MANIFEST} is damaged"
    if manifest["format"] != FORMAT:
        rule = f"has format {manifest['format']}, and this version of the code reads format {FORMAT}"
        raise UserError(f"{directory}: {rule}. Use the version that wrote it, or move the checkpoint away")
    if manifest["step"] != step_of(directory):
        return f"is that of step {manifest['step']} under another name"
    with ThreadPoolExecutor(CHECK_THREADS) as pool:
        files = manifest["files"].items()
        return next(filter(None, pool.map(lambda item: _file_fault(directory / item[0], item[1]), files)), None)


def _file_fault(path: Path, described: dict) -> str | None:
    try:
        if (size := path.stat().st_size) != described["bytes"]:
            return f"{path.name} has {size} bytes, {described['bytes']} were written"
        with path.open("rb") as file:
            sound = hashlib.file_digest(file, "sha256").hexdigest() == described["sha256"]
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        raise _unreadable(path, error) from error
    return None if sound else f"{path.name} fails its checksum"


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror}). Look at its disk, or move the checkpoint away")


def _name(step: int) -> str:
    return f"step_{step:08d}"


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name."""
    return int(directory.name.removeprefix("step_"))


def _digest(manifest: dict) -> str:
    """A checksum of what the manifest says."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _delete(directory: Path, ignore_errors: bool = False) -> None:
    """Delete a checkpoint, its validity first; of one that was moved away, the link alone."""
    if directory.is_symlink():
        return directory.unlink()
    try:
        (directory / MANIFEST).unlink(missing_ok=True)
    except OSError:
        if not ignore_errors:
            raise
        return
    shutil.rmtree(directory, ignore_errors=ignore_errors)
