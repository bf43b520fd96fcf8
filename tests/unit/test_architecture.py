"""The house stays as it is drawn: who imports whom, how large things are, and what a new backbone takes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT

PACKAGE = ROOT / "dlr_pretrain"
MAY_IMPORT = {
    "errors": set(),
    "tensors": set(),
    "process": set(),
    "durable": set(),
    "heartbeat": set(),
    "markdown": set(),
    "flags": set(),
    "config": {"errors", "markdown"},
    "cli": {"config", "errors"},
    "shards": set(),
    "models": {"tensors", "config", "errors", "shards"},
    "optim": {"tensors", "config", "errors", "shards"},
    "data": {"tensors", "config", "errors", "durable", "process"},
    "deploy": {"tensors", "models", "config", "data", "errors", "durable", "process", "markdown"},
    # a plan tells the optimizer's memory and rates
    "analysis": {"tensors", "models", "optim", "config", "errors", "durable", "markdown"},
    # of analysis the history, which needs no torch
    "launch": {"cli", "config", "analysis", "errors", "flags", "process", "heartbeat"},
    "bench": {"cli", "train", "models", "data", "analysis", "config", "errors", "process"},
    "doctor": {"train", "data", "analysis", "config", "cli", "errors", "flags", "process", "shards", "durable"},
    "train": {
        *("models", "optim", "data", "deploy", "analysis", "config"),
        *("errors", "shards", "tensors", "process", "durable", "heartbeat", "markdown"),
    },
}


def room(path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


def imported_rooms(path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dlr_pretrain":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names if is_room(a.name)}
    return rooms - {room(path)}


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name != "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_rooms_import_downwards_only(path):
    assert imported_rooms(path) <= MAY_IMPORT[room(path)]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_can_be_read(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name


def test_tables_in_markdown_are_written_in_one_place():
    """But those of the benchmarks, which are padded to be read as they are."""
    cells = re.compile(r"""\| ---|(['"]) \| \1\.join""")
    marks = [str(p.relative_to(PACKAGE)) for p in FILES if cells.search(p.read_text())]
    assert set(marks) <= {"markdown.py", "bench/tables.py", "analysis/compare.py"}  # and values of a key, side by side


def test_training_imports_no_library_that_it_does_not_use():
    code = "import sys, dlr_pretrain.train.run; print(sorted({'transformers', 'datasets', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


BACKBONE = '''
import torch
from dlr_pretrain.models.lowrank import LowRank

class Tanh(LowRank):
    """y = B tanh(gain A x)."""
    def activate(self, h):
        return torch.tanh(self.knobs["gain"] * h)

BACKBONE = Tanh
'''


def test_a_backbone_is_one_file_of_code_and_one_of_configuration(tmp_path, monkeypatch, words, capsys):
    """It composes, checks its own knobs, trains with DLR, folds and resumes; no other file knows its name."""
    from dlr_pretrain import models
    from dlr_pretrain.cli import load
    from dlr_pretrain.errors import UserError
    from dlr_pretrain.train.run import run

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "throwaway.py").write_text(BACKBONE)
    (tmp_path / "backbone").mkdir()
    (tmp_path / "backbone" / "throwaway.yaml").write_text(
        "name: throwaway\nfactorized: true\nrank: ${scale.rank}\ngain: 2.0\n"
    )
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path / "models")])

    own = ("--config-dir", str(tmp_path), "backbone=throwaway")
    given = words(*own, "dlr=on", "train.steps=3", f"run.dir={tmp_path}/run")
    with pytest.raises(UserError, match=r"Did you mean backbone\.gain"):
        load([*given, "backbone.gian=3"])
    cfg = load(given)
    assert cfg.backbone.gain == 2.0
    run(cfg)
    assert (tmp_path / "run" / "folded" / "model.safetensors").exists()
    assert "transformers cannot load backbone=throwaway yet" in capsys.readouterr().out
    model = models.build(cfg, 60, torch.device("cpu"))
    assert type(model.model.layers[0].mlp.down).__name__ == "Tanh"
