"""Checks of this machine: software, GPUs, disk, caches, W&B, SLURM. Each returns a text, with a warning if need be."""

from __future__ import annotations

import getpass
import netrc
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dlr_pretrain.config import Config, compiler_problem
from dlr_pretrain.doctor.checks import Found
from dlr_pretrain.models.flops import peak_flops
from dlr_pretrain.train.views import wandb_mode
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import cores

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb2", "fuseblk", "afs")
ANSWER = 5.0  # seconds that another program or host may take to answer
CACHE_BYTES = 2e9  # that compiled kernels may take
WRITTEN = 64 << 20  # bytes that the disk check writes
SLOW_DISK = 100e6  # bytes/s below which the disk check warns


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2g} GB"


def software() -> Found:
    """Installed versions against those that the package declares."""
    found = f"Python {platform.python_version()}, torch {torch.__version__}"
    installed = {canonicalize_name(package.name): package.version for package in metadata.distributions()}
    if "dlr-pretrain" not in installed:
        return Found(f"{found}; dlr-pretrain itself is not installed", "pip install -e .")
    wrong = []
    for needed in map(Requirement, metadata.requires("dlr-pretrain") or ()):
        version = installed.get(canonicalize_name(needed.name), "missing")
        met = version != "missing" and needed.specifier.contains(version, prereleases=True)
        if not met and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            wrong.append(f"{needed} is declared, and it is {version}")
    if wrong:
        raise UserError(f"{found}; {'; '.join(wrong)}. pip install -e .")
    return Found(found)


def gpus(cfg: Config) -> Found:
    """The GPUs that torch sees, their memory and the CPU cores against ``device`` and the ranks of this node."""
    on_cpu = f"{cores()} cores, {torch.get_num_threads()} threads"
    if not torch.cuda.is_available():
        if cfg.device == "cuda":
            raise UserError(f"device=cuda, and torch {torch.__version__} finds no GPU. Look at nvidia-smi")
        fix = "" if cfg.device == "cpu" else "Set device=cpu if that is meant"
        return Found(f"none: the run trains on the CPU ({on_cpu})", fix)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", 0)) % len(names))
    text = f"{len(names)} x {', '.join(sorted(set(names)))}, {gigabytes(free)} of {gigabytes(total)} free, {on_cpu}"
    if ranks > len(names):
        raise UserError(f"{text}, and {ranks} ranks on this node. Use --nproc-per-node {len(names)}")
    if len(set(names)) > 1:
        return Found(text, "Ranks wait for the slowest GPU")
    if free < 0.9 * total:
        return Found(text, "Another process holds memory: look at nvidia-smi")
    if cores() < 2 * ranks:
        return Found(text, "Each rank tokenises its own text: ask for more cores, under SLURM with --cpus-per-gpu=8")
    if peak_flops(torch.device("cuda", 0), cfg.precision.name) is None:
        text += f"; its peak in {cfg.precision.name} is not known, so perf/mfu stays empty"
    return Found(text)


def disk(cfg: Config, scratch: Path | None, run_bytes: float, checkpoint_bytes: float) -> Found:
    """Writing, fsync and renaming in ``scratch``, on the run's disk, and its free space against what the run keeps."""
    if scratch is None:
        raise UserError(f"{cfg.run.dir}: nothing can be written there. Set run.root to another disk")
    kept = Path(cfg.run.dir, "checkpoints")
    held = sum(f.stat().st_size for f in kept.rglob("*") if f.is_file()) if kept.is_dir() else 0
    free = shutil.disk_usage(scratch).free
    fix = "Set run.root to another disk, or keep less (checkpoint.keep_last, checkpoint.keep_every)"
    if free + held < run_bytes:
        raise UserError(f"{scratch.parent}: {gigabytes(free)} free, and the run keeps {gigabytes(run_bytes)}. {fix}")
    block, blocks = os.urandom(1 << 20), WRITTEN >> 20
    began = time.perf_counter()
    with open(scratch / "written", "wb") as file:
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    (scratch / "written").rename(scratch / "renamed")
    rate = WRITTEN / (time.perf_counter() - began)
    text = f"{scratch.parent} ({file_system(scratch)}): {gigabytes(free)} free, {rate / 1e6:.0f} MB/s with fsync; "
    text += f"the run keeps {gigabytes(run_bytes)}, each checkpoint {gigabytes(checkpoint_bytes)}"
    slow = f"A save takes {checkpoint_bytes / rate:.0f} s: the run goes on meanwhile"
    return Found(text, slow if rate < SLOW_DISK else "")


def caches(cfg: Config, device: str) -> Found:
    """What torch.compile needs: a compiler, and a writable cache folder with room on a disk of this machine."""
    if not cfg.compile:
        return Found("not used: compile=false")
    if problem := compiler_problem(cfg, device):
        raise UserError(f"compile=true: {problem.rule}. {problem.fix}")
    usual = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or usual).absolute()
    there = existing(folder)
    fix = "Set TORCHINDUCTOR_CACHE_DIR to a folder on a local disk"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}). {fix}") from None
    kind, free = file_system(there), shutil.disk_usage(there).free
    return Found(
        f"{folder} ({kind}, {gigabytes(free)} free)",
        f"{fix}: ranks collide on a network disk"
        if kind in NETWORK_FILE_SYSTEMS
        else fix
        if free < CACHE_BYTES
        else "",
    )


def existing(path: Path) -> Path:
    """``path`` itself, or the nearest folder above it that exists."""
    return path if path.exists() else existing(path.parent)


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``, such as nfs."""
    asked = subprocess.run(["stat", "--file-system", "--format=%T", path], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "unknown"


def wandb(cfg: Config) -> Found:
    """The mode, the key and the server of W&B. No key is shown, and nothing is sent."""
    if cfg.logger.view != "wandb":
        return Found(f"not used: logger={cfg.logger.view}")
    if (mode := wandb_mode()) != "online":
        return Found(f"{mode}, as the environment says")
    url = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    has_key = bool(os.environ.get("WANDB_API_KEY"))
    with suppress(OSError, netrc.NetrcParseError):
        has_key = has_key or netrc.netrc(os.environ.get("NETRC")).authenticators(url.hostname) is not None
    if not has_key:
        return Found(f"no key for {url.hostname}", "Set WANDB_API_KEY, or use logger=jsonl: the run would be offline")
    try:
        with socket.create_connection((url.hostname, url.port or 443), timeout=ANSWER):
            return Found(f"online, a key is there, {url.hostname} answers")
    except OSError as error:
        fix = "The run trains all the same and keeps metrics.jsonl. WANDB_MODE=offline avoids the wait"
        return Found(f"a key is there, but {url.hostname} does not answer ({error})", fix)


def slurm() -> Found:
    """Whether the scheduler answers; a machine without one passes."""
    if shutil.which("sbatch") is None:
        return Found("no sbatch here: slurm/ cannot be used, train.py and torchrun can")
    try:
        asked = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=ANSWER)
        said = " ".join((asked.stdout or asked.stderr).split())
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    return Found(said, "" if " UP" in said else "The controller does not answer: submit from a node that it knows")
