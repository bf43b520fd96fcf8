"""A run that goes on from another one under other settings, on purpose, says from where and what differs."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from dlr_pretrain.config.written import read_record
from dlr_pretrain.train import fork as fork_module
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.history import read_metrics
from tests.conftest import saved
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")


@pytest.fixture
def origin(train, tmp_path):
    """A run of ten steps of twenty."""
    with pytest.raises(Stopped):
        train(tmp_path / "origin", "train.stop_after=10", "backbone=cola", "dlr=on", "checkpoint.keep_last=2")
    return tmp_path / "origin"


CHOICE = ("backbone=cola", "dlr=on")


def record(folder) -> dict:
    return read_record(folder)["forked"]


def test_without_a_change_it_is_the_rest_of_the_run(train, tmp_path, origin, capsys):
    whole = final(train(tmp_path / "whole", *CHOICE))
    fork = train(tmp_path / "fork", *CHOICE, f"run.fork_from={origin}")
    assert_same(final(fork), whole)
    there = {"checkpoint": str(origin / "checkpoints/step_00000010"), "step": 10, "changed": {}}
    assert record(fork) == there | {"starts": [start["time"] for start in read_record(origin)["starts"]]}
    assert {d.name for d in (origin / "checkpoints").iterdir()} == {"step_00000005", "step_00000010"}
    shutil.rmtree(origin)
    assert_same(final(train(fork, *CHOICE, f"run.fork_from={origin}")), whole)


def test_what_differs_is_said_and_kept_on_record(train, tmp_path, origin, capsys):
    fork = train(tmp_path / "fork", *CHOICE, f"run.fork_from={origin}", "train.lr=0.002", "train.steps=30")
    assert record(fork)["changed"]["train.lr"] == [0.01, 0.002] and record(fork)["changed"]["train.steps"] == [20, 30]
    assert "fork: train.lr was 0.01, and is 0.002 after step 10" in capsys.readouterr().out
    records = read_metrics(fork / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 31)) and max(r["train/lr"] for r in records[10:]) < 0.0021
    one, other = saved(origin / "checkpoints/step_00000010"), saved(fork / "checkpoints/step_00000030")
    assert other["lm_head.weight/step"] == 30 and one.keys() == other.keys()


def test_a_fork_is_resumed_like_any_run_and_once_forked_needs_its_origin_no_more(train, tmp_path, origin):
    given = (*CHOICE, f"run.fork_from={origin}", "train.lr=0.002", "optimizer=adamw_foreach", "data.seed=7")
    whole = final(train(tmp_path / "whole", *given))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=12")
    shutil.rmtree(origin)
    assert_same(final(train(tmp_path / "parts", *given)), whole)
    ends = [tmp_path / name / "checkpoints/step_00000020/state.json" for name in ("whole", "parts")]
    of_whole, of_parts = (json.loads(path.read_text())["losses"] for path in ends)
    assert of_whole == of_parts and len(of_whole) == 10  # those of the origin are of other text


def test_other_data_and_another_optimizer_start_anew(train, tmp_path, origin, capsys):
    with pytest.raises(Stopped):
        train(tmp_path / "fork", *CHOICE, f"run.fork_from={origin}", "optimizer=muon", "data.packing=pad",
              "train.stop_after=11", "checkpoint.keep_last=9")  # fmt: skip
    assert "the optimizer's state starts anew" in (said := capsys.readouterr().out) and "the data start anew" in said
    state = json.loads((tmp_path / "fork/checkpoints/step_00000011/state.json").read_text())
    assert state["tokens"] == 11 * 256 and all(place[:3] == [0, 0, 0] for place in state["streams"].values())
    assert saved(tmp_path / "fork/checkpoints/step_00000011")["lm_head.weight/step"] == 1


def test_another_rate_of_b_keeps_the_optimizers_state(train, tmp_path, origin, capsys):
    with pytest.raises(Stopped):
        train(tmp_path / "fork", *CHOICE, f"run.fork_from={origin}", "optimizer.b_lr=2", "train.stop_after=11")
    assert "optimizer.b_lr was" in (said := capsys.readouterr().out) and "starts anew" not in said


def test_evaluations_of_other_text_are_not_compared(train, tmp_path):
    best = ("checkpoint.keep_best=true", "checkpoint.keep_last=1", "eval.every=5")
    with pytest.raises(Stopped):
        train(tmp_path / "origin", *best, "train.stop_after=10")
    fork = train(tmp_path / "fork", *best, f"run.fork_from={tmp_path}/origin", "eval.packing=packed", "train.lr=1e-9")
    kept = sorted(d.name for d in (fork / "checkpoints").iterdir())
    assert kept[-1] == "step_00000020" and kept[0] in {"step_00000015", "step_00000020"}


def test_a_fork_of_a_fork_drops_what_the_first_would_have(train, tmp_path, origin):
    """The first fork has saved nothing of its own: its checkpoint is still the origin's."""
    with pytest.raises(Stopped):
        train(tmp_path / "one", *CHOICE, f"run.fork_from={origin}", "data.seed=7", "train.stop_after=10")
    two = train(tmp_path / "two", *CHOICE, f"run.fork_from={tmp_path}/one", "data.seed=7", "train.lr=2e-3")
    direct = train(tmp_path / "direct", *CHOICE, f"run.fork_from={origin}", "data.seed=7", "train.lr=2e-3")
    assert_same(final(two), final(direct))


