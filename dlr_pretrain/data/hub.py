"""Requests to the Hugging Face hub that fail within seconds, not minutes, on a machine without a network.

Without a network ``huggingface_hub`` retries for 23 s, and a DNS look-up has no time-out at all. So the first request
runs in a thread that is abandoned after a time-out, and its silence is not retried unless the caller is patient. Once
the hub has answered, if only that it is busy, failed requests are retried.
"""

from __future__ import annotations

import email.utils
import fnmatch
import logging
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from dlr_pretrain.util.errors import UserError, first_line

FIRST_CONTACT_SECONDS = 7.0  # with the imports, a missing network is reported within 10 s
PATIENCE_SECONDS = 480.0  # with a hub that has answered; less than run.timeout_minutes by default, so it ends first
LISTING_SECONDS = 120.0  # for a list of files: the library retries inside this request, but has no time-out
STALL_SECONDS = 30.0  # a try that receives no byte for so long is given up
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0  # between tries, doubled each time

T = TypeVar("T")
log = logging.getLogger(__name__)
_jitter = random.Random()  # separate: a wait must not advance a random state that a run depends on


def list_files(
    dataset: str, revision: str | None, patterns: list[str], fix: str, patient: bool = False
) -> tuple[str, list[dict[str, int]]]:
    """The commit of a dataset and, for each glob, the matching files of that commit as {path: bytes}, sorted by path.

    If ``patient``, a hub that does not answer is asked again (unless HF_HUB_OFFLINE is set).
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.hf_api import RepoFile

    api, patient = HfApi(), patient and not constants.HF_HUB_OFFLINE

    def commit_of() -> str:
        return api.dataset_info(dataset, revision=revision, expand=["sha"], timeout=FIRST_CONTACT_SECONDS).sha

    commit = first_contact(dataset, commit_of, fix, patient=patient)
    folders: dict[str, dict[str, int]] = {}
    for folder in {_folder(pattern) for pattern in patterns}:

        def files(folder: str = folder) -> dict[str, int]:
            tree = api.list_repo_tree(dataset, folder or None, recursive=True, revision=commit, repo_type="dataset")
            return {entry.path: entry.size for entry in tree if isinstance(entry, RepoFile)}

        try:
            folders[folder] = _insist(dataset, files, LISTING_SECONDS, silence_passes=True)
        except Exception as error:  # the types differ between versions of the client
            why = f"its folder {folder!r} cannot be listed: {first_line(error)}"
            raise UserError(f"{dataset}: {why}. {fix}") from error
    found = [(folders[_folder(pattern)], pattern) for pattern in patterns]
    return commit, [{path: files[path] for path in sorted(files) if matches(path, pattern)} for files, pattern in found]


def matches(path: str, pattern: str) -> bool:
    """Whether the glob ``pattern`` matches the file ``path``, by the rules of globs on disk.

    ``*`` stays inside a name, ``**`` is any number of folders, and a hidden name needs a pattern with its dot.
    """
    return _match(path.split("/"), pattern.split("/"))


def _match(names: list[str], patterns: list[str]) -> bool:
    if not names or not patterns:
        return not names and not patterns
    if patterns[0] == "**":
        passed = not names[0].startswith(".") and (_match(names[1:], patterns) or names[1:] + patterns[1:] == [])
        return passed or _match(names, patterns[1:])
    shown = not names[0].startswith(".") or patterns[0].startswith(".")
    return shown and fnmatch.fnmatchcase(names[0], patterns[0]) and _match(names[1:], patterns[1:])


def _folder(pattern: str) -> str:
    """The folder before the first wildcard of a glob; listing only this folder spares thousands of other files."""
    parts = pattern.split("/")[:-1]
    fixed = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts))
    return "/".join(parts[:fixed])


def download(repository: str, filename: str, fix: str) -> str:
    """Path of one file of a model repository. If it is in the local cache, the hub is not asked."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, filename)
    if isinstance(cached, str):
        return cached
    first_contact(
        repository, lambda: HfApi().model_info(repository, expand=["sha"], timeout=FIRST_CONTACT_SECONDS), fix
    )
    try:
        return hf_hub_download(repository, filename)
    except Exception as error:  # the types differ between versions of the client
        raise UserError(f"{repository}: {filename} cannot be fetched: {first_line(error)}. {fix}") from error


