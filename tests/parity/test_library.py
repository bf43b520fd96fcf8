"""DLR in other people's models: factorised, trained in a plain loop, folded, multiplied out; and what it refuses."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dlr_pretrain.models import active, attach_dlr, factorize_, fold_, multiply_
from tests.parity.reference import r_transposed

RANK = 6


class Attention(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """A vision transformer whose patches are embedded by a linear layer; every layer has a bias."""

    def __init__(self, d: int = 16, wide: int = 38, patch: int = 12, patches: int = 4, classes: int = 5):
        super().__init__()
        self.embed = nn.Linear(patch, d)
        self.position = nn.Parameter(0.1 * torch.randn(patches, d))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(4))
        self.attentions = nn.ModuleList(Attention(d) for _ in range(2))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(d, wide), nn.GELU(), nn.Linear(wide, d)) for _ in range(2))
        self.head = nn.Linear(d, classes)

    def forward(self, x):
        x = self.embed(x) + self.position
        for i in range(2):
            x = x + self.attentions[i](self.norms[2 * i](x))
            x = x + self.mlps[i](self.norms[2 * i + 1](x))
        return self.head(x.mean(1))


def vit() -> tuple[nn.Module, str]:
    return ViT().double(), "[am]*s.*"  # attentions and mlps


def llama() -> tuple[nn.Module, str]:
    """The LLaMA of transformers, embedding and head at unit scale: at 0.02 a norm multiplies rounding errors by 50."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=38, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).double()
    model.model.embed_tokens.weight.data.mul_(50)
    model.lm_head.weight.data.mul_(50)
    return model, "*_proj"


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step % 3)
    if isinstance(model, ViT):
        x, y = torch.randn(8, 4, 12, generator=draw, dtype=torch.float64), torch.randint(0, 5, (8,), generator=draw)
        return F.cross_entropy(model(x), y)
    ids = torch.randint(0, 40, (3, 10), generator=draw)
    return F.cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())  # theirs is fp32


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
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Literal(model.get_submodule(name), alpha))
    return model


@pytest.fixture(params=[vit, llama], ids=["vit", "llama"])
def made(request):
    torch.manual_seed(0)
    return request.param()


@pytest.mark.parametrize("from_weights", [False, True])
def test_a_plain_loop_trains_the_formula_and_folds_into_what_was_trained(made, from_weights):
    model, match = made
    names = factorize_(model, RANK, match, from_weights=from_weights)
    reference = literal(model, names, alpha=0.8)
    assert attach_dlr(model, alpha=0.8) == [f"{name}.b" for name in names]
    losses = []
    for m in (model, reference):
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3, weight_decay=0.1)
        for step in range(12):
            if m is model:
                with active(m):
                    loss = loss_of(m, step)
                    loss.backward()
            else:
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
    assert not [m for m in model.modules() if type(m).__name__ == "Factors"]
    assert loss_of(model, 0).item() == pytest.approx(shown, rel=1e-12)


def test_factors_are_the_truncated_svd_and_the_residual_can_start_without_changing_it(made):
    model, match = made
    weights = {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    names = factorize_(model, RANK, match)
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


def test_drawn_factors_have_colas_variance_and_keep_biases():
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(256, 512)})
    bias = model["up"].bias.detach().clone()
    factorize_(model, 64, "up", from_weights=False, activation=F.silu)
    layer, x = model["up"], torch.randn(3, 256)
    for factor in (layer.a, layer.b):
        assert factor.weight.std().item() == pytest.approx((64 * (256 + 512)) ** -0.25, rel=0.05)
    torch.testing.assert_close(layer(x), F.silu(x @ layer.a.weight.T) @ layer.b.weight.T + bias)


