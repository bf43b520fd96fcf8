"""Pre-tokenised shards: a folder that ``scripts/prepare_data.py`` writes and ``data=tokens`` memory-maps.

    manifest.json                 what they are made from, and how many they are
    tokenizer/                    the tokenizer
    train-00000-of-01024.tokens   a shard for each shard of the source, in its order; validation-... likewise
    train-00000-of-01024.rows     its rows

A shard is the ids of its documents, uint16 (int32 above 65,536 ids), each document whole and followed by
its end of sequence. Its rows are int64 [rows + 1, 2]: for each row of the source the end of its document
in the shard (a row that is left out has no tokens) and the number of characters of its text, which decide where the
blocks of ``documents.py`` end; the first is 0, 0. So a shard gives the batches of its source, packed or padded, for any
seed, batch and number of ranks.

The manifest is written first, and a shard's ids before its rows. So a kill at any point leaves finished shards, which
the same command keeps.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dlr_pretrain.data import documents
from dlr_pretrain.data.documents import Block, Tokens, token_dtype
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import sync, write_durably

if TYPE_CHECKING:
    from dlr_pretrain.data.sources import TextSource

FORMAT = 3
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
TOKENS, ROWS = ".tokens", ".rows"  # suffixes of a shard's files
PREPARE = "Make it with scripts/prepare_data.py"
_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # of a worker


def file_names(split: str, count: int) -> tuple[str, ...]:
    return tuple(f"{split}-{index:05d}-of-{count:05d}{TOKENS}" for index in range(count))


def open_shard(path: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a shard and its rows, memory-mapped. Raises OSError or ValueError if they are not whole."""
    tokens = _mapped(path, token_dtype(vocab_size))
    rows = _mapped(path.with_suffix(ROWS), np.int64).reshape(-1, 2)
    if not len(rows) or rows[-1, 0] != len(tokens):
        raise ValueError(f"it has {len(tokens):,} ids, and {path.stem}{ROWS} counts another number")
    return tokens, rows


def _mapped(path: Path, dtype: type) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # no empty file can be mapped


def _taken(path: Path, vocab_size: int, begins: np.ndarray, ends: np.ndarray, numbers: np.ndarray) -> Tokens:
    """The documents with these numbers, of those that begin and end there in a shard."""
    begins = begins[numbers]
    lengths = ends[numbers] - begins
    after = np.cumsum(lengths)
    starts = after - lengths
    index = np.repeat(begins - starts, lengths)
    index += np.arange(len(index))
    mapped = _mapped(path, token_dtype(vocab_size))  # anew each time: pages that stay mapped count as memory
    if (tokens := mapped[index]).max(initial=0) >= vocab_size:  # a GPU would end with an assertion of its own
        raise UserError(f"{path}: damaged: it has the id {tokens.max()}, beyond the vocabulary of {vocab_size:,}")
    return Tokens(tokens, starts)


