"""Pre-tokenised shards: a folder that ``scripts/prepare_data.py`` writes and ``data=tokens`` memory-maps.

    manifest.json                 what the shards are made from, and how many there are
    tokenizer/                    the tokenizer
    train-00000-of-00012.tokens   the ids of some documents; also validation-...
    train-00000-of-00012.ends     where these documents end
    train-00000-of-00012.files    how many of them are from which file of the source
    train-00000-of-00012.sha256   the checksums of these, for sha256sum --check

The documents of a split are numbered through all of its shards, in the order of the source's files. Streams divide the
text by these files. So the data order does not depend on how the documents are spread over shards.

A shard holds the ids of its documents, uint16 (int32 above 65,536 ids). Each document is followed by its end of
sequence. The ends are int64 [documents + 1], and the first is 0. Rows of the source that are left out have no document.
The files are int64 [n, 4]: the number of a file, its documents in this shard, those of them in which special tokens
stand, and its rows that were left out.
"""

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from dlr_pretrain.data import streams
from dlr_pretrain.data.streams import DocumentBlock, Place, Share, Tokens, permutation, token_dtype
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.util.errors import UserError, file_error, naming
from dlr_pretrain.util.files import Shape, misfit, read_json, sha256_of
from dlr_pretrain.util.text import plural

FORMAT = 5
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
TOKENS, ENDS, FILES, SUMS = ".tokens", ".ends", ".files", ".sha256"  # suffixes of a shard's files
MANIFEST_SHAPE: Shape = {
    "source": str, "made_from": str, "contents": {"*": str}, "tokenizer": {"sha256": str, "vocab_size": int},
    "shards": {"train": int, "validation": int},
}  # fmt: skip
PREPARE = "Make it with scripts/prepare_data.py"


def shard_names(split: str, count: int) -> tuple[str, ...]:
    return tuple(f"{split}-{index:05d}-of-{count:05d}{TOKENS}" for index in range(count))


