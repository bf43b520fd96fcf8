"""Preparing tokens: killed at any point it goes on, and what stands in its way is named."""

import gzip
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import tokenizers.models
import tokenizers.pre_tokenizers
from data_corpus import REPO, global_batches, make_config, run_python, same, write_shards

from dlr_pretrain.data import load_tokenizer, open_source, open_tokenizer, validation_set
from dlr_pretrain.data import prepare as module
from dlr_pretrain.data.prepare import JOURNAL, Progress, prepare
from dlr_pretrain.data.sources import TextSource
from dlr_pretrain.data.tokenizer import train_tokenizer
from dlr_pretrain.data.tokens import MANIFEST, TOKENIZER, TokenSource
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
    found = {str(p.relative_to(folder)): p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")}
    return {name: path.read_bytes() for name, path in found.items()}


def hidden(folder: Path) -> set[str]:
    return {path.name for path in folder.glob(".*")}


# ----------------------------------------------------------------------------------------------------
# What is written


def test_any_number_of_workers_writes_the_same_folder(root, model, tmp_path):
    alone, several = make(root, model, tmp_path / "one"), make(root, model, tmp_path / "several", workers=3)
    whole = content(tmp_path / "one")
    assert whole == content(tmp_path / "several")
    names = [f"train-{i:05d}-of-{SHARDS:05d}.tokens" for i in range(SHARDS)] + ["validation-00000-of-00001.tokens"]
    assert sorted(whole) == [MANIFEST, *(f"{TOKENIZER}/{n}" for n in ("spiece.model", "tokenizer_config.json")), *names]
    assert hidden(tmp_path / "one") == {".lock", ".checked.json"}
    manifest = json.loads(whole[MANIFEST])
    for reports in (alone, several):
        assert (reports[0].finished, reports[-1].finished, reports[-1].shards) == (0, SHARDS + 1, SHARDS + 1)
        assert (reports[-1].documents, reports[-1].tokens) == (manifest["documents"], manifest["tokens"])
    assert manifest["documents"] == SHARDS * 60 + 9
    assert manifest["shards"]["train"][2]["source"] == f"c4-train.00002-of-{SHARDS:05d}.json.gz"


def test_a_large_vocabulary_rows_that_are_left_out_and_another_end(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(70_000)} | {"END": 70_000}))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    lines = [json.dumps({"text": f"w{i} w{i % 7}"}) if i % 9 else "{bad" for i in range(900)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(lines))
    keys = {"data__bad_rows": "skip", "data__held_out": 0.1, "train__seq_len": 16, "eval__packing": "packed"}
    keys |= {"tokenizer__path": tmp_path / "words.json", "tokenizer__eos": "END", "train__global_batch": 4}
    cfg = make_config("local", data__root=tmp_path / "text", **keys)
    source = open_source(cfg)
    made = prepare(source, open_tokenizer(cfg, source), tmp_path / "tokens", 1, lambda _: None)
    assert sum(entry.documents for entry in made.entries.values()) == 800 and made.vocab_size == 70_001
    made.check(print)
    other = make_config(
        "tokens", data__root=tmp_path / "tokens", train__seq_len=16, eval__packing="packed", train__global_batch=4
    )
    found = [(cfg, source, open_tokenizer(cfg, source)), (other, made, open_tokenizer(other, made))]
    assert same(*(global_batches(*one, 2, 200) for one in found))  # several epochs
    one, two = (validation_set(*each) for each in found)
    assert one.tokens.tolist() == two.tokens.tolist() and one.real_tokens == two.real_tokens


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


@pytest.mark.parametrize("seed", range(1))
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


def test_workers_end_with_a_parent_that_is_killed(root, model, tmp_path):
    program = f"""
        import sys
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(REPO)!r}]
        if __name__ == "__main__":
            from test_data_prepare import Path, Slow, make_config, open_source, open_tokenizer, prepare
            cfg = make_config(data__root={str(root)!r}, tokenizer__path={str(model)!r})
            slow = Slow(open_source(cfg).listing, cfg.data)
            slow.folder = {str(tmp_path)!r}
            prepare(slow, open_tokenizer(cfg, slow), Path({str(tmp_path / "tokens")!r}), 2, lambda _: None)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    with subprocess.Popen([sys.executable, tmp_path / "program.py"]) as parent:
        deadline = time.monotonic() + 60
        while len(workers := [int(p.name[4:]) for p in tmp_path.glob("pid_*")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(workers) == 2 and all(map(alive, workers))
        parent.kill()
        deadline = time.monotonic() + 20
        while any(map(alive, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, workers))


class Slow(TextSource):
    """Says which process reads, and never ends."""

    def read(self, shard, start=0, step=1):
        if multiprocessing.current_process().name != "MainProcess":
            (Path(self.folder) / f"pid_{os.getpid()}").touch()
            time.sleep(600)
        return super().read(shard, start, step)


class Deadly(TextSource):
    def read(self, shard, start=0, step=1):
        if multiprocessing.current_process().name != "MainProcess":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().read(shard, start, step)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_worker_that_is_killed_ends_the_preparation_with_its_reason(root, model, tmp_path):
    cfg = make_config(data__root=root, tokenizer__path=model)
    source = Deadly(open_source(cfg).listing, cfg.data)
    with pytest.raises(UserError, match=r"a worker process ended unexpectedly.*fewer --workers"):
        prepare(source, open_tokenizer(cfg, source), tmp_path / "tokens", 2, lambda _: None)


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
    path.write_bytes(
        sound[: len(sound) // 2] + bytes(len(sound) - len(sound) // 2)
    )  # as many bytes: the source is the same
    with pytest.raises(UserError, match=r"c4-train\.00004-of-00006\.json\.gz: (damaged|document)"):
        make(root, model, tmp_path / "tokens", workers)
    assert hidden(tmp_path / "tokens") == {".lock"}
    path.write_bytes(sound)
    assert make(root, model, tmp_path / "tokens")[-1].kept >= 1
    TokenSource(tmp_path / "tokens").check(print)


def test_another_source_or_tokenizer_may_not_be_mixed_in(root, model, tmp_path):
    make(root, model, tmp_path / "tokens")
    before = content(tmp_path / "tokens")
    other = tmp_path / "other.model"
    train_tokenizer(other, ["other words for another tokenizer, one and two"] * 3, pieces=30)
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
    assert 0 < load_tokenizer(tmp_path / "tokens.300.model").vocab_size <= 300
    assert (tmp_path / "tokens" / TOKENIZER / "spiece.model").read_bytes() == (
        tmp_path / "tokens.300.model"
    ).read_bytes()
    monkeypatch.setattr(sys, "argv", [*sys.argv, f"tokenizer.path={tmp_path}/tokens.300.model"])
    assert script.main() == EXIT_CONFIG and "Leave one of them out" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*words, "--train-tokenizer", "310"])
    assert script.main() == 0 and "training a tokenizer of 310 pieces" in capsys.readouterr().out


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
