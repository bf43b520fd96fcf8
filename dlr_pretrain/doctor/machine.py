"""Checks of the machine: software, GPUs, caches, W&B, SLURM. None of them needs a model or data."""

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
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import torch
from packaging.requirements import Requirement

from dlr_pretrain.config import Config, compiler_problem
from dlr_pretrain.doctor.checks import FAIL, OK, WARN, Outcome
from dlr_pretrain.models.flops import peak_flops
from dlr_pretrain.train.wandb_sender import choose_mode
from dlr_pretrain.util.process import cores

NETWORK_FILE_SYSTEMS = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.sshfs", "afs")
WANDB = "https://api.wandb.ai"
ANSWER = 5.0  # seconds that another program or host may take to answer
CACHE_BYTES = 2e9  # that compiled kernels may take


def software() -> Outcome:
    """Compare installed versions with those that the package declares."""
    found = f"Python {platform.python_version()}, torch {torch.__version__}"
    try:
        declared = [Requirement(text) for text in metadata.requires("dlr-pretrain") or ()]
        asked = metadata.metadata("dlr-pretrain")["Requires-Python"]
    except metadata.PackageNotFoundError:
        return Outcome(WARN, f"{found}; dlr-pretrain itself is not installed", "pip install -e .")
    wrong = []
    for requirement in declared:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} {version} is not {requirement.specifier}")
    if not Requirement(f"python{asked}").specifier.contains(platform.python_version()):
        wrong.append(f"Python {platform.python_version()} is not {asked}")
    if wrong:
        return Outcome(FAIL, f"{found}; {'; '.join(wrong)}", "pip install -e .")
    return Outcome(OK, found)


def gpus(cfg: Config) -> Outcome:
    """Check the GPUs that torch sees, their memory and the CPU cores against ``device`` and this node's ranks."""
    if not torch.cuda.is_available():
        cpu = f"{cores()} cores, {torch.get_num_threads()} threads"
        if cfg.device == "cuda":
            return Outcome(FAIL, f"device=cuda, and torch {torch.__version__} finds no GPU", "Look at nvidia-smi")
        if cfg.device == "cpu":
            return Outcome(OK, f"not used: device=cpu ({cpu})")
        built = torch.version.cuda
        why = "finds none" if built else "is built for CPUs"
        return Outcome(WARN, f"none, torch {why}: the run would train on {cpu}", "Set device=cpu if that is meant")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", 0)) % len(names))
    text = f"{len(names)} x {names[0]}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free, CUDA {torch.version.cuda}"
    if len(set(names)) > 1:
        return Outcome(WARN, f"{text}; and others: {', '.join(sorted(set(names)))}", "Ranks wait for the slowest")
    if local > len(names):
        return Outcome(FAIL, f"{text}, and {local} ranks on this node", f"Use --nproc-per-node {len(names)}")
    if free < 0.9 * total:
        return Outcome(WARN, f"{text}: another process holds some", "Look at nvidia-smi")
    if cores() < 2 * local:
        fix = "Each rank tokenises its own text: ask for more, under SLURM with --cpus-per-gpu=8 or --exclusive"
        return Outcome(WARN, f"{text}; {cores()} CPU cores for {local} ranks", fix)
    if peak_flops(torch.device("cuda", 0), cfg.precision.name) is None:
        return Outcome(OK, f"{text}; its peak in {cfg.precision.name} is not known, so perf/mfu stays empty")
    return Outcome(OK, text)


# ----------------------------------------------------------------------------------------------------
# Caches of compiled kernels


