"""scripts/doctor.py: each check in its time, what it finds named with a fix, no run touched."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.analysis import plan
from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.doctor import command, machine, start
from dlr_pretrain.doctor.checks import FAIL, OK, WARN, Found, Line, in_child, perform
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import UserError
from tests.conftest import ROOT, torchrun


def crash() -> Found:
    faulthandler.disable()  # pytest's would print a traceback into the run of the tests
    os.kill(os.getpid(), signal.SIGSEGV)


def fail(error: Exception) -> Found:
    raise error


@pytest.mark.parametrize(("act", "line"), [
    (signal.pause, Line("x", FAIL, "no answer within 0.3 s. Look at what it waits for")),
    (lambda: in_child(signal.pause, 0.1), Line("x", FAIL, "no answer within 0.1 s: its process was killed")),
    (lambda: in_child(crash, 600), Line("x", FAIL, "its process ended with code -11")),
    (lambda: in_child(lambda: fail(UserError("a. Set b")), 600), Line("x", FAIL, "a. Set b")),
    (lambda: fail(ValueError("odd\nand long")), Line("x", FAIL, "ValueError: odd")),
    (lambda: Path("/nowhere/at/all").read_text(), Line("x", FAIL, "/nowhere/at/all: No such file or directory")),
    (lambda: Found("slow", "Wait"), Line("x", WARN, "slow. Wait")),
    (lambda: in_child(lambda: Found("all is well"), 600), Line("x", OK, "all is well")),
])  # fmt: skip
def test_a_check_that_hangs_crashes_or_raises_is_a_line(act, line):
    assert perform("x", 0.3 if "0.3 s" in line.text else 600, act) == line


# ----------------------------------------------------------------------------------------------------
# The whole command


NAMES = ["config", "gpus", "caches", "disk", "wandb", "collectives", "data", "checkpoint", "step"]


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def levels(text: str) -> dict[str, str]:
    return {name: level for level, name in re.findall(r"^(ok|warn|FAIL) +(\S+)", text, flags=re.MULTILINE)}


def test_a_broken_tokenizer_is_told_and_the_rest_is_checked(words, tmp_path, capfd):
    """The run that is there already stays as it is."""
    run_dir = tmp_path / "runs" / "mine"
    (run_dir / "checkpoints" / "step_00000005").mkdir(parents=True)
    (run_dir / "manifest.json").write_text('{"identity": {}, "starts": []}')
    before = tree(tmp_path)
    given = words(f"run.dir={run_dir}", "tokenizer.path=/nowhere/spiece.model", "backbone=cola", "dlr=on")
    assert command.main(given) == 1
    said = capfd.readouterr().out
    assert list(levels(said)) == NAMES
    assert {name for name, level in levels(said).items() if level == FAIL} == {"config", "data"}
    assert "tokenizer.path=/nowhere/spiece.model: no such file" in " ".join(said.split())
    assert tree(tmp_path) == before and not list(tmp_path.rglob(".doctor*"))
    assert command.main(["scale=tiny", "backbone=colla"]) == 2
    assert "Did you mean cola?" in capfd.readouterr().err


@pytest.mark.full
def test_two_ranks_are_checked_together(words, tmp_path):
    done = torchrun(words(f"run.dir={tmp_path}/runs/a", "train.micro_batch=auto"), 2, ROOT / "scripts" / "doctor.py")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert list(levels(done.stdout)) == NAMES
    said = " ".join(done.stdout.split())
    assert "over 2 ranks by gloo" in said and "1 x 4 x 32 tokens" in said and "tensors equal bit for bit" in said
    assert not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------------------------------
# The single checks


def test_too_little_room_fails_and_what_the_run_has_saved_counts(words, tmp_path, monkeypatch):
    cfg = load(words(f"run.dir={tmp_path}/runs/a"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=80e6))
    assert "each checkpoint 0.001 GB" in machine.disk(cfg, 10e6, 1e6).text
    with pytest.raises(UserError, match=r"the run keeps 0\.1 GB\. Set run\.root to another disk"):
        machine.disk(cfg, 100e6, 1e6)
    (tmp_path / "runs/a/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/a/checkpoints/part").write_bytes(b"x" * 5_000_000)
    assert machine.disk(cfg, 84e6, 1e6).warning == ""
    with Ranks(cfg) as ranks, pytest.raises(UserError, match="nothing can be written there"):
        start.saved_and_read(cfg, ranks, None)


@pytest.mark.usefixtures("no_export")
def test_the_planned_checkpoint_is_the_real_one(train, words, tmp_path):
    folder = train(tmp_path / "run", "backbone=cola", "dlr=on", "train.steps=2", "precision=bf16_mixed")
    planned = plan.disk(load(words("backbone=cola", "dlr=on", "precision=bf16_mixed")), 120)["checkpoint"]
    (part,) = (folder / "checkpoints" / "step_00000002").glob("part_*")
    header = int.from_bytes(part.read_bytes()[:8], "little") + 8
    assert part.stat().st_size - header - 5056 == pytest.approx(planned, rel=0.01)  # 5056: the generator's state


def test_wandb_says_mode_key_and_server(words, monkeypatch, tmp_path):
    cfg = load(words("logger=wandb"), machine=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert machine.wandb(cfg) == Found("offline, as the environment says")
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert machine.wandb(cfg).text == "no key for 127.0.0.1"
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    found = machine.wandb(cfg)
    assert "127.0.0.1 does not answer" in found.text and found.warning and "k" * 40 not in str(found)
    monkeypatch.delenv("WANDB_API_KEY")
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    assert "a key is there" in machine.wandb(cfg).text


def test_compilation_needs_a_local_cache_and_on_a_gpu_a_compiler(words, tmp_path, monkeypatch):
    cfg = load(words("compile=true", "device=auto"), machine=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert machine.caches(cfg, "cpu").text.startswith(str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "file_system", lambda _: "nfs")
    assert "TORCHINDUCTOR_CACHE_DIR" in machine.caches(cfg, "cpu").warning and not (tmp_path / "cache").exists()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UserError, match="on a GPU, and there is no no-such-compiler"):
        machine.caches(cfg, "cuda")
    with pytest.raises(ConfigError, match="compile=true: needs a C compiler on a GPU"):
        Ranks(cfg)  # as the trainer does before anything is built


def test_the_tokenizer_is_held_against_the_model(words, corpus):
    cfg = load(words())
    with Ranks(cfg) as ranks:
        assert f"{corpus}" in start.data(cfg, ranks).text
        with pytest.raises(UserError, match=r"Set scale\.vocab_size=120 or more"):
            start.data(load(words("scale.vocab_size=119")), ranks)
