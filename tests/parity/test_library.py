"""DLR in other people's models: factorised, trained in a plain loop, folded, multiplied out; and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlr_pretrain.models import active, attach_dlr, build, factorize_, fold_, multiply_
from tests.parity.reference import CPU, VOCAB, r_transposed, small

RANK = 6


class Net(nn.Module):
    """Layers with a bias, in places of many names."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 5)
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(16, 38), nn.GELU(), nn.Linear(38, 16)) for _ in range(2))
        self.double()

    def forward(self, x):
        x = self.embed(x)
        for mlp in self.mlps:
            x = x + mlp(self.norm(x))
        return self.head(x)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step % 3)
    x, y = torch.randn(8, 12, generator=draw, dtype=torch.float64), torch.randint(0, 5, (8,), generator=draw)
    return F.cross_entropy(model(x), y)


class Literal(nn.Module):
    """y = B A x + beta R^T A x + bias, from matrices: R entry by entry."""

    def __init__(self, layer: nn.Module, alpha: float):
        super().__init__()
        self.a, self.b = layer.a, layer.b
        d_out, rank = layer.b.weight.shape
        self.residual = alpha / math.sqrt(math.ceil(d_out / rank)) * r_transposed(d_out, rank).double()

    def forward(self, x):
        z = x @ self.a.weight.T
        y = z @ self.b.weight.T + z @ self.residual.T
        return y if self.b.bias is None else y + self.b.bias


def literal(model: nn.Module, names: list[str], alpha: float) -> nn.Module:
    model = copy.deepcopy(model)
    for name in names:
        model.set_submodule(name, Literal(model.get_submodule(name), alpha))
    return model


def test_a_plain_loop_trains_the_formula_and_folds_into_what_was_trained():
    model = Net()
    names = factorize_(model, RANK, "mlps.*")
    reference = literal(model, names, alpha=0.8)
    assert attach_dlr(model, alpha=0.8) == [f"{name}.b" for name in names]
    losses = []
    for m in (model, reference):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1)
        for step in range(12):
            with active(m) if m is model else nullcontext():
                loss = loss_of(m, step)
                loss.backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[9] < losses[0] and losses[:12] == pytest.approx(losses[12:], rel=1e-11)
    trained = {name.replace(".residual", ""): p for name, p in reference.state_dict().items()}
    for name, p in model.named_parameters():
        torch.testing.assert_close(p, trained[name], rtol=0, atol=1e-11, msg=name)

    with active(model):
        shown = loss_of(model, 0).item()
    assert fold_(model) == len(names) and loss_of(model, 0).item() == shown
    assert multiply_(model) == len(names)
    assert not [m for m in model.modules() if type(m).__name__ == "FactorizedLinear"]
    assert loss_of(model, 0).item() == pytest.approx(shown, rel=1e-12)


def test_factors_are_the_truncated_svd_and_the_residual_can_start_without_changing_it():
    model = Net()
    weights = {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = factorize_(model, RANK, "mlps.*")
    for name in names:
        u, s, vh = torch.linalg.svd(weights[name])
        b, a = (model.get_submodule(f"{name}.{f}").weight for f in "ba")
        torch.testing.assert_close(b @ a, u[:, :RANK] @ torch.diag(s[:RANK]) @ vh[:RANK], rtol=0, atol=1e-11)
        torch.testing.assert_close(b.T @ b, a @ a.T, rtol=0, atol=1e-11)
    before = loss_of(model, 0).item()
    moved = copy.deepcopy(model)
    attach_dlr(model, keep_output=True)
    attach_dlr(moved)
    with active(model), active(moved):
        assert loss_of(model, 0).item() == pytest.approx(before, rel=1e-12)
        assert abs(loss_of(moved, 0).item() - before) > 1e-3


def test_factors_of_full_rank_keep_the_output_and_the_bias():
    model, x = layer(), torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    expected = model["b"](x)
    factorize_(model, 4, "b")
    torch.testing.assert_close(model["b"](x), expected)


# ----------------------------------------------------------------------------------------------------
# One layer of somebody else's, with a bias


def layer(d_in: int = 8, rank: int = 4, d_out: int = 10) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(d_in, rank), "b": nn.Linear(rank, d_out)})


