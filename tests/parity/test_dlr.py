"""DLR against its formula: weight space, branch, initial offset, folding, and the interface on foreign modules."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from dlr_pretrain.models import active, attach_dlr, build, fold_
from dlr_pretrain.models.dlr import folded_state, residuals
from dlr_pretrain.models.linear import require_tied
from dlr_pretrain.models.merged import MergedResiduals
from dlr_pretrain.models.residual import Residual
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.tensors import STATE_DTYPE
from tests.parity.reference import VOCAB, r_transposed, small

LR = 1e-3
PAIRS = ("lowrank", "cola", "lost", "lax", "cola_lax")
VARIANTS = (
    *("lost backbone.rank=8 backbone.sparsity=0.2", "lax backbone.gate=dense"),
    "cola_lax backbone.norm=output backbone.crossing=post_act backbone.recursive=false",
)


def batch(seed: int = 0):
    return torch.randint(0, VOCAB, (2, 3, 12), generator=torch.Generator().manual_seed(seed))


class Layer(nn.Module):
    """A low-rank layer of somebody else's, with a bias."""

    def __init__(self, d_in=6, rank=4, d_out=10):
        super().__init__()
        self.down, self.up = nn.Linear(d_in, rank), nn.Linear(rank, d_out)

    def forward(self, x):
        return self.up(torch.tanh(self.down(x)))


@pytest.mark.parametrize(("d_out", "rank", "columns"), [
    (10, 4, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]),
    (14, 6, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]),  # latent 5 gets no copy
    (8, 8, list(range(8))),
    (3, 8, [0, 1, 2]),
])  # fmt: skip
@pytest.mark.parametrize("corrected", [True, False])
def test_each_output_receives_the_latent_of_its_group(d_out, rank, columns, corrected):
    residual = Residual(d_out, rank, 1.5, corrected, "weight")
    assert residual.columns.tolist() == columns
    assert residual.beta == 1.5 / math.sqrt(math.ceil(d_out / rank)) if corrected else residual.beta == 1.5
    z = torch.randn(3, rank, dtype=torch.float64)
    assert torch.equal(residual.duplicate(z), z @ r_transposed(d_out, rank).double().T)


@pytest.mark.parametrize("impl", ["weight", "branch"])
def test_a_layer_with_bias_computes_the_formula_and_its_gradients(impl):
    layer = Layer().double()
    plain = copy.deepcopy(layer)
    assert attach_dlr(layer, alpha=0.7, impl=impl) == ["up"]
    x = torch.randn(5, 6, dtype=torch.float64)
    beta = 0.7 / math.sqrt(3)

    z = torch.tanh(plain.down(x))
    expected = z @ (plain.up.weight + beta * r_transposed(10, 4).double()).T + plain.up.bias
    expected.square().sum().backward()
    with active(layer):
        y = layer(x)
        y.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-14)
    assert torch.equal(layer.up.weight, plain.up.weight)
    for p, q in zip(layer.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-13)


def trajectory(cfg, steps: int, decay: float, offset: bool = False, towards_offset: bool = False):
    """The folded weights after AdamW in float64, clipped; with ``offset`` of plain AdamW from the folded start.

    The embedding has unit scale: at its initial 0.02 the first norm multiplies rounding errors by 50 an evaluation.
    """
    model = build(cfg, VOCAB, torch.device("cpu"), torch.float64)
    model.model.embed_tokens.weight.data.mul_(50)
    shift = {}
    if offset:
        shift = {name: m.residual for name, m in residuals(model)}
        fold_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0 if towards_offset else decay)
    for step in range(steps):
        with active(model) if not offset else nullcontext():
            loss = model(*batch(step % 4)) / 36
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if towards_offset:  # decay of what is left of a parameter without its offset, before Adam's step, as torch does
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.mul_(1 - LR * decay)
                    residual = shift.get(name.removesuffix(".weight"))
                    if residual:
                        p[residual.rows, residual.columns] += LR * decay * residual.beta
        optimizer.step()
        optimizer.zero_grad()
    return folded_state(model, model.state_dict()), loss.item()


@pytest.mark.parametrize("variant", ["cola", *(pytest.param(v, marks=pytest.mark.full) for v in PAIRS[2:] + VARIANTS)])
def test_weight_space_and_branch_train_alike(variant):
    weight = trajectory(small(*variant.split(), "dlr=on"), 30, 0.1)
    branch = trajectory(small(*variant.split(), "dlr=on", "dlr.impl=branch"), 30, 0.1)
    assert weight[1] == pytest.approx(branch[1], rel=1e-12)
    for name in weight[0]:
        torch.testing.assert_close(weight[0][name], branch[0][name], rtol=0, atol=1e-12, msg=name)


