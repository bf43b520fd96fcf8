"""Shards on the hub and at other addresses, which answer late, in part, wrongly or not at all."""

import pickle
import socket
import time
from contextlib import ExitStack

import pytest
from data_corpus import LetterTokenizer, global_batches, make_config, run_python, same, write_shards
from loopback_hub import KEYS, TEXTS, TROUBLE, Hub, open_hub, serving, serving_here

from dlr_pretrain.data import files, list_files, open_source
from dlr_pretrain.util.errors import UserError

TOKENIZER = LetterTokenizer()


@pytest.fixture
def shards(tmp_path):
    """C4-layout shards in tmp_path/en, and the files of a hub that has the same."""
    paths = write_shards(tmp_path / "en", [TEXTS[:150], TEXTS[150:300], TEXTS[300:]])
    paths += write_shards(tmp_path / "en", [["validation", "text"]], split="validation")
    return {f"en/{path.name}": path.read_bytes() for path in paths}


@pytest.fixture
def hub(shards, monkeypatch):
    monkeypatch.setattr(files, "RANGE_BYTES", 500)  # so small that a shard has many
    with ExitStack() as opened:
        yield opened.enter_context(serving_here(Hub(shards), monkeypatch))


def read(source):
    return [list(source.read(shard)) for shard in (*source.train_shards, *source.validation_shards)]


WHOLE = [TEXTS[:150], TEXTS[150:300], TEXTS[300:], ["validation", "text"]]


def test_the_hub_gives_the_batches_of_a_copy_on_disk(hub, tmp_path):
    source = open_hub()
    copy = open_source(make_config(data__root=tmp_path / "en", **KEYS))
    assert source.fingerprint == copy.fingerprint and read(source) == read(copy) == WHOLE
    assert source.describe().startswith(f"hf://datasets/allenai/c4@{hub.commit}: 3 train and 1")
    cfg = make_config("c4", **KEYS)
    whole = global_batches(cfg, copy, TOKENIZER, 1, 8)
    head = global_batches(cfg, source, TOKENIZER, 2, 3)
    assert same(head + global_batches(cfg, pickle.loads(pickle.dumps(source)), TOKENIZER, 1, 5, head[-1][3]), whole)


@pytest.mark.parametrize("seed", range(3))
def test_no_row_is_lost_or_read_twice_whatever_goes_wrong(hub, seed):
    source = open_hub()
    hub.random_trouble(seed, share=0.3)
    assert read(source) == WHOLE
    assert {*TROUBLE} == {*hub.told}


def test_a_hub_that_never_recovers_ends_the_run_with_the_reason(hub, monkeypatch):
    source = open_hub()
    monkeypatch.setattr(files, "PATIENCE_SECONDS", 0.2)
    hub.trouble = lambda path, first: "503" if first >= 1000 else None
    with pytest.raises(UserError, match=r"c4-train\.00000.*: cannot be read: .*503.*The same command continues"):
        read(source)
    hub.trouble = lambda path, first: None
    hub.files.pop("en/c4-train.00001-of-00003.json.gz")
    with pytest.raises(UserError, match=r"c4-train\.00001-of-00003\.json\.gz: (no such file|cannot be)"):
        read(source)


def test_a_gated_file_is_named_at_once(hub):
    source = open_hub()
    hub.token = "secret"
    began = time.monotonic()
    with pytest.raises(UserError, match=r"c4-train\.00000.*: cannot be read: .*Access is restricted"):
        read(source)
    assert time.monotonic() - began < 10


def test_retry_after_is_waited_for(hub, monkeypatch):
    waited = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    source = open_hub()
    answers = iter(["429"] * 8)
    hub.trouble, hub.retry_after = lambda path, first: next(answers, None), "7"
    assert list(source.read(source.train_shards[0])) == TEXTS[:150]
    assert max(waited) >= 7


