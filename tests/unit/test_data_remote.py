"""Shards on the hub, from one that answers late, in part, wrongly or not at all."""

import email.utils
import gc
import gzip
import itertools
import json
import pickle
import re
import threading
import time
from contextlib import contextmanager
from http.client import responses

import pytest
from data_corpus import LetterTokenizer, global_batches, make_config, run_python, same
from loopback_hub import KEYS, TEXTS, TROUBLE, Hub, bytes_sent, open_hub, open_local, serving

from dlr_pretrain.data import ask_hub, documents, hub, open_source, ranges, remote
from dlr_pretrain.data.hub import seconds_to_wait
from dlr_pretrain.data.ranges import Range
from dlr_pretrain.data.remote import Listing
from dlr_pretrain.util.errors import UserError

# ----------------------------------------------------------------------------------------------------
# Trouble that passes


@pytest.mark.parametrize(("seed", "redirects"), [(0, True), (1, True), (2, False)])
def test_a_hub_in_trouble_gives_every_document_in_order(hub_at, shards, small_ranges, seed, redirects):
    served = hub_at(shards)
    source = open_hub()
    served.random_trouble(seed, 0.4)
    served.redirects = redirects
    if not redirects:
        inner = served.trouble
        served.trouble = lambda path, first: "503" if (told := inner(path, first)) and "store" in told else told
    shard = source.train_shards[1]
    for start, step in ((0, 1), (0, 3), (149, 1), (77, 2), (150, 1)):
        assert list(source.read(shard, start, step)) == TEXTS[150:300][start::step]
    assert set(served.told) >= set(TROUBLE) - {"403 of the store"}


@pytest.mark.parametrize("packing", ["packed", "pad"])
def test_a_hub_in_trouble_gives_the_batches_of_the_same_shards_on_disk(
    hub_at, shards, small_ranges, tmp_path, monkeypatch, packing
):
    monkeypatch.setattr(documents, "BLOCK_DOCUMENTS", 16)
    served = hub_at(shards)
    source, local = open_hub(data__packing=packing), open_local(tmp_path / "en", data__packing=packing)
    served.random_trouble(5, 0.2)
    cfg = make_config("c4", data__packing=packing, **KEYS)
    expected = global_batches(cfg, local, LetterTokenizer(), 1, 40)
    assert same(global_batches(cfg, source, LetterTokenizer(), 2, 40), expected)
    assert same(global_batches(cfg, source, LetterTokenizer(), 1, 10, expected[29][3]), expected[30:])
    assert source.fingerprint == local.fingerprint  # a run that streams may go on from a copy of the shards
    assert len(served.told) > 10


def test_a_read_goes_on_where_it_broke_off(hub_at, shards, small_ranges):
    served = hub_at(shards)
    source = open_hub()
    served.trouble = lambda path, first: "truncate" if len(served.ranges) % 3 else None
    (*_, shard) = source.train_shards
    assert list(source.read(shard)) == TEXTS[300:]
    sent = bytes_sent(served, shard)
    assert len(sent) > len(shards[shard]) / 500 * 1.4
    assert sum(count for _, count in sent) == len(shards[shard])  # no byte twice


def test_a_server_that_asks_to_wait_is_given_the_time(hub_at, shards):
    served = hub_at(shards)
    source = open_hub()
    served.retry_after = "1"
    served.trouble = lambda path, first: "429" if len(served.times) == 1 else None
    assert list(source.read(source.validation_shards[0])) == ["validation", "text"]
    first, second = served.times
    assert 1 <= second - first < 3


def test_the_ways_to_ask_for_time():
    date = email.utils.formatdate(time.time() + 100, usegmt=True)
    assert seconds_to_wait({}) == 0
    assert seconds_to_wait({"retry-after": "17"}) == 17
    assert 90 < seconds_to_wait({"retry-after": date}) <= 100
    assert seconds_to_wait({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}) == 0
    assert seconds_to_wait({"retry-after": "soon"}) == 0
    assert seconds_to_wait({"ratelimit": '"resolvers";r=0;t=138'}) == 138
    assert seconds_to_wait({"ratelimit": '"resolvers";r=2999;t=138'}) == 0


def test_pauses_double_up_to_a_bound_and_differ():
    first, later = ([hub.pause(tries) for _ in range(50)] for tries in (0, 3))
    assert all(0.5 <= p <= 1 for p in first) and all(4 <= p <= 8 for p in later) and len(set(first)) > 40
    assert max(hub.pause(1000) for _ in range(50)) <= 60


