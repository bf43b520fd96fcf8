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
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np

from dlr_pretrain.data.documents import CHUNK_CHARACTERS, CHUNK_DOCUMENTS, chunks, tokenise
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
    TokenSource,
    file_names,
    open_shard,
)
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import sync, write_durably

UNFINISHED = "unfinished.json"  # the manifest, until all shards are there
AGAIN = "Fix this and start again: finished shards are kept"
Job = tuple[str, Path]  # the name of the source's shard, and the token shard to make


def prepare(
    source: TextSource, tokenizer: Tokenizer, output: Path, workers: int, report: Callable[[bool], None]
) -> TokenSource:
    """Tokenise ``source`` into ``output`` with ``workers`` processes; if 1, in this process.

    ``report`` is told of each shard in order whether it was there before. Raises UserError if the folder holds
    something else, the input is unreadable or the output cannot be written.
    """
    shards = dict(zip(SPLITS, (source.train_shards, source.validation_shards), strict=True))
    manifest = {
        "format": FORMAT,
        "source": {"description": source.describe(), "fingerprint": source.fingerprint},
        "tokenizer": {
            "sha256": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "unknown_share": source.unknown_share(tokenizer),
        },
        "shards": {split: len(own) for split, own in shards.items()},
    }
    jobs = [
        (name, output / made)
        for split, own in shards.items()
        for name, made in zip(own, file_names(split, len(own)), strict=True)
    ]
    try:
        _claim(output, manifest)
        tokenizer.save(output / TOKENIZER)
        for was_there in _completed(source, output / TOKENIZER, jobs, workers):
            report(was_there)
        write_durably(output / MANIFEST, json.dumps(manifest, indent=1))
        for path in (output / UNFINISHED, *output.glob(f".*{TOKENS}"), *output.glob(f".*{ROWS}")):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}. {AGAIN}") from error
    return TokenSource(output)


def _claim(output: Path, manifest: dict) -> None:
    """Note in the folder what it will hold. Raises UserError if it holds anything else."""
    output.mkdir(parents=True, exist_ok=True)
    found = next((path for path in (output / MANIFEST, output / UNFINISHED) if path.exists()), None)
    if found is None:
        strangers = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
        if strangers:
            rule = f"is not empty (it has {strangers[0]}) and no folder of tokens"
            raise UserError(f"{output}: {rule}. Name a new folder")
        write_durably(output / UNFINISHED, json.dumps(manifest))
        return
    try:
        there = json.loads(found.read_bytes())
        description = there["source"].pop("description")  # names the folder, which may have moved
        same = there == manifest | {"source": {"fingerprint": manifest["source"]["fingerprint"]}}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{found}: damaged ({error!r}). Delete the folder, or name another") from error
    if not same:
        rule = f"holds the tokens of another source, tokenizer or format ({description})"
        raise UserError(f"{output}: {rule}. Name another folder, or delete this one")


def _completed(source: TextSource, tokenizer: Path, jobs: list[Job], workers: int) -> Iterator[bool]:
    """Do each job; whether the shard was there, in order."""
    if workers == 1:
        _start_worker(source, tokenizer)
        yield from map(_complete, jobs)
        return
    # The fork server has none of this process's threads. It imports once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
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


def _complete(job: Job) -> bool:
    """Make a shard, unless it is there."""
    (shard, path), (source, tokenizer) = job, _worker
    try:
        open_shard(path, tokenizer.vocab_size)
    except (OSError, ValueError):
        _write(source, shard, tokenizer, path)
        return False
    return True


def _write(source: TextSource, shard: str, tokenizer: Tokenizer, path: Path) -> None:
    """Write a token shard, each of its files to a temporary one that is renamed once it is on the disk."""
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
