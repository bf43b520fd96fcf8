"""The exported layers in a training loop of somebody else's: gradients, copies, and what they refuse."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from safetensors.torch import save_file
from test_export import KNOBS, ROWS, config, trained

from dlr_pretrain.deploy.export import exported_layers, model_config

pytest.importorskip("transformers")
from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM, LowRankLlamaModel

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
    (crossing,) = {block.crossing for block in model.model.layers}
    assert crossing.latents == [] and crossing not in {block.crossing for block in other.model.layers}
    held = [m for m in model.modules() if hasattr(m, "received")]
    assert len(held) == 21 and all(m.received is None and m.latent is None for m in held)
    model(input_ids=ids[:1, :3])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, first) and torch.equal(other(input_ids=ids).logits, first)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["cola", *CROSSED])
def test_gradient_checkpointing_changes_no_gradient(kind, reentrant, ids):
    plain, model = exported(kind).train(), exported(kind).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    runs = []
    model.model.layers[1].mlp.down_proj.b.register_forward_hook(lambda *_: runs.append(1))
    for m in (plain, model):
        m(input_ids=ids).logits.square().sum().backward()
    assert len(runs) == 2 or not reentrant  # the other kind stops its second run as soon as it has what it needs
    for name, p in model.named_parameters():
        wanted = plain.get_parameter(name).grad
        assert wanted.any() and (p.grad - wanted).abs().max() <= 1e-6 * wanted.abs().max(), name
    assert all(m.received is None and m.latent is None for m in model.modules() if hasattr(m, "received"))


@pytest.mark.parametrize("kind", ["cola", "lax"])
def test_hidden_states_are_those_of_the_blocks(kind, ids):
    model = exported(kind)
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == 4 and all(state.shape == (2, 12, 32) for state in states)
    torch.testing.assert_close(states[-1], model.model(input_ids=ids).last_hidden_state)
    assert not torch.equal(states[1], states[2])


def test_a_block_without_the_block_before_it_is_refused(ids):
    model = exported("lax")
    model.model.layers = model.model.layers[1:]
    with pytest.raises(RuntimeError, match="without the block before it"):
        model(input_ids=ids)


@pytest.mark.parametrize(("spoil", "message"), [
    (lambda t: t.pop("model.norm.weight"), r"model.norm.weight \(missing\)"),
    (lambda t: t.update(extra=torch.ones(1)), r"extra \(unexpected\)"),
    (lambda t: t.update({"model.layers.0.mlp.up_proj.b.dlr_mark": torch.ones(2)}), "a residual that was not folded"),
])  # fmt: skip
def test_weights_of_another_model_are_refused_by_name(tmp_path, spoil, message):
    model = exported("cola")
    model.save_pretrained(tmp_path)
    tensors = model.state_dict()
    spoil(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        LowRankLlamaForCausalLM.from_pretrained(tmp_path)


def test_what_dataparallel_makes_of_a_crossing_model_is_refused(ids):
    model = exported("lax")
    for module in model.modules():
        module._is_replica = True
    with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
        model(input_ids=ids)


@pytest.mark.parametrize("inside", ["self_attn", "mlp"])  # of a block, or between two
def test_a_second_thread_in_a_crossing_model_is_refused_and_disturbs_nothing(inside, ids):
    """Latents of one would reach the other."""
    model = exported("cola_lax")
    alone, said = model(input_ids=ids).logits, []

    def other() -> None:
        try:
            model(input_ids=ids[:1])
        except RuntimeError as error:
            said.append(str(error))

    def interrupted(*_) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    hook = getattr(model.model.layers[1], inside).register_forward_hook(interrupted)
    assert torch.equal(model(input_ids=ids).logits, alone)
    hook.remove()
    assert len(said) == 1 and "another thread runs this model" in said[0]
    interrupted()  # taking turns is no harm
    assert len(said) == 1 and torch.equal(model(input_ids=ids).logits, alone)


def test_latents_that_another_thread_has_sent_are_refused(ids):
    """Where both are between two blocks."""
    model = exported("lax")
    (crossing,) = {block.crossing for block in model.model.layers}
    take = crossing.take

    def overtaken():
        if crossing.running:
            crossing.leave()
            thread = threading.Thread(target=model.model.layers[0], args=first[0], kwargs=first[1])
            thread.start()
            thread.join()
        return take()

    first = []
    model.model.layers[0].register_forward_pre_hook(
        lambda _, given, named: first.extend((given, named)), with_kwargs=True
    )
    crossing.take = overtaken
    with pytest.raises(RuntimeError, match="another thread runs this model"):
        model(input_ids=ids)


@pytest.mark.parametrize("kind", [kind for kind in KNOBS if kind != "full"])
def test_the_model_without_its_head_has_all_weights_or_says_what_is_missing(kind, tmp_path, ids):
    model = exported(kind).eval()
    model.save_pretrained(tmp_path)
    body, report = LowRankLlamaModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"]
    with torch.no_grad():
        assert torch.equal(body(input_ids=ids).last_hidden_state, model.model(input_ids=ids).last_hidden_state)
    tensors = model.state_dict()
    del tensors["model.layers.1.mlp.up_proj.a.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"not those of LowRankLlamaModel: .*layers\.1\.mlp\.up_proj\.a\.weight \(missing\)"
    ):
        LowRankLlamaModel.from_pretrained(tmp_path)


def test_every_knob_of_an_exported_layer_is_in_its_configuration():
    layers, knobs = exported_layers()
    assert layers == {"lowrank", "cola", "lost", "lax", "cola_lax"}
    for kind in KNOBS:
        named = model_config(config(kind), ROWS, torch.float32)
        assert named.keys() >= KNOBS[kind].keys() & knobs
        assert KNOBS[kind].keys() - knobs <= {"swiglu_silu"}