def test_an_outage_is_no_failure_while_the_text_lasts(hub_at, shards, small_ranges, monkeypatch):
    """The range after the one that is read may take longer than the patience of a stream that waits."""
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 0.3)
    served = hub_at(shards)
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 0.3)
    source = open_hub()
    texts = source.read(source.train_shards[0])
    read = [next(texts)]
    served.trouble = lambda path, first: "503"
    time.sleep(0.6)
    served.trouble = lambda path, first: None
    time.sleep(0.2)
    assert read + list(texts) == TEXTS[:150]


# ----------------------------------------------------------------------------------------------------
# Trouble that does not pass


@pytest.mark.parametrize("trouble", ["503", "429", "stall", "no bytes", "403 of the store"])
def test_patience_ends_with_the_place_the_tries_and_the_reason(hub_at, shards, small_ranges, monkeypatch, trouble):
    served = hub_at(shards)
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 0.7)
    source = open_hub()
    shard = source.train_shards[0]
    served.trouble = lambda path, first: trouble if len(served.times) > 3 else None
    texts = source.read(shard)
    begin, read = time.monotonic(), []
    with pytest.raises(UserError) as caught:
        for text in texts:
            read.append(text)
    assert 0.7 <= time.monotonic() - begin < 10 and read == TEXTS[: len(read)] != []
    message = str(caught.value)
    place = rf"allenai/c4: {shard}: byte [12],\d+ of {len(shards[shard]):,} did not come within 0\.7 s"
    reason = f"{trouble[:3]} {responses[int(trouble[:3])]}" if trouble[:3].isdigit() else r"\w+: .+"
    url = rf"http://\S+/resolve/{served.commit}/{shard}"
    assert re.fullmatch(rf"{place} \(\d+ tries of {url}; {reason}\)\. {ranges.AGAIN}", message), message
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize("change", ["short", "unnamed"])
def test_an_answer_that_is_not_what_it_says_is_told(hub_at, shards, small_ranges, monkeypatch, change):
    hub_at(shards)
    source, real = open_hub(), hub.open_range

    @contextmanager
    def open_range(*given):
        with real(*given) as answer:
            yield answer._replace(pieces=iter([b""])) if change == "short" else answer._replace(headers={})

    monkeypatch.setattr(hub, "open_range", open_range)
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 0.3)
    reason = {
        "short": r"206 Partial Content broke off after 0 of [\d,]+ bytes",
        "unnamed": r"206 Partial Content that does not say which bytes it brings \(Content-Range: None\)",
    }[change]
    with pytest.raises(UserError, match=rf"\d+ tries of http://\S+; {reason}\)"):
        list(source.read(source.train_shards[0]))


def test_a_file_that_is_gone_or_shut_off_is_refused_at_once(hub_at, shards, small_ranges):
    served = hub_at(shards)
    source = open_hub()
    begin = time.monotonic()
    served.files = {}
    with pytest.raises(UserError, match=r"byte 0 of [\d,]+ is refused \(1 try of http://\S+; 404 Not Found\)"):
        list(source.read(source.train_shards[0]))
    served.files, served.token = shards, "secret"
    rule = r"is refused \(1 try of http://\S+; 401 Unauthorized Access is restricted\. Set HF_TOKEN to the token"
    with pytest.raises(UserError, match=rule):
        list(source.read(source.train_shards[0]))
    assert time.monotonic() - begin < 10


def test_the_users_token_reaches_the_hub_and_not_the_store(hub_at, shards, small_ranges, monkeypatch):
    served = hub_at(shards)
    served.token = "secret"  # the store answers 400 to whoever shows one
    monkeypatch.setenv("HF_TOKEN", "secret")
    source = open_hub()
    assert list(source.read(source.train_shards[0])) == TEXTS[:150]


@pytest.mark.parametrize("change", [b"", b"longer" * 200], ids=["shorter", "longer"])
def test_a_shard_of_another_size_is_refused(hub_at, shards, small_ranges, change):
    served = hub_at(shards)
    source = open_hub()
    shard = source.train_shards[0]
    served.files = shards | {shard: shards[shard][:900] + change}
    rule = rf"{shard}: .* is refused \(1 try of http://\S+; 206 Partial Content: "
    rule += f"the file has {len(served.files[shard]):,} bytes there, and "
    with pytest.raises(UserError, match=rule + f"{len(shards[shard]):,} in the list of files"):
        list(source.read(shard))


