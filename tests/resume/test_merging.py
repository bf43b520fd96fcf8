"""ReLoRA's merges in a run: at which steps they come, what they change, and that interruptions change nothing."""

from __future__ import annotations

import pytest
import torch

from dlr_pretrain.train import loop
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests import conftest
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")
RELORA = ("backbone=relora", "backbone.merge_every=6", "backbone.restart_warmup=2", "checkpoint.keep_last=99")
AT = "model.layers.0.mlp.down"


def saved(folder, step: int) -> dict:
    return conftest.saved(folder / "checkpoints" / f"step_{step:08d}")


@pytest.mark.full
def test_a_run_interrupted_around_merges_ends_the_same(train, tmp_path):
    choice = (*RELORA, "precision=bf16_mixed", "backbone.prune_ratio=0.9")
    whole = final(train(tmp_path / "whole", *choice))
    assert [r["step"] for r in whole[1]] == list(range(1, 21))
    for stop in (5, 6, 13):
        with pytest.raises(Stopped, match=f"after step {stop} of 20"):
            train(tmp_path / "parts", *choice, f"train.stop_after={stop}")
    assert_same(final(train(tmp_path / "parts", *choice)), whole)
    for step in (5, 10, 15, 20):
        one, other = saved(tmp_path / "whole", step), saved(tmp_path / "parts", step)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_checkpoint_at_a_merge_holds_the_merged_weights(train, tmp_path):
    """fp32 masters keep what the working weights would round away."""
    given = ("precision=bf16_mixed", "checkpoint.every=1", "train.steps=8", "train.warmup_steps=0")
    folder = train(tmp_path / "run", *RELORA, *given)
    initial, before, merged, after = (saved(folder, step) for step in (1, 5, 6, 7))
    assert torch.equal(before[f"{AT}.w"], initial[f"{AT}.w"])
    change = (merged[f"{AT}.w"] - before[f"{AT}.w"])[:, :91]  # the rest is padding
    assert change.dtype == torch.float32 and change.count_nonzero() > 0.99 * change.numel()
    assert torch.linalg.matrix_rank(change.double(), rtol=1e-4) == 8
    assert before[f"{AT}.b"].any() and not merged[f"{AT}.b"].any()
    assert not torch.equal(merged[f"{AT}.a"], before[f"{AT}.a"])
    moments = [merged[name] for name in merged if name.endswith((".a/exp_avg", ".b/exp_avg"))]
    kept = sum(m.count_nonzero().item() for m in moments) / sum(m.numel() for m in moments)
    assert len(moments) == 16 and 0 < kept < 0.005  # prune_ratio 0.999
    assert merged["lm_head.weight/exp_avg"].count_nonzero() > 0.9 * merged["lm_head.weight/exp_avg"].numel()
    assert torch.equal(after[f"{AT}.w"], merged[f"{AT}.w"])
    rates = [r["train/lr"] for r in read_metrics(folder / "metrics.jsonl")]
    assert rates[5] > 0 and rates[6] == 0 and 0 < rates[7] < rates[5]


def test_no_merge_follows_an_update_that_is_not_finite(train, tmp_path, monkeypatch):
    monkeypatch.setitem(loop.LAG, "cpu", 1)  # as on a GPU
    choice = ("backbone=relora", "backbone.merge_every=2", "backbone.restart_warmup=0", "train.warmup_steps=0")
    with pytest.raises(UserError, match=r"step 2: loss .* not finite"):
        train(tmp_path / "run", *choice, "train.lr=1e30", "train.clip=null", "checkpoint.every=1000")
    state = saved(tmp_path / "run", 1)
    assert state[f"{AT}.b"].any() and all(torch.isfinite(t).all() for t in state.values())
