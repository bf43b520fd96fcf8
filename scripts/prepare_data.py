"""Tokenise a data source once, for ``data=tokens``:

python scripts/prepare_data.py data=c4_local data.root=/data/c4/en tokenizer.path=/data/spiece.model --output tokens
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError, Problem
from dlr_pretrain.config.arguments import Parser, at_least_1, share
from dlr_pretrain.config.command_line import read, typed
from dlr_pretrain.util.errors import UserError, command
from dlr_pretrain.util.files import locked, write_durably
from dlr_pretrain.util.process import cores
from dlr_pretrain.util.text import plural

if TYPE_CHECKING:
    from dlr_pretrain.data.sources import TextSource

EPILOG = """The overrides for source and tokenizer are those of train.py.

example: prepare_data.py data=local data.root=texts --train-tokenizer 8192 --output tokens"""
OF_RUNS = ("data.seed", "data.streams", "data.packing", "data.mask_documents")  # do not affect texts or tokens
FEW_DOCUMENTS = 20  # for validation; a run reads only the beginning of each, unless it packs them
TRAINING_TEXT = 4_000_000  # characters that train a tokenizer; more text takes longer and changes little
say = partial(print, flush=True)


def main() -> int:
    parser = Parser(
        description="Tokenise a data source into shards that data=tokens reads. The same command continues it.",
        usage="%(prog)s data=... [data.key=value ...] [tokenizer.path=...] --output FOLDER [--workers N]",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="the folder to write: data.root of data=tokens")
    add("--workers", type=at_least_1, default=cores(), help="processes (default: %(default)s)")
    about_model = "use a sentencepiece model of this many tokens, trained on the first shards: <output>.<TOKENS>.model"
    add("--train-tokenizer", type=at_least_1, metavar="TOKENS", help=about_model)
    about = "share of the text's characters that its tokens can express, from 0.98 to 1 (default: 0.9999)"
    add("--character-coverage", type=share, metavar="SHARE", help=about)
    given, overrides = parser.parse_known_args()
    return command(lambda: run(given, overrides, parser.flags))


def run(given: argparse.Namespace, overrides: list[str], flags: list[str]) -> None:
    refuse_unused(overrides, flags)
    cfg = load([*overrides, "logger=jsonl"])  # the default logger needs a package that this command does not

    from tqdm import tqdm

    from dlr_pretrain.data.prepare import ROWS_LEFT_OUT, SPECIAL_TOKENS, make_tokens, plan
    from dlr_pretrain.data.sources import TextSource, open_source
    from dlr_pretrain.data.tokenizer import open_tokenizer
    from dlr_pretrain.data.tokens import TokenSource

    source = None if cfg.data.source in ("tokens", "mix") else open_source(cfg, say)
    if not isinstance(source, TextSource):
        rule = "tokens are what this command makes, of one text at a time"
        raise ConfigError([Problem("data", cfg.data.source, rule, "Name the source of the text")])
    if given.train_tokenizer is not None:
        if cfg.tokenizer.path is not None:
            rule = "--train-tokenizer makes its own"
            raise ConfigError([Problem("tokenizer.path", cfg.tokenizer.path, rule, "Leave one of them out")])
        with locked(given.output):  # another process may train it
            path = own_tokenizer(source, given.output, given.train_tokenizer, given.character_coverage)
        cfg.tokenizer.path = str(path)
    elif given.character_coverage is not None:
        raise UserError("--character-coverage is for --train-tokenizer. Add this, or leave it out")
    tokenizer = open_tokenizer(cfg, source)
    say(f"source      {source.describe()}\ntokenizer   {tokenizer.path}: {tokenizer.vocab_size:,} tokens")
    if tokenizer.vocab_size < (given.train_tokenizer or 0):
        say(f"note        the text has too few different pieces for {given.train_tokenizer:,} tokens")
    shards = len(plan(source))
    existed = sum(tqdm(make_tokens(source, tokenizer, given.output, given.workers), total=shards, unit=" shards"))
    made = TokenSource(given.output)
    again = f" ({existed} shards were already there)" if existed else ""
    say(f"finished    {given.output}, of {made.describe()}{again}")
    for name in (ROWS_LEFT_OUT, SPECIAL_TOKENS):
        if name in made.contents:
            say(f"{name:<12}{made.contents[name]}")
    documents = int(made.files(made.validation_shards)[:, 0].sum())
    if documents < FEW_DOCUMENTS:
        fix = "repeat the command with data.held_out=0.1 and another --output"
        say(f"warning     {plural(documents, 'document')} of validation text cannot compare models: {fix}")
    say(f"\n    add to your command: data=tokens data.root={given.output}")


def own_tokenizer(source: TextSource, output: Path, size: int, coverage: float | None) -> Path:
    """The sentencepiece model beside ``output``, trained on the first texts of ``source`` unless it exists."""
    from dlr_pretrain.data.sample import COVERAGE, MIN_COVERAGE, train_tokenizer

    coverage = coverage or COVERAGE
    if coverage < MIN_COVERAGE:
        raise UserError(f"--character-coverage={coverage:g}", f"must be a number from {MIN_COVERAGE} to 1")
    path = output.with_name(f"{output.name}.{size}{'' if coverage == COVERAGE else f'-{coverage:g}'}.model")
    if path.exists():
        say(f"using the tokenizer that was trained earlier: {path}")
        return path
    texts, left, names = [], TRAINING_TEXT, set()
    for name, text in ((file, text) for file in source.train_shards for text in source.read(file) if text):
        names.add(name)
        texts.append(text[:left])
        left -= len(texts[-1])
        if not left:
            break
    seen = f"{plural(len(texts), 'document')} in {len(names):,} of {plural(len(source.train_shards), 'file')}"
    say(f"training a tokenizer of {size:,} tokens on {TRAINING_TEXT - left:,} characters ({seen}): {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_durably(path, train_tokenizer(texts, size, coverage))
    except UserError as error:
        fix = "Give --train-tokenizer a larger number, or lower --character-coverage"
        raise UserError(f"{error} (--character-coverage={coverage:g}). {fix}") from None
    return path


def refuse_unused(overrides: list[str], flags: list[str]) -> None:
    """Raise ConfigError for words that are wrong, and for keys that do not affect texts or tokens."""
    line = read(overrides, flags)
    given = typed([word for word in line.words if "=" in word])
    problems = line.problems + [
        Problem(key, value, "does not affect texts or tokens", "Leave it out, and give it to train.py")
        for key, value in given.items()
        if key in OF_RUNS or key.split(".")[0] not in ("data", "tokenizer")
    ]
    if problems:
        raise ConfigError(problems)


if __name__ == "__main__":
    sys.exit(main())
