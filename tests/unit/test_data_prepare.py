"""Preparing tokens: killed at any point it goes on, and what stands in its way is named."""

import errno
import gzip
import importlib.util
import io
import itertools
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from data_corpus import REPO, make_config, run_python, write_shards

from dlr_pretrain.data import Tokenizer, open_source, open_tokenizer, sample
from dlr_pretrain.data import prepare as module
from dlr_pretrain.data.prepare import JOURNAL, Progress, prepare
from dlr_pretrain.data.remote import HubSource, Listing
from dlr_pretrain.data.tokens import MANIFEST, TokenSource
from dlr_pretrain.data.workers import in_processes
from dlr_pretrain.util.errors import EXIT_CONFIG, UserError
from tests import conftest

SHARDS = 6
script = conftest.script("prepare_data")


@pytest.fixture
def root(tmp_path):
    rng = random.Random(0)
    texts = [" ".join(rng.choices(["word", "more", "text", "one"], k=rng.randint(0, 200))) for _ in range(SHARDS * 60)]
    write_shards(tmp_path / "text", [texts[i::SHARDS] for i in range(SHARDS)])
    write_shards(tmp_path / "text", [texts[:9]], split="validation")
    return tmp_path / "text"


def make(root: Path, model: Path, output: Path, workers: int = 1) -> list[Progress]:
    """Prepare, and return all reports."""
    cfg, reports = make_config(data__root=root, tokenizer__path=model), []
    source = open_source(cfg)
    prepare(source, open_tokenizer(cfg, source), output, workers, lambda p: reports.append(Progress(**vars(p))))
    return reports


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


def hidden(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(".*")}


# ----------------------------------------------------------------------------------------------------
# What is written


def test_any_number_of_workers_writes_the_same_folder(root, model, tmp_path):
    alone, several = make(root, model, tmp_path / "one"), make(root, model, tmp_path / "several", workers=3)
    whole = content(tmp_path / "one")
    assert whole == content(tmp_path / "several")
    names = [f"train-{i:05d}-of-{SHARDS:05d}.tokens" for i in range(SHARDS)] + ["validation-00000-of-00001.tokens"]
    assert sorted(whole) == [MANIFEST, "spiece.model", *names]
    assert hidden(tmp_path / "one") == {".lock", ".checked.json"}
    manifest = json.loads(whole[MANIFEST])
    for reports in (alone, several):
        assert (reports[0].finished, reports[-1].finished, reports[-1].shards) == (0, SHARDS + 1, SHARDS + 1)
        assert (reports[-1].documents, reports[-1].tokens) == (manifest["documents"], manifest["tokens"])
    assert manifest["documents"] == SHARDS * 60 + 9
    assert manifest["shards"]["train"][2]["source"] == f"c4-train.00002-of-{SHARDS:05d}.json.gz"


def test_a_shard_without_documents_and_a_large_vocabulary(tmp_path, model):
    write_shards(tmp_path / "text", [["some words"], []])
    write_shards(tmp_path / "text", [["more"]], split="validation")
    cfg = make_config(data__root=tmp_path / "text", tokenizer__path=model)
    tokenizer = open_tokenizer(cfg, open_source(cfg))
    tokenizer.vocab_size = 70_000  # as if it had more pieces than two bytes can tell apart
    made = prepare(open_source(cfg), tokenizer, tmp_path / "tokens", 1, lambda _: None)
    (block,) = made.blocks(made.train_shards[0])
    assert block.take([0], 10**6).tokens.tolist() == [*tokenizer.encode(["some words"])[0], 1]
    assert list(made.blocks(made.train_shards[1])) == []
    assert all(made.fault(name) is None for name in made.entries)


