"""Pre-tokenises a source: writes one token shard for each of its shards, in the folder that ``tokens.py`` describes.

A shard is written to a temporary file and renamed, the main process notes it in a journal, and the manifest is written
last. So a kill at any point leaves finished shards, which the same command keeps if their checksums match, and perhaps
temporary files, which it removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlr_pretrain.data.documents import text_chunks, tokenise
from dlr_pretrain.data.sources import TextSource
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.data.tokens import (
    FORMAT,
    MANIFEST,
    READ_BYTES,
    SPLITS,
    TOKENIZER,
    Entry,
    TokenSource,
    file_name,
    layout,
)
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably

JOURNAL = "unfinished.json"
AGAIN = "Fix this and start again: finished shards are kept"


class Job(NamedTuple):
    """A shard to make, or to keep if its file is as ``noted``."""

    path: Path  # of the token shard
    shard: str  # of the source
    noted: Entry | None


@dataclass
class Progress:
    """How much of the preparation is done."""

    shards: int
    finished: int = 0
    kept: int = 0  # finished shards that were there before
    documents: int = 0  # tokenised by this command
    tokens: int = 0


def prepare(
    source: TextSource, tokenizer: Tokenizer, output: Path, workers: int, report: Callable[[Progress], None]
) -> TokenSource:
    """Tokenise ``source`` into ``output`` with ``workers`` processes; if 1, in this process.

    Raises UserError if the folder holds something else, the input is unreadable or the output cannot be written.
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
    progress = Progress(sum(map(len, shards.values())))
    try:
        with _alone(output):
            noted = _noted(output, head)
            write_durably(output / JOURNAL, json.dumps(head | {"noted": noted}))
            tokenizer.save(output / TOKENIZER)
            jobs = {split: list(_jobs(output, split, names, noted)) for split, names in shards.items()}
            everything = [job for own in jobs.values() for job in own]
            report(progress)
            for job, entry, kept in _completed(source, output / TOKENIZER, everything, workers):
                progress.finished += 1
                progress.kept += kept
                if not kept:
                    progress.documents += entry.documents
                    progress.tokens += entry.tokens
                    noted[job.path.name] = asdict(entry)
                    write_durably(output / JOURNAL, json.dumps(head | {"noted": noted}))
                report(progress)
            totals = {name: sum(noted[job.path.name][name] for job in everything) for name in ("documents", "tokens")}
            entries = {split: [noted[job.path.name] for job in own] for split, own in jobs.items()}
            write_durably(output / MANIFEST, json.dumps(head | totals | {"shards": entries}, indent=1))
            (output / JOURNAL).unlink()
            result = TokenSource(output)
            result.remember()
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}. {AGAIN}") from error
    return result


def _jobs(output: Path, split: str, shards: tuple[str, ...], noted: dict[str, dict]) -> Iterator[Job]:
    for i, shard in enumerate(shards):
        name = file_name(split, i, len(shards))
        entry = Entry(**noted[name]) if name in noted else None
        yield Job(output / name, shard, entry if entry and entry.source == shard else None)


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Create the folder if needed and hold it for this process alone; removes temporary files before and after."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{output}: another command is preparing it. Wait for it, or name another folder") from None
        except OSError:  # a file system without locks, such as some Lustre and NFS mounts
            pass
        try:
            _sweep(output)
            yield
        finally:
            _sweep(output)


def _sweep(output: Path) -> None:
    for draft in output.glob(".*.tokens.*"):
        draft.unlink()


def _noted(output: Path, head: dict) -> dict[str, dict]:
    """The entries of the shards that are already there; raises UserError if the folder holds anything else."""
    for path in (output / JOURNAL, output / MANIFEST):
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_bytes())
            about = [(one["format"], one["tokenizer"], one["source"]["fingerprint"]) for one in (found, head)]
            description = found["source"]["description"]
            if path.name == JOURNAL:
                noted = found["noted"]
            else:
                noted = {file_name(split, i, len(own)): entry
                         for split, own in found["shards"].items() for i, entry in enumerate(own)}  # fmt: skip
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error!r}). Delete it, and all shards are made again") from error
        if about[0] != about[1]:
            rule = f"holds the tokens of another source, tokenizer or format ({description})"
            raise UserError(f"{output}: {rule}. Name another folder, or delete this one")
        return noted
    strangers = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
    if strangers:
        rule = f"is not empty (it has {strangers[0]}) and no folder of tokens"
        raise UserError(f"{output}: {rule}. Name a new folder")
    return {}


