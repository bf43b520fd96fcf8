"""Checkpoints: directories of safetensors and JSON files, which count only when they are complete.

checkpoints/step_00001000/
    part_00000_of_00002.safetensors   written by rank 0: model/<parameter>, optimizer/<parameter>/<entry>, random/<rank>
    state.json                        step, data position, tokens, evaluation
    manifest.json                     sizes and checksums of the other files, the rows of sharded tensors that each
                                      file holds, the layout of quantised optimizer state. It is written last and
                                      makes the directory valid

The parameters are those of the training state: fp32 masters if there are any, and B without its residual. If every
rank holds a tensor, one rank writes it. If a tensor is sharded by rows, each rank writes its own rows. Any number of
ranks can read both kinds.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from dlr_pretrain.train.files import DTYPES, Throttle, unthrottled, write_safetensors
from dlr_pretrain.util import sharded
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import is_there, sync, write_durably

if TYPE_CHECKING:
    from dlr_pretrain.train.ranks import Ranks

FORMAT = 2
MANIFEST, STATE = "manifest.json", "state.json"
CHECK_THREADS = 8
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class Snapshot:
    """Everything in memory that a run needs in order to go on as if it had never stopped."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: list[Tensor]
    state: dict
    optimizer_layout: dict[str, dict] = field(default_factory=dict)  # of block-quantised entries; JSON


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is durable: the newest ``last``, one every ``every`` steps, the best."""

    last: int
    every: int | None = None
    best: bool = False


class Piece(NamedTuple):
    """Some rows of a tensor, or all of it."""

    tensor: Tensor
    first: int = 0  # row of the whole tensor at which the piece begins
    rows: int | None = None  # of the whole tensor; None if the piece is all of it


# ----------------------------------------------------------------------------------------------------
# Writing


def own_rows(tensor: Tensor) -> Piece:
    """The part of ``tensor`` on this rank: all of it, or this rank's rows if it is a DTensor sharded by rows."""
    if not sharded.is_sharded(tensor):
        return Piece(tensor)
    first, _ = sharded.span(tensor)
    return Piece(sharded.local_rows(tensor), first, tensor.shape[0])


def share(snapshot: Snapshot, rank: int, world_size: int) -> dict[str, Piece]:
    """The pieces that ``rank`` writes: its rows of sharded tensors, and some of the others, balanced by bytes."""
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
    """Make an empty folder for the parts of ``step``; returns None if ``step`` has a valid checkpoint already.

    Otherwise first deletes an invalid checkpoint of ``step``, and the folders that killed runs left unfinished.
    """
    final = root / _name(step)
    if fault(final) is None:
        return None
    if is_there(final):  # damaged, or left unfinished by a killed run
        _delete(final)
    for left in root.glob(".writing_*"):
        _delete(left, ignore_errors=True)
    for left in directories(root):
        with suppress(OSError):  # the disk does not answer: the manifest may be there, so the folder stays
            if not is_there(left / MANIFEST):
                _delete(left, ignore_errors=True)
    return tmp_dir(root, final.name)


def tmp_dir(root: Path, name: str) -> Path:
    """Make an empty folder beside the checkpoints of ``root``. It never counts as a checkpoint, even if it is left."""
    made = root / f".writing_{name}_{uuid.uuid4().hex[:8]}"  # unique, because another start may still be writing
    made.mkdir(parents=True)
    return made


def write_part(
    folder: Path,
    rank: int,
    world_size: int,
    pieces: Mapping[str, Piece],
    throttle: Throttle = unthrottled,
) -> dict[str, dict]:
    """Write ``pieces`` (CPU tensors) durably; returns the manifest entry of the file.

    ``throttle`` is an argument of ``write_safetensors``.
    """
    path = folder / f"part_{rank:05d}_of_{world_size:05d}.safetensors"
    by_alignment = sorted(pieces, key=lambda name: -pieces[name].tensor.element_size())
    entry = write_safetensors(path, {name: pieces[name].tensor for name in by_alignment}, throttle)
    rows = {name: [piece.first, piece.rows] for name, piece in pieces.items() if piece.rows is not None}
    return {path.name: entry | ({"rows": rows} if rows else {})}


def commit(
    folder: Path,
    step: int,
    parts: dict[str, dict],
    snapshot_state: dict,
    layout: dict[str, dict],
    keep: Keep,
    passed_over: Collection[Path] = (),
    evaluations: Mapping[int, float] | None = None,
) -> Path:
    """Make the parts in ``folder`` the checkpoint of ``step``, durably; then delete those that ``keep`` does not keep.

    The checkpoints in ``passed_over``, which were found damaged when the run resumed, are deleted too. Any other
    checkpoint of a later step stays: another start of the run, which took over from this one, has written it.
    ``evaluations`` holds the evaluation loss of each evaluated step.
    """
    root = folder.parent
    final = root / _name(step)
    content = json.dumps(snapshot_state)
    write_durably(folder / STATE, content)
    described = {"bytes": len(content.encode()), "sha256": hashlib.sha256(content.encode()).hexdigest()}
    manifest = {"format": FORMAT, "step": step, "files": parts | {STATE: described}, "optimizer_layout": layout}
    manifest["sha256"] = _digest(manifest)
    os.rename(folder, final)
    sync(root)
    write_durably(final / MANIFEST, json.dumps(manifest, indent=1))
    with suppress(OSError):  # if the disk does not answer, all stay until the next save tries again
        for directory in _superfluous(final, keep, set(passed_over) - {final}, evaluations or {}):
            _delete(directory, ignore_errors=True)
    return final


