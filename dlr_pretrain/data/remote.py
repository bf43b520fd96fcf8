"""Shards on the hub. JSON lines are read here, from ranges of bytes; other formats through ``datasets``.

Memory: a stream holds the range that it reads and the next one, so the 64 streams of a job hold at most 512 MiB,
divided among its ranks. A stream that skips to its first document holds up to five ranges.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.data import hub
from dlr_pretrain.data.cache import ShardCache, Stored
from dlr_pretrain.data.ranges import AGAIN, Range
from dlr_pretrain.data.shards import lines, parse_text
from dlr_pretrain.data.sources import Contents, TextSource, require_disjoint
from dlr_pretrain.util.errors import UserError

OFFLINE = "Offline, use data=sample, or data=c4_local data.root=<folder of the shards>"
# A range has some 4,400 documents of C4, and all of C4 takes 70,000 requests: without a token the hub allows 3,000 in
# 5 minutes.
RANGE_BYTES = 4 << 20
AHEAD = 1  # ranges fetched while one is read; each lasts a stream for hundreds of steps
AHEAD_SKIPPING = 4  # the same while lines are skipped, when only the network takes time


@dataclass(frozen=True)
class Listing:
    """The shards of one commit of a dataset, with their sizes in bytes; sorted."""

    dataset: str
    commit: str
    train: dict[str, int]
    validation: dict[str, int]


def list_shards(cfg: Config, progress: Callable[[str], None], patient: bool) -> Listing:
    """Ask the hub for the shards of ``data``. Only one rank asks: the hub would refuse requests from all of them."""
    data = cfg.data
    patterns = {"data.train_files": data.train_files, "data.validation_files": data.validation_files}
    commit, found = hub.list_files(data.dataset, data.revision, list(patterns.values()), OFFLINE, patient)
    for (key, pattern), files in zip(patterns.items(), found, strict=True):
        if not files:
            raise UserError(f"{key}={pattern}: matches no file of {data.dataset} on the hub. Correct the glob")
        others = [path for path in files if not _is_json_lines(path)]
        if others and data.cache is not None:
            rule = f"holds JSON lines (.json, .jsonl, .gz of these), and {key} matches {others[0]}"
            raise UserError(f"data.cache={data.cache}: {rule}. Leave it out")
    listing = Listing(data.dataset, commit, *found)
    require_disjoint(listing.train.keys(), listing.validation.keys())
    if (shards := len(listing.train)) < cfg.num_streams and data.cache is None:
        shared = f"{data.dataset}: the {cfg.num_streams} data streams share {shards} shards"
        progress(f"{shared}, and each fetches all that it reads from: data.cache=<folder> fetches it once")
    return listing


class HubSource(TextSource):
    """The shards of a listing; each file is a shard. It holds no connection, so it can be sent to a process."""

    tokenizer_path = None

    def __init__(self, listing: Listing, text_key: str, cache: str | None):
        self._listing, self._text_key = listing, text_key
        self._sizes = listing.train | listing.validation
        self.train_shards, self.validation_shards = tuple(listing.train), tuple(listing.validation)
        self._cache: ShardCache | None = None
        if cache is not None:
            self._folder = Path(cache, f"{listing.dataset}@{listing.commit}")
            self._cache = ShardCache(self._folder, self._sizes)
        self.contents = Contents.of(text_key, listing.train, listing.validation)

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str]:
        listing = self._listing
        if not _is_json_lines(shard):
            address = f"hf://datasets/{listing.dataset}@{listing.commit}/{shard}"
            yield from islice(read_with_datasets(address, self._text_key, start), 0, None, step)
            return
        name, fix = f"{listing.dataset}: {shard}", AGAIN
        if self._cache is not None:
            name, fix = f"{name} (kept in {self._folder})", "Delete it there, and it is fetched again"
        parts = _Parts(listing, shard, self._sizes[shard], self._cache)
        parts.look_ahead(AHEAD_SKIPPING if start else AHEAD)
        wanted = islice(lines(parts, start, name, fix), 0, None, step)
        for document, line in zip(count(start, step), wanted, strict=False):
            if document == start:
                parts.look_ahead(AHEAD)
            yield parse_text(line, self._text_key, name, document)

    def describe(self) -> str:
        listing = self._listing
        shards = f"{len(listing.train)} train and {len(listing.validation)} validation shards"
        cached = f", cached in {self._folder}" if self._cache else ""
        return f"{listing.dataset}@{listing.commit} on the hub: {shards}{cached}"


class _Parts:
    """The ranges of a shard in order; the next ones are fetched while one is read."""

    def __init__(self, listing: Listing, shard: str, size: int, cache: ShardCache | None):
        self._name, self._shard, self._size, self._cache = f"{listing.dataset}: {shard}", shard, size, cache
        self._url = hub.file_url(listing.dataset, listing.commit, shard)
        self._coming: deque[tuple[int, Range | Stored]] = deque()  # each with the position of its first byte
        self._next = self._ahead = 0

    def look_ahead(self, ranges: int) -> None:
        """Set how many ranges to fetch beyond the one that is read; abandons surplus ones."""
        self._ahead = ranges
        while len(self._coming) > ranges:
            self._next, surplus = self._coming.pop()
            surplus.abandon()

    def __iter__(self) -> Iterator[bytes]:
        try:
            while self._order():
                first, part = self._coming.popleft()
                content = part.result()
                if self._cache is not None and isinstance(part, Range):
                    self._cache.add(self._shard, first, content)
                yield content
        finally:
            self.look_ahead(0)

    def _order(self) -> bool:
        """Start to fetch the next ranges; returns whether any are left."""
        while len(self._coming) <= self._ahead and self._next < self._size:
            first, end = self._next, min(self._next + RANGE_BYTES, self._size)
            stored = self._cache.find(self._shard, first, end) if self._cache is not None else None
            self._coming.append((first, stored or Range(self._name, self._url, self._size, first, end)))
            self._next = end
        return bool(self._coming)


def _is_json_lines(path: str) -> bool:
    return re.search(r"\.(json|jsonl|ndjson)(\.gz)?$", path) is not None


def read_with_datasets(address: str, text_key: str, start: int = 0) -> Iterator[str]:
    """The texts of a file at any address and in any format that ``datasets`` can stream, from document ``start`` on."""
    from datasets import load_dataset

    format = {"builder": "parquet", "columns": [text_key]} if address.endswith(".parquet") else {"builder": "json"}
    document = start
    try:
        rows = load_dataset(format.pop("builder"), data_files=[address], split="train", streaming=True, **format)
        for row in rows.select_columns([text_key]).skip(start):
            text = row[text_key]
            if not isinstance(text, str):
                raise UserError(f"{address}: document {document} has no text {text_key!r}. Set data.text_key")
            yield text
            document += 1
    except UserError:
        raise
    except Exception as error:  # datasets, its reader and its network layers raise types of their own
        raise UserError(f"{address}: reading failed after document {document} ({error}). {AGAIN}") from error
