"""Every command of README and of the pages of docs/ and benchmarks/ is one that its program understands: options by the
program's own parser, which then acts no further, and overrides composed into a configuration without a problem.

What takes seconds is run besides: tests/unit/test_documented_runs.py, and test_launch.py there for slurm/submit.py.
docs/extending.md has a test of its own.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks.__main__ import parser as benchmarks_parser
from benchmarks.variants import joined
from dlr_pretrain.config.command_line import read
from dlr_pretrain.config.compose import check
from dlr_pretrain.config.tree import KEYS
from dlr_pretrain.launch.runs import expand, load_runs, read_table
from tests.conftest import ROOT, commands

COMMANDS = commands("README.md", "docs/*.md", "benchmarks/README.md", but=("docs/extending.md",))
TRAINING = re.compile(r"train\.(?:py|sbatch)$")
ELSEWHERE = ("generate", "sft", "evaluate", "fold", "report")  # their words are no overrides


class Understood(BaseException):
    """Carries what a parser made of the words: the options, and the words it leaves to the program."""


@pytest.fixture
def understood(monkeypatch):
    """What the program makes of a command line; nothing is done."""
    names = ("parse_args", "parse_known_args", "parse_intermixed_args")
    own = {name: getattr(argparse.ArgumentParser, name) for name in names}

    def ending(name: str):
        def parse(parser, *args, **kwargs):
            with monkeypatch.context() as inside:
                for other in names:
                    inside.setattr(argparse.ArgumentParser, other, own[other])
                found = own[name](parser, *args, **kwargs)
            raise Understood(*(found if name == "parse_known_args" else (found, [])))

        return parse

    def run(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        for name in names:
            monkeypatch.setattr(argparse.ArgumentParser, name, ending(name))
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(Understood) as found:
            runpy.run_path(str(ROOT / argv[0]), run_name="__main__")
        monkeypatch.undo()
        return found.value.args

    return run


def program(words: list[str]) -> int:
    """Where the program stands among the words of a command: behind python, sbatch or torchrun and their options."""
    return next(i for i, word in enumerate(words) if re.search(r"\.(py|sh|sbatch)$", word) and "launch.py" not in word)


def test_there_are_commands():
    assert len(COMMANDS) > 60
    named = {Path(word).name for command in COMMANDS for word in command.split() if re.search(r"\.(py|sh)$", word)}
    of_users = {path.name for folder in ("scripts", "slurm") for path in (ROOT / folder).glob("*.py")}
    assert named >= of_users, "a command that no page shows"


pytestmark = pytest.mark.full
TRAINED = [c for c in COMMANDS if not re.match(r"pip |hf |wandb |python3? -m |.*submit\.py", c)]


@pytest.mark.parametrize("command", TRAINED)
def test_a_command_is_understood(command, understood):
    words = shlex.split(command)
    at = program(words)
    name, rest = words[at], words[at + 1 :]
    assert (ROOT / name).is_file(), name
    if TRAINING.search(name):
        composes(rest)
        return
    if name.endswith(".sh"):
        listed = subprocess.run(["bash", ROOT / name, *rest, "list"], capture_output=True, text=True)
        assert listed.returncode == 0 and len(listed.stdout.splitlines()) > 20, listed.stderr
        for line in listed.stdout.splitlines():
            piece = shlex.split(line.partition(": ")[2])
            if piece[2] == "benchmarks":
                measured(piece[3:])
            else:
                assert piece[1:5] == ["-m", "pytest", "-m", "gpu"] and (ROOT / piece[5]).is_file()
        return
    given, overrides = understood(words[at:])
    script = Path(name).stem
    if script in ELSEWHERE:
        assert overrides == []
    elif script == "tune":
        load_runs(read_table(given.what)[-1:])
    else:
        overrides_compose(given, overrides)


def overrides_compose(given: argparse.Namespace, overrides: list[str]) -> None:
    for variant in getattr(given, "variant", []) or [""]:
        composes(["-m", *joined(overrides, variant.split())])


def measured(words: list[str]) -> None:
    """What ``python -m benchmarks`` checks first."""
    given = benchmarks_parser().parse_intermixed_args(words)
    overrides_compose(given, given.overrides)


def composes(words: list[str]) -> None:
    """What ``train.py`` checks first; of a sweep, its first and its last run. Such as ``--help`` asks for no more."""
    line = read(words)
    assert line.problems == []
    if line.multirun:
        runs = expand([word for word in words if word != "-m"])
        for of in (runs[0], runs[-1]):
            composes(list(of.words))
        return
    if "--help" not in words:
        check(line, None, machine=False)


def test_installations_name_extras_that_are():
    extras = re.findall(r'^pip install -e "\.\[([\w,]+)\]"$', "\n".join(COMMANDS), flags=re.MULTILINE)
    there = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras and {extra for some in extras for extra in some.split(",")} <= set(there)


def test_what_is_fetched_is_what_the_configuration_names():
    fetched = {shlex.split(command)[2] for command in COMMANDS if command.startswith("hf download ")}
    assert fetched == {OmegaConf.load(ROOT / "configs/data/c4.yaml").dataset, KEYS["tokenizer.hub"].default}


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("python -m ")])
def test_a_module_that_is_run_is_there(command):
    _, _, module, *words = shlex.split(command)
    if module == "benchmarks":
        measured(words)
    else:
        assert command == "python -m pytest -n 3"
