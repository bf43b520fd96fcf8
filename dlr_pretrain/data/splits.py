"""Which files are text to train on, which are for validation, and which are left out, with the reason of each.

``data.train_files`` and ``data.validation_files`` say it, or without the first the names of all files below the root. A
folder of text holds more than text: licences, tables, what belongs to a tokenizer, copies in another format.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data.columns import row_count
from dlr_pretrain.data.files import File, below, find, open_file, refuse_snapshots
from dlr_pretrain.data.formats import BOM, DAMAGED, FORMATS, PACKED, decompressed, kind_of, sniff, unreadable
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.text import amount, plural, shortened

SNIFF_THREADS = 16
BLANK_BYTES = 64 << 10  # a text of no more is read whole, to see whether it is blank
SPLITS = ("test", "validation", "train")  # names that say several say the first: it must not be learnt
WORD = re.compile(
    r"(?<![^\W\d_]| )(?:"  # no letter beside a word, nor a space: that is of a title, as in "Turing test.txt"
    r"(?P<test>test(?:ing|s)?)|(?P<train>train(?:ing)?)|"
    r"(?P<validation>valid(?:ation)?|val|dev|evals?|evaluation|h[eo]ld[-_.]?out))(?:[-_ ]?set)?(?![^\W\d_]| )"
)
ALONE = re.compile(r"[-_]*(?:[.\d]|$)")  # what follows a word that is a whole name, but for numbers and suffixes
SIDE = re.compile(
    r"(?:licen[cs]e|readme|requirements)(?:[-_].*)?|notice|copying|changelog|citation|authors|contributors|"
    r"contributing|metadata|dataset_infos?|dataset_dict|state|.*config|tokenizer|special_tokens_map|added_tokens|"
    r"vocab|merges"
)
KINDS = {"lines": "JSON lines", "text": "text", "parquet": "parquet", "arrow": "arrow"}


@dataclass
class Choice:
    """The files of a source, each once, and why others are left out, by their names."""

    train: list[File]
    validation: list[File]
    left_out: dict[str, str]

    def contents(self, data: Data) -> dict[str, str]:
        """What is for training, for validation, and left out, as a run tells and records it."""

        def listed(files: list[File]) -> str:
            size = amount(sum(file.size or 0 for file in files))
            return f"{plural(len(files), 'file')} ({size}B): {', '.join(shortened([file.name for file in files]))}"

        held_out = f"{100 * data.held_out:g} % of these documents, by a hash of each"
        validation = listed(self.validation) if self.validation else held_out
        found = {"training": listed(self.train), "validation": validation}
        names: dict[str, list[str]] = defaultdict(list)
        for name, why in self.left_out.items():
            names[why].append(name)
        if names:
            found["left out"] = "; ".join(f"{', '.join(shortened(some))} ({why})" for why, some in names.items())
        return found


def choose(data: Data) -> Choice:
    """The files that ``data`` names. All local ones are opened, of remote ones the first.

    Raises UserError if none is to train on, or if the evaluation would be of text that was learnt.
    """
    root, left_out = data.root or "", dict[str, str]()
    train, validation = (_once(root, _matched(root, data, split), left_out) for split in ("train", "validation"))
    if data.train_files is None:
        train, validation = _by_names(root, validation, left_out)
    elif both := {file.identity for file in train} & {file.identity for file in validation}:
        rule = f"data.train_files and data.validation_files both match {min(both)}"
        raise UserError(f"{rule}: the evaluation would be of text that was learnt. Narrow data.train_files")
    names = {file.name for file in train}  # those of addresses without a root may be the same in both
    validation = [replace(file, name=file.address) if file.name in names else file for file in validation]
    train, validation = (_with_text(files, data, left_out) for files in (train, validation))
    if not train:
        raise UserError(f"{root or data.train_files}: all training files are empty. Give a file with text")
    if data.validation_files is not None and not validation:
        raise UserError(f"data.validation_files={data.validation_files}: all files are empty. Give a file with text")
    return Choice(train, validation, dict(sorted(left_out.items())))


def _matched(root: str, data: Data, split: str) -> list[File]:
    """The files that the glob of a split matches. Raises UserError if it matches none; [] if there is no glob."""
    pattern = data.train_files if split == "train" else data.validation_files
    if pattern is None:
        return []
    if not (found := find(root, pattern)):
        where = f"data.{split}_files={pattern}" + (f" below {root}" if root else "")
        raise UserError(f"{where}: matches no file. Set data.root to the folder of the shards, or correct the glob")
    return found


def _by_names(root: str, given: list[File], left_out: dict[str, str]) -> tuple[list[File], list[File]]:
    """The training files below ``root``, by their names, and ``given``, or else the validation files by their names.

    Both are of the kind that most training text is of; validation files are of another if there are none of it.
    """
    found = {file: _why_no_text(file) for file in below(root)}
    taken = {file.identity for file in given}
    texts = _once(root, [file for file, why in found.items() if not why and file.identity not in taken], left_out)
    names = {file.name for file in texts}
    twins = {name for name in names if name.endswith(PACKED) and os.path.splitext(name)[0] in names}
    left_out |= dict.fromkeys(twins, "also there without compression")
    texts = [file for file in texts if file.name not in twins]
    refuse_snapshots(texts)
    taken |= {file.identity for file in texts}  # with the blobs that names in the cache of huggingface_hub link to
    left_out |= {file.name: why for file, why in found.items() if why and file.identity not in taken}
    named = {split: [file for file in texts if split_of(file.name) == split] for split in SPLITS}
    for split in SPLITS[: 2 if given or not named["train"] else 1]:
        left_out |= {file.name: f"named as a {split} split" for file in named.pop(split)}
    if not named["train"]:
        suffixes = f"{', '.join(FORMATS)}, or these with {', '.join(PACKED)}"
        rule = "holds no training file" if texts or given else f"holds no file that ends with {suffixes}"
        told = "; ".join(shortened([f"{name} ({why})" for name, why in sorted(left_out.items())]))
        fix = "Set data.root to the folder of the text, or data.train_files to a glob"
        raise UserError(f"data.root={root}: {rule}. {f'Left out: {told}. ' if told else ''}{fix}")
    main = _main_kind(named["train"])
    for split, files in named.items():
        kind = main if any(kind_of(file.name) == main for file in files) else _main_kind(files)
        others = {file.name: KINDS[own] for file in files if (own := kind_of(file.name)) != kind}
        left_out |= {name: f"{other} beside the folder's {KINDS[kind]}" for name, other in others.items()}
        named[split] = [file for file in files if file.name not in others]
    return named["train"], given or named["validation"]


def _why_no_text(file: File) -> str:
    """Why the name of a file says that it is no text to read; empty if it does not say so."""
    name, kind = os.path.basename(file.name).lower(), kind_of(file.name)
    if SIDE.fullmatch(name.partition(".")[0]) and (kind in ("", "text") or name.endswith(".json")):
        return "a side file"
    if kind:
        return "a link to nowhere" if file.is_local and file.size is None else ""
    suffix = re.search(r"\.[^.]+(?:\.(?:gz|zst|bz2|xz))?$", name)
    why = f"{suffix[0]} is not read" if suffix else "a name without a suffix"
    return why if (split := split_of(file.name)) == "train" else f"{why}, and its name is of a {split} split"


def split_of(name: str) -> str:
    """The split that the name of a file below the root says: train, validation or test; train if it says none.

    A folder or file that has nothing but the word as its name (``train/``, ``val-0001.jsonl``) counts before one that
    has more (``my_test_set/``): ``train/test_suite.jsonl`` is trained on, and ``train_data/val/a.jsonl`` is not.
    """
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("/")
    words = [word for part in parts for word in WORD.finditer(part)]
    alone = [word for word in words if word.start() == 0 and ALONE.match(word.string, word.end())]
    return min((word.lastgroup or "" for word in alone or words), key=SPLITS.index, default="train")


def _main_kind(files: list[File]) -> str:
    """The kind of most bytes; where servers tell none, of most files; then the first in ``KINDS``."""
    of = {kind: [file.size or 0 for file in files if kind_of(file.name) == kind] for kind in KINDS}
    return max(KINDS, key=lambda kind: (sum(of[kind]), len(of[kind])))


def _once(root: str, files: list[File], left_out: dict[str, str]) -> list[File]:
    """Each file once, though links give it several names: by one that names no training split, and is no link."""
    top, kept = os.path.realpath(root), dict[str, File]()

    def rank(file: File) -> tuple[int, bool, str]:
        return SPLITS.index(split_of(file.name)), file.identity != os.path.join(top, file.name), file.name

    for file in sorted(files, key=rank):
        if (first := kept.setdefault(file.identity, file)) is not file:
            left_out[file.name] = f"the same file as {first.name}"
    return sorted(kept.values(), key=lambda file: file.name)


def _with_text(files: list[File], data: Data, left_out: dict[str, str]) -> list[File]:
    """The files that hold text. All local ones are looked at, of remote ones the first."""

    def look(file: File) -> str:
        return _why_empty(file, data) if file.is_local or file == files[0] else "empty" if file.size == 0 else ""

    with ThreadPoolExecutor(SNIFF_THREADS) as pool:
        reasons = {file.name: why for file, why in zip(files, pool.map(look, files), strict=True) if why}
    left_out |= reasons
    return [file for file in files if file.name not in reasons]


def _why_empty(file: File, data: Data) -> str:
    """Why a file holds no text; empty if it may hold some. Raises UserError if it is no file of its kind."""
    if file.size == 0:
        return "empty"
    with open_file(file, data.cache) as stream:
        kind, compression = sniff(file, stream, data)
        if kind == "parquet":
            try:
                return "" if row_count(kind, stream) else "no rows"
            except DAMAGED as error:
                raise unreadable(file, error) from error
        if kind in ("lines", "text", "paragraphs"):
            with suppress(*DAMAGED):  # the reader says where
                text = decompressed(stream, compression).read(BLANK_BYTES + 1)
                return "" if len(text) > BLANK_BYTES or text.removeprefix(BOM).strip() else "no text"
    return "empty" if kind == "empty" else ""