def run(model: nn.ModuleDict) -> torch.Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    return model["b"](torch.tanh(model["a"](x.to(model["a"].weight))))


@pytest.mark.parametrize("impl", ["weight", "branch"])
def test_copies_are_independent_and_b_comes_back_also_when_the_body_raises(impl):
    model = layer()
    attach_dlr(model, impl=impl, learn_alpha=impl == "branch")
    twin, before = copy.deepcopy(model), model["b"].weight.clone()
    with pytest.raises(ZeroDivisionError), active(model), active(twin):
        assert torch.equal(run(model), run(twin)) and torch.equal(model["b"].weight, before) == (impl == "branch")
        1 / 0  # noqa: B018
    fold_(twin)
    with active(model):
        torch.testing.assert_close(run(twin), run(model))
    assert torch.equal(model["b"].weight, before) and not torch.equal(twin["b"].weight, before)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in layer().named_parameters()]


def test_up_projections_are_found_named_or_chosen():
    model = nn.ModuleDict({"one": layer(), "two": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 10))})
    assert attach_dlr(copy.deepcopy(model)) == ["one.b"]
    assert attach_dlr(copy.deepcopy(model), match="two.1") == ["two.1"]
    assert attach_dlr(copy.deepcopy(model), match=lambda name, m: m.in_features == 4) == ["one.b", "two.1"]
    assert attach_dlr(nn.Linear(4, 10)) == [""]
    model["same"] = model["one"]  # one layer under two names is one layer
    assert attach_dlr(model) == ["one.b"] and fold_(model) == 1


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"one": layer(), "two": layer()})
    model["two"]["b"].weight = model["one"]["b"].weight
    return model


def computed() -> nn.ModuleDict:
    model = layer()
    nn.utils.parametrizations.weight_norm(model["b"])
    return model


@pytest.mark.parametrize(("make", "arguments", "message"), [
    (tied, {}, r"one\.b\.weight and two\.b\.weight are one parameter"),
    (computed, {}, "b: its weight is computed from others"),
    (nn.ReLU, {}, "no up-projection"),
    (layer, {"match": "*.nothing"}, "no up-projection"),
    (layer, {"match": "*"}, "a is no up-projection: it maps 8 to 4 features"),
    (lambda: layer().bfloat16(), {"keep_output": True}, "keep_output=True is for fp32 weights, and this is torch"),
    (layer, {"learn_alpha": True}, "alpha is learned in the branch, and this is impl='weight'"),
    (layer, {"keep_output": True, "train_b": False}, "train_b=False: B stays zero"),
    (layer, {"impl": "fused"}, "impl='fused'"),
    (layer, {"grouping": "even"}, "grouping='even'"),
])  # fmt: skip
def test_what_cannot_carry_a_residual_is_refused_and_nothing_is_attached(make, arguments, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        attach_dlr(model, **arguments)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(hasattr(m, "residual") for m in model.modules())


def test_the_steps_of_the_interface_are_refused_out_of_order():
    model = layer()
    for act in (fold_, lambda m: active(m).__enter__()):
        with pytest.raises(ValueError, match="no residual: attach_dlr was not called"):
            act(model)
    attach_dlr(model)
    with pytest.raises(ValueError, match="has a residual already"):
        attach_dlr(model)
    with active(model):
        for act in (nn.Module.state_dict, fold_, lambda m: active(m).__enter__(), copy.deepcopy, pickle.dumps):
            with pytest.raises(RuntimeError, match="merged"):
                act(model)
    fold_(model)
    with pytest.raises(ValueError, match="fold_ was called already"):
        fold_(model)


# ----------------------------------------------------------------------------------------------------
# Inside and outside of ``active``


def test_a_forward_pass_that_leaves_the_residual_out_is_refused():
    """Eager, compiled, through a part of the model, and through the grouped products that call no layer."""
    model, x = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 10)), torch.randn(2, 6)
    attach_dlr(model, match="1")
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    llama, ids = build(small("cola", "dlr=on"), VOCAB, CPU), torch.zeros(1, 4, dtype=torch.long)
    ours = (lambda: llama(ids, ids), lambda: llama.logits(ids))
    for forward in (lambda: model(x), lambda: model[1](x[:, :4]), lambda: compiled(x), *ours):
        with pytest.raises(RuntimeError, match=r"is that of another model. Run it inside .*active\(model\)"):
            forward()
    with active(model), active(compiled), active(llama):
        assert torch.equal(model(x), compiled(x)) and llama(ids, ids).requires_grad
    for m in (model, compiled, llama):
        fold_(m)
    assert torch.equal(model(x), compiled(x)) and llama.logits(ids).requires_grad