def open_shard(path: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The memory-mapped ids and document ends of a shard. Raises OSError or ValueError if it is damaged."""
    tokens = _memory_map(path, token_dtype(vocab_size))
    ends = _memory_map(path.with_suffix(ENDS), np.int64)
    if not len(ends) or ends[-1] != len(tokens):
        raise ValueError(f"it has {len(tokens):,} ids, but {path.stem}{ENDS} counts a different number")
    return tokens, ends


def files_of(path: Path, documents: int, first: int) -> np.ndarray:
    """The table of files of a shard with so many documents, after one that ends with file ``first``.

    Raises OSError or ValueError if it is damaged.
    """
    files = _memory_map(path.with_suffix(FILES), np.int64).reshape(-1, 4)
    if not len(files) or not np.isin(np.diff(files[:, 0], prepend=first), (0, 1)).all() or (files < 0).any():
        raise ValueError(f"the numbers in {path.stem}{FILES} are not those of files")
    if files[:, 1].sum() != documents:
        raise ValueError(f"it has {documents:,} documents, but {path.stem}{FILES} counts a different number")
    return files


def verify_checksums(path: Path) -> None:
    """Raise OSError or ValueError if the checksums of the shard at ``path`` are missing or do not match its files."""
    parts = {suffix: path.with_suffix(suffix) for suffix in (TOKENS, ENDS, FILES)}
    if path.with_suffix(SUMS).read_bytes() != checksums(path, parts):
        raise ValueError("it fails its checksum")


def checksums(path: Path, parts: Mapping[str, Path]) -> bytes:
    """The checksums of the shard at ``path`` as sha256sum writes them. ``parts`` are its files by suffix."""
    lines = (f"{sha256_of(part)}  {path.with_suffix(suffix).name}\n" for suffix, part in parts.items())
    return "".join(lines).encode()


def _memory_map(path: Path, dtype: type) -> np.ndarray:
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)  # np.memmap is slower


class TokenSource:
    """A folder of pre-tokenised shards: a source without texts. The constructor checks that no shard is missing."""

    version: str | None = None
    versions: Mapping[str, str] = MappingProxyType({})  # see ``Choice.versions``
    order = "tokens 2"  # see ``TextSource``

    def __init__(self, root: Path, fix: str = f"{PREPARE} again, which keeps the intact shards"):
        self.root, self.fix = root, fix  # the fix for a damaged shard
        self.tokenizer_path: Path | None = root / TOKENIZER
        manifest = read_manifest(root)
        self.fingerprint, self._made_from = manifest["source"], manifest["made_from"]  # of the source of the text
        self.contents: dict[str, str] = manifest["contents"]
        about, shards = manifest["tokenizer"], manifest["shards"]
        self._sha256, self.vocab_size = about["sha256"], about["vocab_size"]
        self.train_shards = shard_names("train", shards["train"])
        self.validation_shards = shard_names("validation", shards["validation"])
        self.files(self.validation_shards)
        sizes = [[len(part) for part in self.shard(name)] for name in self.train_shards]
        self._tokens, self._documents = (np.cumsum([0, *column]) for column in zip(*sizes, strict=True))
        self._documents -= np.arange(len(self._documents))  # a shard has one more end than documents
        self._first = np.cumsum([0, *self.files(self.train_shards)[:, 0]])  # document of each file
        self._begin = self._positions(self._first)  # of each file, among the tokens of all shards

    def shard(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a shard, and where its documents end."""
        with self._naming_shard(name) as path:
            return open_shard(path, self.vocab_size)

    def files(self, names: Sequence[str]) -> np.ndarray:
        """The counts of each file of the source in the shards of a split, int64 [n, 3]: see this file's beginning."""
        counts = np.zeros((1, 3), np.int64)
        for name in names:
            documents = len(self.shard(name)[1]) - 1
            with self._naming_shard(name) as path:
                table = files_of(path, documents, len(counts) - 1)
            counts = np.concatenate((counts, np.zeros((int(table[-1, 0]) + 1 - len(counts), 3), np.int64)))
            np.add.at(counts, table[:, 0], table[:, 1:])
        return counts

    @contextmanager
    def _naming_shard(self, name: str) -> Iterator[Path]:
        """The path of a shard. Within this context, errors in reading it become UserErrors that name it."""
        path = self.root / name
        try:
            with naming(path):
                yield path
        except OSError as error:
            raise UserError(f"{file_error(error)}. {self.fix}") from error
        except ValueError as error:
            raise UserError(f"{path}: damaged or foreign: {error}. {self.fix}") from error

    def verify(self) -> None:
        """Read all shards. Raise UserError if one does not match its checksums."""
        for name in (*self.train_shards, *self.validation_shards):
            with self._naming_shard(name) as path:
                verify_checksums(path)

    def sizes(self, packed: bool) -> list[int]:
        """The tokens of each file if ``packed``, else its documents."""
        return np.diff(self._begin if packed else self._first).tolist()

    def size(self, packed: bool) -> int:
        return int((self._begin if packed else self._first)[-1])

    def blocks(self, tokenizer: Tokenizer, share: Share, start: Place) -> Iterator[tuple[Place, DocumentBlock]]:
        """Yields the blocks of a share in a seeded order, from the block at ``start`` on, each with its place.

        A block is a run of documents of the share. A share of tokens may begin or end within a document.
        """
        self._require(tokenizer)
        if share.packed:
            pieces = cut(self._begin, share)
            spans = [(self._document_at(a, "right"), self._document_at(b, "left"), a, b) for a, b in pieces]
        else:
            spans = [(first, last, 0, int(self._tokens[-1])) for first, last in cut(self._first, share)]
        before = np.cumsum([0, *(last - first for first, last, _, _ in spans)])
        order = permutation(-(-int(before[-1]) // streams.BLOCK_DOCUMENTS), *share.key).tolist()
        for number in range(start[1], len(order)):
            low = streams.BLOCK_DOCUMENTS * order[number]
            high = min(low + streams.BLOCK_DOCUMENTS, int(before[-1]))
            parts: list[np.ndarray] = []
            for i in range(int(np.searchsorted(before, low, "right")) - 1, int(np.searchsorted(before, high, "left"))):
                first, last, *ends = spans[i]
                begin = first - int(before[i])
                parts += self._bounds(max(first, begin + low), min(last, begin + high), *ends)
            where = np.concatenate(parts)
            yield (0, number), DocumentBlock(len(where), partial(self._take, where, tokenizer.eos_id))

    def _document_at(self, position: int, side: Literal["left", "right"]) -> int:
        """The document that holds a token of all shards ("right"), or the first that begins there or later ("left")."""
        file = int(np.searchsorted(self._begin, position))
        if self._begin[file] == position:  # without opening a shard
            return int(self._first[file])
        shard = int(np.searchsorted(self._tokens, position, side)) - 1
        ends = self.shard(self.train_shards[shard])[1]
        number = int(self._documents[shard] + np.searchsorted(ends, position - self._tokens[shard], side))
        return number - 1 if side == "right" else number

    def _positions(self, documents: np.ndarray) -> np.ndarray:
        """Where documents with these numbers begin among the tokens of all shards."""
        positions = np.full(len(documents), self._tokens[-1])
        shards = np.searchsorted(self._documents, documents, "right") - 1
        for shard in np.unique(shards[shards < len(self.train_shards)]).tolist():
            numbers = documents[shards == shard] - self._documents[shard]
            positions[shards == shard] = self._tokens[shard] + self.shard(self.train_shards[shard])[1][numbers]
        return positions

    def _bounds(self, first: int, last: int, begin: int, end: int) -> Iterator[np.ndarray]:
        """Yields the shard, begin and end of some documents, int64 [n, 3], cut at two tokens of all shards."""
        shard = int(np.searchsorted(self._documents, first, "right")) - 1
        while first < last:
            offset, low, high = (int(x) for x in (self._tokens[shard], *self._documents[shard : shard + 2]))
            ends = self._ends(self.train_shards[shard], first - low, min(last, high) - low)
            ends = ends.clip(begin - offset, end - offset)
            yield np.stack((np.full(len(ends) - 1, shard), ends[:-1], ends[1:]), axis=1)
            first, shard = min(last, high), shard + 1

    def _ends(self, name: str, first: int, last: int) -> np.ndarray:
        """Where some documents of a shard begin and end."""
        ends = np.array(self.shard(name)[1][first : last + 1])
        with self._naming_shard(Path(name).with_suffix(ENDS).name):
            if (np.diff(ends) < 1).any() or ends[0] < 0 or (first == 0 and ends[0] > 0):
                raise ValueError(f"the ends of documents {first:,} to {last:,} do not ascend")
        return ends

    def _require_ids(self, ids: np.ndarray, begin: int) -> None:
        """Raise ValueError if ``ids``, from ``begin`` on in a shard, are not all in the vocabulary.

        On a GPU, the lookup would otherwise end the process with an assertion.
        """
        if ids.view(f"u{ids.itemsize}").max(initial=0) >= self.vocab_size:  # unsigned, a negative id is large, too
            first = next(i for i, id in enumerate(ids.tolist()) if not 0 <= id < self.vocab_size)
            raise ValueError(f"token {begin + first:,} is {ids[first]}, beyond the vocabulary of {self.vocab_size:,}")

    def _take(self, where: np.ndarray, eos_id: int, numbers: np.ndarray) -> Tokens:
        """The documents of a block with these numbers. </s> replaces the last token of a document that is cut off."""
        chosen, parts = where[numbers], [np.empty(0)] * len(numbers)
        for shard in np.unique(chosen[:, 0]).tolist():
            with self._naming_shard(self.train_shards[shard]) as path:
                mapped = _memory_map(path, token_dtype(self.vocab_size))  # anew: pages that stay mapped count as memory
                for number in np.flatnonzero(chosen[:, 0] == shard).tolist():
                    _, begin, end = chosen[number].tolist()
                    parts[number] = mapped[begin:end]
                    if len(parts[number]) < end - begin:
                        raise ValueError(f"it has {len(mapped):,} ids, and it had more before")
                    self._require_ids(parts[number], begin)
        tokens = np.concatenate(parts)
        after = np.cumsum(chosen[:, 2] - chosen[:, 1])
        tokens[after - 1] = eos_id
        return Tokens(tokens, np.concatenate(([0], after[:-1])))

    def validation(self, tokenizer: Tokenizer) -> Iterator[Tokens]:
        """Yields the validation documents in their order, a chunk at a time."""
        self._require(tokenizer)
        for name in self.validation_shards:
            tokens, ends = self.shard(name)
            for number in range(0, len(ends) - 1, streams.CHUNK_DOCUMENTS):
                some = self._ends(name, number, number + streams.CHUNK_DOCUMENTS)
                chunk = np.array(tokens[some[0] : some[-1]])
                with self._naming_shard(name):
                    self._require_ids(chunk, int(some[0]))
                yield Tokens(chunk, some[:-1] - some[0])

    def _require(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless the shards were made with this tokenizer."""
        if tokenizer.fingerprint != self._sha256:
            raise UserError(
                tokenizer.path,
                f"not the tokenizer (sha256 {self._sha256[:12]}...) that {self.root} was tokenised with",
                "Leave tokenizer.path out, or prepare the tokens again",
            )

    def describe(self) -> str:
        tokens, documents = (self.size(packed) for packed in (True, False))
        return f"{self._made_from}; {plural(documents, 'document')} and {tokens:,} tokens to train on"


def cut(files: np.ndarray, share: Share) -> list[tuple[int, int]]:
    """The pieces of a share, if files are laid end to end in a seeded order and cut into equal shares.

    ``files`` [n + 1] are the tokens, or documents, at which they begin, and the end of the last one. So are the begin
    and the end of a piece, which is in one file. The cuts move in each epoch: the first share begins at a seeded
    fraction of the whole, and the last one ends there.
    """
    seed, epoch, shares = share.seed, share.epoch, share.streams
    order = np.tile(permutation(len(files) - 1, seed, epoch), 2)
    edges = np.concatenate(([0], np.cumsum(np.diff(files)[order])))
    total = int(edges[-1]) // 2
    seeded = int(np.random.PCG64(np.random.SeedSequence((seed, epoch, 1))).random_raw()) / (1 << 64)  # in [0, 1)
    shift = int(seeded * total) if shares > 1 else 0
    number = (share.stream + epoch) % shares
    begin, end = (shift + total * edge // shares for edge in (number, number + 1))
    pieces = []
    for position in range(int(np.searchsorted(edges, begin, "right")) - 1, len(order)):
        start, stop = int(edges[position]), int(edges[position + 1])
        if start >= end:
            break
        if max(start, begin) < min(stop, end):
            moved = int(files[order[position]]) - start
            pieces.append((max(start, begin) + moved, min(stop, end) + moved))
    return pieces


def read_manifest(root: Path) -> dict:
    """The manifest of a folder of tokens. Raises UserError if it is missing, damaged or in another format."""
    path = root / MANIFEST
    try:
        manifest = read_json(path, {"format": int})
        rule = f"shards of format {manifest['format']}, but this version reads format {FORMAT}"
        if manifest["format"] == FORMAT:
            if not (wrong := misfit(manifest, MANIFEST_SHAPE)):
                return manifest
            rule = f"damaged ({wrong})"
    except FileNotFoundError:
        raise UserError(f"{root}: has no {MANIFEST}, so it is not a folder of tokens. {PREPARE}") from None
    except OSError as error:
        raise file_error(error) from error
    except ValueError as error:
        rule = f"damaged ({error})"
    raise UserError(path, rule, f"{PREPARE} again, into another folder")
