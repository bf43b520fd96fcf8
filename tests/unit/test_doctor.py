"""scripts/doctor.py: each check has a time limit, names what it finds with a fix, and touches no run."""

import errno
import faulthandler
import hashlib
import os
import re
import shutil
import signal
import socket
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlr_pretrain import doctor
from dlr_pretrain.cli import load
from dlr_pretrain.doctor import FAIL, OK, WARN, RankChecks, in_child, perform
from dlr_pretrain.train.guard import StopRequest
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import EXIT_FAILED, UserError
from scripts.doctor import main as command
from tests.conftest import ROOT, torchrun

NAMES = ["config", "gpus", "limits", "network", "disk", "collectives", "data", "step"]


def crash() -> str:
    faulthandler.disable()  # pytest's would print a traceback into the run of the tests
    os.kill(os.getpid(), signal.SIGSEGV)


def fail(error: Exception) -> str:
    raise error


@pytest.mark.parametrize(("act", "answer"), [
    (signal.pause, (FAIL, "no answer within 0.3 s. Look at what it waits for")),
    (lambda: in_child(signal.pause, 0.1), (FAIL, "no answer within 0.1 s: its process was killed")),
    (lambda: in_child(crash, 600), (FAIL, "BrokenProcessPool: A process in the process pool was terminated abruptly "
                                          "while the future was running or pending")),
    (lambda: in_child(partial(fail, UserError("a. Set b")), 600), (FAIL, "a. Set b")),
    (lambda: fail(ValueError("odd\nand long")), (FAIL, "ValueError: odd")),
    (lambda: in_child(partial(fail, UserWarning("slow. Wait")), 600), (WARN, "slow. Wait")),
    (lambda: in_child(partial(str, "all is well"), 600), (OK, "all is well")),
])  # fmt: skip
def test_a_check_that_hangs_crashes_or_raises_is_one_line(act, answer):
    assert perform(0.3 if "0.3 s" in answer[1] else 600, act) == answer


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def levels(text: str) -> dict[str, str]:
    return {name: level for level, name in re.findall(r"^(ok|warn|FAIL) +(\S+)", text, flags=re.MULTILINE)}


def test_a_broken_tokenizer_fails_and_the_rest_is_checked(words, tmp_path, capfd):
    """The run that exists already stays as it is."""
    run_dir = tmp_path / "runs" / "mine"
    (run_dir / "checkpoints" / "step_00000005").mkdir(parents=True)
    (run_dir / "manifest.json").write_text('{"identity": {}, "starts": []}')
    before = tree(tmp_path)
    given = words(f"run.dir={run_dir}", "tokenizer.path=/nowhere/spiece.model", "backbone=cola", "dlr=on")
    assert command(given) == EXIT_FAILED
    said = capfd.readouterr().out
    assert list(levels(said)) == NAMES
    assert {name for name, level in levels(said).items() if level == FAIL} == {"config", "data"}
    assert "tokenizer.path=/nowhere/spiece.model: no such file" in " ".join(said.split())
    assert tree(tmp_path) == before and not list(tmp_path.rglob(".doctor*"))
    assert command(["scale=tiny", "backbone=colla"]) == 2
    assert "Did you mean backbone=cola?" in capfd.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "more"), [(2, ()), (4, ("parallel=hsdp", "parallel.shards=2"))])
def test_ranks_are_checked_together(words, tmp_path, ranks, more):
    given = words(f"run.dir={tmp_path}/runs/a", f"train.micro_batch={8 // ranks}", *more)
    done = torchrun(given, ranks, ROOT / "scripts" / "doctor.py")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = levels(done.stdout)
    assert list(found) == NAMES and [found[name] for name in ("collectives", "data", "step")] == ["ok"] * 3
    assert "FutureWarning" not in done.stderr
    said = " ".join(done.stdout.split())
    assert f"over {ranks} ranks by gloo" in said and f"1 x {8 // ranks} x 32 tokens" in said
    assert "a checkpoint and the folded model written in" in said and not (tmp_path / "runs").exists()


