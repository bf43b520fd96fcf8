"""Where documents come from: shards on disk, on the hub, harvested from installed packages, or pre-tokenised.

A source names its shards in a fixed order and reads any of them from any document on; it knows nothing of streams
or ranks. The order of the shards is part of the data order, so they are sorted, never in the order of a directory
listing.
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dlr_pretrain.config import Config
from dlr_pretrain.data import sample
from dlr_pretrain.data.documents import Documents, TextDocuments
from dlr_pretrain.data.shards import is_cut_off, parse_text, read_lines
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import UserError

if TYPE_CHECKING:
    from dlr_pretrain.data.remote import Listing

KEPT_BYTES = 16 << 20  # compressed size of the shards that are kept decompressed (several times that in memory)


class Source(Protocol):
    """Documents in named shards."""

    train_shards: tuple[str, ...]
    validation_shards: tuple[str, ...]
    tokenizer_path: Path | None  # the source's own sentencepiece model, if it has one
    fingerprint: str  # of the texts, independent of their location: a run resumes only on the same texts

    def documents(self, tokenizer: Tokenizer) -> Documents:
        """The shards' documents as tokens."""
        ...

    def describe(self) -> str:
        """One line for the console."""
        ...


@dataclass(frozen=True)
class Contents:
    """The files of a source of texts: their sizes in bytes, by their names below their common folder.

    A copy of the files elsewhere has the same ``fingerprint``, so a run may continue from a copy.
    """

    text_key: str
    train: dict[str, int]
    validation: dict[str, int]

    @classmethod
    def of(cls, text_key: str, train: Mapping[str, int], validation: Mapping[str, int]) -> Contents:
        """From sizes by path; the paths are all relative to one folder or all absolute."""
        root = os.path.commonpath([os.path.dirname(path) for path in (*train, *validation)]) or "."
        splits = ({os.path.relpath(path, root): size for path, size in files.items()} for files in (train, validation))
        return cls(text_key, *splits)

    @property
    def fingerprint(self) -> str:
        content = json.dumps([self.text_key, [self.train, self.validation]], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def longer(self, before: Contents) -> list[str]:
        """The training shards that are longer than in ``before``; empty if anything else differs."""
        if replace(self, train=before.train) != before or list(self.train) != list(before.train):
            return []
        changed = [name for name, size in self.train.items() if size != before.train[name]]
        return changed if all(self.train[name] > before.train[name] for name in changed) else []


class TextSource(ABC):
    """A source of texts."""

    train_shards: tuple[str, ...]
    validation_shards: tuple[str, ...]
    contents: Contents  # of these shards, in this order

    @property
    def fingerprint(self) -> str:
        return self.contents.fingerprint

    @abstractmethod
    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str]:
        """The texts of the documents start, start + step, ... of a shard."""

    def documents(self, tokenizer: Tokenizer) -> Documents:
        return TextDocuments(self, tokenizer)


def ask_hub(cfg: Config, progress: Callable[[str], None] | None = None, patient: bool = False) -> Listing | None:
    """The shards of a dataset on the hub; None if ``data`` names another source. One rank asks on behalf of all.

    Without an answer it gives up within seconds or, if ``patient``, within minutes.
    """
    if cfg.data.source != "c4":
        return None
    from dlr_pretrain.data.remote import list_shards

    return list_shards(cfg, progress or logging.getLogger(__name__).info, patient)


def open_source(cfg: Config, progress: Callable[[str], None] | None = None, listing: Listing | None = None) -> Source:
    """The source that ``data`` names.

    ``progress`` receives messages about work that takes a while (default: the module's log). ``listing`` is the result
    of ``ask_hub``; if None, this function asks the hub.
    """
    data, progress = cfg.data, progress or logging.getLogger(__name__).info
    if data.source == "c4":
        from dlr_pretrain.data.remote import HubSource

        return HubSource(listing or ask_hub(cfg, progress), data.text_key, data.cache)
    root = Path(data.root) if data.root is not None else None
    if data.source == "tokens":
        source = TokenSource(root, Path(cfg.tokenizer.path) if cfg.tokenizer.path is not None else None)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # a machine's other ranks read the same files
            source.check(progress)
        return source
    if data.source == "sample":
        folder = sample.prepare(root, progress)
        model = folder / sample.TOKENIZER_FILE
        return LocalSource(folder, data.train_files, data.validation_files, data.text_key, model)
    return LocalSource(root, data.train_files, data.validation_files, data.text_key)


