"""An evaluation that has to wait for the next start of its run."""

from __future__ import annotations

import pytest

from dlr_pretrain.train import evaluate
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.update import Update
from dlr_pretrain.util.errors import Stopped
from tests.resume.test_resume import assert_same, final


@pytest.mark.usefixtures("no_export")
def test_an_evaluation_that_a_stop_prevents_or_ends_is_made_by_the_next_start(train, tmp_path, monkeypatch):
    """Asked to stop in update 10, then twice in the evaluation that follows it; steps reach the disk before that."""
    many = ("train.micro_batch=1", "checkpoint.every=100")
    whole, looks = final(train(tmp_path / "whole", *many)), []
    update, stopping = Update.__call__, Evaluator._stopping

    def asked_in_update(self, batch, index, lr, failed):
        self.ranks.stop_requested = index + 1 == 10
        return update(self, batch, index, lr, failed)

    def asked_in_evaluation(self):
        looks.append(1)
        self.ranks.stop_requested = self.ranks.stop_requested or len(looks) == 2
        return stopping(self)

    monkeypatch.setattr(evaluate, "STOP_CHECKED_EVERY", 2)
    for begun in (False, True, True):
        looks.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Update, "__call__", update if begun else asked_in_update)
            patched.setattr(Evaluator, "_stopping", asked_in_evaluation)
            with pytest.raises(Stopped, match=r"after step 10 of 20 \(asked to stop\); saved"):
                train(tmp_path / "parts", *many)
        assert len(looks) == (2 if begun else 0)
        assert [d.name for d in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step_00000010"]
    assert_same(final(train(tmp_path / "parts", *many)), whole)
