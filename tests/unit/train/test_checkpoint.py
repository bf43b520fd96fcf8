"""A checkpoint is complete or does not count, whatever interrupts its save, which runs beside training."""

import errno
import itertools
import json
import os
import shutil
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.cli import load as load_config
from dlr_pretrain.config import tree
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.train import checkpoint, saver
from dlr_pretrain.train.checkpoint import CONTENT, Checkpoint, TensorRows, directories, load, newest
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.util import files
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests.conftest import on_ranks

PART = "part_00000_of_00001.safetensors"


class Snapshot(NamedTuple):
    model: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    state: dict


def keeping(last: int, every: int | None = None) -> tree.Checkpoints:
    return tree.Checkpoints(every=1, keep_last=last, keep_every=every)


def save(root, step: int, given: Snapshot | None = None, keep=None, ranks: int = 1) -> Path:
    """Does what the threads of the ranks do, one rank after another."""
    given, folder, parts = given or snapshot(step), checkpoint.begin(root, checkpoint.name_of(step)), []
    for rank in range(ranks):
        parts.append(checkpoint.write_part(folder, rank, ranks, checkpoint.share(*given[:2], rank, ranks)))
    return checkpoint.commit(folder, parts, given.state, keep or keeping(2))


def snapshot(step: int, dtype: torch.dtype = torch.float32) -> Snapshot:
    """Tensors in layouts of models: views of one storage, a transpose, odd sizes, scalars, one element."""
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
    return Snapshot(model, optimizer, state)


def assert_is(found: Checkpoint, expected: Snapshot) -> None:
    for a, b in ((found.model, expected.model), (found.optimizer, expected.optimizer)):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].shape == b[name].shape and a[name].whole().dtype == b[name].dtype, name
            bits = (t.contiguous().view(-1).view(torch.uint8) for t in (a[name].whole(), b[name]))
            assert torch.equal(*bits), name
    assert found.state == expected.state


