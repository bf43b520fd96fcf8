"""docs/extending.md, followed to the letter: its files are written, and its commands train, resume, fold and reload."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "extending.md").read_text()
MODELING, EXPORT = "dlr_pretrain/deploy/modeling_lowrank_llama.py", "dlr_pretrain/deploy/export.py"
LOOP = "dlr_pretrain/train/loop.py"


@pytest.fixture(scope="module")
def extended(tmp_path_factory) -> Path:
    """A copy of the code with what the page adds."""
    folder = tmp_path_factory.mktemp("extended")
    for name in ("configs", "dlr_pretrain"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    files = re.findall(r"^`([\w/.]+/[\w.]+)`[^\n]*:\n\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(files) == 6
    for name, text in files:
        assert not (folder / name).exists(), name
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    layer, entry, knobs = re.findall(r"```python\n(class Gelu.*?|    \".*?)```", PAGE, flags=re.DOTALL)
    (metric,) = re.findall(r"```python\n( +with .*?)```", PAGE, flags=re.DOTALL)
    modeling, export = (folder / MODELING).read_text(), (folder / EXPORT).read_text()
    (folder / MODELING).write_text(modeling.replace("LAYERS = {\n", f"{layer}\n\nLAYERS = {{\n{entry}"))
    used = "from dlr_pretrain.models.residual import entries\nfrom dlr_pretrain.train.parallel import norm_of\n"
    evaluates, loop = "record |= self.evaluator(self.update.model)\n", (folder / LOOP).read_text()
    assert loop.count(evaluates) == 1
    loop = loop.replace(evaluates, evaluates + metric).replace(
        "from dlr_pretrain.config", f"{used}from dlr_pretrain.config"
    )
    (folder / LOOP).write_text(loop)
    (folder / EXPORT).write_text(re.sub(r"(EXPORTED = {.*\n)", rf"\1{knobs}", export))
    return folder


@pytest.mark.full
@pytest.mark.parametrize("of", ["gelu", "lion"])
def test_what_the_page_adds_trains_resumes_and_is_exported(of, extended, corpus):
    (line,) = [
        line
        for line in "".join(re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)).splitlines()
        if f"={of}" in line
    ]
    data = f"data=c4_local data.root={corpus} tokenizer.path={corpus}/spiece.model eval.tokens=500"
    run = extended / "runs" / of
    words = shlex.split(line.replace("data=sample", data))
    command = [sys.executable, *words[1:], f"run.dir={run}", "train.seq_len=16", "train.steps=6"]
    environment = os.environ | {"PYTHONPATH": str(extended), "OMP_NUM_THREADS": "1"}
    for more, code in (["train.stop_after=3"], 75), ([], 0):
        done = subprocess.run([*command, *more], cwd=extended, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    records = list(read_metrics(run / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 7)) and records[-1]["weights/b_norm"] > 0
    settings = json.loads((run / "folded" / "config.json").read_text())
    assert settings["num_hidden_layers"] == 2 and settings["backbone"] == ("gelu" if of == "gelu" else "cola")
    # in a process of its own: where our class is registered already, transformers takes that one
    load = "import sys, transformers as t; t.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    environment = os.environ | {"HF_MODULES_CACHE": str(extended / "modules")}
    done = subprocess.run([sys.executable, "-c", load, run / "folded"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
