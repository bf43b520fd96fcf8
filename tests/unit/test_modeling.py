"""The exported layers in a training loop of somebody else's: gradients, copies, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch
from test_export import KNOBS, ROWS, config, trained

from dlr_pretrain.deploy.export import exported_layers, model_config

pytest.importorskip("transformers")
from torch.utils.checkpoint import checkpoint

from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM

CROSSED = ("lax", "lax-dense", "cola_lax")


def exported(kind: str) -> LowRankLlamaForCausalLM:
    settings = model_config(config(kind), ROWS, torch.float32)
    model = LowRankLlamaForCausalLM(LowRankLlamaConfig(**settings))
    model.load_state_dict(trained(kind).state_dict())
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, ROWS, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", [kind for kind in KNOBS if kind != "full"])
def test_gradients_are_those_of_the_trained_model(kind, ids):
    theirs, ours = exported(kind), trained(kind)
    for logits in (theirs(input_ids=ids).logits, ours.logits(ids)):
        logits.square().sum().backward()
    found, wanted = (dict(model.named_parameters()) for model in (theirs, ours))
    assert found.keys() == wanted.keys()
    for name, p in wanted.items():
        assert p.grad.any()
        assert (found[name].grad - p.grad).abs().max() < 1e-4 * p.grad.abs().max(), name  # fp32


@pytest.mark.parametrize("kind", CROSSED)
def test_no_latent_is_left_for_another_call_or_another_copy(kind, ids):
    model = exported(kind)
    other = copy.deepcopy(model)
    first = model(input_ids=ids).logits
    crossings = [m.crossing for m in model.modules() if hasattr(m, "crossing") and hasattr(m.crossing, "latent")]
    assert len(crossings) == 21 and len({id(c) for c in crossings}) == 7
    assert all(c.latent is None for c in crossings)
    assert not {id(c) for c in crossings} & {id(m.crossing) for m in other.modules() if hasattr(m, "crossing")}
    model(input_ids=ids[:1, :3])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, first) and torch.equal(other(input_ids=ids).logits, first)


@pytest.mark.parametrize("kind", ["lax", "cola"])
def test_gradient_checkpointing_works_or_is_refused(kind, ids):
    model = exported(kind).train()
    if kind == "cola":
        model.gradient_checkpointing_enable()
        return model(input_ids=ids).logits.sum().backward()
    with pytest.raises(ValueError, match=r"does not support (gradient|activation) checkpointing"):
        model.gradient_checkpointing_enable()
    block = model.model.layers[1]
    plain = block.forward
    block.forward = lambda x, **kwargs: checkpoint(plain, x, use_reentrant=False, **kwargs)
    with pytest.raises(RuntimeError, match="without the block before it"):
        model(input_ids=ids).logits.sum().backward()


def test_what_dataparallel_makes_of_a_crossing_model_is_refused(ids):
    model = exported("lax")
    for module in model.modules():
        module._is_replica = True
    with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
        model(input_ids=ids)


def test_every_knob_of_an_exported_layer_is_in_its_configuration():
    layers, knobs = exported_layers()
    assert layers == {"lowrank", "cola", "lost", "lax", "cola_lax"}
    for kind in KNOBS:
        named = model_config(config(kind), ROWS, torch.float32)
        assert named.keys() >= KNOBS[kind].keys() & knobs
        assert KNOBS[kind].keys() - knobs <= {"swiglu_silu"}
