"""A save goes on beside training, holds what it was given, and says on every rank how it ended."""

from __future__ import annotations

import errno
import itertools
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.cli import load as load_config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.train import checkpoint, saver
from dlr_pretrain.train.checkpoint import Snapshot, directories, load, newest
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.util.errors import UserError
from tests.conftest import on_ranks
from tests.unit.test_checkpoint import keeping

ALONE = SimpleNamespace(
    rank=0,
    world_size=1,
    is_main=True,
    device=torch.device("cpu"),
    patient=nullcontext,
    new_group=lambda: None,
    gather=lambda value, _=None: [value],
)
CONSOLE = SimpleNamespace(say=print)


def saver_of(folder, ranks=ALONE, lease=None) -> Saver:
    return Saver(folder, ranks, keeping(9), lease, None, CONSOLE)


def snapshot(value: float) -> Snapshot:
    return Snapshot({"w": torch.full((4, 3), value)}, {}, [torch.get_rng_state()], {"step": int(value)})


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_ranks_that_do_not_share_their_disk_are_told_before_the_first_step(tmp_path, words):
    def act():
        with Ranks(load_config(words(), 2)) as ranks, pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 1:  # another machine, on which rank 0's folder is not
                patch.setattr(saver, "wait_for", lambda condition, seconds: False)
            saver_of(tmp_path, ranks).rehearse()

    with pytest.raises(AssertionError, match=r"rank 1: .* on .* is not that of rank 0\. Give run\.dir on a file"):
        on_ranks(act, 2)
    assert not list((tmp_path / "checkpoints").iterdir())


def test_what_is_saved_is_what_was_there_when_it_was_asked_for_and_a_save_waits_for_the_one_before(
    tmp_path, monkeypatch
):
    opened, write, given = threading.Event(), checkpoint.write_part, snapshot(1)
    monkeypatch.setattr(checkpoint, "write_part", lambda *rest: opened.wait(600) and write(*rest))
    update_record(tmp_path, {"identity": {"seed": 1}})
    with saver_of(tmp_path) as saving:
        saving.save(1, given)
        given.model["w"].fill_(9)
        assert saving.saved == 0 and newest(saving.root) == (None, {})
        opened.set()
        saving.save(2, snapshot(2))
        assert saving.saved >= 1
    assert [d.name for d in directories(saving.root)] == ["step_00000002", "step_00000001"]
    assert torch.equal(load(saving.root / "step_00000001").model["w"].whole(), torch.full((4, 3), 1.0))
    assert read_record(tmp_path)["saved"] == 2 and load(saving.root / "step_00000002").state["identity"] == {"seed": 1}


def test_a_failure_is_told_once_and_a_save_takes_the_place_of_one_that_has_failed(tmp_path, monkeypatch, capsys):
    with saver_of(tmp_path) as saving:
        for step, told in ((1, True), (3, False)):
            with monkeypatch.context() as patched:
                patched.setattr(checkpoint, "write_part", full_disk)
                saving.save(step, snapshot(step))
                saving._thread.join()
            if told:
                with pytest.raises(UserError, match=r"checkpoint of step 1 could not be written: .*No space left"):
                    saving.raise_error()
            saving.save(step + 1, snapshot(step + 1), final=True)
            assert saving.saved == step + 1
    said = capsys.readouterr().out
    assert "step 1 could" not in said and "checkpoint of step 3 could not be written" in said
    assert [d.name for d in directories(saving.root)] == ["step_00000004", "step_00000002"]


def test_a_rank_that_is_lost_meanwhile_is_no_fault_of_the_files(tmp_path):
    """What the collective says goes on to the caller, who knows which rank is missing."""

    def lost(*_):
        raise RuntimeError("gloo: Connection closed by peer")

    saving = saver_of(tmp_path, SimpleNamespace(**vars(ALONE) | {"gather": lost}))
    saving.save(1, snapshot(1))
    with pytest.raises(RuntimeError, match="Connection closed"):
        saving.wait()


def test_what_is_not_permitted_does_not_count(tmp_path):
    def refuse():
        raise UserError("the lease is another's")

    saving = saver_of(tmp_path, lease=SimpleNamespace(require_held=refuse))
    saving.save(1, snapshot(1))
    with pytest.raises(UserError, match="the lease is another's"):
        saving.wait()
    assert newest(saving.root) == (None, {})


@pytest.mark.usefixtures("no_export")
def test_a_full_disk_ends_the_run_and_what_was_trained_meanwhile_is_saved(train, tmp_path, monkeypatch):
    write, take, steps, trained_on = checkpoint.write_part, Guard.next_batch, itertools.count(), threading.Event()

    def filling(folder, *rest):
        if "00000010" in folder.name:
            assert trained_on.wait(600)
            full_disk()
        return write(folder, *rest)

    def next_batch(self, loader):  # the save of step 10 has failed by the time that it is looked at
        if next(steps) == 11:
            trained_on.set()
            self.saver._thread.join()
        return take(self, loader)

    root = tmp_path / "run" / "checkpoints"
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_part", filling)
        patched.setattr(Guard, "next_batch", next_batch)
        with pytest.raises(UserError, match=r"checkpoint of step 10 could not be written: .*No space left"):
            train(tmp_path / "run")
    assert newest(root)[0].name == "step_00000011"
    train(tmp_path / "run")
    assert {d.name for d in root.iterdir()} == {"step_00000015", "step_00000020"}
