"""Pre-tokenised shards: small text is tokenised at the start, kills lose no shard, and damage is named."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import tokenizers.models
import tokenizers.pre_tokenizers
import torch

from dlr_pretrain.data import (
    inputs_and_targets,
    load_tokenizer,
    open_source,
    open_tokenizer,
    prepare,
    streams,
    validation_set,
)
from dlr_pretrain.data.detect import is_compressed
from dlr_pretrain.data.formats import WHOLE, Part
from dlr_pretrain.data.prepare import make_tokens, tokenised_once
from dlr_pretrain.data.sources import TextSource
from dlr_pretrain.data.tokens import MANIFEST, TOKENIZER, TokenSource
from dlr_pretrain.train.record import open_record, update_record
from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED, UserError
from dlr_pretrain.util.files import locked
from tests.conftest import main_of
from tests.unit.data.data_corpus import (
    COMPRESS,
    NASTY,
    PACKINGS,
    global_batches,
    lines_of,
    make_config,
    same,
    small_model,
    write_shards,
    write_table,
)

WORDS = [" ".join(["word", "more", "text", "one"][(i * k) % 4] for k in range(i % 60)) for i in range(300)]
SPLITS = ("train", "validation")
SHARDS = [[*NASTY, *WORDS[:90]], WORDS[90:150], ["word " * 5000, *WORDS[150:]]]


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    """Each file of a few kilobytes fills a shard, and a larger one is divided among several jobs."""
    monkeypatch.setattr(prepare, "SHARD_BYTES", 4000)
    monkeypatch.setattr(prepare, "JOB_BYTES", 2000)
    monkeypatch.setattr(prepare, "COMPRESSED_PARTS", 1)


@pytest.fixture
def root(tmp_path):
    write_shards(tmp_path / "text", SHARDS)
    write_shards(tmp_path / "text", [WORDS[1:40]], split="validation")
    return tmp_path / "text"


def opened(cfg):
    source = open_source(cfg)
    return cfg, source, open_tokenizer(cfg, source)


def make(root: Path, model: Path, output: Path, workers: int = 1) -> list[bool]:
    """Prepare; returns for each shard whether it existed."""
    _, source, tokenizer = opened(make_config(data__root=root, tokenizer__path=model))
    return list(make_tokens(source, tokenizer, output, workers))


@pytest.fixture
def made(root, model, tmp_path):
    make(root, model, tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.fixture
def cfg(root, model, tmp_path):
    """The configuration of a run on the text, whose tokens go to a cache of the test."""
    return make_config(data__root=root, data__cache=tmp_path / "cache", tokenizer__path=model)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@PACKINGS
def test_small_text_has_the_batches_of_its_tokens(root, made, model, packing, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_DOCUMENTS", 16)
    keys = {"data__packing": packing, "eval__packing": packing, "train__seq_len": 16, "train__global_batch": 12}
    own = {"data__root": root, "data__cache": tmp_path / "cache", "tokenizer__path": model}
    cfg, source, tokenizer = opened(make_config(**own, **keys))
    said: list[str] = []
    text = cfg, tokenised_once(source, tokenizer, cfg.num_streams, said.append), tokenizer
    tokens = opened(make_config("tokens", data__root=made, **keys))
    for cfg, source, tokenizer in (text, tokens):  # a run on text may continue with its tokens
        prints = {"shards": source.fingerprint, "order": source.order, "pieces": tokenizer.fingerprint}
        (run_dir := tmp_path / "run").mkdir(exist_ok=True)
        open_record(run_dir, cfg, prints)
        update_record(run_dir, {"saved": 1})
    whole = global_batches(*text, 1, 40)  # several epochs
    head = global_batches(*tokens, 2, 17)
    assert same(head + global_batches(*text, 4, 3, head[-1][3]), whole[:20])
    assert same(global_batches(*tokens, 4, 20, whole[19][3]), whole[20:])
    for budget in (1, 500, 10**6):
        both = []
        streamed = opened(make_config(data__root=root, tokenizer__path=model, **keys))
        for cfg, source, tokenizer in (text, tokens, streamed):
            cfg.eval.tokens = budget
            found = validation_set(cfg, source, tokenizer)
            both.append(inputs_and_targets(torch.from_numpy(found.tokens), torch.from_numpy(found.lengths)))
        assert all(map(torch.equal, both[0], both[1])) and all(map(torch.equal, both[0], both[2]))
    assert len(said) == 1 and said[0].startswith("tokenising the text (about ")


def kept(cfg, said=None):
    """The folder with the tokens of a configuration's text."""
    _, source, tokenizer = opened(cfg)
    return tokenised_once(source, tokenizer, cfg.num_streams, (said if said is not None else []).append).root