def test_a_llama_that_was_factorised_and_folded_is_a_lowrank_llama_of_this_package(tmp_path):
    model, match = llama()
    from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM

    factorize_(model, RANK, match)
    attach_dlr(model)
    fold_(model)
    settings = {k: v for k, v in model.config.to_dict().items() if k not in ("model_type", "architectures")}
    same = LowRankLlamaForCausalLM(LowRankLlamaConfig(backbone="lowrank", rank=RANK, **settings)).double()
    same.load_state_dict(model.state_dict())
    assert loss_of(same, 0).item() == pytest.approx(loss_of(model, 0).item(), rel=1e-12)
    same.save_pretrained(tmp_path)
    again = LowRankLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loss_of(again, 0).item() == loss_of(same, 0).item()


# ----------------------------------------------------------------------------------------------------
# Refused


def pair(**names: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict(names)


def layer(d_in: int = 8, rank: int = 4, d_out: int = 10) -> nn.ModuleDict:
    torch.manual_seed(0)
    return pair(a=nn.Linear(d_in, rank), b=nn.Linear(rank, d_out))


def test_a_weight_with_another_user_is_refused_by_both_names():
    model = pair(one=layer(), two=layer())
    model["two"]["b"].weight = model["one"]["b"].weight
    with pytest.raises(ValueError, match=r"one\.b\.weight and two\.b\.weight are one parameter"):
        attach_dlr(model)
    assert not hasattr(model["one"]["b"], "residual")
    with pytest.raises(ValueError, match="its weight is used under two names"):
        factorize_(model, 2, "*.b")


def test_one_layer_under_two_names_is_one_layer():
    shared = layer()
    model = pair(one=shared, two=shared)
    assert attach_dlr(model) == ["one.b"]
    assert fold_(model) == 1


def test_weights_that_cannot_carry_a_residual_are_refused():
    """Beside -beta, bf16 would round the entries' own values away, and most of their updates."""
    computed = layer()
    nn.utils.parametrizations.weight_norm(computed["b"])
    for model, arguments, message in (
        (computed, {}, "b: its weight is computed from others"),
        (layer().to(torch.bfloat16), {"keep_output": True}, "keep_output=True is for fp32 weights, and this is torch"),
        (layer().requires_grad_(False), {"learn_alpha": True}, "which is frozen"),
    ):
        with pytest.raises(ValueError, match=message):
            attach_dlr(model, **arguments)


@pytest.mark.parametrize(("arguments", "message"), [
    ({"alpha": math.nan}, "alpha=nan: must be a finite number"),
    ({"alpha": math.inf}, "alpha=inf"),
    ({"learn_alpha": True, "train_b": False}, "train_b=False: B stays zero"),
    ({"keep_output": True, "train_b": False}, "train_b=False: B stays zero"),
    ({"impl": "fused"}, "impl='fused'"),
    ({"grouping": "even"}, "grouping='even'"),
])  # fmt: skip
def test_contradictory_arguments_are_refused_and_nothing_is_attached(arguments, message):
    model = layer()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        attach_dlr(model, **arguments)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("optimizer", [
    lambda p: torch.optim.SGD(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
])  # fmt: skip
def test_an_update_inside_active_is_an_error(optimizer):
    model = layer()
    attach_dlr(model)
    updates = optimizer(model.parameters())

    def step():
        model["b"](model["a"](torch.ones(2, 8))).sum().backward()
        updates.step()

    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"b: .* call optimizer.step\(\) outside `active`"), active(model):
        step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    other = layer()
    with active(model):  # somebody else's weights may be updated
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    updates.step()
    assert not torch.equal(before["b.weight"], model["b"].weight)


def test_other_changes_inside_active_are_found_at_its_end():
    model = layer()
    attach_dlr(model)
    with pytest.raises(RuntimeError, match=r"b: the weight was changed inside"), active(model), torch.no_grad():
        model["b"].weight *= 0.9
    with active(model):  # the next one is judged by itself
        model["b"](model["a"](torch.ones(2, 8)))
    with pytest.raises(ZeroDivisionError), active(model):  # what the body says comes first
        model["b"].weight.requires_grad_(False).mul_(0.9)
        1 / 0  # noqa: B018


def test_loading_inside_active_is_an_error_and_changes_nothing():
    model = layer()
    state = copy.deepcopy(model.state_dict())
    attach_dlr(model)
    before = model["b"].weight.clone()
    with active(model), pytest.raises(RuntimeError, match="load outside `active`"):
        model["b"].load_state_dict({"weight": torch.zeros(10, 4), "bias": torch.zeros(10)})
    assert torch.equal(model["b"].weight, before)
    with pytest.raises(RuntimeError, match=r"b\.weight: the state has no b\.dlr_mark.*before attach_dlr"):
        model.load_state_dict(state)  # of before the residual
    assert torch.equal(model["b"].weight, before)


def test_a_state_without_its_residual_is_known_as_such():
    model, plain = layer(), layer()
    attach_dlr(model, alpha=0.5)
    state = model.state_dict()
    assert state["b.dlr_mark"][0].item() == 0.5 / math.sqrt(3)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*b\.dlr_mark"):
        plain.load_state_dict(state)
    model.load_state_dict(state)
    other = layer()
    attach_dlr(other, alpha=1.0)
    with pytest.raises(RuntimeError, match=r"trained with beta=0\.288675, here it is 0\.57735"):
        other.load_state_dict(state)
    fold_(model)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain["b"].weight, model["b"].weight)


