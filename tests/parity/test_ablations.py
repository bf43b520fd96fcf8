"""The ablations of DLR against their formulas, and in the trainer."""

from __future__ import annotations

import copy
import hashlib
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dlr_pretrain.models import active, attach_dlr, build, fold_
from dlr_pretrain.models.dlr import residuals
from dlr_pretrain.models.residual import columns_of
from dlr_pretrain.util.errors import Stopped
from tests.conftest import saved
from tests.parity.test_dlr import VOCAB, Layer, r_transposed, small


def duplication(grouping: str, name: str, d_out: int, rank: int, seed: int = 0) -> torch.Tensor:
    """R^T [d_out, rank] of each grouping, from its definition."""
    if grouping == "random":
        hashed = int.from_bytes(hashlib.md5(name.encode()).digest()[:8], "little")
        generator = torch.Generator("cpu").manual_seed((seed ^ hashed) % (2**63 - 1))
        latents = torch.randint(0, rank, (d_out,), generator=generator).tolist()
    else:
        latents = [math.floor(i * rank / d_out) for i in range(d_out)]
    return torch.tensor([[1.0 if latents[i] == j else 0.0 for j in range(rank)] for i in range(d_out)])


def test_random_duplication_is_the_papers():
    def seed(name, base):
        return (base ^ int.from_bytes(hashlib.md5(name.encode()).digest()[:8], "little")) % (2**63 - 1)

    q = "model.layers.0.self_attn.q_proj"
    assert (seed(q, 0), seed(q, 42)) == (3723340643983772940, 3723340643983772966)
    assert columns_of("random", "fc1", 12, 4, 42).tolist() == [1, 2, 3, 1, 2, 0, 0, 1, 0, 0, 3, 2]
    model = build(small("cola", "dlr=random"), VOCAB, torch.device("cpu"))
    drawn = {name: linear.residual.columns for name, linear in residuals(model)}
    d_out, rank = model.model.layers[0].self_attn.q_proj.b.weight.shape
    assert torch.equal(drawn[f"{q}.b"], columns_of("random", q, d_out, rank, 0))
    assert not torch.equal(drawn[f"{q}.b"], drawn[f"{q.replace('q_proj', 'k_proj')}.b"])


def test_balanced_groups_leave_no_latent_without_a_copy():
    for d_out, rank in ((2048, 499), (5461, 512), (14, 6)):
        copies = columns_of("balanced", "", d_out, rank, 0).bincount(minlength=rank)
        assert copies.min() == d_out // rank and copies.max() == -(-d_out // rank)
    assert columns_of("contiguous", "", 14, 6, 0) is None


