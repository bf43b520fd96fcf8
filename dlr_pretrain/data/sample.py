"""The sample: English prose that needs no download, from the docstrings and comments of Python's standard library.

It is harvested once into C4-layout shards, together with a SentencePiece model in T5's layout trained on them, and kept
in the user cache under the version of Python, so that no installed package changes it. Its identity is its text.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import json
import os
import platform
import random
import re
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

from dlr_pretrain.data.tokenizer import train_tokenizer
from dlr_pretrain.util.errors import UserError

VERSION = 3  # of the harvest
SEED = 20260
TRAIN_SHARDS = 4
VALIDATION_SHARE = 0.03
TOKENIZER_FILE, DIGEST = "spiece.model", "text.sha256"
VOCAB_SIZE = 8192
OPTIONAL = {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip",
            "lib2to3", "distutils", "__pycache__"}  # fmt: skip
SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If)  # nodes whose bodies may hold docstrings
MIN_WORDS, MIN_CHARACTERS = 6, 80  # of a paragraph (a shorter one is a title or a label); of a document
COMMON_WORDS = """a an and any are as at be been but by can for from has have if in into is it its may more must no not
of on one only or other should so such than that the their then there these they this to used was when where which will
with without you your"""
COMMON = frozenset(COMMON_WORDS.split())
MARKUP = re.compile(r":[\w:+.-]+:(?=`)|`+[~!]?|[`*]{1,2}")  # roles, code and emphasis; their text is kept
FIELD = re.compile(r"^(:\w|@\w|\.\. |>>> |\.\.\. |\||\+[-=]|#|[-*=~^_\"#+`]{3,}$|\$ |% )")
BULLET = re.compile(r"^([-*+•]|\(?\w{1,2}[.)])\s+")
WORD = re.compile(r"[A-Za-z][a-z]*(?:['’-][a-z]+)*$")


def prepare(root: Path | None, name: str | None, progress: Callable[[str], None]) -> Path:
    """The folder of the sample ``name`` (default: this Python's) below ``root`` (default: the user cache).

    It is harvested if it is not there. Raises UserError if only another Python could make it.
    """
    cache = root or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dlr_pretrain", "sample")
    own = f"python-{platform.python_version()}-{VERSION}"
    folder = cache / (name or own)
    if folder.is_dir():
        return folder
    if folder.name != own:
        rule = f"this run reads the sample {folder.name}, which is not in {cache}, and this Python makes {own}"
        raise UserError(f"data=sample: {rule}. Start it with that Python, or set data.root to where the sample lies")
    progress(f"harvesting sample text from Python's standard library into {folder} (once, seconds)")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=cache) as drafts:
            build(draft := Path(drafts, own), progress)
            if not folder.is_dir():  # otherwise another process was faster
                draft.rename(folder)
    except OSError as error:
        if not folder.is_dir():
            raise UserError(f"{cache}: the sample cannot be kept there ({error}). Set data.root=<folder>") from error
    return folder


def build(folder: Path, progress: Callable[[str], None]) -> None:
    """Harvest the sample into ``folder``: its shards, their tokenizer and the hash of the text."""
    folder.mkdir()
    documents = list(harvest())
    progress(f"{sum(map(len, documents)) / 1e6:.1f} MB of text in {len(documents):,} documents; training a tokenizer")
    random.Random(SEED).shuffle(documents)
    held_out = round(VALIDATION_SHARE * len(documents))
    splits = {"validation.00000-of-00001": documents[:held_out]}
    for i in range(TRAIN_SHARDS):
        splits[f"train.{i:05d}-of-{TRAIN_SHARDS:05d}"] = documents[held_out + i :: TRAIN_SHARDS]
    for name, texts in splits.items():
        lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
        (folder / f"sample-{name}.json.gz").write_bytes(gzip.compress(lines, mtime=0))
    (folder / DIGEST).write_text(hashlib.sha256(json.dumps(documents).encode()).hexdigest())
    train_tokenizer(folder / TOKENIZER_FILE, documents[held_out:], VOCAB_SIZE)


def harvest() -> Iterator[str]:
    """The documents of the standard library and of Python's help topics in a fixed order, no paragraph twice."""
    from pydoc_data import topics

    stdlib, seen = Path(sysconfig.get_path("stdlib")), set()
    files = [path for path in stdlib.rglob("*.py") if not OPTIONAL.intersection(path.relative_to(stdlib).parts)]
    found = (block for path in sorted(files) for block in blocks(path.read_text("utf-8", "replace")))
    for block in (*found, *(topics.topics[name] for name in sorted(topics.topics))):
        fresh = [text for text in paragraphs(block) if text not in seen]
        seen.update(fresh)
        if len(text := "\n".join(fresh)) >= MIN_CHARACTERS:
            yield text


def blocks(source: str) -> Iterator[str]:
    """The docstrings of a Python file, then its runs of comment lines."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            nodes: list = [ast.parse(source)]
    except (SyntaxError, ValueError, RecursionError):  # a template, a file for another version of Python
        return
    while nodes:
        node = nodes.pop()
        nodes += [inner for inner in reversed(node.body) if isinstance(inner, SCOPES)]
        if not isinstance(node, ast.If) and (docstring := ast.get_docstring(node, clean=False)):
            yield docstring
    for is_comment, lines in groupby(map(str.strip, source.splitlines()), lambda line: line.startswith("#")):
        if is_comment:
            yield "\n".join(line.lstrip("#").removeprefix(" ") for line in lines)


def paragraphs(block: str) -> list[str]:
    """The paragraphs that are English prose, each on one line and without markup: no code, tables, fields or titles."""
    found: list[list[str]] = [[]]
    for line in inspect.cleandoc(block).splitlines():
        if not line.strip() or BULLET.match(line):
            found.append([])
        if line.strip():
            found[-1].append(line)
    return [text for lines in found if lines and (text := _prose(lines))]


def _prose(lines: list[str]) -> str:
    """Some lines as one line of prose; empty if they are not English sentences."""
    bullet = BULLET.match(lines[0])
    if any(FIELD.match(line) or (line[0].isspace() and not bullet) for line in lines):
        return ""
    text = " ".join(" ".join(lines).split())
    text = BULLET.sub("", MARKUP.sub("", text)).strip()
    words = [word.strip("()[]\"',.;:!?") for word in text.split()]
    begins = text[:1].isupper() or text[:1].isdigit() or text[:1] in "\"'("
    if len(words) < MIN_WORDS or not begins or text[-1] not in ".!?\"')":
        return ""
    plain = sum(bool(WORD.match(word)) for word in words) >= 0.85 * len(words)
    return text if plain and sum(word.lower() in COMMON for word in words) >= 0.2 * len(words) else ""
