"""What is read of a folder: files for training and for validation, why others are left out, and each error."""

import gzip
import os
import re
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dlr_pretrain.data import detect, files, open_source
from dlr_pretrain.data.splits import split_of
from dlr_pretrain.util.errors import UserError
from tests.unit.data.data_corpus import in_key, lines_of, make_config, write_table
from tests.unit.data.loopback_hub import Hub, serving_here

LINES = lines_of([f"document {i}" for i in range(40)])
A, B = "a" * 40, "b" * 40


def rows(texts=("one", "two")) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.string())}), sink)
    return sink.getvalue().to_pybytes()


def fill(root: Path, files, links=()) -> Path:
    """Write files: their contents, or functions that write them, by name; of a list of names, each has ``LINES``."""
    for name, content in files.items() if isinstance(files, dict) else ((name, LINES) for name in files):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content(path) if callable(content) else path.write_bytes(content)
    for name, target in dict(links).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return root


def opened(root, version=None, **keys):
    cfg = make_config("local", **({"data__root": root} if root else {}), **keys)
    return open_source(cfg, version=version)


def of(source):
    """The names of the training and validation files, and why others are left out."""
    return [*source.train_shards], [] if source.holds_out else [*source.validation_shards], source.chosen.left_out


def refuse(rule, root, **keys):
    with pytest.raises(UserError, match=rule):
        opened(root, **keys)


SAY = {
    "validation": """
        eval.jsonl evaluation.jsonl my_eval_set.jsonl heldout.txt held_out.jsonl held-out/a.jsonl dev.jsonl val2.jsonl
        holdout.parquet hold_out/a.jsonl val.jsonl.gz valid/x.jsonl validation.json eval01.jsonl 2val.jsonl EVAL.JSONL
        evalSet.jsonl myVal.jsonl HeldOut.jsonl split=validation/0.parquet c4-validation.00000-of-00008.json.gz
        train_data/val/a.jsonl train/val.jsonl train/val-00001.jsonl train-validation.jsonl
        valset.jsonl dev_set/a.jsonl evals/a.jsonl""",
    "test": """
        test.jsonl testing/a.jsonl data/test-00000-of-00001.parquet a.test.jsonl test2.jsonl myTest.jsonl
        test/train.jsonl eval/test.jsonl test_suite/a.jsonl tests/a.jsonl testset.jsonl test-set/a.jsonl""",
    "train": """
        latest.jsonl medieval.jsonl development.jsonl testament.txt interval.jsonl devices.jsonl contest.jsonl
        evaluations.jsonl values.jsonl attestation/a.jsonl heldoutside.jsonl évaleval.jsonl a.jsonl train.jsonl
        training/a.jsonl train/test_suite.jsonl my_test_corpus/train/a.jsonl train/validation_methods.jsonl""",
}
SAID = [(name, split) for split, names in SAY.items() for name in names.split()]
SAID += [
    ("test set.jsonl", "test"),
    ("dev set/a.jsonl", "validation"),
    ("Turing test.txt", "train"),
    ("A valid point.txt", "train"),
    ("set (eval).jsonl", "validation"),
]


@pytest.mark.parametrize(("name", "split"), SAID, ids=[name for name, _ in SAID])
def test_whole_words_name_a_split(name, split):
    assert split_of(name) == split


def test_the_path_of_the_root_names_no_split(tmp_path):
    root = fill(tmp_path / "test" / "validation", ["a.jsonl", "b.jsonl"])
    assert of(opened(root)) == (["a.jsonl", "b.jsonl"], [], {})


