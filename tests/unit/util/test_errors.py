"""A command that fails reports the reason in one line and by its exit code, without a secret."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dlr_pretrain import __main__
from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.train.record import record_state, update_record
from dlr_pretrain.util.errors import (
    EXIT_CONFIG,
    EXIT_FAILED,
    RankLost,
    Stopped,
    UserError,
    command,
    first_line,
    report_error,
)
from dlr_pretrain.util.files import draft_of, write_durably
from dlr_pretrain.util.secrets import redact
from slurm.submit import main as submit
from tests.conftest import ROOT, main_of


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


# ----------------------------------------------------------------------------------------------------
# Passwords and tokens are never written, sent or printed


TOKEN = "hf_" + "aB3" * 10


@pytest.mark.parametrize(("text", "shown"), [
    ("https://user:pw@host:8080/x", "https://***@host:8080/x"),
    ("http://tok3n@host http://b:c@d", "http://***@host http://***@d"),
    (f"say {TOKEN}!", "say ***!"),
    ("wandb_v1_" + "k" * 40, "***"),
    ("a correct horse, a battery staple, step 1", "a ***, a battery staple, step 1"),
    ("https://host/a@b", "https://host/a@b"),
    ("https://b.s3.amazonaws.com/c4?X-Amz-Signature=0af9&x=1", "https://b.s3.amazonaws.com/c4?***&x=1"),
    ("https://b.blob.core.windows.net/c4?sv=2024&sig=a%2Bb", "https://b.blob.core.windows.net/c4?sv=2024&***"),
    ("https://host/c4?access_token=abc", "https://host/c4?***"),
    ("https://host/c4?token=abc#1", "https://host/c4?***#1"),
    ("https://host/c4?api_key=abc&page=2", "https://host/c4?***&page=2"),
    ("AKIA" + "ABCD2345" * 2, "***"),
    ("sk-proj-" + "k3" * 12, "***"),
    ("glpat-" + "k3" * 12, "***"),
    ("xoxb-" + "1234-" * 6 + "k3", "***"),
    ("AIza" + "k" * 35, "***"),
    ("DJANGO is a long story", "DJANGO is ***"),
    ("/home/me/work/runs", "/home/me/work/runs"),  # the shell's PWD
    ("task-of-a-very-long-name-with-dashes", "task-of-a-very-long-name-with-dashes"),
    ("/data/hf_cache/token=3/en", "/data/hf_cache/token=3/en"),
    ("0123456789abcdef" * 2, "0123456789abcdef" * 2),  # a revision
])  # fmt: skip
def test_secrets_are_hidden_and_nothing_else(monkeypatch, text, shown):
    variables = {
        "WANDB_API_KEY": "correct horse",
        "MY_HORSE": "battery staple",
        "SECRET_KEY": "a long story",
        "PWD": "/home/me/work",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert redact(text) == shown


@pytest.mark.parametrize("word", [
    "data.root=https://user:pa55@host/c4",
    f"logger.entity={TOKEN}",
    f"data.token={TOKEN}",
    "tokenizer.path=/keys/planted-value/spiece.model",
])  # fmt: skip
def test_a_refused_secret_is_not_shown(monkeypatch, word):
    monkeypatch.setenv("HF_TOKEN", "planted-value")
    with pytest.raises(ConfigError) as refused:
        load(["scale=tiny", "data=c4_local", "data.root=.", "logger=wandb", word])
    assert word.partition("=")[0] in str(refused.value) and "***" in str(refused.value)
    assert not any(secret in str(refused.value) for secret in ("pa55", TOKEN, "planted-value"))


# Each argument as it is given, and its secret.
PLANTED = {
    "S3 signature": ("https://127.0.0.1:9/c4?x=1&X-Amz-Signature={}", "0aF9s3" * 6),
    "S3 credential": ("https://127.0.0.1:9/c4?X-Amz-Credential={}", "0aF9cr" * 6),
    "Google signature": ("https://127.0.0.1:9/c4?X-Goog-Signature={}", "0aF9go" * 6),
    "Azure signature": ("https://127.0.0.1:9/c4?sv=2024&sig={}", "0aF9az" * 6),
    "access token": ("https://127.0.0.1:9/c4?access_token={}", "0aF9ac" * 6),
    "token": ("https://127.0.0.1:9/c4?token={}#1", "0aF9to" * 6),
    "password": ("https://me:{}@127.0.0.1:9/c4", "0aF9pw" * 6),
    "AWS": ("/a/{}/c4", "AKIA" + "ABCD2345" * 2),
    "OpenAI": ("/a/{}/c4", "sk-proj-" + "0aF9oa" * 6),
    "GitLab": ("/a/{}/c4", "glpat-" + "0aF9gl" * 6),
    "Slack": ("/a/{}/c4", "xoxb-" + "0aF9sl" * 6),
    "Hugging Face": ("/a/{}/c4", "hf_" + "0aF9hf" * 6),
    "GitHub": ("/a/{}/c4", "ghp_" + "0aF9gh" * 6),
    **{name: ("/a/{}/c4", f"the {name} pebble") for name in ("SECRET_KEY", "WANDB_API_KEY", "HF_TOKEN", "DB_PASSWORD")},
}


@pytest.fixture
def planted(monkeypatch):
    for name in PLANTED:
        monkeypatch.setenv(name.replace(" ", "_").upper() + "_PASSWORD" * (" " in name), PLANTED[name][1])


@contextmanager
def restored_signals() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    for number, handler in before.items():
        if signal.getsignal(number) != handler:
            signal.signal(number, handler)


def assert_none(folder, output: str) -> None:
    """No secret of PLANTED is in the output, in a file name or in a file."""
    written = [output.encode(), *(bytes(path) for path in folder.rglob("*"))]
    written += [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    found = {name for name, (_, secret) in PLANTED.items() for content in written if secret.encode() in content}
    assert not found


@pytest.mark.full
def test_programs_with_secrets_write_none(planted, words, scheduler, tmp_path, capfd, monkeypatch):
    """A run with its report and export, reports, token shards and a queued table, with all of PLANTED as arguments."""
    given = [text.format(secret) for text, secret in PLANTED.values()]
    run = words("train.steps=4", "eval.every=4", f"run.dir={tmp_path}/runs/a")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", *run, *given])  # which the run records
        __main__.run_and_report(load(run))
    data = [word for word in run if word.startswith(("data.root", "tokenizer."))]
    assert main_of("report", f"{tmp_path}/runs", *given, "--output", tmp_path / "report") == 0
    assert main_of("prepare_data", "data=c4_local", *data, "--output", tmp_path / "tokens") == 0
    assert submit([*run[:-1], f"run.root={tmp_path}/queued", "--", *(f"--comment={one}" for one in given)]) == 0
    (scheduler / "asked").unlink()  # the arguments of sbatch itself
    assert_none(tmp_path, "".join(capfd.readouterr()))


@pytest.mark.full
@pytest.mark.parametrize("where", [
    "data.root='{}'", "data.train_files='{}'", "tokenizer.path='{}'", "tokenizer.hub='{}'", "logger.notes='{}'",
    "logger.tags=['{}']", "run.dir='{}'", "run.start_from='{}'", "tokenizer.hubb='{}'", "logger.notes='{}",
    "scale='{}'", "{}", "--config-dir={}", "--{}", "train.lr='{}'",
])  # fmt: skip
@pytest.mark.parametrize("program", [__main__.main, submit], ids=["train.py", "submit.py"])
def test_a_secret_in_an_override_is_refused_everywhere(planted, tmp_path, capfd, monkeypatch, program, where):
    monkeypatch.chdir(tmp_path)
    for text, secret in PLANTED.values():
        argv = ["scale=tiny", "data=c4_local", "data.root=.", "logger=wandb", where.format(text.format(secret))]
        monkeypatch.setattr(sys, "argv", ["train.py", *argv])
        with restored_signals():
            try:
                code = program(*([argv] if program is submit else []))
            except SystemExit as ended:  # argparse's
                code = ended.code
        assert code in (EXIT_CONFIG, EXIT_FAILED)  # a table of runs with that name does not exist
    assert_none(tmp_path, "".join(capfd.readouterr()))


def test_an_address_in_a_quoted_message_is_hidden(planted, tmp_path, capsys):
    """A hub, for example, redirects to a signed address, which its client's error quotes."""
    update_record(tmp_path, {})
    for text, secret in PLANTED.values():
        message = f"Client error '403 Forbidden' for url '{text.format(secret)}'"
        record_state(tmp_path, "failed", first_line(UserError(message)))
        report_error(UserError(message))
        report_error(OSError(message))
        assert_none(tmp_path, "".join(capsys.readouterr()))
