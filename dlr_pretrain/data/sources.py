"""Where documents come from: files here or elsewhere, the sample, or pre-tokenised shards.

A source names its shards in a fixed order and reads any of them from any row on; it knows nothing of streams or ranks.
The order of the shards is part of the data order, so they are sorted, never in the order of a directory listing. One
rank lists the files for all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Protocol

from dlr_pretrain.config import Config
from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import sample
from dlr_pretrain.data.documents import Documents, TextDocuments
from dlr_pretrain.data.files import File, find, open_file, pinned
from dlr_pretrain.data.formats import SUFFIXES, parse_text, rows, sniff
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import UserError

KEPT_BYTES = 4 << 20  # size of a file whose rows are kept in memory, as several streams read it
KEPT_FILES = 4
SNIFF_THREADS = 16
HELD_OUT = "held out of "  # begins the name of the validation shard that is made of a training shard
FIRST_DOCUMENTS = 1000  # that decide whether the share that is held out has any
TOLD_ROWS = 5  # bad rows that a process tells of by their number
EXPRESSED_DOCUMENTS = 64  # that a tokenizer is tried on
SPLIT = re.compile(r"(?:^|[/._-])(train|validation|valid|val|dev|test)(?=[/._-]|\d|$)")

log = logging.getLogger(__name__)


class Source(Protocol):
    """Documents in named shards."""

    train_shards: tuple[str, ...]
    validation_shards: tuple[str, ...]
    tokenizer_path: Path | None  # of the source's own tokenizer, if it has one
    fingerprint: str  # of the texts, independent of their location: a run resumes only on the same texts

    def documents(self, tokenizer: Tokenizer) -> Documents:
        """The shards' documents as tokens."""
        ...

    def unknown_share(self, tokenizer: Tokenizer) -> float:
        """The share of the first documents that the tokenizer cannot express."""
        ...

    def describe(self) -> str:
        """One line for the console."""
        ...


@dataclass(frozen=True)
class Listing:
    """The files of a source of texts. A run keeps ``version`` in its record, and finds the same text by it later."""

    where: str  # for the console
    train: tuple[File, ...]
    validation: tuple[File, ...] = ()  # empty: documents of the training files are held out
    version: str | None = None  # the commit on the hub; the name of the sample
    threshold: int = 0  # documents whose hash is below it are held out
    halves: bool = False  # the only document is cut in two instead

    def fingerprint(self, data: Data) -> str:
        """A hash of the names and sizes of the files, and of how they are read."""
        files = (*self.train, *self.validation)
        root = os.path.commonpath([os.path.dirname(os.path.abspath(file.address)) for file in files])
        names = [{os.path.relpath(os.path.abspath(f.address), root): f.size for f in own}
                 for own in (self.train, self.validation)]  # fmt: skip
        content: list[object] = [data.text_key, names]
        if not self.validation:
            content += [data.held_out, self.threshold]
        if (data.document, data.bad_rows) != ("file", "stop"):
            content += [data.document, data.bad_rows]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def list_files(
    cfg: Config, progress: Callable[[str], None] | None = None, version: str | None = None, patient: bool = False
) -> Listing | None:
    """The files of ``data``; None for tokens, whose folder is the list. One rank asks on behalf of all.

    ``version`` is that of an earlier listing, if any. Without an answer of the hub it gives up within seconds or, if
    ``patient``, within minutes. Every local file is looked at, and the first of remote ones.
    """
    data, progress = cfg.data, progress or log.info
    if data.source == "tokens":
        return None
    if data.source == "sample":
        folder = sample.prepare(Path(data.root) if data.root else None, version, progress)
        root, version = str(folder), folder.name
    else:
        root = f"hf://datasets/{data.dataset}" if data.source == "c4" else data.root
        root, version = pinned(root or "", version or data.revision, patient)
    splits = _splits(root, data)
    sniffed = _sniffed(splits, data.cache)
    train, validation = ([f for f in own if sniffed.get(f) != "empty"] for own in splits)
    for file in (file for file, kind in sniffed.items() if kind == "empty"):
        progress(f"{file.address}: empty, and left out")
    if not train:
        raise UserError(f"{root or data.train_files}: all training files are empty. Give a file with text")
    where = root or os.path.dirname(train[0].address)
    listing = Listing(where, tuple(train), tuple(validation), version)
    return listing if validation else _with_held_out(listing, data)


def _splits(root: str, data: Data) -> tuple[list[File], list[File]]:
    """The training and validation files, by their globs or, without these, by the names of all files below the root."""
    found: dict[str, list[File]] = {"train": [], "validation": []}
    globs = {"train": data.train_files, "validation": data.validation_files}
    for split, pattern in globs.items():
        if pattern is None:
            continue
        found[split] = find(root, pattern)
        if not found[split]:
            where = f"data.{split}_files={pattern}" + (f" below {root}" if root else "")
            raise UserError(f"{where}: matches no file. Set data.root to the folder of the shards, or correct the glob")
    if data.train_files is None:
        there = [file for file in find(root, "**/*") if file.name.lower().endswith(SUFFIXES)]
        there = [file for file in there if not file.name.endswith(("state.json", "dataset_info.json", "_dict.json"))]
        if not there:
            raise UserError(f"data.root={root}: holds no file that ends with {', '.join(SUFFIXES)}")
        held = {file.name for file in found["validation"]}
        for file in there:
            split = _split_of(file.name)
            if split == "train" and file.name not in held:
                found["train"].append(file)
            elif split == "validation" and data.validation_files is None:
                found["validation"].append(file)
        found["train"] = found["train"] or [file for file in there if file.name not in held]
    paths = [{os.path.realpath(file.address) for file in own} for own in found.values()]
    if both := set.intersection(*paths):
        rule = f"data.train_files and data.validation_files both match {min(both)}"
        raise UserError(f"{rule}: the evaluation would be of text that was learnt. Narrow data.train_files")
    return found["train"], found["validation"]