def test_small_text_is_tokenised_again_only_after_a_change(root, tmp_path, cfg):
    said: list[str] = []
    first = kept(cfg, said)
    assert first.parent == tmp_path / "cache" / "tokens" and kept(cfg, said) == first and len(said) == 1
    path = root / "c4-train.00001-of-00003.json.gz"
    os.utime(path, ns=(1, 1))  # as after an edit that keeps the size
    assert kept(cfg, said) != first and len(said) == 2
    cfg.tokenizer.path = str(small_model(tmp_path))
    assert kept(cfg, said) != first and len(said) == 3
    assert [folder.name for folder in first.parent.iterdir() if folder.name.startswith(".")] == []


@pytest.mark.parametrize("address", ["", "file://"])
def test_text_that_was_replaced_is_tokenised_again(root, model, tmp_path, address):
    """Also if the new text has the same size and, on a disk, the same time."""
    given = {"data__root": f"{address}{root}", "data__cache": tmp_path / "cache", "tokenizer__path": model}
    cfg, path = make_config(**given), root / "c4-train.00001-of-00003.json.gz"
    first, content, times = kept(cfg), path.read_bytes(), path.stat().st_mtime_ns
    path.unlink()
    path.write_bytes(content[:4] + b"time" + content[8:])  # the time in gzip's header
    if not address:
        os.utime(path, ns=(times, times))
    assert kept(cfg) != first


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"damaged")])
def test_a_damaged_folder_of_the_cache_is_made_again(tmp_path, damage, cfg):
    said: list[str] = []
    whole = content(kept(cfg, said))
    damage(tmp_path / "cache" / "tokens" / kept(cfg).name / ONE)
    assert content(kept(cfg, said)) == whole and len(said) == 2


def test_simultaneous_starts_share_one_folder_of_tokens(tmp_path, cfg):
    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(lambda _: kept(cfg), range(4)))
    assert len({*folders}) == 1 and len(list((tmp_path / "cache" / "tokens").iterdir())) == 1


def test_large_text_is_streamed_if_its_files_can_be_dealt(tmp_path, model, monkeypatch):
    monkeypatch.setattr(prepare, "SMALL_BYTES", 1000)
    write_shards(tmp_path / "text", [WORDS[:90]] * 8)
    keys = {"data__root": tmp_path / "text", "data__cache": tmp_path / "cache", "tokenizer__path": model}
    _, source, tokenizer = opened(make_config("local", **keys))
    assert tokenised_once(source, tokenizer, 8, print) is source
    assert isinstance(tokenised_once(source, tokenizer, 64, print), TokenSource)
    assert source.order != TokenSource.order  # so a run does not continue in the other order


