"""The house stays as it is drawn: who imports whom."""

import ast
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter

from tests.conftest import ROOT
from tests.faults.__main__ import unfit

PACKAGE = ROOT / "dlr_pretrain"
MAY_IMPORT = {  # a room, and the rooms whose modules its modules may import
    "util": set(),
    "config": {"util"},
    "cli": {"config", "util"},
    "__main__": {"cli", "config", "util", "analysis", "deploy", "train"},
    "models": {"config", "util"},
    "optim": {"config", "util"},
    "data": {"config", "util"},
    "deploy": {"models", "config", "data", "util"},
    "analysis": {"models", "optim", "config", "util"},
    "launch": {"cli", "config", "util"},
    "doctor": {"train", "models", "data", "analysis", "config", "cli", "util"},
    "train": {"models", "optim", "data", "deploy", "config", "util"},
}


def room(path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_room(name: str) -> bool:
    return (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()


def imported_rooms(path) -> set[str]:
    rooms: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dlr_pretrain":
            parts = node.module.split(".")
            rooms |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names if is_room(a.name)}
    return rooms


def test_rooms_import_downwards_only():
    files = [p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.name != "__init__.py"]
    upwards = {str(p.relative_to(PACKAGE)): imported_rooms(p) - MAY_IMPORT[room(p)] - {room(p)} for p in files}
    assert not {path: rooms for path, rooms in upwards.items() if rooms}


def test_the_paper_reads_runs_as_a_users_script_does():
    rooms = set().union(*map(imported_rooms, (ROOT / "scripts" / "paper").glob("*.py")))
    assert rooms == {"analysis", "config", "launch", "models", "util"}


def test_the_study_of_geometry_does_not_touch_training():
    """It reads checkpoints, whose format stands in ``train``, and nothing else there."""
    files = [*(ROOT / "scripts" / "geometry").glob("*.py")]
    assert set().union(*map(imported_rooms, files)) == {"analysis", "config", "deploy", "models", "train", "util"}
    lines = [line for path in files for line in path.read_text().splitlines() if "dlr_pretrain.train" in line]
    assert lines == ["from dlr_pretrain.train.checkpoint import directories, fault, load, step_of"]


def test_no_two_files_import_each_other():
    """Also not by way of others. Imports inside functions do not count, nor do those for types alone."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module in files:
                parts = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= (parts & files.keys()) or {node.module}
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_a_wheel_has_every_package_and_its_commands_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named, folders = set(project["tool"]["setuptools"]["packages"]), project["tool"]["setuptools"]["package-dir"]
    rooms = {f"dlr_pretrain.{p.parent.name}" for p in PACKAGE.glob("*/*.py")}
    applications = {f"dlr_pretrain.scripts.{p.parent.name}" for p in (ROOT / "scripts").glob("*/__init__.py")}
    assert named == {"dlr_pretrain", *applications, *rooms, *folders}
    for command in project["project"]["scripts"].values():
        module, function = command.split(":")
        package, _, name = module.rpartition(".")
        folder = ROOT / package.replace(".", "/").replace("dlr_pretrain/s", "s")  # scripts and slurm
        path = folder / f"{name}.py"
        assert f"def {function}(" in path.read_text() or f"import {function}" in path.read_text()


def test_training_imports_no_library_that_it_does_not_use():
    code = "import sys, dlr_pretrain.train.run; print(sorted({'transformers', 'datasets', 'wandb'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_the_patches_fit_the_code_and_the_tests():
    """``python -m tests.faults`` plants them."""
    assert unfit(ROOT) == []