def test_a_server_without_ranges_is_refused_beyond_the_first(hub_at, shards, small_ranges, monkeypatch):
    hub_at(shards)
    source = open_hub()
    real = hub.open_range
    monkeypatch.setattr(hub, "open_range", lambda url, first, end: real(url, 0, len(shards[shard])))
    shard = source.train_shards[0]
    with pytest.raises(
        UserError, match=r"; 206 Partial Content: asked for bytes from 500 on, the server sends those from 0 on"
    ):
        list(source.read(shard))


def test_damage_on_the_hub_is_named_with_its_document(hub_at, shards):
    whole = next(iter(shards))
    broken = shards[whole][:1000] + bytes(30) + shards[whole][1030:]
    hub_at(shards | {whole: broken})
    source = open_hub()
    with pytest.raises(UserError, match=rf"allenai/c4: {whole}: (damaged or cut off after document|document) \d+"):
        list(source.read(whole))


# ----------------------------------------------------------------------------------------------------
# Reading ahead


def test_little_is_fetched_ahead_and_nothing_after_the_end(hub_at, shards, small_ranges):
    served = hub_at(shards)
    source = open_hub()
    shard = source.train_shards[1]
    texts = source.read(shard)
    next(texts)
    time.sleep(0.1)
    assert len(bytes_sent(served, shard)) == 1 + remote.AHEAD
    skipped = source.read(shard, 100)
    assert next(skipped) == TEXTS[250]
    time.sleep(0.1)
    fetched = sorted(first for first, _ in bytes_sent(served, shard)[2:])
    assert fetched[: remote.AHEAD_SKIPPING] == [0, 500, 1000, 1500] and len(fetched) == len(set(fetched))
    gc.collect()
    held = sum(type(thing) is Range for thing in gc.get_objects())
    assert held <= 2 * (1 + remote.AHEAD)  # by two readers
    assert list(skipped) == TEXTS[251:300]
    served.trouble = lambda path, first: "503"
    while not served.told:  # the range ahead is in trouble
        next(texts), time.sleep(0.02)
    texts.close()
    time.sleep(0.2)
    assert not any(thread.name.startswith("range") for thread in threading.enumerate())


def test_what_is_let_go_of_is_not_tried_again(hub_at, shards):
    served = hub_at(shards)
    source = open_hub()
    served.trouble = lambda path, first: "503"
    shard = source.train_shards[0]
    coming = Range("x", hub.file_url("allenai/c4", served.commit, shard), len(shards[shard]), 0, 100)
    while not served.told:
        time.sleep(0.01)
    coming.abandon()
    time.sleep(0.2)
    before = len(served.told)
    time.sleep(0.2)
    assert len(served.told) == before


# ----------------------------------------------------------------------------------------------------
# The list of files


def test_the_list_of_files_is_asked_for_again(hub_at, shards, monkeypatch):
    monkeypatch.setattr(hub, "LISTING_SECONDS", 0.3)
    from huggingface_hub.utils import _http

    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # the library's own pauses
    served = hub_at(shards)
    served.listing_trouble = ["stall"] + ["503"] * 8
    source = open_hub()
    assert [*source.train_shards, *source.validation_shards] == sorted(shards)
    assert served.asked["info"] == 1 and served.asked["list"] > 8


def test_a_busy_hub_is_asked_again_and_a_silent_one_is_not(hub_at, shards, monkeypatch):
    served = hub_at(shards)
    served.info_trouble = ["429", "503"]
    assert open_hub().train_shards and served.asked["info"] == 3
    monkeypatch.setattr(hub, "FIRST_CONTACT_SECONDS", 0.2)
    served.info_trouble = ["stall"]
    begin = time.monotonic()
    with pytest.raises(
        UserError, match=r"allenai/c4: the Hugging Face hub denied access or did not answer: .*Offline, use"
    ):
        open_hub()
    assert time.monotonic() - begin < 6 and served.asked["info"] == 4
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 0.3)
    served.info_trouble = ["503"] * 1000
    with pytest.raises(UserError, match=r"allenai/c4: the Hugging Face hub denied access or did not answer: .*503"):
        open_hub()
    assert served.asked["info"] > 6