def first_contact(
    what: str, ask: Callable[[], T], fix: str, seconds: float = FIRST_CONTACT_SECONDS, patient: bool = False
) -> T:
    """The answer of ``ask``. Raises UserError at once if the hub refuses, or if no answer comes within ``seconds``.

    If ``patient``, a hub that does not answer is asked again for ``PATIENCE_SECONDS``. A hub that is merely busy always
    is, because many jobs that start together can overload it.
    """
    try:
        return _insist(what, ask, seconds, silence_passes=patient)
    except Exception as error:  # the types differ between versions of the client
        raise UserError(
            f"{what}: the Hugging Face hub denied access or did not answer: {first_line(error)}. {fix}"
        ) from error


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """The answer of ``ask``. Raises its exception, or TimeoutError if it takes longer than ``seconds``."""
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="hub-question", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return answer


def _insist(what: str, ask: Callable[[], T], seconds: float, silence_passes: bool) -> T:
    """The answer of ``ask``, which is retried until ``PATIENCE_SECONDS`` are over or it fails permanently.

    Each try gets ``seconds``. ``silence_passes`` says whether a try that received no response is retried.
    """
    end, tries = time.monotonic() + PATIENCE_SECONDS, 0
    while True:
        try:
            return _within(seconds, ask)
        except Exception as error:
            response = getattr(error, "response", None)
            passes = silence_passes if response is None else is_passing(response.status_code)
            asked = 0.0 if response is None else seconds_to_wait(response.headers)
            wait = max(asked, pause(tries))
            if not passes or time.monotonic() + wait > end:
                raise
            log.warning("%s: %s; asking again in %.0f s", what, first_line(error), wait)
        time.sleep(wait)
        tries += 1


def pause(tries: int) -> float:
    """Seconds to wait before the next try, with jitter; doubles with each of the ``tries`` that failed."""
    return min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2 ** min(tries, 30)) * _jitter.uniform(0.5, 1)


def is_passing(status: int) -> bool:
    """Whether an HTTP status means a temporary failure."""
    return status in (408, 425, 429) or status >= 500


def seconds_to_wait(headers: Mapping[str, str]) -> float:
    """The wait that Retry-After (seconds, or a date) asks for, or the hub's RateLimit if no request is left; else 0."""
    wanted = headers.get("retry-after", "").strip()
    if wanted.isdigit():
        return float(wanted)
    if wanted:
        try:
            return max(0.0, email.utils.parsedate_to_datetime(wanted).timestamp() - time.time())
        except ValueError:
            return 0.0
    limit = re.search(r"\br=0\b.*\bt=(\d+)", headers.get("ratelimit", ""))
    return float(limit[1]) if limit else 0.0


def file_url(dataset: str, commit: str, path: str) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(dataset, path, repo_type="dataset", revision=commit)


class Answer(NamedTuple):
    """A server's answer to a request for bytes."""

    status: int
    headers: Mapping[str, str]  # case-insensitive
    pieces: Iterator[bytes]  # of the body, as they arrive
    redirected: bool  # whether the hub redirected the request to a store


@contextmanager
def open_range(url: str, first: int, end: int) -> Iterator[Answer]:
    """Request the bytes first..end of a file and follow redirects; only the hub receives the user's token.

    Raises the errors of the HTTP client of ``huggingface_hub``: requests before version 1, httpx since.
    """
    from huggingface_hub.utils import build_hf_headers, get_session

    # If the transfer were compressed, the bytes of the file could not be counted.
    headers = build_hf_headers() | {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
    session = get_session()
    if callable(session.stream):  # httpx; in requests it is a setting
        opened = session.stream("GET", url, headers=headers, timeout=STALL_SECONDS, follow_redirects=True)
        with opened as answer:
            # With a chunk size, httpx would hold back bytes, and lose them if the connection broke.
            yield Answer(answer.status_code, answer.headers, answer.iter_raw(), bool(answer.history))
    else:
        with session.get(url, headers=headers, timeout=STALL_SECONDS, stream=True) as answer:
            pieces = answer.raw.stream(1 << 16, decode_content=False)
            yield Answer(answer.status_code, answer.headers, pieces, bool(answer.history))