def test_a_source_on_the_hub_and_its_tokenizer_can_be_sent_to_a_process(model):
    listing = Listing("allenai/c4", "a" * 40, {"en/c4-train.json.gz": 7}, {"en/c4-validation.json.gz": 3})
    for cache in (None, "/cache"):
        source = HubSource(listing, "text", cache)
        sent = pickle.loads(pickle.dumps(source))
        assert (sent.describe(), sent.fingerprint) == (source.describe(), source.fingerprint)
    tokenizer = pickle.loads(pickle.dumps(Tokenizer(model)))
    assert tokenizer.encode(["more words"]) == Tokenizer(model).encode(["more words"])


# ----------------------------------------------------------------------------------------------------
# Killed


def killed(root: Path, model: Path, output: Path, seconds: float) -> bool:
    """Prepare in a process that is killed after ``seconds``; False where it had finished before."""
    child = os.fork()
    if child == 0:
        try:
            make(root, model, output)
            os._exit(0)
        finally:
            os._exit(1)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_points_it_ends_as_if_undisturbed(root, model, tmp_path, seed):
    begin = time.monotonic()
    make(root, model, tmp_path / "whole")
    duration = time.monotonic() - begin
    whole, output, rng, kills = content(tmp_path / "whole"), tmp_path / "tokens", random.Random(seed), 0
    while kills < 8:
        if killed(root, model, output, rng.uniform(0, duration)):
            kills += 1
            found = content(output) if output.exists() else {}
            assert all(whole[name] == found[name] for name in found if name.endswith(".tokens"))  # whole, or not there
            assert MANIFEST not in found or found[MANIFEST] == whole[MANIFEST]
        else:
            assert content(output) == whole
            shutil.rmtree(output)
    make(root, model, output)
    assert content(output) == whole and hidden(output) == {".lock", ".checked.json"}


def test_finished_shards_are_kept_and_damaged_ones_made_again(root, model, tmp_path):
    output = tmp_path / "tokens"
    make(root, model, output)
    whole, names = content(output), sorted(path.name for path in output.glob("train*"))
    times = {name: (output / name).stat().st_mtime_ns for name in names}
    (output / names[1]).write_bytes(whole[names[1]][:-1] + b"\x07")
    (output / names[2]).unlink()
    reports = make(root, model, output, workers=2)
    assert (reports[-1].kept, reports[-1].finished) == (SHARDS - 1, SHARDS + 1) and content(output) == whole
    changed = [name for name in names if (output / name).stat().st_mtime_ns != times[name]]
    assert changed == names[1:3]
    again = make(root, model, output)
    assert again[-1].kept == SHARDS + 1 and again[-1].tokens == 0


def work(folder, job):
    """A job that says which process works at it, and never ends."""
    (Path(folder) / str(os.getpid())).touch()
    yield job
    time.sleep(600)


def test_workers_end_with_a_parent_that_is_killed(tmp_path):
    program = f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(REPO)!r}]
        from test_data_prepare import in_processes, work
        for event in in_processes(work, (sys.argv[1],), [1, 2], 2):
            print(event, flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert {parent.stdout.readline(), parent.stdout.readline()} == {"1\n", "2\n"}
        workers = [int(path.name) for path in tmp_path.iterdir()]
        assert len(workers) == 2 and all(map(alive, workers))
        parent.kill()
        deadline = time.monotonic() + 20
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, workers))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def end_at_once(job):
    if job == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    yield job


def test_a_worker_that_is_killed_ends_the_preparation_with_its_reason():
    with pytest.raises(UserError, match=r"a worker process ended unexpectedly \(signal 9\).*fewer --workers"):
        list(in_processes(end_at_once, (), [1, 2, 3], 2))


# ----------------------------------------------------------------------------------------------------
# In the way


