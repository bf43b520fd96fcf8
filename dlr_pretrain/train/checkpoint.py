"""Checkpoints: folders of safetensors files and one JSON file. A folder gets its name when it is complete.

checkpoints/step_00001000/
    part_00000_of_00002.safetensors   written by rank 0: model/<tensor>, optimizer/<parameter>/<entry>
    checkpoint.json                   the rest of the state (step, data position, tokens, ...), and for each part its
                                      checksum and the rows of sharded tensors that it holds

The files are written and flushed to the disk in a folder with a hidden name, ``checkpoint.json`` last; then the folder
is renamed. A checkpoint is renamed again before it is deleted. So a folder named ``step_*`` was complete once, and
the checksums tell whether it still is.

The model's tensors are those that the optimizer updates: fp32 masters if there are any, and B without its residual. One
rank writes each tensor that all ranks hold. Each rank writes its own rows of a tensor that is sharded by rows; if
several ranks hold the same rows, one of them writes them. Any number of ranks can read both kinds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dlr_pretrain.config import tree
from dlr_pretrain.util import sharded
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import Shape, misfit, read_json, sha256_of, share_mode, sync, write_durably

if TYPE_CHECKING:
    from dlr_pretrain.train.ranks import Ranks

FORMAT = 4
CONTENT = "checkpoint.json"
CONTENT_SHAPE: Shape = {"state": {"step": int}, "files": {"*": {"sha256": str, "rows": dict}}}


class TensorRows(NamedTuple):
    """Some rows of a tensor, or all of it."""

    tensor: Tensor
    first: int = 0  # index in the whole tensor of the piece's first row
    rows: int | None = None  # rows of the whole tensor; None if the piece is all of it


# ----------------------------------------------------------------------------------------------------
# Writing


def share(
    model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], rank: int, world_size: int
) -> dict[str, TensorRows]:
    """The pieces that ``rank`` writes: its rows of sharded tensors, and some of the other tensors, balanced by bytes.

    Ranks that hold copies of the same rows take turns, tensor by tensor.
    """
    tensors = {f"model/{name}": tensor.detach() for name, tensor in model.items()}
    tensors |= {f"optimizer/{name}": tensor for name, tensor in optimizer.items()}
    pieces, loads = {}, [0] * world_size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].nbytes, item[0]))
    for turn, (name, tensor) in enumerate(ordered):
        if sharded.is_sharded(tensor):
            first, end = sharded.span(tensor)
            copy, copies = sharded.copy_of(tensor)
            if first < end and turn % copies == copy:
                pieces[name] = TensorRows(sharded.local_rows(tensor), first, tensor.shape[0])
        else:
            writer = loads.index(min(loads))
            loads[writer] += tensor.nbytes
            if writer == rank:
                pieces[name] = TensorRows(tensor)
    return pieces


def begin(root: Path, name: str) -> Path:
    """Make a hidden folder for the parts of checkpoint ``name``, and delete those that killed runs left behind."""
    for left in root.glob(".writing_*"):
        shutil.rmtree(left, ignore_errors=True)
    made = root / f".writing_{name}_{uuid.uuid4().hex[:8]}"  # unique, because another start may still be writing
    made.mkdir(parents=True)
    return made


def write_part(
    folder: Path, rank: int, world_size: int, pieces: Mapping[str, TensorRows]
) -> tuple[str, dict[str, Any]]:
    """Write ``pieces`` (CPU tensors) durably. Returns the file's name and its entry in ``checkpoint.json``."""
    path = folder / f"part_{rank:05d}_of_{world_size:05d}.safetensors"
    try:
        save_file({name: piece.tensor.contiguous() for name, piece in pieces.items()}, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # such as a full disk
        raise OSError(*(int(number[1]), os.strerror(int(number[1])), str(path)) if number else (error,)) from error
    share_mode(path)
    sync(path)
    rows = {name: [piece.first, piece.rows] for name, piece in pieces.items() if piece.rows is not None}
    return path.name, {"sha256": sha256_of(path), "rows": rows}


def commit(folder: Path, parts: Iterable[tuple[str, dict]], state: dict[str, Any], keep: tree.Checkpoints) -> Path:
    """Make ``parts`` and ``state`` a checkpoint, durably, and delete the checkpoints that ``keep`` leaves out."""
    root, final = folder.parent, folder.parent / name_of(state["step"])
    content = {"format": FORMAT, "state": state, "files": dict(parts)}
    write_durably(folder / CONTENT, json.dumps(content | {"sha256": _digest(content)}, indent=1))
    hidden = [_hide(final)] if final.exists() else []  # written by another start, which has lost the run to this one
    os.rename(folder, final)
    sync(root)
    with suppress(OSError):  # if the disk does not answer, all stay until the next save
        for directory in directories(root)[keep.keep_last :]:
            if keep.keep_every is None or step_of(directory) % keep.keep_every:
                hidden.append(_hide(directory))
    for directory in hidden:
        shutil.rmtree(directory, ignore_errors=True)
    return final


def _hide(directory: Path) -> Path:
    """Rename a checkpoint before it is deleted, so that no folder named ``step_*`` is ever incomplete."""
    return directory.rename(directory.with_name(f".writing_old_{uuid.uuid4().hex[:8]}"))


# ----------------------------------------------------------------------------------------------------
# Reading


class StoredTensor:
    """A tensor in a checkpoint, read from the disk on demand, from every part that holds some of its rows."""

    def __init__(self, pieces: list[tuple[int, Any]], rows: int | None, ranks: Ranks | None):
        """``pieces`` has the first row of each piece and its slice in an open file; for ``rows`` see ``TensorRows``.

        With ``ranks``, rank 0 reads the whole tensor and the other ranks receive it.
        """
        self.pieces = sorted(pieces, key=lambda piece: piece[0])
        shape = tuple(pieces[0][1].get_shape())
        self.shape = shape if rows is None else (rows, *shape[1:])
        self.ranks = ranks

    def whole(self) -> Tensor:
        """All rows. All ``ranks`` must ask for the same tensors in the same order."""
        if not self.shape:
            return self.pieces[0][1][...]
        if self.ranks is None:
            return self.rows(0, self.shape[0])
        tensor = self.rows(0, self.shape[0] if self.ranks.is_main else 0).to(self.ranks.device)
        tensor = tensor if self.ranks.is_main else tensor.new_empty(self.shape)
        self.ranks.broadcast([tensor])
        return tensor

    def rows(self, first: int, end: int) -> Tensor:
        """The rows from ``first`` up to, but not including, ``end``."""
        read = []
        for begins, piece in self.pieces:
            ends = begins + piece.get_shape()[0]
            if first < ends and begins < end:
                read.append(piece[max(first, begins) - begins : min(end, ends) - begins])
        if not read:
            return self.pieces[0][1][0:0]
        return torch.cat(read) if len(read) > 1 else read[0]


@dataclass
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    model: dict[str, StoredTensor]
    optimizer: dict[str, StoredTensor]
    state: dict[str, Any]
    sha256: str

    @property
    def step(self) -> int:
        return self.state["step"]

    def close(self) -> None:
        """Release the files: they stay memory-mapped while anything refers to them."""
        self.model.clear()
        self.optimizer.clear()


def load(directory: Path, ranks: Ranks | None = None) -> Checkpoint:
    """Open a checkpoint that ``newest`` has found valid; for ``ranks`` see ``StoredTensor``."""
    content = read_json(directory / CONTENT, CONTENT_SHAPE)
    pieces: dict[str, list[tuple[int, Any]]] = {}
    counts: dict[str, int | None] = {}
    for path, entry in content["files"].items():
        file = safe_open(directory / path, "pt")
        for name in file.keys():  # noqa: SIM118 - not a mapping
            first, counts[name] = entry["rows"].get(name, (0, None))
            pieces.setdefault(name, []).append((first, file.get_slice(name)))

    def group(prefix: str) -> dict[str, StoredTensor]:
        names = (name for name in pieces if name.startswith(prefix))
        return {name.removeprefix(prefix): StoredTensor(pieces[name], counts[name], ranks) for name in names}

    return Checkpoint(directory, group("model/"), group("optimizer/"), content["state"], content["sha256"])


def newest(root: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest valid checkpoint, and the faults of the newer ones, which are skipped.

    Raises UserError if all checkpoints are damaged: a new run would replace them.
    """
    damaged: dict[Path, str] = {}
    for directory in directories(root):
        damage = fault(directory)
        if damage is None:
            return directory, damaged
        damaged[directory] = damage
    if damaged:
        faults = "; ".join(f"{directory}: {damage}" for directory, damage in damaged.items())
        raise UserError(f"no valid checkpoint: {faults}. Move them away to start over")
    return None, damaged


def directories(root: Path) -> list[Path]:
    """Checkpoints, newest first, valid or damaged."""
    try:
        named = [Path(d) for d in os.scandir(root) if re.fullmatch(r"step_\d+", d.name) and d.is_dir()]
    except FileNotFoundError:
        return []
    return sorted(named, key=step_of, reverse=True)


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is valid.

    Raises OSError if its disk does not answer, and UserError if another version of this code wrote it.
    """
    try:
        content = read_json(directory / CONTENT, {"format": int})
    except FileNotFoundError:
        return f"{CONTENT} is missing"
    except ValueError:  # not JSON, or not even text
        return f"{CONTENT} is damaged"
    if content.pop("sha256", None) != _digest(content):
        return f"{CONTENT} is damaged"
    if content["format"] != FORMAT:
        rule = f"is complete, but in format {content['format']}; this version of the code reads format {FORMAT}"
        raise UserError(f"{directory} {rule}. Continue with the version that wrote it, or name another run.dir")
    if wrong := misfit(content, CONTENT_SHAPE):
        return f"{CONTENT} is not of this format: {wrong}"
    if content["state"]["step"] != step_of(directory):
        return f"holds step {content['state']['step']}, unlike its name"
    for name, described in content["files"].items():
        try:
            if sha256_of(directory / name) != described["sha256"]:
                return f"{name} fails its checksum"
        except FileNotFoundError:
            return f"{name} is missing"
    return None


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(directory: Path) -> int:
    """The step in a checkpoint's name."""
    return int(directory.name.removeprefix("step_"))


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
