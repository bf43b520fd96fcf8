"""What all optimizers share, and AdamW: formula, masked updates, state as tensors, its size, and ReLoRA's pruning."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dlr_pretrain.config import Choice
from dlr_pretrain.optim import build as optim
from dlr_pretrain.util.errors import UserError

ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
GALORE = ADAM | {"rank": 4, "update_scale": 0.25, "refresh_every": 3}
CHOICES = {
    "adamw": ADAM,
    "adamw_foreach": ADAM,
    "adamw_8bit": ADAM | {"block_size": 256},
    "galore": GALORE,
    "fira": GALORE | {"limiter": 1.01},
    "loro": ADAM | {"schedule": "loro", "exact_every": 4, "restart_warmup": 2, "shift": None},
    "muon": ADAM | {"momentum": 0.95, "nesterov": True, "ns_steps": 5},
}
GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)
LAYER = "model.layers.0."


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step: the formula is the same without, and tests take seconds less."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(params=CHOICES)
def choice(request) -> Choice:
    if request.param == "adamw_8bit":
        pytest.importorskip("torchao")
    return Choice(request.param, CHOICES[request.param])


def draw(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Parameters as models have them: views of one storage, column-major ones, pairs of factors, vectors."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    qk = normal(2, 64, 64)
    drawn = {
        "model.embed_tokens.weight": normal(40, 64),
        f"{LAYER}self_attn.q_proj.weight": qk[0],
        f"{LAYER}self_attn.k_proj.weight": qk[1],
        f"{LAYER}self_attn.o_proj.a.weight": normal(8, 64),
        f"{LAYER}self_attn.o_proj.b.weight": normal(64, 8),
        f"{LAYER}mlp.down_proj.weight": normal(96, 64).T,
        f"{LAYER}mlp.up_proj.a.weight": normal(64, 8).T,
        f"{LAYER}mlp.up_proj.b.weight": normal(96, 8),
        f"{LAYER}input_layernorm.weight": normal(64),
        "lm_head.weight": normal(64, 40).T,
    }
    return {name: p.detach().requires_grad_() for name, p in drawn.items()}


def give_gradients(parameters: dict[str, Tensor], seed: int) -> None:
    """In each parameter's own memory layout, as autograd makes them."""
    for p, g in zip(parameters.values(), draw(seed=1000 + seed).values(), strict=True):
        p.grad = torch.empty_like(p, requires_grad=False).copy_(g.detach())


