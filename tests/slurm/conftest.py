"""A scheduler for the tests: the one that answers here, or a private one where its daemons are installed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.util.history import read_metrics

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "sinfo", "squeue", "scontrol", "scancel")
CPUS = 8  # of a node, whatever the machine has

# Two nodes on this machine. Names that resolve here as they are, since ranks meet by them. A requeued job waits for
# cred_expire + 1 seconds, two minutes by default.
CONF = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
KillWait=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cpus} RealMemory=8000 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cpus} RealMemory=8000 State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="session", autouse=True)
def scheduler(tmp_path_factory):
    """Skips where there is none and none can be started."""
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no SLURM here: {missing[0]} is not installed")
    if _up():
        yield
        return
    if os.getuid() != 0 or any(shutil.which(name) is None for name in DAEMONS):
        pytest.skip(f"no SLURM here: sinfo does not answer, and only root, with {', '.join(DAEMONS)}, can start one")
    root = tmp_path_factory.mktemp("scheduler")
    try:
        os.environ["SLURM_CONF"] = str(_start(root))
        yield
    finally:
        for pid in map(int, (path.read_text() for path in root.glob("*.pid"))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.environ.pop("SLURM_CONF", None)


@pytest.fixture
def two_nodes(scheduler):
    """Skips where fewer are up; waits for one that a test has just set down."""
    for _ in range(100):
        if len(_up()) > 1:
            return
        time.sleep(0.1)
    pytest.skip("only one node is up")


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def assert_same_run(one: Path, other: Path) -> None:
    """The same losses and evaluations in two run directories, and the same weights, bit for bit."""
    kept = ("step", "train/loss", "train/grad_norm", "eval/loss")
    records = [[[r.get(key) for key in kept] for r in read_metrics(run / "metrics.jsonl")] for run in (one, other)]
    assert records[0] == records[1]
    a, b = (load_file(run / "folded" / "model.safetensors") for run in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _up() -> list[str]:
    """The nodes that can take jobs."""
    words = ["sinfo", "--noheader", "--Node", "--responding", "--states=idle,mixed,allocated", "--format=%N"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return sorted(set(done.stdout.split()))


def _start(root: Path) -> Path:
    """Start munged, slurmctld and two slurmd below ``root``; returns the configuration when both nodes are up."""
    host = socket.gethostname().partition(".")[0]
    socket.getaddrinfo(host, None)  # else nothing that follows would work
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        ports = []
        for free in (a, b, c):
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    root.chmod(0o755)
    (root / "state").mkdir()
    key = root / "munge" / "key"
    key.parent.mkdir(mode=0o700)
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf = root / "slurm.conf"
    conf.write_text(CONF.format(root=root, host=host, ports=ports, cpus=CPUS))
    (root / "cgroup.conf").write_text("CgroupAutomount=no\n")
    files = [f"--{name}-file={root}/munged.{name}" for name in ("pid", "log", "seed")]
    _run("munged", "--force", f"--key-file={key}", f"--socket={root}/munge.socket", *files)
    os.environ["SLURM_CONF"] = str(conf)
    _run("slurmctld", "-i")
    for node in (host, "localhost"):
        (root / f"spool-{node}").mkdir()
        _run("slurmd", "-N", node, "-f", str(conf))
    deadline = time.monotonic() + 30
    while len(_up()) < 2:
        assert time.monotonic() < deadline, (root / "slurmctld.log").read_text()[-3000:]
        time.sleep(0.1)
    return conf


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, (command, done.stderr)
