"""Activation checkpointing: the same gradients from what each mode keeps, eager and compiled."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlr_pretrain.models import Llama, active, build
from tests.parity.reference import VOCAB, small

CPU = torch.device("cpu")
LOST = "lost backbone.rank=8 backbone.sparsity=0.2"
TEXT = "cola_lax backbone.norm=output backbone.crossing=post_act backbone.recursive=false"
DENSE = "lax backbone.gate=dense"
VARIANTS = ("cola", LOST, DENSE, TEXT)


def model(variant: str, mode: str, *overrides: str, layers: int = 3) -> Llama:
    cfg = small(*variant.split(), f"train.activation_checkpointing={mode}", *overrides, layers=layers)
    return build(cfg, VOCAB, CPU)


def step(model: Llama) -> dict[str, torch.Tensor]:
    """The loss and every gradient."""
    with active(model):
        loss = model(*torch.randint(0, VOCAB, (2, 3, 12), generator=torch.Generator().manual_seed(0)))
        loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_keeping_everything_bit_for_bit(variant):
    expected = step(model(variant, "none", "dlr=on"))
    for mode in ("latent", "block"):
        for name, value in step(model(variant, mode, "dlr=on")).items():
            assert torch.equal(value, expected[name]), (mode, name)


class Watch(TorchDispatchMode):
    """Remembers, weakly, every storage that is made."""

    def __init__(self):
        super().__init__()
        self.storages: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                self.storages[storage._cdata] = weakref.ref(storage)
        return result


def kept(model: Llama, positions: int = 32) -> float:
    """Values a position that are alive between the forward and the backward pass, without parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    own = {t.untyped_storage()._cdata for t in tensors}
    with Watch() as watch:
        x = model.hidden(torch.randint(0, VOCAB, (2, positions // 2)))
    gc.collect()
    storages = [ref() for cdata, ref in watch.storages.items() if cdata not in own]
    values = sum(storage.nbytes() for storage in storages if storage is not None) / x.element_size()
    return values / positions


ONE, TWO = (7 * 8 + 32, 32), (14 * 8 + 32, 7 * 8 + 32)  # r = 8, d = 32; with "lax" latents cross, and are inputs too
KEPT = [(LOST, *ONE), (TEXT, *TWO), ("cola dlr=on dlr.impl=branch", *ONE)]


@pytest.mark.parametrize(("variant", "latent", "block"), KEPT)
def test_a_block_keeps_its_latents_and_the_residual_stream(variant, latent, block):
    """From one block more, so that what the whole model keeps does not count."""
    for mode, expected in (("latent", latent), ("block", block)):
        more, fewer = (kept(model(variant, mode, layers=layers)) for layers in (4, 3))
        assert more - fewer == expected
    everything = kept(model(variant, "none", layers=4)) - kept(model(variant, "none", layers=3))
    assert everything > 6 * latent


@pytest.fixture
def compiler(monkeypatch):
    """``torch.compile`` with ahead-of-time autograd and without code generation; counts the graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    torch._dynamo.reset()
    yield counter
    torch._dynamo.reset()


def assert_compute_the_same(compiled, eager) -> None:
    """In training and in evaluation."""
    expected, found = step(eager), step(compiled)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11, msg=name)
    with torch.no_grad(), active(compiled), active(eager):
        ids = torch.randint(0, VOCAB, (3, 12))
        torch.testing.assert_close(compiled(ids, ids), eager(ids, ids), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("variant", "mode"),
    [("cola", "latent"), *(pytest.param(*of, marks=pytest.mark.full) for of in ((LOST, "none"), (TEXT, "latent")))],
)
def test_compiled_equals_eager_with_two_graphs_a_block(variant, mode, compiler):
    """In float64, where what compilation reorders does not show."""
    eager = model(variant, mode, "dlr=on", layers=4).double()
    compiled = copy.deepcopy(eager)
    compiled.compile_()
    assert_compute_the_same(compiled, eager)
    blocks = 2 if "lax" in variant else 1  # kinds of them: the first has no gate
    assert compiler.frame_count == 2 * (blocks + 2)  # and the last norm, and the loss; training and evaluation