def test_a_full_disk_is_named_and_nothing_is_left_half(root, model, tmp_path, monkeypatch):
    made = itertools.count()

    class Full(module._Hashed):
        def __init__(self, path):
            super().__init__(path)
            if next(made) == 3:
                self._file.close()
                self._file = open("/dev/full", "wb")  # noqa: SIM115

    with monkeypatch.context() as patch:
        patch.setattr(module, "_Hashed", Full)
        with pytest.raises(UserError, match=r"train-00003-of-00006\.tokens: cannot be written \(No space left"):
            make(root, model, tmp_path / "tokens")
    assert MANIFEST not in content(tmp_path / "tokens") and hidden(tmp_path / "tokens") == {".lock"}
    reports = make(root, model, tmp_path / "tokens")
    assert reports[-1].kept == 3
    make(root, model, tmp_path / "whole")
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")


@pytest.mark.parametrize("workers", [1, 2])
def test_unreadable_input_is_named_and_the_rest_kept(root, model, tmp_path, workers):
    path = sorted(root.glob("c4-train*"))[4]
    sound = path.read_bytes()
    path.write_bytes(sound[:200] + bytes(len(sound) - 200))  # as many bytes: the source is the same
    with pytest.raises(UserError, match=r"c4-train\.00004-of-00006\.json\.gz: (damaged|document)"):
        make(root, model, tmp_path / "tokens", workers)
    assert hidden(tmp_path / "tokens") == {".lock"}
    path.write_bytes(sound)
    assert make(root, model, tmp_path / "tokens")[-1].kept >= 1
    TokenSource(tmp_path / "tokens").check(print)


def test_a_shard_that_was_cut_off_is_fetched_again_and_the_finished_ones_are_kept(root, model, tmp_path):
    train = sorted(root.glob("c4-train*"))
    sound = train[4].read_bytes()
    train[4].write_bytes(sound[: len(sound) // 2])
    with pytest.raises(UserError, match=r"c4-train\.00004-of-00006\.json\.gz: damaged or cut off"):
        make(root, model, tmp_path / "tokens")
    train[4].write_bytes(sound)
    train[0].write_bytes(train[0].read_bytes() + gzip.compress(b'{"text": "more"}\n'))  # another was cut off as well
    assert make(root, model, tmp_path / "tokens")[-1].kept == 3
    make(root, model, tmp_path / "whole")
    assert content(tmp_path / "tokens") == content(tmp_path / "whole")


def test_shards_that_are_all_others_are_another_source(root, model, tmp_path):
    train = sorted(root.glob("c4-train*"))
    train[1].write_bytes(train[1].read_bytes()[:-9])
    with pytest.raises(UserError, match="damaged or cut off"):
        make(root, model, tmp_path / "tokens")
    for path in train:
        path.write_bytes(gzip.compress(b'{"text": "words of another source"}\n'))
    with pytest.raises(UserError, match="holds the tokens of another source"):
        make(root, model, tmp_path / "tokens")


def test_another_source_or_tokenizer_may_not_be_mixed_in(root, model, tmp_path):
    make(root, model, tmp_path / "tokens")
    before = content(tmp_path / "tokens")
    other = tmp_path / "other.model"
    sample.train_tokenizer(other, ["other words for another tokenizer, one and two"] * 3, pieces=30)
    with pytest.raises(UserError, match=r"holds the tokens of another source, tokenizer or format .*text: 6 train"):
        make(root, other, tmp_path / "tokens")
    path = sorted(root.glob("c4-train*"))[0]
    path.write_bytes(gzip.compress(b'{"text": "a changed source"}\n'))
    with pytest.raises(UserError, match="Name another folder, or delete this one"):
        make(root, model, tmp_path / "tokens")
    assert content(tmp_path / "tokens") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "spiece.model").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"is not empty \(it has spiece.model\)"):
        make(root, model, tmp_path / "mine")
    assert content(tmp_path / "mine") == {"spiece.model": b"precious"}


@pytest.mark.parametrize("text", ["{", "[]", '{"source": 3}'])
def test_a_damaged_journal_is_named(root, model, tmp_path, text):
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / JOURNAL).write_text(text)
    with pytest.raises(UserError, match=r"unfinished\.json: damaged"):
        make(root, model, tmp_path / "tokens")


