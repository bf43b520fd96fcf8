"""An evaluation that has to wait for the next start of its run."""

from __future__ import annotations

import pytest

from dlr_pretrain.train import evaluate
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.update import Update
from dlr_pretrain.util.errors import Stopped
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")


@pytest.mark.parametrize("step", [10, pytest.param(15, marks=pytest.mark.full)])
def test_an_evaluation_that_is_due_when_the_run_is_stopped_waits_for_the_next_start(train, tmp_path, monkeypatch, step):
    whole = final(train(tmp_path / "whole"))
    update, evaluated, call = Update.__call__, [], Evaluator.__call__

    def stopped(self, batch, index, lr, failed):
        self.ranks.stop_requested = index + 1 == step
        return update(self, batch, index, lr, failed)

    monkeypatch.setattr(Evaluator, "__call__", lambda *given: evaluated.append(1) or call(*given))
    with monkeypatch.context() as asked:
        asked.setattr(Update, "__call__", stopped)
        with pytest.raises(Stopped, match=f"after step {step} of 20"):
            train(tmp_path / "parts")
    assert len(evaluated) == step // 10 - (step == 10)
    assert_same(final(train(tmp_path / "parts")), whole)


def test_a_request_to_stop_ends_an_evaluation_and_the_next_start_makes_it(train, tmp_path, monkeypatch):
    """Steps that are trained reach the disk before a long evaluation of them does."""
    many = ("train.micro_batch=1", "checkpoint.every=100")
    whole, looks = final(train(tmp_path / "whole", *many)), []

    def asked(self):
        looks.append(1)
        self.ranks.stop_requested = self.ranks.stop_requested or len(looks) == 2
        return stopping(self)

    monkeypatch.setattr(evaluate, "STOP_CHECKED_EVERY", 2)
    stopping = Evaluator._stopping
    for _ in range(2):  # then, too, it is at the evaluation alone
        looks.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Evaluator, "_stopping", asked)
            with pytest.raises(Stopped, match=r"after step 10 of 20 \(asked to stop\); saved"):
                train(tmp_path / "parts", *many)
        assert len(looks) == 2
        assert [d.name for d in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step_00000010"]
    assert_same(final(train(tmp_path / "parts", *many)), whole)
