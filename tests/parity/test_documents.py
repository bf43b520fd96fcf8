"""Documents that do not see each other: in a packed row each has the logits, loss and gradients that it has alone."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from dlr_pretrain.data.packing import separated
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.models import Llama
from dlr_pretrain.models.llama import attention, attention_bias
from dlr_pretrain.util.tensors import IGNORE
from tests.parity.reference import VOCAB, nonzero_b, reference_loss, small

LENGTHS = (5, 1, 9, 2, 7)  # with </s>; one document is empty
MODES = ("none", "latent", "block")


def documents() -> list[Tensor]:
    """Documents of ids that no other has, each with its </s>."""
    ids = iter(range(3, VOCAB))
    return [torch.tensor([*(next(ids) for _ in range(length - 1)), EOS]) for length in LENGTHS]


def packed() -> tuple[Tensor, Tensor]:
    """Ids and targets [1, T] of the documents in one row, which has no target beyond its end."""
    row = torch.cat(documents())[None]
    return row, torch.cat((row[:, 1:], torch.full((1, 1), IGNORE)), 1)


def model(backbone: str, mode: str = "none", *overrides: str, layers: int = 2) -> Llama:
    cfg = small(backbone, f"train.activation_checkpointing={mode}", *overrides, layers=layers)
    llama = Llama(cfg, VOCAB, grouped=True)
    llama.init_(3)
    llama.double()
    with torch.no_grad():
        llama.model.embed_tokens.weight.mul_(50)  # at its start's 0.02 the norm would blow up rounding
        nonzero_b(llama)
    return llama


def gradients(llama: Llama, loss: Tensor) -> dict[str, Tensor]:
    llama.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in llama.named_parameters() if p.grad is not None}


def test_what_follows_the_end_of_a_document_is_no_target_and_of_another_document():
    ids = torch.tensor([[7, 8, EOS, 9, EOS, EOS, 4], [EOS, 3, 3, 3, 3, 3, 3]])
    targets = torch.tensor([[8, EOS, 9, EOS, EOS, 4, 5], [3, 3, 3, 3, 3, 3, EOS]])
    same, scored, numbers = separated(ids, targets, EOS)
    assert same is ids
    assert scored.tolist() == [[8, EOS, -100, EOS, -100, -100, 5], [-100, 3, 3, 3, 3, 3, EOS]]
    assert numbers.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_position_attends_to_what_comes_before_it_in_its_document(dtype):
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    bias = attention_bias(numbers, dtype)
    assert bias.shape == (2, 1, 6, 6) and bias.dtype == dtype
    for row, number in enumerate(numbers.tolist()):
        for i in range(6):
            for j in range(6):
                sees = j <= i and number[i] == number[j]
                assert bias[row, 0, i, j].item() == (0 if sees else -torch.inf)


@pytest.mark.parametrize("backbone", ["lowrank", "full"])
def test_the_packed_loss_and_its_gradients_are_the_formulas_for_the_documents_alone(backbone):
    llama = model(backbone)
    inputs = separated(*packed(), EOS)
    found = llama(*inputs)
    actual = gradients(llama, found)

    state = {name: t.detach().clone().requires_grad_() for name, t in llama.state_dict().items()}

    def project(name: str, x: Tensor) -> Tensor:
        if backbone == "full":
            return x @ state[f"{name}.weight"].T
        return x @ state[f"{name}.a.weight"].T @ state[f"{name}.b.weight"].T

    scored = [(d[:-1][None], d[1:][None]) for d in documents() if len(d) > 1]
    expected = sum(reference_loss(state, ids, targets, heads=2, layers=2, project=project) for ids, targets in scored)
    assert (inputs[1] != IGNORE).sum() == sum(LENGTHS) - len(LENGTHS)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    expected.backward()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, state[name].grad, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("backbone", ["cola", "lax"])
@pytest.mark.parametrize("mode", MODES)
def test_the_packed_loss_is_that_of_padded_rows_whatever_is_kept_for_the_backward_pass(backbone, mode):
    width = max(LENGTHS)
    rows = torch.stack([torch.cat((d, d.new_zeros(width + 1 - len(d)))) for d in documents()])
    predicted = torch.arange(1, width + 1) < torch.tensor(LENGTHS)[:, None]
    llama, kept = model(backbone, mode), model(backbone)
    packed_loss, padded_loss = (
        llama(*separated(*packed(), EOS)),
        kept(rows[:, :-1], torch.where(predicted, rows[:, 1:], -100)),
    )
    torch.testing.assert_close(packed_loss, padded_loss, rtol=1e-12, atol=0)
    found, expected = gradients(llama, packed_loss), gradients(kept, padded_loss)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("masked", [True, False])
def test_no_gradient_flows_from_a_document_to_another(masked):
    llama = model("lowrank")
    ids, targets, numbers = separated(*packed(), EOS)
    third = torch.where(numbers == 2, targets, IGNORE)
    rows = gradients(llama, llama(ids, third, numbers if masked else None))["model.embed_tokens.weight"]
    own = documents()[2][:-1]
    before = torch.cat(documents()[:2])
    assert (rows[own].abs().sum(1) > 0).all()
    assert (rows[before].abs().sum() == 0) == masked


@pytest.mark.full
@pytest.mark.parametrize(("backbone", "mode"), [("cola", "latent"), ("cola_lax", "none")])
def test_compiled_equals_eager_in_one_graph(backbone, mode, monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    eager = model(backbone, mode, layers=3)
    compiled = copy.deepcopy(eager)
    compiled.compile_()
    inputs = separated(*packed(), EOS)
    found, expected = compiled(*inputs), eager(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    actual = gradients(compiled, found)
    for name, value in gradients(eager, expected).items():
        torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-11, msg=name)
    graphs = counter.frame_count
    shifted = (*inputs[:2], torch.zeros_like(inputs[2]))
    torch.testing.assert_close(compiled(*shifted), eager(*inputs[:2]), rtol=1e-12, atol=0)
    assert counter.frame_count == graphs  # other documents, the same graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("masked", [False, True])
def test_attention_compiled_for_a_cpu_is_the_formula(masked):
    """Its own products in bf16, against float64: no further away than three roundings, of scores, weights and sums."""
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
