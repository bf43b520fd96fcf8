"""How fast the data package is, on one core: preparing, tokenising, batches from text and from tokens, resuming.

Rates are given by wall-clock time and by processor time, which is steadier on a machine that others use as well.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.data.loader import BATCHES_AHEAD, TrainLoader
from dlr_pretrain.data.prepare import prepare
from dlr_pretrain.data.sources import open_source
from dlr_pretrain.data.tokenizer import open_tokenizer
from dlr_pretrain.data.tokens import TokenSource

LATE = 50  # steps before the position at which loaders resume


def measures(cfg: Config, tokens: int, rounds: int) -> Iterator[dict]:
    """Each quantity of the text source that ``cfg`` names: name, unit, values of the rounds, and the same by processor
    time. A round of a loader takes ``tokens`` real tokens."""
    source = open_source(cfg, print)
    tokenizer = open_tokenizer(cfg, source)
    with tempfile.TemporaryDirectory() as scratch:

        def loader(packing: str, of, state: dict | None = None) -> closing:
            data = replace(cfg.data, packing=packing)
            return closing(TrainLoader(replace(cfg, data=data), of, tokenizer, 0, 1, state))

        made, *took = timed(lambda: prepare(source, tokenizer, Path(scratch, "tokens"), 1, lambda _: None))
        total = sum(entry.tokens for entry in made.entries.values())
        yield rate("prepare_data, one worker", [(total / 1e6, *took)])
        documents = (text for shard in source.train_shards for text in source.read(shard))
        texts = list(islice(documents, max(1, tokens // 500)))
        alone = [timed(lambda: sum(len(ids) + 1 for ids in tokenizer.encode(texts)) / 1e6) for _ in range(rounds)]
        yield rate("tokenizer alone", alone)
        with loader("packed", made) as batches:
            state = next(islice(batches, LATE, None)).state
        for name, packing, of, start in (
            ("text, packed", "packed", source, state),
            ("tokens, packed", "packed", made, None),
            ("tokens, pad", "pad", made, None),
        ):
            with loader(packing, of, start) as batches:
                yield rate(f"batches from {name}", [loading(batches, tokens) for _ in range(rounds)])
        for name, of in (("tokens", lambda: TokenSource(made.root)), ("text", lambda: open_source(cfg))):
            first = []
            for _ in range(rounds):
                start = time.perf_counter()
                with loader("packed", of(), state) as batches:
                    next(batches)
                first.append(time.perf_counter() - start)
            yield {"name": f"resume of {name}, to the first batch", "unit": "s", "values": first}


def timed(act: Callable) -> tuple:
    """The value of ``act``, the seconds that it took, and the seconds of processor time."""
    wall, busy = time.perf_counter(), time.process_time()
    result = act()
    return result, time.perf_counter() - wall, time.process_time() - busy


def rate(name: str, rounds: list[tuple[float, float, float]]) -> dict:
    """Millions of tokens per second of each round, from (millions, wall seconds, processor seconds)."""
    by_clock, by_processor = ([r[0] / r[i] for r in rounds] for i in (1, 2))
    return {"name": name, "unit": "M tokens/s", "values": by_clock, "processor": by_processor}


def loading(batches: TrainLoader, tokens: int) -> tuple[float, float, float]:
    """Take batches with at least ``tokens`` real tokens: millions of them, wall seconds, processor seconds."""
    for _ in range(BATCHES_AHEAD + 1):  # were read ahead, and must not count
        next(batches)
    return timed(lambda: take(batches, tokens))


def take(batches: TrainLoader, tokens: int) -> float:
    taken = 0
    while taken < tokens:
        taken += next(batches).real_tokens
    return taken / 1e6
