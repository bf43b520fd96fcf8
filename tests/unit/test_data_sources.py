"""Shards on disk, with everything that can be wrong with them."""

import gzip
import itertools
import json
import random
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
from data_corpus import NASTY, make_config, run_python, write_shards

from dlr_pretrain.data import open_source, shards, sources
from dlr_pretrain.util.errors import UserError

TEXTS = [f"document {i} " + "y" * (i % 50) for i in range(300)]


def lines_of(texts, **extra):
    return b"".join(json.dumps({"text": t, **extra}).encode() + b"\n" for t in texts)


@pytest.fixture
def root(tmp_path):
    write_shards(tmp_path, [TEXTS[:100], TEXTS[100:]])
    write_shards(tmp_path, [["validation"]], split="validation")
    return tmp_path


def open_root(root, **keys):
    return open_source(make_config(data__root=root, **keys))


# ----------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("read_bytes", [7, 100, 1 << 20])
@pytest.mark.parametrize("compress", [gzip.compress, bytes], ids=["gzip", "plain"])
def test_reads_from_any_document_in_any_step(tmp_path, monkeypatch, read_bytes, compress):
    monkeypatch.setattr(shards, "READ_BYTES", read_bytes)
    (path,) = write_shards(tmp_path, [[]])
    write_shards(tmp_path, [["validation"]], split="validation")
    for end in (None, -1):  # with and without a line feed at the end of the file
        path.write_bytes(compress(lines_of(TEXTS)[:end]))
        source = open_root(tmp_path)
        for start, step in itertools.product((0, 1, 99, 299, 300, 301), (1, 2, 7)):
            assert list(source.read(source.train_shards[0], start, step)) == TEXTS[start::step]


def test_small_shards_that_several_streams_read_are_kept_within_bounds(tmp_path, monkeypatch):
    write_shards(tmp_path, [[f"{i} {text}" for text in TEXTS] for i in range(9)])
    write_shards(tmp_path, [TEXTS * 100], split="validation")
    source = open_root(tmp_path)
    size = max(source.paths[shard].stat().st_size for shard in source.train_shards)
    monkeypatch.setattr(sources, "KEPT_BYTES", 5 * size)
    for shard in (*source.train_shards, *source.validation_shards, source.train_shards[6]):
        assert len(list(source.read(shard, 3, 2))) > 100
    assert source.validation_shards[0] not in source._kept and len(source._kept) == 5
    assert list(source._kept)[-1] == source.train_shards[6]


def test_threads_that_read_and_drop_kept_shards_get_the_right_lines(tmp_path, monkeypatch):
    texts = [[f"{i} {text}" for text in TEXTS] for i in range(6)]
    write_shards(tmp_path, texts)
    write_shards(tmp_path, [["validation"]], split="validation")
    source = open_root(tmp_path)
    size = max(source.paths[shard].stat().st_size for shard in source.train_shards)
    monkeypatch.setattr(sources, "KEPT_BYTES", 4 * size)  # of six: they drop each other's

    def read(seed):
        for number in random.Random(seed).choices(range(6), k=40):
            yield list(source.read(source.train_shards[number], seed, 5)) == texts[number][seed::5]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(right) for right in pool.map(lambda seed: list(read(seed)), range(8)))


def test_skipped_lines_are_not_parsed(tmp_path):
    (path,) = write_shards(tmp_path, [[]])
    write_shards(tmp_path, [["validation"]], split="validation")
    path.write_bytes(gzip.compress(b"{broken\n" * 5 + lines_of(["good"])))
    source = open_root(tmp_path)
    assert list(source.read(source.train_shards[0], 5)) == ["good"]


def test_nasty_texts_come_through(tmp_path):
    write_shards(tmp_path, [NASTY])
    write_shards(tmp_path, [["validation"]], split="validation")
    source = open_root(tmp_path)
    assert list(source.read(source.train_shards[0])) == NASTY


def test_bytes_that_are_no_utf8_and_windows_line_ends(tmp_path):
    (path,) = write_shards(tmp_path, [[]])
    write_shards(tmp_path, [["validation"]], split="validation")
    path.write_bytes(gzip.compress(b'{"text": "caf\xe9 \xff\xfe"}\r\n{"text": "\xc3\xa9\xed\xa0\x80"}\r\n'))
    source = open_root(tmp_path)
    assert list(source.read(source.train_shards[0])) == ["caf� ��", "é���"]


