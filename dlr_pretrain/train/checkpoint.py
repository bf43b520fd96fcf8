"""Checkpoints: safetensors and JSON in a directory that exists whole or does not count.

checkpoints/step_00001000/
    model.safetensors       the state's parameters (fp32 masters where there are any), B without its residual
    optimizer.safetensors   <parameter>/<entry>
    random.safetensors      generator states, one a rank
    state.json              step, data position, tokens, what the run was
    manifest.json           sizes and checksums, and the layout of quantised optimizer state; written last, it makes
                            the directory valid
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dlr_pretrain.errors import UserError

MANIFEST, OPTIMIZER = "manifest.json", "optimizer.safetensors"
FILES = {"model.safetensors", OPTIMIZER, "random.safetensors", "state.json"}


@dataclass
class Snapshot:
    """Everything that a run needs to go on as if it had never stopped."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: list[Tensor]
    state: dict
    optimizer_layout: dict[str, dict] = field(default_factory=dict)  # of block-quantised entries; JSON


def save(root: Path, step: int, snapshot: Snapshot, keep_last: int) -> Path:
    """Write ``snapshot`` durably, then delete all but the newest ``keep_last``.

    What is not valid, or is of a later step, was passed over when the run resumed: it goes too, and counts for nothing.
    """
    final = root / f"step_{step:08d}"
    aside = root / f".writing_{final.name}"
    if final.exists() and fault(final) is None:
        return final
    for stale in (*root.glob(".writing_*"), *root.glob(final.name)):  # left by a kill
        _delete(stale)
    aside.mkdir(parents=True)
    tensors = {
        "model": snapshot.model,
        "optimizer": snapshot.optimizer,
        "random": {f"rank{i}": s for i, s in enumerate(snapshot.random)},
    }
    for name, group in tensors.items():
        try:
            save_file({k: v.detach().cpu().contiguous() for k, v in group.items()}, aside / f"{name}.safetensors")
        except SafetensorError as error:  # that is how it reports a full disk
            raise OSError(str(error)) from error
    (aside / "state.json").write_text(json.dumps(snapshot.state))
    manifest = {path.name: _describe(path) for path in sorted(aside.iterdir())}
    if snapshot.optimizer_layout:
        manifest[OPTIMIZER]["layout"] = snapshot.optimizer_layout
    for path in aside.iterdir():
        _sync(path)
    _sync(aside)
    os.rename(aside, final)
    _sync(root)
    write_durably(final / MANIFEST, json.dumps(manifest, indent=1))
    everything = directories(root)
    kept = [d for d in everything if (d / MANIFEST).exists() and _step(d) <= step][:keep_last]
    for directory in everything:
        if directory not in kept:  # what cannot be deleted now is tried again after the next save
            _delete(directory, ignore_errors=True)
    return final


def load(directory: Path) -> Snapshot:
    """Read a checkpoint that ``newest`` has found valid."""
    random = load_file(directory / "random.safetensors")
    return Snapshot(
        model=load_file(directory / "model.safetensors"),
        optimizer=load_file(directory / OPTIMIZER),
        random=[random[f"rank{i}"] for i in range(len(random))],
        state=json.loads((directory / "state.json").read_text()),
        optimizer_layout=json.loads((directory / MANIFEST).read_text())[OPTIMIZER].get("layout", {}),
    )


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
    if any((d / MANIFEST).exists() for d in directories(root)):
        raise UserError("no valid checkpoint: " + "; ".join(skipped) + ". Move them away to start over")
    return None, skipped


def directories(root: Path) -> list[Path]:
    """Checkpoint directories, newest first, valid or not."""
    named = [d for d in root.glob("step_*") if d.is_dir() and re.fullmatch(r"step_\d+", d.name)]
    return sorted(named, key=_step, reverse=True)


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace ``path`` with ``content`` so that a crash leaves the old or the new file, whole."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_bytes(content.encode() if isinstance(content, str) else content)
    _sync(aside)
    os.replace(aside, path)
    _sync(path.parent)


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step_"))


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        return "was not finished"
    except ValueError:  # no JSON, or no text at all
        manifest = None
    if not isinstance(manifest, dict) or not manifest.keys() >= FILES:
        return f"{MANIFEST} is damaged"
    for name, described in manifest.items():
        path = directory / name
        if not path.exists():
            return f"{name} is missing"
        layout = described.pop("layout", {}) if isinstance(described, dict) and name == OPTIMIZER else {}
        if not isinstance(layout, dict) or not isinstance(described, dict) or described.keys() != {"bytes", "sha256"}:
            return f"{MANIFEST} is damaged"
        if path.stat().st_size != described["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, {described['bytes']} were written"
        if _describe(path) != described:
            return f"{name} fails its checksum"
    return None


def _describe(path: Path) -> dict:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _delete(directory: Path, ignore_errors: bool = False) -> None:
    """Delete a checkpoint, its validity first."""
    (directory / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=ignore_errors)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
