"""Finds and opens shards: on this machine, on the hub, or at any address that fsspec opens.

Local files are opened directly. ``RemoteFile`` reads a remote file through fsspec, one range of bytes at a time, and
repeats a failed request for the missing range. So no row is read twice or left out.
"""

import glob
import hashlib
import io
import logging
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar
from urllib.parse import unquote

import fsspec
from fsspec.spec import AbstractBufferedFile

from dlr_pretrain.config.tree import Data
from dlr_pretrain.util.errors import UserError, first_line, naming, noting_silence, write_to_stderr
from dlr_pretrain.util.files import draft_of, new_pool
from dlr_pretrain.util.text import plural

RANGE_BYTES = 4 << 20  # of one request; each stream holds one range in memory
FIRST_CONTACT_SECONDS = 7.0  # with the imports, a missing network is reported within 10 s
RETRY_SECONDS = 480.0  # without progress; shorter than the default run.timeout_minutes, so as to end first
FIRST_NOTE_SECONDS, NOTE_SECONDS = 10.0, 60.0  # of silence before the first note, and between notes
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 60.0  # between tries, doubled each time
FINAL_STATUSES = (401, 404, 410, 451)  # HTTP: another try would get the same answer
FINAL_ERRORS = ("GatedRepoError", "OfflineModeIsEnabled")  # of huggingface_hub, which is imported only where needed
OPEN_GATE = "Accept its terms on its page at huggingface.co, and set HF_TOKEN to a token of that account"
HUB_FILE = re.compile(r"(hf://datasets/[^/@]+/[^/@]+)(?:@(refs/(?:convert/\w+|pr/\d+)|[^/]+))?(/.*|$)")
COMMIT = re.compile(r"[0-9a-f]{40}")
SNAPSHOT = re.compile(r"(.*(?:^|/)snapshots)/([0-9a-f]{40})/.*")  # in the cache of huggingface_hub
HIDDEN = re.compile(r"(?:^|/)\.")
# The names by which servers report the version of a file, the surest first
VERSIONS = ("ETag", "etag", "Content-MD5", "generation", "LastModified", "Last-Modified", "last_modified", "mtime",
            "modify", "created")  # fmt: skip
ASKING_THREADS = 16

T = TypeVar("T")
log = logging.getLogger(__name__)
# aiohttp, which fsspec uses, heeds HTTPS_PROXY, NO_PROXY and ~/.netrc only if asked to. A user's own setting is kept.
for _protocol, _options in (("http", "client_kwargs"), ("https", "client_kwargs"), ("gs", "session_kwargs")):
    if _protocol != "https" or _protocol in fsspec.config.conf:  # which would replace all options of "http"
        fsspec.config.conf.setdefault(_protocol, {}).setdefault(_options, {}).setdefault("trust_env", True)
_jitter = random.Random()  # separate: a wait must not advance a random state that a run depends on


@dataclass(frozen=True)
class File:
    """A file of a source. A copy elsewhere has the same ``name`` and ``size``."""

    name: str  # relative to the root of the source
    address: str  # a local path, or an address for fsspec
    size: int | None  # in bytes; None if the server does not report it
    changed: str = field(default="", compare=False)  # the server's name for this version, such as its ETag or time

    @property
    def is_local(self) -> bool:
        return "://" not in self.address

    def state(self) -> list:
        """Values that differ once the file is replaced or edited."""
        if not self.is_local:
            return [self.address, self.size, self.changed]
        path, now = os.path.realpath(self.address), os.stat(self.address)
        return [path, now.st_size, now.st_ino, now.st_mtime_ns, now.st_ctime_ns]

    @cached_property
    def identity(self) -> str:
        """The same for all names of a file: its path without links, or its address on the hub without the commit."""
        if match := HUB_FILE.fullmatch(self.address):
            return match[1] + match[3]
        path = self.address.removeprefix("file://")
        return self.address if "://" in path else os.path.realpath(path)

    def version(self) -> str:
        """The size and the server's name for this version, in words."""
        return ", ".join(filter(None, ["" if self.size is None else f"{self.size:,} bytes", self.changed]))


def find_files(root: str, pattern: str) -> list[File]:
    """The files that match a glob, sorted by name. The glob is relative to ``root``, absolute, or an address."""
    whole = pattern if "://" in pattern or os.path.isabs(pattern) else os.path.join(root, pattern)
    if "://" in whole:
        return _find_remote(root, whole)
    # fsspec's local glob supports neither links nor patterns in folder names.
    if glob.has_magic(os.path.basename(whole)):
        for folder in filter(os.path.isdir, glob.glob(os.path.dirname(whole), recursive=True)):
            try:
                os.listdir(folder)
            except OSError as error:
                _refuse_folder(error)
    return _find_local(root, glob.glob(pattern, root_dir=root or None, recursive=True))


