"""Pre-tokenised shards: a folder that ``scripts/prepare_data.py`` writes and ``data=tokens`` memory-maps.

    manifest.json                 what they are made from, and how many they are
    tokenizer/                    the tokenizer
    train-00000-of-01024.tokens   a shard for each shard of the source, in its order; validation-... likewise
    train-00000-of-01024.ends     where its documents end

A shard is the ids of its documents, uint16 (int32 above 65,536 ids), each document whole and followed by its end of
sequence. Its ends are int64 [documents + 1], of which the first is 0. Rows of the source that are left out have no
document. The manifest is written first, and a shard's ids before its ends. So a kill at any point leaves finished
shards, which the same command keeps.

A text that is small is tokenised so when a run starts, into the user's cache: its data order is then exact.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dlr_pretrain.data import documents
from dlr_pretrain.data.documents import Block, Tokens, token_dtype
from dlr_pretrain.data.files import user_cache
from dlr_pretrain.data.order import Piece, Place, Share, cut, permutation
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import sync, write_durably
from dlr_pretrain.util.process import cores
from dlr_pretrain.util.text import plural

if TYPE_CHECKING:
    from dlr_pretrain.data.sources import TextSource

FORMAT = 4
MANIFEST, TOKENIZER = "manifest.json", "tokenizer"
TOKENS, ENDS = ".tokens", ".ends"  # suffixes of a shard's files
PREPARE = "Make it with scripts/prepare_data.py"
SMALL_CHARACTERS = 1 << 28  # of text that is tokenised when a run starts: some ten seconds of sentencepiece
FEW_DOCUMENTS = 16  # a stream: with fewer, text is tokenised too, because streams cannot share out whole documents
MUCH_READ = 2.0  # times a text that is streamed is read in an epoch
PARALLEL_CHARACTERS = 1 << 24  # above this, other processes are worth their start
_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # of a worker


def file_names(split: str, count: int) -> tuple[str, ...]:
    return tuple(f"{split}-{index:05d}-of-{count:05d}{TOKENS}" for index in range(count))


def open_shard(path: Path, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of a shard and where its documents end, memory-mapped. Raises OSError or ValueError if it is damaged."""
    tokens = _mapped(path, token_dtype(vocab_size))
    ends = _mapped(path.with_suffix(ENDS), np.int64)
    if not len(ends) or ends[-1] != len(tokens):
        raise ValueError(f"it has {len(tokens):,} ids, and {path.stem}{ENDS} counts another number")
    return tokens, ends


def _mapped(path: Path, dtype: type) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)  # no empty file can be mapped


