"""The exported layers work in any training loop: gradients, copies, threads and parallel plans."""

import copy
import threading

import pytest
import torch
from torch import nn

from dlr_pretrain.deploy import modeling_lowrank_llama as modeling
from dlr_pretrain.deploy.export import model_config
from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM, LowRankLlamaModel
from dlr_pretrain.models.adapter import split
from tests.conftest import on_ranks
from tests.deploy.models import KINDS, of_kind, trained
from tests.parity.reference import weights

ROWS = 60
FACTORISED = [kind for kind in KINDS if kind != "full"]
CROSSED = ("lax", "lax-dense", "cola_lax")


def exported(kind: str) -> LowRankLlamaForCausalLM:
    model = LowRankLlamaForCausalLM(LowRankLlamaConfig(**model_config(of_kind(kind), ROWS, torch.float32)))
    ours = trained(of_kind(kind), ROWS)
    model.load_state_dict(weights(ours))
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(3, ROWS, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", FACTORISED)
def test_gradients_are_those_of_the_trained_model(kind, ids):
    plain, saving, ours = exported(kind).train(), exported(kind).train(), trained(of_kind(kind), ROWS)
    saving.gradient_checkpointing_enable({"use_reentrant": True} if kind == "lax" else None)  # True is overridden
    runs = []
    saving.model.layers[1].mlp.gate_proj.b.register_forward_hook(lambda *_: runs.append(1))
    for logits in (plain(input_ids=ids).logits, saving(input_ids=ids).logits, ours.logits(ids)):
        logits.square().sum().backward()
    gradients = split(ours, {name: p.grad for name, p in ours.named_parameters()})
    assert len(runs) == 2 and dict(plain.named_parameters()).keys() == gradients.keys()
    for name, gradient in gradients.items():
        found, again = plain.get_parameter(name).grad, saving.get_parameter(name).grad
        assert gradient.any()
        assert (found - gradient).abs().max() < 1e-4 * gradient.abs().max(), name  # fp32
        assert (again - found).abs().max() <= 1e-6 * found.abs().max(), name


@pytest.mark.parametrize("kind", CROSSED)
def test_calls_copies_and_threads_share_no_latent(kind, ids):
    """Another thread's call begins between two layers of a block, and waits there until the first call has ended."""
    model = exported(kind).eval().requires_grad_(False)
    other, alone, inside = copy.deepcopy(model), model(input_ids=ids).logits, []
    short = model(input_ids=ids[:1, :3]).logits
    thread = threading.Thread(target=lambda: inside.append(model(input_ids=ids[:1, :3]).logits))
    waits, ended = threading.Event(), threading.Event()

    def between_layers(*_) -> None:
        if threading.current_thread() is thread:
            waits.set()
            ended.wait(600)
        else:
            thread.start()
            assert waits.wait(600)

    hook = model.model.layers[1].mlp.gate_proj.register_forward_hook(between_layers)
    try:
        found = model(input_ids=ids).logits
    finally:
        ended.set()
        thread.join()
        hook.remove()
    assert torch.equal(found, alone) and torch.equal(inside[0], short)
    assert torch.equal(other(input_ids=ids).logits, alone)


@pytest.mark.parametrize("kind", FACTORISED)
def test_an_empty_model_is_initialised(kind):
    """FSDP and meta devices make models empty. The buffer of lost is initialised as well."""
    made = LowRankLlamaModel(exported(kind).config)
    with torch.device("meta"):
        model = LowRankLlamaModel(made.config)
    model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False  # transformers 4 would skip the modules
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
def test_classification_heads_share_the_body(head, tmp_path, ids):
    model = exported("cola_lax").eval()
    model.save_pretrained(tmp_path)
    given = {"num_labels": 5, "output_loading_info": True, "pad_token_id": 0}
    classifier, report = getattr(modeling, head).from_pretrained(tmp_path, **given)
    assert {name.split(".")[0] for name in report["missing_keys"]} == {"score"}
    classifier.score, classifier.num_labels = nn.Identity(), 32
    wanted = model.model(input_ids=ids).last_hidden_state
    found = classifier.eval()(input_ids=ids).logits
    torch.testing.assert_close(found, wanted if "Token" in head else wanted[:, -1])


@pytest.mark.full
@pytest.mark.parametrize("kind", FACTORISED)
def test_two_ranks_split_a_model_by_its_plan(kind, tmp_path, ids):
    settings = model_config(of_kind(kind), ROWS, torch.float32) | {"intermediate_size": 84}
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


def test_a_pipeline_plan_exists_only_without_latents():
    assert exported("cola").config.base_model_pp_plan and exported("cola_lax").config.base_model_pp_plan is None