def test_text_whose_tokens_need_much_is_refused_with_the_command(monkeypatch, cfg):
    command = r"scripts/prepare_data\.py, with your keys of data and tokenizer, makes them for data=tokens$"
    monkeypatch.setattr(prepare, "MAX_MINUTES", 0)
    with pytest.raises(UserError, match=rf"the text is long: its tokens \(about [\d.]+kB, .* First, {command}"):
        kept(cfg)
    monkeypatch.setattr(prepare.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    rule = r"cache: 1B of space do not hold the tokens of the text \(about [\d.]+kB, [\d.]+kB of tokens, 1 minute\)"
    with pytest.raises(UserError, match=rf"data\.cache=.*{rule}\. Set it to a folder with space; or {command}"):
        kept(cfg)


def test_a_start_waits_for_another_that_tokenises_the_text(cfg):
    folder, said, waits = kept(cfg), [], threading.Event()
    shutil.rmtree(folder)
    with ThreadPoolExecutor(1) as pool:
        with locked(folder):
            other = pool.submit(kept, cfg, Told(said, waits))
            assert waits.wait(600)
        assert other.result() == folder
    assert said[0].startswith(f"waiting for process {os.getpid()} on ") and said[1].startswith("tokenising")


class Told:
    """Collects messages, and says when the first has come."""

    def __init__(self, said: list[str], first: threading.Event):
        self.said, self.first = said, first

    def append(self, text: str) -> None:
        self.said.append(text)
        self.first.set()


def test_a_cache_without_room_is_named(root, model, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cache/tokens: the tokens of the text cannot be written here: .* data\.cache"):
        kept(make_config(data__root=root, data__cache=tmp_path / "cache", tokenizer__path=model))


def test_large_vocabularies_bad_rows_and_other_end_tokens(tmp_path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(70_000)} | {"END": 70_000}))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    lines = [json.dumps({"text": f"w{i} w{i % 7}"}) if i % 9 else "{bad" for i in range(900)]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(lines))
    keys = {"train__seq_len": 16, "eval__packing": "packed", "train__global_batch": 4}
    own = {"tokenizer__path": tmp_path / "words.json", "tokenizer__eos": "END", "data__bad_rows": "skip"}
    text = opened(make_config("local", data__root=tmp_path / "text", data__held_out=0.1, **keys, **own))
    list(make_tokens(*text[1:], tmp_path / "tokens", 1))
    made = TokenSource(tmp_path / "tokens")
    assert made.vocab_size == 70_001 and made.shard(made.train_shards[0])[0].dtype == np.int32
    tokens = opened(make_config("tokens", data__root=tmp_path / "tokens", **keys))
    batches = global_batches(*tokens, 2, 2 * 2400 // 64)
    read = {int(id) for inputs, *_ in batches for id in inputs.ravel()}
    held = [t for shard in text[1].validation_shards for t in text[1].read(shard) if t is not None]
    unread = {f"w{i}" for i in range(7, 900) if i % 9 and i not in read}
    assert unread <= {text.split()[0] for text in held} and 70_000 in read
    one, two = (validation_set(*each) for each in (text, tokens))
    assert one.tokens.tolist() == two.tokens.tolist() and one.real_tokens == two.real_tokens


def test_kills_do_not_change_the_tokens(root, model, made, tmp_path, monkeypatch):
    """A process dies at every replacement of a file in turn, and the next process continues."""
    whole, output, deaths, replace = content(made), tmp_path / "again", 0, os.replace
    count = iter([])

    def die(*given):
        if next(count, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*given)

    monkeypatch.setattr(os, "replace", die)
    while True:
        count = iter([True] * 5)  # the four files of a shard, and one of the check of the file system
        if (child := os.fork()) == 0:
            try:
                make(root, model, output)
            finally:
                os._exit(0)
        if not os.waitpid(child, 0)[1]:
            break
        deaths += 1
        assert deaths < 20, "no process got further than the one before it"
        found = content(output)
        if MANIFEST in found:
            assert json.loads(found[MANIFEST]) | {"contents": {}} == json.loads(whole[MANIFEST]) | {"contents": {}}
    monkeypatch.setattr(os, "replace", replace)
    assert content(output) == whole and deaths > 2
    assert make(root, model, output) == [True] * 4


def test_any_number_of_workers_writes_the_same_shards(root, model, made, tmp_path):
    assert make(root, model, tmp_path / "several", workers=3) == [False] * 4
    whole = content(made)
    assert content(tmp_path / "several") == whole
    names = sorted(path.name for path in made.glob("train*.tokens"))
    (made / names[0]).write_bytes(whole[names[0]][:-1])
    (made / names[1]).with_suffix(".ends").unlink()
    assert make(root, model, made, workers=2) == [False, False, True, True] and content(made) == whole


@pytest.mark.parametrize("suffix", [".tokens", ".ends", ".files", ".sha256"])
def test_the_same_command_repairs_a_flipped_bit(root, model, made, suffix, cfg):
    """In a cache, the next start repairs it."""
    whole = content(made)
    flip((made / ONE).with_suffix(suffix))
    assert make(root, model, made) == [True, False, True, True] and content(made) == whole
    (made / ONE).with_suffix(suffix).unlink()
    assert make(root, model, made) == [True, False, True, True] and content(made) == whole
    whole = content(first := kept(cfg))
    flip((first / ONE).with_suffix(suffix))
    assert content(kept(cfg)) == whole


@PACKINGS
def test_the_order_does_not_depend_on_the_shards(tmp_path, model, packing, monkeypatch):
    monkeypatch.setattr(streams, "BLOCK_DOCUMENTS", 16)
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.jsonl").write_bytes(lines_of(WORDS[i * 7 : i * 7 + (1 if i % 4 else 60)]))
    keys = {"data__packing": packing, "eval__packing": packing, "train__seq_len": 16, "train__global_batch": 12}
    cfg, source, tokenizer = opened(
        make_config("local", data__root=tmp_path / "text", data__held_out=0.1, tokenizer__path=model, **keys)
    )
    whole, folders = [], {}
    for size in (1, 15_000, 100_000, 10**9):
        monkeypatch.setattr(prepare, "SHARD_BYTES", size)
        folders[size] = tmp_path / f"tokens-{size}"
        list(make_tokens(source, tokenizer, folders[size], 1))
        made = TokenSource(folders[size])
        sizes = made.sizes(packed=True), made.sizes(packed=False)
        validation = validation_set(cfg, made, tokenizer)
        whole.append((sizes, validation.tokens.tolist(), global_batches(cfg, made, tokenizer, 2, 40)))
    assert len({len([*folder.glob("train*.tokens")]) for folder in folders.values()}) == 4
    assert sorted(folders[10**9].glob("*.tokens")) == [folders[10**9] / f"{s}-00000-of-00001.tokens" for s in SPLITS]
    assert all(same(one[2], whole[0][2]) and one[:2] == whole[0][:2] for one in whole)
    assert 0 in whole[0][0][1]  # a file whose only document is held out keeps its number


PARAGRAPHS = "\n\n".join(f"{text}\nsecond line" for text in WORDS if text) + "\n \n\n" + "\r\n\r\nlast"


def packed(suffix: str, content: bytes):
    return lambda path: path.write_bytes(COMPRESS[suffix](content))


ONE_FILE = {  # how to write one large file, and the keys with which it is read
    "a.jsonl": (lambda path: path.write_bytes(lines_of(WORDS) + b"\n\n" + lines_of(NASTY)[:-1]), {}),
    "a.txt": (lambda path: path.write_text(PARAGRAPHS, newline=""), {"data__document": "paragraph"}),
    **{f"a.jsonl{suffix}": (packed(suffix, lines_of(WORDS)), {}) for suffix in COMPRESS},
    "a.txt.gz": (packed(".gz", PARAGRAPHS.encode()), {"data__document": "paragraph"}),
    "a.parquet": (lambda path: write_table(path, {"text": WORDS}, 7), {}),
    "a.arrow": (lambda path: write_table(path, {"text": WORDS}, 7), {}),
    "a.file.arrow": (lambda path: write_table(path, {"text": WORDS}, 7), {}),
}


QUICK = ("a.jsonl", "a.txt", "a.jsonl.gz", "a.parquet", "a.arrow")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in ONE_FILE])
def test_a_large_file_is_cut_among_processes(tmp_path, model, name, monkeypatch):
    """Its parts have each document once and in order, wherever they are cut."""
    (tmp_path / "text").mkdir()
    write, keys = ONE_FILE[name]
    write(tmp_path / "text" / name)
    cfg = make_config("local", data__root=tmp_path / "text", data__held_out=0.1, tokenizer__path=model, **keys)
    _, source, tokenizer = opened(cfg)
    whole = [*source.divided(name, WHOLE)]
    cuts = [(count, None) for count in (2, 3, 40, 997, 5000)]
    if is_compressed(name):  # the expected bytes may be wrong; a part is decompressed from the start
        cuts = [*product((2, 3, 40), (100, 50_000, 10**6)), (997, 100)]
    for count, expected in cuts:
        parts = (Part(i, count, expected) for i in range(count))
        assert [row for part in parts for row in source.divided(name, part)] == whole
    monkeypatch.setattr(prepare, "COMPRESSED_PARTS", 16)
    monkeypatch.setattr(prepare, "JOB_BYTES", 300)
    monkeypatch.setattr(prepare, "SHARD_BYTES", 10**9)
    assert len(prepare.plan(source)) == 1 and len(prepare.plan(source)[0][1]) > 3
    made = {}
    for workers, size in ((1, 10**9), (1, 2000), (2, 2000)):
        monkeypatch.setattr(prepare, "JOB_BYTES", size)
        list(make_tokens(source, tokenizer, tmp_path / f"{workers}-{size}", workers))
        made[workers, size] = content(tmp_path / f"{workers}-{size}")
        made[workers, size] = {path: held for path, held in made[workers, size].items() if path.endswith("s")}
    assert made[1, 2000] == made[2, 2000] and len(made[1, 2000]) == 6
    for path in ("train-00000-of-00001.tokens", "validation-00000-of-00001.ends"):  # .files has a row for each part
        assert made[1, 10**9][path] == made[1, 2000][path]