@pytest.mark.parametrize("variant", ["cola", pytest.param("lost", marks=pytest.mark.full)])
def test_weight_decay_alone_separates_dlr_from_an_initial_offset(variant):
    cfg = small(*variant.split(), "dlr=on")

    def distance(a, b):
        return max((a[0][n] - b[0][n]).abs().max().item() for n in a[0])

    assert distance(trajectory(cfg, 20, 0.0), trajectory(cfg, 20, 0.0, offset=True)) < 1e-12
    decayed = trajectory(cfg, 20, 1.0)
    assert distance(decayed, trajectory(cfg, 20, 1.0, offset=True)) > 1e-3
    assert distance(decayed, trajectory(cfg, 20, 1.0, offset=True, towards_offset=True)) < 1e-12


@pytest.mark.parametrize("variant", ("cola", "lost", VARIANTS[-1]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fold_leaves_the_tensors_and_logits_of_training_bit_for_bit(dtype, variant):
    model = build(small(*variant.split(), "dlr=on"), VOCAB, torch.device("cpu"), dtype)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    with active(model):
        working = {name: p.detach().clone() for name, p in model.named_parameters()}
        logits = model.logits(batch()[0])
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    expected = folded_state(model, before)
    assert fold_(model) == 14
    for name, p in model.named_parameters():
        assert torch.equal(p, working[name]) and torch.equal(p, expected[name]), name
    assert torch.equal(model.logits(batch()[0]), logits)

    plain = build(small(*variant.split()), VOCAB, torch.device("cpu"), dtype)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.logits(batch()[0]), logits)


def test_fold_adds_beta_at_its_entries_and_nothing_elsewhere():
    model = build(small("lowrank", "dlr=on", "dlr.alpha=2"), VOCAB, torch.device("cpu"), torch.float64)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    fold_(model)
    for name, p in model.state_dict().items():
        expected = torch.zeros_like(p)
        if name.endswith(".b.weight"):
            expected = 2 / math.sqrt(math.ceil(p.shape[0] / 8)) * r_transposed(p.shape[0], 8).double()
        torch.testing.assert_close(p - before[name], expected, rtol=0, atol=1e-15)


def test_merging_masters_rounds_the_sum_once():
    model = build(small("cola", "dlr=on"), VOCAB, torch.device("cpu"))
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.to(torch.bfloat16)
    merger = MergedResiduals(model, masters)
    for _ in range(2):  # merging again starts from the masters
        merger.merge()
    folded = folded_state(model, masters)
    for name, p in model.named_parameters():
        assert folded[name].dtype == torch.float32
        assert torch.equal(folded[name].to(torch.bfloat16), p), name


class Kernels(TorchDispatchMode):
    """Counts what is computed; views are free."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        self.count += not operation.is_view and operation is not torch.ops.prim.device.default
        return operation(*arguments, **(keywords or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_merging_takes_as_many_kernels_for_any_depth(precision):
    def kernels(layers: int) -> int:
        cfg = small("cola", "dlr=on", f"precision={precision}", layers=layers)
        weights = Weights(build(cfg, VOCAB, torch.device("cpu"), STATE_DTYPE[precision]), precision)
        require_tied(weights.model)
        with weights.with_residual():  # makes the indices
            pass
        with Kernels() as kernels, weights.with_residual():
            pass
        return kernels.count

    assert kernels(2) == kernels(5) <= 12


def test_a_backward_pass_after_the_residual_was_taken_out_is_refused():
    """It would multiply by B where the forward pass multiplied by B + beta R^T."""
    layer = Layer()
    attach_dlr(layer)
    with active(layer):
        loss = layer(torch.randn(2, 6)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_b_comes_back_when_the_forward_fails():
    layer = Layer()
    attach_dlr(layer)
    before = layer.up.weight.clone()
    with pytest.raises(ZeroDivisionError), active(layer):
        assert not torch.equal(layer.up.weight, before)
        1 / 0  # noqa: B018
    assert torch.equal(layer.up.weight, before)


@pytest.mark.parametrize("learn_alpha", [False, True])
def test_a_forward_pass_that_leaves_the_residual_out_is_refused(learn_alpha):
    """Eager, compiled, through a part of the model, and through the grouped products that call no layer."""
    model, x = nn.Sequential(Layer(), Layer(10)), torch.randn(2, 6)
    attach_dlr(model, learn_alpha=learn_alpha)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    llama = build(small("cola", "dlr=on"), VOCAB, torch.device("cpu"))
    ours = (lambda: llama(*batch()), lambda: llama.logits(x))
    for forward in (lambda: model(x), lambda: model[0](x), lambda: compiled(x), *ours):
        with pytest.raises(RuntimeError, match=r"is that of another model. Run it inside .*active\(model\)"):
            forward()
    with active(model), active(compiled), active(llama):
        assert torch.equal(model(x), compiled(x)) and llama(*batch()).requires_grad
    for m in (model, compiled, llama):
        fold_(m)
    assert torch.equal(model(x), compiled(x)) and llama.logits(batch()[0]).requires_grad
    branch = Layer()
    attach_dlr(branch, impl="branch")  # has it in its forward pass
    branch(x)


def test_misuse_is_refused():
    layer = Layer()
    for act in (fold_, lambda m: active(m).__enter__()):
        with pytest.raises(ValueError, match="no residual: call attach_dlr"):
            act(layer)
    attach_dlr(layer)
    with pytest.raises(ValueError, match="has a residual already"):
        attach_dlr(layer)
    with active(layer):
        with pytest.raises(RuntimeError, match="merged"):
            layer.state_dict()
        with pytest.raises(RuntimeError, match="merged"):
            fold_(layer)
        with pytest.raises(RuntimeError, match="merged"), active(layer):
            pass
    assert fold_(layer) == 1
    for act in (fold_, lambda m: active(m).__enter__()):
        with pytest.raises(ValueError, match="folded already"):
            act(layer)
    for part in (layer, layer.up):
        with pytest.raises(ValueError, match="was folded"):
            attach_dlr(part)
    with pytest.raises(ValueError, match="no up-projection"):
        attach_dlr(nn.Sequential(nn.ReLU()))
    with pytest.raises(ValueError, match="no up-projection"):
        attach_dlr(Layer(), match="*.nothing")


def test_up_projections_are_found_named_or_chosen():
    model = nn.ModuleDict({"a": Layer(), "b": nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 10))})
    assert attach_dlr(copy.deepcopy(model)) == ["a.up"]
    assert attach_dlr(copy.deepcopy(model), match="b.1") == ["b.1"]
    assert attach_dlr(copy.deepcopy(model), match=lambda name, m: m.in_features == 4) == ["a.up", "b.1"]
    assert attach_dlr(nn.Linear(4, 10)) == [""]


@pytest.mark.parametrize("impl", ["weight", "branch"])
def test_copies_are_independent(impl):
    layer = Layer()
    attach_dlr(layer, impl=impl)
    twin = copy.deepcopy(layer)
    x = torch.randn(2, 6)
    with active(layer), active(twin):
        assert torch.equal(layer(x), twin(x))
    fold_(twin)
    assert not torch.equal(twin.up.weight, layer.up.weight)
    with active(layer):
        torch.testing.assert_close(twin(x), layer(x))


@pytest.mark.parametrize("impl", ["weight", "branch"])
def test_all_blocks_share_a_graph_for_training_and_one_for_evaluation(impl):
    """Beyond eight graphs of one function dynamo gives up, and a run would fail at its first evaluation."""
    counter = CompileCounter()
    torch._dynamo.reset()
    model = build(small("cola", "dlr=on", f"dlr.impl={impl}", layers=10), VOCAB, torch.device("cpu"))
    for block in model.model.layers:
        block.compile(backend=counter, dynamic=False, fullgraph=True)
    with active(model):
        model(*batch()).backward()
        with torch.no_grad():
            model(*batch())
    assert counter.frame_count == 2


@pytest.mark.full
@pytest.mark.parametrize("impl", ["weight", "branch"])
def test_compiled_equals_eager_where_inductor_miscompiles_the_literal_formula(impl):
    """512 -> 1376 at rank 128: K = 11 does not divide 1376, and the last group has one row."""
    layer = Layer(512, 128, 1376)
    attach_dlr(layer, impl=impl)
    compiled = copy.deepcopy(layer)
    compiled.compile(dynamic=False, fullgraph=True)
    x = torch.randn(16, 512)
    with active(layer), active(compiled):
        results = [m(x) for m in (layer, compiled)]
        for y in results:
            y.square().sum().backward()
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.up.weight.grad, compiled.up.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(layer.down.weight.grad, compiled.down.weight.grad, rtol=1e-4, atol=1e-3)
