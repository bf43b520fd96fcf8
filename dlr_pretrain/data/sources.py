"""Where documents come from: local or remote files of text, the sample, or pre-tokenised shards.

A source names its shards in a fixed order and reads any shard from any row. Shards are sorted by name, because their
order is part of the data order and the order of a directory listing is not stable.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from dlr_pretrain.config import Config
from dlr_pretrain.config.tree import Data, ValidationText
from dlr_pretrain.data import sample, streams
from dlr_pretrain.data.files import File, pin_commits
from dlr_pretrain.data.formats import WHOLE, Part
from dlr_pretrain.data.mixture import Mixture
from dlr_pretrain.data.rows import read_rows
from dlr_pretrain.data.splits import Choice, choose, choose_validation
from dlr_pretrain.data.streams import DocumentBlock, Place, Share, Tokens
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import plural

MAX_REPORTED_ROWS = 5  # bad rows that a process reports individually
HELD_OUT = "held out of "  # prefix of the validation shard that is made from a training shard
FIRST_DOCUMENTS = 1000  # documents at the start, of which at least one is held out

Choose = Callable[[Data], Choice]
log = logging.getLogger(__name__)


def open_source(cfg: Config, progress: Callable[[str], None] | None = None, version: Any = None) -> Source:
    """Open the source that ``data`` names, and in it every local file, but only the first remote one.

    ``progress`` receives messages about long work (default: the module's log). ``version`` is what an earlier start of
    the run read. Without it the hub is asked, and a hub that does not answer is reported within seconds.
    """
    if cfg.data.source != "mix":
        return _open(cfg.data, progress or log.info, version)
    mixed, whole = cfg.data.sources, sum(text.weight for text in cfg.data.sources.values())
    opened, versions = {}, version or {}
    for name, text in mixed.items():
        entry = _of_entry(cfg.data, text, train_files=text.train_files)
        opened[name] = _open(entry, log.info, versions.get(name), f"data.sources.{name}")
    return Mixture(opened, {name: text.weight / whole for name, text in mixed.items()})


def open_validation(data: Data, name: str, text: ValidationText) -> TextSource | TokenSource:
    """The text of the further validation set ``name`` (of ``eval.sets``), which is read as ``data`` says."""
    return _open(_of_entry(data, text, train_files=None), log.info, None, f"eval.sets.{name}", choose_validation)


def _of_entry(data: Data, text: ValidationText, **more: Any) -> Data:
    """``data`` with the place of another text."""
    shared = {name: getattr(text, name) for name in ("source", "root", "validation_files", "text_key")}
    return replace(data, **shared, **more)


def _open(
    data: Data, progress: Callable[[str], None], version: str | None, keys: str = "data", choose: Choose = choose
) -> TextSource | TokenSource:
    """Open the text of ``data``, whose place the configuration has under ``keys``."""
    with naming_keys(keys):
        if data.source == "tokens":
            return TokenSource(Path(data.root or ""))
        if data.source == "sample":
            folder = sample.folder_of(Path(data.root) if data.root else None, version, progress)
            data, version = replace(data, root=str(folder)), folder.name
        else:
            data, version = pin_commits(data, version)
        return TextSource(data, choose(data), version, keys)


@contextmanager
def naming_keys(keys: str) -> Iterator[None]:
    """Within this context, errors about a text name its own keys, which are those of ``keys``, in place of ``data``'s.

    An error that names no key gets them in front. A validation set has no ``train_files``: its ``validation_files``
    name its files.
    """
    try:
        yield
    except UserError as error:
        said = str(error)
        if keys.startswith("eval."):
            said = said.replace("data.train_files", "data.validation_files")
        if keys != "data":
            shared = r"(?:data=local )?(?<![\w.])data\.(root|train_files|validation_files|text_key)\b"
            said = re.sub(shared, rf"{keys}.\1", said)
            said = said if keys in said else f"{keys}: {said}"
        error.args = (said,)
        raise


class TextSource:
    """Texts in files. Without validation files, a share of the training documents is held out by their hashes.

    ``version`` is the commit on the hub, or the name of the sample, by which a run finds the files later.
    """

    order = "text 4"  # the version of the data order; a run resumes only with its own

    def __init__(self, data: Data, chosen: Choice, version: str | None = None, keys: str = "data"):
        self.data, self.chosen, self.version = data, chosen, version
        self.keys = keys  # under which the configuration has the place of this text
        self.tokenizer_path = Path(data.root or "", sample.TOKENIZER_FILE) if data.source == "sample" else None
        self.files = {file.name: file for file in (*chosen.train, *chosen.validation)}
        self.train_shards = tuple(file.name for file in chosen.train)
        held_out = tuple(HELD_OUT + name for name in self.train_shards)
        self.validation_shards = tuple(file.name for file in chosen.validation) or held_out
        self.holds_out = not chosen.validation
        self.splits_document = False  # into training and validation text, because all first documents are the same
        self.threshold = 0  # documents with a hash below it are held out
        self.contents = chosen.contents(data)
        self.versions = chosen.versions(data)
        self._reported: set[tuple[str, int]] = set()  # bad rows
        self._counted: set[str] = set()  # files of which the number of bad rows has been reported
        if self.holds_out:
            texts = (text for shard in self.train_shards for _, text in self._file_rows(shard) if text is not None)
            hashes = [_hash(text) for text in islice(texts, FIRST_DOCUMENTS)]
            self.splits_document = len(set(hashes)) == 1
            if not self.splits_document:
                self.threshold = max(round(data.held_out * (1 << 64)), min(hashes, default=0) + 1)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the names and sizes of the files, and of the keys that decide what is read from them.

        The location and the contents of the files do not count. A run resumes only with the same fingerprint.
        """
        split = (self.chosen.train, self.chosen.validation)
        shards = [[(os.path.basename(file.name), file.size) for file in files] for files in split]
        data, held_out = self.data, self.holds_out and (self.data.held_out, self.threshold)
        how = (data.text_key, data.document, data.bad_rows, held_out)
        return hashlib.sha256(json.dumps([shards, how]).encode()).hexdigest()

    def read(self, shard: str, start: int = 0) -> Iterator[str | None]:
        """Yields the texts of a shard from row ``start`` on; None for a row that is left out."""
        return (text for _, text in self.rows(shard, start))

    def rows(self, shard: str, start: int = 0) -> Iterator[tuple[int, str | None]]:
        """As ``read``, with the number of each row."""
        held_out, name = shard.startswith(HELD_OUT), shard.removeprefix(HELD_OUT)
        return ((number, self._divided(text)[held_out]) for number, text in self._file_rows(name, start))

    def divided(self, name: str, part: Part) -> Iterator[tuple[str | None, str | None]]:
        """Yields for each row of a part of a file its text, and its text that is held out; both None if left out."""
        return (self._divided(text) for _, text in self._file_rows(name, part=part))

    def _divided(self, text: str | None) -> tuple[str | None, str | None]:
        if text is None or not self.holds_out:
            return text, None
        if self.splits_document:
            cut = round(len(text) * (1 - self.data.held_out))
            cut = text.rfind("\n", 0, cut) + 1 or cut
            return text[:cut], text[cut:]
        return (None, text) if _hash(text) < self.threshold else (text, None)

    def _file_rows(self, name: str, start: int = 0, part: Part | None = None) -> Iterator[tuple[int, str | None]]:
        with naming_keys(self.keys):
            yield from self._numbered(name, start, part)

    def _numbered(self, name: str, start: int, part: Part | None) -> Iterator[tuple[int, str | None]]:
        """As ``rows``, but for a file or a part of it: with its held-out documents and all others.

        Raises UserError if no row of the file remains. Without a ``part``, the rows left out are counted in the log.
        """
        read, bad, rule = 0, 0, ""
        for row in read_rows(self.files[name], self.data, start, part or WHOLE):
            text, read = None, read + 1
            try:
                text = row.text()
            except UserError as error:
                if self.data.bad_rows == "stop":
                    raise
                bad, rule = bad + 1, str(error).rpartition(". ")[0]
                self._report(name, row.number, rule)
            yield row.number, text
        if bad == read > 0 and part in (None, WHOLE) and (start == 0 or read >= FIRST_DOCUMENTS):
            raise nothing_remains(self.files[name], read, rule)
        if bad and part is None and name not in self._counted:
            self._counted.add(name)
            log.warning("%s: %s rows left out (data.bad_rows=skip)", name, f"{bad:,} of {read:,}")

    def _report(self, name: str, row: int, rule: str) -> None:
        """Log a bad row that is left out, unless it or MAX_REPORTED_ROWS others have been reported already."""
        if (name, row) not in self._reported and len(self._reported) < MAX_REPORTED_ROWS:
            self._reported.add((name, row))
            last = ". This process names no more" if len(self._reported) == MAX_REPORTED_ROWS else ""
            log.warning("left out (data.bad_rows=skip): %s%s", rule, last)

    def can_be_streamed(self, count: int) -> bool:
        """Whether ``count`` streams can share the files evenly without opening them."""
        return streams.can_be_dealt(self._sizes(), count)

    def _sizes(self) -> list[int]:
        """The sizes of the training files in bytes. A size is 0 if the server does not report it."""
        return [file.size or 0 for file in self.chosen.train]

    def blocks(self, tokenizer: Tokenizer, share: Share, start: Place) -> Iterator[tuple[Place, DocumentBlock]]:
        """Yields the blocks of a share in order, from the block at ``start`` on, each with its file and first row."""
        first, row = start
        files = streams.dealt(self._sizes(), share)
        for number, file in enumerate(files[first:], first):
            for begins, block in streams.text_blocks(self.rows(self.train_shards[file], row), tokenizer):
                yield (number, begins), block
            row = 0

    def validation(self, tokenizer: Tokenizer) -> Iterator[Tokens]:
        """Yields the validation documents in their order, a few at a time."""
        for shard in self.validation_shards:
            yield from streams.tokenise_in_chunks(self.read(shard), tokenizer)

    def state(self) -> list:
        """What determines the texts, including the current state of the files."""
        return [self.fingerprint, *(file.state() for file in self.files.values())]

    def describe(self) -> str:
        where = self.data.root or os.path.dirname(self.chosen.train[0].address)
        if not self.holds_out:
            return f"{where}: {len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        share = f"{100 * self.data.held_out:g} % of the {'document' if self.splits_document else 'documents'}"
        return f"{where}: {plural(len(self.train_shards), 'train shard')}, {share} held out for validation"


def nothing_remains(file: File, rows: int, rule: str) -> UserError:
    """The error for a file without any text."""
    return UserError(
        file.address,
        f"data.bad_rows=skip leaves out all of its {plural(rows, 'row')}: {rule}",
        "Set data.text_key to the field that holds the text, or leave the file out with data.train_files",
    )


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


Source = TextSource | TokenSource | Mixture  # one rank opens it and sends it to the others
