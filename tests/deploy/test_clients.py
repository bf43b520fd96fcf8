"""Other tools work with an exported folder and its own modeling file: one case for each tool and backbone."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from tests.deploy.models import exported, of_kind, tokenizer_of

pytestmark = pytest.mark.exhaustive
BACKBONES = ("full", "lowrank", "cola", "lost", "lax", "cola_lax")
TEXTS = [
    "the house stands on a hill above the river",
    "a thin matrix and a thin matrix make a wide one",
    "what was copied is folded when the training ends",
    "the river runs below the house and the hill",
] * 3
TRAINING = {"per_device_train_batch_size": 4, "max_steps": 12, "learning_rate": 1e-2, "logging_steps": 1, "seed": 1,
            "save_strategy": "no", "report_to": "none", "use_cpu": True, "bf16": False, "lr_scheduler_type": "constant",
            "gradient_checkpointing": True}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    spiece = tokenizer_of(root / "spiece", TEXTS)
    for name in BACKBONES:
        exported(root / name, spiece, of_kind(name), rows=96)
    return root


def load(folder: Path, **given):
    given = {"dtype": torch.float32, **given}
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **given).eval()


def ids_of(folder: Path) -> torch.Tensor:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=True)(TEXTS[:1], return_tensors="pt").input_ids


def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def trl_dpo(folder: Path, tmp_path: Path) -> None:
    from trl import DPOConfig, DPOTrainer

    rows, model = [{"prompt": "the house", "chosen": text, "rejected": "a wide one"} for text in TEXTS], load(folder)
    trainer = DPOTrainer(
        model,
        ref_model=load(folder),  # TRL would load it without trust_remote_code
        args=DPOConfig(str(tmp_path), **TRAINING),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder, trust_remote_code=True),
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 12 and losses[-1] < 0.8 * losses[0]
    trainer.save_model(str(tmp_path / "trained"))
    assert torch.equal(logits(load(tmp_path / "trained"), ids_of(folder)), logits(model.eval(), ids_of(folder)))


def peft(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, ids = load(folder), ids_of(folder)
    wanted = logits(model, ids)
    factors = ["q_proj", "down_proj"] if folder.name == "full" else ["a", "b"]
    for targets in ("all-linear", factors):
        adapted = peft.get_peft_model(load(folder), peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        torch.testing.assert_close(logits(adapted, ids), wanted)
        adapted(input_ids=ids, labels=ids).loss.backward()
        trained = [name for name, p in adapted.named_parameters() if p.grad is not None]
        assert trained and all("lora_" in name for name in trained)
        assert adapted.merge_and_unload().state_dict().keys() == model.state_dict().keys()
    if folder.name != "full":
        with pytest.raises(ValueError):
            peft.get_peft_model(load(folder), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))


def torchao_int8(folder: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model, ids = load(folder), ids_of(folder)
    wanted = logits(model, ids)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    assert (logits(model, ids) - wanted).abs().max() < 0.3 * wanted.std()


def bitsandbytes_int8(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    wanted, ids = logits(load(folder), ids_of(folder)), ids_of(folder)
    found = load(folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True), device_map="cpu")
    assert (logits(found, ids) - wanted).abs().max() < 0.5 * wanted.std()


def lm_eval_command(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    files = {"data_files": {"test": str(tmp_path / "rows.json")}}
    task = {"task": "hills", "dataset_path": "json", "dataset_kwargs": files,
            "test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": 0, "doc_to_choice": [" hill", " river"],
            "output_type": "multiple_choice"}  # fmt: skip
    (tmp_path / "hills.yaml").write_text(json.dumps(task))
    (tmp_path / "rows.json").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", "hills", "--include_path", str(tmp_path)]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--device", "cpu"]
    done = subprocess.run([*command, "--output_path", str(tmp_path / "out")], capture_output=True, text=True)
    assert done.returncode == 0 and "hills" in done.stdout, done.stderr[-2000:]


def spread_over_devices(folder: Path, tmp_path: Path) -> None:
    """Blocks are offloaded to the disk, as for a model too large for its devices; a pipeline generates the same."""
    if folder.name == "lost" and transformers.__version__ < "5":
        pytest.skip("transformers 4 does not read the channels of lost from the disk")
    ids = ids_of(folder)
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(3)}
    plain, spread = load(folder), load(folder, device_map=places, offload_folder=str(tmp_path / "offloaded"))
    assert sum(p.device.type == "meta" for p in spread.parameters()) > 0
    assert (logits(spread, ids) - logits(plain, ids)).abs().max() < 1e-4
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    wanted = plain.generate(ids, **greedy)[0]
    assert torch.equal(spread.generate(ids, **greedy)[0], wanted)
    speaks = pipeline("text-generation", model=str(folder), trust_remote_code=True, device="cpu")
    assert speaks(TEXTS[0], return_tensors=True, **greedy)[0]["generated_token_ids"] == wanted.tolist()


def vllm_requirements(folder: Path, tmp_path: Path) -> None:
    """vLLM's Transformers backend requires the attention interface, which receives the model's kwargs; a plan for
    tensor parallelism that names linear layers; a body in ``auto_map``; and only buffers that a checkpoint or the
    configuration sets."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, seen = load(folder), []
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def listening(module, query, key, value, attention_mask, **kwargs):
        seen.append((module.layer_idx, kwargs["instances"]))
        return attend(module, query, key, value, attention_mask, **{**kwargs, "instances": None})

    ALL_ATTENTION_FUNCTIONS.register("listening", listening)
    model.config._attn_implementation = "listening"
    model.model(input_ids=ids_of(folder), instances="given", use_cache=False)
    assert seen == [(i, "given") for i in range(3)] and model._supports_attention_backend
    assert all(module.is_causal for name, module in model.named_modules() if name.endswith("self_attn"))
    assert any(p.kind == p.VAR_KEYWORD for p in inspect.signature(type(model.model).forward).parameters.values())
    plan = model.config.base_model_tp_plan or {}
    assert plan or folder.name == "full"
    for name in plan:
        assert isinstance(model.model.get_submodule(name.replace("*", "1")), nn.Linear)
    assert folder.name == "full" or "AutoModel" in json.loads((folder / "config.json").read_text())["auto_map"]
    buffers = {name.split(".")[-1] for name, _ in model.named_buffers()}
    assert buffers <= {"inv_freq", "original_inv_freq", *(["channels"] if folder.name == "lost" else [])}


CLIENTS = (trl_dpo, peft, torchao_int8, bitsandbytes_int8, lm_eval_command, spread_over_devices, vllm_requirements)


@pytest.mark.parametrize("backbone", BACKBONES)
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_client_takes_the_folder(client, backbone, folders, tmp_path):
    client(folders / backbone, tmp_path)