@pytest.mark.parametrize("choice", [{}, {"learn_alpha": True}])
def test_a_state_of_other_columns_is_refused_by_name(choice):
    one, same, other, wrapped = layer(), layer(), layer(), nn.Sequential(layer())
    for model, seed in ((one, 1), (same, 1), (other, 2), (wrapped, 1)):
        attach_dlr(model, grouping="random", seed=seed, **choice)
    same.load_state_dict(one.state_dict())
    for model in (other, wrapped[0]):  # the columns are drawn by the seed and the module's name
        with pytest.raises(RuntimeError, match=r"b\.weight was trained with other columns .* same grouping, seed"):
            model.load_state_dict(one.state_dict())


def test_a_learned_alpha_is_not_part_of_the_mark_and_its_divisor_is():
    one, same, other = layer(), layer(), layer()
    attach_dlr(one, alpha=0.5, learn_alpha=True)
    attach_dlr(same, alpha=0.7, learn_alpha=True)
    attach_dlr(other, alpha=0.5, learn_alpha=True, variance_correction=False)
    same.load_state_dict(one.state_dict())
    assert same["b"].dlr_alpha.item() == 0.5
    with pytest.raises(RuntimeError, match=r"trained with beta=0\.57735, here it is 1"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize(("given", "message"), [
    ({"rank": 9, "match": "*.b"}, r"rank=9: one\.b has a weight of shape \[10, 4\]"),
    ({"rank": 0, "match": "*.b"}, "rank=0"),
    ({"rank": 2, "match": "*.nothing"}, "no linear layer"),
    ({"rank": 2, "match": "*.b", "activation": F.silu}, "set from_weights=False"),
])  # fmt: skip
def test_what_cannot_be_factorised_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        factorize_(pair(one=layer()), given.pop("rank"), given.pop("match"), **given)


def test_what_is_no_matrix_or_not_folded_is_not_multiplied_out():
    model = pair(one=layer())
    with pytest.raises(ValueError, match="no layers of factorize_"):
        multiply_(model)
    factorize_(model, 3, "one.b")
    attach_dlr(model)
    with pytest.raises(ValueError, match=r"one\.b: call fold_ first"):
        multiply_(model)
    model = pair(one=layer())
    factorize_(model, 3, "one.b", from_weights=False, activation=F.silu)
    with pytest.raises(ValueError, match="is no matrix"):
        multiply_(model)


def test_a_weight_with_another_user_is_not_factorized_and_frozen_ones_stay_frozen():
    model = nn.ModuleDict({"embedding": nn.Embedding(12, 8), "head": nn.Linear(8, 12), "up": nn.Linear(8, 12)})
    model["head"].weight = model["embedding"].weight
    model["up"].weight.requires_grad_(False)
    with pytest.raises(ValueError, match="head: its weight is used under two names"):
        factorize_(model, 2, "*")
    factorize_(model, 2, "up")
    assert not model["up"].a.weight.requires_grad and not model["up"].b.weight.requires_grad
