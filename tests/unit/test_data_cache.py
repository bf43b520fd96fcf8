"""Shards of the hub that are kept on disk."""

import threading
import time

import pytest
from data_corpus import make_config
from loopback_hub import TEXTS, bytes_sent, open_hub, open_local

from dlr_pretrain.config.rules import unused
from dlr_pretrain.data.cache import ShardCache
from dlr_pretrain.util.errors import UserError


def cached(tmp_path):
    return sorted(str(p.relative_to(tmp_path / "cache")) for p in (tmp_path / "cache").rglob("*") if p.is_file())


def test_a_shard_is_kept_as_it_is_read_and_read_from_there(hub_at, shards, small_ranges, tmp_path):
    served = hub_at(shards)
    served.random_trouble(1, 0.2)
    source = open_hub(data__cache=tmp_path / "cache")
    shard = source.train_shards[0]
    folder = f"allenai/c4@{served.commit}"
    assert list(source.read(shard)) == TEXTS[:150]
    assert cached(tmp_path) == [f"{folder}/{shard}"]
    assert (tmp_path / "cache" / folder / shard).read_bytes() == shards[shard]
    before = len(served.times)
    for again in (source, open_hub(data__cache=tmp_path / "cache")):
        assert list(again.read(shard)) == TEXTS[:150] and list(again.read(shard, 3, 2)) == TEXTS[3:150:2]
    assert len(served.times) == before
    for other in source.train_shards + source.validation_shards:
        list(source.read(other))
    local = open_local(tmp_path / "cache" / folder / "en")
    assert local.fingerprint == source.fingerprint and list(local.read(local.train_shards[0])) == TEXTS[:150]


def test_a_beginning_that_is_there_is_not_fetched_again(hub_at, shards, small_ranges, tmp_path):
    """What a killed run leaves: ranges, of which the last may be cut off."""
    served = hub_at(shards)
    source = open_hub(data__cache=tmp_path / "cache")
    shard = source.train_shards[0]
    texts = source.read(shard)
    for _ in range(60):
        next(texts)
    texts.close()
    (part,) = (tmp_path / "cache").rglob("*.part")
    there = part.stat().st_size
    assert there >= 1000 and part.read_bytes() == shards[shard][:there]
    with part.open("r+b") as file:
        file.truncate(there - 100)
    time.sleep(0.1)
    served.ranges.clear()
    assert list(open_hub(data__cache=tmp_path / "cache").read(shard, 50)) == TEXTS[50:150]
    assert {first for first, _ in bytes_sent(served, shard)} == set(range(there - 500, len(shards[shard]), 500))
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_many_readers_share_a_cache(hub_at, shards, small_ranges, tmp_path):
    served = hub_at(shards)
    served.random_trouble(3, 0.1)
    shard, read = "en/c4-train.00001-of-00003.json.gz", {}

    def reader(number):
        read[number] = list(open_hub(data__cache=tmp_path / "cache").read(shard, number, 4))

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(4)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert read == {number: TEXTS[150 + number : 300 : 4] for number in range(4)}
    whole = tmp_path / "cache" / f"allenai/c4@{served.commit}" / shard
    assert whole.read_bytes() == shards[shard]


def test_no_gap_is_left_in_a_part(tmp_path):
    """A reader that is ahead of what is on the disk, as after another one was killed, writes nothing."""
    cache = ShardCache(tmp_path, {"x": 300})
    for first in (100, 200):
        cache.add("x", first, b"b" * 100)
    assert not list(tmp_path.iterdir())
    cache.add("x", 0, b"a" * 100)
    cache.add("x", 200, b"c" * 100)
    assert (tmp_path / "x.part").read_bytes() == b"a" * 100
    assert cache.find("x", 0, 100).result() == b"a" * 100 and cache.find("x", 100, 200) is None
    for first, content in ((100, b"b"), (0, b"a"), (200, b"c")):
        cache.add("x", first, content * 100)
    assert (tmp_path / "x").read_bytes() == b"a" * 100 + b"b" * 100 + b"c" * 100 and not (tmp_path / "x.part").exists()


def test_what_is_wrong_with_a_cache_is_named(hub_at, shards, small_ranges, tmp_path):
    served = hub_at(shards)
    source = open_hub(data__cache=tmp_path / "cache")
    shard = source.train_shards[0]
    list(source.read(shard))
    (kept,) = (path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    kept.write_bytes(kept.read_bytes() + b"x")
    rule = rf"{kept}: has {len(shards[shard]) + 1:,} bytes, and {len(shards[shard]):,} on the hub\. Delete it"
    with pytest.raises(UserError, match=rule):
        list(source.read(shard))
    kept.write_bytes(shards[shard][:1000] + bytes(len(shards[shard]) - 1000))
    with pytest.raises(UserError, match=rf"{shard} \(kept in {kept.parent.parent}\): (damaged|document \d+ )"):
        list(source.read(shard))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.cache: .*: Not a directory\. Fix this, or leave data\.cache out"):
        list(open_hub(data__cache=tmp_path / "file" / "below").read(shard))
    served.files["en/x.parquet"] = b"x"
    with pytest.raises(UserError, match=r"data\.cache=x: holds JSON lines .* data\.train_files matches en/x\.parquet"):
        open_hub(data__cache="x", data__train_files="en/*")


def test_only_shards_of_the_hub_are_kept():
    given = {"data.cache", "data.revision"}
    assert [str(p.key) for p in unused(make_config("c4"), given)] == []
    assert {p.key for p in unused(make_config(data__root="x"), given)} == given