def test_a_line_of_ten_megabytes(tmp_path):
    long = "word " * 2_000_000
    write_shards(tmp_path, [["before", long, "after"]])
    write_shards(tmp_path, [["validation"]], split="validation")
    source = open_root(tmp_path)
    assert list(source.read(source.train_shards[0])) == ["before", long, "after"]


# ----------------------------------------------------------------------------------------------------
# What can be wrong


def test_shards_are_sorted_and_named_relative_to_the_root(root):
    source = open_root(root)
    assert source.train_shards == ("c4-train.00000-of-00002.json.gz", "c4-train.00001-of-00002.json.gz")
    assert source.validation_shards == ("c4-validation.00000-of-00001.json.gz",)
    assert source.describe() == f"{root}: 2 train and 1 validation shards"


def test_absolute_globs_need_no_root(root):
    keys = {"data__train_files": root / "c4-train*", "data__validation_files": root / "c4-val*"}
    source = open_source(make_config(**keys))
    assert [list(source.read(shard)) for shard in source.train_shards] == [TEXTS[:100], TEXTS[100:]]


def test_the_same_files_are_the_same_text_however_they_are_named(root, tmp_path):
    known = open_root(root).fingerprint
    inside = {"data__train_files": f"{root.name}/c4-train*", "data__validation_files": f"{root.name}/c4-val*"}
    absolute = {"data__train_files": root / "c4-train*", "data__validation_files": root / "c4-val*"}
    assert open_source(make_config(data__root=root.parent, **inside)).fingerprint == known
    assert open_source(make_config(**absolute)).fingerprint == known


def test_a_glob_without_a_match_is_named(root):
    with pytest.raises(UserError, match=r"data\.train_files=none-\*\.gz below .*: matches no file"):
        open_root(root, data__train_files="none-*.gz")


def test_folders_are_no_shards_and_a_link_to_nothing_is_named(root):
    (root / "more" / "c4-train.folder.json.gz").mkdir(parents=True)
    shutil.copy(root / "c4-train.00000-of-00002.json.gz", root / "more" / "c4-train.2.json.gz")
    names = [f"c4-train.0000{i}-of-00002.json.gz" for i in (0, 1)] + ["more/c4-train.2.json.gz"]
    assert open_root(root, data__train_files="**/c4-train*").train_shards == tuple(names)
    assert open_root(root, data__train_files="more/**").train_shards == tuple(names[2:])
    with pytest.raises(UserError, match=r"data\.train_files=more/.*folder.*matches no file"):
        open_root(root, data__train_files="more/*folder*")
    (root / "more" / "c4-train.3.json.gz").symlink_to(root / "moved")
    with pytest.raises(UserError, match=r"more/c4-train\.3\.json\.gz: cannot be opened \(No such file.*Fetch this"):
        open_root(root, data__train_files="**/c4-train*")


def test_a_shard_that_a_glob_finds_twice_is_one_shard(root):
    (root / "one" / "two").mkdir(parents=True)
    shutil.copy(root / "c4-train.00000-of-00002.json.gz", root / "one" / "two" / "shard.gz")
    assert open_root(root, data__train_files="one/**/**/*.gz").train_shards == ("one/two/shard.gz",)


def test_what_is_held_out_is_not_learnt_under_another_name(root, monkeypatch):
    (root / "c4-train.2.json.gz").symlink_to(root / "c4-validation.00000-of-00001.json.gz")
    with pytest.raises(UserError, match=r"both match .*c4-validation.00000-of-00001.*Narrow data.train_files"):
        open_root(root)
    (root / "c4-train.2.json.gz").unlink()
    monkeypatch.chdir(root)
    with pytest.raises(UserError, match=r"both match .*c4-validation.00000-of-00001.*Narrow data.train_files"):
        open_root(".", data__train_files=root / "*.gz")


def test_what_is_held_out_is_not_learnt(root):
    for train in ("c4-*", root / "*.gz"):
        with pytest.raises(UserError, match=r"both match .*c4-validation.00000-of-00001.*Narrow data.train_files"):
            open_root(root, data__train_files=train)


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("keep", [0.5, 0.999])
def test_a_shard_that_is_cut_off(root, step, keep):
    path = root / "c4-train.00001-of-00002.json.gz"
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    source = open_root(root)
    rule = r"c4-train\.00001-of-00002\.json\.gz: damaged or cut off after document \d+ .*Fetch this shard again"
    with pytest.raises(UserError, match=rule):
        list(source.read(source.train_shards[1], 0, step))


