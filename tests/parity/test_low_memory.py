"""train.memory=low: updates in the backward pass are those of the ordinary step, bit for bit, and nothing is kept."""

from __future__ import annotations

import math
import os
from weakref import ref

import pytest
import torch
from torch import Tensor

from dlr_pretrain.analysis.history import read_metrics
from dlr_pretrain.models import dlr
from dlr_pretrain.optim import build as optim
from dlr_pretrain.train.checkpoint import load
from dlr_pretrain.train.descent import Descent, PassingDescent
from dlr_pretrain.train.passing import PassingGradients
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.errors import Stopped, UserError
from tests.conftest import forked, saved
from tests.resume.test_merging import Late
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")
WHOLE = ("train.global_batch=4", "train.micro_batch=4", "train.lr=1e-3", "train.steps=6", "checkpoint.every=6")
PREVIOUS = ("train.clip_by=previous_norm", "train.clip=0.3")
LOW = ("train.memory=low",)


def last(*words: str) -> tuple[str, ...]:
    """The last word of each key."""
    return tuple({word.split("=")[0]: word for word in words}.values())


def end(folder) -> tuple[dict[str, Tensor], list[tuple]]:
    """Everything that the last checkpoint holds, and each step's loss and gradient norm."""
    records = read_metrics(folder / "metrics.jsonl")
    newest = max((folder / "checkpoints").iterdir())
    return saved(newest), [(r["train/loss"], r["train/grad_norm"]) for r in records]


def assert_equal(a, b):
    assert a[1] == b[1]
    assert a[0].keys() == b[0].keys()
    for name in a[0]:
        assert torch.equal(a[0][name], b[0][name]), name


@pytest.mark.parametrize("choice", [
    ("backbone=full",),
    ("backbone=cola", "dlr=on", *PREVIOUS),
    ("backbone=cola", "dlr=on", "precision=bf16", "train.activation_checkpointing=latent"),
    ("backbone=lowrank", "dlr=on", "precision=bf16_mixed", *PREVIOUS),
    ("backbone=cola", "dlr=random", "precision=bf16_sr"),
    ("backbone=lost", "dlr=on", "train.activation_checkpointing=block"),
    ("backbone=cola_lax", "dlr=on", "backbone.gate=dense", "train.activation_checkpointing=latent"),
    ("backbone=lowrank", "dlr=on", "dlr.impl=branch"),
    ("backbone=cola", "dlr=no_b"),
    ("backbone=sltrain",),
    ("backbone=relora", "backbone.merge_every=3", "backbone.restart_warmup=1"),
], ids=lambda words: "+".join(word.split("=", 1)[1] for word in words))  # fmt: skip
def test_updates_in_the_backward_pass_are_those_after_it(train, tmp_path, choice):
    clip = () if "train.clip=0.3" in choice else ("train.clip=null",)
    common = (*WHOLE, *choice, *clip)
    assert_equal(*(end(train(tmp_path / m, *common, f"train.memory={m}")) for m in ("full", "low")))


def test_with_moments_of_8_bits(train, tmp_path):
    pytest.importorskip("torchao")
    common = (*WHOLE, *PREVIOUS, "backbone=cola", "dlr=on", "precision=bf16", "optimizer=adamw_8bit")
    common += ("scale.hidden_size=64", "scale.rank=64")
    low, full = (end(train(tmp_path / m, *common, f"train.memory={m}")) for m in ("low", "full"))
    assert any(name.endswith(".codes") for name in low[0])
    assert_equal(low, full)


def test_gradients_are_summed_over_ranks_as_they_come(words, tmp_path):
    common = last(*WHOLE, *PREVIOUS, "train.micro_batch=2", "backbone=cola", "dlr=on")
    for memory in ("full", "low"):
        forked(words(f"run.dir={tmp_path}/{memory}", *common, f"train.memory={memory}"), ranks=2)
    assert_equal(end(tmp_path / "low"), end(tmp_path / "full"))