def names(root) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.mark.parametrize(("ranks", "dtype"), [(1, torch.bfloat16), (3, torch.float32), (20, torch.float32)])
def test_what_ranks_have_saved_is_loaded_bit_for_bit(tmp_path, ranks, dtype):
    given = snapshot(3, dtype)
    given.model["t"][0, 0], given.model["q"][1, 2] = float("nan"), -0.0
    shares = [checkpoint.share(*given[:2], rank, ranks) for rank in range(ranks)]
    sizes = [sum(piece.tensor.nbytes for piece in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= max(t.nbytes for t in given.model.values()) or ranks == 1
    path = save(tmp_path, 3, given, ranks=ranks)
    assert_is(load(path), given)
    assert newest(tmp_path) == (path, {})
    if ranks == 1:
        assert torch.equal(load_file(path / PART)["model/k"], given.model["k"])


def test_rows_that_ranks_wrote_are_read_across_their_borders(tmp_path):
    whole, folder, parts = torch.randn(7, 3), checkpoint.begin(tmp_path, "a"), []
    for rank, (first, end) in enumerate([(0, 3), (3, 6), (6, 7)]):
        parts.append(checkpoint.write_part(folder, rank, 4, {"model/w": TensorRows(whole[first:end], first, 7)}))
    found = load(checkpoint.commit(folder, parts, {"step": 1}, keeping(1))).model["w"]
    assert found.shape == (7, 3) and torch.equal(found.whole(), whole)
    for first in range(8):
        for end in range(first, 8):
            assert torch.equal(found.rows(first, end), whole[first:end])


def test_keep_last_and_keep_every_choose_the_checkpoints(tmp_path):
    for step in (1, 2, 3, 10, 100_000_000):
        save(tmp_path / "last", step, keep=keeping(2))
    assert names(tmp_path / "last") == {"step_00000010", "step_100000000"}
    for step in range(1, 11):
        save(tmp_path / "every", step, keep=keeping(1, every=4))
    assert names(tmp_path / "every") == {"step_00000004", "step_00000008", "step_00000010"}


def test_junk_is_neither_a_checkpoint_nor_touched(tmp_path):
    for junk in ("step_", "step_12a", "step_-1", "damaged_step_00000001", ".writing_step_00000007_cafe"):
        (tmp_path / junk).mkdir()
    (tmp_path / "step_00000099").write_text("a file")
    before = names(tmp_path) - {".writing_step_00000007_cafe"}
    assert newest(tmp_path) == newest(tmp_path / "absent") == (None, {})
    save(tmp_path, 1)
    assert names(tmp_path) == before | {"step_00000001"}


def test_nothing_is_deleted_while_a_disk_does_not_answer(tmp_path, monkeypatch):
    def silent(*_):
        raise OSError(errno.ESTALE, "Stale file handle")

    save(tmp_path, 1)
    with monkeypatch.context() as away:
        away.setattr(checkpoint, "_hide", silent)
        save(tmp_path, 2, keep=keeping(1))
    with monkeypatch.context() as away:
        away.setattr(checkpoint, "sha256_of", silent)
        with pytest.raises(OSError, match="Stale"):
            newest(tmp_path)
    assert names(tmp_path) == {"step_00000001", "step_00000002"}
    save(tmp_path, 3, keep=keeping(1))
    assert names(tmp_path) == {"step_00000003"}


@pytest.mark.parametrize(("owner", "stage"), [
    (checkpoint, "save_file"), (checkpoint, "write_durably"), (checkpoint, "_hide"), (files, "sync"),
    (os, "rename"), (os, "replace"), (Path, "rename"), (Path, "chmod"), (shutil, "rmtree"),
])  # fmt: skip
def test_a_kill_at_any_stage_leaves_a_valid_checkpoint(tmp_path, monkeypatch, owner, stage):
    """The kill is an exception that nothing handles, before and after each call of ``stage`` in turn."""
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


def rewrite(folder: Path, **entries) -> None:
    content = json.loads((folder / CONTENT).read_text()) | entries
    (folder / CONTENT).write_text(json.dumps(content))


def forge(folder: Path, **entries) -> None:
    """As ``rewrite``, with a valid checksum."""
    content = json.loads((folder / CONTENT).read_text()) | entries
    del content["sha256"]
    rewrite(folder, **entries, sha256=checkpoint._digest(content))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("format", [3, 99])
def test_a_checkpoint_of_another_version_is_refused(tmp_path, format):
    for step in (1, 2):
        save(tmp_path, step)
    forge(tmp_path / "step_00000002", format=format)
    with pytest.raises(UserError, match=f"but in format {format}.*Continue with the version that wrote it"):
        newest(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_files_have_the_mode_of_their_folder(tmp_path, umask):
    before = os.umask(umask)
    try:
        folder = save(tmp_path, 1)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o666 & ~umask}


@pytest.mark.parametrize(("fault", "damage"), [
    ("checkpoint.json is missing", lambda d: (d / CONTENT).unlink()),
    ("checkpoint.json is damaged", lambda d: (d / CONTENT).write_bytes(b"\xff\x00\xff")),
    ("checkpoint.json is damaged", lambda d: rewrite(d, state={"step": 9})),
    ("holds step 7, unlike its name", lambda d: forge(d, state={"step": 7})),
    (f"{PART} is missing", lambda d: (d / PART).unlink()),
    (f"{PART} fails its checksum", lambda d: flip(d / PART)),
])  # fmt: skip
def test_a_damaged_checkpoint_is_skipped_with_its_fault(tmp_path, fault, damage):
    for step in (1, 2):
        save(tmp_path, step)
    first, second = tmp_path / "step_00000001", tmp_path / "step_00000002"
    damage(second)
    found, damaged = newest(tmp_path)
    assert found == first and list(damaged) == [second] and damaged[second].startswith(fault)
    damage(first)
    with pytest.raises(UserError, match=rf"no valid checkpoint: .*step_00000001: {fault}.*start over"):
        newest(tmp_path)
    assert_is(load(save(tmp_path, 2)), snapshot(2))  # it replaces a damaged one


# ----------------------------------------------------------------------------------------------------
# Saves beside training


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


def filled_with(value: float) -> tuple[dict, dict, dict]:
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
    opened, write, given = threading.Event(), checkpoint.write_part, filled_with(1)
    monkeypatch.setattr(checkpoint, "write_part", lambda *rest: opened.wait(600) and write(*rest))
    update_record(tmp_path, {"identity": {"seed": 1}})
    with saver_of(tmp_path) as saving:
        saving.save(*given)
        given[0]["w"].fill_(9)
        assert saving.saved == 0 and newest(saving.root) == (None, {})
        opened.set()
        saving.save(*filled_with(2))
        assert saving.saved >= 1
    assert [d.name for d in directories(saving.root)] == ["step_00000002", "step_00000001"]
    assert torch.equal(load(saving.root / "step_00000001").model["w"].whole(), torch.full((4, 3), 1.0))
    assert read_record(tmp_path)["saved"] == 2 and load(saving.root / "step_00000002").state["identity"] == {"seed": 1}


def test_a_save_that_never_succeeds_ends_with_the_reason(tmp_path, monkeypatch, capsys):
    def filling(folder, *_):
        (folder / "part").touch()
        full_disk()

    with saver_of(tmp_path) as saving:
        saving.save(*filled_with(1), final=True)
        monkeypatch.setattr(checkpoint, "write_part", filling)
        saving.save(*filled_with(2))
        for end in (saving.wait, saving.raise_error, lambda: saving.save(*filled_with(3))):
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
    saving.save(*filled_with(1))
    with pytest.raises(kind, match="Connection closed"):
        saving.wait()
    assert newest(saving.root) == (None, {}) and theirs.exists() == (kind is UserError)


def test_only_a_fault_of_the_disk_is_retried(tmp_path, monkeypatch):
    attempts = []
    monkeypatch.setattr(checkpoint, "write_part", lambda *_: attempts.append(1) or {}["a"])
    saving = saver_of(tmp_path)
    saving.save(*filled_with(1))
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
