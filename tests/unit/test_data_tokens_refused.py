"""A folder of tokens that is damaged, foreign, or made with another tokenizer is refused by name."""

import json
import os
import shutil
from pathlib import Path

import pytest
from data_corpus import global_batches, make_config

from dlr_pretrain.data import open_source, open_tokenizer
from dlr_pretrain.data.tokens import CHECKED, FORMAT, MANIFEST, TOKENIZER
from dlr_pretrain.util.errors import UserError


def shard(folder: Path) -> Path:
    return next(folder.glob("train-00001*"))


def rewrite(path: Path, change) -> None:
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def flip(folder: Path) -> None:
    content = bytearray(shard(folder).read_bytes())
    content[len(content) // 3] ^= 1
    shard(folder).write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-8]), r"train-00001-of-00002.*\d bytes, and .* were"),
        (lambda f: shard(f).unlink(), "train-00001-of-00002.tokens: No such file"),
        (flip, "train-00001-of-00002.tokens: damaged or foreign: its checksum"),
        (lambda f: (f / MANIFEST).unlink(), "no manifest.json, so no finished folder of tokens. Make it with scripts"),
        (lambda f: (f / MANIFEST).write_text("{"), "manifest.json: damaged"),
        (lambda f: (f / MANIFEST).write_text("[]"), "manifest.json: damaged"),
        (lambda f: rewrite(f / MANIFEST, lambda m: m["shards"]["train"].clear()), "manifest.json: damaged"),
        (lambda f: rewrite(f / MANIFEST, lambda m: m["shards"]["train"][0].update(tokens=7)), "manifest.json: damaged"),
        (
            lambda f: rewrite(f / MANIFEST, lambda m: m.update(format=9)),
            f"format 9, and this version reads format {FORMAT}",
        ),
        (lambda f: shutil.rmtree(f / TOKENIZER), "tokenizer: no such file"),
        (
            lambda f: (f / TOKENIZER / "spiece.model").write_bytes(b"another"),
            "spiece.model: not a readable sentencepiece model",
        ),
    ],
)
def test_a_damaged_or_foreign_folder_is_refused_by_name(made, damage, rule):
    damage(made)
    with pytest.raises(UserError, match=rule):
        open_source(make_config("tokens", data__root=made))


def test_another_tokenizer_is_refused(made, model):
    with pytest.raises(UserError, match=r"not the tokenizer \(sha256 \w{12}.* Leave tokenizer.path out"):
        open_source(make_config("tokens", data__root=made, tokenizer__path=model))
    source = open_source(make_config("tokens", data__root=made, tokenizer__path=made / TOKENIZER))
    with pytest.raises(UserError, match="not the tokenizer"):
        source.documents(open_tokenizer(make_config(tokenizer__path=model), source))


def test_shards_are_read_through_once_and_again_when_anything_was_touched(made, tmp_path):
    cfg = make_config("tokens", data__root=made)
    said: list[str] = []
    open_source(cfg, said.append)
    assert said == []  # the preparation has read what it wrote
    copy = shutil.copytree(made, tmp_path / "copy")  # with all times but the one that the kernel sets
    copied = make_config("tokens", data__root=copy)
    open_source(copied, said.append), open_source(copied, said.append)
    assert len(said) == 1 and "checking" in said[0]
    times = shard(copy).stat()
    flip(copy)
    os.utime(shard(copy), ns=(times.st_atime_ns, times.st_mtime_ns))
    for _ in range(2):
        with pytest.raises(UserError, match="checksum"):
            open_source(copied, said.append)


def test_the_other_ranks_of_a_machine_leave_the_reading_to_the_first(made, monkeypatch):
    (made / CHECKED).unlink()
    flip(made)
    monkeypatch.setenv("LOCAL_RANK", "3")
    open_source(make_config("tokens", data__root=made))
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match="checksum"):
        open_source(make_config("tokens", data__root=made))


def test_a_folder_that_cannot_be_written_is_read_through_at_every_start(made, monkeypatch):
    (made / CHECKED).unlink()

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("dlr_pretrain.data.tokens.write_durably", refuse)
    said: list[str] = []
    open_source(make_config("tokens", data__root=made), said.append)
    assert "checking" in said[0] and "Read-only file system), so it is checked at every start" in said[1]


def test_a_shard_that_changes_during_the_run_is_named(made):
    cfg = make_config("tokens", data__root=made, train__global_batch=2)
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    shard(made).write_bytes(b"short")
    with pytest.raises(UserError, match=r"train-00001-of-00002\.tokens: damaged or foreign: 5 bytes"):
        global_batches(cfg, source, tokenizer, 1, 300)