def test_the_factor_is_that_of_the_norm_before(train, tmp_path):
    """Plain descent on one parameter: the first update whole, the second times bound / the first norm."""
    common = (*WHOLE, "backbone=cola", "dlr=on")
    free = end(train(tmp_path / "free", *common, "train.clip=null"))[1]
    loose = end(train(tmp_path / "loose", *common, "train.clip_by=previous_norm", "train.clip=1e6"))[1]
    tight = end(train(tmp_path / "tight", *common, "train.clip_by=previous_norm", "train.clip=1e-9"))[1]
    assert free == loose
    assert tight[:2] == free[:2] and tight[2:] != free[2:]


def test_no_gradient_and_no_residual_is_left_when_the_next_one_comes(train, tmp_path, monkeypatch):
    applied, apply = [], PassingGradients._apply

    def watched(self, name, p, reduced):
        working = self.weights.differentiated
        held = [n for n, other in working.items() if other.grad is not None]
        siblings = {n for n in held if n != name}
        assert len(siblings) <= 2, siblings  # of one group: their gradients are one product
        apply(self, name, p, reduced)
        assert p.grad is None
        linear = self.carrying.get(name)
        assert linear is None or linear.residual.saved is None
        applied.append(name)

    monkeypatch.setattr(PassingGradients, "_apply", watched)
    common = last(*WHOLE, *LOW, "train.clip=null", "backbone=cola", "dlr=on", "train.steps=1")
    train(tmp_path / "run", *common)
    assert len(applied) == len(set(applied)) == 2 + 1 + 2 * (2 + 14)
    assert applied[0] == "lm_head.weight" and applied[-1] == "model.embed_tokens.weight"


@pytest.mark.parametrize("choice", [("precision=bf16_sr",), ("precision=bf16_mixed", "backbone=cola_lax")])
def test_interrupted_equals_undisturbed(train, tmp_path, choice):
    common = last(*WHOLE, *LOW, *PREVIOUS, "backbone=cola", "dlr=on", "train.steps=8", *choice)
    whole = final(train(tmp_path / "whole", *common))
    for stop in (3, 5):
        with pytest.raises(Stopped):
            train(tmp_path / "parts", *common, f"train.stop_after={stop}")
    assert_same(final(train(tmp_path / "parts", *common)), whole)


# ----------------------------------------------------------------------------------------------------
# What is not finite


@pytest.fixture
def poison(monkeypatch):
    """``poison(part, step)``: the loss, or the gradient of one parameter on, is not finite in that step."""
    plan, count, backward, arrived = {}, [0], PassingGradients.backward, PassingGradients._arrived

    def counted(self, loss, lr, masked, factor):
        count[0] += 1
        return backward(self, loss, lr, masked, factor)

    def poisoned(self, name, p):
        if plan == {name: count[0]}:
            p.grad.view(-1)[0] = math.inf
        arrived(self, name, p)

    monkeypatch.setattr(PassingGradients, "backward", counted)
    monkeypatch.setattr(PassingGradients, "_arrived", poisoned)
    return plan.update


CHECKED = last(
    *WHOLE, *LOW, "train.clip=null", "backbone=cola", "dlr=on", "checkpoint.every=1", "checkpoint.keep_last=9"
)
MIDDLE = "model.layers.1.self_attn.o_proj.b.weight"


def test_a_loss_that_is_not_finite_updates_nothing(train, tmp_path, monkeypatch):
    take, steps = PassingDescent.take, []

    def poisoned(self, micro, count, index, lr, failed):
        steps.append(lr)
        return take(self, micro, count * (0 if len(steps) == 4 else 1), index, lr, failed)

    monkeypatch.setattr(PassingDescent, "take", poisoned)
    folder = train(tmp_path / "run", *CHECKED, "train.on_nonfinite=skip")
    before, after, later = (saved(folder / "checkpoints" / f"step_0000000{n}") for n in (3, 4, 5))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(after["lm_head.weight"], later["lm_head.weight"])
    steps.clear()
    with pytest.raises(
        UserError, match=r"step 4: loss inf.*The update was not applied. The 3 steps before it are saved"
    ):
        train(tmp_path / "other", *CHECKED)