def test_the_limits_of_a_machine_that_many_ranks_meet(monkeypatch):
    """Each is named with what to do: open files, a name that other nodes cannot reach, a container's shared memory."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"WORLD_SIZE": 16, "LOCAL_WORLD_SIZE": 8, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("socket.gethostname", lambda: "node7")
    monkeypatch.setattr("socket.gethostbyname", {"node7": "127.0.1.1"}.__getitem__)
    level, text = perform(600, doctor.limits)
    assert level == FAIL and "node7 is 127.0.1.1" in text and "GLOO_SOCKET_IFNAME" in text
    monkeypatch.setattr("socket.gethostbyname", {"node7": "10.0.0.7"}.__getitem__)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=64 << 20))
    level, text = perform(600, doctor.limits)
    assert level == WARN and "/dev/shm of 0.067 GB" in text and "--ipc=host" in text
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(total=8 << 30))
    assert perform(600, doctor.limits)[0] == OK
    monkeypatch.setattr("dlr_pretrain.util.process.allow_files", lambda count: False)
    level, text = perform(600, doctor.limits)
    assert level == FAIL and "a rank of 16 needs 560 open files" in text and "ulimit -Hn" in text


def test_free_space_includes_what_the_run_has_saved(words, tmp_path, monkeypatch):
    cfg, sizes = load(words(f"run.dir={tmp_path}/runs/a")), {"run": 10e6, "checkpoint": 1e6}
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=8e6))
    with pytest.raises(UserError, match=r"the run keeps 0\.01 GB\. Set run\.root to another disk"):
        doctor.disk(cfg, sizes)
    (tmp_path / "runs/a/checkpoints/step_00000001").mkdir(parents=True)
    (tmp_path / "runs/a/checkpoints/step_00000001/part_00000").write_bytes(b"x" * 5_000_000)
    assert "each checkpoint 0.001 GB" in doctor.disk(cfg, sizes)


def test_a_tokenizer_larger_than_the_model_fails(words, corpus, tmp_path):
    cfg = load(words(f"run.dir={tmp_path}/run"))
    with Ranks(cfg) as ranks:
        assert f"{corpus}" in RankChecks(cfg, ranks, StopRequest(ranks)).data()
        with pytest.raises(UserError, match=r"Set scale\.vocab_size=120 or more"):
            RankChecks(load(words("scale.vocab_size=119", f"run.dir={tmp_path}/run")), ranks, StopRequest(ranks)).data()


def test_the_proxy_of_each_server_is_named(words, monkeypatch):
    """A proxy that refuses connections is a failure at once; without the check, the text would be asked for minutes."""
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    def network(*given: str) -> tuple[str, str]:
        cfg = load([word for word in words(*given) if not word.startswith("data=")] + ["data=local"], machine=False)
        return perform(600, partial(doctor.network, cfg))

    here, web = "text and tokenizer are on this machine", "data.root=https://data.org/text"
    assert network() == (OK, here)
    assert network(web) == (OK, "data.org without a proxy")
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        port = proxy.getsockname()[1]
        monkeypatch.setenv("https_proxy", f"http://me:secret@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "huggingface.co")
        assert network() == (OK, here)
        level, said = network(web)
        assert level == FAIL and f"data.org through http://***@127.0.0.1:{port}: " in said and "NO_PROXY" in said
        proxy.listen()
        assert network(web) == (OK, f"data.org through http://***@127.0.0.1:{port}")
        hub = network("data.root=hf://datasets/x/y")
        assert hub == (OK, "huggingface.co without a proxy")


def test_shared_memory_that_cannot_be_written_is_named(monkeypatch):
    refused = partial(fail, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", lambda *_, **__: refused())
    level, said = perform(600, doctor.limits)
    assert level == FAIL and "/dev/shm: Read-only file system" in said and "--shm-size" in said
