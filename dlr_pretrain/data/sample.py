"""The sample: English prose without a download, from the docstrings and help topics of Python's standard library.

It is harvested once into a file of JSON lines, named by a hash of the text, and a SentencePiece model in T5's layout is
trained on it. Both are stored in the user cache under the version of Python, so no installed package changes them.
"""

import ast
import hashlib
import inspect
import io
import json
import platform
import re
import sysconfig
import warnings
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path

from dlr_pretrain.data.tokenizer import valid_text
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import locked, user_cache, write_durably
from dlr_pretrain.util.process import cores

VERSION = 4  # of the harvest
TOKENIZER_FILE, VOCAB_SIZE = "spiece.model", 8192
OPTIONAL = {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip",
            "lib2to3", "distutils", "__pycache__"}  # fmt: skip
PROSE = re.compile(r"[A-Z\"'(][^\n]*(\n\S[^\n]*)*[.!?]", re.DOTALL)
MARKUP = re.compile(r":[\w:+.-]+:(?=`)|[`*]+[~!]?")  # of roles, code and emphasis, whose text is kept
MIN_SPACES = 6  # shorter paragraphs are labels
MAX_LINE_BYTES = 4192  # SentencePiece's default
SKIPPED = re.compile("[\n\u2585]")  # ends of lines, and the character that SentencePiece reserves
COVERAGE, MIN_COVERAGE = 0.9999, 0.98  # of characters; the least is SentencePiece's


def folder_of(root: Path | None, name: str | None, progress: Callable[[str], None]) -> Path:
    """The folder of the sample ``name`` (default: this Python's) below ``root`` (default: the user cache).

    A missing sample is harvested. Raises UserError if only another Python could harvest it.
    """
    cache = root or user_cache() / "sample"
    this_python = f"python-{platform.python_version()}-{VERSION}"
    folder = cache / (name or this_python)

    def is_whole() -> bool:
        return (folder / TOKENIZER_FILE).is_file() and any(folder.glob("text-*.jsonl"))

    if is_whole():
        return folder
    if folder.name != this_python:
        raise UserError(
            "data=sample",
            f"this run reads the sample {folder.name}, which is not in {cache}, but this Python makes {this_python}",
            "Use the sample's Python, or set data.root to the sample's folder",
        )
    with locked(folder, lambda holder: progress(f"waiting for {holder}, which harvests sample text into {folder}")):
        if not is_whole():
            progress(f"harvesting sample text from Python's standard library into {folder} (once, takes seconds)")
            documents = list(harvest())
            lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in documents)
            write_durably(folder / f"text-{hashlib.sha256(lines).hexdigest()[:16]}.jsonl", lines)
            write_durably(folder / TOKENIZER_FILE, train_tokenizer(documents, VOCAB_SIZE))
    return folder


def harvest() -> Iterator[str]:
    """Yields documents from the standard library and Python's help topics in a fixed order, no paragraph twice."""
    from pydoc_data import topics

    stdlib, seen = Path(sysconfig.get_path("stdlib")), set()
    files = [path for path in stdlib.rglob("*.py") if not OPTIONAL.intersection(path.relative_to(stdlib).parts)]
    blocks = (block for path in sorted(files) for block in docstrings(path.read_text("utf-8", "replace")))
    for block in (*blocks, *(topics.topics[name] for name in sorted(topics.topics))):
        fresh = [text for text in prose(block) if text not in seen]
        seen.update(fresh)
        if fresh:
            yield "\n".join(fresh)


def docstrings(source: str) -> Iterator[str]:
    """Yields the docstrings in the source of a Python file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):  # a template, or for another version of Python
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def prose(block: str) -> list[str]:
    """The paragraphs of English sentences, each on one line and without markup; code, tables and titles are dropped."""
    paragraphs = [text for text in re.split(r"\n\s*\n", inspect.cleandoc(block)) if PROSE.fullmatch(text)]
    texts = [" ".join(MARKUP.sub("", text).split()) for text in paragraphs]
    return [text for text in texts if text.count(" ") >= MIN_SPACES]


def train_tokenizer(documents: list[str], vocab_size: int, coverage: float = COVERAGE) -> bytes:
    """Train a SentencePiece unigram model in T5's layout: <pad> 0, </s> 1, <unk> 2, no beginning-of-text token.

    ``coverage`` is the share of the text's characters that are in the vocabulary. Raises UserError if it is too small.
    """
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=(line for document in documents for line in training_lines(document)),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,  # a small text may yield fewer tokens
            character_coverage=coverage,
            max_sentence_length=MAX_LINE_BYTES,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>",
            num_threads=min(cores(), 8),
            minloglevel=2,
        )  # fmt: skip
    except RuntimeError as error:
        counts = sorted(Counter("".join(documents)).values(), reverse=True)
        needed = bisect(list(accumulate(counts)), coverage * sum(counts)) + 4  # with <pad>, </s>, <unk>
        raise UserError(
            f"a tokenizer of {vocab_size:,} tokens cannot be trained on this text",
            f"its characters alone need about {needed:,} tokens" if needed > vocab_size else first_line(error),
        ) from error
    return model.getvalue()


def training_lines(text: str) -> Iterator[str]:
    """Yields a text in pieces that SentencePiece trains on. It would leave out longer ones, and those with SKIPPED.

    A long line is cut at spaces, which no token spans, or if it has none, between any characters.
    """
    for line in SKIPPED.split(valid_text(text)):
        begin, longest = 0, len(line) if len(line.encode()) <= MAX_LINE_BYTES else MAX_LINE_BYTES // 4
        while begin < len(line):
            end = begin + longest
            if end < len(line):
                end = max(line.rfind(" ", begin, end), line.rfind("\t", begin, end)) + 1 or end
            yield line[begin:end]
            begin = end
