"""The compilers and headers that ``compile=true`` needs on the machine."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from dlr_pretrain.config.problems import Problem
from dlr_pretrain.config.tree import Config


def compiler_problem(cfg: Config, device: str) -> Problem | None:
    """The problem that keeps ``compile=true`` from working on ``device`` ("cpu" or "cuda"), or None.

    For "auto" it returns None. The trainer calls it again with the device that it has found.
    """
    rules = {"cpu": _of_inductor, "cuda": _of_triton}
    if not cfg.compile or device not in rules or (lack := rules[device]()) is None:
        return None
    rule, fix = lack
    return Problem("compile", True, rule, f"Use compile=false, or {fix}")


def _of_inductor() -> tuple[str, str] | None:
    """Look for the C++ compiler that torch's inductor would call; returns None, or the broken rule and the fix."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler):
        return None
    return f"needs a C++ compiler on a CPU, and there is no {compiler}", "set CXX to a compiler"


def _of_triton() -> tuple[str, str] | None:
    """Look where Triton does for a C compiler and Python's headers, with which it builds its kernel launchers."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"needs a C compiler on a GPU, and there is no {' or '.join(compilers)}", "set CC to a compiler"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = sysconfig.get_paths(scheme=scheme)["include"]
    given = (os.environ.get(name, "").split(os.pathsep) for name in ("CPATH", "C_INCLUDE_PATH"))
    folders = [headers, *(folder for folders in given for folder in folders if folder)]
    if any(Path(folder, "Python.h").exists() for folder in folders):
        return None
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
    return f"needs Python.h on a GPU, and {headers} has none", f"install Python's headers (package {package})"