TEXT = b"A text of some words.\n" * 40
JSON = b'{\n  "a": 1\n}\n'
LINE = b'{"text": "a"}\n'
FRAME = bytes((0, 0xA8))  # no sizes, no checksum; a window of 2 GB
LARGE_WINDOW = b"\x28\xb5\x2f\xfd" + FRAME + (len(LINE) << 3 | 1).to_bytes(3, "little") + LINE  # one raw block
TABLES = (".parquet", ".arrow", ".file.arrow")
SIDE_TEXTS = [
    *("README.md", "readme.txt", "LICENSE-MIT.txt", "Licence.txt", "NOTICE.txt", "requirements-dev.txt"),
    *("x/CITATION.cff", "vocab.txt", "tokenizer.model", "AUTHORS"),
]
SETTINGS = [
    *("dataset_infos.json", "metadata.json", "x/config.json", "tokenizer_config.json", "tokenizer.json"),
    *("special_tokens_map.json", "state.json"),
]
TEXTS = [f"document {i} " + "y" * (i % 50) for i in range(300)]
SIDE, TESTED, TEXT_BESIDE = "a side file", "named as a test split", "text beside the folder's JSON lines"


@dataclass(frozen=True)
class Folder:
    """What stands below data.root (see ``fill``), and what is read of it: names and reasons, or the error."""

    files: dict | list
    train: str = ""
    validation: str = ""
    left_out: dict = field(default_factory=dict)
    links: dict = field(default_factory=dict)
    keys: dict = field(default_factory=dict)
    error: str = ""


FOLDERS = {
    "splits": Folder(["a/train.jsonl", "eval/a.jsonl", "testing/b.jsonl"], "a/train.jsonl", "eval/a.jsonl",
               {"testing/b.jsonl": TESTED}),
    "lines and a licence": Folder({"a.jsonl": LINES, "LICENSE.txt": TEXT * 99, "README.md": TEXT, "note.txt": TEXT},
                            "a.jsonl", "",
                            {"LICENSE.txt": SIDE, "README.md": SIDE, "note.txt": TEXT_BESIDE}),
    "texts and their side files": Folder(
        {"a.txt": TEXT, "x/b.txt": TEXT} | dict.fromkeys(SIDE_TEXTS, TEXT), "a.txt x/b.txt", "",
        dict.fromkeys(SIDE_TEXTS, SIDE)),
    "settings of a dataset and a tokenizer": Folder(
        {"a.json": LINES} | dict.fromkeys(SETTINGS, JSON), "a.json", "", dict.fromkeys(SETTINGS, SIDE)),
    "text with a side file's name": Folder({"authors.jsonl": LINES, "metadata.jsonl": LINES},
        "authors.jsonl metadata.jsonl",
                                     "", {}),
    "tables": Folder({"a.jsonl": LINES, "valid.xlsx": TEXT, "b.csv": TEXT, "b.xml.gz": TEXT, "c": TEXT}, "a.jsonl", "",
               {"valid.xlsx": ".xlsx is not read, and its name is that of a validation split",
                "b.csv": "CSV beside the folder's JSON lines", "b.xml.gz": ".xml.gz is not read",
                "c": "a name without a suffix"}),
    "the kind of most bytes": Folder({"a.jsonl": LINES, "b.jsonl": LINES, "c.txt": TEXT * 99}, "c.txt", "",
                               dict.fromkeys(("a.jsonl", "b.jsonl"), "JSON lines beside the folder's text")),
    "two kinds of the same size": Folder({"a.txt": LINES, "b.jsonl": LINES}, "b.jsonl", "",
                                   {"a.txt": TEXT_BESIDE}),
    "training text decides the kind": Folder({"a.jsonl": LINES, "test.txt": LINES * 9}, "a.jsonl", "",
        {"test.txt": TESTED}),
    "validation in two kinds": Folder({"a.jsonl": LINES, "val.jsonl": LINES, "val.txt": TEXT * 9}, "a.jsonl",
        "val.jsonl",
                                {"val.txt": TEXT_BESIDE}),
    "validation in another kind": Folder({"a.parquet": rows(), "val.jsonl": LINES}, "a.parquet", "val.jsonl", {}),
    "both with and without compression": Folder({"a.jsonl": LINES, "a.jsonl.gz": gzip.compress(LINES)}, "a.jsonl", "",
                                          {"a.jsonl.gz": "also present without compression"}),
    "hidden": Folder(["a.jsonl", ".b.jsonl", ".cache/huggingface/c.jsonl", "x/.git/d.jsonl"], "a.jsonl", "", {}),
    "without text": Folder(
        {"a.jsonl": LINES, "b.jsonl": b"", "c.jsonl": b"\xef\xbb\xbf \n\r\n", "d.jsonl.gz": gzip.compress(b"\n" * 9),
         "e.jsonl.gz": gzip.compress(b""), "f.jsonl": b"\n" * 600 + LINES, "val.jsonl": b" \n"}, "a.jsonl f.jsonl", "",
        {"b.jsonl": "empty", "c.jsonl": "no text", "d.jsonl.gz": "no text", "e.jsonl.gz": "empty",
         "val.jsonl": "no text"}),
    "of Spark and Delta Lake": Folder(
        {"x/_delta_log/0.json": JSON, "x/a.parquet": rows(), "x/_temporary/0/b.parquet": rows()}, "x/a.parquet", "",
        dict.fromkeys(("x/_delta_log/0.json", "x/_temporary/0/b.parquet"), "a file of Spark or Delta Lake")),
    "without rows": Folder({"a.parquet": rows(), "b.parquet": rows([])}, "a.parquet", "", {"b.parquet": "no rows"}),
}  # fmt: skip


