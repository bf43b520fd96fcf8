"""A save goes on beside training, holds what it was given, and says on every rank how it ended."""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.cli import load as load_config
from dlr_pretrain.train import checkpoint, saver
from dlr_pretrain.train.checkpoint import Keep, Snapshot, load, newest
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.history import read_metrics
from tests.conftest import on_ranks

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


def saver_of(folder, ranks, keep, lock=None, **more) -> Saver:
    return Saver(folder, ranks, keep, lock, None, CONSOLE, {}, **more)


def snapshot(value: float) -> Snapshot:
    return Snapshot({"w": torch.full((4, 3), value)}, {}, [torch.get_rng_state()], {"step": int(value)})


@pytest.fixture
def gate(monkeypatch):
    """Writing waits for it."""
    opened, write = threading.Event(), checkpoint.write_part

    def gated(*given):
        assert opened.wait(30)
        return write(*given)

    monkeypatch.setattr(checkpoint, "write_part", gated)
    yield opened
    opened.set()


def test_ranks_that_do_not_share_their_disk_are_told_before_the_first_step(tmp_path, words):
    def act():
        with Ranks(load_config(words(), 2)) as ranks, pytest.MonkeyPatch.context() as patch:
            if ranks.rank == 1:  # another machine, on which rank 0's folder is not
                patch.setattr(saver, "SHOWN", 0.0)
                patch.setattr(saver, "write_durably", lambda path, _: (tmp_path / "elsewhere" / path.name).read_text())
            saver_of(tmp_path, ranks, Keep(1)).rehearse()

    with pytest.raises(AssertionError, match=r"rank 1: .* on .* is not that of rank 0\. Give run\.dir on a file"):
        on_ranks(act, 2)


def test_a_folder_that_a_file_system_shows_late_is_waited_for(tmp_path, monkeypatch):
    write, late = saver.write_durably, iter([True, False])

    def shown_late(path, content):
        if next(late):
            raise FileNotFoundError(path)
        write(path, content)

    monkeypatch.setattr(saver, "write_durably", shown_late)
    saver_of(tmp_path, ALONE, Keep(1)).rehearse()
    assert next(late, None) is None


def test_a_rehearsal_leaves_nothing(tmp_path):
    saver_of(tmp_path, ALONE, Keep(1)).rehearse()
    assert not list((tmp_path / "checkpoints").iterdir())


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(tmp_path, gate):
    given = snapshot(1)
    with saver_of(tmp_path, ALONE, Keep(2)) as saving:
        saving.save(1, given)
        given.model["w"].fill_(9)
        assert saving.saved == 0 and newest(tmp_path / "checkpoints") == (None, [])
        gate.set()
        saving.wait()
        assert saving.saved == 1
    assert torch.equal(load(tmp_path / "checkpoints/step_00000001").model["w"].whole(), torch.full((4, 3), 1.0))


def test_a_save_waits_for_the_one_before(tmp_path, gate):
    with saver_of(tmp_path, ALONE, Keep(9)) as saving:
        saving.save(1, snapshot(1))
        threading.Timer(0.05, gate.set).start()
        saving.save(2, snapshot(2))
        assert saving.saved >= 1
    assert [d.name for d in checkpoint.directories(tmp_path / "checkpoints")] == ["step_00000002", "step_00000001"]


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_failure_is_told_once_and_the_next_save_is_a_new_one(tmp_path, monkeypatch):
    with saver_of(tmp_path, ALONE, Keep(2)) as saving:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "write_part", full_disk)
            saving.save(1, snapshot(1))
            with pytest.raises(UserError, match=r"checkpoint of step 1 could not be written: .*No space left"):
                saving.wait()
        saving.wait()
        saving.save(2, snapshot(2))
        saving.wait()
    assert newest(tmp_path / "checkpoints") == (tmp_path / "checkpoints/step_00000002", [])


def test_a_save_takes_the_place_of_one_that_has_failed(tmp_path, monkeypatch, capsys):
    """Such as that of a stop, or the last: a disk that was full once, and nobody has looked since, costs no steps."""

    with saver_of(tmp_path, ALONE, Keep(2)) as saving:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoint, "write_part", full_disk)
            saving.save(1, snapshot(1))
            saving._thread.join()
        saving.save(2, snapshot(2), final=True)
        assert saving.saved == 2
    assert "checkpoint of step 1 could not be written" in capsys.readouterr().out
    assert newest(tmp_path / "checkpoints") == (tmp_path / "checkpoints/step_00000002", [])


