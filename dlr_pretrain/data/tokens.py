"""Pre-tokenised shards: a folder that ``scripts/prepare_data.py`` writes and ``data=tokens`` memory-maps.

    manifest.json                 what they were made from, and how many they are; written last
    tokenizer/                    the tokenizer
    train-00000-of-01024.tokens   a shard for each shard of the source, in its order; validation-... likewise
    train-00000-of-01024.rows     its rows

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
from pathlib import Path

import numpy as np

from dlr_pretrain.data import documents
from dlr_pretrain.data.documents import Tokens, token_dtype
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.util.errors import UserError

FORMAT = 3
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
TOKENS, ROWS = ".tokens", ".rows"  # suffixes of a shard's files
INT64 = np.dtype("<i8")
SPLITS = ("train", "validation")
TAKEN_TOKENS = 1 << 16  # taken at once, or one longer document: this bounds the memory of a stream
PREPARE = "Make it with scripts/prepare_data.py"


def file_names(split: str, count: int) -> tuple[str, ...]:
    return tuple(f"{split}-{index:05d}-of-{count:05d}{TOKENS}" for index in range(count))


def open_shard(path: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a shard and its rows, memory-mapped. Raises OSError or ValueError if they are not whole."""
    tokens = _mapped(path, np.dtype(token_dtype(vocab_size)).newbyteorder("<"))
    rows = _mapped(path.with_suffix(ROWS), INT64).reshape(-1, 2)
    if not len(rows) or rows[-1, 0] != len(tokens):
        raise ValueError(f"it has {len(tokens):,} ids, and {path.stem}{ROWS} tells of others")
    return tokens, rows


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size  # a file without bytes cannot be mapped
        return np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"", dtype)


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
        tokens, _ = self._source.shard(self._shard)
        return Tokens(tokens[index], starts)


class TokenSource:
    """A folder of pre-tokenised shards: a source without texts. Opening it checks that it is whole."""

    version: str | None = None

    def __init__(self, root: Path, tokenizer_path: Path | None = None):
        self.root = root
        self.tokenizer_path: Path | None = root / TOKENIZER
        try:
            manifest = json.loads((root / MANIFEST).read_bytes())
            if (version := manifest["format"]) != FORMAT:
                rule = f"shards of format {version!r}, and this version reads format {FORMAT}"
                raise UserError(f"{root / MANIFEST}: {rule}. {PREPARE} again, into another folder")
            about = manifest["tokenizer"]
            self._sha256, self.vocab_size, self._unknown = (about[n] for n in ("sha256", "vocab_size", "unknown_share"))
            self.fingerprint, self._made_from = (manifest["source"][n] for n in ("fingerprint", "description"))
            shards = manifest["shards"]
            self.train_shards, self.validation_shards = (file_names(split, shards[split]) for split in SPLITS)
        except FileNotFoundError:
            raise UserError(f"data.root={root}: no {MANIFEST}, so no finished folder of tokens. {PREPARE}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{root / MANIFEST}: damaged ({error!r}). {PREPARE} again") from error
        self._check_tokenizer(tokenizer_path)
        for name in self.validation_shards:
            self.shard(name)
        self._total = sum(len(self.shard(name)[0]) for name in self.train_shards)

    def _check_tokenizer(self, given: Path | None) -> None:
        for path in filter(None, (self.tokenizer_path, given)):
            if not path.exists():
                raise UserError(f"{path}: no such file. {PREPARE} again")
            if load_tokenizer(path).fingerprint != self._sha256:
                rule = f"not the tokenizer (sha256 {self._sha256[:12]}...) that {self.root} was tokenised with"
                fix = "Leave tokenizer.path out" if path == given else "Put the original back"
                raise UserError(f"{path}: {rule}. {fix}, or prepare the tokens again")

    def shard(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids and the rows of a shard. Each use maps them anew: pages that stay mapped count as memory."""
        try:
            return open_shard(self.root / name, self.vocab_size)
        except (OSError, ValueError) as error:
            rule = error.strerror if isinstance(error, OSError) else f"damaged or foreign: {error}"
            raise UserError(f"{self.root / name}: {rule}. {PREPARE} again: it keeps the sound shards") from error

    def blocks(self, tokenizer: Tokenizer, shard: str, first: int = 0, step: int = 1) -> Iterator[TokenBlock]:
        if tokenizer.fingerprint != self._sha256:
            raise UserError(f"{tokenizer.path}: not the tokenizer that {self.root} was tokenised with")
        while first < len(rows := self.shard(shard)[1]) - 1:
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
        shards = f"{len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        return f"{self.root}: {shards} of tokens ({self._total:,} to train on), made from {self._made_from}"
