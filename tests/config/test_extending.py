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
LOOP = "dlr_pretrain/train/loop.py"


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A user's own folder, with the files of the page."""
    folder = tmp_path_factory.mktemp("own")
    files = re.findall(r"^`([\w/.]+/[\w.]+)`:\n\n```\w+\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
    assert len(files) == 7
    for name, text in files:
        assert name.startswith(("my_package/", "my_configs/"))
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A copy of the code with the page's metric."""
    folder = tmp_path_factory.mktemp("measured")
    for name in ("configs", "dlr_pretrain"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    (metric,) = re.findall(r"```python\n( +with .*?)```", PAGE, flags=re.DOTALL)
    used = "from dlr_pretrain.models.residual import entries\nfrom dlr_pretrain.train.parallel import norm_of\n"
    evaluates, loop = "record = record | (metrics or {})\n", (folder / LOOP).read_text()
    assert loop.count(evaluates) == 1
    loop = loop.replace(evaluates, evaluates + metric).replace(
        "from dlr_pretrain.config", f"{used}from dlr_pretrain.config"
    )
    (folder / LOOP).write_text(loop)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("of", ["gelu", "lion"])
def test_what_the_page_adds_trains_resumes_and_is_exported(of, own, measured, corpus):
    (line,) = [
        line
        for line in "".join(re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)).splitlines()
        if f"={of}" in line
    ]
    data = f"data=c4_local data.root={corpus} tokenizer.path={corpus}/spiece.model eval.tokens=500"
    run = own / "runs" / of
    variable, _, train, *words = shlex.split(line.replace("data=sample", data))
    assert (variable, train) == ("PYTHONPATH=.", "train.py")
    command = [sys.executable, str(measured / train), *words, f"run.dir={run}", "train.seq_len=16", "train.steps=6"]
    environment = os.environ | {"PYTHONPATH": f"{measured}:.", "OMP_NUM_THREADS": "1"}
    for more, code in (["train.stop_after=3"], 75), ([], 0):
        done = subprocess.run([*command, *more], cwd=own, env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    assert "transformers loads it" in done.stdout
    records = list(read_metrics(run / "metrics.jsonl"))
    assert [record["step"] for record in records] == list(range(1, 7)) and records[-1]["weights/b_norm"] > 0
    settings = json.loads((run / "folded" / "config.json").read_text())
    assert settings["num_hidden_layers"] == 2 and settings["backbone"] == ("gelu" if of == "gelu" else "cola")
    # transformers runs the code of the folder, without the user's package
    load = (
        "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)"
    )
    load += "; m.save_pretrained(sys.argv[2]); t.AutoModel.from_pretrained(sys.argv[2], trust_remote_code=True)"
    environment = os.environ | {"HF_MODULES_CACHE": str(own / "modules" / of)}
    places = run / "folded", own / "again" / of
    done = subprocess.run([sys.executable, "-c", load, *places], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
