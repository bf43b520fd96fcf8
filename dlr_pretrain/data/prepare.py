"""Writes folders of tokens: for ``scripts/prepare_data.py``, and when a run starts on text that is not streamed.

Shards of tokens have a size of their own: many small files share one, and a large file fills several. How the text is
divided depends on the names and sizes of its files alone, so any number of processes writes the same shards. A process
tokenises a job, a smaller division of the text, into drafts, and the drafts of a shard are joined in order.

The manifest is written first, and the ids of a shard before its ends. A kill at any point leaves finished shards, which
the same command keeps.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from dlr_pretrain.config.tree import Data
from dlr_pretrain.data import tokens
from dlr_pretrain.data.detect import as_read, format_of, is_compressed
from dlr_pretrain.data.files import File
from dlr_pretrain.data.formats import WHOLE, Part
from dlr_pretrain.data.mixture import Mixture
from dlr_pretrain.data.sources import Source, TextSource, naming_keys, nothing_remains
from dlr_pretrain.data.streams import token_dtype, tokenise_in_chunks
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import UserError, file_error, first_line, naming
from dlr_pretrain.util.files import draft_of, locked, new_pool, refuse_foreign, sync, user_cache, write_durably
from dlr_pretrain.util.process import cores
from dlr_pretrain.util.text import amount, plural, shortened

SMALL_BYTES = 1 << 28  # up to this, text is always tokenised: about ten seconds for sentencepiece
SHARD_BYTES = 400_000_000  # of text in a shard, about 100M tokens
ROWS_LEFT_OUT, SPECIAL_TOKENS = "bad rows", "special"  # in the contents of a folder
FIRST_TEXTS = 1000  # of a streamed text, in which special tokens are counted
JOB_BYTES = 8 << 20  # of text in a job: about a second for sentencepiece
FILE_BYTES = 4 << 10  # of text that is tokenised in the time in which a file is opened
DENSITY = 3  # bytes of text in each byte of a compressed file or a table
PARALLEL_JOBS = 3  # from this many on, worker processes pay off
COMPRESSED_PARTS = 16  # of all compressed text: a part is decompressed from the beginning of its file
TEXT_A_SECOND = 10 << 20  # bytes that a process tokenises: sentencepiece on a current core
TOKEN_TEXT = 4  # bytes of text in a token
MAX_MINUTES = 45.0  # that a start may take for tokens: other ranks wait for an hour
SUFFIXES = (tokens.TOKENS, tokens.FILES, tokens.SUMS, tokens.ENDS)  # as they are written: the ends complete a shard
OTHER_CACHE = "Set data.cache to a folder that all nodes see. The next start replaces damaged tokens"
_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # one per worker
_work: list[Callable[[Any], list[Draft]]] = []  # of this worker: one function


def make_tokens(source: TextSource, tokenizer: Tokenizer, output: Path, workers: int) -> Iterator[bool]:
    """Tokenise ``source`` into ``output`` with ``workers`` processes; if 1, in this process.

    Yields for each shard in order whether it existed before. Raises UserError if the folder holds something else, the
    input cannot be read or the output cannot be written.
    """
    again = "Start again: finished shards are kept"
    try:
        with locked(output) as alone:
            yield from _tokenise(source, tokenizer, output, workers, alone)
    except OSError as error:
        raise UserError(f"{file_error(error)}. {again}") from error
    except BrokenProcessPool as error:
        raise UserError(f"{output}: {first_line(error)}. Use fewer --workers if memory ran out. {again}") from error


class FilePart(NamedTuple):
    """A part of a file of the source."""

    number: int  # of the file among those of its split
    name: str
    part: Part


Job = list[FilePart]  # what a process tokenises at once
Shard = tuple[list[str], list[Job]]  # the name of a shard, with that of its held-out documents, and its jobs


class Draft(NamedTuple):
    """The tokens of a job's documents that belong to one split."""

    path: Path  # of the ids
    lengths: np.ndarray  # int64 [documents]
    files: np.ndarray  # int64 [n, 4], see ``tokens``


def plan(source: TextSource) -> list[Shard]:
    """How the text of a source is divided. This depends on the names and sizes of its files alone."""
    train, validation = (_divide(files, source.data) for files in (source.chosen.train, source.chosen.validation))
    names = tokens.shard_names("train", len(train))
    if source.holds_out:
        pairs = zip(names, tokens.shard_names("validation", len(train)), strict=True)
        return [(list(pair), jobs) for pair, jobs in zip(pairs, train, strict=True)]
    names += tokens.shard_names("validation", len(validation))
    return [([name], jobs) for name, jobs in zip(names, train + validation, strict=True)]