class TokenSource:
    """A folder of pre-tokenised shards: a source without texts. Opening it checks that it is whole."""

    version: str | None = None

    def __init__(self, root: Path):
        self.root = root
        self.tokenizer_path: Path | None = root / TOKENIZER
        manifest = _manifest(root)
        try:
            self.fingerprint, self._made_from = manifest["source"], manifest["made_from"]
            about, shards = manifest["tokenizer"], manifest["shards"]
            self._sha256, self.vocab_size = about["sha256"], about["vocab_size"]
            self.train_shards = file_names("train", shards["train"])
            self.validation_shards = file_names("validation", shards["validation"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{root / MANIFEST}: damaged ({error!r}). {PREPARE} again, into another folder") from error
        for name in self.validation_shards:
            self.shard(name)
        self._total = sum(len(self.shard(name)[0]) for name in self.train_shards)

    def shard(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids and the rows of a shard."""
        try:
            return open_shard(self.root / name, self.vocab_size)
        except (OSError, ValueError) as error:
            rule = error.strerror if isinstance(error, OSError) else f"damaged or foreign: {error}"
            raise UserError(f"{self.root / name}: {rule}. {PREPARE} again: it keeps the sound shards") from error

    def blocks(self, tokenizer: Tokenizer, shard: str, first: int = 0, step: int = 1) -> Iterator[Block]:
        if tokenizer.fingerprint != self._sha256:
            rule = f"not the tokenizer (sha256 {self._sha256[:12]}...) that {self.root} was tokenised with"
            raise UserError(f"{tokenizer.path}: {rule}. Leave tokenizer.path out, or prepare the tokens again")
        rows = self.shard(shard)[1]
        while first < len(rows) - 1:
            characters = rows[1 + first : 1 + first + documents.BLOCK_DOCUMENTS * step : step, 1]
            closed = np.searchsorted(np.cumsum(characters), documents.BLOCK_CHARACTERS)
            numbers = first + step * np.arange(min(len(characters), int(closed) + 1))
            begins, ends = rows[numbers, 0], rows[numbers + 1, 0]
            begins, ends = begins[ends > begins], ends[ends > begins]  # without rows that are left out
            take = partial(_taken, self.root / shard, self.vocab_size, begins, ends)
            yield Block(len(numbers), len(begins), take)
            first += len(numbers) * step

    def describe(self) -> str:
        shards = f"{len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        return f"{self.root}: {shards} of tokens ({self._total:,} to train on), made from {self._made_from}"


def _manifest(root: Path) -> dict:
    """What a folder of tokens holds. Raises UserError if it is none, or one of another format."""
    path = root / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if (version := manifest["format"]) == FORMAT:
            return manifest
        rule = f"shards of format {version!r}, and this version reads format {FORMAT}"
    except FileNotFoundError:
        raise UserError(f"data.root={root}: no {MANIFEST}, so no folder of tokens. {PREPARE}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"damaged ({error!r})"
    raise UserError(f"{path}: {rule}. {PREPARE} again, into another folder")


def make_tokens(source: TextSource, tokenizer: Tokenizer, output: Path, workers: int) -> Iterator[bool]:
    """Tokenise ``source`` into ``output`` with ``workers`` processes; if 1, in this process.

    Yields of each shard in order whether it was there before. Raises UserError if the folder holds something else, the
    input is unreadable or the output cannot be written.
    """
    train, validation = source.train_shards, source.validation_shards
    names = (*file_names("train", len(train)), *file_names("validation", len(validation)))
    manifest = {
        "format": FORMAT,
        "source": source.fingerprint,
        "tokenizer": {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "shards": {"train": len(train), "validation": len(validation)},
        "made_from": source.describe(),
    }
    try:
        _claim(output, manifest)
        tokenizer.save(output / TOKENIZER)
        # The fork server has none of this process's threads. It imports once for all workers.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with ProcessPoolExecutor(workers, context) as pool:  # starts them as they are needed
            complete = partial(_complete, source, output)
            yield from (pool.map if workers > 1 else map)(complete, (*train, *validation), names)
        for draft in (*output.glob(f".*{TOKENS}"), *output.glob(f".*{ROWS}")):
            draft.unlink(missing_ok=True)
    except (OSError, BrokenProcessPool) as error:
        fix = "Free space, or use fewer --workers if memory ran out, and start again: finished shards are kept"
        raise UserError(f"{output}: {first_line(error)}. {fix}") from error


def _claim(output: Path, manifest: dict) -> None:
    """Note in the folder what it holds. Raises UserError if it holds anything else."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / MANIFEST
    if not path.exists():
        strangers = sorted(found.name for found in output.iterdir() if not found.name.startswith("."))
        if strangers:
            rule = f"is not empty (it has {strangers[0]}) and no folder of tokens"
            raise UserError(f"{output}: {rule}. Name a new folder")
        write_durably(path, json.dumps(manifest, indent=1))
    there = _manifest(output)
    if there["source"] != manifest["source"] or there["tokenizer"]["sha256"] != manifest["tokenizer"]["sha256"]:
        rule = f"holds the tokens of another source or tokenizer ({there['made_from']})"
        raise UserError(f"{output}: {rule}. Name another folder, or delete this one")


def _complete(source: TextSource, output: Path, shard: str, name: str) -> bool:
    """Make the token shard ``name`` of a shard of the source, unless it is there."""
    path, tokenizer = output / name, _tokenizer(output / TOKENIZER)
    try:
        open_shard(path, tokenizer.vocab_size)
    except (OSError, ValueError):
        _write(source, shard, tokenizer, path)
        return False
    return True


def _write(source: TextSource, shard: str, tokenizer: Tokenizer, path: Path) -> None:
    """Write a token shard, each of its files to a temporary one that is renamed once it is on the disk."""
    rows = [np.zeros((1, 2), np.int64)]  # (tokens, characters) of each
    drafts = [path.with_name(f".{path.name}.{os.getpid()}{suffix}") for suffix in (TOKENS, ROWS)]
    texts = source.read(shard)
    with drafts[0].open("wb") as file:
        while some := list(islice(texts, documents.CHUNK_DOCUMENTS)):
            counted = np.array([(0, len(text or "")) for text in some], np.int64)
            there = np.array([text is not None for text in some])
            if there.any():
                tokens, starts = documents.tokenised([text or "" for text in some], tokenizer, np.flatnonzero(there))
                counted[there, 0] = np.diff(starts, append=len(tokens))
                tokens.tofile(file)
            rows.append(counted)
    written = np.concatenate(rows)
    written[:, 0] = written[:, 0].cumsum()
    written.tofile(drafts[1])
    for draft, final in zip(drafts, (path, path.with_suffix(ROWS)), strict=True):
        sync(draft)
        os.replace(draft, final)