def test_a_bad_row_in_a_part_is_named_by_its_number_in_the_file(tmp_path, model):
    (tmp_path / "a.jsonl").write_bytes(lines_of(WORDS * 4) + b"{bad\n" + lines_of(WORDS))
    _, source, _ = opened(make_config("local", data__root=tmp_path, tokenizer__path=model))
    with pytest.raises(UserError, match=r"a.jsonl: document 1200 \(line 1201\) is not JSON"):
        [*source.divided("a.jsonl", Part(3, 4))]


@pytest.mark.parametrize("locks", [True, False])
def test_another_process_that_prepares_the_folder_is_named(root, model, tmp_path, monkeypatch, locks):
    if not locks:
        monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError("Function not implemented")))
    with locked(tmp_path / "tokens"):
        if locks:
            with pytest.raises(UserError, match=f"is being written by process {os.getpid()} on .*Wait for it, stop it"):
                make(root, model, tmp_path / "tokens")
        else:
            assert make(root, model, tmp_path / "tokens") == [False] * 4
    make(root, model, tmp_path / "tokens")
    assert not (tmp_path / "tokens" / ".lock").exists()


def test_a_tokenizer_is_not_trained_where_another_process_writes(root, tmp_path, capsys):
    command = ("data=c4_local", f"data.root={root}", "--train-tokenizer", "300", "--output", tmp_path / "tokens")
    with locked(tmp_path / "tokens"):
        assert main_of("prepare_data", *command) == EXIT_FAILED
    said = capsys.readouterr()
    assert f"is being written by process {os.getpid()} on " in said.err and "training" not in said.out


