"""A rank's batches: its share of the streams, read ahead by one background thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data.packing import SequenceReader, packed_runs, padded_runs
from dlr_pretrain.data.sources import Source
from dlr_pretrain.data.streams import DocumentStream, Place
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.errors import UserError

BATCHES_AHEAD = 8  # hides the moments in which a stream reads its next block
CLOSE_SECONDS = 5.0  # a read that hangs in the network is not waited for: the thread is a daemon


@dataclass(frozen=True)
class Batch:
    """A rank's part of one global batch."""

    inputs: torch.Tensor  # int64 [local_batch, seq_len]
    targets: torch.Tensor  # int64 [local_batch, seq_len], the next token, or -100 where nothing is predicted
    real_tokens: int  # input positions that are no padding
    state: dict[str, list[int]]  # of this rank's streams: where each stands after this batch


class TrainLoader:
    """An endless iterator of ``Batch``.

    ``state`` is the union of the batches' states of all ranks at one step, from any number of ranks; None starts at
    the beginning. Rank r of W owns the streams [r V/W, (r+1) V/W) and takes the same number of sequences from each,
    so the batches of all ranks one after the other are the same global batch whatever W is.
    """

    def __init__(
        self,
        cfg: Config,
        source: Source,
        tokenizer: Tokenizer,
        rank: int,
        world_size: int,
        state: dict[str, list[int]] | None,
    ):
        share = cfg.num_streams // world_size
        own = range(rank * share, (rank + 1) * share)
        if state is not None and set(state) != {str(v) for v in range(cfg.num_streams)}:
            have = f"the checkpoint's data position has {len(state)} streams, and this run has {cfg.num_streams}"
            raise UserError(f"{have}. Resume with the train.global_batch that the run was started with")
        places = {v: Place(*state[str(v)]) if state is not None else Place() for v in own}
        batches = _batches(cfg, source, tokenizer, places)
        self._queue: queue.SimpleQueue[Batch | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(BATCHES_AHEAD)
        self._closed = threading.Event()
        self._error: Exception | None = None
        # The thread holds no reference to the loader, so that a forgotten loader stops its thread too.
        self._thread = threading.Thread(
            target=_produce, args=(batches, self._queue, self._room, self._closed), name="data", daemon=True
        )
        self._stop = weakref.finalize(self, _stop, self._thread, self._closed, self._room)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        if self._closed.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, Exception):
            self._error = item
            raise item
        self._room.release()
        return item

    def close(self) -> None:
        """Stop reading ahead; called by itself when the loader is forgotten or the interpreter ends."""
        self._stop()


def _produce(batches: Iterator[Batch], out: queue.SimpleQueue, room: threading.Semaphore, closed: threading.Event):
    try:
        while room.acquire() and not closed.is_set():
            out.put(next(batches))
    except Exception as error:  # raised again where the batch is wanted
        out.put(error)


def _stop(thread: threading.Thread, closed: threading.Event, room: threading.Semaphore) -> None:
    """End the thread, which must not be inside sentencepiece when the interpreter ends."""
    closed.set()
    room.release()
    if thread is not threading.current_thread():  # the garbage collector may run anywhere
        thread.join(CLOSE_SECONDS)


def _batches(cfg: Config, source: Source, tokenizer: Tokenizer, places: dict[int, Place]) -> Iterator[Batch]:
    """The batches of the streams in ``places``, from these positions on."""
    seq_len, readers = cfg.train.seq_len, {}
    for v, place in places.items():
        chunks = DocumentStream(source, tokenizer, cfg.data.seed, v, cfg.num_streams).chunks(place)
        if cfg.data.packing == "packed":
            runs = packed_runs(chunks, place, seq_len)
        else:
            runs = padded_runs(chunks, seq_len, tokenizer.pad_id, tokenizer.eos_id)
        readers[v] = SequenceReader(runs)
    each = cfg.train.global_batch // cfg.num_streams
    while True:
        inputs = np.empty((len(readers) * each, seq_len), np.int64)
        targets = np.empty_like(inputs)
        real_tokens, state = 0, {}
        for i, (v, reader) in enumerate(readers.items()):
            rows = slice(i * each, (i + 1) * each)
            real, state[str(v)] = reader.fill(inputs[rows], targets[rows])
            real_tokens += real
        yield Batch(torch.from_numpy(inputs), torch.from_numpy(targets), real_tokens, state)
