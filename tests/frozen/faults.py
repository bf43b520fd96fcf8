"""Plants the faults of ``faults.toml`` in a copy of the library, one at a time, and runs the small test of each.

    python -m tests.frozen.faults [--only NAME ...] [--check]

A fault is caught if its test, which passes without it, fails. The exit code is 1 if a patch does not fit or a fault is
missed. Where code or a test moved, move the patch; where a test was deleted, name the smallest one that catches it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from tests.frozen.process import Commands

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NEEDED = ("dlr_pretrain", "tests", "configs", "scripts", "train.py", "pyproject.toml")
PYTEST = "import sys, pytest\nsys.exit(pytest.main(sys.argv[1:]))\n"
FAILED = 1  # pytest's exit code when a test has failed; others mean that none ran


def faults() -> dict[str, dict[str, str]]:
    """File, old and new text, and test of each fault, by name."""
    found = tomllib.loads((HERE / "faults.toml").read_text())
    return {name: fault | {"path": name.partition(":")[0]} for name, fault in found.items()}


def unfit(root: Path) -> list[str]:
    """The patches that do not fit the code or the tests of ``root``, a line each."""
    lines = []
    for name, fault in faults().items():
        path, (file, _, node) = root / "dlr_pretrain" / fault["path"], fault["test"].partition("::")
        count = path.read_text().count(fault["old"]) if path.exists() else 0
        if count != 1:
            lines.append(f"{name}: its text stands {count} times in dlr_pretrain/{fault['path']}: {fault['old']!r}")
        test, function = root / "tests" / file, node.partition("[")[0]
        if not test.exists() or (node and f"def {function}(" not in test.read_text()):
            lines.append(f"{name}: there is no tests/{fault['test']}")
    return lines


def plant(root: Path, fault: dict[str, str]) -> None:
    path = root / "dlr_pretrain" / fault["path"]
    path.write_text(path.read_text().replace(fault["old"], fault["new"]))


def run(only: list[str]) -> list[str]:
    """Plant and test each fault whose name contains a word of ``only``; returns the names of those that were missed."""
    missed = []
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a planted file may have the size and the second of the sound one
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch, "copy")
        for name in NEEDED:
            source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignore) if source.is_dir() else shutil.copy(source, copy / name)
        (copy / "run_pytest.py").write_text(PYTEST)
        with Commands(copy, Path(scratch, "commands")) as commands:
            how = (
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "",
                "--rootdir",
                str(copy),
                "-c",
                f"{copy}/pyproject.toml",
            )
            for name, fault in faults().items():
                if only and not any(word in name for word in only):
                    continue
                path, started = copy / "dlr_pretrain" / fault["path"], time.monotonic()
                sound = path.read_text()
                plant(copy, fault)
                ended = commands.run(*how, f"{copy}/tests/{fault['test']}", script="run_pytest.py")
                path.write_text(sound)
                caught = ended.codes == [FAILED]
                verdict = "caught" if caught else f"MISSED (exit code {ended.codes[0]})"
                print(f"{verdict:<8} {name}  {time.monotonic() - started:.0f} s  {fault['test']}", flush=True)
                if not caught:
                    print(ended.said[-1500:])
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