class Deadly(TextSource):
    """A source whose readers are killed, as when memory runs out."""

    def divided(self, name, part):
        os.kill(os.getpid(), signal.SIGKILL)
        yield "", None


def test_a_dead_worker_is_reported(root, model, tmp_path):
    _, source, tokenizer = opened(make_config(data__root=root, tokenizer__path=model))
    source.__class__ = Deadly
    with pytest.raises(UserError, match=r"terminated abruptly.*--workers.*are kept"):
        list(make_tokens(source, tokenizer, tmp_path / "tokens", 2))


class Endless(TextSource):
    """A source whose readers write a letter into a pipe, and hold it open as long as they live."""

    def divided(self, name, part):
        with open(Path(self.data.root) / "pipe", "wb", buffering=0) as pipe:
            pipe.write(b"r")
            time.sleep(600)
        yield "", None


def test_workers_end_when_their_parent_is_killed(root, model, tmp_path):
    program = f"""
from pathlib import Path
from tests.unit.data.test_tokens import Endless, make_config, make_tokens, opened, prepare
prepare.SHARD_BYTES = 4000
_, source, tokenizer = opened(make_config(data__root={str(root)!r}, tokenizer__path={str(model)!r}))
source.__class__ = Endless
list(make_tokens(source, tokenizer, Path({str(tmp_path)!r}, "tokens"), 2))
"""
    os.mkfifo(root / "pipe")
    pipe = os.open(root / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    begun, paths = b"", os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, "-c", program], env=paths, start_new_session=True)
    try:
        while len(begun) < 2:
            assert select.select([pipe], [], [], 600)[0], "no reader has begun"
            begun += os.read(pipe, 2)
        parent.kill()
        assert select.select([pipe], [], [], 600)[0] and os.read(pipe, 1) == b"", "a reader lives on"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
        os.close(pipe)


