"""Plants the faults of ``faults.toml`` in a copy of the library, one at a time, and runs the test of each.

    python -m tests.faults [--only NAME ...] [--check]

A fault is caught if its test, which passes without it, fails. The exit code is 1 if a patch does not fit or a fault is
missed. If code or a test has moved, move the patch; if a test was deleted, name the smallest one that catches it.
"""

import argparse
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NEEDED = ("dlr_pretrain", "tests", "configs", "scripts", "slurm", "benchmarks", "train.py", "pyproject.toml")
LIBRARIES = ("torch", "torch._dynamo", "torch.distributed.fsdp", "numpy", "hydra", "omegaconf", "safetensors.torch",
             "sentencepiece")  # fmt: skip
FAILED = 1  # pytest's exit code if a test failed; other codes mean that no test ran
PATIENCE = 600.0  # seconds until a hanging test is killed; it does not count as a catch


def faults() -> dict[str, dict[str, str]]:
    """The path, old and new text, and test of each fault, by name."""
    found = tomllib.loads((HERE / "faults.toml").read_text())
    return {name: fault | {"path": name.partition(":")[0]} for name, fault in found.items()}


def unfit(root: Path) -> list[str]:
    """The patches that do not fit the code or the tests of ``root``, one line each."""
    lines = []
    for name, fault in faults().items():
        path, (file, _, node) = root / "dlr_pretrain" / fault["path"], fault["test"].partition("::")
        count = path.read_text().count(fault["old"]) if path.exists() else 0
        if count != 1:
            lines.append(f"{name}: its text occurs {count} times in dlr_pretrain/{fault['path']}: {fault['old']!r}")
        test, function = root / "tests" / file, node.partition("[")[0]
        if not test.exists() or (node and f"def {function}(" not in test.read_text()):
            lines.append(f"{name}: tests/{fault['test']} does not exist")
    return lines


def run_test(copy: Path, test: str, log: Path) -> int:
    """pytest's exit code for ``test`` in ``copy``, in a fork of this process, which has imported the libraries."""
    if (pid := os.fork()) == 0:
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "dlr_pretrain")]:
            del sys.modules[name]
        sys.path[:] = [str(copy), *(entry for entry in sys.path if entry not in ("", str(ROOT)))]
        os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        os.chdir(copy)
        import pytest

        os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "", f"--rootdir={copy}", f"tests/{test}"]))
    late = threading.Timer(PATIENCE, os.kill, (pid, signal.SIGKILL))
    late.start()
    _, status = os.waitpid(pid, 0)
    late.cancel()
    return os.waitstatus_to_exitcode(status)


def run(only: list[str]) -> list[str]:
    """Plant and test each fault whose name contains a word of ``only``, or every fault; returns the missed names."""
    os.environ["OMP_NUM_THREADS"] = "1"  # torch reads it when it is imported; threads do not survive a fork
    for name in LIBRARIES:
        importlib.import_module(name)
    missed = []
    with tempfile.TemporaryDirectory() as scratch:
        copy, log = Path(scratch, "copy"), Path(scratch, "log")
        for name in NEEDED:
            source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignore) if source.is_dir() else shutil.copy(source, copy / name)
        for name, fault in faults().items():
            if only and not any(word in name for word in only):
                continue
            path, started = copy / "dlr_pretrain" / fault["path"], time.monotonic()
            sound = path.read_text()
            path.write_text(sound.replace(fault["old"], fault["new"]))
            code = run_test(copy, fault["test"], log)
            path.write_text(sound)
            verdict = "caught" if code == FAILED else f"MISSED (exit code {code})"
            print(f"{verdict:<8} {name}  {time.monotonic() - started:.0f} s  {fault['test']}", flush=True)
            if code != FAILED:
                print(log.read_text()[-1500:])
                missed.append(name)
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="faults whose name contains this; repeat it")
    parser.add_argument("--check", action="store_true", help="only whether the patches fit")
    given = parser.parse_args()
    lines = unfit(ROOT)
    print("\n".join(lines), file=sys.stderr)
    if given.check or lines:
        return 1 if lines else 0
    missed = run(given.only)
    print(f"missed: {', '.join(missed)}" if missed else "every fault was caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
