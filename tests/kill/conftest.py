"""Shared by the tests of kills: runs that start at once, with a layer between them and their files."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT


class Warm:
    """Forks a run of ``train.py`` from a process that has imported everything: see ``warm.py``."""

    def __init__(self, folder: Path, preloaded: Path | None):
        self.output = folder / "output"
        environment = os.environ | ({"LD_PRELOAD": str(preloaded)} if preloaded else {})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.kill.warm"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip

    def __call__(self, words: list[str], **more) -> tuple[int, str]:
        """The exit code of a run, negative if a signal has ended it, and its output; ``more``: see ``warm.run``."""
        return self.follow(words, **more)[:2]

    def follow(self, words: list[str], **more) -> tuple[int, str, str, str]:
        """As a call, and what the run has told: see ``driven.signal_at_the_moment``."""
        self.output.write_text("")
        print(json.dumps({"words": words, "output": str(self.output)} | more), file=self.process.stdin, flush=True)
        code, told, before = json.loads(self.process.stdout.readline())
        return code, self.output.read_text(), told, before

    def learn(self, words: list[str]) -> None:
        """Run ``words`` once, and import the modules that the run imported."""
        code, output = self(words, modules=str(self.output.with_name("modules")))
        assert code == 0, output

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    started = Warm(tmp_path_factory.mktemp("warm"), None)
    yield started
    started.close()


@pytest.fixture(scope="module")
def tepid(tmp_path_factory):
    """As ``warm``, but it never learns: it has imported torch, but not what export and report import."""
    started = Warm(tmp_path_factory.mktemp("tepid"), None)
    yield started
    started.close()


@pytest.fixture(scope="module")
def layered(tmp_path_factory):
    """As ``warm``, with ``layer.c`` between the runs and their files."""
    folder = tmp_path_factory.mktemp("layered")
    if sys.platform != "linux" or not (compiler := shutil.which("cc")):
        pytest.skip("the layer needs Linux and a C compiler")
    library, source = folder / "layer.so", Path(__file__).with_name("layer.c")
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    started = Warm(folder, library)
    yield started
    started.close()