def linked(files, links, *read) -> Folder:
    return Folder(files, *read, links=links)


def refused(files, error: str, **keys) -> Folder:
    return Folder(files, error=error, keys=keys)


def table(columns: dict):
    """Writes a table in the format of its file's suffix."""
    return lambda path: write_table(path, columns)


FOLDERS |= {
    "to the parent": linked(["x/a.jsonl"], {"x/up": ".."}, "x/a.jsonl", "", {}),
    "to each other": linked(["x/a.jsonl", "y/b.jsonl"], {"x/y": "../y", "y/x": "../x"}, "x/a.jsonl y/b.jsonl", "",
                      {"y/x/a.jsonl": "the same file as x/a.jsonl", "x/y/b.jsonl": "the same file as y/b.jsonl"}),
    "to a folder": linked(["v2/a.jsonl"], {"latest": "v2"}, "v2/a.jsonl", "",
                    {"latest/a.jsonl": "the same file as v2/a.jsonl"}),
    "out of the root": linked(["a.jsonl", "../far/b.jsonl"], {"far": "../far"}, "a.jsonl far/b.jsonl", "", {}),
    "to a file": linked(["b.jsonl"], {"a.jsonl": "b.jsonl"}, "b.jsonl", "", {"a.jsonl": "the same file as b.jsonl"}),
    "by a name of validation": linked(["a.jsonl", "b.jsonl"], {"val.jsonl": "b.jsonl"}, "a.jsonl", "val.jsonl",
                                {"b.jsonl": "the same file as val.jsonl"}),
    "to nowhere": linked(["a.jsonl"], {"b.jsonl": "gone", "val.jsonl": "gone"}, "a.jsonl", "",
                   dict.fromkeys(("b.jsonl", "val.jsonl"), "a broken link")),
    "of two snapshots to the same text": linked(
        ["blobs/1"], {f"snapshots/{A}/x.jsonl": "../../blobs/1", f"snapshots/{B}/x.jsonl": "../../blobs/1"},
        f"snapshots/{A}/x.jsonl", "", {f"snapshots/{B}/x.jsonl": f"the same file as snapshots/{A}/x.jsonl"}),
    "no text": refused({"a.xlsx": TEXT}, r"ends with \.json, .*Left out: a\.xlsx \(\.xlsx is not read\)\. Set"),
    "nothing": refused({},
        rf"data\.root=.*: holds no file that ends with {', '.join(detect.SUFFIXES)}, or .*\.xz\. Set"),
    "only a test": refused(["test.jsonl"], r"holds no training file\. Left out: test\.jsonl \(named as a test split\)"),
    "only validation": refused(["val.jsonl"], r"no training file\. Left out: val\.jsonl \(named as a valid"),
    "only blanks": refused({"a.jsonl": b"\n \n", "b.jsonl": b""},
        "all training files are empty. Give a file with text"),
    "no rows": refused({"a.parquet": rows([])}, "all training files are empty. Give a file with text"),
    "a cut-off table": refused({"a.parquet": rows(), "b.parquet": rows()[:-9]},
        r"b\.parquet: damaged or cut off.*Fetch"),
    "no text in validation_files": refused({"a.jsonl": LINES, "b.jsonl": b" \n"},
        r"data\.validation_files=b\.jsonl: all files are empty", data__validation_files="b.jsonl"),
    "a glob that matches no file": refused(["a.jsonl"], r"data\.train_files=none-\*\.gz below .*: matches no file",
        data__train_files="none-*.gz"),
    "a glob of a link to nowhere": Folder(["a.jsonl"], links={"c.txt": "gone"}, keys={"data__train_files": "c*"},
        error=r"c\.txt: No such file or directory: it is a broken link to gone\. Was"),
    "a glob through folders": Folder(["one/two/a.jsonl", "one/c.jsonl/x.txt", "b.jsonl"], "one/two/a.jsonl",
        keys={"data__train_files": "one/**/**/*.jsonl"}),
    "both globs match a file": refused(["a.jsonl", "b.jsonl"],
        "data.train_files and data.validation_files both match .*b.jsonl.*Narrow data.train_files",
        data__train_files="*.jsonl", data__validation_files="b*"),
    "both globs match a linked file": Folder(["a.jsonl", "b.jsonl"], links={"c.jsonl": "a.jsonl"},
        keys={"data__train_files": "[bc]*", "data__validation_files": "a*"}, error=r"both match .*a\.jsonl"),
    "a large window": refused({"a.jsonl.zst": LARGE_WINDOW},
        r"a\.jsonl\.zst: was compressed with a window above 128 MB.* zstd -dc --long=31"),
    "no nested field": refused({"a.jsonl": LINES},
        r"no text 'meta.body': its fields are text, meta\. Set data\.text_key", data__text_key="meta.body"),
}  # fmt: skip

