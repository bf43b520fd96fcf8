"""What a block keeps between its forward and its backward pass. That no mode changes a bit is in ``test_models``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.linear import GroupSpec, SeededInit
from dlr_pretrain.models.sltrain import Sltrain
from tests.parity.reference import CPU, VOCAB, Operations, small


def kept_by(act: Callable[[], object]) -> list[torch.UntypedStorage]:
    """The storages that ``act`` has made and that its result keeps alive."""
    made: list[weakref.ref] = []
    with Operations(lambda _, tensors: made.extend(weakref.ref(t.untyped_storage()) for t in tensors)):
        result = act()
    gc.collect()
    alive = [storage for ref in made if (storage := ref()) is not None]
    del result
    return list({storage._cdata: storage for storage in alive}.values())


def kept(model: Llama, positions: int = 32) -> float:
    """Values a position that are alive between the forward and the backward pass, without parameters and buffers."""
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    storages = kept_by(lambda: model.hidden(torch.randint(0, VOCAB, (2, positions // 2))))
    return sum(storage.nbytes() for storage in storages if storage._cdata not in own) / positions / 4  # fp32


@pytest.mark.parametrize(("variant", "latent", "block"), [  # r = 8, d = 32
    ("lost backbone.rank=8 backbone.sparsity=0.2", 7 * 8 + 32, 32),
    ("cola dlr=on dlr.impl=branch", 7 * 8 + 32, 32),
    # latents cross, and are inputs of a block too
    ("cola_lax", 14 * 8 + 32, 7 * 8 + 32),
])  # fmt: skip
def test_a_block_keeps_its_latents_and_the_residual_stream(variant, latent, block):
    """From one block more, so that what the whole model keeps does not count."""

    def by_a_block(mode: str) -> float:
        words = (*variant.split(), f"train.activation_checkpointing={mode}")
        more, fewer = (kept(build(small(*words, layers=layers), VOCAB, CPU)) for layers in (4, 3))
        return more - fewer

    assert (by_a_block("latent"), by_a_block("block")) == (latent, block)
    assert by_a_block("none") > 6 * latent


@pytest.mark.parametrize("shape", [(64, 64, 64, 64), (64, 91, 64, 128), (91, 64, 128, 64)])
def test_sltrain_keeps_no_dense_matrix(shape):
    knobs, (d_in, d_out, pad_in, pad_out) = {"rank": 8, "alpha": 8.0, "sparsity": 0.05}, shape
    spec = GroupSpec(("one", "other"), d_in, d_out, pad_in, pad_out, block=0)
    group = Sltrain(spec, knobs, grouped=True)
    group.init_(SeededInit(0), "")
    x = torch.randn(3, pad_in, requires_grad=True)
    assert [storage.nbytes() for storage in kept_by(lambda: group.expand(x))] == [4 * 3 * pad_out] * 2
