"""Where documents come from: shards on disk, shards on the hub, or the sample harvested from installed packages.

A source names its shards in a fixed order and reads any of them from any document on; it knows nothing of streams,
tokens or ranks. The order of the shards is part of the data order, so it is sorted, never as a directory lists it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Protocol

from dlr_pretrain.config import Config
from dlr_pretrain.data import hub, sample
from dlr_pretrain.data.shards import parse_text, read_lines
from dlr_pretrain.errors import UserError

OFFLINE = "Offline, use data=sample, or data=c4_local data.root=<folder of the shards>"
KEPT_BYTES = 64 << 20  # compressed size of the shards that are kept decompressed (several times that in memory)


class Source(Protocol):
    """Documents in named shards."""

    train_shards: tuple[str, ...]
    validation_shards: tuple[str, ...]
    tokenizer_path: Path | None  # the source's own sentencepiece model, where it has one
    fingerprint: str  # of the shards, wherever they lie: a run resumes on the same ones only

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str]:
        """The texts of the documents start, start + step, ... of a shard."""
        ...

    def describe(self) -> str:
        """One line for the console."""
        ...


def open_source(cfg: Config, progress: Callable[[str], None] | None = None) -> Source:
    """The source that ``data`` names. ``progress`` is told of work that takes a while (default: the module's log)."""
    data = cfg.data
    if data.source == "c4":
        return HubSource(data.dataset, data.train_files, data.validation_files, data.text_key)
    root = Path(data.root) if data.root is not None else None
    if data.source == "sample":
        folder = sample.prepare(root, progress or logging.getLogger(__name__).info)
        model = folder / sample.TOKENIZER_FILE
        return LocalSource(folder, data.train_files, data.validation_files, data.text_key, model)
    return LocalSource(root, data.train_files, data.validation_files, data.text_key)


class LocalSource:
    """C4-layout shards on disk."""

    def __init__(
        self,
        root: Path | None,
        train_files: str,
        validation_files: str,
        text_key: str,
        tokenizer_path: Path | None = None,
    ):
        self.tokenizer_path = tokenizer_path
        self._root = root
        self._text_key = text_key
        self._paths: dict[str, Path] = {}
        self._kept: OrderedDict[str, list[bytes]] = OrderedDict()
        self.train_shards = self._find("data.train_files", train_files)
        self.validation_shards = self._find("data.validation_files", validation_files)
        self.fingerprint = _fingerprint({name: path.stat().st_size for name, path in self._paths.items()})

    def _find(self, key: str, pattern: str) -> tuple[str, ...]:
        """Names of the shards that match, relative to the root, so that a moved folder keeps its order."""
        names = sorted(glob.glob(pattern, root_dir=self._root, recursive=True))
        if not names:
            where = f"{key}={pattern}" + (f" below {self._root}" if self._root else "")
            raise UserError(f"{where}: matches no file. Set data.root to the folder of the shards, or correct the glob")
        self._paths |= {name: Path(self._root or "", name) for name in names}
        return tuple(names)

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str]:
        path = self._paths[shard]
        lines = read_lines(path, start) if step == 1 else self._every(step, shard, start)
        for document, line in zip(count(start, step), lines, strict=False):
            yield parse_text(line, self._text_key, path, document)

    def _every(self, step: int, shard: str, start: int) -> Iterator[bytes]:
        """Every step-th line. Several streams read such a shard, so it stays in memory where it is small."""
        path = self._paths[shard]
        if shard in self._kept:
            self._kept.move_to_end(shard)
        elif path.is_file() and path.stat().st_size <= KEPT_BYTES // 4:
            self._kept[shard] = list(read_lines(path))
            while sum(self._paths[name].stat().st_size for name in self._kept) > KEPT_BYTES:
                self._kept.popitem(last=False)
        else:
            return islice(read_lines(path, start), 0, None, step)
        return iter(self._kept[shard][start::step])

    def describe(self) -> str:
        where = self._root or Path(next(iter(self._paths.values()))).parent
        return f"{where}: {len(self.train_shards)} train and {len(self.validation_shards)} validation shards"


class HubSource:
    """C4-layout shards of a dataset on the hub, streamed through ``datasets``; each file is a shard.

    The commit is fixed when the source is opened, so that a run sees one version of the dataset.
    """

    tokenizer_path = None

    def __init__(self, dataset: str, train_files: str, validation_files: str, text_key: str):
        self._dataset = dataset
        self._text_key = text_key
        patterns = {"data.train_files": train_files, "data.validation_files": validation_files}
        self._commit, found = hub.list_files(dataset, list(patterns.values()), OFFLINE)
        for (key, pattern), files in zip(patterns.items(), found, strict=True):
            if not files:
                raise UserError(f"{key}={pattern}: matches no file of {dataset} on the hub. Correct the glob")
        self.train_shards, self.validation_shards = map(tuple, found)
        self.fingerprint = _fingerprint([dataset, *found])

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str]:
        address = f"hf://datasets/{self._dataset}@{self._commit}/{shard}"
        return islice(read_with_datasets(address, self._text_key, start), 0, None, step)

    def describe(self) -> str:
        shards = f"{len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        return f"{self._dataset}@{self._commit[:7]} on the hub: {shards}"


def _fingerprint(shards: object) -> str:
    return hashlib.sha256(json.dumps(shards, sort_keys=True).encode()).hexdigest()


def read_with_datasets(address: str, text_key: str, start: int = 0) -> Iterator[str]:
    """The texts of a JSON-lines file at any address that ``datasets`` can stream, from document ``start`` on."""
    from datasets import load_dataset

    document = start
    try:
        rows = load_dataset("json", data_files=[address], split="train", streaming=True)
        for row in rows.select_columns([text_key]).skip(start):
            text = row[text_key]
            if not isinstance(text, str):
                raise UserError(f"{address}: document {document} has no text {text_key!r}. Set data.text_key")
            yield text
            document += 1
    except UserError:
        raise
    except Exception as error:  # datasets, its reader and its network layers raise types of their own
        mend = "Start again to continue from the last checkpoint"
        raise UserError(f"{address}: reading failed after document {document} ({error}). {mend}") from error