def test_one_preparation_at_a_time(root, model, tmp_path):
    left = tmp_path / "tokens" / ".train-00000-of-00006.tokens.77"
    left.parent.mkdir()
    left.touch()
    with module._alone(tmp_path / "tokens"), pytest.raises(UserError, match="another command is preparing it"):
        assert not left.exists()
        make(root, model, tmp_path / "tokens")
    assert len(make(root, model, tmp_path / "tokens")) > 1


def test_on_a_file_system_without_locks_a_file_names_who_prepares(root, model, tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(module.fcntl, "flock", flock)
    output = tmp_path / "tokens"
    left = output / ".train-00000-of-00006.tokens.77"
    with module._alone(output):
        left.touch()
        rule = rf"tokens/\.claim: process {os.getpid()} on .+ is preparing this folder, .*delete this file where"
        with pytest.raises(UserError, match=rule):
            make(root, model, output)
        assert left.exists()  # of the one who prepares
    make(root, model, output)
    assert hidden(output) == {".lock", ".checked.json"}
    (output / ".claim").write_text("process 1 on a machine that was lost")
    with pytest.raises(UserError, match="process 1 on a machine that was lost is preparing"):
        make(root, model, output)


def test_of_tokenizers_that_two_commands_train_at_once_one_stays(root, tmp_path, monkeypatch):
    source, inner = open_source(make_config(data__root=root)), script.train_tokenizer
    made = []

    def train(path, *given):
        inner(path, *given)
        if not made:  # while this one trains, the other begins and ends
            made.append(path)
            script.own_tokenizer(source, tmp_path / "tokens", 300)
            made.append((tmp_path / "tokens.300.model").stat().st_ino)

    monkeypatch.setattr(script, "train_tokenizer", train)
    path = script.own_tokenizer(source, tmp_path / "tokens", 300)
    assert path.stat().st_ino == made[1] and Tokenizer(path).vocab_size <= 300
    assert [path.name for path in tmp_path.iterdir() if "300" in path.name] == ["tokens.300.model"]


def test_a_folder_that_cannot_be_made_is_named(root, model, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file/tokens: Not a directory"):
        make(root, model, tmp_path / "file" / "tokens")


# ----------------------------------------------------------------------------------------------------
# The command


def test_the_command_and_training_on_what_it_made(root, model, tmp_path):
    words = ["data=c4_local", f"data.root={root}", f"tokenizer.path={model}", "--output", tmp_path / "tokens"]
    program = "import runpy, sys; sys.argv[0] = sys.argv.pop(1); runpy.run_path(sys.argv[0], run_name='__main__')"
    for again in (False, True):
        output, _ = run_python(
            f"import sys\ntry:\n    {program}\nexcept SystemExit as end:\n    assert not end.code, end.code",
            tmp_path,
            [REPO / "scripts" / "prepare_data.py", *words, "--workers", "2"],
        )
        assert f"7/7 shards{' (7 kept)' if again else ''}" in output
        assert f"python train.py data=tokens data.root={tmp_path / 'tokens'}" in output
    TokenSource(tmp_path / "tokens").check(print)


def test_a_tokenizer_of_its_own_is_trained_once(tmp_path, monkeypatch, capsys, corpus):
    words = ["prepare_data.py", "data=c4_local", f"data.root={corpus}", "--output", str(tmp_path / "tokens")]
    monkeypatch.setattr(sys, "argv", [*words, "--train-tokenizer", "300"])
    made = []
    for _ in range(2):
        assert script.main() == 0
        made.append((tmp_path / "tokens.300.model").stat())
    assert made[0].st_mtime_ns == made[1].st_mtime_ns
    said = capsys.readouterr().out
    assert said.count("training a tokenizer of 300 pieces") == 1
    assert said.count("taking the tokenizer that was trained before") == 1
    assert 0 < Tokenizer(tmp_path / "tokens.300.model").vocab_size <= 300
    assert (tmp_path / "tokens" / "spiece.model").read_bytes() == (tmp_path / "tokens.300.model").read_bytes()
    monkeypatch.setattr(sys, "argv", [*sys.argv, f"tokenizer.path={tmp_path}/tokens.300.model"])
    assert script.main() == EXIT_CONFIG and "Leave one of them out" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--train-tokenizer", "310"])
    assert script.main() == 0 and "training a tokenizer of 310 pieces" in capsys.readouterr().out


def test_lines_that_no_tokenizer_learns_from_are_told(tmp_path, monkeypatch, capsys):
    short = ["Sense and sound, of letters that make words of many kinds.", "Another line of words to learn from."] * 40
    write_shards(tmp_path, [[*short, "long " * 900]])
    write_shards(tmp_path, [["validation"]], split="validation")
    words = ["prepare_data.py", "data=c4_local", f"data.root={tmp_path}", "--output", str(tmp_path / "tokens")]
    monkeypatch.setattr(sys, "argv", [*words, "--train-tokenizer", "300", "--workers", "1"])
    assert script.main() == 0
    assert "sentencepiece leaves lines of over 4,192 bytes out: 54 % of these texts" in capsys.readouterr().out


def test_a_preparation_needs_no_logger(tmp_path, monkeypatch, root, model):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == "wandb" else real(name, *of))
    words = ["data=c4_local", f"data.root={root}", f"tokenizer.path={model}", "--output", str(tmp_path / "tokens")]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *words, "--workers", "1"])
    assert script.main() == 0


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["data=c4_local", "data.seed=1"], "data.seed=1: says nothing about texts or tokens"),
        (["data=c4_local", "data={seed: 1}"], "data.seed=1: says nothing about texts or tokens"),
        (["data=c4_local", "train.lr=1"], "train.lr=1: says nothing about texts or tokens"),
        (["data=sample", "experiment=paper"], "experiment=paper: says nothing about texts or tokens"),
        (["data=c4_local"], "data.root"),
        (["data=c4_locl"], "c4_local"),
        (["data=sample", "--workers", "0"], "--workers=0: must be at least 1"),
        (["data=sample", "--train-tokenizer", "9"], "--train-tokenizer=9: must be at least 300"),
        (["data=sample", "--worker-count=4"], "--worker"),
    ],
)
def test_what_the_command_would_ignore_is_refused(words, rule, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *words, "--output", str(tmp_path / "tokens")])
    assert script.main() == EXIT_CONFIG
    assert rule in capsys.readouterr().err
    assert not (tmp_path / "tokens").exists()


