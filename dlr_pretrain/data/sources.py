"""Where documents come from: files here or elsewhere, the sample, or pre-tokenised shards.

A source names its shards in a fixed order and reads any of them from any row on; it knows nothing of streams or ranks.
The order of the shards is part of the data order, so they are sorted, never in the order of a directory listing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import count, islice
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import sample
from dlr_pretrain.data.documents import Block, text_blocks
from dlr_pretrain.data.files import File, find, open_file, pinned
from dlr_pretrain.data.formats import SUFFIXES, RawRow, parse_text, rows, sniff
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import plural

KEPT_BYTES, KEPT_FILES = 4 << 20, 4  # largest file whose rows are kept in memory for other streams, and how many are
SNIFF_THREADS = 16
TOLD_ROWS = 5  # bad rows that a process tells of by their number
HELD_OUT = "held out of "  # begins the name of the validation shard that is made of a training shard
FIRST_DOCUMENTS = 1000  # that decide whether the share that is held out has any
SPLIT = re.compile(r"(?:^|[/._-])(train|valid(?:ation)?|val|dev|test)(?=[/._-]|\d|$)")
OF_DATASETS = ("state.json", "dataset_info.json", "dataset_dict.json")  # beside the shards of ``save_to_disk``

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
        root, version = pinned(data.root or "", data.revision, version)
    train, validation = (_not_empty(files, data.cache, progress) for files in _splits(root, data))
    if not train:
        raise UserError(f"{root or data.train_files}: all training files are empty. Give a file with text")
    source = TextSource(data, root or os.path.dirname(train[0].address), train, validation, version)
    if data.source == "sample":
        source.tokenizer_path = Path(root, sample.TOKENIZER_FILE)
    return source


def _splits(root: str, data: Data) -> tuple[list[File], list[File]]:
    """The training and validation files, by their globs or, without these, by the names of all files below the root."""
    found: list[list[File]] = []
    for split, pattern in (("train", data.train_files), ("validation", data.validation_files)):
        found.append(find(root, pattern) if pattern is not None else [])
        if pattern is not None and not found[-1]:
            where = f"data.{split}_files={pattern}" + (f" below {root}" if root else "")
            raise UserError(f"{where}: matches no file. Set data.root to the folder of the shards, or correct the glob")
    train, validation = found
    if data.train_files is None:
        there = [file for file in find(root, "**/*") if file.name.lower().endswith(tuple(SUFFIXES))]
        there = [file for file in there if not file.name.endswith(OF_DATASETS)]
        if not there:
            raise UserError(f"data.root={root}: holds no file that ends with {', '.join(SUFFIXES)}")
        if data.validation_files is None:
            validation = [file for file in there if _split_of(file.name) not in ("train", "test")]
        others = [file for file in there if file not in validation]
        train = [file for file in others if _split_of(file.name) == "train"] or others
    paths = [{os.path.realpath(file.address) for file in files} for files in (train, validation)]
    if both := set.intersection(*paths):
        rule = f"data.train_files and data.validation_files both match {min(both)}"
        raise UserError(f"{rule}: the evaluation would be of text that was learnt. Narrow data.train_files")
    return train, validation


def _split_of(name: str) -> str:
    """The first word in the name of a file that names a split; train if there is none."""
    word = SPLIT.search(name.lower())
    return word[1] if word else "train"


def _not_empty(files: list[File], cache: str | None, progress: Callable[[str], None]) -> list[File]:
    """The files that are not empty. All local ones are looked at, of remote ones the first."""

    def is_empty(file: File) -> bool:
        if file.size == 0 or not (file.is_local or file == files[0]):
            return file.size == 0
        with open_file(file, cache) as stream:
            return sniff(file, stream)[0] == "empty"

    with ThreadPoolExecutor(SNIFF_THREADS) as pool:
        empty = [file for file, found in zip(files, pool.map(is_empty, files), strict=True) if found]
    for file in empty:
        progress(f"{file.address}: empty, and left out")
    return [file for file in files if file not in empty]


class TextSource:
    """Texts in files. Without validation files a share of the training documents is held out, by a hash of each.

    ``fingerprint`` is of the texts, independent of their location: a run resumes only on the same. ``version`` is the
    commit on the hub, or the name of the sample, by which a run finds them later.
    """

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
        self._told: set[tuple[str, int]] = set()  # bad rows
        if self.holds_out:
            texts = (text for shard in self.train_shards for text in self.texts(shard) if text is not None)
            hashes = [_hash(text) for text in islice(texts, FIRST_DOCUMENTS)]
            self.halves = len(hashes) == 1
            if not self.halves:
                self.threshold = max(round(data.held_out * (1 << 64)), min(hashes, default=0) + 1)
        shards = [[(os.path.basename(file.name), file.size) for file in files] for files in (train, validation)]
        how = (data.text_key, data.document, data.bad_rows, self.holds_out and (data.held_out, self.threshold))
        self.fingerprint = hashlib.sha256(json.dumps([shards, how]).encode()).hexdigest()

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str | None]:
        """The texts of the rows start, start + step, ... of a shard; None for a row that is left out."""
        if not self.holds_out:
            yield from self.texts(shard, start, step)
            return
        held, name = shard.startswith(HELD_OUT), shard.removeprefix(HELD_OUT)
        for text in self.texts(name, start, step):
            if text is not None and self.halves:
                cut = round(len(text) * (1 - self.data.held_out))
                cut = text.rfind("\n", 0, cut) + 1 or cut
                yield text[cut:] if held else text[:cut]
            else:
                yield text if text is not None and (_hash(text) < self.threshold) == held else None

    def texts(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str | None]:
        """As ``read``, of a file's rows, whether held out or not."""
        file, data = self.files[shard], self.data
        how = (file, data.text_key, data.document == "paragraph", data.cache)
        small = step > 1 and file.size is not None and file.size <= KEPT_BYTES
        found = iter(_kept_rows(*how)[start::step]) if small else islice(rows(*how, start), 0, None, step)
        for document, row in zip(count(start, step), found, strict=False):
            try:
                yield parse_text(row, data.text_key, file.address, document)
            except UserError as error:
                if data.bad_rows == "stop":
                    raise
                if (shard, document) not in self._told and len(self._told) < TOLD_ROWS:
                    self._told.add((shard, document))
                    more = ", and this process tells of no more" if len(self._told) == TOLD_ROWS else ""
                    log.warning("left out (data.bad_rows=skip): %s%s", str(error).rpartition(". ")[0], more)
                yield None

    def blocks(self, tokenizer: Tokenizer, shard: str, first: int = 0, step: int = 1) -> Iterator[Block]:
        """The documents of the rows first, first + step, ... of a shard, block by block in file order."""
        return text_blocks(self.read(shard, first, step), tokenizer)

    def describe(self) -> str:
        """One line for the console."""
        if not self.holds_out:
            return f"{self.where}: {len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        share = f"{100 * self.data.held_out:g} % of the {'document' if self.halves else 'documents'}"
        return f"{self.where}: {plural(len(self.train_shards), 'train shard')}, {share} held out for validation"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


@lru_cache(maxsize=KEPT_FILES)
def _kept_rows(file: File, text_key: str, by_paragraph: bool, cache: str | None) -> list[RawRow]:
    """All rows of a small file: several streams read it, each every m-th row."""
    return list(rows(file, text_key, by_paragraph, cache))


Source = TextSource | TokenSource  # documents in named shards; one rank opens it, and sends it to the others
