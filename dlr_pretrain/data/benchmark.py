"""How fast the data package is: the measurements of ``python scripts/benchmark.py data``, on one core.

Rates are given by wall-clock time and by processor time, which is steadier on a machine that others use as well.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dlr_pretrain.config import Config
from dlr_pretrain.data.documents import text_chunks
from dlr_pretrain.data.loader import BATCHES_AHEAD, TrainLoader
from dlr_pretrain.data.prepare import prepare
from dlr_pretrain.data.shards import read_lines
from dlr_pretrain.data.sources import LocalSource, TextSource, open_source
from dlr_pretrain.data.tokenizer import Tokenizer, open_tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.process import resident_memory

RAW_CHARACTERS = 20_000_000  # of text for sentencepiece alone
STAGGER = 4  # steps between the positions of successive streams, so that 64 are spread over a block of C4
SEEK_FILES = 4
STEADY_TOKENS = 100_000_000  # over which memory must not grow


class Measure(NamedTuple):
    """One quantity with a value per round: by wall-clock time, and by processor time if that differs."""

    name: str
    unit: str
    values: list[float]
    processor: list[float] | None = None


def measures(cfg: Config, tokens: int, rounds: int) -> Iterator[Measure]:
    """All measures for the text source that ``cfg`` names; each round of a loader takes ``tokens`` real tokens."""
    source = open_source(cfg, print)
    tokenizer = open_tokenizer(cfg, source)
    with tempfile.TemporaryDirectory() as scratch:
        made, seconds, busy = timed(lambda: prepare(source, tokenizer, Path(scratch, "tokens"), 1, lambda _: None))
        total = sum(entry.tokens for entry in made.entries.values())
        yield rate("prepare_data, one worker", "M tokens/s", [(total / 1e6, seconds, busy)])
        yield from streaming(packed(cfg, "packed"), made, tokenizer, tokens, rounds)
        for packing in ("packed", "pad"):
            yield loading(packed(cfg, packing), made, tokenizer, tokens, rounds)
        yield from seeking(cfg, source, made, tokenizer, rounds)
        yield memory(packed(cfg, "packed"), made, tokenizer)


def timed(act: Callable) -> tuple:
    """The value of ``act``, the seconds that it took, and the seconds of processor time."""
    wall, busy = time.perf_counter(), time.process_time()
    result = act()
    return result, time.perf_counter() - wall, time.process_time() - busy


def rate(name: str, unit: str, rounds: list[tuple[float, float, float]]) -> Measure:
    """The amount per second of each round, from (amount, wall seconds, processor seconds)."""
    return Measure(name, unit, [a / wall for a, wall, _ in rounds], [a / busy for a, _, busy in rounds])


def packed(cfg: Config, packing: str) -> Config:
    return dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, packing=packing))


def take(loader: TrainLoader, tokens: int) -> float:
    """Take batches until they have at least ``tokens`` real tokens; returns these in millions."""
    taken = 0
    while taken < tokens:
        taken += next(loader).real_tokens
    return taken / 1e6


def drained(loader: TrainLoader) -> None:
    """Take the batches that were read ahead, so that they do not count."""
    for _ in range(BATCHES_AHEAD + 1):
        next(loader)


def staggered(cfg: Config, made: TokenSource, tokenizer: Tokenizer) -> dict[str, list[int]]:
    """A state as in a long run: streams start together, but reach the ends of their blocks at different times."""
    state: dict[str, list[int]] = {}
    with closing(TrainLoader(cfg, made, tokenizer, 0, 1, None)) as loader:
        for v, batch in enumerate(islice(loader, STAGGER - 1, None, STAGGER)):
            state[str(v)] = batch.state[str(v)]
            if len(state) == cfg.num_streams:
                return state


def streaming(cfg: Config, made: TokenSource, tokenizer: Tokenizer, tokens: int, rounds: int) -> Iterator[Measure]:
    """The rates of batches from text and of sentencepiece alone on the same source, measured alternately."""
    texts, size, source, state = [], 0, open_source(cfg), staggered(cfg, made, tokenizer)
    for some in text_chunks(text for shard in source.train_shards for text in source.read(shard)):
        texts.append(some)
        size += sum(map(len, some))
        if size > RAW_CHARACTERS:
            break

    def alone() -> float:
        return sum(len(ids) + 1 for some in texts for ids in tokenizer.encode(some)) / 1e6

    pairs = []
    for _ in range(rounds):
        raw = timed(alone)
        with closing(TrainLoader(cfg, open_source(cfg), tokenizer, 0, 1, state)) as loader:
            drained(loader)
            pairs.append((raw, timed(lambda loader=loader: take(loader, tokens))))
    yield rate("sentencepiece alone", "M tokens/s", [raw for raw, _ in pairs])
    yield rate("batches from text, packed", "M tokens/s", [batches for _, batches in pairs])
    shares = [[100 * (b[0] / b[i]) / (r[0] / r[i]) for r, b in pairs] for i in (1, 2)]
    yield Measure("batches from text", "% of sentencepiece", *shares)


def loading(cfg: Config, made: TokenSource, tokenizer: Tokenizer, tokens: int, rounds: int) -> Measure:
    taken = []
    with closing(TrainLoader(cfg, made, tokenizer, 0, 1, None)) as loader:
        for _ in range(rounds):
            drained(loader)
            taken.append(timed(lambda: take(loader, tokens)))
    return rate(f"batches from tokens, {cfg.data.packing}", "M real tokens/s", taken)


def seeking(cfg: Config, source: TextSource, made: TokenSource, tokenizer: Tokenizer, rounds: int) -> Iterator[Measure]:
    """The time from a late state to its first batch, and the rate at which a shard is skipped to its last document."""
    with closing(TrainLoader(cfg, made, tokenizer, 0, 1, None)) as loader:
        state = next(islice(loader, 50, None)).state
    first: list[float] = []
    for _ in range(rounds):
        _, seconds, _ = timed(lambda: _first(cfg, made, tokenizer, state))
        first.append(seconds)
    yield Measure("resume of tokens, to the first batch", "s", first)
    if isinstance(source, LocalSource):
        passed = []
        for shard in islice(source.train_shards, SEEK_FILES):
            path, end = source.paths[shard], made.entries[made.train_shards[source.train_shards.index(shard)]].documents
            lines, seconds, busy = timed(lambda path=path, end=end: sum(1 for _ in read_lines(path, end - 1)))
            assert lines == 1
            passed.append((path.stat().st_size / 1e6, seconds, busy))
        yield rate("resume of text, through a shard to its last document", "MB/s of its bytes", passed)


def _first(cfg: Config, made: TokenSource, tokenizer: Tokenizer, state: dict[str, list[int]]) -> None:
    with closing(TrainLoader(cfg, TokenSource(made.root), tokenizer, 0, 1, state)) as loader:
        next(loader)


def memory(cfg: Config, made: TokenSource, tokenizer: Tokenizer) -> Measure:
    """Growth of the resident memory over ``STEADY_TOKENS`` tokens, after a warm-up of a tenth as many."""
    with closing(TrainLoader(cfg, made, tokenizer, 0, 1, None)) as loader:
        take(loader, STEADY_TOKENS // 10)
        before = resident_memory()
        take(loader, STEADY_TOKENS)
        return Measure(
            f"memory after {STEADY_TOKENS // 10**6}M tokens more", "MB grown", [(resident_memory() - before) / 1e6]
        )
