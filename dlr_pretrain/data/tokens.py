"""Pre-tokenised shards: a folder that ``scripts/prepare_data.py`` writes and ``data=tokens`` memory-maps.

    manifest.json                     what the shards are and what they were made from; written last
    tokenizer/                        the tokenizer
    train-00000-of-01024.tokens       a shard for each shard of the source, in its order; validation-... likewise
    train-00000-of-01024.rows         its rows

A shard is the ids of its documents, little-endian uint16 (int32 above 65,536 ids), each document whole and followed by
its end of sequence. Its rows are little-endian int64 [rows + 1, 2]: for each row of the source the end of its document
in the shard (a row that is left out has no tokens) and the number of characters of its text, which decide where the
blocks of ``documents.py`` end; the first is 0, 0. So a shard gives the batches of its source, packed or padded, for any
seed, batch and number of ranks.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlr_pretrain.data import documents
from dlr_pretrain.data.documents import Tokens, token_dtype
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.util.errors import UserError

FORMAT = 3
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
SPLITS = ("train", "validation")
TOKENS, ROWS = ".tokens", ".rows"  # suffixes of a shard's files
INT64 = np.dtype("<i8")
TAKEN_TOKENS = 1 << 16  # taken at once, or one longer document: this bounds the memory of a stream
PREPARE = "Make it with scripts/prepare_data.py"


@dataclass(frozen=True)
class Entry:
    """A shard in the manifest."""

    source: str  # name of the shard that it was made from
    rows: int
    documents: int  # rows that are not left out
    tokens: int


def file_name(split: str, index: int, count: int) -> str:
    return f"{split}-{index:05d}-of-{count:05d}{TOKENS}"


def mapped(path: Path, dtype: np.dtype, count: int | None = None) -> np.ndarray:
    """The array of a file, memory-mapped. Raises OSError or ValueError if it cannot be, or has another length."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        raw = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
    found = np.frombuffer(raw, dtype)
    if count is not None and len(found) != count:
        raise ValueError(f"{path.name} has {size:,} bytes, and {count * dtype.itemsize:,} were written")
    return found


class TokenBlock:
    """A block of a pre-tokenised shard."""

    def __init__(self, source: TokenSource, shard: str, begins: np.ndarray, lengths: np.ndarray):
        self.rows, there = len(begins), lengths > 0
        self._source, self._shard, self._begins, self._lengths = source, shard, begins[there], lengths[there]

    def __len__(self) -> int:
        return len(self._begins)

    def take(self, order: np.ndarray, longest: int) -> Tokens:
        begins, ends = self._begins[order], np.cumsum(np.minimum(self._lengths[order], longest))
        count = max(1, int(np.searchsorted(ends, TAKEN_TOKENS, side="right")))
        begins, ends = begins[:count], ends[:count]
        starts = np.append(0, ends[:-1])
        index = np.repeat(begins - starts, ends - starts)
        index += np.arange(len(index))
        return Tokens(self._source.tokens(self._shard)[index], starts)


class TokenSource:
    """A folder of pre-tokenised shards: a source without texts. Opening it checks all that the manifest says."""

    version: str | None = None

    def __init__(self, root: Path, tokenizer_path: Path | None = None):
        self.root = root
        self.tokenizer_path: Path | None = root / TOKENIZER
        try:
            self._read(json.loads((root / MANIFEST).read_bytes()))
        except FileNotFoundError:
            raise UserError(f"data.root={root}: no {MANIFEST}, so no finished folder of tokens. {PREPARE}") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{root / MANIFEST}: damaged ({error!r}). {PREPARE} again") from error
        self._check_tokenizer(tokenizer_path)
        for name, entry in self.entries.items():
            self.tokens(name)
            if self._rows(name)[-1, 0] != entry.tokens:
                raise UserError(f"{root / name}: damaged or foreign: its rows end elsewhere. {PREPARE} again")

    def _read(self, manifest: dict) -> None:
        if (version := manifest["format"]) != FORMAT:
            rule = f"shards of format {version!r}, and this version reads format {FORMAT}"
            raise UserError(f"{self.root / MANIFEST}: {rule}. {PREPARE} again, into another folder")
        self._sha256: str = manifest["tokenizer"]["sha256"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self._unknown: float = manifest["tokenizer"]["unknown_share"]
        self.fingerprint: str = manifest["source"]["fingerprint"]
        self._made_from: str = manifest["source"]["description"]
        self._dtype = np.dtype(token_dtype(self.vocab_size)).newbyteorder("<")
        entries = {split: [Entry(**entry) for entry in manifest["shards"][split]] for split in SPLITS}
        names = {split: tuple(file_name(split, i, len(own)) for i in range(len(own))) for split, own in entries.items()}
        self.train_shards, self.validation_shards = (names[split] for split in SPLITS)
        self.entries = {n: e for split in SPLITS for n, e in zip(names[split], entries[split], strict=True)}
        if not all(names.values()):
            raise ValueError("a split without shards")

    def _check_tokenizer(self, given: Path | None) -> None:
        for path in filter(None, (self.tokenizer_path, given)):
            if not path.exists():
                raise UserError(f"{path}: no such file. {PREPARE} again")
            if load_tokenizer(path).fingerprint != self._sha256:
                rule = f"not the tokenizer (sha256 {self._sha256[:12]}...) that {self.root} was tokenised with"
                fix = "Leave tokenizer.path out" if path == given else "Put the original back"
                raise UserError(f"{path}: {rule}. {fix}, or prepare the tokens again")

    def _mapped(self, name: str, suffix: str, dtype: np.dtype, count: int) -> np.ndarray:
        """A file of a shard. Each use maps it anew: pages that stay mapped count as memory of this process."""
        path = (self.root / name).with_suffix(suffix)
        try:
            return mapped(path, dtype, count)
        except (OSError, ValueError) as error:
            rule = f"{error.strerror}" if isinstance(error, OSError) else f"damaged or foreign: {error}"
            raise UserError(f"{path}: {rule}. {PREPARE} again: it keeps the sound shards") from error

    def tokens(self, shard: str) -> np.ndarray:
        """The ids of a shard."""
        return self._mapped(shard, TOKENS, self._dtype, self.entries[shard].tokens)

    def _rows(self, shard: str) -> np.ndarray:
        return self._mapped(shard, ROWS, INT64, 2 * (self.entries[shard].rows + 1)).reshape(-1, 2)

    def blocks(self, tokenizer: Tokenizer, shard: str, first: int = 0, step: int = 1) -> Iterator[TokenBlock]:
        if tokenizer.fingerprint != self._sha256:
            raise UserError(f"{tokenizer.path}: not the tokenizer that {self.root} was tokenised with")
        count = self.entries[shard].rows
        while first < count:
            rows = self._rows(shard)
            characters = rows[1 + first : 1 + first + documents.BLOCK_DOCUMENTS * step : step, 1]
            closed = np.searchsorted(np.cumsum(characters), documents.BLOCK_CHARACTERS)
            numbers = first + step * np.arange(min(len(characters), int(closed) + 1))
            begins = rows[numbers, 0]
            yield TokenBlock(self, shard, begins, rows[numbers + 1, 0] - begins)
            first += len(numbers) * step

    def unknown_share(self, tokenizer: Tokenizer) -> float:
        """As it was found when the texts were tokenised."""
        return self._unknown

    def describe(self) -> str:
        total = sum(self.entries[name].tokens for name in self.train_shards)
        shards = f"{len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        return f"{self.root}: {shards} of tokens ({total:,} to train on), made from {self._made_from}"