@pytest.mark.usefixtures("no_export")
def test_the_last_step_is_saved_after_a_save_that_failed_unheard(train, tmp_path, monkeypatch, capsys):
    write, take = checkpoint.write_part, Guard.next_batch

    def full(aside, *rest):
        if "00000005" in aside.name:
            raise OSError(28, "No space left on device")
        return write(aside, *rest)

    def deaf(self, loader):  # the save fails after the last look at it
        if self.saver.begun == 5:
            self.saver._thread.join()
            error, self.saver.error = self.saver.error, None
            try:
                return take(self, loader)
            finally:
                self.saver.error = error
        return take(self, loader)

    monkeypatch.setattr(saver.checkpoint, "write_part", full)
    monkeypatch.setattr(Guard, "next_batch", deaf)
    train(tmp_path / "run", "train.steps=6")
    assert "checkpoint of step 5 could not be written" in (said := capsys.readouterr().out)
    assert "Step 6 is saved in its place" in said
    assert newest(tmp_path / "run" / "checkpoints")[0].name == "step_00000006"


def test_a_rank_that_is_lost_meanwhile_is_no_fault_of_the_files(tmp_path):
    """What the collective says goes on to the ranks, which knows who is missing."""

    def lost(*_):
        raise RuntimeError("gloo: Connection closed by peer")

    saving = saver_of(tmp_path, SimpleNamespace(**vars(ALONE) | {"gather": lost}), Keep(2))
    saving.save(1, snapshot(1))
    with pytest.raises(RuntimeError, match="Connection closed"):
        saving.wait()


def test_a_step_that_is_there_already_counts_as_saved(tmp_path):
    for _ in range(2):
        (tmp_path / "manifest.json").unlink(missing_ok=True)
        with saver_of(tmp_path, ALONE, Keep(2)) as saving:
            saving.save(1, snapshot(1), final=True)
        assert json.loads((tmp_path / "manifest.json").read_text())["saved"] == 1 and saving.saved == 1


def test_only_what_was_found_damaged_at_the_start_is_deleted_as_such(tmp_path):
    for step in (5, 10, 15):
        with saver_of(tmp_path, ALONE, Keep(9)) as saving:
            saving.save(step, snapshot(step))
    with saver_of(
        tmp_path, ALONE, Keep(9), saved_step=5, passed_over=[tmp_path / "checkpoints/step_00000010"]
    ) as saving:
        saving.save(7, snapshot(7))
    assert [checkpoint.step_of(d) for d in checkpoint.directories(tmp_path / "checkpoints")] == [15, 7, 5]


def test_what_is_not_permitted_does_not_count(tmp_path):
    def refuse():
        raise UserError("the lease is another's")

    saving = saver_of(tmp_path, ALONE, Keep(2), SimpleNamespace(require_held=refuse))
    saving.save(1, snapshot(1))
    with pytest.raises(UserError, match="the lease is another's"):
        saving.wait()
    assert newest(tmp_path / "checkpoints") == (None, [])


@pytest.mark.usefixtures("no_export")
def test_training_goes_on_meanwhile(train, tmp_path, monkeypatch):
    """The save of step 5 begins before step 6 does, and is held up until step 9 has been logged."""
    write, take, begun = checkpoint.write_part, Guard.next_batch, []

    def slow(aside, *rest):
        if "00000005" in aside.name:
            begun.append(last_logged(tmp_path / "run"))
            while last_logged(tmp_path / "run") < 9:
                threading.Event().wait(0.01)
        return write(aside, *rest)

    def next_batch(self, loader):
        while self.saver.begun == 5 and not begun:
            threading.Event().wait(0.01)
        return take(self, loader)

    monkeypatch.setattr(saver.checkpoint, "write_part", slow)
    monkeypatch.setattr(Guard, "next_batch", next_batch)
    train(tmp_path / "run", "checkpoint.keep_last=9", "train.steps=12")
    assert begun and begun[0] < 9
    names = [d.name for d in checkpoint.directories(tmp_path / "run" / "checkpoints")]
    assert names == ["step_00000012", "step_00000010", "step_00000005"]
    assert load(tmp_path / "run" / "checkpoints" / "step_00000005").step == 5


def last_logged(folder) -> int:
    return max((record["step"] for record in read_metrics(folder / "metrics.jsonl")), default=0)
