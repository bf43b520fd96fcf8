"""Every training command of the README and of docs/ composes as it stands, without a problem in any of its keys."""

from __future__ import annotations

import re
import shlex

import pytest

from dlr_pretrain.config.arguments import read
from dlr_pretrain.config.composition import build, session
from tests.conftest import documents


def commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", documents(), flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.split(r"\s#", line)[0].strip() for line in lines if re.search(r"train\.(py|sbatch) \S", line)]


def test_there_are_commands():
    assert len(commands()) > 15


def words(command: str) -> str:
    """What a command gives to train.py."""
    return re.split(r"train\.(?:py|sbatch) ", command)[-1]


@pytest.mark.parametrize("command", [c for c in commands() if "--" not in words(c) and " -m " not in c])
def test_a_command_composes(command):
    line = read(shlex.split(words(command).replace("$method", "cola_dlr").replace("$seed", "41")))
    assert line.problems == []
    with session():
        _, problems = build(line.config_name, line.words)
    assert problems == []
