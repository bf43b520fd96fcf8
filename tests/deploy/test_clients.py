"""Other tools work with an exported folder and its own modeling file, which passes transformers' own model tests.

Those that transformers' LLaMA passes, of ``tests/test_modeling_common.py`` of the installed version's source
distribution, or of the checkout that DLR_TRANSFORMERS_SOURCE names, which also has the tests of generation.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import ROOT
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
    from transformers import pipeline

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


# ----------------------------------------------------------------------------------------------------
# transformers' own tests


FACTORISED = ("lowrank", "cola", "lost", "lax", "cola_lax")
LEFT_OUT = {  # parts of their suite that a source distribution lacks
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",
}
CASE = """
import unittest
from unittest import mock

import torch
from dlr_pretrain.deploy import modeling_lowrank_llama as own
from transformers import LlamaConfig
from transformers.models.auto import modeling_auto as auto
from transformers.models.llama import modeling_llama as theirs

from .generation.test_utils import GenerationTesterMixin
from .test_modeling_common import ModelTesterMixin, ids_tensor

KIND = {kind!r}
CONFIG = LlamaConfig if KIND == "llama" else own.LowRankLlamaConfig
HEADS = ("Model", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
CLASSES = tuple(getattr(theirs, "Llama" + h) if KIND == "llama" else getattr(own, "LowRankLlama" + h) for h in HEADS)


for kind, head in zip(("MODEL", "MODEL_FOR_CAUSAL_LM", "MODEL_FOR_SEQUENCE_CLASSIFICATION",
                       "MODEL_FOR_TOKEN_CLASSIFICATION"), HEADS):  # their tests choose inputs by these names
    getattr(auto, kind + "_MAPPING_NAMES")["lowrank_llama"] = "LowRankLlama" + head


class Tester:
    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 3, 7, 32, 2, 2
    is_training, key_length, encoder_seq_length = True, 7, 7
    base_model_class, causal_lm_class, config_class = CLASSES[0], CLASSES[1], CONFIG

    def get_config(self):
        shape = dict(vocab_size=99, hidden_size=32, intermediate_size=36, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
        if KIND == "llama":
            return CONFIG(**shape)
        # the std of the factors, whose product then varies like a dense weight: a test measures the effect of RoPE
        std = (0.02 / 8**0.5) ** 0.5
        return CONFIG(**shape, backbone=KIND, rank=8, sparsity=0.1, initializer_range=std)

    def prepare_config_and_inputs_for_common(self):
        ids = ids_tensor([3, 7], 99).clamp(min=3)
        return self.get_config(), {{"input_ids": ids, "attention_mask": torch.ones_like(ids)}}


class TheirTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes, all_generative_model_classes = CLASSES, CLASSES[1:2]
    pipeline_model_mapping = {{}}
    test_resize_embeddings = True

    def setUp(self):
        self.model_tester = Tester()
        self.config_tester = None
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """Their tests as a package ``theirs``."""
    root = tmp_path_factory.mktemp("own")
    source = os.environ.get("DLR_TRANSFORMERS_SOURCE")
    if source is None:
        wanted = f"transformers=={transformers.__version__}"
        fetch = [sys.executable, "-m", "pip", "download", wanted, "--no-deps", "--no-binary", "transformers"]
        if subprocess.run([*fetch, "-d", str(root)], capture_output=True).returncode:
            pytest.skip(f"the source distribution of {wanted} cannot be downloaded: set DLR_TRANSFORMERS_SOURCE")
        with tarfile.open(next(root.glob("*.tar.gz"))) as packed:
            packed.extractall(root, filter="data")
        source = next(path for path in root.iterdir() if path.is_dir())
    shutil.copytree(Path(source) / "tests", root / "theirs", ignore=shutil.ignore_patterns("models"))
    for name, stub in LEFT_OUT.items():
        file = root / "theirs" / name
        file.parent.mkdir(exist_ok=True)
        if not file.exists():
            file.write_text(stub)
        (file.parent / "__init__.py").touch()
    (root / "theirs" / "__init__.py").touch()
    return root


def failures(package: Path, kind: str) -> tuple[set[str], int]:
    """The names of their tests that fail for ``kind``, and the number that pass."""
    (package / "theirs" / f"test_{kind}.py").write_text(CASE.format(kind=kind))
    environment = os.environ | {"PYTHONPATH": f"{package}:{ROOT}", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", f"theirs/test_{kind}.py", "-q", "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "--tb=line"], cwd=package, env=environment, capture_output=True, text=True)
    passed = int((re.search(r"(\d+) passed", done.stdout) or [0, 0])[1])
    assert passed, done.stdout[-3000:] + done.stderr[-3000:]
    return set(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", done.stdout, flags=re.MULTILINE)), passed


@pytest.fixture(scope="module")
def llama(package) -> tuple[set[str], int]:
    return failures(package, "llama")


@pytest.mark.exhaustive
@pytest.mark.parametrize("backbone", FACTORISED)
def test_nothing_fails_that_passes_with_llama(package, llama, backbone):
    failed, passed = failures(package, backbone)
    print(f"{backbone}: {passed} pass, {len(failed)} fail; llama: {llama[1]} pass, these fail: {sorted(llama[0])}")
    assert failed <= llama[0], sorted(failed - llama[0])
