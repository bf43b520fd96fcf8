"""A table of runs: from words with several values, or a runs file, to one checked configuration a line.

A runs file has one run a line: the words of ``train.py``, quoted as for a shell. No shell reads it, so globs and
variables are not expanded. Blank lines are left out, and so is the rest of a line from a word that begins with ``#``.

    python -m dlr_pretrain.launch.runs FILE N     the words of the N-th run, a zero byte after each: for array.sbatch
"""

from __future__ import annotations

import itertools
import multiprocessing
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.config import MISSING, Config, ConfigError, Problem
from dlr_pretrain.config.arguments import read
from dlr_pretrain.config.composition import jobs, session
from dlr_pretrain.config.rules import unnamed
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import cores

FEW = 12  # up to this many lines, this process composes all itself, in a quarter of a second each


@dataclass(frozen=True)
class Line:
    """The words of one run. ``origin`` is their place, for messages; ``problem`` says why a line cannot be read."""

    origin: str
    words: tuple[str, ...]
    problem: str = ""

    def __str__(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class PlannedRun:
    """A line with its configuration; ``number``, from 1, is the index of its array task."""

    number: int
    line: Line
    cfg: Config

    @property
    def dir(self) -> Path:
        return Path(self.cfg.run.dir)

    @property
    def positions(self) -> int:
        """The tokens of an update, including padding."""
        return self.cfg.train.global_batch * self.cfg.train.seq_len


def read_runs(path: Path) -> list[Line]:
    """The runs of a runs file. A line that cannot be read gets a ``problem``, which ``load_runs`` reports."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a runs file: {error}") from None
    lines = []
    for number, written in enumerate(text.splitlines(), 1):
        origin = f"{path}:{number}"
        try:
            lines.append(Line(origin, _words(written)))
        except ValueError as error:
            lines.append(Line(origin, (), f"{str(error).lower()}: {written.strip()}"))
    lines = [line for line in lines if line.words or line.problem]
    if not lines:
        raise UserError(f"{path} holds no run. Write the arguments of train.py, one run per line")
    return lines


def _words(written: str) -> tuple[str, ...]:
    lexer = shlex.shlex(written, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.commenters = True, ""  # shlex itself would cut a word at a # inside it
    return tuple(itertools.takewhile(lambda word: not word.startswith("#"), lexer))


def expand(words: list[str]) -> list[Line]:
    """The runs of a sweep in Hydra's grammar, ``["scale=60m,130m", "seed=1,2"]``, in the order of ``train.py -m``."""
    asked = read(["-m", *words])
    if asked.problems:
        raise ConfigError(asked.problems)
    flags = [flag for flag in asked.flags if flag != "-m"]
    with session(asked.config_dir):
        found = [(*flags, *(word.lstrip("+") for word in job)) for job in jobs(asked.words)]
    return [Line(shlex.join(words), words) for words in found]


def combine(lines: list[Line], others: list[Line]) -> list[Line]:
    """Each of ``lines`` with the words of each of ``others`` after its own."""
    return [replace(line, words=line.words + other.words) for line in lines for other in others]


def load_runs(lines: list[Line], ranks: int | None, machine: bool = False) -> list[PlannedRun]:
    """The runs, each checked as ``train.py`` on ``ranks`` ranks (None: not known) would check it.

    With ``machine``, this machine will train: its files, packages and compiler are checked, too. Raises one ConfigError
    with every problem of every line; two lines with one run directory are a problem, too.
    """
    check = partial(_loaded, ranks=ranks, machine=machine)
    if len(lines) <= FEW:
        found = list(map(check, lines))
    else:
        workers = min(16, cores())
        with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
            found = list(pool.map(check, lines, chunksize=4))
    problems: dict[str, tuple[Problem, list[str]]] = {}
    first: dict[str, Line] = {}
    for line, answer in zip(lines, found, strict=True):
        if isinstance(answer, Config):
            folder = str(Path(answer.run.dir).resolve())
            if folder in first:
                rule = f"is the run directory of {first[folder].origin}, too"
                answer = ConfigError([Problem("run.dir", answer.run.dir, rule, "Leave one of them out")])
            else:
                first[folder] = line
        if isinstance(answer, ConfigError):
            for problem in answer.problems:
                problems.setdefault(str(problem), (problem, []))[1].append(line.origin)
    if problems:
        raise ConfigError([replace(p, key=f"{_places(where)}: {p.key}") for p, where in problems.values()])
    return [PlannedRun(i, line, cfg) for i, (line, cfg) in enumerate(zip(lines, found, strict=True), 1)]


def _loaded(line: Line, ranks: int | None, machine: bool) -> Config | ConfigError:
    try:
        if line.problem:
            raise ConfigError([Problem("words", MISSING, line.problem)])
        asked = read(list(line.words))
        if asked.answers or asked.shows:
            raise ConfigError([Problem(" ".join(asked.flags), MISSING, "prints something, and trains nothing")])
        cfg = load(list(line.words), ranks, machine)
    except ConfigError as error:
        return error
    problems = [] if machine else list(unnamed(cfg))
    return ConfigError(problems) if problems else cfg


def _places(origins: list[str]) -> str:
    places = list(dict.fromkeys(origins))
    return places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")


def write_words(path: str, number: str) -> None:
    lines = read_runs(Path(path))
    if not 1 <= int(number) <= len(lines):
        raise UserError(f"{path} has {len(lines)} runs, and this is task {number}. Submit --array=1-{len(lines)}")
    sys.stdout.write("".join(f"{word}\0" for word in lines[int(number) - 1].words))


if __name__ == "__main__":
    sys.exit(command(lambda: write_words(*sys.argv[1:])))