def test_a_checkpoint_knows_its_run_without_the_runs_record(train, tmp_path, origin, monkeypatch, capsys):
    shutil.copytree(origin / "checkpoints/step_00000010", tmp_path / "bare/step_00000010")
    monkeypatch.chdir(tmp_path / "bare")
    with pytest.raises(Stopped):
        train(tmp_path / "fork", *CHOICE, "run.fork_from=step_00000010", "data.seed=7", "train.stop_after=11")
    assert "the data start anew" in capsys.readouterr().out


def test_a_fork_says_which_checkpoints_it_passes_over(train, tmp_path, origin, capsys):
    (part,) = (origin / "checkpoints/step_00000010").glob("part_*")
    part.write_bytes(b"damaged")
    fork = train(tmp_path / "fork", *CHOICE, f"run.fork_from={origin}", "train.lr=0.02")
    assert "fork: passed over" in capsys.readouterr().out and record(fork)["step"] == 5


def test_a_start_that_was_refused_holds_no_directory(train, tmp_path, origin):
    with pytest.raises(UserError, match="no checkpoint there"):
        train(tmp_path / "fork", *CHOICE, f"run.fork_from={tmp_path}/typo")
    assert record(train(tmp_path / "fork", *CHOICE, f"run.fork_from={origin}"))["step"] == 10


def test_a_kill_between_the_fork_and_its_first_checkpoint(train, tmp_path, origin):
    given = (*CHOICE, f"run.fork_from={origin}", "optimizer=adamw_foreach")
    whole = final(train(tmp_path / "whole", *given))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=11")
    shutil.rmtree(tmp_path / "parts/checkpoints/step_00000011")
    assert_same(final(train(tmp_path / "parts", *given)), whole)


STAGES = [("write_durably", 1), ("update_record", 1), ("sync", 1), ("update_record", 2)]


@pytest.mark.parametrize(("stage", "call"), STAGES)
def test_a_kill_between_two_writes_leaves_a_whole_fork_or_none(train, tmp_path, origin, monkeypatch, stage, call):
    """The kill is an exception that nothing handles, before that call of ``stage``."""
    given = (*CHOICE, f"run.fork_from={origin}", "train.lr=0.002")
    real, left = getattr(fork_module, stage), call

    def killing(*words):
        nonlocal left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return real(*words)

    with monkeypatch.context() as patched:
        patched.setattr(fork_module, stage, killing)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "fork", *given)
    whole = any((tmp_path / "fork/checkpoints").glob("step_*"))
    assert whole == ((stage, call) in STAGES[2:])
    if whole:
        with pytest.raises(UserError, match=r"holds another run:\n  train.lr: 0.002 there, 0.01 here"):
            train(tmp_path / "fork", *CHOICE)
    else:
        with pytest.raises(Stopped):
            train(tmp_path / "fork", *CHOICE, "train.stop_after=1")
        assert read_record(tmp_path / "fork").keys() == {"starts", "identity", "saved"}
        shutil.rmtree(tmp_path / "fork")
    fork = train(tmp_path / "fork", *given)
    assert record(fork)["step"] == 10 and read_record(fork)["saved"] == 20
    assert [r["step"] for r in read_metrics(fork / "metrics.jsonl")] == list(range(1, 21))


def test_a_named_checkpoint_is_taken(train, tmp_path, origin):
    fork = train(tmp_path / "fork", *CHOICE, f"run.fork_from={origin}/checkpoints/step_00000005", "train.lr=0.02")
    assert record(fork)["step"] == 5


@pytest.mark.parametrize(
    ("where", "choice", "reason"),
    [
        ("origin", ("scale.hidden_size=48",), r"another model \(\d+ tensors differ: .*\(120, 32\) there"),
        ("origin", ("backbone=lowrank", "scale.rank=4"), r"another model"),
        ("origin", (*CHOICE, "train.steps=10"), r"train.steps=10: .* has trained 10 already. Set it above that"),
        ("nowhere", CHOICE, r"no checkpoint there. Name a run"),
        ("origin/checkpoints/step_00000007", CHOICE, r"was not finished. Name another"),
    ],
)
def test_what_does_not_fit_is_refused(train, tmp_path, origin, where, choice, reason):
    with pytest.raises(UserError, match=reason):
        train(tmp_path / "fork", f"run.fork_from={tmp_path}/{where}", *choice)
    assert not any((tmp_path / "fork").glob("checkpoints/step_*"))


def test_a_changed_run_says_how_to_fork(train, origin):
    with pytest.raises(UserError, match=rf"train.lr: 0.01 there, 0.02 here\n.*run.fork_from={origin}"):
        train(origin, *CHOICE, "train.lr=0.02")


def test_masters_take_up_a_forked_bf16_run(train, tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path / "origin", "precision=bf16", "train.stop_after=10")
    fork = train(tmp_path / "fork", "precision=bf16_mixed", f"run.fork_from={tmp_path}/origin", "train.lr=1e-3")
    assert saved(fork / "checkpoints/step_00000020")["lm_head.weight"].dtype == torch.float32