def test_a_revision_is_resolved_once_and_kept(hub, shards):
    cfg = make_config("c4", **KEYS)
    first = list_files(cfg)
    assert first.version == "a" * 40
    hub.commit = "b" * 40  # the dataset has moved on
    assert list_files(cfg).version == "b" * 40
    assert list_files(cfg, version=first.version) == first
    assert list_files(make_config("c4", data__revision="a" * 40, **KEYS)) == first


def test_a_folder_keeps_what_is_fetched_also_after_a_kill(hub, tmp_path):
    cache = tmp_path / "cache"
    keys = {"data__cache": cache}
    source = open_hub(**keys)
    assert read(source) == WHOLE
    asked = hub.asked["range"]
    assert read(open_hub(**keys)) == WHOLE and hub.asked["range"] == asked
    kept = sorted(path for path in cache.rglob("*") if path.is_file())
    assert [path.suffix for path in kept] == [".gz"] * 4
    content = kept[0].read_bytes()
    kept[0].unlink()
    kept[0].with_name(kept[0].name + ".part").write_bytes(content[:1200])  # as a killed process leaves it
    hub.ranges.clear()
    assert read(open_hub(**keys)) == WHOLE
    assert kept[0].read_bytes() == content and min(first for _, first, _ in hub.ranges) == 1200


def test_any_dataset_and_other_formats(hub, tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": TEXTS})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    hub.files |= {"data/train-0.parquet": (tmp_path / "a.parquet").read_bytes()}
    hub.files |= {"data/validation.jsonl": b'{"text": "one"}\n'}
    hub.random_trouble(0, share=0.2)
    source = open_source(make_config("local", data__root="hf://datasets/some/set", data__train_files="data/train-*",
                                     data__validation_files="data/validation.jsonl"))  # fmt: skip
    assert read(source) == [TEXTS, ["one"]]
    assert list(source.read(source.train_shards[0], 123, 50)) == TEXTS[123::50]
    found = open_source(make_config("local", data__root="hf://datasets/some/set/data"))
    assert (found.train_shards, found.validation_shards) == (("train-0.parquet",), ("validation.jsonl",))


def test_a_plain_web_server_with_and_without_lengths(shards, tmp_path):
    import functools
    import http.server
    import threading

    (tmp_path / "a.jsonl.gz").write_bytes(shards["en/c4-train.00000-of-00003.json.gz"])

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/a.jsonl.gz"
        source = open_source(make_config("local", data__train_files=address))
        assert list(source.texts(source.train_shards[0])) == TEXTS[:150]
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("answer", ["none", "closed"])
def test_a_machine_without_a_network_is_told_within_seconds(tmp_path, answer):
    program = """
        import sys, time
        from data_corpus import make_config
        from dlr_pretrain.data import open_source, open_tokenizer
        from dlr_pretrain.util.errors import UserError
        class Source:
            tokenizer_path = None
        for ask in (lambda: open_source(make_config("c4")), lambda: open_tokenizer(make_config("c4"), Source)):
            began = time.monotonic()
            try:
                ask()
            except UserError as error:
                assert "data=sample" in str(error), error
                assert time.monotonic() - began < 30, time.monotonic() - began
                print("told")
    """
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        if answer == "none":
            deaf.listen(0)
        output, _ = run_python(program, tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{deaf.getsockname()[1]}")
    assert output == "told\ntold\n"


def test_files_and_tokenizer_through_the_clients_own_endpoint(shards, tmp_path, model):
    """Nothing is patched: the hub is named by HF_ENDPOINT, as a mirror is."""
    program = """
        from data_corpus import make_config
        from dlr_pretrain.data import open_source, open_tokenizer
        source = open_source(make_config("c4"))
        print(sum(len(list(source.read(shard))) for shard in source.train_shards))
        print(open_tokenizer(make_config("c4"), source).encode(["more words"]))
    """
    hub = Hub(shards | {"spiece.model": model.read_bytes()})
    with serving(hub) as address:
        output, _ = run_python(program, tmp_path, HF_ENDPOINT=address)
    from dlr_pretrain.data import load_tokenizer

    assert output.splitlines() == ["400", str(load_tokenizer(model).encode(["more words"]))]