def caches(cfg: Config) -> Outcome:
    """Check what torch.compile needs: a compiler, and a writable cache folder with room on a disk of this machine."""
    if not cfg.compile:
        return Outcome(OK, "not used: compile=false")
    on_gpu = cfg.device != "cpu" and torch.cuda.is_available()
    if problem := compiler_problem(cfg, "cuda" if on_gpu else "cpu"):
        return Outcome(FAIL, f"compile=true: {problem.rule}", problem.fix)
    usual = Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    folders = {Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or usual)}
    if torch.cuda.is_available() and "TRITON_CACHE_DIR" in os.environ:
        folders.add(Path(os.environ["TRITON_CACHE_DIR"]))
    fix = "Set TORCHINDUCTOR_CACHE_DIR (and TRITON_CACHE_DIR) to a folder on a local disk"
    found = []
    for folder in sorted(folders):
        there = existing(folder)
        try:
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(b"x")
                file.flush()
        except OSError as error:
            return Outcome(FAIL, f"{folder}: cannot be written ({error.strerror})", fix)
        kind, free = file_system(there), shutil.disk_usage(there).free
        if kind in NETWORK_FILE_SYSTEMS:
            return Outcome(WARN, f"{folder} is on {kind}: compilation is slow there, and ranks collide", fix)
        if free < CACHE_BYTES:
            return Outcome(WARN, f"{folder}: {free / 1e9:.1f} GB free", fix)
        found.append(f"{folder} ({kind}, {free / 1e9:.0f} GB free)")
    return Outcome(OK, ", ".join(found))


def existing(path: Path) -> Path:
    """The path itself, or the nearest of its parents that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``, as the kernel names it."""
    best, kind = "", "unknown"
    with suppress(OSError):
        for entry in Path("/proc/self/mounts").read_text().splitlines():
            point, found = entry.split()[1:3]
            point = point.replace("\\040", " ")
            if path.resolve().is_relative_to(point) and len(point) >= len(best):
                best, kind = point, found
    return kind


# ----------------------------------------------------------------------------------------------------
# W&B and SLURM


def wandb(cfg: Config) -> Outcome:
    """Check the mode, the key and the server. No key is shown, and nothing is sent."""
    if cfg.logger.name != "wandb":
        return Outcome(OK, f"not used: logger={cfg.logger.name}")
    if (mode := choose_mode()) != "online":
        fix = "python scripts/replay_wandb.py <run> sends it later" if mode == "offline" else ""
        return Outcome(OK, f"{mode}, as WANDB_MODE says", fix)
    host = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB)).hostname
    offline = "The run trains all the same: metrics.jsonl is kept, and scripts/replay_wandb.py sends it later"
    if not (os.environ.get("WANDB_API_KEY") or _in_netrc(host)):
        return Outcome(WARN, f"no key for {host}: the run would be offline", "Set WANDB_API_KEY, or use logger=jsonl")
    url = urlsplit(os.environ.get("WANDB_BASE_URL", WANDB))
    try:
        with socket.create_connection((host, url.port or (80 if url.scheme == "http" else 443)), timeout=ANSWER):
            return Outcome(OK, f"online, a key is there, {host} answers")
    except OSError as error:
        return Outcome(WARN, f"a key is there, but {host} does not answer ({error})", offline)


def _in_netrc(host: str) -> bool:
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def slurm() -> Outcome:
    """Check the scheduler's commands and whether it answers; a machine without one passes."""
    if shutil.which("sbatch") is None:
        return Outcome(OK, "no sbatch here: slurm/ cannot be used, train.py and torchrun can")
    try:
        asked = subprocess.run(["sbatch", "--version"], capture_output=True, text=True, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return Outcome(WARN, f"sbatch is here and gives no answer for {ANSWER:g} s", "Submit from another node")
    version = (asked.stdout or asked.stderr).strip().splitlines()[0] if asked.stdout or asked.stderr else "sbatch"
    if asked.returncode:
        return Outcome(WARN, f"sbatch is here and fails: {version}", "slurm/ cannot be used before that is fixed")
    inside = f"; inside job {os.environ['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in os.environ else ""
    try:
        asked = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=ANSWER)
        answers = asked.returncode == 0 and "UP" in asked.stdout
    except (OSError, subprocess.TimeoutExpired):
        answers = False
    if not answers:
        return Outcome(WARN, f"{version}, but the controller does not answer", "Submit from a node that it knows")
    return Outcome(OK, f"{version}, the controller answers{inside}")
