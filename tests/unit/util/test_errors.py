"""A command that fails reports the reason in one line and by its exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlr_pretrain.util.errors import RankLost, Stopped, UserError, command
from dlr_pretrain.util.files import draft_of, write_durably
from tests.conftest import ROOT


@pytest.mark.parametrize(("error", "code", "said"), [
    (UserError("the shard is cut off"), 3, "error: the shard is cut off\n"),
    (RankLost("rank 1 was lost"), 4, "error: rank 1 was lost\n"),
    (Stopped("stopped; what had begun is saved"), 75, "stopped; what had begun is saved\n"),
    (FileNotFoundError(2, "No such file", "x.json"), 3, "error: x.json: No such file\n"),
    (KeyboardInterrupt(), 130, "\ninterrupted\n"),
])  # fmt: skip
def test_an_error_ends_a_command_with_one_line_and_a_code(error, code, said, capsys):
    def act() -> None:
        raise error

    assert command(act) == code
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(("number", "said"), [
    (errno.ENOSPC, "No space left on device. Free space there"),
    (errno.EIO, "Input/output error. Its disk or file server fails: see the system's log"),
    (errno.EROFS, "Read-only file system. Change its permissions, or name another place"),
    (errno.ENOTDIR, "Not a directory. A part of the path is a file: name another place"),
    (errno.ENAMETOOLONG, "File name too long"),
])  # fmt: skip
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_disk_error_names_the_file_and_the_fix(tmp_path, monkeypatch, capsys, number, said, call):
    """The errors of a write and of a flush do not name the file themselves."""

    def fails(*_given, **_named):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(*((Path, "write_bytes") if call == "write" else (os, "fsync")), fails)
    assert command(lambda: write_durably(tmp_path / "a.json", "{}")) == 3
    name = "a.json" if call == "write" else draft_of(tmp_path / "a.json").name
    assert capsys.readouterr().err == f"error: {tmp_path / name}: {said}\n" and not [*tmp_path.iterdir()]


def test_a_closed_pipe_is_not_an_error():
    code = "import sys; from dlr_pretrain.util.errors import command; sys.exit(command(lambda: print('x' * 10**6)))"
    words = [sys.executable, "-c", code]
    done = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    done.stdout.read(1)
    done.stdout.close()
    assert done.stderr.read() == b""
    assert done.wait() == 141


@pytest.mark.parametrize(("own", "spins"), [({}, "1000"), ({"OMP_WAIT_POLICY": "active"}, "None")])
def test_openmp_spins_briefly_unless_the_user_has_a_setting(own, spins):
    clean = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")}
    code = "import os; from dlr_pretrain.util.errors import command; "
    code += "command(lambda: print(os.environ.get('GOMP_SPINCOUNT')))"
    done = subprocess.run([sys.executable, "-c", code], env=clean | own, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == spins, done.stderr


def test_windows_is_refused_in_one_line_by_every_command():
    """Without this, the import of fcntl or resource, which Windows lacks, ends a command with a traceback."""
    code = """if True:
        import contextlib, io, multiprocessing, runpy, sys
        import pandas, torch, tqdm  # by name of the system, they would load parts that are not here
        sys.modules |= {"fcntl": None, "resource": None}
        sys.platform = "win32"
        for path in sys.argv[1:]:
            with contextlib.redirect_stderr(io.StringIO()) as said:
                try:
                    runpy.run_path(path, run_name="__main__")
                except SystemExit as ended:
                    code = ended.code
            print(code, said.getvalue(), end="")
            assert not [name for name in sys.modules if name.startswith("dlr_pretrain.")]
    """
    scripts = [ROOT / "train.py", *sorted((ROOT / "scripts").glob("[a-z]*.py")), ROOT / "slurm" / "submit.py"]
    done = subprocess.run([sys.executable, "-c", code, *scripts], capture_output=True, text=True, cwd=ROOT)
    said = "3 error: dlr_pretrain runs on Linux and macOS. On Windows, install and start it in WSL\n"
    assert done.stdout == said * len(scripts), done.stdout + done.stderr
