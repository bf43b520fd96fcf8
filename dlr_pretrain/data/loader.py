"""A rank's batches from its share of the streams, prefetched by a background thread; and the validation set.

The streams read their first rows in parallel, because each may have to wait for the network or skip most of a
compressed shard.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing.pool import ThreadPool

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from dlr_pretrain.config import Config
from dlr_pretrain.data.mixture import Mixture, divided, mixed_rows
from dlr_pretrain.data.packing import TokenRow, packed_rows, padded_documents, padded_rows
from dlr_pretrain.data.sources import Source, TextSource, naming_keys, open_validation
from dlr_pretrain.data.streams import Position, Share, Tokens, endless, token_dtype
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import Stalled, Stopped, UserError
from dlr_pretrain.util.files import new_pool

STARTING_THREADS = 16  # read the first rows of the streams
PREFETCHED_BATCHES = 8  # hide the time in which a stream reads its next block
CLOSE_SECONDS = 5.0  # longest wait for a read that hangs on the network; all threads are daemons
POLL_SECONDS = 0.5  # between checks of whether to keep waiting

Positions = dict[str, list[int]]  # of streams in the text, by the number of the stream


@dataclass(frozen=True)
class Batch:
    """A rank's part of one global batch, in narrow dtypes for the transfer; ``inputs_and_targets`` widens them."""

    tokens: torch.Tensor  # uint16 (int32 above 65,536 ids) [local_batch, seq_len + 1], padded
    lengths: torch.Tensor  # int32 [local_batch], number of tokens in each row that are not padding
    real_tokens: int  # number of input positions that are not padding
    positions: Positions  # of this rank's streams after this batch
    separator: int | None = None  # with data.mask_documents: the id that ends a document
    record: dict[str, float] = field(default_factory=dict)  # how far each source of a mixture has been read

    @classmethod
    def empty(cls, cfg: Config, rows: int) -> Batch:
        """Rows of padding, in the shapes of a real batch: any other shape would make a compiled model recompile."""
        tokens = torch.zeros((rows, cfg.train.seq_len + 1), dtype=torch.int32)
        return cls(tokens, torch.zeros(rows, dtype=torch.int32), 0, {}, 1 if cfg.data.mask_documents else None)


class TrainLoader:
    """Yields batches indefinitely.

    ``positions`` is the union of ``Batch.positions`` over all ranks at one step, for any number of ranks; None starts
    at the beginning. Rank r of W owns the streams [r V/W, (r+1) V/W) and takes the same number of sequences from each.
    So the batches of all ranks, joined in rank order, are the same global batch for any W.
    """

    def __init__(
        self,
        cfg: Config,
        source: Source,
        tokenizer: Tokenizer,
        rank: int,
        world_size: int,
        positions: Positions | None = None,
    ):
        count = cfg.num_streams // world_size
        streams = range(rank * count, (rank + 1) * count)
        own = {v: positions[str(v)] if positions is not None else [] for v in streams}
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(PREFETCHED_BATCHES)
        self._closed = threading.Event()
        self._batches = _batches(cfg, source, tokenizer, own, self._closed)
        self._thread = threading.Thread(target=self._produce, name="data", daemon=True)
        self._thread.start()

    def take(self, stop: Callable[[], bool] = lambda: False, timeout: float = math.inf) -> Batch:
        """The next batch.

        Raises Stopped if ``stop()`` is true while no batch is ready, and Stalled if none is ready within ``timeout``
        seconds. A later call may still return the batch.
        """
        since = time.monotonic()
        while True:
            try:
                item = self._queue.get(timeout=POLL_SECONDS)
                break
            except queue.Empty:
                if stop():
                    raise Stopped("asked to stop while waiting for data") from None
                if time.monotonic() - since > timeout:
                    rule = f"no training data for {timeout:.0f} s: the disk or hub that holds it does not answer"
                    raise Stalled(f"{rule}. The same command continues once it does") from None
        if isinstance(item, Exception):
            self._queue.put(item)  # for a later call
            raise item
        return item

    def close(self) -> None:
        """Stop the thread. It must not be inside sentencepiece when the interpreter ends."""
        self._closed.set()
        with suppress(queue.Empty):
            self._queue.get_nowait()  # the thread may be waiting for room
        self._thread.join(CLOSE_SECONDS)

    def _produce(self) -> None:
        try:
            while not self._closed.is_set():
                self._queue.put(next(self._batches))
        except Exception as error:  # ``take`` raises it again
            self._queue.put(error)


