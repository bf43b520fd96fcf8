"""Every backbone, trained a little with and without DLR: what a user of transformers gets is what was trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.models import active, build
from dlr_pretrain.models.dlr import marks
from dlr_pretrain.train.run import run
from tests.conftest import ROOT, SMALL, saved

PLAIN = ("full", "lowrank", "cola", "lost", "lax", "cola_lax", "sltrain", "lora", "relora")
WITH_DLR = ("lowrank", "cola", "lost", "lax", "cola_lax")
KINDS = (
    *((name, "off", "fp32") for name in PLAIN),
    *((name, "on", "fp32") for name in WITH_DLR),
    *((name, "on", "bf16") for name in WITH_DLR),
    ("full", "off", "bf16"),
)
BOUND = {"fp32": 1e-5, "bf16": 0.1}  # in units of the logits' standard deviation; measured up to 4e-6 and 0.024
OF_THE_BACKBONE = {
    "lost": ("backbone.sparsity=0.1",),
    "sltrain": ("backbone.sparsity=0.1",),
    "relora": ("backbone.merge_every=2", "backbone.restart_warmup=1"),
}
DENSE = ("full", "sltrain", "lora", "relora")


def title(kind: tuple[str, str, str]) -> str:
    return "-".join(kind)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory) -> dict:
    """The configuration of each run, which is done, by its folder's name; beside it what transformers makes of it."""
    root, scratch = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("scratch")
    folders, configs = root / "folders", {}
    folders.mkdir()
    data = (f"data.root={corpus}", f"tokenizer.path={corpus}/spiece.model", "scale.num_layers=3", "train.steps=4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dlr_pretrain.train.finish.agreement", lambda *_: "not looked at")
        for backbone, dlr, precision in KINDS:
            name = title((backbone, dlr, precision))
            own = (f"backbone={backbone}", f"dlr={dlr}", f"precision={precision}", f"run.dir={root}/{name}")
            special = OF_THE_BACKBONE.get(backbone, ())
            dense = {"scale.rank"} if backbone == "full" else set()
            given = {word.split("=")[0] for word in (*data, *own)} | dense
            words = [word for word in SMALL if word.split("=")[0] not in given]
            configs[name] = load([*words, *data, *own, *special])
            run(configs[name])
            (root / name / "folded").rename(folders / name)
    ids = torch.randint(3, 120, (2, 24), generator=torch.Generator().manual_seed(5))
    torch.save(ids, folders / "ids.pt")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "tests/unit/foreign_checks.py"), str(folders), str(scratch / "answers.pt")]
    done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"ids": ids, "configs": configs, "answers": torch.load(scratch / "answers.pt"), "folders": folders}


def trained_logits(cfg, ids: torch.Tensor) -> torch.Tensor:
    """Those of the last checkpoint's model as it trains: B + beta R^T published into the weights."""
    state = saved(next((ROOT / cfg.run.dir).glob("checkpoints/step_00000004")))
    dtype = torch.bfloat16 if cfg.precision.name == "bf16" else torch.float32
    model = build(cfg, len(state["lm_head.weight"]), torch.device("cpu"), dtype, initialize=False)
    model.load_state_dict({name: state[name] for name in model.state_dict() if name in state} | marks(model))
    with torch.no_grad(), active(model):
        return model.logits(ids)


@pytest.mark.parametrize("kind", KINDS, ids=title)
def test_transformers_computes_what_was_trained(trained, kind):
    name = title(kind)
    wanted = trained_logits(trained["configs"][name], trained["ids"]).float()
    found = trained["answers"][name]
    difference = (found["logits"].float() - wanted).abs().max() / wanted.std()
    assert difference < BOUND[kind[2]]
    assert found["loading"] == {} and trained["answers"]["imported"] == []
    assert found["class"] == ("LlamaForCausalLM" if kind[0] in DENSE else "LowRankLlamaForCausalLM")
    assert found["dtype"] == (torch.bfloat16 if kind[2] == "bf16" else torch.float32)
    assert torch.equal(found["reloaded"], found["logits"])
    if kind[2] == "fp32":  # rounding decides between near-equal logits
        assert torch.equal(found["cached"], found["uncached"]) and torch.equal(found["batched"], found["alone"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind[1] == "on"], ids=title)
def test_dlr_leaves_no_trace_in_the_folder_but_its_card(trained, kind):
    folder = trained["folders"] / title(kind)
    assert "dlr" not in (folder / "config.json").read_text()
    assert json.loads((folder / "config.json").read_text())["backbone"] == kind[0]
    card = (folder / "README.md").read_text()
    assert f"{kind[0]} + DLR (on), folded" in card and "Zero-Inference-Cost Latent Residuals" in card
    assert "| eval/perplexity |" in card and "| train/tokens |" in card