def test_a_folder_with_other_files_is_not_touched(root, model, made, tmp_path):
    before = content(made)
    write_shards(root, [["a changed source"]])
    with pytest.raises(UserError, match=r"holds the tokens of another source or tokenizer .*text: 3 train"):
        make(root, model, made)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "spiece.model").write_bytes(b"precious")
    with pytest.raises(UserError, match=r"is not empty \(it has spiece.model\), and holds no tokens"):
        make(root, model, tmp_path / "mine")
    assert content(made) == before and content(tmp_path / "mine") == {"spiece.model": b"precious"}


def test_the_command_continues_and_trains_a_tokenizer_once(root, tmp_path, capsys):
    command = partial(main_of, "prepare_data", "--output", tmp_path / "tokens")
    assert command("data=sample", "--workers", "0") == EXIT_CONFIG and "at least 1" in capsys.readouterr().err
    assert command("data=sample", "train.lr=3", "data.seed=4") == EXIT_CONFIG
    assert capsys.readouterr().err.count("does not affect texts or tokens") == 2
    assert command("data=sample", "data.train_files=x[01]*.gz") == EXIT_CONFIG
    assert "not a plain value to Hydra. Quote it" in capsys.readouterr().err
    assert not (tmp_path / "tokens").exists()
    for _ in range(2):
        assert command("data=c4_local", f"data.root={root}", "--train-tokenizer", "300", "--workers", "1") == 0
    said = capsys.readouterr().out
    assert said.count("training a tokenizer of 300") == said.count("using the tokenizer that was trained") == 1
    assert "(4 shards were already there)" in said and f"command: data=tokens data.root={tmp_path / 'tokens'}" in said
    trained = (tmp_path / "tokens.300.model").read_bytes()
    assert (tmp_path / "tokens" / TOKENIZER / "spiece.model").read_bytes() == trained


