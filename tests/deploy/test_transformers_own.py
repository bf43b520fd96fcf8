"""The exported classes pass every one of transformers' common model tests that its LLaMA passes.

These are in ``tests/test_modeling_common.py`` of the installed version's source distribution, or of the checkout that
DLR_TRANSFORMERS_SOURCE names, which also has the tests of generation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import transformers

from tests.conftest import ROOT

pytestmark = pytest.mark.exhaustive
BACKBONES = ("lowrank", "cola", "lost", "lax", "cola_lax")
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


@pytest.mark.parametrize("backbone", BACKBONES)
def test_nothing_fails_that_passes_with_llama(package, llama, backbone):
    failed, passed = failures(package, backbone)
    print(f"{backbone}: {passed} pass, {len(failed)} fail; llama: {llama[1]} pass, these fail: {sorted(llama[0])}")
    assert failed <= llama[0], sorted(failed - llama[0])