def _split_of(name: str) -> str:
    """train, validation or test, by the first such word in the name of a file; train if there is none."""
    word = SPLIT.search(name.lower())
    return {"train": "train", "test": "test"}.get(word[1], "validation") if word else "train"


def _sniffed(splits: tuple[list[File], list[File]], cache: str | None) -> dict[File, str]:
    """The kinds of the files, of remote ones only the first of a split and the empty ones."""

    def look(file: File) -> str:
        if file.size == 0:
            return "empty"
        with open_file(file, cache) as stream:
            return sniff(file, stream).kind

    looked = [f for own in splits for i, f in enumerate(own) if f.is_local or i == 0 or f.size == 0]
    with ThreadPoolExecutor(SNIFF_THREADS) as pool:
        return dict(zip(looked, pool.map(look, looked), strict=True))


def _with_held_out(listing: Listing, data: Data) -> Listing:
    """The listing with a share of the training documents as validation: at least one of the first documents."""
    whole = TextSource(replace(listing, threshold=1 << 64), data)
    texts = (text for shard in whole.train_shards for text in whole.texts(shard) if text is not None)
    hashes = [_hash(text) for text in islice(texts, FIRST_DOCUMENTS)]
    if len(hashes) == 1:
        return replace(listing, halves=True)
    least = min(hashes, default=0) + 1
    return replace(listing, threshold=max(round(data.held_out * (1 << 64)), least))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def open_source(cfg: Config, progress: Callable[[str], None] | None = None, listing: Listing | None = None) -> Source:
    """The source that ``data`` names.

    ``progress`` receives messages about work that takes a while (default: the module's log). ``listing`` is the result
    of ``list_files``; if None, this function lists the files.
    """
    progress = progress or log.info
    if cfg.data.source == "tokens":
        source = TokenSource(Path(cfg.data.root), Path(cfg.tokenizer.path) if cfg.tokenizer.path else None)
        if os.environ.get("LOCAL_RANK", "0") == "0":  # a machine's other ranks read the same files
            source.check(progress)
        return source
    listing = listing or list_files(cfg, progress)
    source = TextSource(listing, cfg.data)
    if cfg.data.source == "sample":
        source.tokenizer_path = Path(listing.where, sample.TOKENIZER_FILE)
        source.fingerprint = Path(listing.where, sample.DIGEST).read_text()
    return source


class TextSource:
    """Texts in files."""

    def __init__(self, listing: Listing, data: Data):
        self.listing, self.data = listing, data
        self.tokenizer_path: Path | None = None
        self.fingerprint = listing.fingerprint(data)
        self.files = {file.name: file for file in (*listing.train, *listing.validation)}
        self.train_shards = tuple(file.name for file in listing.train)
        held = tuple(HELD_OUT + name for name in self.train_shards)
        self.validation_shards = tuple(file.name for file in listing.validation) or held
        self._bad = 0

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str | None]:
        """The texts of the rows start, start + step, ... of a shard; None for a row that is left out."""
        if self.listing.validation:
            yield from self.texts(shard, start, step)
            return
        held, name = shard.startswith(HELD_OUT), shard.removeprefix(HELD_OUT)
        for text in self.texts(name, start, step):
            if text is not None and self.listing.halves:
                cut = round(len(text) * (1 - self.data.held_out))
                cut = text.rfind("\n", 0, cut) + 1 or cut
                yield text[cut:] if held else text[:cut]
            elif text is None or (_hash(text) < self.listing.threshold) != held:
                yield None
            else:
                yield text

    def texts(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str | None]:
        """As ``read``, of a file's rows, whether held out or not."""
        file, key = self.files[shard], self.data.text_key
        for document, row in zip(count(start, step), self._rows(file, start, step), strict=False):
            try:
                yield parse_text(row, key, file.address, document)
            except UserError as error:
                if self.data.bad_rows == "stop":
                    raise
                self._bad += 1
                if self._bad <= TOLD_ROWS:
                    more = ", and this process tells of no more" if self._bad == TOLD_ROWS else ""
                    log.warning("left out (data.bad_rows=skip): %s%s", error, more)
                yield None

    def _rows(self, file: File, start: int, step: int) -> Iterator[bytes | str | None]:
        how = (self.data.text_key, self.data.document == "paragraph", self.data.cache)
        if step > 1 and file.size is not None and file.size <= KEPT_BYTES:
            return iter(_kept(file, *how)[start::step])
        key, by_paragraph, cache = how
        return islice(rows(file, key, start, by_paragraph, cache), 0, None, step)

    def documents(self, tokenizer: Tokenizer) -> Documents:
        return TextDocuments(self, tokenizer)

    def unknown_share(self, tokenizer: Tokenizer) -> float:
        texts = (text for shard in self.train_shards for text in self.read(shard) if text)
        return tokenizer.unknown_share(text[:10_000] for text in islice(texts, EXPRESSED_DOCUMENTS))

    def describe(self) -> str:
        train, listing = f"{len(self.train_shards)} train", self.listing
        if listing.validation:
            return f"{listing.where}: {train} and {len(self.validation_shards)} validation shards"
        share = f"{100 * self.data.held_out:g} % of the {'document' if listing.halves else 'documents'}"
        return f"{listing.where}: {train} shards, {share} held out for validation"


@lru_cache(maxsize=KEPT_FILES)
def _kept(file: File, text_key: str, by_paragraph: bool, cache: str | None) -> list[bytes | str | None]:
    """All rows of a small file: several streams read it, each every m-th row."""
    return list(rows(file, text_key, 0, by_paragraph, cache))
