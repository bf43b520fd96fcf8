"""scripts/doctor.py: each check by itself and in its time, what it finds named with a fix, no run touched."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.doctor import command, machine, start
from dlr_pretrain.doctor.checks import FAIL, OK, WARN, Check, Outcome, Ranks, run
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.util.errors import UserError
from tests.conftest import ROOT, torchrun
from tests.kill.test_disk import small_disk

__all__ = ["small_disk"]

# ---------------------------------------------------------------------------------------------------- how they are run


def hangs() -> Outcome:
    time.sleep(600)


def crashes() -> Outcome:
    faulthandler.disable()  # pytest's would print a traceback into the run of the tests
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves() -> Outcome:
    print("no licence for that", flush=True)
    os._exit(7)


def refuses() -> Outcome:
    raise UserError("data.root=/x: no such folder. Set it")


def fails() -> Outcome:
    raise ValueError("odd\nand long")


def finds_no_file() -> Outcome:
    Path("/nowhere/at/all").read_text()


def test_no_check_stops_another(capsys):
    """A check that hangs, crashes, leaves or raises is a line like others; what it has started ends with it."""
    acts = {"hang": hangs, "crash": crashes, "leave": leaves, "refuse": refuses, "error": fails, "file": finds_no_file}
    checks = [Check(name, 0.5 if name == "hang" else 20, act) for name, act in acts.items()]
    checks.append(Check("good", 20, lambda: Outcome(OK, "all is well")))
    began = time.monotonic()
    assert not run(checks, Ranks())
    assert time.monotonic() - began < 60
    lines = [" ".join(text.split()) for text in re.split(r"\n(?=\S)", capsys.readouterr().out.strip())]
    assert [re.sub(r" \(\d+ s\)$", "", text) for text in lines] == [
        "FAIL hang no answer within 0 s. Look at what it waits for, or give it more time with --patience",
        "FAIL crash the check ended by SIGSEGV",
        "FAIL leave the check ended with code 7: no licence for that",
        "FAIL refuse data.root=/x: no such folder. Set it",
        "FAIL error ValueError: odd",
        "FAIL file /nowhere/at/all: No such file or directory",
        "ok good all is well",
    ]


def test_a_warning_is_no_failure(capsys):
    assert run([Check("one", 20, lambda: Outcome(WARN, "slow", "Wait"))], Ranks())
    assert "warn  one         slow. Wait" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------- the whole command


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def levels(text: str) -> dict[str, str]:
    return {name: level for level, name in re.findall(r"^(ok|warn|FAIL) +(\S+)", text, flags=re.MULTILINE)}


NAMES = ["config", "software", "gpus", "disk", "caches", "wandb", "slurm", "data", "collectives", "checkpoint", "step"]


def test_a_broken_tokenizer_is_told_and_the_rest_is_checked(words, tmp_path, capfd, monkeypatch):
    """Without a scheduler, which is no failure; the run that is there already stays as it is."""
    run_dir = tmp_path / "runs" / "mine"
    (run_dir / "checkpoints" / "step_00000005").mkdir(parents=True)
    (run_dir / "manifest.json").write_text('{"identity": {}, "starts": []}')
    before = tree(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    given = words(f"run.dir={run_dir}", "tokenizer.path=/nowhere/spiece.model", "backbone=cola", "dlr=on")
    assert command.main(given) == 1
    said = capfd.readouterr().out
    assert list(levels(said)) == NAMES
    assert {name for name, level in levels(said).items() if level == FAIL} == {"config", "data"}
    assert "tokenizer.path=/nowhere/spiece.model: no such file" in " ".join(said.split())
    assert "no sbatch here" in said
    assert max(len(line) for line in said.splitlines() if "/" not in line) <= 80
    assert tree(tmp_path) == before and not list(tmp_path.rglob(".doctor*"))


def test_a_directory_is_held_against_the_run_that_is_meant(words, tmp_path):
    """Finished, on its way, another run, which train.py refuses, or a record that nobody can read."""
    given = words(f"run.dir={tmp_path}/a")
    cfg = load(given)
    folder = Path(cfg.run.dir)
    assert command.configuration(given)[1].text.endswith(f"{folder}, a new run")
    folder.mkdir()
    update_record(folder, {"identity": {"train.lr": cfg.train.lr}, "saved": cfg.train.steps})
    assert command.configuration(given)[1].text.endswith("which goes on from its last checkpoint")
    (folder / "folded").mkdir()
    (folder / "folded" / "README.md").touch()
    found = command.configuration(given)[1]
    assert found.level == OK and found.text.endswith(f"{folder}, which has finished")
    update_record(folder, {"identity": {"train.lr": 0.5}})
    found = command.configuration(given)[1]
    assert found.level == FAIL and f"holds another run: train.lr: 0.5 there, {cfg.train.lr} here" in found.text
    update_record(folder, {"saved": None})  # it may become another
    assert command.configuration(given)[1].level == OK
    (folder / "manifest.json").write_text("{")
    found = command.configuration(given)[1]
    assert found.level == FAIL and "manifest.json is damaged" in found.text


@pytest.mark.slow
def test_two_ranks_meet_in_each_check_that_needs_them(words, tmp_path):
    given = words(f"run.dir={tmp_path}/runs/a", "train.micro_batch=auto")
    done = torchrun(given, 2, ROOT / "scripts" / "doctor.py")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert list(levels(done.stdout)) == NAMES
    said = " ".join(done.stdout.split())
    assert "over 2 ranks by gloo" in said and "train.micro_batch=auto: 1 x 4 x 32 positions" in said
    assert not (tmp_path / "runs").exists()


def test_what_makes_no_sense_ends_the_command(capsys):
    assert command.main(["scale=tiny", "backbone=colla"]) == 2
    assert "Did you mean cola?" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- the disk


def test_a_full_disk_fails_and_says_what_is_needed(words, tmp_path, monkeypatch):
    cfg = load(words(f"run.dir={tmp_path}/runs/a", "scale.vocab_size=120"))
    sizes = start.disk(cfg, 120)
    usage = shutil.disk_usage(tmp_path)
    for free, level in ((sizes["run"] - 1, FAIL), (sizes["run"] + 10**9, None)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        found = start.disk_of_the_run(cfg, tmp_path)
        assert found.level == level or (level is None and found.level in (OK, WARN)), found
    assert start.disk_of_the_run(cfg, None).level == FAIL
    assert not list(tmp_path.iterdir())


def test_a_disk_that_is_really_full(words, tmp_path, small_disk):
    disk = small_disk(3000)
    cfg = load(words(f"run.dir={disk}/runs/a"))
    (disk / "filled").write_bytes(b"x" * 2_900_000)
    found = start.disk_of_the_run(cfg, disk)
    assert (found.level, "No space left on device" in found.text) == (FAIL, True), found
    (disk / "filled").unlink()
    assert start.disk_of_the_run(cfg, disk).level in (OK, WARN)
    assert list(disk.iterdir()) == []


def test_a_run_that_has_saved_needs_so_much_less(words, tmp_path, monkeypatch):
    cfg = load(words(f"run.dir={tmp_path}/a"))
    needed, usage = start.disk(cfg, 120)["run"], shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed // 2))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert start.disk_of_the_run(cfg, scratch).level == FAIL
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "part").write_bytes(b"x" * needed)
    assert start.disk_of_the_run(cfg, scratch).level in (OK, WARN)


@pytest.mark.usefixtures("no_export")
def test_the_planned_checkpoint_is_the_real_one(train, words, tmp_path):
    folder = train(tmp_path / "run", "backbone=cola", "dlr=on", "train.steps=2", "precision=bf16_mixed")
    planned = start.disk(load(words("backbone=cola", "dlr=on", "precision=bf16_mixed")), 120)["checkpoint"]
    (part,) = (folder / "checkpoints" / "step_00000002").glob("part_*")
    assert part.stat().st_size == pytest.approx(planned + 5056, rel=0.3)  # the generator's state; and a JSON header
    header = int.from_bytes(part.read_bytes()[:8], "little") + 8
    assert part.stat().st_size - header - 5056 == pytest.approx(planned, rel=0.01)


# ---------------------------------------------------------------------------------------------------- the machine


def test_versions_are_held_against_those_that_are_declared(monkeypatch):
    assert machine.software().level == OK
    real = machine.metadata.version
    monkeypatch.setattr(machine.metadata, "version", lambda name: "1.0" if name == "torch" else real(name))
    found = machine.software()
    assert (found.level, found.fix) == (FAIL, "pip install -e .") and "torch 1.0 is not" in found.text


def test_wandb_says_mode_key_and_server(words, monkeypatch, tmp_path):
    cfg = load(words("logger=wandb"), machine=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert machine.wandb(cfg).level == OK and "offline" in machine.wandb(cfg).text
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert machine.wandb(cfg) == Outcome(
        WARN, "no key for 127.0.0.1: the run would be offline", "Set WANDB_API_KEY, or use logger=jsonl"
    )
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    found = machine.wandb(cfg)
    assert found.level == WARN and "127.0.0.1 does not answer" in found.text and "k" * 40 not in str(found)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY")
    assert "a key is there" in machine.wandb(cfg).text


@pytest.mark.parametrize(("sbatch", "scontrol", "level", "said"), [
    ("echo slurm 23.11", "echo Slurmctld at n1 is UP", OK, "slurm 23.11, the controller answers"),
    ("echo slurm 23.11", "echo is DOWN; exit 1", WARN, "slurm 23.11, but the controller does not answer"),
    ("echo no configuration >&2; exit 1", "true", WARN, "sbatch is here and fails: no configuration"),
])  # fmt: skip
def test_slurm_is_asked(tmp_path, monkeypatch, sbatch, scontrol, level, said):
    for name, line in (("sbatch", sbatch), ("scontrol", scontrol)):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    found = machine.slurm()
    assert (found.level, found.text) == (level, said)


def test_caches_on_a_network_file_system_are_warned_of(words, tmp_path, monkeypatch):
    cfg = load(words("compile=true"), machine=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    assert machine.caches(cfg).level == OK
    assert machine.caches(load(words("compile=false"))).text.startswith("not used")
    monkeypatch.setattr(machine, "file_system", lambda _: "nfs4")
    found = machine.caches(cfg)
    assert found.level == WARN and "is on nfs4" in found.text and "TORCHINDUCTOR_CACHE_DIR" in found.fix
    assert not (tmp_path / "cache").exists()


def test_a_gpu_without_a_compiler_is_found_before_a_step(words, monkeypatch):
    """By the doctor, and by the trainer before anything is built."""
    cfg = load([*words("compile=true", "device=auto")], machine=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("CC", "no-such-compiler")
    found = machine.caches(cfg)
    assert found.level == FAIL and found.text.endswith("on a GPU, and there is no no-such-compiler")
    with pytest.raises(ConfigError, match="compile=true: needs a C compiler on a GPU"):
        Runtime(cfg)


def test_data_that_the_tokenizer_does_not_know_is_warned_of(words, corpus, tmp_path):
    found = start.data(load(words()), 0, 1)
    assert found.level == OK and f"{corpus}" in found.text and "120 pieces" in found.text
    small = load(words("scale.vocab_size=119"))
    assert start.data(small, 0, 1).fix == "Set scale.vocab_size=120 or more"