# What downloads and editors leave behind: contents, and what is said of them
BAD = {
    "a.jsonl": [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "is a Git LFS pointer.*git lfs pull"),
        (b"PK\3\4\x14\0\0\0", r"is not UTF-8 text: it begins with b'PK"),
        (b'[{"text": "a"}, {"text": "b"}]', r"is a JSON array.*jq -c '\.\[\]'"),
        (b'\xef\xbb\xbf [\n{"text": "a"}]', "is a JSON array"),
        (b'{\n  "text": "a"\n}', "is one JSON object over several lines"),
        (b"<!DOCTYPE html><html>404", "is an HTML page.*Fetch"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "is XML, perhaps a server error"),
        ('{"text": "a"}'.encode("utf-16"), "is UTF-16 text.*UTF-8"),
    ],
    "a.jsonl.gz": [
        (gzip.compress(bytes(4096)), "is not UTF-8 text.*fetch this shard again"),
        (gzip.compress(lines_of(TEXTS))[:20], "damaged or cut off"),
        (gzip.compress(lines_of(TEXTS))[:-9], r"damaged or cut off after document \d+ .*Fetch this shard again"),
    ],
    "a.txt": [(b"%PDF-1.7", "is a PDF document"), (b"\x7fELF\0\0", "is not UTF-8 text")],
    "a.parquet": [(b"something", "is not in parquet format")],
    "a.arrow": [(b"text", "is not in arrow format")],
    "a.docx": [(b"words and more", r"its name ends with none of \.json")],
    "a.csv": [
        (b"id,body\n1,a\n", r"has no text 'text': its columns are \['id', 'body'\]. Set data\.text_key"),
        (b'id,text\n1,"a\n2,b\n', r"damaged or cut off after document 0 \(line 3: unexpected end of data\)"),
        (b'id,text\n1,a"b\n2,"a"b\n', r"damaged or cut off after document 1 \(line 3: ',' expected after"),
        (b"id,text\n1,a\n2,b,c\n", r"document 1 has no text 'text': it has not as many fields as the header"),
    ],
}  # fmt: skip
KEYS = {"data__validation_files": "validation.txt"}
FOLDERS |= {
    f"{name}: {error}": refused({name: content, "validation.txt": b"validation"}, error, data__train_files=name, **KEYS)
    for name, contents in BAD.items()
    for content, error in contents
}