def text_bytes(file: File) -> int:
    """The text in a file, in bytes, as far as its name and size tell."""
    if file.size is None:
        return JOB_BYTES
    format = format_of(file.name)
    packed = is_compressed(file.name) or (format is not None and format.cut == "batches")
    return file.size * (DENSITY if packed else 1)


def _divide(files: Sequence[File], data: Data) -> list[list[Job]]:
    """The jobs of each shard."""
    sizes = list(map(text_bytes, files))
    parts, costs, text = [], [], sum(sizes)
    for number, (file, size) in enumerate(zip(files, sizes, strict=True)):
        cut = "nowhere"
        if file.is_local and (format := format_of(file.name)):
            cut = as_read(format, data).cut
        count = max(1, -(-size // JOB_BYTES))
        if is_compressed(file.name):
            count = max(1, min(count, COMPRESSED_PARTS * size // text)) if cut == "lines" else 1
        elif cut == "nowhere":
            count = 1
        expected = size if is_compressed(file.name) else None
        parts += [FilePart(number, file.name, Part(i, count, expected) if count > 1 else WHOLE) for i in range(count)]
        costs += [(size + FILE_BYTES) // count] * count
    total, before = sum(costs), 0
    count = max(1, round(total / SHARD_BYTES))
    jobs: dict[tuple[int, int], Job] = {}
    for one, cost in zip(parts, costs, strict=True):
        jobs.setdefault((before * count // total, before // JOB_BYTES), []).append(one)
        before += cost
    shards: dict[int, list[Job]] = {}
    for (shard, _), job in jobs.items():
        shards.setdefault(shard, []).append(job)
    return list(shards.values())


def _tokenise(source: TextSource, tokenizer: Tokenizer, output: Path, workers: int, alone: bool) -> Iterator[bool]:
    """As ``make_tokens``, but raises OSError and BrokenProcessPool as they are.

    If this process is ``alone`` in the folder, the drafts that killed processes have left there are deleted.
    """
    shards = plan(source)
    names = [name for shard_names, _ in shards for name in shard_names]
    manifest = {
        "format": tokens.FORMAT,
        "source": source.fingerprint,
        "tokenizer": {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "shards": {split: sum(name.startswith(split) for name in names) for split in ("train", "validation")},
        "made_from": source.describe(),
        "contents": source.contents,
    }
    _claim(output, manifest)
    tokenizer.save(output / tokens.TOKENIZER)
    # The fork server has none of this process's threads, and imports modules once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    work = partial(_tokenise_job, source, output)
    parallel = workers > 1 and sum(len(jobs) for _, jobs in shards) >= PARALLEL_JOBS
    start = partial(new_pool, ProcessPoolExecutor, workers, context, _start_worker, (work,))
    with start() if parallel else nullcontext() as pool:  # starts workers on demand
        mapped = map if pool is None else pool.map
        whole = list(mapped(partial(_is_whole, output), [names for names, _ in shards]))
        todo = [(names, job) for (names, jobs), done in zip(shards, whole, strict=True) if not done for job in jobs]
        results = mapped(_call if parallel else work, todo)
        for (names, jobs), done in zip(shards, whole, strict=True):
            if not done:
                for name, drafts in zip(names, zip(*(next(results) for _ in jobs), strict=True), strict=True):
                    _join(output / name, drafts)
            yield done
    if counted := _counted(source, tokenizer, TokenSource(output)):
        manifest["contents"] = source.contents | counted
        write_durably(output / tokens.MANIFEST, json.dumps(manifest, indent=1))
    for draft in output.glob(".*.tmp*") if alone else ():
        draft.unlink(missing_ok=True)


def _counted(source: TextSource, tokenizer: Tokenizer, made: TokenSource) -> dict[str, str]:
    """What is known once all text has been read, for ``contents``. Raises UserError if no row of a file remains."""
    train, validation = made.files(made.train_shards), made.files(made.validation_shards)
    special = int(train[:, 1].sum() + validation[:, 1].sum())
    if source.holds_out and not source.splits_document:
        train[:, 0] += validation[:, 0]
    parts, total = [], 0
    for files, counts in ((source.chosen.train, train), (source.chosen.validation, validation)):
        for file, (documents, _, left_out) in zip(files, counts.tolist(), strict=False):
            if left_out:
                parts.append(f"{left_out:,} of {documents + left_out:,} in {file.name}")
                total += left_out
                if not documents:
                    raise nothing_remains(file, left_out, "none has a text")
    counted = {ROWS_LEFT_OUT: f"{total:,} left out: {', '.join(shortened(parts))}"} if parts else {}
    return counted | _special_tokens(tokenizer, special, "")


def _special_tokens(tokenizer: Tokenizer, texts: int, which: str) -> dict[str, str]:
    """For ``contents``: how many texts hold special tokens, and what these count as."""
    choice, some = tokenizer.special_in_text, [*tokenizer.special[:3], *["..."] * (len(tokenizer.special) > 3)]
    read = f"read as {'ordinary characters' if choice == 'text' else 'tokens'} (data.special_tokens={choice})"
    said = f"{plural(texts, 'text')}{which} with special tokens ({', '.join(some)}), {read}"
    return {SPECIAL_TOKENS: said} if texts else {}


def _start_worker(work: Callable[[Any], list[Draft]]) -> None:
    """Give this worker its work, and end it when its parent process is killed."""
    _work.append(work)

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _call(given: tuple[list[str], Job]) -> list[Draft]:
    """Do this worker's work. The source is sent to each worker once, because it may have many files."""
    return _work[0](given)


def _claim(output: Path, manifest: dict) -> None:
    """Write the manifest into a new folder. Raises UserError if the folder holds anything else."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / tokens.MANIFEST
    if not path.exists():
        refuse_foreign(output, "--output", "tokens", ours=False)
        write_durably(path, json.dumps(manifest, indent=1))
    there = tokens.read_manifest(output)
    if any(there[name] != manifest[name] for name in ("source", "tokenizer", "shards")):
        raise UserError(
            output,
            f"holds the tokens of another source or tokenizer ({there['made_from']})",
            "Name another folder, or delete this one",
        )


def _is_whole(output: Path, names: Iterable[str]) -> bool:
    """Whether sound token shards with these names exist."""
    vocab_size = _tokenizer(output / tokens.TOKENIZER).vocab_size
    try:
        for path in (output / name for name in names):
            tokens.open_shard(path, vocab_size)
            tokens.verify_checksums(path)
    except (OSError, ValueError):
        return False
    return True


def _tokenise_job(source: TextSource, output: Path, given: tuple[list[str], Job]) -> list[Draft]:
    """Tokenise a job of the shard with these names: its documents, and if there are two names, those held out."""
    names, job = given
    tokenizer, first = _tokenizer(output / tokens.TOKENIZER), job[0]
    held_out: list[str] = []
    files = np.zeros((2, len(job), 4), np.int64)

    def texts() -> Iterator[str]:
        for row, (number, name, part) in enumerate(job):
            files[:, row, 0] = number
            for texts in source.divided(name, part):
                for split, text in enumerate(texts):
                    if text is not None:
                        files[split, row, 1:3] += 1, tokenizer.has_special(text)
                files[0, row, 3] += texts == (None, None)
                if texts[1] is not None:
                    held_out.append(texts[1])
                if texts[0] is not None:
                    yield texts[0]

    drafts = []
    for name, documents, table in zip(names, (texts(), held_out), files, strict=False):
        path = draft_of(output / f"{Path(name).stem}-{first.number}-{first.part.index}{tokens.TOKENS}")
        lengths = [np.zeros(0, np.int64)]
        with naming(path), path.open("wb") as file:
            for ids, starts in tokenise_in_chunks(documents, tokenizer):
                file.write(ids.data)
                lengths.append(np.diff(starts, append=len(ids)))
        drafts.append(Draft(path, np.concatenate(lengths), table))
    return drafts


def _join(path: Path, parts: Sequence[Draft]) -> None:
    """Join drafts to the files of a token shard, which are renamed once they are on the disk, ends last."""
    drafts = {suffix: draft_of(path.with_suffix(suffix)) for suffix in SUFFIXES}
    with naming(path), drafts[tokens.TOKENS].open("wb") as joined:
        for part in parts:
            with part.path.open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 20)
            part.path.unlink()
    ends = np.cumsum(np.concatenate(([0], *(part.lengths for part in parts))), dtype=np.int64)
    contents = {tokens.ENDS: ends.data, tokens.FILES: np.concatenate([part.files for part in parts]).data}
    for suffix, content in contents.items():
        with naming(path.with_suffix(suffix)):
            drafts[suffix].write_bytes(content)
    sums = tokens.checksums(path, {suffix: drafts[suffix] for suffix in (tokens.TOKENS, *contents)})
    with naming(path.with_suffix(tokens.SUMS)):
        drafts[tokens.SUMS].write_bytes(sums)
    for suffix in SUFFIXES:
        sync(drafts[suffix])
        os.replace(drafts[suffix], path.with_suffix(suffix))


def tokenised_once(source: Source, tokenizer: Tokenizer, streams: int, say: Callable[[str], None]) -> Source:
    """The tokens of a text, or the text itself if it is large and ``streams`` can share its files evenly.

    The tokens are written below ``data.cache``, or in the user's cache, where a later start finds them.
    """
    if isinstance(source, Mixture):
        parts = {name: _tokens_of(one, tokenizer, streams, say) for name, one in source.sources.items()}
        return replace(source, sources=parts)
    return _tokens_of(source, tokenizer, streams, say)


def _tokens_of(
    source: TextSource | TokenSource, tokenizer: Tokenizer, streams: int, say: Callable[[str], None]
) -> TextSource | TokenSource:
    if isinstance(source, TokenSource):
        return source
    size = sum(map(text_bytes, source.files.values()))
    if size > SMALL_BYTES and source.can_be_streamed(streams):
        first = list(filter(None, islice(source.read(source.train_shards[0]), FIRST_TEXTS)))
        special = sum(map(tokenizer.has_special, first))
        source.contents |= _special_tokens(tokenizer, special, f" of the first {len(first):,}")
        return source
    cache = Path(source.data.cache or user_cache()) / "tokens"
    key = json.dumps([tokens.FORMAT, source.state(), tokenizer.fingerprint])
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:24]
    try:
        with naming_keys(source.keys):
            made = _cached_tokens(folder, size) or _made(source, tokenizer, folder, size, say)
    except (OSError, BrokenProcessPool) as error:
        said = first_line(file_error(error) if isinstance(error, OSError) else error)
        raise UserError(
            cache,
            f"the tokens of the text cannot be written here: {said}",
            "Set data.cache to a folder with space for them",
        ) from error
    made.version, made.versions = source.version, source.versions
    made.contents = source.contents | {
        name: text for name, text in made.contents.items() if name in (ROWS_LEFT_OUT, SPECIAL_TOKENS)
    }
    return made


def _made(source: TextSource, tokenizer: Tokenizer, folder: Path, size: int, say: Callable[[str], None]) -> TokenSource:
    """The tokens of a text, made in a folder of the cache by this process or by another one that is at it."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder, lambda holder: say(f"waiting for {holder}, which tokenises this text into {folder}")) as alone:
        if (made := _cached_tokens(folder, size)) is not None:
            return made
        workers, shards = cores(), len(plan(source))
        say(f"tokenising the text {_cost(size, tokenizer, workers, folder)} once, into {folder}")
        work = _tokenise(source, tokenizer, folder, workers, alone)
        for _ in tqdm(work, total=shards, unit=" shards", disable=None):
            pass
    return TokenSource(folder, OTHER_CACHE)


def _cost(size: int, tokenizer: Tokenizer, workers: int, folder: Path) -> str:
    """What the tokens of so many bytes of text take, in words. Raises UserError if the disk or an hour is too small."""
    needed = size // TOKEN_TEXT * np.dtype(token_dtype(tokenizer.vocab_size)).itemsize
    free, minutes = shutil.disk_usage(folder).free, size / TEXT_A_SECOND / workers / 60
    cost = f"(about {amount(size)}B, {amount(needed)}B of tokens, {plural(math.ceil(minutes), 'minute')})"
    command = "scripts/prepare_data.py, with your keys of data and tokenizer, makes them for data=tokens"
    if needed > free:
        raise UserError(
            f"data.cache={folder.parent.parent}",
            f"{amount(free)}B of space do not hold the tokens of the text {cost}",
            f"Set it to a folder with space; or {command}",
        )
    if minutes > MAX_MINUTES:
        raise UserError(
            "the text is long",
            f"its tokens {cost} would keep this run's machines waiting, because its files cannot be dealt evenly",
            f"First, {command}",
        )
    return cost


def _cached_tokens(folder: Path, size: int) -> TokenSource | None:
    """The tokens in a folder of the cache; None if they are missing or damaged. Those of small text are all read."""
    with suppress(UserError):
        made = TokenSource(folder, OTHER_CACHE)
        if size <= SMALL_BYTES:
            made.verify()
        return made
    return None