def _read_first_rows(rows: dict[int, Iterator[TokenRow]], closed: threading.Event) -> None:
    """Read the first row of every stream in parallel. The first error ends all reading and is raised."""
    failed = threading.Event()

    def work(v: int) -> None:
        if not closed.is_set() and not failed.is_set():
            rows[v] = chain([next(rows[v])], rows[v])

    with new_pool(ThreadPool, min(STARTING_THREADS, len(rows))) as pool:  # its daemons do not keep the process alive
        done = pool.imap_unordered(work, list(rows))
        try:
            for _ in done:
                pass
        except Exception:
            failed.set()
            for _ in rows:
                with suppress(Exception):
                    done.next(CLOSE_SECONDS / len(rows))
            raise


def _rows_of_stream(
    cfg: Config, source: Source, tokenizer: Tokenizer, v: int, position: Sequence[int]
) -> Iterator[TokenRow]:
    """The rows of stream ``v`` from ``position`` on; an empty one is the beginning."""
    seq_len, seed, streams = cfg.train.seq_len, cfg.data.seed, cfg.num_streams
    if isinstance(source, Mixture):
        places = zip(source.sources.values(), divided(position, len(source.sources))[1], strict=True)
        rows = [_rows_of_stream(cfg, one, tokenizer, v, place) for one, place in places]
        return mixed_rows(source, rows, position, seed, v, streams)
    start, packed = Position(*position), cfg.data.packing == "packed"
    if not packed:
        tokenizer = tokenizer.beginnings(seq_len + 1)  # the token after a row shows that the document is cut
    chunks = endless(source, tokenizer, Share(seed, v, start.epoch, streams, packed), start)
    return packed_rows(chunks, start, seq_len) if packed else padded_rows(chunks, seq_len, tokenizer)