def test_a_folder_that_is_not_there_is_named_at_once(hub_at, shards):
    served = hub_at(shards)
    served.listing_trouble = ["404"]
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"allenai/c4: its folder 'en' cannot be listed: .*404"):
        open_hub()
    assert time.monotonic() - begin < 10
    with pytest.raises(UserError, match=r"data\.train_files=en/none-\* matches|none-\*: matches no file of allenai/c4"):
        open_hub(data__train_files="en/none-*")
    with pytest.raises(UserError, match="both match en/c4-validation"):
        open_hub(data__train_files="en/c4-*")


def test_a_revision_is_asked_for(hub_at, shards):
    served = hub_at(shards)
    assert list(open_hub(data__revision="v1").read("en/c4-validation.00000-of-00001.json.gz")) == ["validation", "text"]
    assert served.asked["v1"] == 1 and served.asked["info"] == 0


def test_the_source_is_built_from_a_listing_without_asking_again(hub_at, shards):
    served = hub_at(shards)
    cfg, told = make_config("c4", **KEYS), []
    listing = pickle.loads(pickle.dumps(ask_hub(cfg, told.append)))
    assert isinstance(listing, Listing) and list(listing.train.values()) == [len(shards[s]) for s in listing.train]
    sources = [open_source(cfg, told.append, listing) for _ in range(3)]
    assert served.asked["info"] == served.asked["list"] == 1
    assert len({source.fingerprint for source in sources}) == 1
    sent = pickle.loads(pickle.dumps(sources[0]))  # to a process that prepares tokens
    assert list(sent.read(sent.train_shards[0])) == TEXTS[:150]
    assert told == [
        "allenai/c4: the 4 data streams share 3 shards, and each fetches all that it reads from: data.cache=<folder> "
        "fetches it once"
    ]
    assert ask_hub(make_config(data__root="x")) is None


def test_json_lines_of_any_name_and_place(hub_at, tmp_path):
    """Plain and gzipped, several gzip files in a row, padded, empty, and with another text key."""
    rows = [json.dumps({"content": text}).encode() + b"\n" for text in TEXTS[:90]]
    thirds = [b"".join(rows[i : i + 30]) for i in (0, 30, 60)]
    files = {
        "train/a.jsonl": b"".join(thirds),
        "train/b.json.gz": b"".join(map(gzip.compress, thirds)) + bytes(700),
        "train/c.ndjson": b"",
        "train/d.jsonl.gz": gzip.compress(b"".join(thirds)[:-1]),
        "held/x.jsonl": thirds[0],
    }
    hub_at(files)
    source = open_hub(data__dataset="me/mine", data__train_files="train/*", data__validation_files="held/*.jsonl",
                      data__text_key="content")  # fmt: skip
    assert [len(list(source.read(shard))) for shard in source.train_shards] == [90, 90, 0, 90]
    full = [shard for shard in source.train_shards if files[shard]]
    for shard, start, step in itertools.product(full, (0, 59), (1, 7)):
        assert list(source.read(shard, start, step)) == TEXTS[:90][start::step]
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    local = open_local(tmp_path, data__train_files="train/*", data__validation_files="held/*", data__text_key="content")
    assert local.fingerprint == source.fingerprint


# ----------------------------------------------------------------------------------------------------
# Through datasets


@pytest.mark.slow
def test_parquet_is_read_through_datasets_and_json_lines_are_not(shards, tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": range(300), "text": TEXTS[:300]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    program = """
        import sys
        from data_corpus import make_config
        from dlr_pretrain.data import open_source
        keys = {"data__train_files": sys.argv[1], "data__validation_files": "en/c4-val*"}
        source = open_source(make_config("c4", **keys))
        texts = list(source.read(source.train_shards[0], 123, 2))
        print("datasets" in sys.modules, len(texts), texts[0], texts[-1])
    """
    served = Hub(shards | {"pq/a.parquet": (tmp_path / "a.parquet").read_bytes()})
    with serving(served) as at:
        for files, through, texts in (("pq/*", True, TEXTS[123:300:2]), ("en/c4-train*", False, TEXTS[123:150:2])):
            output, errors = run_python(program, tmp_path, arguments=[files], HF_ENDPOINT=at)
            assert output == f"{through} {len(texts)} {texts[0]} {texts[-1]}\n" and not errors
