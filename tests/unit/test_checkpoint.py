"""A checkpoint is there whole or does not count, whatever interrupts the saving of it."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.train import checkpoint, files
from dlr_pretrain.train.checkpoint import MANIFEST, Checkpoint, Keep, Piece, Snapshot, load, newest
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.util import files as durable
from dlr_pretrain.util.errors import UserError

PART = "part_00000_of_00001.safetensors"


def save(root, step: int, given: Snapshot, evaluations=None, *, keep_last: int, ranks: int = 1, **keep):
    """What the threads of the ranks do, one after the other."""
    aside = checkpoint.begin(root, step)
    if aside is None:
        return root / f"step_{step:08d}"
    parts = {}
    for rank in range(ranks):
        parts |= checkpoint.write_part(aside, rank, ranks, checkpoint.share(given, rank, ranks))
    kept = Keep(keep_last, **keep)
    return checkpoint.commit(aside, step, parts, given.state, given.optimizer_layout, kept, (), evaluations)


def snapshot(step: int, dtype: torch.dtype = torch.float32) -> Snapshot:
    """Tensors in the layouts that models have: views of one storage, a transpose, odd sizes, scalars, one element."""
    generator = torch.Generator().manual_seed(step)
    stack = torch.randn(3, 5, 7, generator=generator).to(dtype)
    model = {
        "q": stack[0],
        "k": stack[1],
        "t": torch.randn(6, 9, generator=generator).to(dtype).T,
        "n": stack[2, 0, :1],
    }
    optimizer = {f"{name}/exp_avg": value.clone() for name, value in model.items()} | {
        "q/step": torch.tensor(step + 0.0)
    }
    state = {"step": step, "tokens": 10**13 + step, "real_tokens": 7, "streams": {"0": [0, 1, 2, 3, 4]}}
    return Snapshot(model, optimizer, [torch.get_rng_state(), torch.arange(9, dtype=torch.uint8)], state)


def assert_is(found: Checkpoint, step: int, dtype: torch.dtype = torch.float32) -> None:
    expected = snapshot(step, dtype)
    for group in ("model", "optimizer"):
        a, b = getattr(found, group), getattr(expected, group)
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].whole().dtype == b[name].dtype and torch.equal(a[name].whole(), b[name]), name
            assert a[name].shape == b[name].shape
    assert all(torch.equal(a, b) for a, b in zip(found.random, expected.random, strict=True))
    assert found.state == expected.state


def names(root) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_loaded_equals_what_was_saved(tmp_path, dtype):
    given = snapshot(3, dtype)
    given.model["t"][0, 0], given.model["q"][1, 2] = float("nan"), -0.0
    loaded = load(save(tmp_path, 3, given, keep_last=1))
    for name, value in given.model.items():
        found = loaded.model[name].whole()
        assert found.dtype == dtype and torch.equal(found.view(torch.uint8), value.contiguous().view(torch.uint8)), name
    assert_is(load(save(tmp_path, 4, snapshot(4, dtype), keep_last=1)), 4, dtype)


def test_the_parts_are_files_that_the_library_reads(tmp_path):
    given = snapshot(3, torch.bfloat16)
    stored = load_file(save(tmp_path, 3, given, keep_last=1) / PART)
    groups = {"model": given.model, "optimizer": given.optimizer, "random": dict(enumerate(given.random))}
    expected = {f"{group}/{name}": t for group, own in groups.items() for name, t in own.items()}
    assert stored.keys() == expected.keys() and all(torch.equal(stored[n], t) for n, t in expected.items())


def test_of_a_checkpoint_that_was_moved_away_the_link_alone_is_deleted(tmp_path):
    save(tmp_path / "run", 1, snapshot(1), keep_last=2)
    (tmp_path / "archive").mkdir()
    shutil.move(tmp_path / "run" / "step_00000001", tmp_path / "archive" / "step_00000001")
    (tmp_path / "run" / "step_00000001").symlink_to(tmp_path / "archive" / "step_00000001")
    for step in (2, 3):
        save(tmp_path / "run", step, snapshot(step), keep_last=1)
    assert names(tmp_path / "run") == {"step_00000003"}
    assert checkpoint.fault(tmp_path / "archive" / "step_00000001") is None


def test_what_a_kill_left_aside_is_cleared_with_its_marker(tmp_path):
    shutil.copytree(save(tmp_path, 1, snapshot(1), keep_last=2), tmp_path / ".writing_step_00000001_cafe")
    save(tmp_path, 2, snapshot(2), keep_last=2)
    assert names(tmp_path) == {"step_00000001", "step_00000002"}


@pytest.mark.parametrize("ranks", [2, 3, 20])
def test_ranks_share_the_writing_and_any_number_of_them_reads_it(tmp_path, ranks):
    given = snapshot(3)
    shares = [checkpoint.share(given, rank, ranks) for rank in range(ranks)]
    written = [name for share in shares for name in share]
    assert len(written) == len(set(written)) == len(given.model) + len(given.optimizer) + len(given.random)
    sizes = [sum(piece.tensor.nbytes for piece in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= max(t.nbytes for t in given.random)
    assert_is(load(save(tmp_path, 3, given, keep_last=1, ranks=ranks)), 3)


def test_rows_that_ranks_wrote_are_read_across_their_borders(tmp_path):
    whole, aside = torch.randn(7, 3), checkpoint.begin(tmp_path, 1)
    parts = {}
    for rank, (first, end) in enumerate([(0, 3), (3, 6), (6, 7)]):
        parts |= checkpoint.write_part(aside, rank, 4, {"model/w": Piece(whole[first:end], first, 7)})
    found = load(checkpoint.commit(aside, 1, parts, {"step": 1}, {}, Keep(1))).model["w"]
    assert found.shape == (7, 3) and torch.equal(found.whole(), whole)
    for first in range(8):
        for end in range(first, 8):
            assert torch.equal(found.rows(first, end), whole[first:end])


def test_the_layout_of_quantised_state_stands_in_the_manifest_and_comes_back(tmp_path):
    given = snapshot(3)
    assert load(save(tmp_path, 3, given, keep_last=2)).optimizer_layout == {}
    given.optimizer_layout = {"q/exp_avg": {"rule": "blockwise_8bit", "signed": True, "block_size": 5}}
    path = save(tmp_path, 4, given, keep_last=2)
    assert load(path).optimizer_layout == given.optimizer_layout
    assert newest(tmp_path) == (path, [])


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.update(optimizer_layout={"q/exp_avg": {}}),
        lambda m: m["files"].pop(PART),
        lambda m: m["files"][PART].update(rows={"model/q": [1, 9]}),
        lambda m: m.update(format=3),
        lambda m: m.pop("sha256"),
    ],
)
def test_a_manifest_that_says_something_else_than_was_written_is_damaged(tmp_path, damage):
    path = save(tmp_path, 3, snapshot(3), keep_last=2)
    manifest = json.loads((path / MANIFEST).read_text())
    damage(manifest)
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint.fault(path) == f"{MANIFEST} is damaged"


@pytest.mark.parametrize("unreadable", [False, True])
def test_what_may_be_sound_is_neither_passed_over_nor_deleted(tmp_path, monkeypatch, unreadable):
    """Another version of the code wrote it, or its disk does not answer now."""
    older, newer = (save(tmp_path, step, snapshot(step), keep_last=2) for step in (3, 4))
    if unreadable:
        digest = hashlib.file_digest

        def failing(file, *given):
            if newer in Path(file.name).parents:
                raise OSError(errno.EIO, "Input/output error")
            return digest(file, *given)

        monkeypatch.setattr(hashlib, "file_digest", failing)
    else:
        manifest = json.loads((newer / MANIFEST).read_text()) | {"format": 3}
        del manifest["sha256"]
        (newer / MANIFEST).write_text(json.dumps(manifest | {"sha256": checkpoint._digest(manifest)}))
    with pytest.raises(
        UserError, match=r"step_00000004.*(has format 3.*Use the version|cannot be read \(Input/output)"
    ):
        newest(tmp_path)
    assert names(tmp_path) == {older.name, newer.name}


def test_one_that_was_passed_over_does_not_take_the_place_of_a_good_one(tmp_path):
    for step in (8, 9):
        save(tmp_path, step, snapshot(step), keep_last=2)
    flawed = tmp_path / "step_00000009"
    (flawed / PART).write_bytes(b"damaged")
    aside, given = checkpoint.begin(tmp_path, 10), snapshot(10)
    parts = checkpoint.write_part(aside, 0, 1, checkpoint.share(given, 0, 1))
    checkpoint.commit(aside, 10, parts, given.state, {}, Keep(2), passed_over={flawed})
    assert names(tmp_path) == {"step_00000008", "step_00000010"}


def test_later_steps_are_of_a_start_that_took_over_and_stay(tmp_path):
    """This one was away while the other resumed from step 5 and trained on; it comes back within its save of 6."""
    save(tmp_path, 5, snapshot(5), keep_last=2)
    aside, given = checkpoint.begin(tmp_path, 6), snapshot(6)
    parts = checkpoint.write_part(aside, 0, 1, checkpoint.share(given, 0, 1))
    shutil.move(aside, away := tmp_path / "away")
    for step in (10, 15):
        save(tmp_path, step, snapshot(step), keep_last=2)
    shutil.move(away, aside)
    checkpoint.commit(aside, 6, parts, given.state, {}, Keep(1))
    assert names(tmp_path) == {"step_00000006", "step_00000010", "step_00000015"}
    assert newest(tmp_path) == (tmp_path / "step_00000015", [])


def test_a_save_clears_folders_without_a_marker_of_any_step_and_no_others(tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step, snapshot(step), keep_last=9)
    for step in (5, 15):
        (tmp_path / f"step_{step:08d}" / MANIFEST).unlink()
    checkpoint.begin(tmp_path, 7).rmdir()
    assert names(tmp_path) == {"step_00000010"}


def test_every_so_many_steps_one_is_kept(tmp_path):
    for step in range(1, 11):
        save(tmp_path, step, snapshot(step), keep_last=1, every=4)
    assert names(tmp_path) == {"step_00000004", "step_00000008", "step_00000010"}


def test_the_best_one_is_kept_among_those_that_were_evaluated(tmp_path):
    losses = {2: 3.0, 3: 2.0, 4: float("nan"), 5: 2.5, 7: 2.25}
    for step in range(1, 8):
        evaluations = {at: loss for at, loss in losses.items() if at <= step}
        save(tmp_path, step, snapshot(step), evaluations, keep_last=1, best=True)
    assert names(tmp_path) == {"step_00000003", "step_00000007"}


def test_while_a_disk_does_not_answer_nothing_is_deleted(tmp_path, monkeypatch):
    """Not even where Path.exists would say that the file is not there, as it does from Python 3.14 on."""
    for step in (1, 2):
        save(tmp_path, step, snapshot(step), {1: 1.0}, keep_last=1, best=True)
    stat, silent = Path.stat, tmp_path / "step_00000001" / MANIFEST

    def asked(self, *given, **named):
        if self == silent:
            raise OSError(errno.ESTALE, "Stale file handle")
        return stat(self, *given, **named)

    with monkeypatch.context() as away:
        away.setattr(Path, "stat", asked)
        away.setattr(Path, "exists", lambda self: self != silent and os.path.exists(self))
        save(tmp_path, 3, snapshot(3), {1: 1.0}, keep_last=1, best=True)
    assert names(tmp_path) == {f"step_0000000{n}" for n in (1, 2, 3)}
    save(tmp_path, 4, snapshot(4), {1: 1.0}, keep_last=1, best=True)
    assert names(tmp_path) == {"step_00000001", "step_00000004"}


def test_remains_that_cannot_be_removed_stop_no_save(tmp_path, monkeypatch):
    remains = tmp_path / ".writing_step_00000004_dead"
    remains.mkdir()
    rmtree = shutil.rmtree

    def refused(path, ignore_errors=False, **given):
        if path != remains:
            return rmtree(path, ignore_errors, **given)
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", refused)
    assert_is(load(save(tmp_path, 5, snapshot(5), keep_last=1)), 5)


def test_the_newest_ones_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        save(tmp_path, step, snapshot(step), keep_last=2)
    assert names(tmp_path) == {"step_00000003", "step_00000010"}
    assert newest(tmp_path) == (tmp_path / "step_00000010", [])


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (99_999_999, 100_000_000):
        save(tmp_path, step, snapshot(1), keep_last=9)
    assert newest(tmp_path)[0].name == "step_100000000"


def test_a_step_that_is_saved_twice_is_written_once(tmp_path):
    path = save(tmp_path, 5, snapshot(5), keep_last=2)
    before = {p: p.stat().st_mtime_ns for p in path.iterdir()}
    assert save(tmp_path, 5, snapshot(5), keep_last=2) == path
    assert {p: p.stat().st_mtime_ns for p in path.iterdir()} == before


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path):
    path = save(tmp_path, 5, snapshot(5), keep_last=2)
    (path / PART).write_bytes(b"damaged")
    assert_is(load(save(tmp_path, 5, snapshot(5), keep_last=2)), 5)
    assert newest(tmp_path) == (path, [])


def test_what_was_passed_over_does_not_crowd_out_the_new_one(tmp_path):
    """After damage the run resumes from step 5; its next checkpoint is older than the damaged one, and must stay."""
    for step in (5, 10):
        save(tmp_path, step, snapshot(step), keep_last=2)
    (tmp_path / "step_00000010" / "state.json").write_text("{}")
    shutil.copytree(tmp_path / "step_00000005", tmp_path / "step_00000011")
    (tmp_path / "step_00000011" / MANIFEST).unlink()
    assert newest(tmp_path)[0].name == "step_00000005"
    aside, given = checkpoint.begin(tmp_path, 6), snapshot(6)
    parts = checkpoint.write_part(aside, 0, 1, checkpoint.share(given, 0, 1))
    checkpoint.commit(aside, 6, parts, given.state, {}, Keep(1), passed_over={tmp_path / "step_00000010"})
    assert names(tmp_path) == {"step_00000006"}
    assert_is(load(newest(tmp_path)[0]), 6)


STAGES = {
    checkpoint: ("write_safetensors", "write_durably", "_delete"),
    files: ("_contents",),
    durable: ("sync",),
    os: ("rename", "replace"),
    shutil: ("rmtree",),
}


@pytest.mark.parametrize(
    ("owner", "stage"),
    [(owner, stage) for owner, stages in STAGES.items() for stage in stages],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_kill_at_any_stage_leaves_a_valid_one_and_a_way_on(tmp_path, monkeypatch, owner, stage):
    """The kill is an exception that nothing handles, before each call of ``stage`` in turn."""
    real, calls, deadly = getattr(owner, stage), 0, 0

    def killing(*given, **named):
        nonlocal calls
        calls += 1
        if calls == deadly:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(owner, stage, killing)
    save(tmp_path / "0", 1, snapshot(1), keep_last=1)
    calls = 0
    save(tmp_path / "0", 2, snapshot(2), keep_last=1)
    stages = calls
    assert stages > 0
    for kill in range(1, stages + 1):
        root, deadly = tmp_path / str(kill), 0
        save(root, 1, snapshot(1), keep_last=1)
        calls, deadly = 0, kill
        with pytest.raises(KeyboardInterrupt):
            save(root, 2, snapshot(2), keep_last=1)
        deadly = 0
        survivor, _ = newest(root)
        assert_is(load(survivor), int(survivor.name[5:]))
        for step in (2, 3):  # once more, as after a resume
            assert_is(load(save(root, step, snapshot(step), keep_last=1)), step)
        assert names(root) == {"step_00000003"}


def test_a_write_that_a_kill_left_is_cleared_at_the_next_save_of_any_step(tmp_path):
    (tmp_path / ".writing_step_00000007").mkdir()
    (tmp_path / ".writing_step_00000007" / PART).touch()
    save(tmp_path, 9, snapshot(9), keep_last=1)
    assert names(tmp_path) == {"step_00000009"}


DAMAGES = {
    "is damaged": lambda d: (d / MANIFEST).write_bytes(b"\xff\x00\xff"),
    "manifest.json is damaged": lambda d: (d / MANIFEST).write_text(""),
    f"{PART} is missing": lambda d: (d / PART).unlink(),
    "state.json has 0 bytes": lambda d: (d / "state.json").write_text(""),
    "state.json fails its checksum": lambda d: (d / "state.json").write_text(
        (d / "state.json").read_text().replace("2", "3")
    ),
    "was not finished": lambda d: (d / MANIFEST).unlink(),
}


@pytest.mark.parametrize("fault", DAMAGES)
def test_a_damaged_one_is_passed_over_with_its_fault(tmp_path, fault):
    for step in (1, 2):
        save(tmp_path, step, snapshot(step), keep_last=2)
    DAMAGES[fault](tmp_path / "step_00000002")
    found, skipped = newest(tmp_path)
    assert found.name == "step_00000001"
    assert len(skipped) == 1 and "step_00000002" in skipped[0] and fault in skipped[0]


def test_none_valid_is_refused_and_only_unfinished_ones_start_over(tmp_path):
    assert newest(tmp_path / "absent") == (None, [])
    save(tmp_path, 2, snapshot(2), keep_last=1)
    (tmp_path / "step_00000002" / "state.json").write_text("")
    with pytest.raises(UserError, match=r"no valid checkpoint: .*step_00000002: state.json has 0 bytes.*start over"):
        newest(tmp_path)
    (tmp_path / "step_00000002" / MANIFEST).unlink()
    found, skipped = newest(tmp_path)
    assert found is None and "was not finished" in skipped[0]


def test_junk_is_neither_taken_for_a_checkpoint_nor_touched(tmp_path):
    for junk in ("step_", "step_12a", "step_-1", "step_0001.bak", "other"):
        (tmp_path / junk).mkdir()
    (tmp_path / "step_00000099").write_text("a file")
    assert newest(tmp_path) == (None, [])
    before = names(tmp_path)
    save(tmp_path, 1, snapshot(1), keep_last=1)
    assert names(tmp_path) == before | {"step_00000001"}
    assert newest(tmp_path)[0].name == "step_00000001"


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize(("owner", "stage"), [(durable, "sync"), (files, "_contents"), (checkpoint, "write_durably")])
def test_a_full_disk_ends_the_run_in_one_line_and_the_last_one_stands(train, tmp_path, monkeypatch, owner, stage):
    real, trained_on = getattr(owner, stage), threading.Event()

    def filling(*given):
        if list((tmp_path / "run" / "checkpoints").glob(".writing_step_00000010_*")):
            assert trained_on.wait(30)
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*given)

    take, steps = Guard.next_batch, itertools.count()

    def next_batch(self, loader):  # the save of step 10 has failed by the time that it is looked at
        if next(steps) == 11:
            trained_on.set()
            self.saver._thread.join()
        return take(self, loader)

    with monkeypatch.context() as patched:
        patched.setattr(owner, stage, filling)
        patched.setattr(Guard, "next_batch", next_batch)
        with pytest.raises(UserError, match=r"checkpoint of step 10 could not be written: .*No space left"):
            train(tmp_path / "run")
    root = tmp_path / "run" / "checkpoints"
    found, _ = newest(root)
    assert found.name == "step_00000011"  # what was trained meanwhile is saved if it can be
    train(tmp_path / "run")
    assert names(root) == {"step_00000015", "step_00000020"}
