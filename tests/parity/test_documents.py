"""Documents that share a row: their targets and numbers, the attention bias, and bf16 attention on a CPU.

``test_models`` shows that a whole model computes the same for a document in a row as for a document alone.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dlr_pretrain.data.packing import separated
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.models.llama import attention, attention_bias


def test_documents_are_numbered_and_no_target_crosses_them():
    ids = torch.tensor([[7, 8, EOS, 9, EOS, EOS, 4], [EOS, 3, 3, 3, 3, 3, 3]])
    targets = torch.tensor([[8, EOS, 9, EOS, EOS, 4, 5], [3, 3, 3, 3, 3, 3, EOS]])
    same, scored, numbers = separated(ids, targets, EOS)
    assert same is ids
    assert scored.tolist() == [[8, EOS, -100, EOS, -100, -100, 5], [-100, 3, 3, 3, 3, 3, EOS]]
    assert numbers.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_position_sees_earlier_positions_of_its_document(dtype):
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    bias = attention_bias(numbers, dtype)
    assert bias.shape == (2, 1, 6, 6) and bias.dtype == dtype
    for row, number in enumerate(numbers.tolist()):
        for i in range(6):
            for j in range(6):
                sees = j <= i and number[i] == number[j]
                assert bias[row, 0, i, j].item() == (0 if sees else -torch.inf)


@pytest.mark.parametrize("masked", [False, True])
def test_compiled_cpu_attention_matches_the_formula(masked):
    """In bf16, within three roundings (of scores, weights and sums) of float64."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(2, 3, 40, 16, dtype=torch.float64).to(torch.bfloat16) for _ in range(4))
    bias = attention_bias(torch.arange(80).reshape(2, 40) // 17, torch.bfloat16) if masked else None
    backend = CompileCounterWithBackend("aot_eager")
    found = gradients_of(torch.compile(attention, backend=backend, fullgraph=True), q, k, v, bias, g)
    assert [graph.code.count("scaled_dot_product") for graph in backend.graphs] == [0]
    exact = gradients_of(attention, *(t.double() for t in (q, k, v)), bias.double() if masked else None, g.double())
    for name, ours, true in zip(("y", "q", "k", "v"), found, exact, strict=True):
        assert (ours.double() - true).norm() < 3 * 2**-9 * true.norm(), name


def gradients_of(act, q, k, v, bias, g) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    y = act(*inputs, bias)
    return [y.detach(), *torch.autograd.grad(y, inputs, g)]
