"""Tokenise a data source once, for ``data=tokens``:

python scripts/prepare_data.py data=c4_local data.root=/data/c4/en tokenizer.path=/data/spiece.model --output tokens
"""

import argparse
import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError, Problem
from dlr_pretrain.config.arguments import key_of, spread, value_of
from dlr_pretrain.data.prepare import Progress, prepare
from dlr_pretrain.data.sources import TextSource, open_source
from dlr_pretrain.data.tokenizer import TRAINING_TEXT, open_tokenizer, train_tokenizer
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import cores

LINE_SECONDS = 10.0  # between lines of progress if there is no terminal
BAR = 24  # characters
LONGEST_LINE = 4192  # bytes: sentencepiece's max_sentence_length
FEWEST_PIECES = 300  # so that letters, digits and signs have one each
USED = {
    f"data.{name}"
    for name in (
        "dataset",
        "revision",
        "cache",
        "root",
        "train_files",
        "validation_files",
        "held_out",
        "text_key",
        "document",
        "bad_rows",
    )
}
USED |= {"data", "tokenizer.path", "tokenizer.hub", "tokenizer.eos"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Tokenise a data source into shards that data=tokens reads. The same command again continues.",
        usage="%(prog)s data=... [data.key=value ...] [tokenizer.path=...] --output FOLDER [--workers N]",
        epilog="Source and tokenizer are named as for train.py.",
    )
    parser.add_argument("--output", type=Path, required=True, help="the folder to write: data.root of data=tokens")
    parser.add_argument("--workers", type=int, default=cores(), help=f"processes, a shard each (default: {cores()})")
    parser.add_argument(
        "--train-tokenizer",
        type=int,
        metavar="PIECES",
        help="with a sentencepiece model of so many pieces, trained on the first shards: <output>.<PIECES>.model",
    )
    given, words = parser.parse_known_args()
    return command(lambda: run(given, words))


def run(given: argparse.Namespace, words: list[str]) -> None:
    for name, least in (("workers", 1), ("train_tokenizer", FEWEST_PIECES)):
        if (value := getattr(given, name)) is not None and value < least:
            raise ConfigError([Problem(f"--{name.replace('_', '-')}", value, f"must be at least {least}")])
    refuse_unused(words)
    cfg = load([*words, "logger=jsonl"])  # the default logger needs a package that this command does not
    if cfg.data.source == "tokens":
        raise ConfigError([Problem("data", "tokens", "is what this command makes", "Name the source of its text")])
    source = open_source(cfg, say)
    if given.train_tokenizer is not None:
        if cfg.tokenizer.path is not None:
            rule = "--train-tokenizer makes another one"
            raise ConfigError([Problem("tokenizer.path", cfg.tokenizer.path, rule, "Leave one of them out")])
        cfg.tokenizer.path = str(own_tokenizer(source, given.output, given.train_tokenizer))
    tokenizer = open_tokenizer(cfg, source)
    print(f"source      {source.describe()}\ntokenizer   {tokenizer.path}: {tokenizer.vocab_size:,} pieces")
    made = prepare(source, tokenizer, given.output, given.workers, Display(sys.stdout))
    print(f"finished    {made.describe()}\n\n    python train.py data=tokens data.root={given.output}")


def own_tokenizer(source: TextSource, output: Path, pieces: int) -> Path:
    """The sentencepiece model beside ``output``, trained on the first texts of ``source`` if there is none yet."""
    path = output.with_name(f"{output.name}.{pieces}.model")
    if path.exists():
        say(f"taking the tokenizer that was trained before: {path}")
    else:
        say(f"training a tokenizer of {pieces:,} pieces: {path}")
        texts, size = [], 0
        for text in (text for shard in source.train_shards for text in source.read(shard) if text):
            texts.append(text)
            if (size := size + len(text)) > TRAINING_TEXT:
                break
        too_long = sum(len(line) for text in texts for line in text.split("\n") if len(line.encode()) > LONGEST_LINE)
        if too_long:
            share = f"{100 * too_long / size:.2g} % of these texts"
            say(f"sentencepiece leaves lines of over {LONGEST_LINE:,} bytes out: {share}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as aside:  # another command may train it, too
            draft = Path(aside, path.name)
            try:
                train_tokenizer(draft, texts, pieces)
            except RuntimeError as error:  # raised by sentencepiece
                raise UserError(f"no tokenizer of {pieces} pieces can be trained on these texts: {error}") from None
            if not path.exists():
                draft.replace(path)
    return path


def refuse_unused(words: list[str]) -> None:
    """Raise ConfigError for keys of a run that say nothing about its texts and tokens."""
    fix = "Leave it out, and give it to train.py"
    parts = [part for part in spread(words) if "=" in part and not part.startswith("-")]
    problems = [
        Problem(key, value_of(word), "says nothing about texts or tokens", fix)
        for key, word in zip(map(key_of, parts), parts, strict=True)
        if key not in USED
    ]
    if problems:
        raise ConfigError(problems)


def say(text: str) -> None:
    print(text, flush=True)


class Display:
    """Shows progress on a stream: on a terminal as one line that it redraws, otherwise as a line now and then."""

    def __init__(self, stream):
        self.stream, self.terminal = stream, stream.isatty()
        self.started, self.shown = time.monotonic(), float("-inf")

    def __call__(self, progress: Progress) -> None:
        now, last = time.monotonic(), progress.finished == progress.shards
        if now - self.shown < (0.1 if self.terminal else LINE_SECONDS) and not last:
            return
        self.shown = now
        text = describe(progress, now - self.started)
        if self.terminal:
            full = BAR * progress.finished // progress.shards
            line = f"[{'#' * full}{'.' * (BAR - full)}] {text}"[: shutil.get_terminal_size().columns - 1]
            text = f"\r{line}\x1b[K" + ("\n" if last else "")
        else:
            text += "\n"
        self.stream.write(text)
        self.stream.flush()


def describe(progress: Progress, seconds: float) -> str:
    """The progress as one line of text."""
    rate = progress.tokens / seconds if seconds else 0.0
    kept = f" ({progress.kept} kept)" if progress.kept else ""
    text = f"{progress.finished}/{progress.shards} shards{kept}  {progress.documents:,} documents  "
    text += f"{progress.tokens:,} tokens  {rate / 1e6:.1f}M tokens/s"
    made = progress.finished - progress.kept
    if made and progress.finished < progress.shards:
        left = round(seconds / made * (progress.shards - progress.finished))
        text += f"  {left // 3600}:{left // 60 % 60:02d}:{left % 60:02d} left"
    return text


if __name__ == "__main__":
    sys.exit(main())