def _superfluous(newest: Path, keep: Keep, stale: set[Path], evaluations: Mapping[int, float]) -> list[Path]:
    """The directories to delete now that ``newest`` is durable. Raises OSError if the disk does not answer."""
    ours = [d for d in directories(newest.parent) if d in stale or step_of(d) <= step_of(newest)]
    valid = [d for d in ours if is_there(d / MANIFEST) and d not in stale]
    kept = {newest} | _kept(valid, keep, evaluations)
    return [d for d in ours if d not in kept]


def _kept(valid: list[Path], keep: Keep, evaluations: Mapping[int, float]) -> set[Path]:
    """Those of the ``valid`` checkpoints (newest first) that ``keep`` keeps."""
    kept = set(valid[: keep.last])
    if keep.every is not None:
        kept |= {d for d in valid if step_of(d) % keep.every == 0}
    if keep.best:
        evaluated = {d: evaluations.get(step_of(d), math.nan) for d in valid}
        losses = {d: loss for d, loss in evaluated.items() if math.isfinite(loss)}
        kept |= {min(losses, key=losses.__getitem__)} if losses else set()
    return kept


# ----------------------------------------------------------------------------------------------------
# Reading


class Stored:
    """A tensor in a checkpoint, read from the disk on demand."""

    def __init__(self):
        self.pieces: list[tuple[int, int, object, str]] = []  # first row, rows of the whole tensor, open file, name

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        _, rows, file, name = self.pieces[0]
        shape = file.get_slice(name).get_shape()
        return tuple(shape) if rows is None else (rows, *shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        _, _, file, name = self.pieces[0]
        return TORCH_DTYPES[file.get_slice(name).get_dtype()]

    def whole(self) -> Tensor:
        _, rows, file, name = self.pieces[0]
        if len(self.pieces) == 1 and rows is None:
            return file.get_tensor(name)
        return self.rows(0, rows)

    def rows(self, first: int, end: int) -> Tensor:
        """The rows from ``first`` up to, but not including, ``end``, from all pieces that hold some of them."""
        found = []
        for begins, _, file, name in sorted(self.pieces, key=lambda piece: piece[0]):
            piece = file.get_slice(name)
            ends = begins + piece.get_shape()[0]
            if first < ends and begins < end:
                found.append(piece[max(first, begins) - begins : min(end, ends) - begins])
        if not found:
            return self.pieces[0][2].get_slice(self.pieces[0][3])[0:0]
        return torch.cat(found) if len(found) > 1 else found[0]


class Received:
    """``stored`` as rank 0 reads it; all ranks must ask for the same tensors in the same order."""

    def __init__(self, stored: Stored, ranks: Ranks):
        self.stored, self.ranks, self.shape = stored, ranks, stored.shape

    def whole(self) -> Tensor:
        device = self.ranks.device
        if self.ranks.is_main:
            tensor = self.stored.whole().to(device)
        else:
            tensor = torch.empty(self.shape, dtype=self.stored.dtype, device=device)
        self.ranks.broadcast([tensor])
        return tensor

    def rows(self, first: int, end: int) -> Tensor:
        return self.whole()[first:end]


@dataclass
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    model: dict[str, Stored | Received]
    optimizer: dict[str, Stored | Received]
    random: list[Tensor]  # one state for each rank that wrote it
    state: dict
    optimizer_layout: dict[str, dict]

    @property
    def step(self) -> int:
        return self.state["step"]

    def shared(self, ranks: Ranks) -> Checkpoint:
        """This checkpoint, of which rank 0 reads whole tensors from the disk and the other ranks receive them."""
        return replace(
            self,
            model={name: Received(stored, ranks) for name, stored in self.model.items()},
            optimizer={name: Received(stored, ranks) for name, stored in self.optimizer.items()},
        )

    def close(self) -> None:
        """Release the files, which stay memory-mapped while anything refers to them."""
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


def fill_(tensor: Tensor, stored: Stored | Received) -> None:
    """Copy this rank's rows of ``stored`` into ``tensor``."""
    sharded.local_rows(tensor).copy_(sharded.own_part(tensor, stored))


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint, and why newer ones were passed over.

    Raises UserError if there are finished checkpoints but none is valid, because a new run would replace them.
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
    """Checkpoint directories that have a manifest, newest first, damaged or not."""
    return [directory for directory in directories(root) if is_there(directory / MANIFEST)]


def fault(directory: Path) -> str | None:
    """Says what is wrong with a checkpoint; None if it is valid.

    Raises UserError if it may be valid but cannot be read: it has another format, or its disk does not answer.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sealed = manifest.pop("sha256") == _digest(manifest)
    except FileNotFoundError:
        return "was not finished"
    except (ValueError, KeyError, TypeError, AttributeError):  # not JSON, not even text, or JSON of another kind
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
    """A checksum of the manifest's content."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _delete(directory: Path, ignore_errors: bool = False) -> None:
    """Delete a checkpoint. Its manifest goes first, so that a partial deletion leaves no valid checkpoint.

    If the checkpoint was moved elsewhere and a symbolic link stands in its place, delete only the link.
    """
    if directory.is_symlink():
        return directory.unlink()
    try:
        (directory / MANIFEST).unlink(missing_ok=True)
    except OSError:
        if not ignore_errors:
            raise
        return
    shutil.rmtree(directory, ignore_errors=ignore_errors)
