"""Pre-tokenised shards: a folder that ``scripts/prepare_data.py`` writes and ``data=tokens`` memory-maps.

    manifest.json                    what the shards are and what they were made from; written last
    tokenizer/                       the tokenizer
    train-00000-of-01024.tokens      a shard for each shard of the source, in its order; validation-... likewise

A shard holds, in this order and little-endian: the tokens of its documents, uint16 (int32 above 65,536 ids), each
document whole and followed by its end of sequence, filled up to a multiple of 8 bytes; for each row of the source the
offset of its document in them (a row that is left out has no tokens), and their end, int64 [rows + 1]; the number of
characters of each text, uint32 [rows], which decide where the blocks of ``documents.py`` end. So it gives the batches
of its source, packed or padded, for any seed, batch and number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlr_pretrain.data import documents
from dlr_pretrain.data.documents import Tokens, token_dtype
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.process import cores

FORMAT = 2
MANIFEST, TOKENIZER, CHECKED = "manifest.json", "tokenizer", ".checked.json"
SPLITS = ("train", "validation")
TAKEN_TOKENS = 1 << 16  # taken at once, or one longer document: this bounds the memory of a stream
CHECK_THREADS = 8
READ_BYTES = 1 << 22
PREPARE = "Make it with scripts/prepare_data.py"


@dataclass(frozen=True)
class Entry:
    """A shard in the manifest."""

    source: str  # name of the shard that it was made from
    rows: int
    documents: int  # rows that are not left out
    tokens: int
    bytes: int
    sha256: str


class Sections(NamedTuple):
    """The arrays of a shard."""

    tokens: np.ndarray  # [tokens]
    offsets: np.ndarray  # [rows + 1]
    characters: np.ndarray  # [rows]


def file_name(split: str, index: int, count: int) -> str:
    return f"{split}-{index:05d}-of-{count:05d}.tokens"


def layout(count: int, tokens: int, vocab_size: int) -> tuple[int, int, int]:
    """Where the offsets and the characters begin in a shard of ``count`` rows, and its size; all in bytes."""
    offsets = -(-tokens * np.dtype(token_dtype(vocab_size)).itemsize // 8) * 8
    characters = offsets + 8 * (count + 1)
    return offsets, characters, characters + 4 * count


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
        return self._source.gather(self._shard, begins[:count], ends[:count])


class TokenSource:
    """A folder of pre-tokenised shards: a source without texts, which is its own ``Documents``.

    Opening it checks the manifest, the tokenizer and the sizes of the shards. ``check`` reads the shards themselves.
    """

    def __init__(self, root: Path, tokenizer_path: Path | None = None):
        self.root = root
        self.tokenizer_path = root / TOKENIZER
        try:
            content = (root / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise UserError(f"data.root={root}: no {MANIFEST}, so no finished folder of tokens. {PREPARE}") from None
        except OSError as error:
            raise UserError(f"{root / MANIFEST}: {error.strerror}") from error
        self._manifest_digest = hashlib.sha256(content).hexdigest()
        try:
            self._read(json.loads(content))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{root / MANIFEST}: damaged ({error!r}). {PREPARE} again") from error
        self._check_tokenizer(tokenizer_path)
        for name, entry in self.entries.items():
            self._check_size(name, entry)

    def _read(self, manifest: dict) -> None:
        if (version := manifest["format"]) != FORMAT:
            rule = f"shards of format {version!r}, and this version reads format {FORMAT}"
            raise UserError(f"{self.root / MANIFEST}: {rule}. {PREPARE} again, into another folder")
        self._sha256: str = manifest["tokenizer"]["sha256"]
        self.vocab_size: int = manifest["tokenizer"]["vocab_size"]
        self._eos_id: int = manifest["tokenizer"]["eos_id"]
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
        for name, entry in self.entries.items():
            if layout(entry.rows, entry.tokens, self.vocab_size)[-1] != entry.bytes:
                raise ValueError(f"{name} cannot have {entry.bytes} bytes")

    # ------------------------------------------------------------------------------------------------
    # Checks

    def _check_tokenizer(self, given: Path | None) -> None:
        for path in filter(None, (self.tokenizer_path, given)):
            if not path.exists():
                raise UserError(f"{path}: no such file. {PREPARE} again")
            if load_tokenizer(path).fingerprint != self._sha256:
                rule = f"not the tokenizer (sha256 {self._sha256[:12]}...) that {self.root} was tokenised with"
                fix = "Leave tokenizer.path out" if path == given else "Put the original back"
                raise UserError(f"{path}: {rule}. {fix}, or prepare the tokens again")

    def _check_size(self, name: str, entry: Entry) -> None:
        path = self.root / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}. {PREPARE} again: it keeps the sound shards") from error
        if size != entry.bytes:
            rule = f"damaged or foreign: {size:,} bytes, and {entry.bytes:,} were written"
            raise UserError(f"{path}: {rule}. {PREPARE} again: it keeps the sound shards")

    def check(self, progress: Callable[[str], None]) -> None:
        """Read and check every shard, once: sound files are remembered by their size and time of change.

        Only the kernel sets that time (ctime), so a copied, restored or edited file is read again.
        """
        state = self._state()
        if _remembered(self.root / CHECKED) == state:
            return
        size = sum(entry.bytes for entry in self.entries.values()) / 1e9
        progress(f"{self.root}: checking {size:.1f} GB of tokens against their checksums (once for this copy)")
        pool = ThreadPoolExecutor(min(CHECK_THREADS, cores()))
        try:
            found = [f"{name}: {fault}" for name, fault in zip(self.entries, pool.map(self.fault, self.entries),
                                                               strict=True) if fault]  # fmt: skip
        finally:
            pool.shutdown(cancel_futures=True)
        if found:
            shown = "; ".join(found[:5]) + ("; ..." if len(found) > 5 else "")
            raise UserError(f"{self.root}: {shown}. {PREPARE} again: it keeps the sound shards")
        try:
            self.remember(state)
        except OSError as error:
            progress(f"{self.root}: cannot be written ({error.strerror}), so it is checked at every start")

    def remember(self, state: dict | None = None) -> None:
        """Record in the folder that its files are sound in ``state`` (default: as they are now)."""
        write_durably(self.root / CHECKED, json.dumps(state or self._state()))

    def _state(self) -> dict[str, object]:
        stats = {name: (self.root / name).stat() for name in self.entries}
        return {MANIFEST: self._manifest_digest} | {n: [s.st_size, s.st_ctime_ns] for n, s in stats.items()}

    def fault(self, name: str) -> str | None:
        """What is wrong with the content of a shard, or None."""
        entry, digest = self.entries[name], hashlib.sha256()
        try:
            with (self.root / name).open("rb") as file:
                while block := file.read(READ_BYTES):
                    digest.update(block)
        except OSError as error:
            return error.strerror
        if digest.hexdigest() != entry.sha256:
            return "damaged or foreign: its checksum is not the manifest's"
        return None

    # ------------------------------------------------------------------------------------------------
    # Documents

    def documents(self, tokenizer: Tokenizer) -> TokenSource:
        if tokenizer.fingerprint != self._sha256:
            raise UserError(f"{tokenizer.path}: not the tokenizer that {self.root} was tokenised with")
        return self

    def blocks(self, shard: str, first: int = 0, step: int = 1) -> Iterator[TokenBlock]:
        count = self.entries[shard].rows
        while first < count:
            _, offsets, characters = self._open(shard)
            window = characters[first : first + documents.BLOCK_DOCUMENTS * step : step]
            closed = np.searchsorted(np.cumsum(window, dtype=np.int64), documents.BLOCK_CHARACTERS)
            numbers = first + step * np.arange(min(len(window), int(closed) + 1))
            begins = offsets[numbers]
            yield TokenBlock(self, shard, begins, offsets[numbers + 1] - begins)
            first += len(numbers) * step

    def _open(self, name: str) -> Sections:
        """The arrays of a shard, memory-mapped for as long as one of them is referenced.

        Each use maps them anew, because pages that stay mapped count as memory of this process.
        """
        path, entry = self.root / name, self.entries[name]
        self._check_size(name, entry)
        try:
            with path.open("rb") as file:
                raw = mmap.mmap(file.fileno(), entry.bytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be mapped ({error})") from error
        offsets, characters, _ = layout(entry.rows, entry.tokens, self.vocab_size)
        return Sections(
            np.frombuffer(raw, self._dtype, entry.tokens),
            np.frombuffer(raw, "<i8", entry.rows + 1, offsets),
            np.frombuffer(raw, "<u4", entry.rows, characters),
        )

    def gather(self, shard: str, begins: np.ndarray, ends: np.ndarray) -> Tokens:
        """Join the documents at ``begins`` in a shard; ``ends`` are the ends, after any cut, in the joined tokens."""
        starts = np.append(0, ends[:-1])
        index = np.repeat(begins - starts, ends - starts)
        index += np.arange(len(index))
        return Tokens(self._open(shard).tokens[index], starts)

    def unknown_share(self, tokenizer: Tokenizer) -> float:
        """As it was found when the texts were tokenised."""
        return self._unknown

    def describe(self) -> str:
        total = sum(self.entries[name].tokens for name in self.train_shards)
        shards = f"{len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        return f"{self.root}: {shards} of tokens ({total:,} to train on), made from {self._made_from}"


def _remembered(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
