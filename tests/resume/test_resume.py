"""The same command again continues the run, and ends where an undisturbed one does, bit for bit."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import time
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.optim import build as optim
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.history import read_metrics
from tests.conftest import torchrun

pytestmark = pytest.mark.usefixtures("no_export")
TIMING = ("time", "perf/tokens_per_second", "perf/max_memory_gb", "perf/mfu")


def final(folder):
    """The folded tensors, and the metrics without what depends on the clock."""
    records = [{k: v for k, v in r.items() if k not in TIMING} for r in read_metrics(folder / "metrics.jsonl")]
    return load_file(folder / "folded" / "model.safetensors"), records


def assert_same(a, b):
    assert a[0].keys() == b[0].keys()
    for name in a[0]:
        assert torch.equal(a[0][name], b[0][name]), name
    assert a[1] == b[1]


@pytest.mark.parametrize("choice", [
    ("backbone=cola", "dlr=on"),
    ("backbone=cola", "dlr=on", "dlr.impl=branch"),
    ("backbone=lowrank", "precision=bf16"),
    ("backbone=lowrank", "dlr=on", "precision=bf16_mixed"),
    ("backbone=full", "train.accumulate=fp32"),
    ("backbone=sltrain", "precision=bf16"),
    ("backbone=cola", "dlr=on", "precision=bf16_sr"),
])  # fmt: skip
def test_interrupted_twice_equals_undisturbed(train, tmp_path, choice):
    whole = final(train(tmp_path / "whole", *choice))
    assert [r["step"] for r in whole[1]] == list(range(1, 21))
    for stop in (7, 13):
        with pytest.raises(Stopped, match=f"after step {stop} of 20"):
            train(tmp_path / "parts", *choice, f"train.stop_after={stop}")
    assert_same(final(train(tmp_path / "parts", *choice)), whole)


def test_lines_beyond_the_checkpoint_are_cut(train, tmp_path):
    whole = final(train(tmp_path / "whole"))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", "train.stop_after=7")
    path = tmp_path / "parts" / "metrics.jsonl"
    with open(path, "a") as file:  # a run that went on, and was killed in the middle of a line
        file.write(json.dumps({"step": 8, "train/loss": 1.0}) + "\n" + '{"step": 9, "train/lo')
    assert_same(final(train(tmp_path / "parts")), whole)


def test_a_complete_run_is_left_alone(train, tmp_path, capsys):
    folder = train(tmp_path / "run", "train.steps=4")
    before = {p: p.stat().st_mtime_ns for p in (folder / "folded").iterdir()}
    capsys.readouterr()
    train(folder, "train.steps=4")
    assert {p: p.stat().st_mtime_ns for p in (folder / "folded").iterdir()} == before
    assert "is complete" in capsys.readouterr().out
    assert len(read_metrics(folder / "metrics.jsonl")) == 4


def test_a_fold_that_was_interrupted_is_made_again(train, tmp_path):
    whole = final(train(tmp_path / "run", "train.steps=4", "dlr=on"))
    shutil.rmtree(tmp_path / "run" / "folded")
    assert_same(final(train(tmp_path / "run", "train.steps=4", "dlr=on")), whole)


def test_other_mathematics_are_refused_with_the_difference(train, tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=3")
    with pytest.raises(UserError, match=r"train.lr: 0.01 there, 0.02 here"):
        train(tmp_path / "run", "train.lr=0.02")
    train(tmp_path / "run", "train.micro_batch=4", "checkpoint.keep_last=1")  # the machine's business


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "unmark"])
def test_a_damaged_checkpoint_is_passed_over(train, tmp_path, capsys, damage):
    whole = final(train(tmp_path / "whole"))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", "train.stop_after=10")
    newest = tmp_path / "parts" / "checkpoints" / "step_00000010"
    (weights,) = newest.glob("*.safetensors")
    if damage == "truncate":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-100] ^= 1
        weights.write_bytes(data)
    elif damage == "remove":
        weights.unlink()
    else:
        (newest / "manifest.json").unlink()
    capsys.readouterr()
    assert_same(final(train(tmp_path / "parts")), whole)
    assert "passed over" in (out := capsys.readouterr().out) and "after step 5" in out


@pytest.mark.parametrize("content", ["{{junk\n", "[]\n", "null\n", '{"step": "x", "starts": 3}\n'])
def test_a_damaged_record_is_named(train, tmp_path, content):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=2")
    (tmp_path / "run" / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest.json.* damaged"):
        train(tmp_path / "run")


def test_what_a_loss_of_power_leaves_of_the_metrics_is_cut(train, tmp_path):
    whole = final(train(tmp_path / "whole"))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", "train.stop_after=7")
    with open(tmp_path / "parts" / "metrics.jsonl", "ab") as file:
        file.write(bytes(300) + b"\n" + b'{"step": 12, "train/loss": 1.0}\n')
    assert_same(final(train(tmp_path / "parts")), whole)


def test_a_line_that_was_lost_leaves_a_gap_that_is_named(train, tmp_path, capsys):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=7")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "{{junk\n", *lines[4:]]))
    train(tmp_path / "run")
    assert "metrics.jsonl has lost 1 of the 7" in capsys.readouterr().out
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, *range(5, 21)]


def test_checkpoints_that_are_gone_are_missed(train, tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=7")
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"checkpoints: none, and step 7 was saved. Restore it"):
        train(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines
    (tmp_path / "elsewhere").rename(tmp_path / "run" / "checkpoints")
    train(tmp_path / "run")


def test_a_last_checkpoint_that_is_gone_is_missed_by_name(train, tmp_path, capsys):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=7")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000007")
    train(tmp_path / "run")
    lost = "the checkpoint of step 7, the last that was saved, is missing or incomplete. Continuing from step_00000005"
    assert lost in capsys.readouterr().out


def test_a_last_checkpoint_that_shows_late_is_waited_for(train, tmp_path, capsys, monkeypatch):
    """As on a network file system, where another machine has saved it."""
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=7")
    last, hidden = tmp_path / "run" / "checkpoints" / "step_00000007", tmp_path / "hidden"
    last.rename(hidden)
    sleep = time.sleep

    def shows(seconds):
        if hidden.exists():
            hidden.rename(last)
        sleep(seconds)

    monkeypatch.setattr("dlr_pretrain.train.start.LATE", 600.0)
    monkeypatch.setattr(time, "sleep", shows)
    train(tmp_path / "run")
    assert "after step 7" in (said := capsys.readouterr().out) and "warning" not in said


def test_a_kill_between_the_first_checkpoint_and_the_word_of_it_leaves_the_run_what_it_is(train, tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=7", "checkpoint.keep_last=1")
    path = tmp_path / "run" / "manifest.json"
    record = json.loads(path.read_text())
    assert record.pop("saved") == 7
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"holds another run:\n  train.lr: 0.01 there, 0.02 here"):
        train(tmp_path / "run", "train.lr=0.02")
    assert json.loads(path.read_text()) == record | {"saved": 7}


@pytest.mark.parametrize("choice", [("scale.hidden_size=48",), ("train.lr=0.02",)])
def test_a_checkpoint_of_another_run_is_refused(train, tmp_path, choice):
    for name, words in (("one", ()), ("other", choice)):
        with pytest.raises(Stopped):
            train(tmp_path / name, *words, "train.stop_after=7")
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "one" / "checkpoints")
    with pytest.raises(UserError, match=r"step_00000007: it is of another run \(1 keys? differ: (train.lr|scale.h)"):
        train(tmp_path / "one")


def test_a_checkpoint_under_another_name_is_passed_over(train, tmp_path, capsys):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=7")
    (tmp_path / "run" / "checkpoints" / "step_00000007").rename(tmp_path / "run" / "checkpoints" / "step_00000009")
    train(tmp_path / "run")
    assert "is that of step 7 under another name" in capsys.readouterr().out


def test_the_runs_own_copy_of_the_tokenizer_serves_a_resume(train, tmp_path):
    whole = final(train(tmp_path / "whole"))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", "train.stop_after=2")
    assert_same(final(train(tmp_path / "parts", f"tokenizer.path={tmp_path}/parts/tokenizer")), whole)


def test_a_run_directory_that_cannot_be_written_is_named(train, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/run: Not a directory\. Look at run\.dir"):
        train(tmp_path / "file" / "run")


def test_a_stop_leaves_a_fold_that_takes_long_to_the_next_start(train, tmp_path, monkeypatch):
    whole = final(train(tmp_path / "whole", "train.steps=4", "dlr=on"))

    def long(*_) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    with monkeypatch.context() as patched:
        patched.setattr("dlr_pretrain.train.run.finish", long)
        patched.setattr("dlr_pretrain.train.ranks.GRACE", 0.2)
        with pytest.raises(Stopped, match=r"stopped after the last step, before the folded checkpoint"):
            train(tmp_path / "run", "train.steps=4", "dlr=on")
    assert not (tmp_path / "run" / "folded").exists()
    assert_same(final(train(tmp_path / "run", "train.steps=4", "dlr=on")), whole)


@pytest.mark.slow
def test_a_resume_on_four_ranks_adds_up_in_the_same_order(words, tmp_path):
    """DDP's first pass of a process has other buckets than all after it."""
    common = ("backbone=cola", "dlr=on", "train.lr=1e-2", "train.steps=6", "checkpoint.every=3", "train.micro_batch=2")
    assert torchrun(words(f"run.dir={tmp_path}/whole", *common), ranks=4).returncode == 0
    assert torchrun(words(f"run.dir={tmp_path}/parts", *common, "train.stop_after=3"), ranks=4).returncode != 0
    assert torchrun(words(f"run.dir={tmp_path}/parts", *common), ranks=4).returncode == 0
    assert_same(final(tmp_path / "parts"), final(tmp_path / "whole"))


