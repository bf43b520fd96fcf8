"""Chooses the files for training and for validation, and records why each other file is left out.

``data.train_files`` and ``data.validation_files`` decide. Without the first, the names of all files below the root
decide, because a folder of text often also holds licences, tables, tokenizer files and copies in other formats.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache as cache_results
from pathlib import Path

from dlr_pretrain.config.run_folder import JOB, JOB_SHAPE, MANIFEST
from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import detect, tokens
from dlr_pretrain.data.files import File, files_below, find_files, open_file, refuse_snapshots, with_versions
from dlr_pretrain.data.formats import BOM, Format
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import MARK, Shape, fits
from dlr_pretrain.util.text import amount, plural, shortened

SNIFF_THREADS = 16
BLANK_BYTES = 64 << 10  # a text up to this size is read whole, to see whether it is blank
SPLITS = ("test", "validation", "train")  # a name with several of these means the first: no test text is trained on
WORD = re.compile(
    r"(?<![^\W\d_]| )(?:"  # no letter or space beside the word: a space means a title, as in "Turing test.txt"
    r"(?P<test>test(?:ing|s)?)|(?P<train>train(?:ing)?)|"
    r"(?P<validation>valid(?:ation)?|val|dev|evals?|evaluation|h[eo]ld[-_.]?out))(?:[-_ ]?set)?(?![^\W\d_]| )"
)
WHOLE_NAME = re.compile(r"[-_]*(?:[.\d]|$)")  # follows a word that is the whole name except for numbers and suffixes
SIDE_FILE = re.compile(
    r"(?:licen[cs]e|readme|requirements)(?:[-_].*)?|notice|copying|changelog|citation|authors|contributors|"
    r"contributing|metadata|dataset_infos?|dataset_dict|state|.*config|tokenizer|special_tokens_map|added_tokens|"
    r"vocab|merges"
)
# What other programs write for themselves beside the data that a user saved with them
LIBRARY_FILES = {
    "a cache of the datasets library": re.compile(r"(?:.*/)?cache-[0-9a-f]{16}(?:_\d+_of_\d+)?\.arrow"),
    "a file of Spark or Delta Lake": re.compile(r"(?:.*/)?_(?:temporary|spark_metadata|delta_log)/.*"),
}
# What this program writes into each of its folders: runs, queued runs, tokens, exports, fine-tuned models
WRITTEN: tuple[tuple[str, Shape], ...] = (
    (MANIFEST, {"identity": dict, "starts": list}), (JOB, JOB_SHAPE), (tokens.MANIFEST, tokens.MANIFEST_SHAPE),
    ("fold.json", {"step": int}), ("sft.json", {"setting": dict}),
)  # fmt: skip


@dataclass
class Choice:
    """The files of a source, each once, and the reason why each other file is left out."""

    train: list[File]
    validation: list[File]
    left_out: dict[str, str]  # reasons by file name

    def contents(self, data: Data) -> dict[str, str]:
        """What is for training, for validation, and left out, as a run prints and records it."""

        def listed(files: list[File]) -> str:
            size = amount(sum(file.size or 0 for file in files))
            return f"{plural(len(files), 'file')} ({size}B): {', '.join(shortened([file.name for file in files]))}"

        held_out = f"{100 * data.held_out:g} % of these documents, at least one, by a hash of each"
        validation = listed(self.validation) if self.validation else held_out
        contents = {"training": listed(self.train), "validation": validation}
        names: dict[str, list[str]] = defaultdict(list)
        for name, why in self.left_out.items():
            names[why].append(name)
        if names:
            contents["left out"] = "; ".join(f"{', '.join(shortened(some))} ({why})" for why, some in names.items())
        return contents

    def versions(self, data: Data) -> dict[str, str]:
        """The versions that servers report, by address: a run resumes with these."""
        files = [file for file in (*self.train, *self.validation) if file.changed]
        if not files:
            return {}
        where = data.root or os.path.dirname(files[0].address)
        states = json.dumps([(file.name, file.version()) for file in files])
        return {f"data.versions at {where}": hashlib.sha256(states.encode()).hexdigest()}


def choose(data: Data) -> Choice:
    """The files that ``data`` names. All local files are opened, but only the first remote file.

    Raises UserError if no file is for training, or if a file is for both training and validation.
    """
    root, left_out = data.root or "", dict[str, str]()
    matched = [_matched(root, data, split, left_out) for split in ("train", "validation")]
    train, validation = (_unique(root, files, left_out) for files in matched)
    if data.train_files is None:
        train, validation = _chosen_by_name(root, data, validation, left_out)
    elif both := {file.identity for file in train} & {file.identity for file in validation}:
        rule = f"data.train_files and data.validation_files both match {min(both)}"
        raise UserError(f"{rule}: the evaluation would use training text. Narrow data.train_files")
    names = {file.name for file in train}  # addresses without a root may have the same names in both splits
    validation = [replace(file, name=file.address) if file.name in names else file for file in validation]
    train, validation = (_without_empty(with_versions(files), data, left_out) for files in (train, validation))
    if not train:
        raise UserError(f"{root or data.train_files}: all training files are empty. Give a file with text")
    if data.validation_files is not None and not validation:
        raise UserError(f"data.validation_files={data.validation_files}: all files are empty. Give a file with text")
    return Choice(train, validation, dict(sorted(left_out.items())))


def choose_validation(data: Data) -> Choice:
    """The files of a validation set alone: those that ``data.validation_files`` names, or else all below the root."""
    root, left_out = data.root or "", dict[str, str]()
    if data.validation_files is None:
        files, others = _chosen_by_name(root, data, [], left_out)
        files = others or files
    else:
        files = _unique(root, _matched(root, data, "validation", left_out), left_out)
    files = _without_empty(with_versions(files), data, left_out)
    if not files:
        raise UserError(f"{data.root}: all files of the validation set are empty. Give a file with text")
    return Choice([], files, dict(sorted(left_out.items())))


def _matched(root: str, data: Data, split: str, left_out: dict[str, str]) -> list[File]:
    """The files that the glob of a split matches; [] without a glob. Raises UserError if it matches none."""
    pattern = data.train_files if split == "train" else data.validation_files
    if pattern is None:
        return []
    files = find_files(root, pattern)
    if "**" in pattern:  # else the user has named the folder
        files = _of_others(files, root, data, left_out)
    libraries = {file.name: why for file in files if (why := _library_reason(file))}
    if len(libraries) < len(files):  # else the user means these files
        left_out |= libraries
        files = [file for file in files if file.name not in libraries]
    if not files:
        where = f"data.{split}_files={pattern}" + (f" below {root}" if root else "")
        raise UserError(f"{where}: matches no file. Set data.root to the folder of the shards, or correct the glob")
    return files


def _chosen_by_name(
    root: str, data: Data, given: list[File], left_out: dict[str, str]
) -> tuple[list[File], list[File]]:
    """The training files below ``root`` and the validation files: those ``given``, or else chosen by name as well.

    All have the format of most training text. If no validation file has this format, another is taken.
    """
    skipped = {file: _skip_reason(file) for file in _of_others(files_below(root), root, data, left_out)}
    taken = {file.identity for file in given}
    texts = _unique(root, [file for file, why in skipped.items() if not why and file.identity not in taken], left_out)
    names = {file.name for file in texts}
    twins = {name for name in names if detect.is_compressed(name) and os.path.splitext(name)[0] in names}
    left_out |= dict.fromkeys(twins, "also present without compression")
    texts = [file for file in texts if file.name not in twins]
    refuse_snapshots(texts)
    taken |= {file.identity for file in texts}  # including blobs, to which names in huggingface_hub's cache link
    left_out |= {file.name: why for file, why in skipped.items() if why and file.identity not in taken}
    named = {split: [file for file in texts if split_of(file.name) == split] for split in SPLITS}
    for split in SPLITS[: 2 if given or not named["train"] else 1]:
        left_out |= {file.name: f"named as a {split} split" for file in named.pop(split)}
    if not named["train"]:
        raise _no_training_file(root, bool(texts or given), left_out)
    main = _main_format(named["train"])
    for split, files in named.items():
        formats = {file.name: detect.format_of(file.name) for file in files}
        chosen = main if main in formats.values() else _main_format(files)
        others = {name: format.name for name, format in formats.items() if format not in (None, chosen)}
        left_out |= {name: f"{other} beside the folder's {chosen.name}" for name, other in others.items()}
        named[split] = [file for file in files if file.name not in others]
    return named["train"], given or named["validation"]


def _of_others(files: list[File], root: str, data: Data, left_out: dict[str, str]) -> list[File]:
    """The files that are not in a folder that this program has written, such as a run below ``root``, or its cache."""
    top, cache = os.path.realpath(root or "."), os.path.realpath(data.cache) if data.cache else None

    @cache_results
    def is_written(folder: str) -> bool:
        if folder == cache or any(fits(Path(folder, name), shape) for name, shape in WRITTEN):
            return True
        if os.path.exists(os.path.join(folder, MARK)):
            return True
        return folder != top and folder != os.path.dirname(folder) and is_written(os.path.dirname(folder))

    ours = {
        file.name for file in files if file.is_local and is_written(os.path.dirname(os.path.realpath(file.address)))
    }
    left_out |= dict.fromkeys(ours, "written by this program")
    return [file for file in files if file.name not in ours]


def _no_training_file(root: str, has_text: bool, left_out: dict[str, str]) -> UserError:
    suffixes = f"{', '.join(detect.SUFFIXES)}, or these with {', '.join(detect.COMPRESSIONS)}"
    rule = "holds no training file" if has_text else f"holds no file that ends with {suffixes}"
    listed = "; ".join(shortened([f"{name} ({why})" for name, why in sorted(left_out.items())]))
    fix = "Set data.root to the folder of the text, or data.train_files to a glob"
    return UserError(f"data.root={root}: {rule}. {f'Left out: {listed}. ' if listed else ''}{fix}")


def _skip_reason(file: File) -> str:
    """Why a file is not text to read, judged by its name; "" if it may be."""
    name, format = os.path.basename(file.name).lower(), detect.format_of(file.name)
    if why := _library_reason(file):
        return why
    if SIDE_FILE.fullmatch(name.partition(".")[0]) and (format in (None, detect.TEXT) or name.endswith(".json")):
        return "a side file"
    if format:
        return "a broken link" if file.is_local and file.size is None else ""
    suffix = re.search(r"\.[^.]+(?:\.(?:gz|zst|bz2|xz))?$", name)
    why = f"{suffix[0]} is not read" if suffix else "a name without a suffix"
    return why if (split := split_of(file.name)) == "train" else f"{why}, and its name is that of a {split} split"


def _library_reason(file: File) -> str:
    """Which program wrote a file for itself, judged by its name; "" if none."""
    return next((why for why, name in LIBRARY_FILES.items() if name.fullmatch(file.name)), "")


def split_of(name: str) -> str:
    """The split of a file by its name below the root: test, validation, or else train.

    A folder or file whose name is the word alone (``train/``, ``val-0001.jsonl``) takes precedence over one with a
    longer name (``my_test_set/``): ``train/test_suite.jsonl`` is for training, and ``train_data/val/a.jsonl`` is not.
    """
    parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().split("/")
    words = [word for part in parts for word in WORD.finditer(part)]
    alone = [word for word in words if word.start() == 0 and WHOLE_NAME.match(word.string, word.end())]
    return min((word.lastgroup or "" for word in alone or words), key=SPLITS.index, default="train")


def _main_format(files: list[File]) -> Format:
    """The format with the most bytes; without reported sizes, the most files; in a tie, the first of FORMATS."""
    sizes = {one: [file.size or 0 for file in files if detect.format_of(file.name) is one] for one in detect.FORMATS}
    return max(sizes, key=lambda one: (sum(sizes[one]), len(sizes[one])))


def _unique(root: str, files: list[File], left_out: dict[str, str]) -> list[File]:
    """Each file once, even if links give it several names. Test and validation names, and real paths, go first."""
    top, first_of = os.path.realpath(root), dict[str, File]()

    def rank(file: File) -> tuple[int, bool, str]:
        return SPLITS.index(split_of(file.name)), file.identity != os.path.join(top, file.name), file.name

    for file in sorted(files, key=rank):
        if (first := first_of.setdefault(file.identity, file)) is not file:
            left_out[file.name] = f"the same file as {first.name}"
    return sorted(first_of.values(), key=lambda file: file.name)


def _without_empty(files: list[File], data: Data, left_out: dict[str, str]) -> list[File]:
    """The files that hold text. All local files are opened, but only the first remote file."""

    def reason(file: File) -> str:
        return _empty_reason(file, data) if file.is_local or file == files[0] else "empty" if file.size == 0 else ""

    with ThreadPoolExecutor(SNIFF_THREADS) as pool:
        reasons = {file.name: why for file, why in zip(files, pool.map(reason, files), strict=True) if why}
    left_out |= reasons
    return [file for file in files if file.name not in reasons]


def _empty_reason(file: File, data: Data) -> str:
    """Why a file holds no text; "" if it may hold some. Raises UserError if it is not in its format."""
    if file.size == 0:
        return "empty"
    with open_file(file, data.cache) as stream:
        format, compression = detect.sniff(file, stream, data)
        if format is None:
            return "empty"
        if format.count_rows is not None:
            try:
                return "" if format.count_rows(stream) else "no rows"
            except detect.DAMAGED as error:
                raise detect.unreadable(file, error) from error
        if not format.magic:
            with suppress(*detect.DAMAGED):  # the reader reports where
                text = detect.decompressed(stream, compression).read(BLANK_BYTES + 1)
                return "" if len(text) > BLANK_BYTES or text.removeprefix(BOM).strip() else "no text"
    return ""
