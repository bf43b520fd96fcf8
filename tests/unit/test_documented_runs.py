"""Commands of README and docs/ that take seconds, run as they stand in a folder with the runs that they name."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from glob import glob
from pathlib import Path

import pytest

from tests.conftest import ROOT, commands
from tests.unit.run_folders import SHORT, a_comparison, a_run

QUICK = re.compile(r"python scripts/(fold|generate|compare|report|plan)\.py")
SLOW = re.compile(r"--table1|--instruction|zero_shot\.json")  # minutes, or need a fine-tuned folder
RUN = [c for c in commands("README.md", "docs/*.md") if QUICK.match(c) and not SLOW.search(c)]
STEP = {"step_00140000": "step_00000004"}  # the runs here are short


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("documented")
    for name in ("a", "b", *(f"60m-cola-dlr_{dlr}-s4{seed}" for dlr in ("off", "on") for seed in (1, 2))):
        dlr = "on" if "dlr_on" in name or name == "b" else "off"
        words = (*SHORT, "backbone=cola", f"dlr={dlr}")
        a_run(made / "runs" / name, *words, seed=int(name[-1]) if name[-1].isdigit() else 1)
    a_comparison(made / "runs" / "tune" / "cola", made / "tuned")
    return made


@pytest.fixture
def do(folder, monkeypatch, in_this_process, capsys):
    """Runs a command as a shell would in ``folder``: what it says."""

    def run(command: str) -> str:
        words = shlex.split(command)[1:]
        argv = [word for given in words for word in (sorted(glob(given)) if "?" in given else [given])]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        return said.out

    monkeypatch.chdir(folder)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN)
def test_a_command_runs_as_it_stands(command, do, train, folder):
    for name in re.findall(r"runs/(1b-[\w-]+)/", command):
        if not (folder / "runs" / name).exists():
            _, backbone, _, _ = name.split("-")
            train(folder / "runs" / name, f"backbone={backbone}", "dlr=on", "train.steps=4", "checkpoint.every=4")
    for written, meant in {**STEP, "/models/": f"{folder}/models/"}.items():
        command = command.replace(written, meant)
    assert do(command)


def test_they_are_of_each_kind():
    assert {QUICK.match(command)[1] for command in RUN} == {"fold", "generate", "compare", "report", "plan"}
    assert len(RUN) >= 10