@pytest.mark.parametrize("held_out", [True, False])
def test_rows_left_out_are_counted_by_file(tmp_path, model, held_out, capsys):
    """In what the command says, in the manifest, in the summary of a run on text, and in that of one on its tokens."""
    text, bad = tmp_path / "text", b'{"content": "another column"}\n'
    text.mkdir()
    (text / "a.jsonl").write_bytes(lines_of(WORDS))
    (text / "b.jsonl").write_bytes(bad * 290 + lines_of(WORDS[:10]))
    if not held_out:
        (text / "validation.jsonl").write_bytes(bad * 3 + lines_of(WORDS[:4]))
    given = ("data=local", f"data.root={text}", f"tokenizer.path={model}", "data.bad_rows=skip", "--workers", "1")
    for _ in range(2):
        assert main_of("prepare_data", *given, "--output", tmp_path / "tokens") == 0
        more = "" if held_out else ", 3 of 7 in validation.jsonl"
        counted = f"{290 if held_out else 293} left out: 290 of 300 in b.jsonl{more}"
        assert f"\nbad rows    {counted}\n" in capsys.readouterr().out
    own = {"data__root": text, "data__bad_rows": "skip", "data__cache": tmp_path / "cache", "tokenizer__path": model}
    _, source, tokenizer = opened(make_config("local", **own))
    for _ in range(2):
        assert tokenised_once(source, tokenizer, 4, print).contents["bad rows"] == counted
    assert TokenSource(tmp_path / "tokens").contents["bad rows"] == counted


@pytest.mark.parametrize("job_bytes", [1000, 10**6])
def test_a_file_of_which_no_row_remains_stops_the_run(tmp_path, model, job_bytes, monkeypatch):
    monkeypatch.setattr(prepare, "JOB_BYTES", job_bytes)
    (tmp_path / "a.jsonl").write_bytes(lines_of(WORDS * 4))
    (tmp_path / "b.jsonl").write_bytes(b'{"content": "another column"}\n' * 290)
    cfg = make_config("local", data__root=tmp_path, data__bad_rows="skip", tokenizer__path=model)
    _, source, tokenizer = opened(cfg)
    rule = r"b\.jsonl: data\.bad_rows=skip leaves out all of its 290 rows: .*Set data\.text_key to .* or leave the file"
    with pytest.raises(UserError, match=rule):
        list(make_tokens(source, tokenizer, tmp_path / "tokens", 1))
    with pytest.raises(UserError, match=rule):
        list(source.read("b.jsonl"))


def trained(tmp_path, capsys, texts: list[str], *words: str) -> tuple[int, str]:
    """The exit code of the command that trains a tokenizer on texts, and what it says."""
    (tmp_path / "a.jsonl").write_bytes(lines_of(texts))
    given = ("data=local", f"data.root={tmp_path}", "--output", tmp_path / "out", "--workers", "1", *words)
    code, said = main_of("prepare_data", *given), capsys.readouterr()
    return code, said.out + said.err


@pytest.mark.parametrize("space", ["", pytest.param(" ", marks=pytest.mark.full)])
def test_a_trained_tokenizer_has_seen_long_lines(tmp_path, capsys, space):
    short, long = ([f"{space}".join(letters[(i * k) % 10] * 3 for k in range(n)) for i in range(1, count)]
                   for letters, n, count in (("abcdefghij", 40, 400), ("klmnopqrst", 2000, 40)))  # fmt: skip
    code, said = trained(tmp_path, capsys, short + long, "--train-tokenizer", "300")
    tokenizer = load_tokenizer(tmp_path / "out.300.model")
    pieces = [tokenizer.token(i) for i in range(tokenizer.vocab_size)]
    assert code == 0 and sum(bool(set(piece) & set("klmnopqrst")) for piece in pieces) > len(pieces) / 4
    seen = re.search(
        r"training a tokenizer of 300 tokens on ([\d,]+) characters \((\d+) documents in 1 of 1 file\)", said
    )
    assert int(seen[1].replace(",", "")) > 200_000 and int(seen[2]) > 420