def test_a_backward_pass_after_the_residual_was_taken_out_is_refused():
    """It would multiply by B where the forward pass multiplied by B + beta R^T."""
    model = layer()
    attach_dlr(model)
    with active(model):
        loss = run(model).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda m: m.double(), "b: its weight was changed, cast or moved inside `active`"),
    (lambda m: m["b"].weight.detach().add_(1), "b: its weight was changed, cast or moved inside `active`"),
    (lambda m: torch.optim.AdamW(m.parameters(), fused=True).step(), r"b: .* call optimizer.step\(\) outside `active`"),
])  # fmt: skip
def test_what_spoils_a_weight_inside_active_is_an_error(spoil, message):
    model, other = layer(), layer()
    attach_dlr(model)
    with active(model):  # somebody else's weights may change
        spoil(other)
    with pytest.raises(RuntimeError, match=message), active(model):
        run(model).sum().backward()
        spoil(model)


# ----------------------------------------------------------------------------------------------------
# States


def test_a_state_is_loaded_by_the_model_that_it_is_of():
    plain, before = layer(), copy.deepcopy(layer().state_dict())
    model, other, drawn, learned, divided = (layer() for _ in range(5))
    attach_dlr(model, alpha=0.5)
    attach_dlr(other, alpha=1.0)
    attach_dlr(drawn, alpha=0.5, grouping="random")
    attach_dlr(learned, alpha=0.7, impl="branch", learn_alpha=True)
    attach_dlr(divided, impl="branch", learn_alpha=True, variance_correction=False)
    state = model.state_dict()
    assert state["b.dlr_mark"][0].item() == 0.5 / math.sqrt(3)
    for into, given, message in (
        (plain, state, r"Unexpected key.*b\.dlr_mark"),
        (other, state, r"another residual: .* beta=0\.288675, and here 0\.57735"),
        (drawn, state, r"another residual: .* same alpha, grouping, seed"),
        (divided, learned.state_dict(), r"another residual: .* beta=0\.57735, and here 1\."),
        (model, before, r"b\.weight was .* by b\.dlr_mark, beta=0, and here .*without, load before"),
    ):
        with pytest.raises(RuntimeError, match=message):
            into.load_state_dict(given)
    model.load_state_dict(state)
    with active(model), pytest.raises(RuntimeError, match="load outside `active`"):
        model["b"].load_state_dict({"weight": torch.zeros(10, 4), "bias": torch.zeros(10)})
    assert torch.equal(model["b"].weight, before["b.weight"])
    fold_(model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain["b"].weight, model["b"].weight)


# ----------------------------------------------------------------------------------------------------
# What cannot be factorised or multiplied out


@pytest.mark.parametrize(("make", "given", "message"), [
    (layer, {"rank": 9, "match": "b"}, r"rank=9: b has a weight of shape \[10, 4\]"),
    (layer, {"rank": 0, "match": "b"}, "rank=0"),
    (layer, {"rank": 2, "match": "*.nothing"}, "no linear layer"),
    (tied, {"rank": 2, "match": "*.b"}, "its weight is used under two names"),
])  # fmt: skip
def test_what_cannot_be_factorised_is_refused(make, given, message):
    with pytest.raises(ValueError, match=message):
        factorize_(make(), **given)


def test_what_is_not_folded_is_not_multiplied_out():
    model = layer()
    with pytest.raises(ValueError, match="no layers of factorize_"):
        multiply_(model)
    model["b"].weight.requires_grad_(False)
    factorize_(model, 3, "b")
    assert not model["b"].a.weight.requires_grad and not model["b"].b.weight.requires_grad  # frozen ones stay frozen
    attach_dlr(model, match="b.b")
    with pytest.raises(ValueError, match=r"b: call fold_ first"):
        multiply_(model)
