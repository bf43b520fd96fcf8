"""Shared by all tests: a small corpus with its tokenizer, real data, and runs in this process or under torchrun."""

import gc
import gzip
import importlib.util
import json
import math
import multiprocessing
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NoReturn

os.environ.setdefault("OMP_NUM_THREADS", "1")  # matrices are tiny here: threads would only wait for each other
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as ``spin_briefly`` sets it
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # a forked rank would wait for its parent's compile threads

# Not the user's cache: tests would fill it with entries for files that no longer exist.
os.environ["XDG_CACHE_HOME"] = os.path.join(tempfile.gettempdir(), f"dlr_pretrain-tests-{os.getuid()}")

import pytest
import sentencepiece

from dlr_pretrain.util.errors import UserError

# Under nohup, or in the background of a script, these are ignored, also by every process that a test starts.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

ROOT = Path(__file__).resolve().parent.parent
TEST_DATA = Path(os.environ.get("DLR_TEST_DATA", ROOT.parent / "shared" / "data"))

# The smallest shape with every special case: an odd feed-forward width, latents without a copy, four micro-batches.
SMALL = [
    *("scale=tiny", "scale.hidden_size=32", "scale.intermediate_size=91", "scale.num_heads=2"),
    *("scale.num_layers=2", "scale.rank=8", "data=c4_local", "precision=fp32", "logger=jsonl", "compile=false"),
    *("device=cpu", "train.seq_len=32", "train.global_batch=8", "train.micro_batch=2", "train.steps=20"),
    *("train.lr=0.01", "eval.every=10", "eval.tokens=400", "checkpoint.every=5"),
]


def pytest_collection_finish():
    """What was imported lives as long as the process: without this, each full garbage collection visits all of it."""
    gc.collect()
    gc.freeze()


def ended(error: UserError, say: bool) -> NoReturn:
    """Replaces ``exit_process`` for runs within the tests' process."""
    raise error


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """A run that cannot save does not retry for minutes, and does not wait for files, unless a test asks for it."""
    monkeypatch.setattr("dlr_pretrain.train.saver.MAX_ATTEMPTS", 2)
    monkeypatch.setattr("dlr_pretrain.train.saver.RETRY_SECONDS", 0.1)
    monkeypatch.setattr("dlr_pretrain.train.start.CHECKPOINT_WAIT", 0.0)


@pytest.fixture(autouse=True)
def signals():
    """A test must restore the signal handlers: without Python's for SIGPIPE, a closed socket ends pytest silently."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real data. The test skips if it is absent."""
    if not TEST_DATA.is_dir():
        pytest.skip(f"no test data at {TEST_DATA}: set DLR_TEST_DATA")
    return TEST_DATA


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """C4-layout shards of seeded sentences, and a tokenizer of 120 pieces trained on them (spiece.model)."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = random.Random(0)
    words = ["".join(rng.choices("aeioulnrst", k=rng.randint(2, 6))) for _ in range(120)]

    def document() -> str:
        sentences = (" ".join(rng.choices(words, k=rng.randint(3, 9))) + "." for _ in range(rng.randint(1, 8)))
        return " ".join(sentences)

    for split, shards, documents in (("train", 2, 120), ("validation", 1, 30)):
        for i in range(shards):
            with gzip.open(folder / f"c4-{split}.{i:05d}-of-{shards:05d}.json.gz", "wt") as file:
                file.writelines(json.dumps({"text": document()}) + "\n" for _ in range(documents))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(document() for _ in range(400)),
        model_prefix=str(folder / "spiece"),
        vocab_size=120,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return folder


@pytest.fixture(scope="session")
def words(corpus):
    """Overrides of a small run over the corpus: ``words("dlr=on", run="name")``."""

    def of(*overrides: str) -> list[str]:
        data = [f"data.root={corpus}", f"tokenizer.path={corpus}/spiece.model"]
        given = {word.split("=")[0] for word in overrides} | ({"scale.rank"} if "backbone=full" in overrides else set())
        return [*(word for word in [*SMALL, *data] if word.split("=")[0] not in given), *overrides]

    return of


@pytest.fixture
def no_export(monkeypatch):
    """Skip the check of the export, which imports transformers and loads the folder; other tests cover it."""
    monkeypatch.setattr("dlr_pretrain.deploy.export.agreement", lambda *_: "not looked at")


@pytest.fixture
def train(words):
    """Runs ``words(...)`` in ``folder``: in this process, or under torchrun if ``ranks`` is more than one."""

    def run_in(folder: Path, *overrides: str, ranks: int = 1) -> Path:
        given = words(f"run.dir={folder}", *overrides)
        if ranks > 1:
            finished = torchrun(given, ranks)
            assert finished.returncode == 0, finished.stderr[-3000:]
            return folder
        from dlr_pretrain.cli import load
        from dlr_pretrain.train.run import run

        run(load(given))
        return folder

    return run_in


def main_of(name: str, *words: object) -> int:
    """The exit code of ``scripts/<name>.py``, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"scripts/{name}.py", *map(str, words)])
        try:
            return importlib.import_module(f"scripts.{name}").main()
        except SystemExit as ended:  # argparse's
            return ended.code


