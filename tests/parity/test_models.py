"""Every backbone against a LLaMA written from the formulas in float64; compiled models, today's shapes, documents."""

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM

from dlr_pretrain.config import Config
from dlr_pretrain.data.packing import separated
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.deploy.export import model_config
from dlr_pretrain.models import Llama, build_model, sltrain
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.layer import Spec
from dlr_pretrain.models.llama import attention, attention_bias
from dlr_pretrain.models.llama import padded as padded_width
from dlr_pretrain.models.residual import branch_
from dlr_pretrain.train.state import new_optimizer
from dlr_pretrain.util.tensors import ALPHA, IGNORE
from tests.parity.reference import (
    CPU,
    TODAYS,
    VOCAB,
    Operations,
    State,
    disturbed,
    formula_loss,
    small,
    weights,
    with_checkpointing,
)

LENGTHS = (5, 1, 9, 2, 7)  # of documents, with </s>; one is empty
MANY = "backbone.sparsity=0.2"  # 6 of 32 channels and 18 of 91: the projections of a layer share some
CARRYING = [  # backbones that DLR can be attached to
    "lowrank", "cola", "cola backbone.swiglu_silu=false backbone.latent_scale=0.6",
    "lost", f"lost backbone.rank=8 {MANY}", f"lost backbone.rank=13 backbone.gamma=0.5 backbone.activation=none {MANY}",
    *(f"{backbone} backbone.gate={gate}" for backbone in ("lax", "cola_lax") for gate in ("tensor", "dense")),
]  # fmt: skip
OTHERS = ["full", "lora backbone.alpha=12", "relora backbone.alpha=12", f"sltrain backbone.alpha=12 {MANY}"]
ABLATIONS = ["no_b", "random dlr.grouping_seed=7", "uncorrected", "learnable_alpha"]
WITH_RESIDUAL = [f"{variant} dlr=on dlr.alpha=1.5" for variant in CARRYING]
WITH_RESIDUAL += [f"cola dlr={ablation}" for ablation in ABLATIONS]
CASES = [*(f"{variant} dlr=off" for variant in OTHERS + CARRYING), *WITH_RESIDUAL, "cola dlr=init_offset"]
# q has 24 outputs, k and v have 12 each: at rank 8, DLR copies a latent three times there and twice here.
SHAPED = " ".join(TODAYS)
GROUPED = [f"{case} {SHAPED}" for case in (
    "full", f"sltrain backbone.alpha=12 {MANY}", "cola dlr=on", f"lost dlr=on {MANY}", "cola_lax dlr=learnable_alpha",
)]  # fmt: skip
MORE_GROUPED = [pytest.param(f"{case} {SHAPED}", marks=pytest.mark.full) for case in (
    "lora backbone.alpha=12", "relora backbone.alpha=12", "lowrank", "cola dlr=random", "lax dlr=on",
)]  # fmt: skip


