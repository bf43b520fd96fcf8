"""The exported layers in a training loop of somebody else's: gradients, copies, threads, and parallel plans."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import transformers
from test_export import KNOBS, ROWS, config, trained
from torch import nn

from dlr_pretrain.deploy import modeling_lowrank_llama as modeling
from dlr_pretrain.deploy.export import exported_layers, model_config
from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM, LowRankLlamaModel
from tests.conftest import on_ranks

FACTORISED = [kind for kind in KNOBS if kind != "full"]
CROSSED = ("lax", "lax-dense", "cola_lax")


def exported(kind: str, head: type = LowRankLlamaForCausalLM) -> LowRankLlamaForCausalLM:
    model = head(LowRankLlamaConfig(**model_config(config(kind), ROWS, torch.float32), pad_token_id=0))
    model.load_state_dict(trained(kind).state_dict(), strict=head is LowRankLlamaForCausalLM)
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, ROWS, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", FACTORISED)
def test_gradients_are_those_of_the_trained_model(kind, ids):
    theirs, ours = exported(kind), trained(kind)
    for logits in (theirs(input_ids=ids).logits, ours.logits(ids)):
        logits.square().sum().backward()
    found, wanted = (dict(model.named_parameters()) for model in (theirs, ours))
    assert found.keys() == wanted.keys()
    for name, p in wanted.items():
        assert p.grad.any()
        assert (found[name].grad - p.grad).abs().max() < 1e-4 * p.grad.abs().max(), name  # fp32


@pytest.mark.parametrize("kind", ["cola", *CROSSED])
def test_gradient_checkpointing_changes_no_gradient(kind, ids):
    plain, model = exported(kind).train(), exported(kind).train()
    model.gradient_checkpointing_enable({"use_reentrant": True} if kind == "lax" else None)  # it takes False
    runs = []
    model.model.layers[1].mlp.gate_proj.b.register_forward_hook(lambda *_: runs.append(1))
    for m in (plain, model):
        m(input_ids=ids).logits.square().sum().backward()
    assert len(runs) == 2
    for name, p in model.named_parameters():
        wanted = plain.get_parameter(name).grad
        assert wanted.any() and (p.grad - wanted).abs().max() <= 1e-6 * wanted.abs().max(), name


@pytest.mark.parametrize("kind", CROSSED)
def test_calls_copies_and_threads_share_no_latent(kind, ids):
    """A second call begins and ends inside a block of the first, in another thread."""
    model = exported(kind).eval().requires_grad_(False)
    other, alone, inside = copy.deepcopy(model), model(input_ids=ids).logits, []
    short = model(input_ids=ids[:1, :3]).logits

    def interrupted(*_) -> None:
        thread = threading.Thread(target=lambda: inside.append(called()))
        hook.remove()
        thread.start()
        thread.join()

    def called() -> torch.Tensor:
        return model(input_ids=ids[:1, :3]).logits

    hook = model.model.layers[1].mlp.register_forward_hook(interrupted)
    assert torch.equal(model(input_ids=ids).logits, alone) and torch.equal(inside[0], short)
    assert torch.equal(other(input_ids=ids).logits, alone)


@pytest.mark.parametrize("kind", ["cola", "lax"])
def test_a_hook_on_a_block_sees_its_hidden_states(kind, ids):
    model, seen = exported(kind), []
    for block in model.model.layers:
        block.register_forward_hook(lambda _, __, output: seen.append(output))
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == 4 and all(state.shape == (2, 12, 32) for state in (*states, *seen))
    assert all(torch.equal(*pair) for pair in zip(states[1:-1], seen, strict=False))
    torch.testing.assert_close(states[-1], model.model(input_ids=ids).last_hidden_state)


@pytest.mark.parametrize("kind", FACTORISED)
def test_a_model_that_was_made_empty_starts_anew(kind):
    """As FSDP and meta devices do it; also the buffer of lost, which would be raw memory."""
    made = LowRankLlamaModel(exported(kind).config)
    with torch.device("meta"):
        model = LowRankLlamaModel(made.config)
    model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False  # transformers 4 would leave the modules alone
    for tensor in model.state_dict().values():
        tensor.fill_(77)
    model.init_weights()
    for name, tensor in model.state_dict().items():
        fresh = made.state_dict()[name]
        if tensor.is_floating_point():
            assert tensor.max() < 10 and (fresh.std(correction=0) > 0) == (tensor.std(correction=0) > 0), name
        else:
            assert torch.equal(tensor, fresh), name


@pytest.mark.parametrize("head", ["LowRankLlamaForSequenceClassification", "LowRankLlamaForTokenClassification"])
def test_heads_of_classification_share_the_body(head, tmp_path, ids):
    model = exported("cola_lax")
    model.save_pretrained(tmp_path)
    classes = getattr(modeling, head)
    classifier, report = classes.from_pretrained(tmp_path, num_labels=5, output_loading_info=True)
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"score"}
    model.model.eval()
    classifier.score = nn.Identity()
    classifier.num_labels = 32
    found = classifier.eval()(input_ids=ids).logits
    wanted = model.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, wanted if "Token" in head else wanted[:, -1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in FACTORISED if kind != "lax"])
def test_two_ranks_divide_a_model_by_its_plan(kind, tmp_path, ids):
    """The norm of lax in KNOBS is that of the output: such a model has no plan."""
    if kind == "cola-learned" and transformers.__version__ < "5":
        pytest.skip("transformers 4 divides no model that has a scalar")
    settings = model_config(config(kind), ROWS, torch.float32) | {"intermediate_size": 84}
    model = LowRankLlamaForCausalLM(LowRankLlamaConfig(**settings)).eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits

    def divided() -> None:
        shared = LowRankLlamaForCausalLM.from_pretrained(tmp_path, tp_plan="auto")
        b = shared.model.layers[1].mlp.up_proj.b.weight
        assert (b.to_local() if hasattr(b, "to_local") else b).shape[0] == 42
        with torch.no_grad():
            found = shared(input_ids=ids).logits
        assert (found - wanted).abs().max() < 1e-5 * wanted.std()

    on_ranks(divided, 2)


def test_stages_of_a_pipeline_are_offered_only_where_no_latent_crosses():
    assert exported("cola").config.base_model_pp_plan and exported("lax").config.base_model_pp_plan is None
    assert exported("lax").config.base_model_tp_plan is None  # norm=output


def test_every_knob_of_an_exported_layer_is_in_its_configuration():
    layers, knobs = exported_layers()
    assert layers == set(modeling.LAYERS) == {"lowrank", "cola", "lost", "lax", "cola_lax"}
    for kind in KNOBS:
        named = model_config(config(kind), ROWS, torch.float32)
        assert named.keys() >= KNOBS[kind].keys() & knobs
        assert KNOBS[kind].keys() - knobs <= {"swiglu_silu"}