def files_below(root: str) -> list[File]:
    """All files below ``root`` that are not hidden, sorted by name."""
    files = _find_remote(root, os.path.join(root, "**/*")) if "://" in root else _find_local(root, _walk(root))
    return [file for file in files if not HIDDEN.search(file.name)]


def refuse_snapshots(files: list[File]) -> None:
    """Raise UserError if the files belong to several snapshots of a dataset in the hub's cache."""
    snapshots: dict[str, set[str]] = {}
    for match in filter(None, (SNAPSHOT.fullmatch(file.address) for file in files)):
        snapshots.setdefault(match[1], set()).add(match[2])
    for folder, commits in snapshots.items():
        if len(commits) > 1:
            names = " or ".join(f"data.root={folder}/{commit}" for commit in sorted(commits))
            raise UserError(f"{folder}: holds {len(commits)} snapshots of a dataset. Name one: {names}")


def _refuse_folder(error: OSError) -> NoReturn:
    """Raise UserError: a glob or walk would silently skip the files of a folder that cannot be listed."""
    if isinstance(error, FileNotFoundError):
        raise UserError(error.filename, "no such folder", "Move the text back there") from error
    raise UserError(
        error.filename,
        f"cannot be listed, and may hold text: {error.strerror}",
        "Make it readable, or name the files in data.train_files",
    ) from error


def _walk(root: str) -> Iterator[str]:
    """Yields the names of all files below a folder. Unlike a glob, it does not follow a link to a parent folder."""
    within = {root: {os.path.realpath(root)}}  # each folder, with itself and its parents
    for folder, folders, names in os.walk(root, followlinks=True, onerror=_refuse_folder):
        above = within.pop(folder)
        inside = {name: os.path.realpath(os.path.join(folder, name)) for name in folders if not name.startswith(".")}
        folders[:] = [name for name, path in inside.items() if path not in above]
        within |= {os.path.join(folder, name): above | {inside[name]} for name in folders}
        yield from (os.path.join(folder, name).removeprefix(root).lstrip("/") for name in names)


def _find_local(root: str, names: Iterable[str]) -> list[File]:
    paths = {name: os.path.join(root, name) for name in sorted(set(names))}  # a glob with several ** finds files twice
    return [
        File(name, path, os.path.getsize(path) if os.path.exists(path) else None)  # None: a broken link
        for name, path in paths.items()
        if not os.path.isdir(path)
    ]


def _find_remote(root: str, address: str) -> list[File]:
    system, path = _file_system(address)
    magic = re.search(r"[*\[]" if address.startswith("http") else r"[*?\[]", path)  # ? begins a web address's query
    base = _file_system(root)[1] if "://" in root else os.path.dirname(path[: magic.start()] if magic else path)

    def look() -> dict[str, dict]:
        with suppress(FileNotFoundError), _reaching():
            return system.glob(path, detail=True) if magic else {path: system.info(path)}
        return {}

    entries = retry(look, address)
    if outside := next((name for name in entries if ".." in re.split(r"[/\\]", unquote(name))), None):
        raise UserError(
            address, f"the server lists {outside}, which is outside its folder", "Name the files in data.train_files"
        )
    return [
        File(name.removeprefix(base).lstrip("/"), system.unstrip_protocol(name), entry.get("size"))
        for name, entry in sorted(entries.items())
        if entry["type"] == "file"
    ]


def with_versions(files: list[File]) -> list[File]:
    """``files``, after the server of each is asked for its size and version: a listing may lack them, or write them
    differently. Files on the hub are at a commit."""

    def ask(file: File) -> File:
        if file.is_local or HUB_FILE.fullmatch(file.address):
            return file
        return retry(partial(_as_served, file), file.address)

    with new_pool(ThreadPool, ASKING_THREADS) as pool:
        answers = pool.map(ask, files)
    if unknown := [file for file in answers if not (file.is_local or file.version())]:
        rule = "its server reports neither size nor version, so a change of the file will go unnoticed"
        log.warning("%s: %s (%s in all)", unknown[0].address, rule, plural(len(unknown), "file"))
    return answers


def require_same_version(file: File) -> None:
    """Raise UserError if the server of a file has another version than ``with_versions`` has found."""
    if not file.changed:
        return
    now = _as_served(file)
    if now.changed and now.version() != file.version():
        versions = f"{file.version()} when it was opened for this run, {now.version()} now"
        raise UserError(
            file.address,
            f"has changed on its server ({versions})",
            "Restore it, or start a new run with another run.dir",
        )


