"""DLR in foreign models: factorise, train in a plain loop, fold, multiply out; and what is refused."""

import copy
import math
import re
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from dlr_pretrain.models import attach_dlr, factorize_, fold_, multiply_
from tests.conftest import ROOT, on_ranks
from tests.parity.reference import r_transposed

RANK = 6


class Net(nn.Module):
    """Linear layers with a bias, at several levels of nesting."""

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


def attached(**arguments) -> Net:
    model = Net()
    factorize_(model, RANK, "mlps.*")
    attach_dlr(model, **arguments)
    return model


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step % 3)
    x, y = torch.randn(8, 12, generator=draw, dtype=torch.float64), torch.randint(0, 5, (8,), generator=draw)
    return F.cross_entropy(model(x), y)


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, steps: int = 12) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def factors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by their names before ``attach_dlr``."""
    named = model.named_parameters()
    names = {"parametrizations.weight.original": "weight", "parametrizations.weight.0.": ""}
    return {re.sub("|".join(names), lambda found: names[found[0]], name): p.detach() for name, p in named}


def require_equal(one: nn.Module, other: nn.Module, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(factors(one), factors(other), rtol=0, atol=tolerance)


class Literal(nn.Module):
    """y = B A x + alpha / sqrt(K) R^T A x + bias, from matrices: R entry by entry."""

    def __init__(self, layer: nn.Module, learn_alpha: bool = False, train_b: bool = True):
        super().__init__()
        self.a, self.b = layer.a, layer.b
        self.b.alpha = nn.Parameter(torch.tensor([0.8], dtype=torch.float64)) if learn_alpha else 0.8
        d_out, rank = layer.b.weight.shape
        self.corrected = r_transposed(d_out, rank).double() / math.sqrt(math.ceil(d_out / rank))
        if not train_b:
            self.b.weight.requires_grad_(False).zero_()

    def forward(self, x):
        z = x @ self.a.weight.T
        return z @ self.b.weight.T + self.b.alpha * (z @ self.corrected.T) + self.b.bias


@pytest.mark.parametrize("arguments", [{}, {"learn_alpha": True}, {"learn_alpha": True, "train_b": False}], ids=str)
def test_a_plain_loop_trains_like_the_literal_formula(arguments):
    model = Net()
    names = factorize_(model, RANK, "mlps.*")
    reference = copy.deepcopy(model)
    for name in names:
        reference.set_submodule(name, Literal(reference.get_submodule(name), **arguments))
    assert attach_dlr(model, alpha=0.8, **arguments) == [f"{name}.b" for name in names]
    losses = train(model)
    assert losses[9] < losses[0] and losses == pytest.approx(train(reference), rel=1e-11)
    require_equal(model, reference, 1e-11)

    shown = loss_of(model, 0).item()
    assert fold_(model) == len(names) and loss_of(model, 0).item() == shown
    assert multiply_(model) == len(names)
    assert not [m for m in model.modules() if type(m).__name__ == "FactorizedLinear"]
    assert loss_of(model, 0).item() == pytest.approx(shown, rel=1e-12)


class Theirs(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 10)

    def forward(self, x):
        return SimpleNamespace(loss=self.up(self.down(x)).square().sum())


def test_the_documented_loop_runs():
    loop, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), flags=re.DOTALL)
    model, data = Theirs(), torch.randn(3, 5, 8)
    before, optimizer = model.up.weight.detach().clone(), torch.optim.AdamW(model.parameters())
    exec(loop, {"model": model, "data": data, "optimizer": optimizer})
    difference = (model.up.weight.detach() - before).amax(1)
    torch.testing.assert_close(difference, torch.full((10,), 3**-0.5), rtol=0, atol=0.01)  # beta and three steps


def test_factors_are_the_balanced_truncated_svd():
    whole, before = Net(), loss_of(Net(), 0).item()
    factorize_(whole, 16, "mlps.*")
    assert loss_of(whole, 0).item() == pytest.approx(before, rel=1e-12)
    model = Net()
    weights = {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = factorize_(model, RANK, "mlps.*")
    for name in names:
        u, s, vh = torch.linalg.svd(weights[name])
        b, a = (model.get_submodule(f"{name}.{f}").weight for f in "ba")
        torch.testing.assert_close(b @ a, u[:, :RANK] @ torch.diag(s[:RANK]) @ vh[:RANK], rtol=0, atol=1e-11)
        torch.testing.assert_close(b.T @ b, a @ a.T, rtol=0, atol=1e-11)


def test_keep_output_preserves_the_output():
    model = Net()
    factorize_(model, RANK, "mlps.*")
    before = loss_of(model, 0).item()
    assert loss_of(attached(keep_output=True), 0).item() == pytest.approx(before, rel=1e-12)
    assert abs(loss_of(attached(), 0).item() - before) > 1e-3


# ----------------------------------------------------------------------------------------------------
# One foreign layer, with a bias


def layer(d_in: int = 8, rank: int = 4, d_out: int = 10) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(d_in, rank), "b": nn.Linear(rank, d_out)})


def run(model: nn.ModuleDict) -> torch.Tensor:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    return model["b"](torch.tanh(model["a"](x.to(model["a"].weight))))


@pytest.mark.parametrize("arguments", [
    {}, {"grouping": "random", "seed": 3}, {"learn_alpha": True}, {"train_b": False}, {"keep_output": True},
    {"train_b": False, "learn_alpha": True}, {"variance_correction": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_forward_pass_and_fold_round_once(dtype, arguments):
    if dtype == torch.bfloat16 and "keep_output" in arguments:
        return  # refused
    model = layer().to(dtype)
    attach_dlr(model, alpha=0.7, **arguments)
    b = model["b"].parametrizations.weight.original
    with torch.no_grad():
        b.add_(0.01)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    r_t = r_transposed(10, 4, arguments.get("grouping", "contiguous"), "b", arguments.get("seed", 0)).to(wide)
    beta = torch.tensor(0.7, dtype=wide) / (1 if "variance_correction" in arguments else math.sqrt(3))
    expected = (b.to(wide) + beta * r_t).to(dtype)
    assert torch.equal(model["b"].weight, expected)
    shown = run(model)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(model)
    before = b.data_ptr()
    fold_(model)
    assert model["b"].weight is b and b.data_ptr() != before and torch.equal(b, expected)
    assert torch.equal(run(model), shown) and list(model.state_dict()) == ["a.weight", "a.bias", "b.bias", "b.weight"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(model), cast)


def test_frozen_factors_stay_frozen():
    model = layer()
    model["b"].weight.requires_grad_(False)
    factorize_(model, 3, "b")
    attach_dlr(model, match="b.b")
    run(model).sum().backward()
    assert model["b"].b.parametrizations.weight.original.grad is None and model["a"].weight.grad.any()
    fold_(model)
    assert not model["b"].a.weight.requires_grad and not model["b"].b.weight.requires_grad


def test_an_optimizer_made_before_attach_dlr_trains_b():
    model, other = Net(), attached()
    factorize_(model, RANK, "mlps.*")
    parameters = set(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    attach_dlr(model)
    assert set(model.parameters()) == parameters
    train(model, optimizer)
    train(other)
    require_equal(model, other, 1e-14)  # clipping adds up the gradients in another order
    fold_(model)
    assert set(model.parameters()) == parameters


def test_an_averaged_copy_folds_independently():
    model = attached()
    averaged, expected = AveragedModel(model), 0
    for step in range(3):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=step + 1)
        averaged.update_parameters(model)
        expected = expected + model.mlps[0][0].b.weight.detach() / 3
    before, shown = copy.deepcopy(model.state_dict()), loss_of(model, 0).item()
    fold_(averaged.module)
    torch.testing.assert_close(averaged.module.mlps[0][0].b.weight.detach(), expected)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert loss_of(model, 0).item() == shown and fold_(model) == 4 and loss_of(model, 0).item() == shown


def test_a_compiled_model_trains_like_eager():
    model, eager = attached(learn_alpha=True), attached(learn_alpha=True)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(compiled)
    train(eager)
    require_equal(model, eager, 1e-14)
    shown = loss_of(compiled, 0).item()
    assert fold_(compiled) == 4 and loss_of(compiled, 0).item() == shown


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    model, plain = attached(), attached()
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x.requires_grad_(), use_reentrant=reentrant)
    assert train(model) == train(plain)
    require_equal(model, plain)


def test_up_projections_are_found_or_matched():
    model = nn.ModuleDict({"one": layer(), "two": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 10))})
    assert attach_dlr(copy.deepcopy(model)) == ["one.b"]
    assert attach_dlr(copy.deepcopy(model), match="two.1") == ["two.1"]
    assert attach_dlr(copy.deepcopy(model), match=lambda name, m: m.in_features == 4) == ["one.b", "two.1"]
    assert attach_dlr(nn.Linear(4, 10)) == [""]
    model["same"] = model["one"]  # one layer under two names is one layer
    assert attach_dlr(model) == ["one.b"] and fold_(model) == 1
    adapters = [nn.ModuleDict({"default": nn.Linear(*shape), "two": nn.Linear(*shape)}) for shape in ((8, 4), (4, 10))]
    peft = nn.ModuleDict(zip(("lora_A", "lora_B"), adapters, strict=True))
    assert attach_dlr(peft) == ["lora_B.default", "lora_B.two"]


# ----------------------------------------------------------------------------------------------------
# Sharded weights


@pytest.mark.parametrize("learn_alpha", [False, True])
def test_fsdp2_trains_like_one_process(learn_alpha):
    """38 and 16 outputs are sharded unevenly, and an alpha is on one of three ranks only. The gathered model folds."""

    def act():
        dist.init_process_group("gloo")
        model, alone = attached(learn_alpha=learn_alpha), attached(learn_alpha=learn_alpha)
        for mlp in () if learn_alpha else model.mlps:
            fully_shard(mlp)
        fully_shard(model)
        assert train(model, steps=4) == pytest.approx(train(alone, steps=4), rel=1e-12)
        loss_of(model, 0)  # leaves the weights of the root whole
        with pytest.raises(ValueError, match="Gather a full state dict, load it into a model that attach_dlr"):
            fold_(model)
        whole = attached(learn_alpha=learn_alpha)
        whole.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
        require_equal(whole, alone, 1e-12)
        assert fold_(whole) == 4 and loss_of(whole, 0).item() == pytest.approx(loss_of(alone, 0).item(), rel=1e-12)
        with pytest.raises(ValueError, match="fully_shard holds the weights of this module: call attach_dlr before"):
            attach_dlr(fully_shard(Net()), match="mlps.*.0")

    on_ranks(act, 3)


# ----------------------------------------------------------------------------------------------------
# What is refused


def tied() -> nn.ModuleDict:
    model = nn.ModuleDict({"one": layer(), "two": layer()})
    model["two"]["b"].weight = model["one"]["b"].weight
    return model


class Packed(nn.Parameter):
    pass


def weighing(weight: nn.Parameter) -> nn.ModuleDict:
    model = layer()
    model["b"].weight = weight
    return model


def computed() -> nn.ModuleDict:
    return nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.utils.parametrizations.weight_norm(nn.Linear(4, 10))})


@pytest.mark.parametrize(("make", "arguments", "message"), [
    (tied, {}, r"one\.b\.weight and two\.b\.weight are one parameter"),
    (computed, {}, "b: its weight is computed from others"),
    (lambda: weighing(nn.Parameter(torch.zeros(10, 4, dtype=torch.int8), False)), {}, "b: its weight .* or quantised"),
    (lambda: weighing(Packed(torch.zeros(10, 4))), {}, "b: its weight is computed from others, or quantised"),
    (lambda: layer().to("meta"), {}, "b is on the meta device: call attach_dlr once"),
    (attached, {}, "b has a residual already"),
    (nn.ReLU, {}, "no up-projection"),
    (layer, {"match": "*.nothing"}, "no up-projection"),
    (layer, {"match": "*"}, "a is not an up-projection: it maps 8 to 4 features"),
    (lambda: layer().bfloat16(), {"keep_output": True}, "keep_output=True is for fp32 weights, but this one is torch"),
    (layer, {"keep_output": True, "train_b": False}, "train_b=False: B stays zero"),
    (layer, {"grouping": "even"}, "grouping='even'"),
])  # fmt: skip
def test_attach_dlr_refuses_unfit_modules(make, arguments, message):
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        attach_dlr(model, **arguments)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize(("given", "into", "message"), [
    ({}, None, r"Missing key.*b\.weight.*Unexpected key.*b\.parametrizations\.weight"),
    (None, {}, r"Missing key.*b\.parametrizations\.weight.*Unexpected key.*b\.weight"),
    ({"alpha": 0.5}, {}, r"^b was trained with another residual: beta=0\.288675, but here 0\.57735. .*same alpha"),
    ({"variance_correction": False}, {}, r"^b .* beta=1, but here 0\.57735.*and variance_correction$"),
    ({"learn_alpha": True}, {"alpha": 0.5}, r"^b .* beta=0\.57735, but here 0\.288675"),
    ({"learn_alpha": True}, {}, r"Unexpected key.*b\.parametrizations\.weight\.0\.alpha"),
    ({"grouping": "random"}, {}, "^b .* that takes other latents. Attach with the same grouping, seed and module"),
    ({"grouping": "random", "seed": 1}, {"grouping": "random"}, "^b was .* takes other latents"),
])  # fmt: skip
def test_a_state_dict_of_another_residual_is_refused(given, into, message):
    models = []
    for arguments in (given, into):
        models.append(layer())
        if arguments is not None:
            attach_dlr(models[-1], **arguments)
    with pytest.raises(RuntimeError, match=f"(?s){message}"):
        models[1].load_state_dict(models[0].state_dict())


@pytest.mark.parametrize("arguments", [{}, {"alpha": 0.3, "learn_alpha": True, "grouping": "random"}], ids=str)
def test_a_state_dict_survives_safetensors(arguments):
    model, other = attached(**arguments), attached(**arguments)
    train(model)
    state = safetensors.torch.load(safetensors.torch.save(model.state_dict()))
    other.load_state_dict(state)
    require_equal(other, model)
    assert loss_of(other, 0).item() == loss_of(model, 0).item()
    folded = Net()
    factorize_(folded, RANK, "mlps.*")
    fold_(model)
    folded.load_state_dict(model.state_dict())
    assert loss_of(folded, 0).item() == loss_of(other, 0).item()


@pytest.mark.parametrize(("make", "given", "message"), [
    (layer, {"rank": 9, "match": "b"}, r"rank=9: b has a weight of shape \[10, 4\]"),
    (layer, {"rank": 0, "match": "b"}, "rank=0"),
    (layer, {"rank": 2, "match": "*.nothing"}, "no linear layer"),
    (tied, {"rank": 2, "match": "*.b"}, "its weight is used under two names"),
])  # fmt: skip
def test_factorize_refuses_unfit_layers(make, given, message):
    with pytest.raises(ValueError, match=message):
        factorize_(make(), **given)


def test_fold_and_multiply_refuse_the_wrong_order():
    model = layer()
    with pytest.raises(ValueError, match="no residual: attach_dlr was not called"):
        fold_(model)
    with pytest.raises(ValueError, match="no layer of this module was made by factorize_"):
        multiply_(model)
    factorize_(model, 3, "b")
    attach_dlr(model, match="b.b")
    with pytest.raises(ValueError, match=r"b: its residual is not in the weight yet. Call fold_"):
        multiply_(model)
    fold_(model)
    with pytest.raises(ValueError, match="fold_ was called already"):
        fold_(model)
