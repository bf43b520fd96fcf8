"""Commands of README and docs/ that take seconds, run as they stand in a folder with the runs that they name."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from glob import glob

import pytest

from tests.conftest import ROOT, commands
from tests.unit.run_folders import SHORT, a_run

QUICK = re.compile(r"python scripts/(fold|generate|report|plan)\.py")
SLOW = re.compile(r"--table1|--instruction|zero_shot\.json")  # minutes, or need a fine-tuned folder


@pytest.mark.full
def test_commands_run_as_they_stand(tmp_path, monkeypatch, train):
    found = [c for c in commands("README.md", "docs/*.md") if QUICK.match(c) and not SLOW.search(c)]
    assert {QUICK.match(command)[1] for command in found} == {"fold", "generate", "report", "plan"}
    for name in ("a", "b", *(f"60m-cola-dlr_{dlr}-s4{seed}" for dlr in ("off", "on") for seed in (1, 2))):
        dlr = "on" if "dlr_on" in name or name == "b" else "off"
        seed = int(name[-1]) if name[-1].isdigit() else 1
        a_run(tmp_path / "runs" / name, *SHORT, "backbone=cola", f"dlr={dlr}", seed=seed)
    for run, backbone in dict.fromkeys(re.findall(r"runs/(1b-(\w+)-[\w-]+)/", " ".join(found))):
        train(tmp_path / "runs" / run, f"backbone={backbone}", "dlr=on", "train.steps=4", "checkpoint.every=4")
    monkeypatch.chdir(tmp_path)
    for command in found:
        command = command.replace("step_00140000", "step_00000004").replace("/models/", f"{tmp_path}/models/")
        words = shlex.split(command)[1:]
        argv = [word for given in words for word in (sorted(glob(given)) if "?" in given else [given])]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        assert ended.value.code == 0, command