# ----------------------------------------------------------------------------------------------------
# Worker processes, and what they do


def _completed(source: TextSource, tokenizer: Path, jobs: list[Job], workers: int) -> Iterator[tuple[Job, Entry, bool]]:
    """Each job with its entry as it is done, and whether the shard was there.

    Workers end when this process does, however it ends.
    """
    if workers == 1:
        opened = load_tokenizer(tokenizer)
        yield from ((job, *_complete(source, opened, job)) for job in jobs)
        return
    # The fork server has none of this process's threads; where there is none, processes start anew.
    has_server = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if has_server else "spawn")
    others = multiprocessing.active_children()
    with ProcessPoolExecutor(min(workers, len(jobs)), context, _start_worker, (source, tokenizer)) as pool:
        try:
            waiting = {pool.submit(_work, job): job for job in jobs}
            for done in as_completed(waiting):
                yield waiting[done], *done.result()
        except BaseException as error:
            for process in set(multiprocessing.active_children()).difference(others):
                process.kill()  # nobody waits for shards that are half made
            if isinstance(error, BrokenProcessPool):
                fix = "Use fewer --workers if memory ran out"
                raise UserError(f"a worker process ended unexpectedly. {fix}; finished shards are kept") from None
            raise


_worker: list = []  # the source and the tokenizer of a worker process


def _start_worker(source: TextSource, tokenizer: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C

    def end_with_parent() -> None:
        wait([multiprocessing.parent_process().sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker.extend((source, load_tokenizer(tokenizer)))


def _work(job: Job) -> tuple[Entry, bool]:
    return _complete(*_worker, job)


def _complete(source: TextSource, tokenizer: Tokenizer, job: Job) -> tuple[Entry, bool]:
    """Make a shard, or keep it; whether it was kept."""
    if job.noted is not None and _is_sound(job.path, job.noted):
        return job.noted, True
    return _write(source, tokenizer, job), False


def _is_sound(path: Path, entry: Entry) -> bool:
    try:
        with path.open("rb") as file:
            sized = path.stat().st_size == entry.bytes
            return sized and hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    except OSError:
        return False


def _write(source: TextSource, tokenizer: Tokenizer, job: Job) -> Entry:
    """Write a token shard to a temporary file, and rename that once it is on the disk."""
    draft = job.path.with_name(f".{job.path.name}.{os.getpid()}")
    lengths, characters, documents = [np.empty(0, np.int64)], [np.empty(0, np.uint32)], 0
    try:
        with _Hashed(draft) as file:
            for texts in text_chunks(source.read(job.shard)):
                there = np.array([text is not None for text in texts])
                counted = np.zeros(len(texts), np.int64)
                if there.any():
                    tokens, starts = tokenise([text for text in texts if text is not None], tokenizer)
                    file.write(tokens)
                    counted[there] = np.diff(starts, append=len(tokens))
                lengths.append(counted)
                characters.append(np.array([len(text or "") for text in texts], np.uint32))
                documents += int(there.sum())
            offsets = np.append(0, np.cumsum(np.concatenate(lengths)))
            rows, total = len(offsets) - 1, int(offsets[-1])
            file.write(np.zeros(layout(rows, total, tokenizer.vocab_size)[0] - file.size, np.uint8))
            file.write(offsets)
            file.write(np.concatenate(characters))
        os.replace(draft, job.path)
    except OSError as error:
        raise UserError(f"{job.path}: cannot be written ({error.strerror}). {AGAIN}") from error
    return Entry(job.shard, rows, documents, total, file.size, file.digest.hexdigest())


class _Hashed:
    """A file of little-endian arrays, with a checksum of what is written; closing it flushes it to the disk."""

    def __init__(self, path: Path):
        self.digest, self.size = hashlib.sha256(), 0
        self._file = path.open("wb", buffering=READ_BYTES)

    def write(self, array: np.ndarray) -> None:
        content = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        self._file.write(content)
        self.digest.update(content)
        self.size += len(content)

    def __enter__(self) -> _Hashed:
        return self

    def __exit__(self, failed: type | None, *_) -> None:
        with self._file:
            if failed is None:
                self._file.flush()
                os.fsync(self._file.fileno())