def test_tokens_are_not_prepared_from_tokens(root, model, tmp_path, monkeypatch, capsys):
    make(root, model, tmp_path / "tokens")
    words = ["data=tokens", f"data.root={tmp_path / 'tokens'}", "--output", str(tmp_path / "more")]
    monkeypatch.setattr(sys, "argv", ["prepare_data.py", *words])
    assert script.main() == EXIT_CONFIG and "Name the source of its text" in capsys.readouterr().err


def test_progress_is_one_line_in_place_on_a_terminal_and_a_line_now_and_then_elsewhere(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    states = [Progress(4, i, 1 if i else 0, 10 * i, 1000 * i) for i in range(5)]
    for stream, expected in ((Terminal(), 5), (io.StringIO(), 2)):
        clock = itertools.count(100)
        monkeypatch.setattr(script.time, "monotonic", lambda clock=clock: float(next(clock)))
        display = script.Display(stream)
        for state in states:
            display(state)
        text = stream.getvalue()
        assert text.count("shards") == expected
        assert text.count("\n") == (1 if expected == 5 else 2) and text.endswith("\n")
        assert text.count("\r") == (5 if expected == 5 else 0)
        assert "4/4 shards (1 kept)  40 documents  4,000 tokens" in text
    assert script.describe(Progress(10, 5, 1, 0, 2_000_000), 8.0).endswith("0.2M tokens/s  0:00:10 left")