class LocalSource(TextSource):
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
        self.paths: dict[str, Path] = {}
        self._kept: dict[str, tuple[list[bytes], int]] = {}  # lines, and the size of the file
        self.train_shards = self._find("data.train_files", train_files)
        self.validation_shards = self._find("data.validation_files", validation_files)
        splits = [[self.paths[name] for name in names] for names in (self.train_shards, self.validation_shards)]
        require_disjoint(*(set(map(os.path.realpath, paths)) for paths in splits))
        try:
            sizes = [{os.path.abspath(path): path.stat().st_size for path in paths} for paths in splits]
        except OSError as error:
            fix = "Fetch this shard again, or narrow the glob that matches it"
            raise UserError(f"{error.filename}: cannot be opened ({error.strerror}). {fix}") from error
        self.contents = Contents.of(text_key, *sizes)

    def _find(self, key: str, pattern: str) -> tuple[str, ...]:
        """Names of the shards that match, relative to the root, so that a moved folder keeps its order."""
        found = set(glob.glob(pattern, root_dir=self._root, recursive=True))  # several ** find some files twice
        names = sorted(name for name in found if not name.endswith("/") and not Path(self._root or "", name).is_dir())
        if not names:
            where = f"{key}={pattern}" + (f" below {self._root}" if self._root else "")
            raise UserError(f"{where}: matches no file. Set data.root to the folder of the shards, or correct the glob")
        self.paths |= {name: Path(self._root or "", name) for name in names}
        return tuple(names)

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str]:
        path = self.paths[shard]
        lines = read_lines(path, start) if step == 1 else self._every(step, shard, start)
        for document, line in zip(count(start, step), lines, strict=False):
            yield parse_text(line, self._text_key, path, document)

    def _every(self, step: int, shard: str, start: int) -> Iterator[bytes]:
        """Every step-th line from ``start`` on. Several streams read such a shard, so a small one is kept in memory."""
        path = self.paths[shard]
        lines, size = self._kept.pop(shard, (None, 0))  # added again at the end: the first is the least recently used
        if lines is None:
            if not path.is_file() or (size := path.stat().st_size) > KEPT_BYTES // 4:
                return islice(read_lines(path, start), 0, None, step)
            lines = list(read_lines(path))
        self._kept[shard] = lines, size
        kept = list(self._kept.items())  # a copy, as other threads may change the original
        while sum(size for _, (_, size) in kept) > KEPT_BYTES:
            self._kept.pop(kept.pop(0)[0], None)
        return iter(lines[start::step])

    def regrown(self, before: Contents, begun: Mapping[str, bool]) -> list[str]:
        """The training shards that were cut off and are whole now; empty if the run cannot continue exactly on them.

        It can if nothing else has changed and, for each such shard that is in ``begun`` (see there), no stream has read
        the end and the old file broke off with an error. Otherwise its last documents were taken for a whole block.
        That block has more documents now, in another order, so no position in it would be exact.
        """
        changed = set(self.contents.longer(before))
        names = dict(zip(self.train_shards, self.contents.train, strict=True))
        grown = [shard for shard, name in names.items() if name in changed]
        wrong = (begun[s] or not is_cut_off(self.paths[s], before.train[names[s]]) for s in grown if s in begun)
        return [] if any(wrong) else [names[s] for s in grown]

    def describe(self) -> str:
        where = self._root or Path(next(iter(self.paths.values()))).parent
        return f"{where}: {len(self.train_shards)} train and {len(self.validation_shards)} validation shards"


def require_disjoint(train: Set[object], validation: Set[object]) -> None:
    """Raise UserError if a shard is both for training and for validation."""
    if both := train & validation:
        rule = f"data.train_files and data.validation_files both match {min(map(str, both))}"
        raise UserError(f"{rule}: the evaluation would be of text that was learnt. Narrow data.train_files")