# Columns that hold no text
CAST = r"\. Name a text column in data\.text_key, or cast this one first: column\.cast\('string'\)$"
JOIN = r"\. First join each value into one string, as pyarrow\.compute\.binary_join\(column, '\\n'\) does for lists$"
NO_TEXT = {
    "integers": ([1, 2], r"int64" + CAST),
    "numbers": ([0.5, None], r"double" + CAST),
    "nulls": ([None, None], r"null" + CAST),
    "lists": ([["a"], ["b", "c"]], r"list<\w+: string>" + JOIN),
    "chats": ([[{"role": "user"}]], r"list<\w+: struct<role: string>>" + JOIN),
    "fields": ([{"body": "a"}], r"struct<body: string>\. Name one of its fields: data\.text_key=KEY\.FIELD$"),
}
MISSING = {
    "body": r"its fields are id, meta\.",
    "meta.body": r"'meta' is of type struct<text: string>\.",
    "meta.text.body": r"'text' is of type string\.",
}
for suffix, key in product(TABLES, ("text", "meta.text")):
    for name, (values, rule) in NO_TEXT.items():
        content = {f"a{suffix}": table(in_key(key, pyarrow.array([*values, None])))}
        error = rf"a{suffix}: has no text '{key}': 'text' is of type {rule.replace('KEY', key)}"
        for bad_rows in ("stop", "skip"):
            given = {"data__text_key": key, "data__bad_rows": bad_rows}
            FOLDERS[f"{key} of {name}, {suffix}, {bad_rows}"] = refused(content, error, **given)
for suffix, (key, rule) in product(TABLES, MISSING.items()):
    error = f"a{suffix}: has no text '{key}': {rule} Set data.text_key to the field that holds the text$"
    content = {f"a{suffix}": table(in_key("meta.text", pyarrow.array(["a", "b"])))}
    FOLDERS[f"no {key}, {suffix}"] = refused(content, error, data__text_key=key)


@pytest.mark.parametrize("case", FOLDERS)
def test_each_file_of_a_folder_is_read_or_has_a_reason(tmp_path, case):
    folder = FOLDERS[case]
    root = fill(tmp_path / "root", folder.files, folder.links)
    root.mkdir(exist_ok=True)
    if not folder.error:
        read = of(opened(root, **folder.keys))
        assert read == (folder.train.split(), folder.validation.split(), folder.left_out)
        return
    with pytest.raises(UserError, match=folder.error) as caught:
        source = opened(root, **folder.keys)
        for shard in source.train_shards:
            list(source.read(shard))
    assert str(root) in str(caught.value) or "data.validation_files" in str(caught.value)


@pytest.mark.parametrize("keys", [{}, {"data__train_files": "*.arrow"}, {"data__train_files": "**/*.arrow"}])
def test_what_datasets_keeps_beside_its_data_is_not_text(tmp_path, keys):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": [f"text {i}" for i in range(40)]}).save_to_disk(tmp_path)
    saved = datasets.load_from_disk(tmp_path)
    saved.map(lambda row: {"text": row["text"].upper()}, num_proc=2).shuffle(seed=1)
    made = {path.name for path in tmp_path.glob("cache-*.arrow")}
    source = opened(tmp_path, **keys)
    assert source.train_shards == ("data-00000-of-00001.arrow",) and len(made) == 3
    assert made == {name for name, why in source.chosen.left_out.items() if why == "a cache of the datasets library"}
    assert "(a cache of the datasets library)" in source.contents["left out"]
    assert [*opened(tmp_path, data__train_files="cache-*_of_*.arrow").train_shards] == sorted(
        name for name in made if "_of_" in name
    )  # a glob of such files alone means them


VALIDATION = {
    "below the root": "part-1.jsonl",
    "absolute": "{root}/part-1.jsonl",
    "an address": "file://{root}/part-1.*",
}


