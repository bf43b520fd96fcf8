"""What tests of several files use: a small tokenizer, and a scheduler that does nothing."""

import pytest

from dlr_pretrain.data.sample import train_tokenizer
from tests.conftest import ROOT


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "spiece.model"
    path.write_bytes(
        train_tokenizer(["a word and more of the words in a text, and one <extra_id_3> two"] * 3, vocab_size=40)
    )
    return path


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """A folder on PATH with an sbatch that writes its arguments to ``asked`` and gives job 70, and a squeue that prints
    the file ``queue``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "queue").write_text("")
    does = {"sbatch": f"printf '%s\\n' \"$@\" > {folder}/asked; echo 70", "squeue": f"cat {folder}/queue"}
    for name, what in does.items():
        (folder / name).write_text(f"#!/bin/sh\n{what}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("RANKS_PER_NODE", raising=False)
    monkeypatch.chdir(ROOT)
    return folder