def updated(optimizer: optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        give_gradients(optimizer.parameters, seed)
        optimizer.update(0.01, skip=GO, index=seed)


def everything(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in optimizer.parameters.items()} | optimizer.state_tensors()


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].stride()) == (b[name].dtype, b[name].stride()), name
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("name", ["adamw", "adamw_foreach"])
def test_adamw_follows_its_formula(name):
    generator = torch.Generator().manual_seed(0)
    names = ("decayed", "undecayed")
    start = {name: torch.randn(4, 3, dtype=torch.float64, generator=generator) for name in names}
    parameters = {name: w.clone().requires_grad_() for name, w in start.items()}
    optimizer = optim.build(Choice(name, ADAM), parameters, undecayed={"undecayed"})
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in start.items()}
    for t in range(1, 51):
        lr = 0.01 / t
        for name, p in parameters.items():
            g = torch.randn(4, 3, dtype=torch.float64, generator=generator)
            m, v = moments[name]
            moments[name] = m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            change = lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
            start[name] = (1 - lr * (0.0 if name == "undecayed" else 0.1)) * start[name] - change
            p.grad = g
        optimizer.update(lr, skip=GO)
    for name, p in parameters.items():
        torch.testing.assert_close(p.detach(), start[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parameters_stay_where_they_are_and_all_of_them_move(choice, dtype):
    parameters = draw(dtype)
    before = {name: (p.detach().clone(), p.data_ptr(), p.stride(), p.dtype) for name, p in parameters.items()}
    updated(optim.build(choice, parameters), range(3))
    for name, p in parameters.items():
        value, *place = before[name]
        assert [p.data_ptr(), p.stride(), p.dtype] == place, name
        assert p.isfinite().all() and 1e-4 < (p.detach() - value).double().square().mean().sqrt() < 0.2, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_masked_update_changes_nothing(choice, dtype):
    optimizer = optim.build(choice, draw(dtype))
    updated(optimizer, range(3))
    before = copied(everything(optimizer))
    for p in optimizer.parameters.values():
        p.grad = torch.full_like(p, math.nan)
    optimizer.update(0.1, skip=SKIP, index=3)
    assert_same_bits(everything(optimizer), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_update_by_a_factor_is_that_of_gradients_times_it(choice, dtype):
    """A power of two, by which no value is rounded."""
    ways = []
    for factor in (torch.tensor(0.125), None):
        optimizer = optim.build(choice, draw(dtype))
        for seed in range(2):
            give_gradients(optimizer.parameters, seed)
            if factor is None:
                torch._foreach_mul_([p.grad for p in optimizer.parameters.values()], 0.125)
            optimizer.update(0.01, GO, factor, index=seed)
        ways.append(copied(everything(optimizer)))
    assert_same_bits(*ways)


@pytest.mark.parametrize("rounding_seed", [None, 0])
def test_a_factor_is_not_rounded_to_the_gradients_dtype(rounding_seed):
    """Moments are a tenth of the gradient times the factor; 1.0039 is 1 in bf16."""
    p = torch.zeros(4096, dtype=torch.bfloat16, requires_grad=True)
    optimizer = optim.build(Choice("adamw", ADAM), {"w": p}, rounding_seed=rounding_seed)
    p.grad = torch.linspace(0.5, 1, 4096).to(p.dtype)
    expected = (p.grad.float() * 1.0039 * 0.1).to(p.dtype)
    optimizer.update(0.01, GO, torch.tensor(1.0039))
    assert (optimizer.state_tensors()["w/exp_avg"] != expected).float().mean() < 0.01


def test_after_a_masked_first_update_the_run_is_as_if_it_had_not_been(choice):
    masked, other = optim.build(choice, draw()), optim.build(choice, draw())
    give_gradients(masked.parameters, seed=99)
    masked.update(0.1, skip=SKIP, index=0)
    fresh = optim.build(choice, masked.parameters)
    fresh.load_state_tensors(copied(masked.state_tensors()))
    for optimizer in (fresh, other):
        updated(optimizer, range(2))
    assert_same_bits(everything(fresh), everything(other))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_goes_through_tensors_bit_for_bit(choice, dtype):
    """Saved and loaded between any two updates, into a new optimizer, without a trace in what follows."""
    one, two = optim.build(choice, draw(dtype)), optim.build(choice, draw(dtype))
    for seed in range(6):
        updated(one, range(seed, seed + 1))
        updated(two, range(seed, seed + 1))
        tensors = {name: value.clone().contiguous() for name, value in two.state_tensors().items()}
        two = optim.build(choice, two.parameters)
        two.load_state_tensors(tensors)
        for value in tensors.values():  # nothing is shared with what was loaded
            value.zero_()
        assert_same_bits(everything(one), everything(two))


def test_moments_of_4096_values_or_more_are_quantised(choice):
    optimizer = optim.build(choice, draw())
    updated(optimizer, range(1))
    state = optimizer.state_tensors()
    matrices = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "mlp.down_proj.weight"]
    expected = {f"{LAYER}{name}/{m}.codes" for name in matrices for m in ("exp_avg", "exp_avg_sq")}
    assert {name for name in state if ".codes" in name} == (expected if choice.name == "adamw_8bit" else set())
    assert all(value.dtype == torch.uint8 for name, value in state.items() if ".codes" in name)
    assert all(value.shape == torch.Size([]) for name, value in state.items() if "/step" in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_takes_the_bytes_that_shapes_say(choice, dtype):
    optimizer = optim.build(choice, draw(dtype))
    updated(optimizer, range(2))
    measured = sum(value.numel() * value.element_size() for value in optimizer.state_tensors().values())
    shapes = {name: torch.empty_like(p, device="meta") for name, p in optimizer.parameters.items()}
    assert optim.state_bytes(choice, shapes) == measured


def test_state_of_another_model_is_refused(choice):
    optimizer = optim.build(choice, draw())
    with pytest.raises(UserError, match=r"optimizer state of model\.layers\.7\.other\.weight"):
        optimizer.load_state_tensors({"model.layers.7.other.weight/exp_avg": torch.zeros(3)})


def test_a_parameter_without_a_gradient_is_left_alone(choice):
    idle = [f"{LAYER}self_attn.k_proj.weight", f"{LAYER}input_layernorm.weight"]
    optimizer = optim.build(choice, draw())
    for seed in range(4):
        give_gradients(optimizer.parameters, seed)
        for name in idle:
            optimizer.parameters[name].grad = None
        optimizer.update(0.01, skip=GO, index=seed)
    for name in idle:
        assert torch.equal(optimizer.parameters[name].detach(), draw()[name].detach())
        assert not any(full.startswith(f"{name}/") for full in optimizer.state_tensors())
    other = optim.build(choice, optimizer.parameters)
    other.load_state_tensors(copied(optimizer.state_tensors()))
    updated(other, range(4, 6))  # their first updates, beside the fifth and sixth of the others
    assert all(p.isfinite().all() for p in other.parameters.values())
    assert {
        other.state_tensors()[f"{name}/step"].item() for name in idle if f"{name}/step" in other.state_tensors()
    } <= {2}


def test_undecayed_parameters_have_no_decay(choice):
    zero_gradients = {name: torch.zeros_like(p, requires_grad=False) for name, p in draw().items()}
    undecayed = {f"{LAYER}self_attn.q_proj.weight", f"{LAYER}self_attn.o_proj.a.weight", "lm_head.weight"}
    undecayed |= {f"{LAYER}self_attn.o_proj.b.weight"}
    optimizer = optim.build(choice, draw(), undecayed)
    for name, p in optimizer.parameters.items():
        p.grad = zero_gradients[name]
    optimizer.update(0.5, skip=GO, index=0)
    for name, start in draw().items():
        value = optimizer.parameters[name].detach()
        assert torch.equal(value, start.detach()) == (name in undecayed), name
        torch.testing.assert_close(value, start.detach() * (1 if name in undecayed else 0.95))


def test_pruning_keeps_a_random_share_of_the_moments_that_its_seed_decides(choice):
    def pruned(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        optimizer = optim.build(choice, draw())
        updated(optimizer, range(3))
        before = values(optimizer)
        optimizer.prune(names, keep=0.25, seed=seed)
        return before, values(optimizer)

    names = [f"{LAYER}self_attn.q_proj.weight", f"{LAYER}mlp.up_proj.b.weight"]
    before, after = pruned(seed=1)
    again, other = pruned(seed=1)[1], pruned(seed=2)[1]
    moments = [full for full in before if full.rsplit("/", 1)[0] in names and full.rsplit("/", 1)[1] in optim.MOMENTS]
    assert len(moments) == (2 if choice.name == "muon" else 4)
    kept = {full: (after[full] == before[full]) & (before[full] != 0) for full in moments}
    for full in before:
        assert torch.equal(again[full], after[full]), full
        if full in moments:
            zero = before[full] == 0  # of 8 bits, some are
            assert torch.equal(after[full] == 0, ~kept[full])
            share = kept[full].float().mean() / (~zero).float().mean()
            assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / zero.numel()))
            assert not torch.equal(after[full], other[full])
        else:
            assert torch.equal(after[full], before[full]), full
    assert not torch.equal(kept[moments[0]], kept[moments[1]]) or before[moments[0]].shape != before[moments[1]].shape


def values(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The state as numbers, quantised entries too."""
    tensors, out = optimizer.state_tensors(), {}
    for full, value in tensors.items():
        if full.endswith(".codes"):
            entry = full.removesuffix(".codes")
            by_block = tensors[f"{entry}.map"][value.int()].view(len(tensors[f"{entry}.scale"]), -1)
            out[entry] = (by_block * tensors[f"{entry}.scale"][:, None]).view(value.shape)
        elif not full.endswith((".scale", ".map")):
            out[full] = value.clone()
    return out


# ----------------------------------------------------------------------------------------------------
# What pure bf16 does to AdamW (the papers of this family run it on kernels that round after each operation)


def run_in(
    dtype: torch.dtype, name: str, knobs: dict, lr: float, gradients: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Where 4,096 weights of N(0, 0.02^2) start and end, and their second moments, in fp32."""
    start = (0.02 * torch.randn(4096, generator=torch.Generator().manual_seed(1))).to(dtype)
    p = start.clone().requires_grad_()
    optimizer = optim.build(Choice(name, knobs), {"p": p})
    for gradient in gradients:
        p.grad = gradient.to(dtype)
        optimizer.update(lr, skip=GO)
    return start.float(), p.detach().float(), optimizer.state_tensors()["p/exp_avg_sq"].float()


def noise(count: int, scale: float = 1.0, seed: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(4096, generator=generator) for _ in range(count)]


def test_weight_decay_rounds_away_after_each_operation_and_acts_where_an_update_rounds_once():
    """Share of the start that decay leaves: (1 - lr decay)^200 = 0.82 in exact arithmetic."""
    gradients = noise(200)

    def left(dtype: torch.dtype, name: str) -> float:
        start, decayed, _ = run_in(dtype, name, ADAM, 0.01, gradients)
        _, plain, _ = run_in(dtype, name, ADAM | {"weight_decay": 0.0}, 0.01, gradients)
        return 1 + ((decayed - plain) @ start / (start @ start)).item()

    assert left(torch.bfloat16, "adamw_foreach") == 1.0
    assert left(torch.bfloat16, "adamw") == pytest.approx(0.82, abs=0.06)
    for name in ("adamw", "adamw_foreach"):
        assert left(torch.float32, name) == pytest.approx(0.82, abs=0.01)
