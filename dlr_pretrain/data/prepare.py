"""Pre-tokenises a source: writes one token shard for each of its shards, in the folder that ``tokens.py`` describes.

A shard is written to a temporary file and renamed, the main process notes it in a journal, and the manifest is written
last. So a kill at any point leaves finished shards, which the same command keeps if their checksums match, and perhaps
temporary files, which it removes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dlr_pretrain.data.documents import text_chunks, tokenise
from dlr_pretrain.data.sources import TextSource
from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.data.tokens import (
    FORMAT,
    MANIFEST,
    MODEL,
    READ_BYTES,
    SPLITS,
    Entry,
    TokenSource,
    file_name,
    layout,
)
from dlr_pretrain.data.workers import in_processes
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_durably

JOURNAL = "unfinished.json"
PROGRESS_SECONDS = 0.5
AGAIN = "Fix this and start again: finished shards are kept"


class Job(NamedTuple):
    """A shard to make, or to keep if its file is as ``noted``."""

    name: str  # of the token shard
    shard: str  # of the source
    noted: Entry | None


class Event(NamedTuple):
    """Progress of a job; only the last event of a job has an entry."""

    job: Job
    documents: int  # tokenised since the last event
    tokens: int
    entry: Entry | None = None
    kept: bool = False


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
        "tokenizer": {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
    }
    shards = dict(zip(SPLITS, (source.train_shards, source.validation_shards), strict=True))
    journal = head | {"text_key": source.contents.text_key, "sizes": _sizes(source)}
    try:
        with _alone(output):
            noted = _noted(output, journal)
            write_durably(output / JOURNAL, json.dumps(journal | {"noted": noted}))
            write_durably(output / MODEL, tokenizer.path.read_bytes())
            jobs = {split: list(_jobs(split, names, noted)) for split, names in shards.items()}
            everything, shared = [job for own in jobs.values() for job in own], (source, tokenizer, output)
            if workers > 1:
                events = in_processes(_complete, shared, everything, workers)
            else:
                events = (event for job in everything for event in _complete(*shared, job))
            for _ in _finished(events, len(everything), noted, report):
                write_durably(output / JOURNAL, json.dumps(journal | {"noted": noted}))
            totals = {name: sum(noted[job.name][name] for job in everything) for name in ("documents", "tokens")}
            entries = {split: [noted[job.name] for job in own] for split, own in jobs.items()}
            write_durably(output / MANIFEST, json.dumps(head | totals | {"shards": entries}, indent=1))
            (output / JOURNAL).unlink()
            result = TokenSource(output)
            result.remember()
    except OSError as error:
        raise UserError(f"{error.filename or output}: {error.strerror or error}. {AGAIN}") from error
    return result


def _jobs(split: str, shards: tuple[str, ...], noted: dict[str, dict]) -> Iterator[Job]:
    for i, shard in enumerate(shards):
        name = file_name(split, i, len(shards))
        entry = Entry(**noted[name]) if name in noted else None
        yield Job(name, shard, entry if entry and entry.source == shard else None)


def _finished(events: Iterable[Event], shards: int, noted: dict[str, dict], report: Callable) -> Iterator[Job]:
    """Put the entry of each newly made shard into ``noted`` and yield its job; report after every event."""
    progress = Progress(shards)
    report(progress)
    for event in events:
        progress.documents += event.documents
        progress.tokens += event.tokens
        if event.entry is not None:
            progress.finished += 1
            progress.kept += event.kept
            if not event.kept:
                noted[event.job.name] = asdict(event.entry)
                yield event.job
        report(progress)


@contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Create the folder if needed and hold it for this process alone; removes temporary files before and after."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = nullcontext()
        except BlockingIOError:
            raise UserError(f"{output}: another command is preparing it. Wait for it, or name another folder") from None
        except OSError:  # a file system without locks, such as some Lustre and NFS mounts
            held = _claimed(output / ".claim")
        with held:
            try:
                _sweep(output)
                yield
            finally:
                _sweep(output)


@contextmanager
def _claimed(claim: Path) -> Iterator[None]:
    """Hold ``claim``, a file that only one process can create. A killed process leaves it, and nobody else can tell."""
    try:
        with claim.open("x") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
    except FileExistsError:
        rule = f"{claim.read_text() or 'another process'} is preparing this folder, on a file system without locks"
        raise UserError(f"{claim}: {rule}. Wait for it; delete this file where that process is gone") from None
    try:
        yield
    finally:
        claim.unlink(missing_ok=True)


def _sweep(output: Path) -> None:
    for aside in output.glob(".*.tokens.*"):
        aside.unlink()


def _sizes(source: TextSource) -> dict[str, int]:
    """The bytes of each shard's file, by the name of the shard."""
    sizes = (*source.contents.train.values(), *source.contents.validation.values())
    return dict(zip((*source.train_shards, *source.validation_shards), sizes, strict=True))