@pytest.mark.parametrize("impl", ["weight", "branch"])
@pytest.mark.parametrize("grouping", ["balanced", "random"])
def test_other_groupings_compute_their_formula(grouping, impl):
    layer = nn.ModuleDict({"p": Layer()}).double()
    plain = copy.deepcopy(layer)
    attach_dlr(layer, impl=impl, grouping=grouping, seed=7)
    x = torch.randn(5, 6, dtype=torch.float64)
    r = duplication(grouping, "p", 10, 4, seed=7).double()
    expected = torch.tanh(plain.p.down(x)) @ (plain.p.up.weight + r / math.sqrt(3)).T + plain.p.up.bias
    with active(layer):
        torch.testing.assert_close(layer.p(x), expected, rtol=1e-13, atol=1e-14)
    fold_(layer)
    torch.testing.assert_close(layer.p(x), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("impl", ["weight", "branch"])
def test_a_learned_alpha_has_the_gradient_of_the_formula(impl):
    layer = Layer().double()
    plain = copy.deepcopy(layer)
    attach_dlr(layer, alpha=0.7, impl=impl, learn_alpha=True)
    x = torch.randn(5, 6, dtype=torch.float64)
    alpha = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    z = torch.tanh(plain.down(x))
    expected = z @ plain.up.weight.T + alpha / math.sqrt(3) * (z @ r_transposed(10, 4).double().T) + plain.up.bias
    expected.square().sum().backward()
    for _ in range(2):  # gradients accumulate over the passes, as those of the weights do
        with active(layer):
            layer(x).square().sum().backward()
    torch.testing.assert_close(layer.up.dlr_alpha.grad, 2 * alpha.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.up.weight.grad, 2 * plain.up.weight.grad, rtol=1e-12, atol=1e-13)
    fold_(layer)
    assert dict(layer.named_parameters()).keys() == dict(plain.named_parameters()).keys()
    torch.testing.assert_close(layer(x), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("impl", ["weight", "branch"])
def test_without_b_the_residual_is_all_there_is(impl):
    layer = Layer().double()
    plain = copy.deepcopy(layer)
    attach_dlr(layer, impl=impl, train_b=False)
    x = torch.randn(5, 6, dtype=torch.float64)
    expected = torch.tanh(plain.down(x)) @ r_transposed(10, 4).double().T / math.sqrt(3) + plain.up.bias
    with active(layer):
        y = layer(x)
        y.sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)
    assert layer.up.weight.grad is None and layer.down.weight.grad is not None
    assert layer.up.weight.count_nonzero() == 0
    fold_(layer)
    torch.testing.assert_close(layer(x), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("scope", "layers"), [("all", 14), ("attention", 8), ("mlp", 6)])
def test_scopes(scope, layers):
    model = build(small("cola", "dlr=on", f"dlr.scope={scope}"), VOCAB, torch.device("cpu"))
    names = [name for name, _ in residuals(model)]
    assert len(names) == layers
    assert scope == "all" or all((".self_attn." in name) == (scope == "attention") for name in names)


@pytest.mark.parametrize("backbone", ["lowrank", "cola"])
def test_a_gain_multiplies_the_initial_b_alone(backbone):
    plain, gained = (
        build(small(backbone, "dlr=off", *more), VOCAB, torch.device("cpu"), torch.float64).state_dict()
        for more in ((), ("backbone.b_gain=1.3",))
    )
    for name, value in plain.items():
        torch.testing.assert_close(gained[name], (1.3 if name.endswith(".b.weight") else 1.0) * value)


@pytest.mark.parametrize(
    ("option", "precision"),
    [
        ("learnable_alpha", "bf16_mixed"),
        *(pytest.param(option, "fp32", marks=pytest.mark.full) for option in ("init_offset_decay", "no_b", "random")),
    ],
)
@pytest.mark.usefixtures("no_export")
def test_ablations_train_resume_and_fold(train, tmp_path, option, precision):
    """Bit for bit, masters and all; the folded tensors are what the last forward multiplied by (checked by the run)."""
    given = ("backbone=cola", f"dlr={option}", f"precision={precision}", "train.steps=8", "train.lr=1e-3")
    whole = load_file(train(tmp_path / "whole", *given) / "folded" / "model.safetensors")
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=5")
    parts = load_file(train(tmp_path / "parts", *given) / "folded" / "model.safetensors")
    assert whole.keys() == parts.keys() and not any("dlr_alpha" in name for name in whole)
    for name in whole:
        assert torch.equal(whole[name], parts[name]), name


@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 1e-5), ("bf16_mixed", 2e-3)])
@pytest.mark.usefixtures("no_export")
def test_in_the_trainer_dlr_is_an_offset_that_decay_pulls_to(train, tmp_path, precision, rounding):
    given = ("backbone=cola", f"precision={precision}", "train.lr=1e-3", "optimizer.weight_decay=10", "train.steps=12")
    folded = {
        option: load_file(train(tmp_path / option, *given, f"dlr={option}") / "folded" / "model.safetensors")
        for option in ("on", "init_offset", "init_offset_decay")
    }

    def distance(option):
        return max((folded["on"][n] - folded[option][n]).abs().max().item() for n in folded["on"])

    assert distance("init_offset_decay") < rounding < 1e-2 < distance("init_offset")


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize("precision", ["fp32", "bf16_mixed", "bf16_sr"])
def test_learned_scalars_are_not_decayed(train, tmp_path, precision):
    """At a decay of a tenth an update, which would leave 0.43 of them. Nor do they wait for a draw: bf16 has 1 and
    neighbours of 0.996 and 1.008.
    """
    given = ("dlr=learnable_alpha", "backbone=cola", f"precision={precision}")
    folder = train(tmp_path / "run", *given, "train.steps=8", "train.lr=1e-3", "optimizer.weight_decay=100")
    state = saved(folder / "checkpoints" / "step_00000008")
    scalars = {name: value.item() for name, value in state.items() if value.dim() == 0 and "/" not in name}
    assert len(scalars) == 14 and all(0 < abs(value - 1) < 0.01 for value in scalars.values())
    assert {state[name].dtype for name in scalars} == {torch.float32}
    folded = load_file(folder / "folded" / "model.safetensors")
    assert len({value.dtype for value in folded.values()}) == 1 and not any("alpha" in name for name in folded)
    assert state["model.norm.weight"].max() < 0.7
