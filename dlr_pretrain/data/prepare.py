"""Pre-tokenises a source: writes one token shard for each of its shards, in the folder that ``tokens.py`` describes.

The ids of a shard are written and renamed first, its rows after them, and the manifest last. So a kill at any point
leaves finished shards, which the same command keeps, and perhaps temporary files, which its end removes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from dlr_pretrain.data.documents import CHUNK_CHARACTERS, CHUNK_DOCUMENTS, chunks, token_dtype, tokenise
from dlr_pretrain.data.sources import TextSource
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.data.tokens import (
    FORMAT,
    INT64,
    MANIFEST,
    ROWS,
    SPLITS,
    TOKENIZER,
    TOKENS,
    Entry,
    TokenSource,
    file_name,
    mapped,
)
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import sync, write_durably

UNFINISHED = "unfinished.json"  # the manifest's beginning, until the manifest is written
AGAIN = "Fix this and start again: finished shards are kept"
Job = tuple[Path, str]  # the token shard to make, and the name of the source's shard


def prepare(
    source: TextSource, tokenizer: Tokenizer, output: Path, workers: int, report: Callable[[Entry, bool], None]
) -> TokenSource:
    """Tokenise ``source`` into ``output`` with ``workers`` processes; if 1, in this process.

    ``report`` receives each finished shard, and whether it was there before. Raises UserError if the folder holds
    something else, the input is unreadable or the output cannot be written.
    """
    head = {
        "format": FORMAT,
        "source": {"description": source.describe(), "fingerprint": source.fingerprint},
        "tokenizer": {
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eos_id": tokenizer.eos_id,
            "unknown_share": source.unknown_share(tokenizer),
        },
    }
    shards = dict(zip(SPLITS, (source.train_shards, source.validation_shards), strict=True))
    jobs = [(output / file_name(split, i, len(own)), own[i]) for split, own in shards.items() for i in range(len(own))]
    entries: list[dict] = []
    try:
        _claim(output, head)
        tokenizer.save(output / TOKENIZER)
        for entry, was_there in _entries(source, output / TOKENIZER, jobs, workers):
            entries.append(asdict(entry))
            report(entry, was_there)
        count = len(source.train_shards)
        made = dict(zip(SPLITS, (entries[:count], entries[count:]), strict=True))
        totals = {name: sum(entry[name] for entry in entries) for name in ("documents", "tokens")}
        write_durably(output / MANIFEST, json.dumps(head | totals | {"shards": made}, indent=1))
        for path in (output / UNFINISHED, *output.glob(".*.tokens*")):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}. {AGAIN}") from error
    return TokenSource(output)


def _claim(output: Path, head: dict) -> None:
    """Note in the folder what it will hold. Raises UserError if it holds anything else."""
    output.mkdir(parents=True, exist_ok=True)
    found = next((path for path in (output / MANIFEST, output / UNFINISHED) if path.exists()), None)
    if found is None:
        strangers = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
        if strangers:
            rule = f"is not empty (it has {strangers[0]}) and no folder of tokens"
            raise UserError(f"{output}: {rule}. Name a new folder")
        write_durably(output / UNFINISHED, json.dumps(head))
        return
    try:
        there = json.loads(found.read_bytes())
        same = all(there[name] == head[name] for name in ("format", "tokenizer"))
        same = same and there["source"]["fingerprint"] == head["source"]["fingerprint"]
        description = there["source"]["description"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{found}: damaged ({error!r}). Delete the folder, or name another") from error
    if not same:
        rule = f"holds the tokens of another source, tokenizer or format ({description})"
        raise UserError(f"{output}: {rule}. Name another folder, or delete this one")


def _entries(source: TextSource, tokenizer: Path, jobs: list[Job], workers: int) -> Iterator[tuple[Entry, bool]]:
    """The entry of each job, in order, and whether the shard was there."""
    if workers == 1:
        _start_worker(source, tokenizer)
        yield from map(_complete, jobs)
        return
    # The fork server has none of this process's threads; where there is none, processes start anew.
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_server else "spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), context, _start_worker, (source, tokenizer)) as pool:
        try:
            yield from pool.map(_complete, jobs)
        except BrokenProcessPool:
            fix = "Use fewer --workers if memory ran out"
            raise UserError(f"a worker process ended unexpectedly. {fix}; finished shards are kept") from None


_worker: list = []  # the source and the tokenizer of this process


def _start_worker(source: TextSource, tokenizer: Path) -> None:
    _worker[:] = source, load_tokenizer(tokenizer)
    if (parent := multiprocessing.parent_process()) is not None:  # a worker ends when its parent does, however it ends

        def end() -> None:
            wait([parent.sentinel])
            os._exit(1)

        threading.Thread(target=end, daemon=True).start()


def _complete(job: Job) -> tuple[Entry, bool]:
    """Make a shard, or keep it; whether it was there."""
    path, shard = job
    source, tokenizer = _worker
    try:
        rows = mapped(path.with_suffix(ROWS), INT64).reshape(-1, 2)
        mapped(path, np.dtype(token_dtype(tokenizer.vocab_size)), int(rows[-1, 0]))
        was_there = True
    except (OSError, ValueError, IndexError):
        rows, was_there = _write(source, shard, tokenizer, path), False
    return Entry(shard, len(rows) - 1, int(np.count_nonzero(np.diff(rows[:, 0]))), int(rows[-1, 0])), was_there


def _write(source: TextSource, shard: str, tokenizer: Tokenizer, path: Path) -> np.ndarray:
    """Write a token shard, and return its rows."""
    rows = [np.zeros((1, 2), np.int64)]  # (tokens, characters) of each
    drafts = [path.with_name(f".{path.name}.{os.getpid()}{suffix}") for suffix in (TOKENS, ROWS)]
    with drafts[0].open("wb") as file:
        for texts in chunks(source.read(shard), CHUNK_DOCUMENTS, CHUNK_CHARACTERS):
            counted = np.array([(0, len(text or "")) for text in texts], np.int64)
            if found := [text for text in texts if text is not None]:
                tokens, starts = tokenise(found, tokenizer)
                counted[[text is not None for text in texts], 0] = np.diff(starts, append=len(tokens))
                file.write(tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes())
            rows.append(counted)
    written = np.concatenate(rows)
    written[:, 0] = written[:, 0].cumsum()
    drafts[1].write_bytes(written.astype(INT64, copy=False).tobytes())
    for draft, final in zip(drafts, (path, path.with_suffix(ROWS)), strict=True):
        sync(draft)
        os.replace(draft, final)
    return written
