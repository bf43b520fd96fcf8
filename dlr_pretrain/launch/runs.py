"""A table of runs: one checked configuration for each, from overrides with several values, a runs file, or both.

A runs file has one run per line: the arguments of ``train.py``, quoted as for a shell but not expanded by one. Lines
that begin with ``#`` are comments.

    python -m dlr_pretrain.launch.runs FILE N     prints the arguments of the N-th run, each followed by a zero byte
"""

import multiprocessing
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.config.command_line import jobs, key_of, read, session
from dlr_pretrain.util.errors import UserError, command, first_line
from dlr_pretrain.util.files import new_pool
from dlr_pretrain.util.process import cores

USELESS = ("no such key", "would be ignored")  # how problems with overrides that a run cannot use begin
Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True)
class Line:
    """The overrides of one run.

    ``origin`` says where they were written, for messages. ``shared`` holds the keys that the whole table was given; a
    run that lacks such a key goes without it.
    """

    origin: str
    words: tuple[str, ...]
    shared: frozenset[str] = frozenset()

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
        return Path(str(self.cfg.run.dir))


def read_table(words: Sequence[str]) -> list[Line]:
    """The runs that a command line names by overrides with several values, by a runs file, or by both."""
    files = [word for word in words if "=" not in word and not word.startswith("~")]
    lines = expand([word for word in words if word not in files])
    if len(files) > 1:
        raise UserError(f"{files[1]}: a second list of runs. Write overrides as key=value")
    return combine(read_lines(Path(files[0])), lines) if files else lines


def read_lines(path: Path) -> list[Line]:
    """The runs of a runs file, in the order of its lines."""
    lines = []
    try:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not text.lstrip().startswith("#") and (words := tuple(shlex.split(text))):
                lines.append(Line(f"{path}:{number}", words))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as a list of runs: {first_line(error)}") from None
    except ValueError as error:
        raise UserError(f"{path}:{number}: {str(error).lower()}: {text.strip()}") from None
    if not lines:
        raise UserError(f"{path} holds no run. Write the arguments of train.py, one run per line")
    return lines


def expand(words: Sequence[str]) -> list[Line]:
    """The runs of a sweep in Hydra's grammar, ``["scale=60m,130m", "seed=1,2"]``, in the order of ``train.py -m``."""
    asked = read(["-m", *words])
    if asked.problems:
        raise ConfigError(asked.problems)
    flags = [flag for flag in asked.flags if flag != "-m"]
    with session():
        expanded = [(*flags, *(word.lstrip("+") for word in job)) for job in jobs(asked.words)]
    return [Line(shlex.join(words), words) for words in expanded]


def combine(lines: list[Line], others: list[Line], axes: Collection[str] | None = None) -> list[Line]:
    """Each of ``lines`` with the overrides of each of ``others``.

    An override of a key in ``axes`` (None: of a key that the line sets itself) selects the lines with this value. Any
    other replaces the line's own, and applies to the runs that have its key: see ``load_runs``.
    """
    combined, asked = [], set()
    for line in lines:
        by_key = {key_of(word): word.lstrip("+") for word in line.words}
        for other in others:
            selects = [word for word in other.words if key_of(word) in (by_key if axes is None else axes)]
            asked |= {*selects}
            if all(by_key.get(key_of(word)) == word for word in selects):
                more = [word for word in other.words if word not in selects]
                shared = frozenset(map(key_of, more))
                remaining = [word for word in line.words if key_of(word) not in shared]
                combined.append(replace(line, words=(*remaining, *more), shared=line.shared | shared))
    if not combined:
        raise UserError(f"no run of the table has {' and '.join(sorted(asked))}")
    return combined


def load_runs(lines: list[Line], machine: bool = False) -> list[PlannedRun]:
    """The runs, each checked as ``train.py`` checks it.

    With ``machine``, this machine will train each in one process, so its files, packages and compiler are checked, too.
    Without, a job with an unknown number of ranks will train them. A run leaves out shared overrides that it cannot
    use. Raises one ConfigError with every problem, each named at its first line; a shared override that no run uses is
    a problem, and so are two lines with one run directory.
    """
    loaded = map_on_cores(partial(_load, machine=machine), lines, fewest=17)
    problems: dict[str, Problem] = {}
    first: dict[Path, Line] = {}
    used = {key_of(word) for line, _, _ in loaded for word in line.words}
    for given, (line, answer, left_out) in zip(lines, loaded, strict=True):
        if unused := [problem for problem in left_out if problem.key not in used]:
            answer = ConfigError(unused)
        if isinstance(answer, Config):
            folder = str(answer.run.dir)
            if (same := first.setdefault(Path(folder).resolve(), line)) is not line:
                rule = f"is the run directory of {same.origin}, too"
                answer = ConfigError([Problem("run.dir", folder, rule, "Leave one of them out")])
        for problem in answer.problems if isinstance(answer, ConfigError) else ():
            problems.setdefault(str(problem), replace(problem, key=f"{given.origin}: {problem.key}"))
    if problems:
        raise ConfigError(list(problems.values()))
    return [PlannedRun(i, line, cfg) for i, (line, cfg, _) in enumerate(loaded, 1) if isinstance(cfg, Config)]


def map_on_cores(function: Callable[[Given], Found], items: Sequence[Given], fewest: int) -> list[Found]:
    """``function`` of each item, in one process for fewer than ``fewest`` items, because starting more takes time."""
    if len(items) < fewest:
        return list(map(function, items))
    with new_pool(ProcessPoolExecutor, min(16, cores()), multiprocessing.get_context("fork")) as pool:
        return list(pool.map(function, items))


def _load(line: Line, machine: bool) -> tuple[Line, Config | ConfigError, list[Problem]]:
    """The line without the shared overrides that its run cannot use, its configuration or error, and their problems."""
    left_out: list[Problem] = []
    while True:
        try:
            return line, load(list(line.words), 1 if machine else None, machine), left_out
        except ConfigError as error:
            useless = [p for p in error.problems if p.key in line.shared and p.rule.startswith(USELESS)]
            if not useless:
                return line, error, left_out
            left_out += useless
            keys = {problem.key for problem in useless}
            line = replace(line, words=tuple(word for word in line.words if key_of(word) not in keys))


def write_words(path: str, number: str) -> None:
    lines = read_lines(Path(path))
    if not 1 <= int(number) <= len(lines):
        raise UserError(f"{path} has {len(lines)} runs, and this is task {number}. Submit --array=1-{len(lines)}")
    sys.stdout.write("".join(f"{word}\0" for word in lines[int(number) - 1].words))


if __name__ == "__main__":
    sys.exit(command(lambda: write_words(*sys.argv[1:])))
