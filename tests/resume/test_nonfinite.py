"""An update that is not finite is never applied: it ends the run or is skipped, and its batch is kept."""

import json
import math

import pytest
import torch

from dlr_pretrain.analysis.report import write_report
from dlr_pretrain.analysis.runs import read_runs
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.data import TrainLoader, load_tokenizer
from dlr_pretrain.optim.optimizer import Optimizer
from dlr_pretrain.train import loop
from dlr_pretrain.train.checkpoint import load
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.update import Update
from dlr_pretrain.util.errors import Diverged, Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests.conftest import saved
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")
SKIP = ("train.on_nonfinite=skip", "checkpoint.keep_last=99", "eval.every=100")


@pytest.fixture
def poison(monkeypatch):
    """``poison(6, 7)`` makes the loss of these steps not finite, with ``of="gradient"`` an entry of the gradient."""
    bad, at, update, backward, collect = {}, {}, Update.__call__, Update.forward_backward, Optimizer.collect

    def counted(self, batch, index, lr, *asked):
        at["step"] = index + 1
        return update(self, batch, index, lr, *asked)

    def passed(self, micro_batches, count):
        return backward(self, micro_batches, count * (0.0 if bad.get(at.get("step")) == "loss" else 1.0))

    def collected(self):
        gradients = collect(self)
        if bad.get(at.get("step")) == "gradient":
            gradients[0].view(-1)[5] = torch.inf
        return gradients

    monkeypatch.setattr(Update, "__call__", counted)
    monkeypatch.setattr(Update, "forward_backward", passed)
    monkeypatch.setattr(Optimizer, "collect", collected)
    return lambda *steps, of="loss": bad.update(dict.fromkeys(steps, of))


def test_a_nonfinite_update_ends_the_run_and_keeps_its_batch(train, corpus, tmp_path, poison):
    poison(7)
    with pytest.raises(UserError, match=r"step 7: loss (inf|nan).*The 6 steps before it are saved.*nonfinite"):
        train(tmp_path / "run", "train.global_batch=4", "train.micro_batch=4")
    assert (tmp_path / "run" / "checkpoints" / "step_00000006").is_dir()
    state = read_record(tmp_path / "run")["state"]
    assert (state["name"], state["step"]) == ("diverged", 6) and state["reason"].startswith("step 7: loss")
    assert read_runs([tmp_path / "run"]).runs.state.item() == "diverged"
    kept = json.loads((tmp_path / "run" / "nonfinite" / "step_00000007_rank_0.json").read_text())
    assert kept["step"] == 7 and len(kept["tokens"]) == 4
    tokenizer = load_tokenizer(corpus / "spiece.model")
    for row, text in zip(kept["tokens"], kept["text"], strict=True):
        assert len(row) == 33 and text == tokenizer.decode(row) and len(text) > 40
    again = ("train.on_nonfinite=skip", "train.global_batch=4", "train.micro_batch=4")
    state = read_record(train(tmp_path / "run", *again))["state"]
    assert (state["name"], state["reason"]) == ("complete", "")


def test_a_nonfinite_last_evaluation_prevents_the_fold(train, tmp_path, monkeypatch):
    names = ("loss", "loss_a", "loss_b", "perplexity", "perplexity_galore")
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: {f"eval/{name}": math.nan for name in names})
    for _ in range(2):
        with pytest.raises(Diverged, match=r"step 20: the last evaluation is not finite, so nothing was folded"):
            train(tmp_path / "run")
    assert not (tmp_path / "run" / "folded").exists() and (tmp_path / "run/checkpoints/step_00000020").is_dir()
    write_report(tmp_path / "run")
    assert "run diverged after step 20" in (tmp_path / "run" / "report.md").read_text()


@pytest.mark.parametrize(("of", "choice"), [
    ("loss", ("backbone=cola", "dlr=on", "precision=bf16_mixed")), ("gradient", ("optimizer=adamw_foreach",)),
])  # fmt: skip
def test_a_skipped_update_changes_no_weight_or_moment(train, tmp_path, capsys, poison, of, choice):
    poison(6, of=of)
    folder = train(tmp_path / "run", *SKIP, *choice, "checkpoint.every=1", "train.steps=8")
    before, skipped, after = (saved(folder / "checkpoints" / f"step_0000000{n}") for n in (5, 6, 7))
    assert all(torch.equal(before[name], skipped[name]) for name in before)
    assert any(not torch.equal(after[name], skipped[name]) for name in after)
    records = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, 9)) and records[-1]["train/tokens"] == 8 * 8 * 32
    assert [r["train/skipped"] for r in records] == [0] * 5 + [1] * 3
    assert records[5]["train/grad_norm"] is None
    finite = [r["step"] for r in records if r["train/loss"] is not None]
    assert finite == [n for n in range(1, 9) if n != 6 or of == "gradient"]
    assert "warning: step 6: loss" in (out := capsys.readouterr().out) and "skipped, see" in out