@pytest.mark.slow
def test_other_rank_counts_continue_the_run(train, words, tmp_path):
    whole = final(train(tmp_path / "whole", "dlr=on"))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", "dlr=on", "train.stop_after=7")
    stopped = torchrun(words(f"run.dir={tmp_path}/parts", "dlr=on", "train.stop_after=14"), ranks=2)
    assert stopped.returncode != 0 and "stopped after step 14 of 20" in stopped.stderr
    parts = final(train(tmp_path / "parts", "dlr=on"))
    assert [r["train/real_tokens"] for r in parts[1]] == [r["train/real_tokens"] for r in whole[1]]
    for a, b in zip(parts[1], whole[1], strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-4)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_other_text_is_another_run(train, tmp_path, corpus, split):
    """A shard that was fetched again, whole this time, is one, too."""
    texts = shutil.copytree(corpus, tmp_path / "texts")
    with pytest.raises(Stopped):
        train(tmp_path / "run", f"data.root={texts}", "train.stop_after=3")
    changed = sorted(texts.glob(f"c4-{split}*"))[-1]
    changed.write_bytes(changed.read_bytes() + gzip.compress(b'{"text": "more"}\n'))
    with pytest.raises(UserError, match=r"holds another run:\n  data\.shards: "):
        train(tmp_path / "run", f"data.root={texts}")


def test_the_optimizer_goes_when_training_is_over(train, tmp_path, monkeypatch):
    """The weights are still needed, and a GPU has no room to fold them beside the moments."""
    made, there, build, folded = [], [], optim.build, Weights.folded

    def remembered(*args, **kwargs):
        optimizer = build(*args, **kwargs)
        made.append(ref(optimizer))
        return optimizer

    def looked_at(self, keep):
        there.extend(optimizer() for optimizer in made)
        return folded(self, keep)

    monkeypatch.setattr(optim, "build", remembered)
    monkeypatch.setattr(Weights, "folded", looked_at)
    train(tmp_path / "run", "backbone=cola", "dlr=on", "train.steps=1")
    assert there == [None]