LINES = b"".join(json.dumps({"text": f"document {i}"}).encode() + b"\n" for i in range(40))
END = LINES.index(b"\n", len(LINES) // 2) + 1
MEMBERS = gzip.compress(LINES[:END]), gzip.compress(LINES[END:])


@pytest.mark.parametrize(
    ("content", "before", "kept"),
    [
        (gzip.compress(LINES), 0.5, True),
        (gzip.compress(LINES), -1, True),
        (b"".join(MEMBERS), len(MEMBERS[0]) + 1, True),
        (b"".join(MEMBERS), len(MEMBERS[0]), False),  # a gzip file that ends
        (LINES, END, False),  # so does a plain one, at any line
        (LINES, END - 1, False),
        (gzip.compress(LINES), 1, False),
    ],
)
def test_a_begun_shard_has_grown_only_where_it_broke_off(root, content, before, kept):
    path = root / "c4-train.00001-of-00002.json.gz"
    path.write_bytes(content[: int(before * len(content)) if isinstance(before, float) else before])
    was = open_root(root).contents
    path.write_bytes(content)
    source = open_root(root)
    name = source.train_shards[1]
    assert source.regrown(was, {}) == [path.name]
    assert source.regrown(was, {source.train_shards[0]: True}) == [path.name]
    assert source.regrown(was, {name: False}) == ([path.name] if kept else [])
    assert source.regrown(was, {name: True}) == []
    path.write_bytes(content[:-3] + b"\n\n\n\n")
    (root / "c4-validation.00000-of-00001.json.gz").write_bytes(gzip.compress(LINES[:END]))
    assert open_root(root).regrown(was, {}) == []


def test_a_shard_with_damaged_bytes(root):
    path = root / "c4-train.00001-of-00002.json.gz"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 20] = bytes(20)
    path.write_bytes(content)
    source = open_root(root)
    with pytest.raises(UserError, match=r"c4-train\.00001.*(damaged|is not JSON)"):
        list(source.read(source.train_shards[1]))


@pytest.mark.parametrize("step", [1, 2])
def test_a_shard_that_has_gone(root, step):
    source = open_root(root)
    (root / "c4-train.00001-of-00002.json.gz").unlink()
    with pytest.raises(UserError, match=r"c4-train\.00001-of-00002\.json\.gz: no such file"):
        list(source.read(source.train_shards[1], 0, step))


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b"not json", "is not JSON"),
        (b'{"text": "cut', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"content": "x", "url": "y"}', "has no text 'text': its fields are content, url. Set data.text_key"),
        (b'{"text": null}', "has no text 'text'"),
        (b'{"text": 7}', "has no text 'text'"),
        (b'["text"]', "has no text 'text': it is no JSON object"),
    ],
)
def test_a_line_that_is_no_record_is_named_by_its_number(tmp_path, line, rule):
    (path,) = write_shards(tmp_path, [[]])
    write_shards(tmp_path, [["validation"]], split="validation")
    path.write_bytes(gzip.compress(lines_of(["a", "b", "c"]) + line + b"\n" + lines_of(["d"])))
    source = open_root(tmp_path)
    for step in (1, 3):
        with pytest.raises(UserError) as caught:
            list(source.read(source.train_shards[0], 0, step))
        assert f"{path}: document 3 (line 4) {rule}" in str(caught.value)


def test_another_text_key(tmp_path):
    (path,) = write_shards(tmp_path, [[]])
    write_shards(tmp_path, [["validation"]], split="validation")
    path.write_bytes(gzip.compress(b'{"content": "x"}\n'))
    source = open_root(tmp_path, data__text_key="content")
    assert list(source.read(source.train_shards[0])) == ["x"]


# ----------------------------------------------------------------------------------------------------
# What is not needed is not imported


def test_local_training_imports_neither_datasets_nor_transformers(root, tmp_path):
    program = """
        import sys
        from data_corpus import LetterTokenizer, global_batches, make_config
        from dlr_pretrain.data import open_source, validation_set
        cfg = make_config(data__root=sys.argv[1])
        source = open_source(cfg)
        global_batches(cfg, source, LetterTokenizer(), 1, 2)
        validation_set(cfg, source, LetterTokenizer())
        print({"datasets", "transformers", "huggingface_hub", "wandb", "pandas"} & set(sys.modules))
        rooms = {m.split(".")[1] for m in sys.modules if m.startswith("dlr_pretrain.")}
        print(rooms - {"config", "data", "durable", "errors", "process", "tensors"})
    """
    output, _ = run_python(program, tmp_path, arguments=[root])
    assert output == "set()\nset()\n"
