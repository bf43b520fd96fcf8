"""Writes folders of tokens: for ``scripts/prepare_data.py``, and for small texts when a run starts.

The manifest is written first, and the ids of a shard before its ends. A kill at any point leaves finished shards, which
the same command keeps.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from dlr_pretrain.data import tokens
from dlr_pretrain.data.files import created_atomically, user_cache
from dlr_pretrain.data.sources import TextSource
from dlr_pretrain.data.streams import cut, tokenise_in_chunks
from dlr_pretrain.data.tokenizer import Tokenizer, load_tokenizer
from dlr_pretrain.data.tokens import TokenSource
from dlr_pretrain.util.errors import UserError, file_error, first_line, naming
from dlr_pretrain.util.files import draft_of, locked, new_pool, refuse_foreign, sync, write_durably
from dlr_pretrain.util.process import cores
from dlr_pretrain.util.text import plural

SMALL_CHARACTERS = 1 << 28  # up to this, text is tokenised when a run starts: about ten seconds for sentencepiece
FEW_DOCUMENTS = 16  # per stream: with fewer, text is tokenised as well, because streams cannot divide whole documents
MANY_READS = 2.0  # reads of a streamed text per epoch from which on a remark is printed
PARALLEL_CHARACTERS = 1 << 24  # above this, worker processes pay off
SUFFIXES = (tokens.TOKENS, tokens.SUMS, tokens.ENDS)  # in the order of writing: a shard is complete once its ends exist
OTHER_CACHE = "Set data.cache to a folder that all nodes see. The next start replaces damaged tokens"
_tokenizer = lru_cache(maxsize=1)(load_tokenizer)  # one per worker


def make_tokens(source: TextSource, tokenizer: Tokenizer, output: Path, workers: int) -> Iterator[bool]:
    """Tokenise ``source`` into ``output`` with ``workers`` processes; if 1, in this process.

    Yields for each shard in order whether it existed before. Raises UserError if the folder holds something else, the
    input cannot be read or the output cannot be written.
    """
    again = "Start again: finished shards are kept"
    try:
        with locked(output):
            yield from _tokenise(source, tokenizer, output, workers)
    except OSError as error:
        raise UserError(f"{file_error(error)}. {again}") from error
    except BrokenProcessPool as error:
        raise UserError(f"{output}: {first_line(error)}. Use fewer --workers if memory ran out. {again}") from error


def _tokenise(source: TextSource, tokenizer: Tokenizer, output: Path, workers: int) -> Iterator[bool]:
    """As ``make_tokens``, but raises OSError and BrokenProcessPool as they are."""
    train, validation = source.train_shards, source.validation_shards
    names = (*tokens.shard_names("train", len(train)), *tokens.shard_names("validation", len(validation)))
    manifest = {
        "format": tokens.FORMAT,
        "source": source.fingerprint,
        "tokenizer": {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "shards": {"train": len(train), "validation": len(validation)},
        "made_from": source.describe(),
        "contents": source.contents,
    }
    _claim(output, manifest)
    tokenizer.save(output / tokens.TOKENIZER)
    # The fork server has none of this process's threads, and imports modules once for all workers.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with new_pool(ProcessPoolExecutor, workers, context, _end_with_parent) as pool:  # starts workers on demand
        complete = partial(_complete, source, output)
        yield from (pool.map if workers > 1 else map)(complete, (*train, *validation), names)
    for suffix in SUFFIXES:
        for draft in output.glob(f".*{suffix}.tmp*"):
            draft.unlink(missing_ok=True)


def _end_with_parent() -> None:
    """End this worker when its parent process is killed."""

    def wait() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _claim(output: Path, manifest: dict) -> None:
    """Write the manifest into a new folder. Raises UserError if the folder holds anything else."""
    output.mkdir(parents=True, exist_ok=True)
    path = output / tokens.MANIFEST
    if not path.exists():
        refuse_foreign(output, "--output", "tokens", ours=False)
        write_durably(path, json.dumps(manifest, indent=1))
    there = tokens.read_manifest(output)
    if there["source"] != manifest["source"] or there["tokenizer"]["sha256"] != manifest["tokenizer"]["sha256"]:
        rule = f"holds the tokens of another source or tokenizer ({there['made_from']})"
        raise UserError(f"{output}: {rule}. Name another folder, or delete this one")


def _complete(source: TextSource, output: Path, shard: str, name: str) -> bool:
    """Write the token shard ``name`` unless a sound one exists. Returns whether one existed."""
    path, tokenizer = output / name, _tokenizer(output / tokens.TOKENIZER)
    try:
        tokens.open_shard(path, tokenizer.vocab_size)
        tokens.verify_checksums(path)
    except (OSError, ValueError):
        _write(source, shard, tokenizer, path)
        return False
    return True


def _write(source: TextSource, shard: str, tokenizer: Tokenizer, path: Path) -> None:
    """Write the files of a token shard to drafts, which are renamed once they are on the disk, ends last."""
    lengths = [np.zeros(1, np.int64)]
    drafts = {suffix: draft_of(path.with_suffix(suffix)) for suffix in SUFFIXES}
    with naming(path), drafts[tokens.TOKENS].open("wb") as file:
        for ids, starts in tokenise_in_chunks(source.read(shard), tokenizer):
            file.write(ids.data)
            lengths.append(np.diff(starts, append=len(ids)))
    with naming(path.with_suffix(tokens.ENDS)):
        drafts[tokens.ENDS].write_bytes(np.concatenate(lengths).cumsum().data)
    with naming(path.with_suffix(tokens.SUMS)):
        drafts[tokens.SUMS].write_bytes(tokens.checksums(path, drafts[tokens.TOKENS], drafts[tokens.ENDS]))
    for suffix in SUFFIXES:
        sync(drafts[suffix])
        os.replace(drafts[suffix], path.with_suffix(suffix))


def tokenised_once(
    source: TextSource | TokenSource, tokenizer: Tokenizer, streams: int, say: Callable[[str], None]
) -> TextSource | TokenSource:
    """The tokens of a text that is small, or has too few documents for ``streams``; otherwise the text itself.

    The tokens are written below ``data.cache``, or in the user's cache, where a later start finds them.
    """
    if isinstance(source, TokenSource):
        return source
    characters = sum(source.sizes(packed=True))
    if characters > SMALL_CHARACTERS and sum(source.sizes(packed=False)) >= FEW_DOCUMENTS * streams:
        source.remark = _cost(source, streams)
        return source
    cache = Path(source.data.cache or user_cache()) / "tokens"
    key = json.dumps([tokens.FORMAT, source.state(), tokenizer.fingerprint])
    folder = cache / hashlib.sha256(key.encode()).hexdigest()[:24]
    made = _cached_tokens(folder)
    if made is None:
        say(f"tokenising the text (about {characters / 1e6:.3g} MB) once, into {folder}")
        try:
            with created_atomically(folder) as draft:
                list(_tokenise(source, tokenizer, draft, cores() if characters > PARALLEL_CHARACTERS else 1))
                if _cached_tokens(folder) is None:
                    shutil.rmtree(folder, ignore_errors=True)  # damaged or missing
        except (OSError, BrokenProcessPool) as error:
            said = file_error(error) if isinstance(error, OSError) else error
            rule = f"the tokens of the text cannot be written here: {first_line(said)}"
            raise UserError(f"{cache}: {rule}. Set data.cache to a folder with space for them") from error
        made = TokenSource(folder, OTHER_CACHE)
    made.version, made.versions, made.contents = source.version, source.versions, source.contents
    return made


def _cached_tokens(folder: Path) -> TokenSource | None:
    """The tokens in a folder of the cache; None if they are missing or damaged."""
    with suppress(UserError):
        found = TokenSource(folder, OTHER_CACHE)
        found.verify()
        return found
    return None


def _cost(source: TextSource, streams: int) -> str:
    """A remark if several streams share, and so read, the same files; else empty."""
    sizes = source.sizes(packed=True)
    shares = [cut(sizes, np.arange(len(sizes)), part, streams, slack=source.slack) for part in range(streams)]
    times = sum(piece.size for share in shares for piece in share) / sum(sizes)
    if times < MANY_READS:
        return ""
    fix = "scripts/prepare_data.py tokenises it once, and also makes the order exact"
    rule = f"because {streams} streams share {plural(len(sizes), 'file')}"
    return f"each epoch reads the text {times:.0f} times, {rule}: {fix}"