@pytest.mark.parametrize("memory", ["full", "low"])
def test_the_norm_that_is_saved_is_of_an_update_that_was_applied(memory, train, tmp_path, monkeypatch):
    """The update behind the one that ends the run is under way by then, and its gradient may be finite."""
    kind, steps = (PassingDescent if memory == "low" else Descent), []
    take = kind.take

    def poisoned(self, micro, count, index, lr, failed):
        steps.append(lr)
        return take(self, micro, count * (0 if len(steps) == 4 else 1), index, lr, failed)

    monkeypatch.setattr(kind, "take", poisoned)
    monkeypatch.setattr("dlr_pretrain.train.trainer.Pending", Late)
    with pytest.raises(UserError, match="step 4: loss inf"):
        train(tmp_path / "run", *last(*CHECKED, *PREVIOUS, "checkpoint.every=1000", f"train.memory={memory}"))
    assert len(steps) == 5
    third = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert (
        third["step"] == 3
        and load(tmp_path / "run/checkpoints/step_00000003").state["norm"] == third["train/grad_norm"]
    )


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
    train(tmp_path / "run", *last(*WHOLE, *LOW, "train.clip=null", "backbone=cola", "dlr=on", "train.steps=1"))
    assert there == [None]


def test_from_a_gradient_that_is_not_finite_on_nothing_is_updated(train, tmp_path, capsys, poison):
    poison({MIDDLE: 4})
    folder = train(tmp_path / "run", *CHECKED, "train.on_nonfinite=skip")
    before, after = (saved(folder / "checkpoints" / f"step_0000000{n}") for n in (3, 4))
    own = [name for name in before if "/" not in name]
    changed = {name for name in own if not torch.equal(before[name], after[name])}
    assert "lm_head.weight" in changed and "model.layers.1.mlp.down_proj.b.weight" in changed
    assert MIDDLE not in changed and not any("layers.0" in name or "embed" in name for name in changed)
    for name in own:
        assert (after[f"{name}/step"] == before[f"{name}/step"] + (name in changed)).all()
    assert "the update was left out from the first such gradient on" in capsys.readouterr().out
    assert [r["train/skipped"] for r in read_metrics(folder / "metrics.jsonl")] == [0, 0, 0, 1, 1, 1]


def test_a_run_that_ends_there_keeps_the_last_whole_checkpoint(train, tmp_path, poison):
    poison({MIDDLE: 4})
    choice = [word.replace("checkpoint.every=1", "checkpoint.every=2") for word in CHECKED]
    with pytest.raises(UserError, match=r"step 4: .* had been updated, and are not saved. Step 2 is, and the same"):
        train(tmp_path / "run", *choice)
    assert max((tmp_path / "run" / "checkpoints").iterdir()).name == "step_00000002"
    train(tmp_path / "run", *choice)
    assert max((tmp_path / "run" / "checkpoints").iterdir()).name == "step_00000006"


@pytest.mark.slow
def test_compiled_it_trains_as_eager_does(train, tmp_path, monkeypatch):
    backend = os.environ.get("DLR_MATRIX_BACKEND", "aot_eager")
    common = (*WHOLE, *LOW, *PREVIOUS, "backbone=cola", "dlr=on", "train.activation_checkpointing=latent")
    eager = end(train(tmp_path / "eager", *common))
    compiled, compile_ = [], torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda *given, **options: (compiled.append(1), compile_(*given, **options, backend=backend))[1],
    )
    found = end(train(tmp_path / "compiled", *common, "compile=true"))
    assert compiled and found[1] == [pytest.approx(pair, rel=2e-5) for pair in eager[1]]


def test_a_step_outside_of_an_update_is_still_refused():
    """The optimizer's step within ``active`` is allowed for weights that were withdrawn alone."""
    linear = torch.nn.Linear(4, 12, bias=False)
    dlr.attach_dlr(linear, match=lambda *_: True)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    with dlr.active(linear):
        linear(torch.ones(4)).sum().backward()
        with pytest.raises(RuntimeError, match="holds the published residual"):
            optimizer.step()
        assert linear.residual.withdraw()
        optimizer.step()