@pytest.mark.parametrize("how", VALIDATION)
def test_a_glob_takes_validation_out_of_the_folder(tmp_path, how):
    root = fill(tmp_path, ["part-0.jsonl", "part-1.jsonl", "part-2.jsonl", "eval.jsonl"])
    (root / "part-3.jsonl").symlink_to("part-1.jsonl")
    keys = {"data__validation_files": VALIDATION[how].format(root=root)}
    source = opened(root, **keys)
    assert source.train_shards == ("part-0.jsonl", "part-2.jsonl")
    assert [source.files[name].identity for name in source.validation_shards] == [str(root / "part-1.jsonl")]
    assert source.chosen.left_out == {"eval.jsonl": "named as a validation split"}


def test_addresses_with_one_name_are_two_files(tmp_path):
    for split in ("train", "val"):
        fill(tmp_path / split, {"data.jsonl": lines_of([split])})
    globs = {f"data__{key}_files": f"file://{tmp_path}/{name}/data.jsonl"
             for key, name in (("train", "train"), ("validation", "val"))}  # fmt: skip
    source = opened(None, **globs)
    read = [list(source.read(shard)) for shard in (*source.train_shards, *source.validation_shards)]
    assert read == [["train"], ["val"]] and source.train_shards == ("data.jsonl",)


def test_a_glob_reads_a_text_once(tmp_path):
    root = fill(tmp_path, ["b.jsonl"], {"a.jsonl": "b.jsonl", "up": "."})
    source = opened(root, data__train_files="**/*.jsonl")
    assert source.train_shards == ("b.jsonl",)
    assert set(source.chosen.left_out.values()) == {"the same file as b.jsonl"}


def test_a_folder_of_several_snapshots_is_refused(tmp_path):
    links = {f"snapshots/{commit}/x.jsonl": f"../../blobs/{blob}" for commit, blob in ((A, 1), (B, 2))}
    root = fill(tmp_path / "datasets--o--n", ["blobs/1", "blobs/2"], links)
    for given in (root, root / "snapshots", tmp_path):
        named = [f"data.root={root}/snapshots/{commit}" for commit in (A, B)]
        refuse(f"holds 2 snapshots of a dataset. Name one: {named[0]} or {named[1]}$", given)
    assert opened(root / "snapshots" / B).train_shards == ("x.jsonl",)


# ----------------------------------------------------------------------------------------------------
# Commits of the hub

HUB, OTHER = "hf://datasets/o/n", "hf://datasets/o/other"
PARTS = ["part-0.jsonl", "part-1.jsonl", "part-2.jsonl"]


@pytest.fixture
def hub(monkeypatch):
    with serving_here(Hub(dict.fromkeys(PARTS, LINES)), monkeypatch) as served:
        yield served


def addresses(source):
    return [file.address for file in source.files.values()]


