"""Measures how fast a data source yields batches on one core, and how long the first batch takes after a resume.

Rates are given by wall-clock time and by processor time, which varies less on a shared machine.
"""

import time
from collections.abc import Iterator
from contextlib import closing

from dlr_pretrain.config import Config
from dlr_pretrain.data.loader import PREFETCHED_BATCHES, TrainLoader
from dlr_pretrain.data.prepare import tokenised_once
from dlr_pretrain.data.sources import open_source
from dlr_pretrain.data.tokenizer import open_tokenizer


def measures(cfg: Config, tokens: int, rounds: int) -> Iterator[dict]:
    """Yields each quantity: its name, its unit, and its value in each round, by wall-clock and by processor time. A
    round takes ``tokens`` real tokens; resumes start where the last round ended."""
    text = open_source(cfg, print)
    tokenizer = open_tokenizer(cfg, text)
    source = tokenised_once(text, tokenizer, cfg.num_streams, print)
    by_clock, by_processor, resumed = [], [], []
    with closing(TrainLoader(cfg, source, tokenizer, 0, 1, None)) as batches:
        for _ in range(rounds):
            for _ in range(PREFETCHED_BATCHES + 1):  # these are prefetched before the clock starts
                batches.take()
            wall, busy, taken = time.perf_counter(), time.process_time(), 0
            while taken < tokens:
                batch = batches.take()
                taken += batch.real_tokens
            by_clock.append(taken / 1e6 / (time.perf_counter() - wall))
            by_processor.append(taken / 1e6 / (time.process_time() - busy))
    name = f"batches of {cfg.data.source}, {cfg.data.packing}"
    yield {"name": name, "unit": "M real tokens/s", "values": by_clock, "processor": by_processor}
    for _ in range(rounds):
        start = time.perf_counter()
        with closing(TrainLoader(cfg, source, tokenizer, 0, 1, batch.positions)) as batches:
            batches.take()
        resumed.append(time.perf_counter() - start)
    yield {"name": "resume, to the first batch", "unit": "s", "values": resumed}
