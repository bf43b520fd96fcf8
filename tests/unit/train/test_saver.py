"""A save runs beside training, holds what it was given, and reports its end on every rank."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.cli import load as load_config
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.train import checkpoint, saver
from dlr_pretrain.train.checkpoint import directories, load, newest
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests.conftest import on_ranks
from tests.unit.train.test_checkpoint import keeping

ALONE = SimpleNamespace(
    rank=0,
    world_size=1,
    is_main=True,
    device=torch.device("cpu"),
    heartbeat=SimpleNamespace(may_wait=nullcontext, require_held=lambda: None, tick=lambda: None, limit=60.0),
    new_group=lambda: None,
    gather=lambda value, _=None: [value],
)
CONSOLE = SimpleNamespace(say=print)


def saver_of(folder, ranks=ALONE) -> Saver:
    if ranks.is_main:
        update_record(folder, {"identity": {"seed": 1}})
    return Saver(folder, ranks, keeping(9), None, CONSOLE)


def snapshot(value: float) -> tuple[dict, dict, dict]:
    """Tensors of a model and of an optimizer, and a state."""
    return {"w": torch.full((4, 3), value)}, {}, {"step": int(value)}


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_prevents_a_save_is_reported_before_training(tmp_path, words):
    def act():
        with Ranks(load_config(words(), 2)) as ranks, pytest.MonkeyPatch.context() as patch:
            with pytest.raises(UserError, match=r"a checkpoint takes 1e\+06 GB, and .* are free\. Free some space"):
                saver_of(tmp_path, ranks).check_disk(10**15)
            if ranks.rank == 1:  # another machine, which lacks rank 0's folder
                patch.setattr(saver, "wait_for", lambda condition, seconds: False)
            saver_of(tmp_path, ranks).check_disk(1000)

    with pytest.raises(AssertionError, match=r"rank 1: .* on .* is not the folder of rank 0\. Set run\.dir to a"):
        on_ranks(act, 2)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_a_save_holds_the_values_at_its_start(tmp_path, monkeypatch):
    opened, write, given = threading.Event(), checkpoint.write_part, snapshot(1)
    monkeypatch.setattr(checkpoint, "write_part", lambda *rest: opened.wait(600) and write(*rest))
    update_record(tmp_path, {"identity": {"seed": 1}})
    with saver_of(tmp_path) as saving:
        saving.save(*given)
        given[0]["w"].fill_(9)
        assert saving.saved == 0 and newest(saving.root) == (None, {})
        opened.set()
        saving.save(*snapshot(2))
        assert saving.saved >= 1
    assert [d.name for d in directories(saving.root)] == ["step_00000002", "step_00000001"]
    assert torch.equal(load(saving.root / "step_00000001").model["w"].whole(), torch.full((4, 3), 1.0))
    assert read_record(tmp_path)["saved"] == 2 and load(saving.root / "step_00000002").state["identity"] == {"seed": 1}


def test_a_save_that_never_succeeds_ends_with_the_reason(tmp_path, monkeypatch, capsys):
    def filling(folder, *_):
        (folder / "part").touch()
        full_disk()

    with saver_of(tmp_path) as saving:
        saving.save(*snapshot(1), final=True)
        monkeypatch.setattr(checkpoint, "write_part", filling)
        saving.save(*snapshot(2))
        for end in (saving.wait, saving.raise_error, lambda: saving.save(*snapshot(3))):
            with pytest.raises(UserError, match=r"step 2 could not .*No space left.*the same command resumes"):
                end()
    assert capsys.readouterr().out.count("step 2 could not be written") == 1
    assert [d.name for d in saving.root.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("kind", [RuntimeError, UserError], ids=["a rank is lost", "the run was taken over"])
def test_what_forbids_a_save_is_raised_unchanged(tmp_path, kind):
    """At once: only a fault of the disk is retried. What the run's new holder is writing stays."""

    def refuse(*_):
        raise kind("Connection closed")

    theirs = tmp_path / "checkpoints" / ".writing_theirs"
    theirs.mkdir(parents=True)

    heartbeat = SimpleNamespace(may_wait=nullcontext, require_held=refuse, tick=lambda: None, limit=60.0)
    broken = {"gather": refuse} if kind is RuntimeError else {"heartbeat": heartbeat}
    saving = saver_of(tmp_path, SimpleNamespace(**vars(ALONE) | broken))
    saving.save(*snapshot(1))
    with pytest.raises(kind, match="Connection closed"):
        saving.wait()
    assert newest(saving.root) == (None, {}) and theirs.exists() == (kind is UserError)


def test_only_a_fault_of_the_disk_is_retried(tmp_path, monkeypatch):
    attempts = []
    monkeypatch.setattr(checkpoint, "write_part", lambda *_: attempts.append(1) or {}["a"])
    saving = saver_of(tmp_path)
    saving.save(*snapshot(1))
    with pytest.raises(UserError, match=r"^KeyError: 'a'$"):
        saving.wait()
    assert len(attempts) == 1 and not list(saving.root.iterdir())


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize("stops", [False, True])
def test_a_temporarily_full_disk_does_not_end_a_run(train, tmp_path, monkeypatch, capsys, stops):
    write, attempts = checkpoint.write_part, itertools.count(1)

    def filling(folder, *rest):
        if next(attempts) == 2:
            if stops:
                os.kill(os.getpid(), signal.SIGTERM)
            full_disk()
        return write(folder, *rest)

    with monkeypatch.context() as patched, pytest.raises(Stopped, match="saved") if stops else nullcontext():
        patched.setattr(checkpoint, "write_part", filling)
        train(tmp_path / "run")
    said = capsys.readouterr().out
    assert said.count("could not be written") == said.count("checkpoint of step 10 could not be written: ") == 1
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    assert newest(tmp_path / "run" / "checkpoints")[0].name == f"step_{last:08d}" and (stops or last == 20)
