"""precision=bf16_sr: unbiased rounding by bits that depend on (seed, name, step, entry) alone; AdamW with it."""

import math

import pytest
import torch
from torch import Tensor

from dlr_pretrain.optim import adamw
from dlr_pretrain.optim.optimizer import Optimizer
from tests.parity.reference import CPU
from tests.parity.test_optim import GO, chosen

BETA2 = {"beta2": 0.999}
COUNT = 1 << 16


def words(count: int, step: int, seed: int = 0, name: str = "w") -> Tensor:
    keys = adamw.keys(seed, name, 0, CPU)
    return adamw.random_words(torch.Size([count]), keys, torch.tensor(float(step)))


# ----------------------------------------------------------------------------------------------------
# Rounding, and the bits


def test_stochastic_rounding_is_exactly_unbiased():
    """With each of the 65,536 possible bit patterns once, the mean is exactly the value."""
    bits = torch.arange(COUNT)
    values = [1.0, -1.0, 1.00390624, 0.3, -0.7071, 1e-30, 3e38, -1e-39, 5e-324, 0.0]
    for value in torch.tensor(values, dtype=torch.float64).float().tolist():
        found = adamw.rounded(torch.full((COUNT,), value), bits)
        assert found.dtype == torch.bfloat16 and len(found.unique()) <= 2
        assert found.double().mean().item() == value, value
        assert value not in torch.tensor([value]).bfloat16().double().tolist() or (found == value).all()


def test_infinities_and_nan_are_preserved():
    patterns = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)
    for bits in (0, 1, 0xFFFF):
        found = adamw.rounded(patterns.view(torch.float32), torch.tensor(bits))
        assert found[:2].tolist() == [math.inf, -math.inf] and found[2:].isnan().all()


@pytest.mark.parametrize("shift", [0, 16])
def test_bits_are_uniform_and_independent(shift):
    """Chi-square of 256 classes, and of the 256 pairs of classes of 16: within five standard deviations."""
    one = words(COUNT, step=7)
    others = [one.roll(1), words(COUNT, step=8), words(COUNT, 7, name="v"), words(COUNT, 7, seed=1)]
    others.append(words(COUNT, step=7) << 16 if shift else words(COUNT, step=7) >> 16)  # the other half of the word

    def top(word: Tensor, bits: int) -> Tensor:
        return (word >> shift & 0xFFFF) >> (16 - bits)

    for classes in (top(one, 8), *(16 * top(one, 4) + top(other, 4) for other in others)):
        counted = torch.bincount(classes, minlength=256).double()
        expected = COUNT / 256
        chi_square = ((counted - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


# ----------------------------------------------------------------------------------------------------
# AdamW


def optimizer_of(p: Tensor, seed: int | None = 0, **options) -> Optimizer:
    return Optimizer(chosen("adamw", **BETA2 | options), {"w": p}, rounding_seed=seed)


@pytest.mark.parametrize(("start", "gradient", "lr", "decay", "end"), [
    (0.02, 0.0, 0.002, 0.1, 0.02 * (1 - 0.0002) ** 100),  # exp(-0.02) of a weight is left
    (1.0, 1.0, 1e-4, 0.0, 1 - 100 * 1e-4),
])  # fmt: skip
def test_changes_below_half_a_unit_have_an_effect(start, gradient, lr, decay, end):
    """The mean after 100 updates. Rounded to the nearest, they change nothing."""

    def mean(seed: int | None) -> float:
        p = torch.full((4096,), start).bfloat16().requires_grad_()
        optimizer = optimizer_of(p, seed, weight_decay=decay)
        for k in range(100):
            p.grad = torch.full_like(p, gradient)
            optimizer.collect()
            optimizer.update(lr, skip=GO, index=k)
        return p.detach().double().mean().item() / torch.tensor(start).bfloat16().item() * start

    assert mean(None) == start
    assert mean(0) - start == pytest.approx(end - start, rel=0.05)


def test_second_moments_shrink_on_average():
    """By 0.999 per update, which bf16 rounds to 1. A first moment of 1 is 0.8984375 after one update."""

    def moments(seed: int | None, updates: int) -> tuple[Tensor, Tensor]:
        p = torch.zeros(4096, dtype=torch.bfloat16).requires_grad_()
        optimizer = optimizer_of(p, seed)
        ones = torch.ones_like(p, requires_grad=False)
        optimizer.load_state_tensors({"w/exp_avg": ones, "w/exp_avg_sq": ones, "w/step": torch.tensor(1.0)})
        for k in range(updates):
            p.grad = torch.zeros_like(p)
            optimizer.collect()
            optimizer.update(1e-4, skip=GO, index=k)
        state = optimizer.state_tensors()
        return state["w/exp_avg"], state["w/exp_avg_sq"]

    assert (moments(None, 100)[1] == 1).all()
    assert moments(0, 100)[1].double().mean().item() == pytest.approx(0.999**100, rel=0.005)
    assert (moments(0, 1)[0] == 0.8984375).all()


@pytest.mark.parametrize(("name", "rows"), [("adamw", [291, 291, 58]), ("adamw_8bit", [256, 256, 128])])
def test_updating_in_pieces_changes_no_bit(name, rows, monkeypatch):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")

    def trained() -> list[Tensor]:
        p = torch.randn(640, 24, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        optimizer = Optimizer(chosen(name, **BETA2), {"w": p}, rounding_seed=5)
        for k in range(3):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k)).bfloat16()
            optimizer.collect()
            optimizer.update(1e-3, skip=GO, index=k)
        return [p.detach(), *optimizer.state_tensors().values()]

    whole, calls, advance = trained(), [], adamw._advance
    monkeypatch.setattr(adamw, "MAX_PIECE", 7000)
    monkeypatch.setattr(adamw, "_advance", lambda *given: (calls.append(len(given[0])), advance(*given)))
    assert all(torch.equal(a, b) for a, b in zip(whole, trained(), strict=True))
    assert calls == rows * 3