class TokenSource:
    """A folder of pre-tokenised shards: a source without texts. Opening it checks that it is whole."""

    version: str | None = None
    remark = ""
    order, slack = "tokens 2", 0.0  # a run resumes only in the order that it has; no cut is moved
    fix = f"{PREPARE} again: it keeps the sound shards"

    def __init__(self, root: Path):
        self.root = root
        self.tokenizer_path: Path | None = root / TOKENIZER
        manifest = _manifest(root)
        try:
            self.fingerprint, self._made_from = manifest["source"], manifest["made_from"]
            self.contents: dict[str, str] = manifest["contents"]
            about, shards = manifest["tokenizer"], manifest["shards"]
            self._sha256, self.vocab_size = about["sha256"], about["vocab_size"]
            self.train_shards = file_names("train", shards["train"])
            self.validation_shards = file_names("validation", shards["validation"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{root / MANIFEST}: damaged ({error!r}). {PREPARE} again, into another folder") from error
        for name in self.validation_shards:
            self.shard(name)
        self._sizes = [[len(part) for part in self.shard(name)] for name in self.train_shards]

    def shard(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a shard, and where its documents end."""
        try:
            return open_shard(self.root / name, self.vocab_size)
        except (OSError, ValueError) as error:
            rule = error.strerror if isinstance(error, OSError) else f"damaged or foreign: {error}"
            raise UserError(f"{self.root / name}: {rule}. {self.fix}") from error

    def sizes(self, packed: bool) -> list[int]:
        """The size of each training shard, in tokens if ``packed``, else in documents."""
        return [tokens if packed else ends - 1 for tokens, ends in self._sizes]

    def blocks(self, tokenizer: Tokenizer, share: Share, start: Place) -> Iterator[tuple[Place, Block]]:
        """The blocks of a share in a seeded order, from the block at ``start`` on, each with its place.

        A block is a run of documents of the share. A share of tokens may begin or end inside of a document.
        """
        self._require(tokenizer)
        spans = [self._span(piece, share.packed) for piece in share.pieces]
        before = np.cumsum([0, *(last - first for _, first, last in spans)])
        blocks = -(-int(before[-1]) // documents.BLOCK_DOCUMENTS)
        for number, block in enumerate(permutation(blocks, *share.key).tolist()):
            if number >= start[1]:
                low, high = (documents.BLOCK_DOCUMENTS * at for at in (block, block + 1))
                parts = [
                    (piece, first + max(0, low - begin), min(last, first + high - begin))
                    for (piece, first, last), begin in zip(spans, before.tolist(), strict=False)
                    if begin < high and begin + last - first > low
                ]
                where = np.concatenate([self._places(*part, share.packed) for part in parts])
                yield (0, number), Block(len(where), partial(self._take, where, tokenizer.eos_id))

    def _span(self, piece: Piece, packed: bool) -> tuple[Piece, int, int]:
        """A piece, its first document, and the one after its last."""
        if not packed:
            return piece, piece.begin, piece.end
        ends = self.shard(self.train_shards[piece.shard])[1]
        first = int(np.searchsorted(ends, piece.begin, "right")) - 1
        return piece, first, int(np.searchsorted(ends, piece.end, "left"))

    def _places(self, piece: Piece, first: int, last: int, packed: bool) -> np.ndarray:
        """The shard, begin and end of some documents, int64 [n, 3], cut where the piece ends."""
        ends = np.array(self.shard(self.train_shards[piece.shard])[1][first : last + 1])
        if packed:
            ends = ends.clip(piece.begin, piece.end)
        return np.stack((np.full(last - first, piece.shard), ends[:-1], ends[1:]), axis=1)

    def _take(self, where: np.ndarray, eos_id: int, numbers: np.ndarray) -> Tokens:
        """The documents with these numbers of a block; one that is cut off ends with </s> instead of its last token."""
        chosen = where[numbers]
        names = {shard: self.train_shards[shard] for shard in np.unique(chosen[:, 0]).tolist()}
        mapped = {shard: self.shard(name)[0] for shard, name in names.items()}  # anew: mapped pages count as memory
        parts = [mapped[shard][begin:end] for shard, begin, end in chosen.tolist()]
        tokens = np.concatenate(parts)
        if (worst := tokens.max(initial=0)) >= self.vocab_size:  # a GPU would end with an assertion of its own
            damaged = next(int(row[0]) for row, part in zip(chosen, parts, strict=True) if worst in part)
            rule = f"damaged: it has the id {worst}, beyond the vocabulary of {self.vocab_size:,}"
            raise UserError(f"{self.root / names[damaged]}: {rule}. {self.fix}")
        after = np.cumsum(chosen[:, 2] - chosen[:, 1])
        tokens[after - 1] = eos_id
        return Tokens(tokens, np.concatenate(([0], after[:-1])))

    def validation(self, tokenizer: Tokenizer) -> Iterator[Tokens]:
        """The documents for validation in their order, some at a time."""
        self._require(tokenizer)
        for name in self.validation_shards:
            tokens, ends = self.shard(name)
            for at in range(0, len(ends) - 1, documents.CHUNK_DOCUMENTS):
                some = ends[at : at + documents.CHUNK_DOCUMENTS + 1]
                yield Tokens(np.array(tokens[some[0] : some[-1]]), np.array(some[:-1] - some[0]))

    def _require(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless the shards are of this tokenizer."""
        if tokenizer.fingerprint != self._sha256:
            rule = f"not the tokenizer (sha256 {self._sha256[:12]}...) that {self.root} was tokenised with"
            raise UserError(f"{tokenizer.path}: {rule}. Leave tokenizer.path out, or prepare the tokens again")

    def describe(self) -> str:
        """One line for the console."""
        tokens, documents = (sum(self.sizes(packed)) for packed in (True, False))
        return f"{self._made_from}; {plural(documents, 'document')} and {tokens:,} tokens to train on"


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
    try:
        yield from _tokenise(source, tokenizer, output, workers)
    except (OSError, BrokenProcessPool) as error:
        fix = "Free space, or use fewer --workers if memory ran out, and start again: finished shards are kept"
        raise UserError(f"{output}: {first_line(error)}. {fix}") from error


def _tokenise(source: TextSource, tokenizer: Tokenizer, output: Path, workers: int) -> Iterator[bool]:
    """As ``make_tokens``, which names the errors of the machine."""
    train, validation = source.train_shards, source.validation_shards
    names = (*file_names("train", len(train)), *file_names("validation", len(validation)))
    manifest = {
        "format": FORMAT,
        "source": source.fingerprint,
        "tokenizer": {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "shards": {"train": len(train), "validation": len(validation)},
        "made_from": source.describe(),
        "contents": source.contents,
    }
    _claim(output, manifest)
    tokenizer.save(output / TOKENIZER)
    # The fork server has none of this process's threads. It imports once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, context) as pool:  # starts them as they are needed
        complete = partial(_complete, source, output)
        yield from (pool.map if workers > 1 else map)(complete, (*train, *validation), names)
    for draft in (*output.glob(f".*{TOKENS}"), *output.glob(f".*{ENDS}")):
        draft.unlink(missing_ok=True)


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
    lengths = [np.zeros(1, np.int64)]
    drafts = [path.with_name(f".{path.name}.{os.getpid()}{suffix}") for suffix in (TOKENS, ENDS)]
    texts = (text for text in source.read(shard) if text is not None)
    with drafts[0].open("wb") as file:
        while some := list(islice(texts, documents.CHUNK_DOCUMENTS)):
            tokens, starts = documents.tokenised(some, tokenizer, range(len(some)))
            tokens.tofile(file)
            lengths.append(np.diff(starts, append=len(tokens)))
    np.concatenate(lengths).cumsum().tofile(drafts[1])
    for draft, final in zip(drafts, (path, path.with_suffix(ENDS)), strict=True):
        sync(draft)
        os.replace(draft, final)


def tokenised_once(
    source: TextSource | TokenSource, tokenizer: Tokenizer, streams: int, say: Callable[[str], None]
) -> TextSource | TokenSource:
    """The tokens of a text that is small, or that has few documents for so many streams; of another the text itself.

    They are made in the user's cache, or below ``data.cache``, where a later start finds them.
    """
    if isinstance(source, TokenSource):
        return source
    characters = sum(source.sizes(packed=True))
    if characters > SMALL_CHARACTERS and sum(source.sizes(packed=False)) >= FEW_DOCUMENTS * streams:
        source.remark = _cost(source, streams)
        return source
    cache = Path(source.data.cache or user_cache()) / "tokens"
    key = json.dumps([FORMAT, source.state(), tokenizer.fingerprint])
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not folder.is_dir():
        say(f"tokenising the text (some {characters / 1e6:.3g} MB) once, into {folder}")
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".draft-", dir=cache) as draft:
                whole = Path(draft, "whole")
                list(_tokenise(source, tokenizer, whole, cores() if characters > PARALLEL_CHARACTERS else 1))
                with suppress(OSError):  # another process was faster
                    whole.rename(folder)
        except (OSError, BrokenProcessPool) as error:
            rule = f"the tokens of the text cannot be kept here: {first_line(error)}"
            raise UserError(f"{cache}: {rule}. Set data.cache to a folder with space for them") from error
    made = TokenSource(folder)
    made.version, made.contents = source.version, source.contents
    made.fix = "Delete the folder: the next start makes it again. Set data.cache to a folder that all nodes see"
    return made


def _cost(source: TextSource, streams: int) -> str:
    """A remark where streams share the files of a text, so that each file is read by several; else empty."""
    sizes = source.sizes(packed=True)
    shares = [cut(sizes, np.arange(len(sizes)), part, streams, slack=source.slack) for part in range(streams)]
    times = sum(piece.size for share in shares for piece in share) / sum(sizes)
    if times < MUCH_READ:
        return ""
    fix = "scripts/prepare_data.py tokenises it once, and then the order is exact as well"
    rule = f"because {streams} streams share {plural(len(sizes), 'file')}"
    return f"each epoch reads the text {times:.0f} times, {rule}: {fix}"