def _batches(
    cfg: Config, source: Source, tokenizer: Tokenizer, positions: dict[int, list[int]], closed: threading.Event
) -> Iterator[Batch]:
    """Yields batches of equally many rows from each stream, from ``positions`` on."""
    rows = {v: _rows_of_stream(cfg, source, tokenizer, v, position) for v, position in positions.items()}
    _read_first_rows(rows, closed)
    seq_len, streams, each = cfg.train.seq_len, list(rows), cfg.train.global_batch // cfg.num_streams
    separator = tokenizer.eos_id if cfg.data.mask_documents else None
    while True:
        tokens = np.empty((len(rows) * each, seq_len + 1), token_dtype(tokenizer.vocab_size))
        lengths, after = np.empty(len(tokens), np.int32), {}
        for number in range(len(tokens)):
            v = streams[number // each]
            tokens[number], lengths[number], position = next(rows[v])
            after[str(v)] = list(position)
        real = int(np.minimum(lengths, seq_len).sum())
        record = source.progress(cfg, after[str(streams[0])][0]) if isinstance(source, Mixture) else {}
        yield Batch(torch.from_numpy(tokens), torch.from_numpy(lengths), real, after, separator, record)


@dataclass(frozen=True)
class ValidationSet:
    """Validation text as rows of seq_len + 1 tokens for ``inputs_and_targets``."""

    tokens: np.ndarray  # uint16 (int32 above 65,536 ids) [n, seq_len + 1], padded
    lengths: np.ndarray  # int32 [n], number of tokens in each row that are not padding
    real_tokens: int  # number of input positions that are not padding
    separator: int | None = None  # the id that ends a document, if documents are scored separately: see ``separated``
    text: str = ""  # the fingerprint of its source, and how much of it was read
    by_source: Mapping[str, ValidationSet] = field(default_factory=dict)  # of a mixture: the sets that are joined here


def validation_sets(cfg: Config, tokenizer: Tokenizer) -> dict[str, ValidationSet]:
    """The further validation sets, ``eval.sets``, by name."""
    sets = {}
    for name, text in cfg.eval.sets.items():
        with naming_keys(f"eval.sets.{name}"):
            sets[name] = validation_set(cfg, open_validation(cfg.data, name, text), tokenizer)
    return sets


def validation_set(cfg: Config, source: Source, tokenizer: Tokenizer) -> ValidationSet:
    """The first validation documents in file order that reach ``eval.tokens`` real tokens, or else all of them.

    Packed text is cut after that many tokens. A padded document is not cut there, because it fills a sequence. The
    tokens of a mixture are split among its sources by weight. Raises UserError if there is no text.
    """
    if isinstance(source, Mixture):
        sets = {}
        for name, weight in source.weights.items():
            some = replace(cfg, eval=replace(cfg.eval, tokens=round(weight * cfg.eval.tokens)))
            with naming_keys(f"data.sources.{name}"):
                sets[name] = validation_set(some, source.sources[name], tokenizer)
        return _joined(sets)
    wanted = max(2, cfg.eval.tokens)  # a single token has no target
    seq_len, pad = cfg.train.seq_len, cfg.eval.packing == "pad"
    parts, count, has_text = [], 0, False
    for tokens, starts in source.validation(tokenizer):
        ends = np.append(starts[1:], len(tokens))
        real = count + np.cumsum(np.minimum(ends - starts, seq_len) if pad else ends - starts)
        last = min(int(np.searchsorted(real, wanted)), len(real) - 1)
        tokens, starts, count = tokens[: ends[last]], starts[: last + 1], int(real[last])
        if not pad and count > wanted:
            tokens, count = tokens[: wanted - count], wanted
        parts.append(padded_documents(Tokens(tokens, starts), seq_len, tokenizer) if pad else tokens)
        has_text = has_text or len(tokens) > len(starts)
        if count >= wanted:
            break
    if not has_text:
        raise _no_validation_text(cfg, source)
    if pad:
        rows, lengths = map(np.concatenate, zip(*parts, strict=True))
    else:
        rows, lengths = _windows(np.concatenate(parts), seq_len, tokenizer.pad_id)
    separator = tokenizer.eos_id if cfg.data.mask_documents and not pad else None
    return ValidationSet(rows, lengths, count, separator, f"{count} tokens of {source.fingerprint}")


def _joined(by_source: Mapping[str, ValidationSet]) -> ValidationSet:
    sets = list(by_source.values())
    tokens, lengths = (np.concatenate([getattr(one, name) for one in sets]) for name in ("tokens", "lengths"))
    real_tokens = sum(one.real_tokens for one in sets)
    return ValidationSet(tokens, lengths, real_tokens, sets[0].separator, by_source=by_source)


def _no_validation_text(cfg: Config, source: TextSource | TokenSource) -> UserError:
    fix = "Set data.validation_files to files with text"
    fix += ", or use a larger data.held_out" if isinstance(source, TextSource) and source.holds_out else ""
    if cfg.data.bad_rows == "skip":
        fix += f". All rows may have been left out: is data.text_key={cfg.data.text_key} right?"
    return UserError("The validation shards hold no text", ", ".join(source.validation_shards[:3]), fix)


def _windows(tokens: np.ndarray, seq_len: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed windows as in training; the last one is padded to hold all tokens."""
    count = -(-len(tokens) // seq_len)
    filled = np.full(count * seq_len + 1, pad_id, tokens.dtype)
    filled[: len(tokens)] = tokens
    lengths = np.minimum(len(tokens) - seq_len * np.arange(count), seq_len + 1)
    return sliding_window_view(filled, seq_len + 1)[::seq_len].copy(), lengths.astype(np.int32)