def saved(checkpoint: Path) -> dict:
    """The tensors of a checkpoint: parameters by name, and optimizer state as <parameter>/<entry>."""
    from dlr_pretrain.train.checkpoint import load

    found = load(checkpoint)
    return {name: stored.whole() for name, stored in (found.model | found.optimizer).items()}


def commands(*pages: str, but: Sequence[str] = ()) -> list[str]:
    """The commands in the pages' bash blocks, without comments, one string each; for a loop, its first iteration."""
    found = []
    for page in sorted({path for pattern in pages for path in ROOT.glob(pattern)} - {ROOT / name for name in but}):
        lines = "".join(re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)).replace("\\\n", " ")
        variables = {}
        for line in lines.splitlines():
            variables |= dict(re.findall(r"\bfor (\w+) in (\S+)", line))
            command = re.sub(r"\s+", " ", re.split(r"\s#", line)[0]).strip()
            if command and not re.match(r"(for|done)\b", command):
                found.append(re.sub(r"\$(\w+)", lambda of, now=dict(variables): now[of[1]], command))
    return list(dict.fromkeys(found))


def forked(words: list[str], ranks: int) -> None:
    """Run ``words`` on ``ranks`` gloo ranks forked from this process, which have its imports and its patches."""
    from dlr_pretrain.cli import load
    from dlr_pretrain.train.run import run

    on_ranks(lambda: run(load(words, ranks)), ranks)


def killed_with_its_group(process: subprocess.Popen, patience: int | None = None) -> bool:
    """Kill the process group of ``process``, whose standard input is a pipe, and wait until the pipe has no reader.

    Then all processes that it started have ended. Returns False if that takes more than ``patience`` milliseconds.
    """
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    readers = select.poll()
    readers.register(process.stdin, 0)
    return bool(readers.poll(patience))


def on_ranks(act: Callable[[], object], ranks: int) -> None:
    """Run ``act`` in ``ranks`` processes forked from this one, with torchrun's environment variables.

    Raises AssertionError with their output if one fails; the others have 20 seconds to end after it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        job = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115 (the children keep writing to it)

    def start(rank: int) -> None:
        os.dup2(output.fileno(), 1), os.dup2(output.fileno(), 2)
        sys.stdout = sys.stderr = output
        os.environ |= {name: str(value) for name, value in (job | {"RANK": rank, "LOCAL_RANK": rank}).items()}
        act()

    children = [multiprocessing.get_context("fork").Process(target=start, args=(rank,)) for rank in range(ranks)]
    for child in children:
        child.start()
    try:
        deadline = math.inf
        while any(child.is_alive() for child in children) and time.time() < deadline:
            time.sleep(0.01)
            if any(child.exitcode for child in children):
                deadline = min(deadline, time.time() + 20)
    finally:  # the remaining ranks wait for one that is gone, or the test was interrupted
        for child in children:
            child.kill()
            child.join()
    output.seek(0)
    assert not any(child.exitcode for child in children), output.read()[-6000:]


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tokenizer of 40 pieces."""
    from dlr_pretrain.data.sample import train_tokenizer

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


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on this machine whose requests ``handler`` answers."""
    quiet = type("Quiet", (handler,), {"log_message": lambda *_: None})
    with QuietServer(("127.0.0.1", 0), quiet) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True  # clients keep their connections
    request_queue_size = 128

    def handle_error(self, *_) -> None:
        """A connection that is broken on purpose is no error."""


def torchrun(words: list[str], ranks: int, script: Path = ROOT / "train.py") -> subprocess.CompletedProcess:
    """Run ``train.py`` on ``ranks`` gloo ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([*launch, str(script), *words], env=environment, capture_output=True, text=True)
