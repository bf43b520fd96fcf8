"""Writes config.yaml and manifest.json, which say what a run is. A resume must continue the same run."""

import json
import platform
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import torch
from omegaconf import OmegaConf

import dlr_pretrain
from dlr_pretrain.config import Config, identity, to_dict
from dlr_pretrain.config.identity import describe_differences, differences, facts
from dlr_pretrain.config.run_folder import MANIFEST, read_record
from dlr_pretrain.train.device import describe_device
from dlr_pretrain.train.heartbeat import Heartbeat
from dlr_pretrain.util.errors import Diverged, Stopped, UserError, first_line
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.secrets import redact

PACKAGES = ("dlr_pretrain", "torch", "numpy", "transformers", "datasets", "sentencepiece", "safetensors", "wandb",
            "hydra-core")  # fmt: skip
GIT_SECONDS = 30.0
_writing = threading.Lock()  # the thread that saves checkpoints also writes


def open_record(run_dir: Path, cfg: Config, fingerprints: dict[str, str | int]) -> None:
    """Write ``config.yaml``, and record the run's identity and its state, running, in ``manifest.json``.

    The identity consists of the settings that affect the mathematics of the run and the ``fingerprints`` of the data,
    their order and the tokenizer. Raises UserError with the differences if the directory holds another run.
    """
    if "saved" not in read_record(run_dir):
        update_record(run_dir, {"identity": {}, "started_from": None, "micro_batch": {}})
    bind_identity(run_dir, identity(cfg) | fingerprints)
    record_state(run_dir, "running")
    write_durably(run_dir / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg))))


def bind_identity(run_dir: Path, entries: dict[str, object]) -> None:
    """Add ``entries`` to the identity in ``manifest.json``. Raises UserError if they contradict it.

    Before the first checkpoint, a directory may become another run.
    """
    record = read_record(run_dir)
    before = record.get("identity", {})
    changed = differences(before, entries)
    if changed and "saved" in record:
        differ = describe_differences(changed, between="\n  ")
        bound, fix = {facts(name).binds for name in changed}, "Restore these keys, or choose another run.dir"
        if "weights" not in bound:
            fix += f" and start there with run.start_from={run_dir}"
            fix += "" if "moments" in bound else " (and run.start_optimizer=true, to go on from its last step)"
        raise UserError(f"{run_dir} holds another run:\n  {differ}\n{fix}")
    update_record(run_dir, {"identity": before | entries})


def record_state(run_dir: Path, name: str, reason: str = "") -> None:
    """Put the run's state into ``manifest.json``, with the time and the step last saved.

    ``name`` is running, stopped, failed, diverged or complete; ``reason`` says why the run ended early.
    """
    step = read_record(run_dir).get("saved", 0)
    update_record(run_dir, {"state": {"name": name, "step": step, "reason": reason, "time": time.time()}})


@contextmanager
def recorded_end(run_dir: Path, heartbeat: Heartbeat) -> Iterator[None]:
    """Within this context, the holder of the run directory records in ``manifest.json`` how the run ends."""
    heartbeat.record_end = partial(_record_end, run_dir, heartbeat)  # for an end by a hang
    try:
        yield
    except BaseException as error:
        _record_end(run_dir, heartbeat, error)
        raise
    _record_end(run_dir, heartbeat)


def record_stop(heartbeat: Heartbeat, stopped: Stopped) -> None:
    """Record a stop as ``recorded_end`` does, in a signal handler, unless the interrupted code writes the record."""
    if _writing.acquire(blocking=False):
        _writing.release()
        heartbeat.record_end(stopped)


def _record_end(run_dir: Path, heartbeat: Heartbeat, error: BaseException | None = None) -> None:
    """Record the end of a run that has reached ``open_record``, unless another start has taken it over since.

    A failed write does not hide the run's own error.
    """
    names = {Diverged: "diverged", Stopped: "stopped", KeyboardInterrupt: "stopped", type(None): "complete"}
    with suppress(OSError, UserError):
        heartbeat.require_held()
        if heartbeat.holds and read_record(run_dir).get("state", {}).get("name") == "running":
            record_state(run_dir, names.get(type(error), "failed"), first_line(error) if error else "")


def record_start(run_dir: Path, world_size: int, device: torch.device, text: str, files: dict[str, str]) -> None:
    """Add this start to ``manifest.json``: machine, software, and the data, described by ``text`` and ``files``."""
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": [*map(redact, sys.argv)],
        "host": socket.gethostname(),
        "world_size": world_size,
        "device": describe_device(device),
        "text": text,
        "files": files,
        "git": git_state(),
        "python": platform.python_version(),
        "packages": versions(),
    }
    update_record(run_dir, {"starts": [*read_record(run_dir)["starts"], start]})


def update_record(run_dir: Path, entries: dict) -> None:
    """Put ``entries`` into ``manifest.json``; None removes an entry."""
    with _writing:
        record = {"identity": {}, "starts": []} | read_record(run_dir) | entries
        present = {name: value for name, value in record.items() if value is not None}
        write_durably(run_dir / MANIFEST, json.dumps(present, indent=1))


def versions() -> dict[str, str]:
    """Installed versions of ``PACKAGES``. That of torch names its build, such as +cu130, which its metadata may not."""
    installed = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed | {"torch": torch.__version__}


def git_state() -> str | None:
    """The commit of this code, with "+" if it has local changes; None outside a checkout or if git does not answer."""
    root = Path(dlr_pretrain.__file__).parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=GIT_SECONDS)
    except subprocess.TimeoutExpired:  # such as a checkout on a slow file server
        return None
    return done.stdout.strip() or None
