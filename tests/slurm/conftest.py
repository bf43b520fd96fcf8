"""A scheduler for the tests, with two nodes on this machine, if its daemons are installed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sinfo", "squeue", "scontrol", "scancel")

# Two nodes on this machine. Their names must resolve here, because ranks meet by them. A requeued job waits for
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
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
NodeName={host} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=8000 State=UNKNOWN
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="session", autouse=True)
def scheduler(tmp_path_factory):
    """Start the scheduler, or skip the tests if it cannot be started."""
    if os.getuid() != 0 or not all(map(shutil.which, PROGRAMS)):
        pytest.skip(f"no SLURM here: only root can start one, with {', '.join(PROGRAMS)}")
    root = tmp_path_factory.mktemp("scheduler")
    try:
        start(root)
        yield
    finally:
        for pid in map(int, (path.read_text() for path in root.glob("*.pid"))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.environ.pop("SLURM_CONF", None)


def wait(until: Callable[[], object], about: Callable[[], object]) -> None:
    deadline = time.monotonic() + 1800
    while not until():
        assert time.monotonic() < deadline, about()
        time.sleep(0.2)


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def both_up() -> bool:
    """Whether both nodes can take jobs."""
    words = ["sinfo", "--noheader", "--Node", "--responding", "--states=idle,mixed,allocated", "--format=%N"]
    return len(set(subprocess.run(words, capture_output=True, text=True).stdout.split())) == 2


def start(root: Path) -> None:
    """Start munged, slurmctld and two slurmd below ``root``, and wait until both nodes are up."""
    host = socket.gethostname().partition(".")[0]
    with socket.socket() as a, socket.socket() as b, socket.socket() as c:
        for free in (a, b, c):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (a, b, c)]
    root.chmod(0o755)
    for folder in ("state", f"spool-{host}", "spool-localhost"):
        (root / folder).mkdir()
    key, conf = root / "munge" / "key", root / "slurm.conf"
    key.parent.mkdir(mode=0o700)
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    conf.write_text(CONF.format(root=root, host=host, ports=ports))
    (root / "cgroup.conf").write_text("CgroupAutomount=no\n")
    os.environ["SLURM_CONF"] = str(conf)
    files = [f"--{name}-file={root}/munged.{name}" for name in ("pid", "log", "seed")]
    ask("munged", "--force", f"--key-file={key}", f"--socket={root}/munge.socket", *files)
    ask("slurmctld", "-i")
    for node in (host, "localhost"):
        ask("slurmd", "-N", node, "-f", str(conf))
    wait(both_up, lambda: (root / "slurmctld.log").read_text()[-3000:])
