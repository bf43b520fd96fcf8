"""Exported folders under the Trainer of transformers and of TRL, spread over devices, and in a pipeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.models import exported, tokenizer_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason='accelerate is not installed: pip install -e ".[sft]"')

BACKBONES = {
    "full": (),
    "lowrank": ("backbone.rank=8",),
    "cola": ("backbone.rank=8",),
    "lost": ("backbone.rank=8", "backbone.sparsity=0.1"),
    "lax": ("backbone.rank=8",),
    "cola_lax": ("backbone.rank=8", "backbone.gate=tensor"),
}
TEXTS = [
    "the house stands on a hill above the river",
    "a thin matrix and a thin matrix make a wide one",
    "what was copied is folded when the training ends",
    "the river runs below the house and the hill",
] * 3


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    root, scratch = tmp_path_factory.mktemp("folders"), tmp_path_factory.mktemp("scratch")
    spiece = tokenizer_of(scratch, TEXTS)
    for name, knobs in BACKBONES.items():
        exported(root / name, spiece, f"backbone={name}", *knobs, rows=90)
    (root / "texts.json").write_text(json.dumps(TEXTS))
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("foreign_training.py")
    command = [sys.executable, str(script), str(root), str(scratch / "answers.json")]
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((scratch / "answers.json").read_text())


@pytest.mark.parametrize("backbone", BACKBONES)
def test_transformers_trains_every_backbone_with_and_without_checkpointing(found, backbone):
    plain, checkpointing = found[backbone]["plain"], found[backbone]["checkpointing"]
    assert len(plain["losses"]) == 12 and plain["losses"][-1] < 0.8 * plain["losses"][0]
    assert checkpointing["losses"] == pytest.approx(plain["losses"], rel=1e-4)
    assert plain["reloaded"] and checkpointing["reloaded"]
    assert found["imported"] == []


@pytest.mark.parametrize("backbone", BACKBONES)
def test_trl_tunes_with_its_defaults_and_ends_each_text(found, backbone):
    pytest.importorskip("trl", reason='trl is not installed: pip install -e ".[test]"')
    tuned = found[backbone]["trl"]
    assert tuned["checkpointing"]  # TRL's default
    assert tuned["losses"][-1] < 0.8 * tuned["losses"][0]
    assert tuned["rows"] == [[*ids, 1] for ids in tuned["plain"]]


@pytest.mark.parametrize("backbone", BACKBONES)
def test_a_model_is_spread_over_devices_and_speaks_in_a_pipeline(found, backbone):
    facts = found[backbone]["loaded"]
    if "refused" in facts:
        assert backbone == "lost" and facts["version"] < "5" and "channels of lost" in facts["refused"]
        return
    assert facts["spread"] < 1e-4 and facts["auto"] < 1e-4 and facts["on_disk"] > 0 and facts["spread_text"]
    assert facts["pipeline"] == facts["wanted"]
