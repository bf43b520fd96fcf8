"""What a block keeps for its backward pass. ``test_models`` shows that no checkpointing mode changes a bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dlr_pretrain.models import Llama, build_model, sltrain
from dlr_pretrain.models.layer import Spec
from tests.parity.reference import CPU, VOCAB, Operations, small, with_checkpointing


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
    ("lost backbone.rank=8 backbone.sparsity=0.2", 7 * 8 + 32, 32),
    ("cola", 7 * 8 + 32, 32),
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
