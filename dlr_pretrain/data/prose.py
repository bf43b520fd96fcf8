"""Worker of the sample source: the English prose in the docstrings of Python files.

It runs as a script in an isolated interpreter, so it imports only the standard library. It reads file names from
standard input, one per line, and for each writes one line with the JSON list of its documents.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import warnings

MIN_WORDS = 6  # of a paragraph; a shorter one is a title or a label
MIN_CHARACTERS = 80  # of a document; a shorter one is a label ("Return the shape.") that occurs thousands of times
SCOPES = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.If)  # nodes whose bodies may hold docstrings
COMMON_WORDS = """a an and any are as at be been but by can for from has have if in into is it its may more must no not
of on one only or other should so such than that the their then there these they this to used was when where which will
with without you your"""
COMMON = frozenset(COMMON_WORDS.split())

MARKUP = [
    (re.compile(r":[\w:+.-]+:`[~!]?(?:[\w.]+\.)?([^`<]+?)\s*(?:<[^`>]*>)?`"), r"\1"),  # :class:`~a.b.C` -> C
    (re.compile(r"\[([^\]]+)\]\([^)\s]+\)"), r"\1"),  # [text](address) -> text
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),  # `text <address>`_ -> text
    (re.compile(r"\s*\[[\w-]{1,12}\]_"), ""),  # a citation: [1]_
    (re.compile(r"`+~?\.?([^`]*)`+_{0,2}"), r"\1"),  # `code`, ``code``, `target`_
    (re.compile(r"(?<!\w)\*{1,2}(\w[^*]*)\*{1,2}(?!\w)"), r"\1"),  # *emphasis*, **strong**
    (re.compile(r"::(?=\s|$)"), ":"),
]
FIELD = re.compile(r"^(:\w|@\w|\.\. |>>> |\.\.\. |\||\+[-=]|#|[-*=~^_\"#+`]{3,}$|\$ |% )")
BULLET = re.compile(r"^([-*+•]|\(?\w{1,2}[.)])\s+")
WORD = re.compile(r"[A-Za-z][a-z]*(?:['’-][a-z]+)*$")


def documents(source: bytes) -> list[str]:
    """The prose of each docstring of a Python file, paragraphs separated by a line feed; short ones are left out."""
    if b'"""' not in source and b"'''" not in source:
        return []  # avoids parsing large tables of data
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        tree = ast.parse(source)
    found, nodes = [], [tree]
    while nodes:
        node = nodes.pop()
        nodes += [inner for inner in reversed(node.body) if isinstance(inner, SCOPES)]
        docstring = ast.get_docstring(node, clean=False) if not isinstance(node, ast.If) else None
        if docstring and len(docstring) >= MIN_CHARACTERS:
            text = "\n".join(paragraphs(docstring))
            if len(text) >= MIN_CHARACTERS:
                found.append(text)
    return found


def paragraphs(docstring: str) -> list[str]:
    """The paragraphs of a docstring that are English prose, each on one line and without markup.

    Paragraphs with indented lines, except bullets, are left out, because in every docstring style these are code or
    descriptions of parameters. Field lists, tables, doctests and titles are left out, too.
    """
    blocks: list[list[str]] = [[]]
    for line in inspect.cleandoc(docstring).splitlines():
        if not line.strip() or BULLET.match(line):
            blocks.append([])
        if line.strip():
            blocks[-1].append(line)
    return [text for block in blocks if block and (text := _prose(block))]


def _prose(block: list[str]) -> str:
    """A block of lines as one line of prose; empty if it is not prose."""
    bullet = BULLET.match(block[0])
    if any(FIELD.match(line) or (line[0].isspace() and not bullet) for line in block):
        return ""
    text = " ".join(" ".join(block).split())
    for pattern, plain in MARKUP:
        text = pattern.sub(plain, text)
    text = BULLET.sub("", text).strip()
    return text if _is_english(text) else ""


def _is_english(text: str) -> bool:
    """Whether a paragraph consists of English sentences.

    It must begin and end like a sentence (after a final colon, code was left out), and most of its words must be plain
    words, many of them common.
    """
    words = [word.strip("()[]\"',.;:!?") for word in text.split()]
    begins = text[:1].isupper() or text[:1].isdigit() or text[:1] in "\"'("
    if len(words) < MIN_WORDS or not begins or text[-1] not in ".!?\"')":
        return False
    plain = sum(bool(WORD.match(word)) for word in words)
    common = sum(word.lower() in COMMON for word in words)
    return plain >= 0.85 * len(words) and common >= 0.2 * len(words)


def main() -> None:
    for name in sys.stdin:
        try:
            with open(name.rstrip("\n"), "rb") as file:
                found = documents(file.read())
        except (SyntaxError, ValueError, RecursionError, MemoryError, OSError):
            found = []  # a template, a test of the parser, a file for another version of Python
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
