"""A checkpoint is there whole or does not count, whatever interrupts the saving of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.config import tree
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import CONTENT, Checkpoint, Piece, Snapshot, load, newest
from dlr_pretrain.util import files
from dlr_pretrain.util.errors import UserError

PART = "part_00000_of_00001.safetensors"


def keeping(last: int, every: int | None = None) -> tree.Checkpoint:
    return tree.Checkpoint(every=1, keep_last=last, keep_every=every)


def save(root, step: int, given: Snapshot | None = None, keep=None, ranks: int = 1) -> Path:
    """What the threads of the ranks do, one after the other."""
    given, folder, parts = given or snapshot(step), checkpoint.begin(root, checkpoint.name_of(step)), {}
    for rank in range(ranks):
        parts |= checkpoint.write_part(folder, rank, ranks, checkpoint.share(given, rank, ranks))
    return checkpoint.commit(folder, step, parts, given.state, keep or keeping(2))


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
    state = {"step": step, "tokens": 10**13 + step, "streams": {"0": [0, 1, 2, 3, 4]}}
    return Snapshot(model, optimizer, [torch.get_rng_state(), torch.arange(9, dtype=torch.uint8)], state)


def assert_is(found: Checkpoint, expected: Snapshot) -> None:
    for a, b in ((found.model, expected.model), (found.optimizer, expected.optimizer)):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].shape == b[name].shape and a[name].dtype == a[name].whole().dtype == b[name].dtype, name
            bits = (t.contiguous().view(-1).view(torch.uint8) for t in (a[name].whole(), b[name]))
            assert torch.equal(*bits), name
    assert all(torch.equal(a, b) for a, b in zip(found.random, expected.random, strict=True))
    assert found.state == expected.state


def names(root) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_loaded_equals_what_was_saved_and_the_library_reads_it(tmp_path, dtype):
    given = snapshot(3, dtype)
    given.model["t"][0, 0], given.model["q"][1, 2] = float("nan"), -0.0
    path = save(tmp_path, 3, given)
    assert_is(load(path), given)
    assert torch.equal(load_file(path / PART)["model/k"], given.model["k"])
    assert newest(tmp_path) == (path, {})


@pytest.mark.parametrize("ranks", [3, 20])
def test_ranks_share_the_writing_and_any_number_of_them_reads_it(tmp_path, ranks):
    given = snapshot(3)
    shares = [checkpoint.share(given, rank, ranks) for rank in range(ranks)]
    sizes = [sum(piece.tensor.nbytes for piece in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= max(t.nbytes for t in given.random)
    assert_is(load(save(tmp_path, 3, given, ranks=ranks)), given)


def test_rows_that_ranks_wrote_are_read_across_their_borders(tmp_path):
    whole, folder, parts = torch.randn(7, 3), checkpoint.begin(tmp_path, "a"), {}
    for rank, (first, end) in enumerate([(0, 3), (3, 6), (6, 7)]):
        parts |= checkpoint.write_part(folder, rank, 4, {"model/w": Piece(whole[first:end], first, 7)})
    found = load(checkpoint.commit(folder, 1, parts, {"step": 1}, keeping(1))).model["w"]
    assert found.shape == (7, 3) and torch.equal(found.whole(), whole)
    for first in range(8):
        for end in range(first, 8):
            assert torch.equal(found.rows(first, end), whole[first:end])


def test_the_newest_and_those_of_every_so_many_steps_are_kept(tmp_path):
    for step in (1, 2, 3, 10, 100_000_000):
        save(tmp_path / "last", step, keep=keeping(2))
    assert names(tmp_path / "last") == {"step_00000010", "step_100000000"}
    for step in range(1, 11):
        save(tmp_path / "every", step, keep=keeping(1, every=4))
    assert names(tmp_path / "every") == {"step_00000004", "step_00000008", "step_00000010"}


def test_later_steps_are_of_a_start_that_took_over_and_stay(tmp_path):
    """This one was away while the other resumed from step 5 and trained on; it comes back within its save of 6."""
    save(tmp_path, 5)
    folder, given = checkpoint.begin(tmp_path, "a"), snapshot(6)
    parts = checkpoint.write_part(folder, 0, 1, checkpoint.share(given, 0, 1))
    shutil.move(folder, away := tmp_path.with_name("away"))
    for step in (10, 15):
        save(tmp_path, step)
    shutil.move(away, folder)
    checkpoint.commit(folder, 6, parts, given.state, keeping(1))
    assert names(tmp_path) == {"step_00000006", "step_00000010", "step_00000015"}
    assert newest(tmp_path) == (tmp_path / "step_00000015", {})


def test_junk_is_neither_taken_for_a_checkpoint_nor_touched_and_what_a_kill_left_is_cleared(tmp_path):
    for junk in ("step_", "step_12a", "step_-1", "damaged_step_00000001", ".writing_step_00000007_cafe"):
        (tmp_path / junk).mkdir()
    (tmp_path / "step_00000099").write_text("a file")
    before = names(tmp_path) - {".writing_step_00000007_cafe"}
    assert newest(tmp_path) == newest(tmp_path / "absent") == (None, {})
    save(tmp_path, 1)
    assert names(tmp_path) == before | {"step_00000001"}


def test_while_a_disk_does_not_answer_nothing_is_lost(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)

    def silent(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as away:
        away.setattr(checkpoint, "_delete", silent)
        save(tmp_path, 3, keep=keeping(1))
    assert names(tmp_path) == {f"step_0000000{n}" for n in (1, 2, 3)}
    with monkeypatch.context() as away:
        away.setattr(checkpoint, "_sha256", silent)
        with pytest.raises(OSError, match="Stale"):  # it may be sound, so it is not passed over
            newest(tmp_path)
    save(tmp_path, 4, keep=keeping(1))
    assert names(tmp_path) == {"step_00000004"}


STAGES = {checkpoint: ("save_file", "write_durably", "_delete"), files: ("sync",), os: ("rename", "replace"),
          Path: ("rename", "chmod"), shutil: ("rmtree",)}  # fmt: skip


@pytest.mark.parametrize(
    ("owner", "stage"),
    [(owner, stage) for owner, stages in STAGES.items() for stage in stages],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_kill_at_any_stage_leaves_a_valid_one_and_a_way_on(tmp_path, monkeypatch, owner, stage):
    """The kill is an exception that nothing handles, before each call of ``stage`` in turn, and after each."""
    real, calls, deadly, late = getattr(owner, stage), 0, 0, False

    def killing(*given, **named):
        nonlocal calls
        calls += 1
        if calls == deadly and not late:
            raise KeyboardInterrupt
        result = real(*given, **named)
        if calls == deadly:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, stage, killing)
    for step in (1, 2):
        calls = 0
        save(tmp_path / "0", step, keep=keeping(1))
    stages = calls
    assert stages > 0
    for kill in range(2, 2 * stages + 2):
        root, deadly = tmp_path / str(kill), 0
        save(root, 1, keep=keeping(1))
        calls, deadly, late = 0, kill // 2, kill % 2 == 1
        with pytest.raises(KeyboardInterrupt):
            save(root, 2, keep=keeping(1))
        deadly = 0
        survivor, damaged = newest(root)
        assert_is(load(survivor), snapshot(int(survivor.name[5:])))
        assert not damaged
        for step in (2, 3):  # once more, as after a resume
            assert_is(load(save(root, step, keep=keeping(1))), snapshot(step))
        assert names(root) == {"step_00000003"}


def changed(folder: Path, change) -> None:
    content = json.loads((folder / CONTENT).read_text())
    change(content)
    (folder / CONTENT).write_text(json.dumps(content))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "checkpoint.json is missing": lambda d: (d / CONTENT).unlink(),
    "checkpoint.json is damaged": lambda d: (d / CONTENT).write_bytes(b"\xff\x00\xff"),
    "checkpoint.json is damaged ": lambda d: (d / CONTENT).write_text("[]"),
    "checkpoint.json is damaged  ": lambda d: changed(d, lambda c: c["state"].update(step=9)),
    f"{PART} is missing": lambda d: (d / PART).unlink(),
    f"{PART} has 3 bytes": lambda d: (d / PART).write_text("abc"),
    f"{PART} fails its checksum": lambda d: flip(d / PART),
}


def test_a_damaged_one_is_passed_over_with_its_fault(tmp_path):
    for number, (fault, damage) in enumerate(DAMAGES.items()):
        root = tmp_path / f"{number}"
        for step in (1, 2):
            save(root, step)
        damage(root / "step_00000002")
        found, damaged = newest(root)
        ((directory, said),) = damaged.items()
        assert (found, directory) == (root / "step_00000001", root / "step_00000002")
        assert said.startswith(fault.strip())
        damage(found)
        with pytest.raises(UserError, match=rf"no valid checkpoint: .*step_00000001: {fault.strip()}.*start over"):
            newest(root)
        assert_is(load(save(root, 2)), snapshot(2))  # it takes the place of a damaged one


def test_another_version_s_format_is_named(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FORMAT", 99)
    with pytest.raises(UserError, match=r"has format \d, and this version of the code reads format 99"):
        newest(tmp_path)
