"""The fused head and loss against their formula in float64, torch's own, and what they may keep in memory."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.models import loss
from dlr_pretrain.models.loss import summed_cross_entropy
from dlr_pretrain.util.tensors import IGNORE
from tests.parity.reference import Operations

N, D, V = 60, 16, 70


def inputs(dtype: torch.dtype = torch.float64, ignored: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[torch.randperm(N, generator=generator)[:ignored]] = IGNORE
    return x, weight, targets


def formula(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Row by row."""
    rows = [(x[i] @ weight.T, targets[i]) for i in range(N) if targets[i] != IGNORE]
    return sum((logits.exp().sum().log() - logits[t] for logits, t in rows), start=0 * (x.sum() + weight.sum()))


def unfused(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = x @ weight.T
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, ignore_index=IGNORE, reduction="sum")


def gradients(of, x: Tensor, weight: Tensor, targets: Tensor, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
    found = of(x, weight, targets)
    (found * scale).backward()
    return found.detach(), x.grad, weight.grad


def in_one_kernel(*arguments) -> tuple[Tensor, None]:
    return loss.score_in_one_kernel(*arguments), None


SCORES = {"score": loss.score, "score_in_one_kernel": in_one_kernel}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("rows", [60, 20, 17, 1])
@pytest.mark.parametrize("ignored", [0, 7, N])
def test_the_loss_and_its_gradients_are_those_of_the_formula(monkeypatch, rows, ignored, score):
    monkeypatch.setattr(loss, "FEW_ROWS", rows)
    given, ours = inputs(ignored=ignored), partial(summed_cross_entropy, score=SCORES[score])
    exact = gradients(formula, *given)
    for found, expected in zip(gradients(ours, *given), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(ours(*given), exact[0])


@pytest.mark.parametrize("rows", [loss.FEW_ROWS, loss.ROWS])
def test_pieces_of_either_device_give_the_loss_of_float64(monkeypatch, rows):
    """Of two of the larger pieces; eager code then widens a large one in parts."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, D, generator=generator, dtype=torch.float64) for n in (2 * loss.ROWS, V))
    targets = torch.randint(0, V, (len(x),), generator=generator)
    targets[::9] = IGNORE
    exact = gradients(unfused, x, weight, targets)
    monkeypatch.setattr(loss, "_most", lambda *_: rows)
    for found, expected in zip(gradients(summed_cross_entropy, x, weight, targets), exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for dtype in (torch.bfloat16, torch.float32):
        found = gradients(summed_cross_entropy, x.to(dtype), weight.to(dtype), targets)
        for ours, wanted in zip(found, exact, strict=True):
            assert error(ours, wanted) < (6e-3 if dtype == torch.bfloat16 else 1e-6)


def error(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("rows", [60, 20, 4])
def test_bf16_is_at_most_one_rounding_further_off_than_autograd(monkeypatch, rows, score):
    """bf16 rounds to 2^-9 at most, 2^-9 / sqrt(3) in the mean square; however many pieces are summed."""
    monkeypatch.setattr(loss, "FEW_ROWS", rows)
    given = inputs(torch.bfloat16)
    exact = gradients(formula, *(t.double() if t.is_floating_point() else t for t in given))
    ours = gradients(partial(summed_cross_entropy, score=SCORES[score]), *given)
    autograd = gradients(unfused, *given)
    for found, plain, wanted in zip(ours, autograd, exact, strict=True):
        assert found.dtype == plain.dtype
        assert error(found, wanted) ** 2 <= error(plain, wanted) ** 2 + (2**-9) ** 2 / 3
    assert error(ours[0], exact[0]) < 2e-3  # logits are rounded; what follows is in fp32


def test_gradients_are_formed_once():
    found = summed_cross_entropy(*inputs())
    found.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="formed once"):
        found.backward()


def largest(act: Callable[[], Tensor], grad: bool = True) -> dict[torch.dtype, int]:
    """The sizes in bytes of the tensors that ``act`` and its backward pass make, by dtype the largest."""
    sizes: dict[torch.dtype, int] = {}

    def note(_, tensors: list[Tensor]) -> None:
        for t in tensors:
            sizes[t.dtype] = max(sizes.get(t.dtype, 0), t.untyped_storage().nbytes())

    with torch.set_grad_enabled(grad), Operations(note):
        found = act()
        if grad:
            found.backward()
    return sizes


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(("dtype", "pieces"), [(torch.bfloat16, 8), (torch.float32, 8), (torch.bfloat16, 1)])
def test_no_more_logits_exist_than_a_piece_has(monkeypatch, dtype, pieces, grad):
    rows, width, vocabulary = 512, 8, 400
    monkeypatch.setattr(loss, "FEW_ROWS", rows // pieces)
    x = torch.randn(rows, width, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, dtype=dtype).requires_grad_()
    targets, piece = torch.randint(0, vocabulary, (rows,)), rows // pieces * vocabulary
    made = largest(lambda: summed_cross_entropy(x, weight, targets), grad)
    assert made[dtype] == piece * dtype.itemsize and made[torch.float32] <= 4 * piece
    assert largest(lambda: unfused(x, weight, targets))[torch.float32] == 4 * rows * vocabulary


def test_only_gradients_are_kept_and_they_become_grad_uncopied():
    x, weight, targets = inputs(torch.float32)
    found = summed_cross_entropy(x, weight, targets)
    for_x, for_weight = (t.data_ptr() for t in found.grad_fn.gradients)
    assert not found.grad_fn.saved_tensors
    found.backward()
    assert (x.grad.data_ptr(), weight.grad.data_ptr()) == (for_x, for_weight)


@pytest.mark.full
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_scores_are_those_of_eager(monkeypatch, dtype, score):
    monkeypatch.setattr(loss, "FEW_ROWS", 20)
    compiled = torch.compile(SCORES[score], dynamic=False, fullgraph=True)
    ours = gradients(partial(summed_cross_entropy, score=compiled), *inputs(dtype))
    for found, expected in zip(ours, gradients(summed_cross_entropy, *inputs(dtype)), strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=1e-5)
    with torch.no_grad():
        evaluated = summed_cross_entropy(*inputs(dtype), compiled)
    torch.testing.assert_close(evaluated, ours[0])