def _as_served(file: File) -> File:
    """A remote file with the size and the version that its server reports; the version is empty if it reports none."""
    system, path = _file_system(file.address)
    with _reaching():
        entry = system.info(path)
    version = next((f"{name} {entry[name]}" for name in VERSIONS if entry.get(name)), "")
    return replace(file, size=entry.get("size"), changed=version)


@contextmanager
def _reaching() -> Iterator[None]:
    """Within this context, a server that is busy or out of reach raises its own error, not fsspec's "not found"."""
    try:
        yield
    except FileNotFoundError as error:
        cause = error.__cause__
        busy = getattr(cause, "status", 0) in (429, *range(500, 600))
        if cause is not None and (busy or isinstance(cause, OSError)) and not isinstance(cause, FileNotFoundError):
            raise cause from None
        raise


def _file_system(address: str) -> tuple[Any, str]:
    """fsspec's file system for an address, and the path in it."""
    try:
        return fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        rule = f"{address.split('://')[0]}:// needs a package that is not installed"
        raise UserError(f"{address}: {rule}: {first_line(error)}") from error


def pin_commits(data: Data, commit: str | None = None) -> tuple[Data, str | None]:
    """``data`` with its hub addresses at fixed commits, and the commit that a run records; None without such addresses.

    The commit is that of the training files' repository, or that of the validation files' if only these are on the hub.
    Without ``commit``, the hub is asked for that of ``data.revision``, or for the newest. Raises UserError if an
    address in another repository, or at another revision, names no commit.
    """
    keys = ("train_files", "root", "validation_files")
    addresses = {key: match for key in keys if (match := HUB_FILE.fullmatch(getattr(data, key) or ""))}
    if not addresses:
        return data, None
    first, (repository, revision, _) = next((key, match.groups()) for key, match in addresses.items())
    revision = revision or data.revision
    commit = commit or _commit(repository, revision)
    fixed = {}
    for key, match in addresses.items():
        at_commit = match[2]
        if key == first or (match[1] == repository and at_commit in (None, revision, commit)):
            at_commit = commit
        elif not COMMIT.fullmatch(at_commit or ""):
            rule = f"is not in the repository and revision of data.{first}, whose commit the run keeps"
            named = f"{match[1]}@{_commit(match[1], at_commit)}{match[3]}"
            raise UserError(f"data.{key}={match[0]}: {rule}. Name a commit: data.{key}={named}")
        fixed[key] = f"{match[1]}@{at_commit}{match[3]}"
    return replace(data, **fixed), commit  # type: ignore[arg-type]


def _commit(repository: str, revision: str | None) -> str | None:
    """The commit on the hub of a revision (default: the newest commit)."""
    from huggingface_hub import HfApi

    name, seconds = repository.removeprefix("hf://datasets/"), FIRST_CONTACT_SECONDS
    fix = "Offline, use data=sample, or data=local data.root=<folder of the shards>"
    if revision is not None:
        fix = f"Is there a revision {revision}? data.revision also takes a branch with a slash in its name. {fix}"
    revision = unquote(revision) if revision else None  # in an address a slash may be written as %2F
    return first_contact(name, lambda: HfApi().dataset_info(name, revision=revision, timeout=seconds), fix).sha


def first_contact(name: str, ask: Callable[[], T], fix: str) -> T:
    """The hub's answer to ``ask``. Raises UserError if there is none within seconds. A busy hub is asked again."""
    # A DNS look-up has no time-out, and a process does not wait for this pool's threads when it ends.
    pool = new_pool(ThreadPool, 1)
    try:
        with pool:
            return _retried(lambda: pool.apply_async(ask).get(FIRST_CONTACT_SECONDS), name, seconds=0.0)
    except Exception as error:  # the types differ between versions of the client
        raise hub_error(name, error, fix) from error


def hub_error(name: str, error: Exception, fix: str) -> UserError:
    """The error for a repository that the hub does not give."""
    rule = f"the Hugging Face hub denied access or did not answer: {first_line(error)}"
    if type(error).__name__ == "GatedRepoError":
        rule, fix = "its owner asks for an agreement", OPEN_GATE
    return UserError(name, rule, fix)


