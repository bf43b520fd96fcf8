"""The benchmark of the data room runs, and says on what."""

import importlib.util
import json
import os
import sys

import pytest
from data_corpus import REPO

from dlr_pretrain.data import benchmark
from dlr_pretrain.util.errors import EXIT_CONFIG

spec = importlib.util.spec_from_file_location("benchmark_script", REPO / "scripts" / "benchmark.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)  # pytest keeps its cores
    monkeypatch.setattr(benchmark, "STEADY_TOKENS", 20_000)
    monkeypatch.setattr(benchmark, "RAW_CHARACTERS", 20_000)

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["scripts/benchmark.py", *words])
        return script.main()

    return run


def test_every_quantity_of_the_data_room_is_measured(command, corpus, tmp_path, capsys):
    given = [f"data.root={corpus}", f"tokenizer.path={corpus}/spiece.model", "train.global_batch=8", "train.seq_len=16"]
    file = tmp_path / "found.json"
    assert command("data", "data=c4_local", *given, "--tokens", "2000", "--rounds", "2", "--json", str(file)) == 0
    found, printed = json.loads(file.read_text()), capsys.readouterr().out
    assert found["command"].startswith("python scripts/benchmark.py data data=c4_local")
    assert found["batch"] == "8 x 16 tokens" and "numpy" in found["versions"] and "cores" in found["machine"]
    names = [measure["name"] for measure in found["measures"]]
    assert names == [
        "prepare_data, one worker", "sentencepiece alone", "batches from text, packed", "batches from text",
        "batches from tokens, packed", "batches from tokens, pad", "resume of tokens, to the first batch",
        "resume of text, through a shard to its last document", "memory after 0M tokens more",
    ]  # fmt: skip
    assert all(f"{name}, " in printed for name in names)
    assert all(value > 0 for measure in found["measures"][:-1] for value in measure["values"])
    assert len(found["measures"][1]["values"]) == 2


@pytest.mark.parametrize("words", [("data=tokens",), ("data=c4_local",), ("--rounds", "0"), ("train.lr=fast",)])
def test_what_cannot_be_measured_is_refused(command, words, capsys):
    assert command("data", *words) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("error: ")
