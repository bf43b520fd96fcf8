"""Checks of this machine: GPUs, compiler cache, disk, W&B. Each returns a text, with a warning if need be."""

from __future__ import annotations

import getpass
import netrc
import os
import platform
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import torch

from dlr_pretrain.config import Config, compiler_problem
from dlr_pretrain.doctor.checks import Found
from dlr_pretrain.models.flops import peak_flops
from dlr_pretrain.train.views import wandb_mode
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import cores

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb2", "fuseblk", "afs")
ANSWER = 5.0  # seconds that another host may take to answer


def gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2g} GB"


def gpus(cfg: Config) -> Found:
    """The GPUs that torch sees, their memory and the CPU cores against ``device`` and the ranks of this node."""
    on_cpu = f"{cores()} cores, {torch.get_num_threads()} threads; Python {platform.python_version()}, "
    on_cpu += f"torch {torch.__version__}"
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


def disk(cfg: Config, run_bytes: float, checkpoint_bytes: float) -> Found:
    """The free space of the run's disk against what the run keeps; what it has saved already counts."""
    place, kept = existing(Path(cfg.run.dir).absolute()), Path(cfg.run.dir, "checkpoints")
    held = sum(f.stat().st_size for f in kept.rglob("*") if f.is_file()) if kept.is_dir() else 0
    free = shutil.disk_usage(place).free
    text = f"{place} ({file_system(place)}): {gigabytes(free)} free, and the run keeps {gigabytes(run_bytes)}"
    if free + held < run_bytes:
        fix = "Set run.root to another disk, or keep less (checkpoint.keep_last, checkpoint.keep_every)"
        raise UserError(f"{text}. {fix}")
    return Found(f"{text}, each checkpoint {gigabytes(checkpoint_bytes)}")


def caches(cfg: Config, device: str) -> Found:
    """What torch.compile needs: a compiler, and a cache folder on a disk of this machine."""
    if not cfg.compile:
        return Found("not used: compile=false")
    if problem := compiler_problem(cfg, device):
        raise UserError(f"compile=true: {problem.rule}. {problem.fix}")
    usual = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    folder = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or usual).absolute()
    there, fix = existing(folder), "Set TORCHINDUCTOR_CACHE_DIR to a folder on a local disk"
    if not os.access(there, os.W_OK):
        raise UserError(f"{folder}: cannot be written. {fix}")
    kind = file_system(there)
    warning = f"{fix}: ranks collide on a network disk" if kind in NETWORK_FILE_SYSTEMS else ""
    return Found(f"{folder} ({kind}, {gigabytes(shutil.disk_usage(there).free)} free)", warning)


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