def retry(ask: Callable[[], T], name: str) -> T:
    """The answer of ``ask``, with retries. Raises UserError, which names the address, if it fails for good."""
    try:
        return _retried(ask, name, RETRY_SECONDS)
    except UserError:
        raise
    except Exception as error:  # socket errors are OSErrors as well, but do not concern a disk
        if type(error).__name__ == "GatedRepoError":
            raise hub_error(name, error, OPEN_GATE) from error
        said = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name}: cannot be read: {said[:400]}. The same command continues once it answers") from error


def _retried(ask: Callable[[], T], name: str, seconds: float) -> T:
    """The answer of ``ask``, which is repeated after temporary errors for up to ``seconds`` seconds.

    A server that answers with an error is retried for RETRY_SECONDS: many jobs may start together and keep it busy.
    """
    since, wait = time.monotonic(), FIRST_WAIT_SECONDS
    with noting_silence(f"no answer from {name}", FIRST_NOTE_SECONDS, NOTE_SECONDS):
        while True:
            try:
                return ask()
            except (FileNotFoundError, PermissionError, UserError):
                raise
            except Exception as error:  # the types differ between file systems
                answer = getattr(error, "response", error)
                status = getattr(answer, "status_code", None) or getattr(answer, "status", None)
                allowed = seconds if status is None else RETRY_SECONDS
                final = status in FINAL_STATUSES or type(error).__name__ in FINAL_ERRORS
                if final or time.monotonic() - since >= allowed:
                    raise
                asked = str((getattr(answer, "headers", None) or {}).get("Retry-After", ""))
                pause = max(wait * _jitter.uniform(0.5, 1.5), float(asked) if asked.isdigit() else 0.0)
                log.info("%s: %s; retrying in %.1f s", name, first_line(error), pause)
                time.sleep(pause)
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)


class RemoteFile(AbstractBufferedFile):
    """A remote file. The range of a failed request is requested again."""

    def __init__(self, file: File):
        self._file = file
        self._stream: Any = None  # until the first request, and after an error
        super().__init__(*_file_system(file.address), "rb", RANGE_BYTES, cache_type="none", size=file.size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        ranges = [(position, min(position + RANGE_BYTES, end)) for position in range(start, end, RANGE_BYTES)]
        return b"".join(retry(partial(self._ask, *one), self._file.address) for one in ranges)

    def _ask(self, start: int, end: int) -> bytes:
        try:
            if self._stream is None:
                require_same_version(self._file)  # ranges of two versions make no file
                self._stream = self.fs.open(self.path, "rb", block_size=RANGE_BYTES, cache_type="none")
            self._stream.seek(start)
            content = self._stream.read(end - start)
            if len(content) < end - start:
                raise ConnectionError(f"the answer ended at byte {start + len(content):,} of {self.size:,}")
            return content
        except Exception:
            self._stream = None
            raise


def open_file(file: File, cache: str | None = None) -> BinaryIO:
    """Open a file for reading bytes. With a folder ``cache``, a remote file is fetched once and read from there."""
    if file.is_local:
        try:
            return open(file.address, "rb")
        except OSError as error:
            fix = "Was it moved? Check data.root, data.train_files and data.validation_files"
            nowhere = os.path.islink(file.address) and not os.path.exists(file.address)
            link = f": it is a broken link to {os.readlink(file.address)}" if nowhere else ""
            raise UserError(f"{file.address}: {error.strerror}{link}. {fix}") from error
    if cache is not None:
        return _cached(file, Path(cache, re.sub(r"[^\w.=@-]+", "/", file.address)))
    if file.size is not None:
        return io.BufferedReader(RemoteFile(file), RANGE_BYTES)
    system, path = _file_system(file.address)  # a server that does not report the size does not send ranges

    def fetch() -> bytes:
        require_same_version(file)
        return system.cat_file(path)

    return io.BytesIO(retry(fetch, file.address))


def _cached(file: File, path: Path) -> BinaryIO:
    """The copy of this version of a file, fetched if missing. Unlike with fsspec's caches, no process sees half of it.

    It lies at ``path``, or if the server names versions, in a folder beside it with the name of the version.
    """
    if file.changed:
        others = [other for other in path.parent.glob(f".versions/*/{glob.escape(path.name)}") if other.is_file()]
        version = hashlib.sha256(file.version().encode()).hexdigest()[:16]
        path = path.parent / ".versions" / version / path.name
        if others and path not in others:
            rule = f"has changed on its server ({file.version()} now), and is fetched again"
            write_to_stderr(f"note: {file.address}: {rule}. Its earlier copies remain in {path.parent.parent}")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)  # others may fetch it as well
        try:
            with naming(path), draft.open("wb") as target, open_file(file) as source:
                shutil.copyfileobj(source, target, RANGE_BYTES)
                os.fsync(target.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    return path.open("rb")