def documents() -> list[Tensor]:
    """Documents without common ids, each with its </s>."""
    ids = iter(range(3, VOCAB))
    return [torch.tensor([*(next(ids) for _ in range(length - 1)), EOS]) for length in LENGTHS]


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets and document numbers [1, T] of all documents in one row. The last position has no target."""
    row = torch.cat(documents())[None]
    return separated(row, torch.cat((row[:, 1:], torch.full((1, 1), IGNORE)), 1), EOS)


def padded() -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(0, VOCAB, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    targets[0, :4] = IGNORE
    return ids, targets


def of(case: str) -> Config:
    return small(*case.split(), "precision=fp32", layers=3 if "lax" in case else 2)


def step(model: Llama, rows: tuple = (padded(), packed())) -> tuple[list[Tensor], State]:
    """The losses of ``rows`` (by default padded rows, and separated documents), and the gradients of their sum."""
    losses = [model(*inputs) for inputs in rows]
    sum(losses).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert None not in gradients.values()
    return losses, split(model, gradients)


def leaves(tensors: State) -> State:
    return {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in tensors.items()}


def assert_formula(cfg: Config, state: State, losses: list[Tensor], gradients: State) -> None:
    """Assert that ``losses`` and ``gradients`` are those of the formula at ``state``, by exported names."""
    state = leaves(state)
    alone = [(d[None, :-1], d[None, 1:]) for d in documents() if len(d) > 1]
    for loss, rows in zip(losses, ([padded()], alone), strict=True):
        expected = formula_loss(cfg, state, rows)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        expected.backward()
    for name, gradient in gradients.items():
        assert state[name].grad is not None and state[name].grad.any(), f"{name}: no gradient to compare"
        torch.testing.assert_close(gradient, state[name].grad, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("case", [*CASES, *GROUPED, *MORE_GROUPED], ids=str)
def test_losses_and_gradients_match_the_formulas(case):
    """The model holds W = B + beta R^T; the formula receives B."""
    cfg = of(case)
    model = disturbed(cfg)
    state = leaves(weights(model))
    optimizer = new_optimizer(cfg, model)
    if cfg.dlr.learn_alpha:
        with optimizer.taken_out() as values:
            values[ALPHA] += torch.randn(len(values[ALPHA]), generator=torch.Generator().manual_seed(3)) / 3
        state[ALPHA] = values[ALPHA]
    losses, gradients = step(model)
    if cfg.dlr.learn_alpha:
        optimizer.collect()
        gradients[ALPHA] = values[ALPHA].grad
    assert_formula(cfg, state, losses, gradients)


@pytest.mark.parametrize("case", WITH_RESIDUAL, ids=str)
def test_the_residual_branch_matches_the_formula(case):
    """The model holds B."""
    cfg = of(case)
    model = disturbed(cfg)
    state = weights(model)
    if cfg.dlr.learn_alpha:
        state[ALPHA] = 1 + torch.randn(14, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) / 3
    branch_(model, cfg.dlr, state.get(ALPHA))
    assert_formula(cfg, state, *step(model))


@pytest.mark.parametrize("case", [
    *(f"{variant} dlr=off" for variant in OTHERS + CARRYING),
    *(pytest.param(f"{variant} {SHAPED}", marks=pytest.mark.full) for variant in ("cola", "lax")),
], ids=str)  # fmt: skip
def test_activation_checkpointing_changes_no_bit(case):
    cfg = of(case)
    losses, gradients = step(disturbed(cfg))
    for mode in ("latent", "block"):
        again, same = step(disturbed(with_checkpointing(cfg, mode)))
        assert again == losses and all(torch.equal(g, same[name]) for name, g in gradients.items()), mode


def test_odd_widths_are_padded_to_multiples_of_64():
    assert [padded_width(width) for width in (1376, 5461, 11008)] == [1376, 5504, 11008]


# ----------------------------------------------------------------------------------------------------
# Compiled


def assert_same_step(compiled: Llama, eager: Llama, rel: float, grad_rel: float, grad_abs: float) -> None:
    """Compares training and evaluation, with and without document masks."""
    rows = packed()[:2], packed()
    with torch.no_grad():
        evaluated = compiled(*rows[0])
    (found, gradients), (expected, wanted) = step(compiled, rows), step(eager, rows)
    for loss, other in zip((evaluated, *found), (expected[0], *expected), strict=True):
        torch.testing.assert_close(loss, other, rtol=rel, atol=0)
    assert gradients.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(gradients[name], value, rtol=grad_rel, atol=grad_abs, msg=name)


@pytest.mark.parametrize("case", [
    "cola train.activation_checkpointing=latent",
    *(pytest.param(case, marks=pytest.mark.full) for case in (
        f"lost backbone.rank=8 {MANY}", "cola_lax backbone.gate=tensor train.activation_checkpointing=latent",
        f"cola {SHAPED} train.activation_checkpointing=latent", f"lax {SHAPED}",
    )),
])  # fmt: skip
def test_compiled_equals_eager_with_one_graph_per_block_kind(case, monkeypatch):
    """In float64, where reordered operations do not show. Dynamo gives up beyond eight graphs of a function."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    eager = disturbed(small(*case.split(), layers=4))
    compiled = copy.deepcopy(eager)
    compiled.compile_()
    assert_same_step(compiled, eager, 1e-12, 1e-10, 1e-11)
    kinds = 2 if "lax" in case else 1  # of blocks: the first has no gate
    graphs = counter.frame_count
    assert graphs == 3 * kinds + 4  # evaluation, training and documents; the last norm and the loss twice
    ids, targets, numbers = packed()
    compiled(ids, targets, torch.zeros_like(numbers))
    assert counter.frame_count == graphs  # other documents, the same graphs