def _unchanged(noted: dict[str, dict], found: dict, journal: dict) -> dict[str, dict] | None:
    """The entries whose source shard kept its size, if others were fetched again; None if the source is another one."""
    before, now = found.get("sizes", {}), journal["sizes"]
    if (found.get("text_key"), before.keys()) != (journal["text_key"], now.keys()):
        return None
    kept = {name: e for name, e in noted.items() if before.get(e["source"], -1) == now.get(e["source"])}
    return kept if kept or not noted else None


def _noted(output: Path, journal: dict) -> dict[str, dict]:
    """The entries of the shards that are already there; raises UserError if the folder holds anything else."""
    for path in (output / JOURNAL, output / MANIFEST):
        if not path.exists():
            continue
        try:
            found = json.loads(path.read_bytes())
            description = found["source"].pop("description")
            same = all(found[key] == journal[key] for key in ("format", "tokenizer"))
            if path.name == JOURNAL:
                noted = found["noted"]
            else:
                noted = {file_name(split, i, len(own)): entry
                         for split, own in found["shards"].items() for i, entry in enumerate(own)}  # fmt: skip
            if found["source"]["fingerprint"] != journal["source"]["fingerprint"]:
                noted = _unchanged(noted, found, journal)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: damaged ({error!r}). Delete it, and all shards are made again") from error
        if not same or noted is None:
            rule = f"holds the tokens of another source, tokenizer or format ({description})"
            raise UserError(f"{output}: {rule}. Name another folder, or delete this one")
        return noted
    strangers = sorted(path.name for path in output.iterdir() if not path.name.startswith("."))
    if strangers:
        rule = f"is not empty (it has {strangers[0]}) and no folder of tokens"
        raise UserError(f"{output}: {rule}. Name a new folder")
    return {}


def _complete(source: TextSource, tokenizer: Tokenizer, output: Path, job: Job) -> Iterator[Event]:
    """Make a shard, or keep it."""
    path = output / job.name
    if job.noted is not None and _is_sound(path, job.noted):
        yield Event(job, 0, 0, job.noted, kept=True)
    else:
        yield from _write(source, tokenizer, job, path)


def _is_sound(path: Path, entry: Entry) -> bool:
    try:
        with path.open("rb") as file:
            sized = path.stat().st_size == entry.bytes
            return sized and hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    except OSError:
        return False


def _write(source: TextSource, tokenizer: Tokenizer, job: Job, path: Path) -> Iterator[Event]:
    """Write a token shard to a temporary file, and rename that to ``path`` once it is on the disk."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    offsets, characters = [np.zeros(1, np.int64)], [np.empty(0, np.uint32)]
    count = total = told = told_tokens = 0
    due = time.monotonic() + PROGRESS_SECONDS
    try:
        with _Hashed(aside) as file:
            for texts in text_chunks(source.read(job.shard)):
                tokens, starts = tokenise(texts, tokenizer)
                file.write(tokens)
                offsets.append(total + np.append(starts[1:], len(tokens)))
                characters.append(np.array([len(text) for text in texts], np.uint32))
                count, total = count + len(texts), total + len(tokens)
                if time.monotonic() > due:
                    yield Event(job, count - told, total - told_tokens)
                    told, told_tokens, due = count, total, time.monotonic() + PROGRESS_SECONDS
            file.write(np.zeros(layout(count, total, tokenizer.vocab_size)[0] - file.size, np.uint8))
            file.write(np.concatenate(offsets))
            file.write(np.concatenate(characters))
        os.replace(aside, path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}). {AGAIN}") from error
    entry = Entry(job.shard, count, total, file.size, file.digest.hexdigest())
    yield Event(job, count - told, total - told_tokens, entry)


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
