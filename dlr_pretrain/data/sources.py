"""Where documents come from: files here or elsewhere, the sample, or pre-tokenised shards.

A source names its shards in a fixed order and reads any of them from any row on; it knows nothing of streams or ranks.
The order of the shards is part of the data order, so they are sorted, never in the order of a directory listing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import formats, sample
from dlr_pretrain.data.documents import Block, Tokens, text_blocks, tokenised_in_chunks
from dlr_pretrain.data.extent import sizes
from dlr_pretrain.data.files import File, at_commits
from dlr_pretrain.data.order import Piece, Place, Share
from dlr_pretrain.data.splits import Choice, choose
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import amount, plural, shortened

TOLD_ROWS = 5  # bad rows that a process tells of by their number
HELD_OUT = "held out of "  # begins the name of the validation shard that is made of a training shard
FIRST_DOCUMENTS = 1000  # that decide whether the share that is held out has any
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio

log = logging.getLogger(__name__)


def open_source(cfg: Config, progress: Callable[[str], None] | None = None, version: str | None = None) -> Source:
    """The source that ``data`` names.

    ``progress`` receives messages about work that takes a while (default: the module's log). ``version`` is what an
    earlier start read. Without it the hub is asked, and one that does not answer is reported within seconds. Every
    local file is opened, and the first of remote ones.
    """
    data, progress = cfg.data, progress or log.info
    if data.source == "tokens":
        return TokenSource(Path(data.root or ""))
    if data.source == "sample":
        folder = sample.folder_of(Path(data.root) if data.root else None, version, progress)
        root, version = str(folder), folder.name
    else:
        data, version = at_commits(data, version)
        root = data.root or ""
    chosen = choose(root, data)
    where = root or os.path.dirname(chosen.train[0].address)
    source = TextSource(data, where, chosen.train, chosen.validation, version)
    source.left_out, source.contents = chosen.left_out, contents(chosen, data)
    if data.source == "sample":
        source.tokenizer_path = Path(root, sample.TOKENIZER_FILE)
    return source


class TextSource:
    """Texts in files. Without validation files a share of the training documents is held out, by a hash of each.

    ``fingerprint`` is of the texts, independent of their location: a run resumes only on the same. ``version`` is the
    commit on the hub, or the name of the sample, by which a run finds them later.
    """

    order, slack = "text 2", 0.025  # a run resumes only in the order that it has; a cut moves so far to a file's end

    def __init__(
        self, data: Data, where: str, train: Sequence[File], validation: Sequence[File], version: str | None = None
    ):
        self.data, self.where, self.version = data, where, version  # ``where`` is for the console
        self.tokenizer_path: Path | None = None  # of the sample's own tokenizer
        self.files = {file.name: file for file in (*train, *validation)}
        self.train_shards = tuple(file.name for file in train)
        held = tuple(HELD_OUT + name for name in self.train_shards)
        self.validation_shards = tuple(file.name for file in validation) or held
        self.holds_out = not validation
        self.halves = False  # the only document is cut in two instead
        self.threshold = 0  # documents whose hash is below it are held out: at least one of the first
        self.left_out: list[tuple[str, str]] = []  # files, and why
        self.contents: dict[str, str] = {}  # which files are for training and for validation, and which are left out
        self.remark = ""  # on what reading this text costs
        self._told: set[tuple[str, int]] = set()  # bad rows
        if self.holds_out:
            texts = (text for shard in self.train_shards for _, text in self._file_rows(shard) if text is not None)
            hashes = [_hash(text) for text in islice(texts, FIRST_DOCUMENTS)]
            self.halves = len(set(hashes)) == 1  # also of copies of one document
            if not self.halves:
                self.threshold = max(round(data.held_out * (1 << 64)), min(hashes, default=0) + 1)
        shards = [[(os.path.basename(file.name), file.size) for file in files] for files in (train, validation)]
        how = (data.text_key, data.document, data.bad_rows, self.holds_out and (data.held_out, self.threshold))
        self.fingerprint = hashlib.sha256(json.dumps([shards, how]).encode()).hexdigest()

    def read(self, shard: str, start: int = 0) -> Iterator[str | None]:
        """The texts of a shard from row ``start`` on; None for a row that is left out."""
        return (text for _, text in self.rows(shard, start))

    def rows(self, shard: str, start: int = 0, piece: Piece | None = None) -> Iterator[tuple[int, str | None]]:
        """As ``read``, with the number of each row; with a ``piece`` of the shard, only the rows of this piece."""
        held, name = shard.startswith(HELD_OUT), shard.removeprefix(HELD_OUT)
        for number, text in self._file_rows(name, start, piece):
            if text is None or not self.holds_out:
                yield number, text
            elif self.halves:
                cut = round(len(text) * (1 - self.data.held_out))
                cut = text.rfind("\n", 0, cut) + 1 or cut
                yield number, text[cut:] if held else text[:cut]
            else:
                yield number, text if (_hash(text) < self.threshold) == held else None

    def _file_rows(self, name: str, start: int = 0, piece: Piece | None = None) -> Iterator[tuple[int, str | None]]:
        """As ``rows``, of a file, whether held out or not."""
        file, data = self.files[name], self.data
        found = formats.rows(file, data.text_key, data.document == "paragraph", data.cache, start)
        for number, row in enumerate(found, start):
            if piece is not None and not in_piece(number, piece):
                continue
            try:
                yield number, formats.parse_text(row, data.text_key, file.address, number)
            except UserError as error:
                if data.bad_rows == "stop":
                    raise
                if (name, number) not in self._told and len(self._told) < TOLD_ROWS:
                    self._told.add((name, number))
                    more = ", and this process tells of no more" if len(self._told) == TOLD_ROWS else ""
                    log.warning("left out (data.bad_rows=skip): %s%s", str(error).rpartition(". ")[0], more)
                yield number, None

    def sizes(self, packed: bool) -> list[int]:
        """The size of each training shard, in characters if ``packed``, else in documents: estimates."""
        return self._sizes[0 if packed else 1]

    @cached_property
    def _sizes(self) -> tuple[list[int], list[int]]:
        files = [self.files[name] for name in self.train_shards]
        return sizes(files, self.data.text_key, self.data.document == "paragraph")

    def blocks(self, tokenizer: Tokenizer, share: Share, start: Place) -> Iterator[tuple[Place, Block]]:
        """The blocks of a share in its order, from the block at ``start`` on, each with its place: piece and row."""
        first, row = start
        for number, piece in enumerate(share.pieces[first:], first):
            found = self.rows(self.train_shards[piece.shard], row, piece if piece.is_part else None)
            for begins, block in text_blocks(found, tokenizer):
                yield (number, begins), block
            row = 0

    def validation(self, tokenizer: Tokenizer) -> Iterator[Tokens]:
        """The documents for validation in their order, some at a time."""
        for shard in self.validation_shards:
            yield from tokenised_in_chunks(self.read(shard), tokenizer)

    def state(self) -> list:
        """What decides the texts, with the files as they are now."""
        return [self.fingerprint, *(file.state() for file in self.files.values())]

    def describe(self) -> str:
        """One line for the console."""
        if not self.holds_out:
            return f"{self.where}: {len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        share = f"{100 * self.data.held_out:g} % of the {'document' if self.halves else 'documents'}"
        return f"{self.where}: {plural(len(self.train_shards), 'train shard')}, {share} held out for validation"


def contents(chosen: Choice, data: Data) -> dict[str, str]:
    """Which files are for training and for validation, and which are left out, with the reason of each."""

    def listed(files: list[File]) -> str:
        size = amount(sum(file.size or 0 for file in files))
        return f"{plural(len(files), 'file')} ({size}B): {', '.join(shortened([file.name for file in files]))}"

    held_out = f"{100 * data.held_out:g} % of these documents, by a hash of each"
    reasons = {why: [name for name, one in chosen.left_out if one == why] for _, why in chosen.left_out}
    left_out = "; ".join(f"{', '.join(shortened(names))} ({why})" for why, names in reasons.items())
    found = {
        "training": listed(chosen.train),
        "validation": listed(chosen.validation) if chosen.validation else held_out,
    }
    return found | ({"left out": left_out} if left_out else {})


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def in_piece(row: int, piece: Piece) -> bool:
    """Whether a row of a shard belongs to a piece of it.

    Multiples of the golden ratio spread any consecutive rows evenly over the shard's size. So a part of a file is the
    same share of its rows in any format, before anybody has counted them.
    """
    return piece.begin <= (row * GOLDEN % (1 << 64)) * piece.size >> 64 < piece.end


Source = TextSource | TokenSource  # documents in named shards; one rank opens it, and sends it to the others
