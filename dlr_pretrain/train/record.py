"""The run directory's own files: what the run is (config.yaml, manifest.json), and that a resume is the same run."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf

import dlr_pretrain
from dlr_pretrain.config import Config, identity, to_dict
from dlr_pretrain.errors import UserError
from dlr_pretrain.train.checkpoint import write_durably

MANIFEST = "manifest.json"
# Where text and tokenizer come from may change, even from shards of text to tokens made of them: what they are is held
# by their fingerprints.
ORIGIN = {*(f"data.{name}" for name in ("source", "dataset", "root", "train_files", "validation_files", "text_key")),
          "tokenizer.path", "tokenizer.hub"}  # fmt: skip
PACKAGES = ("torch", "numpy", "transformers", "datasets", "sentencepiece", "safetensors", "wandb", "hydra-core")


def open_record(run_dir: Path, cfg: Config, fingerprints: dict[str, str]) -> None:
    """Write ``config.yaml``, and to ``manifest.json`` what the run is.

    ``fingerprints`` are of the data and the tokenizer. Raises UserError, with the difference, where the directory holds
    a run of other mathematics.
    """
    now = json.loads(json.dumps(identity(cfg))) | fingerprints
    manifest = _manifest(run_dir)
    before = manifest.get("identity", now)
    changed = [k for k in before if k in now and k not in ORIGIN and before[k] != now[k]]
    if changed:
        lines = [f"  {k}: {before[k]} there, {now[k]} here" for k in changed]
        raise UserError(
            f"{run_dir} holds another run:\n" + "\n".join(lines) + "\nRestore these keys, or choose another run.dir"
        )
    manifest = {"starts": []} | manifest | {"identity": now}
    write_durably(run_dir / MANIFEST, json.dumps(manifest, indent=1))
    write_durably(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg))))


def record_start(run_dir: Path, world_size: int, device: torch.device) -> None:
    """Add this start, its machine and its software to ``manifest.json``."""
    manifest = _manifest(run_dir)
    manifest["starts"].append(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": sys.argv,
            "host": socket.gethostname(),
            "world_size": world_size,
            "device": describe_device(device),
            "git": git_state(),
            "python": platform.python_version(),
            "packages": versions(),
        }
    )
    write_durably(run_dir / MANIFEST, json.dumps(manifest, indent=1))


def _manifest(run_dir: Path) -> dict:
    path = run_dir / MANIFEST
    if not path.exists():
        return {}
    try:
        manifest = json.loads(path.read_text())
        sound = isinstance(manifest["identity"], dict) and isinstance(manifest["starts"], list)
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(
            f"{path} is damaged. Move it away: the checkpoints go on without it, unchecked against its keys"
        )
    return manifest


def versions() -> dict[str, str]:
    """Installed versions of the packages that take part."""
    found = {"dlr_pretrain": metadata.version("dlr-pretrain")} if _installed("dlr-pretrain") else {}
    return found | {name: metadata.version(name) for name in PACKAGES if _installed(name)}


def git_state() -> str | None:
    """Commit of the code that runs, with "+" where it has local changes; None outside a checkout."""
    root = Path(dlr_pretrain.__file__).parent.parent
    if not (root / ".git").exists():
        return None

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "HEAD")
    return (commit + "+" if git("status", "--porcelain", "-uno") else commit) or None


def describe_device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads"


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True
