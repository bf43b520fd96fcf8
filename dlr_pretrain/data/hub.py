"""The Hugging Face hub, asked so that a machine without a network learns of it in seconds, not minutes.

``huggingface_hub`` retries for 23 s where there is no network, and a look-up of a name has no time-out at all; so the
first question is asked once, without retries, in a thread that is not waited for beyond its time. Once the hub has
answered, the library's own retries with back-off are what is wanted.
"""

from __future__ import annotations

import fnmatch
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from dlr_pretrain.errors import UserError

FIRST_CONTACT_SECONDS = 7.0  # with the imports, the answer is there within 10 s

T = TypeVar("T")


def list_files(dataset: str, patterns: list[str], mend: str) -> tuple[str, list[list[str]]]:
    """The commit of a dataset, and for each glob the sorted files of that commit which match it."""
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi()
    commit = first_contact(
        dataset, lambda: api.dataset_info(dataset, expand=["sha"], timeout=FIRST_CONTACT_SECONDS).sha, mend
    )
    folders: dict[str, list[str]] = {}
    for folder in {_folder(pattern) for pattern in patterns}:
        try:
            tree = api.list_repo_tree(
                dataset, path_in_repo=folder or None, recursive=True, revision=commit, repo_type="dataset"
            )
            folders[folder] = sorted(entry.path for entry in tree if isinstance(entry, RepoFile))
        except Exception as error:  # whatever the client raises: it differs between its versions
            raise UserError(f"{dataset}: its folder {folder!r} cannot be listed: {_reason(error)}. {mend}") from error
    return commit, [fnmatch.filter(folders[_folder(pattern)], pattern) for pattern in patterns]


def _folder(pattern: str) -> str:
    """The part of a glob before its first wildcard, as a folder; listing it alone spares thousands of other files."""
    parts = pattern.split("/")[:-1]
    fixed = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), len(parts))
    return "/".join(parts[:fixed])


def download(repository: str, filename: str, mend: str) -> str:
    """Path of one file of a model repository: from the local cache where it is there, without asking the hub."""
    from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repository, filename)
    if isinstance(cached, str):
        return cached
    first_contact(
        repository, lambda: HfApi().model_info(repository, expand=["sha"], timeout=FIRST_CONTACT_SECONDS), mend
    )
    try:
        return hf_hub_download(repository, filename)
    except Exception as error:  # whatever the client raises: it differs between its versions
        raise UserError(f"{repository}: {filename} cannot be fetched: {_reason(error)}. {mend}") from error


def first_contact(what: str, ask: Callable[[], T], mend: str, seconds: float = FIRST_CONTACT_SECONDS) -> T:
    """The answer of ``ask``, or a UserError once it has failed or ``seconds`` have passed."""
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=run, name="hub-first-contact", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        answer, error = None, TimeoutError(f"no answer within {seconds:g} s")
    if error is not None:
        raise UserError(f"{what}: the Hugging Face hub gives no access to it: {_reason(error)}. {mend}") from error
    return answer


def _reason(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