@pytest.mark.full
@pytest.mark.parametrize("case", ["cola", f"lost backbone.rank=8 {MANY}", "cola_lax", "lora", "sltrain"])
def test_inductor_equals_eager(case):
    eager = disturbed(small(*case.split()), torch.float32)
    compiled = copy.deepcopy(eager)
    compiled.compile_()
    assert_same_step(compiled, eager, 1e-5, 1e-3, 1e-5)


# ----------------------------------------------------------------------------------------------------
# Today's shapes: grouped queries, heads of any width, rotary bases and tied embeddings


@pytest.mark.parametrize("shape", [TODAYS, ("scale.head_dim=10",), (*TODAYS[:2], "scale.rope_theta=1e6")], ids=str)
def test_the_full_model_is_transformers_own_in_float64(shape):
    """To the rounding of its tables of angles, which are in fp32."""
    cfg = small("full", *shape, "precision=fp32")
    model, (ids, targets) = disturbed(cfg), padded()
    theirs = LlamaForCausalLM(LlamaConfig(**model_config(cfg, VOCAB, torch.float64), attn_implementation="eager"))
    theirs.double().load_state_dict(weights(model), strict=False)
    tied = theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert tied == cfg.scale.tie_embeddings == ("lm_head.weight" not in weights(model))
    logits = theirs(input_ids=ids).logits
    torch.testing.assert_close(model.logits(ids), logits, rtol=1e-6, atol=1e-6)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    _, gradients = step(model, (padded(),))
    assert gradients.keys() == dict(theirs.named_parameters()).keys()
    for name, p in theirs.named_parameters():
        assert (gradients[name] - p.grad).abs().max() < 1e-6 * p.grad.abs().max(), name


# ----------------------------------------------------------------------------------------------------
# What a block keeps for its backward pass


def kept_by(act: Callable[[], object], model: nn.Module) -> list[torch.UntypedStorage]:
    """The storages that ``act`` allocates and its result keeps alive, except parameters and buffers."""
    made: list[weakref.ref] = []
    with Operations(lambda _, tensors: made.extend(weakref.ref(t.untyped_storage()) for t in tensors)):
        result = act()
    gc.collect()
    alive = {storage._cdata: storage for ref in made if (storage := ref()) is not None}
    del result
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    return [storage for of, storage in alive.items() if of not in own]


def kept(model: Llama, positions: int = 32) -> float:
    """Values per position that are alive between the forward and the backward pass."""
    storages = kept_by(lambda: model.model(torch.randint(0, VOCAB, (2, positions // 2))), model)
    return sum(storage.nbytes() for storage in storages) / positions / 4  # fp32


@pytest.mark.parametrize(("variant", "latent", "block"), [  # r = 8, d = 32
    ("cola", 7 * 8 + 32, 32),
    pytest.param("lost backbone.rank=8 backbone.sparsity=0.2", 7 * 8 + 32, 32, marks=pytest.mark.full),
    ("cola_lax", 14 * 8 + 32, 7 * 8 + 32),  # crossing latents are also inputs of a block
])  # fmt: skip
def test_a_block_keeps_latents_and_the_residual_stream(variant, latent, block):
    """Measured as the difference of one block, to leave out what the whole model keeps."""

    def by_a_block(mode: str) -> float:
        configurations = (with_checkpointing(small(*variant.split(), layers=layers), mode) for layers in (3, 2))
        more, fewer = (kept(build_model(cfg, VOCAB, CPU)) for cfg in configurations)
        return more - fewer

    assert (by_a_block("latent"), by_a_block("block")) == (latent, block)
    assert by_a_block("none") > 6 * latent


@pytest.mark.parametrize("shape", [(64, 64, 64, 64), (64, 91, 64, 128), (91, 64, 128, 64)])
def test_sltrain_keeps_no_dense_matrix(shape):
    d_in, d_out, pad_in, pad_out = shape
    options = sltrain.Options(name="sltrain", rank=8, alpha=8.0, sparsity=0.05)
    layer = sltrain.Sltrain(Spec(("one", "other"), d_in, d_out, pad_in, pad_out, block=0), options)
    x = torch.randn(3, pad_in, requires_grad=True)
    assert [storage.nbytes() for storage in kept_by(lambda: layer.expand(x), layer)] == [2 * 4 * 3 * pad_out]


# ----------------------------------------------------------------------------------------------------
# Documents that share a row


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