FIXED = {  # root, train_files, validation_files, and the commits of the addresses that are read
    "validation of the root": (HUB, None, f"{HUB}/part-1.jsonl", [(HUB, A, 0), (HUB, A, 2), (HUB, A, 1)]),
    "validation at a commit": (HUB, None, f"{HUB}@{B}/part-1.jsonl", [(HUB, A, 0), (HUB, A, 2), (HUB, B, 1)]),
    "a glob": (HUB, None, f"{HUB}/*-1.jsonl", [(HUB, A, 0), (HUB, A, 2), (HUB, A, 1)]),
    "no root": (None, f"{HUB}/part-0.jsonl", f"{HUB}/part-1.jsonl", [(HUB, A, 0), (HUB, A, 1)]),
    "train_files alone": (None, f"{HUB}/part-[02].jsonl", None, [(HUB, A, 0), (HUB, A, 2)]),
    "one revision": (None, f"{HUB}@main/part-0.jsonl", f"{HUB}@main/part-1.jsonl", [(HUB, A, 0), (HUB, A, 1)]),
    "another repository": (None, f"{HUB}/part-0.jsonl", f"{OTHER}@{B}/part-1.jsonl", [(HUB, A, 0), (OTHER, B, 1)]),
    "a branch of the hub's own": (f"{HUB}@refs/convert/parquet", None, f"{HUB}@refs/convert/parquet/part-1.jsonl",
                                  [(HUB, A, 0), (HUB, A, 2), (HUB, A, 1)]),
    "a proposed change": (f"{HUB}@refs%2Fpr%2F12", None, None, [(HUB, A, 0), (HUB, A, 1), (HUB, A, 2)]),
    "the same name of another": (None, f"{HUB}/part-0.jsonl", f"{OTHER}@{B}/part-0.jsonl",
                                 [(HUB, A, 0), (OTHER, B, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("case", FIXED)
def test_a_run_keeps_the_commit_of_all_its_files(hub, case):
    root, train, validation, read = FIXED[case]
    keys = {"data__train_files": train, "data__validation_files": validation}
    source = opened(root, **keys)
    assert addresses(source) == [f"{repository}@{commit}/part-{i}.jsonl" for repository, commit, i in read]
    assert source.version == A
    hub.commit = "c" * 40  # the dataset has moved on
    hub.commits.add(hub.commit)
    again = opened(root, A, **keys)
    assert addresses(again) == addresses(source) and again.version == A
    assert opened(root, **keys).version == hub.commit


def test_a_revision_that_does_not_exist_names_the_key(hub):
    hub.revisions = {"main", A}
    rule = "Is there a revision my? data.revision also takes a branch with a slash in its name"
    refuse(rf"o/n: the Hugging Face hub .*{re.escape(rule)}", f"{HUB}@my/branch")
    assert opened(HUB, data__revision="main").version == A


def test_the_commit_of_validation_on_the_hub_is_kept(hub, tmp_path):
    root, keys = fill(tmp_path, ["a.jsonl"]), {"data__validation_files": f"{HUB}/part-1.jsonl"}
    source = opened(root, **keys)
    assert addresses(source)[1] == f"{HUB}@{A}/part-1.jsonl" and source.version == A
    hub.commit = B
    assert opened(root, data__revision=A, **keys).version == A


@pytest.mark.parametrize("address", [f"{OTHER}/part-1.jsonl", f"{OTHER}@main/part-1.jsonl", f"{HUB}@v2/part-1.jsonl"])
@pytest.mark.parametrize(("key", "first"), [("root", HUB), ("train_files", f"{HUB}/part-0.jsonl")])
def test_a_second_repository_or_revision_needs_a_commit(hub, key, first, address):
    named = address.partition("@")[0].removesuffix("/part-1.jsonl") + f"@{A}/part-1.jsonl"
    rule = rf"data\.validation_files={address}: .* of data\.{key}, whose .* a commit: data\.validation_files={named}$"
    refuse(rule, None, data__validation_files=address, **{f"data__{key}": first})


def test_text_of_both_globs_is_refused_at_any_commit(hub):
    keys = {"data__train_files": f"{HUB}/part-*", "data__validation_files": f"{HUB}@{B}/part-1.jsonl"}
    refuse("both match hf://datasets/o/n/part-1.jsonl", None, **keys)


def test_a_folder_on_the_hub_is_chosen_from_like_one_here(hub):
    hub.files |= {"README.md": TEXT, "LICENSE.txt": TEXT, "x/.git/a.jsonl": LINES, ".gitattributes": TEXT}
    hub.files |= {"eval/a.jsonl": LINES, "testing.jsonl": LINES, "b.jsonl": b"", "c.xlsx": TEXT}
    left = {
        "README.md": SIDE,
        "LICENSE.txt": SIDE,
        "testing.jsonl": TESTED,
        "b.jsonl": "empty",
        "c.xlsx": ".xlsx is not read",
    }
    assert of(opened(HUB)) == (PARTS, ["eval/a.jsonl"], left)


@pytest.mark.parametrize("pattern", [None, "*.jsonl", "**/*.jsonl"])
def test_a_folder_that_cannot_be_listed_ends_the_start(tmp_path, monkeypatch, pattern):
    """The error is patched in, because tests may run as root, whom permissions do not bind."""
    for name in ("a.jsonl", "sub/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    hidden = str(tmp_path / ("sub" if pattern != "*.jsonl" else ""))

    def refusing(real):
        def call(path="."):
            if os.path.realpath(path) == os.path.realpath(hidden):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        return call

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(UserError, match=r"cannot be listed, and may hold text: Permission denied"):
        list(files.find_files(str(tmp_path), pattern) if pattern else files.files_below(str(tmp_path)))