@pytest.mark.full
def test_a_run_interrupted_among_skips_ends_the_same(train, tmp_path, monkeypatch, poison):
    """A step without data is not taken, and does not count as skipped."""
    poison(6, 7, 9)
    whole, take, taken = final(train(tmp_path / "whole", *SKIP)), TrainLoader.take, []
    monkeypatch.setitem(loop.LAG, "cpu", 1)  # as on a GPU

    def waiting(self, stop, timeout):
        taken.append(1)
        if len(taken) == 3:
            raise Stopped("asked to stop while waiting for data")
        return take(self, stop, timeout)

    for stop in (6, 8):
        with pytest.raises(Stopped):
            train(tmp_path / "parts", *SKIP, f"train.stop_after={stop}")
    with monkeypatch.context() as asked:
        asked.setattr(TrainLoader, "take", waiting)
        with pytest.raises(Stopped, match=r"step 11 was not taken. The 10 steps .* saved.* asked to stop while"):
            train(tmp_path / "parts", *SKIP)
    assert_same(final(train(tmp_path / "parts", *SKIP)), whole)
    assert len(list((tmp_path / "parts" / "nonfinite").iterdir())) == 3


@pytest.mark.parametrize(("lag", "last"), [(0, 11), (1, 12)])
def test_too_many_skips_in_a_row_end_the_run(train, tmp_path, monkeypatch, poison, lag, last):
    poison(3, 4, *range(8, 20))
    monkeypatch.setitem(loop.LAG, "cpu", lag)
    with pytest.raises(UserError, match=r"the last 4 updates were not finite, and train.max_skipped=3"):
        train(tmp_path / "run", *SKIP, "train.max_skipped=3", "checkpoint.every=100")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    assert newest.name == f"step_{last:08d}"
    assert load(newest).state["skipped"] == [last - 5, last - 7, last]


def test_too_many_skips_at_the_end_prevent_the_fold(train, tmp_path, poison):
    """No update follows the last skipped one to end the run: the next start must not fold what it finds."""
    poison(*range(17, 21))
    for _ in range(2):
        with pytest.raises(Diverged, match=r"the last 4 updates were not finite, and train\.max_skipped=3"):
            train(tmp_path / "run", *SKIP, "train.max_skipped=3")
        assert not (tmp_path / "run" / "folded").exists()
        assert "the last 4 updates" in read_record(tmp_path / "run")["state"]["reason"]
    assert (train(tmp_path / "run", *SKIP, "train.max_skipped=4") / "folded").is_dir()


def test_nonfinite_weights_are_not_saved(train, tmp_path):
    """The gradient is finite, the rate is absurd: only the next loss shows it, and no save may come before."""
    with pytest.raises(UserError, match=r"not finite"):
        train(tmp_path / "run", "train.lr=1e39", "checkpoint.every=1", "train.warmup_steps=0", "precision=fp32")
    for directory in (tmp_path / "run").glob("checkpoints/step_*"):
        assert all(torch.isfinite(t).all() for t in saved(directory).values())


def test_the_batches_that_are_kept_are_bounded(train, tmp_path, poison, monkeypatch, capsys):
    monkeypatch.setattr("dlr_pretrain.train.guard.MOST_KEPT", 2)
    poison(3, 5, 7, 9)
    train(tmp_path / "run", "train.on_nonfinite=skip", "train.steps=10", "train.max_skipped=9")
    kept = sorted(path.name for path in (tmp_path / "run" / "nonfinite").iterdir())
    assert kept == ["step_00000003_rank_0.json", "step_00000005_rank_0.json"]
    said = capsys.readouterr().out
    assert said.count(f"skipped, see {tmp_path}/run/nonfinite") == 2
    assert said.count(f"skipped, its batch is not kept, as {tmp_path}/run/nonfinite has 2") == 2