def test_a_tokenizer_with_too_few_tokens_is_refused_in_our_words(tmp_path, capsys):
    texts = ["".join(chr(0x4E00 + (i * 7 + k) % 3000) for k in range(1500)) for i in range(60)]
    code, said = trained(tmp_path, capsys, texts, "--train-tokenizer", "1000")
    rule = r"its characters alone need about 1,9\d\d tokens \(--character-coverage=0\.9999\)"
    assert code == EXIT_FAILED and re.search(f"{rule}. Give --train-tokenizer a larger number, or lower --char", said)
    assert "--character_coverage" not in said and "src/" not in said
    assert trained(tmp_path, capsys, texts, "--character-coverage", "0.99")[0] == EXIT_FAILED
    assert trained(tmp_path, capsys, texts, "--train-tokenizer", "9", "--character-coverage", "0.5")[0] == EXIT_FAILED


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def flip(path: Path) -> None:
    """Flip the lowest bit of a byte in the middle; UTF-8 text stays UTF-8."""
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)


ONE = "train-00001-of-00003.tokens"


@pytest.mark.parametrize(("damage", "rule"), [
    (lambda f: cut(f / ONE), rf"{ONE}: damaged or foreign"),
    (lambda f: cut((f / ONE).with_suffix(".ends")), rf"{ONE}: damaged or foreign"),
    (lambda f: (f / ONE).unlink(), rf"{ONE}: No such file"),
    (lambda f: (f / MANIFEST).unlink(), "has no manifest.json, so it is not a folder of tokens. Make it with"),
    (lambda f: (f / MANIFEST).write_text("[]"), "manifest.json: damaged"),
    (lambda f: (f / MANIFEST).write_text('{"format": 5, "source": "s"}'), "manifest.json: damaged"),
    (lambda f: (f / MANIFEST).write_text('{"format": 4}'), "format 4, but this version reads .*prepare_data.py again"),
    (lambda f: shutil.rmtree(f / TOKENIZER), "tokenizer: not a readable"),
])  # fmt: skip
def test_a_damaged_or_foreign_folder_is_refused_by_name(made, damage, rule):
    damage(made)
    with pytest.raises(UserError, match=rule):
        opened(make_config("tokens", data__root=made))


def test_a_shard_that_changes_during_the_run_is_named(made, model, tmp_path):
    cfg, source, tokenizer = opened(make_config("tokens", data__root=made, train__global_batch=1))
    other_cfg, _, other_tokenizer = opened(
        make_config("tokens", data__root=made, tokenizer__path=small_model(tmp_path))
    )
    with pytest.raises(UserError, match=r"not the tokenizer \(sha256 \w{12}.* Leave tokenizer.path out"):
        validation_set(other_cfg, source, other_tokenizer)
    (made / ONE).write_bytes(b"\xff" * (made / ONE).stat().st_size)
    with pytest.raises(UserError, match=rf"{ONE}: damaged or foreign: token [\d,]+ is 65535, beyond the vocabulary"):
        global_batches(cfg, source, tokenizer, 1, 300)
    ends = np.fromfile((made / ONE).with_suffix(".ends"), np.int64)
    ends[[10, 11]] = ends[[11, 10]]
    ends.tofile((made / ONE).with_suffix(".ends"))
    with pytest.raises(UserError, match=rf"{Path(ONE).stem}\.ends: damaged or foreign: the ends of documents 0 to"):
        global_batches(cfg, source, tokenizer, 1, 300)
    validation = made / source.validation_shards[0]
    validation.write_bytes(b"\xff" * validation.stat().st_size)
    with pytest.raises(UserError, match=rf"{validation.name}: damaged or foreign: token 0 is 65535, beyond the vocab"):
        validation_set(cfg, source, tokenizer)
    (made / ONE).write_bytes(b"short")
    with pytest.raises(UserError, match=rf"{ONE}: damaged or foreign"):
        global_batches(cfg, source, tokenizer, 1, 300)
