"""Files that a crash cannot damage, checked reading of JSON, and locks on folders."""

import fcntl
import hashlib
import json
import mmap
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import Any, TextIO, TypeVar

from dlr_pretrain.util.errors import FIXES, UserError, naming

MARK = ".dlr_pretrain"  # in a folder of results: the command that wrote them
SHARED_MEMORY = Path("/dev/shm")
LOCK = ".lock"  # in a folder that a process holds
LOCK_SECONDS = 1.0  # between looks at a lock that another process holds
EXPIRY = 60.0  # seconds without a heartbeat after which the holder of a run directory counts as dead
Shape = type | UnionType | dict[str, "Shape"] | list["Shape"]  # see ``misfit``
NUMBER = int | float
T = TypeVar("T")
BEAT: Shape = {"host": str, "pid": int, "machine": str, "token": str, "time": NUMBER}


def write_durably(path: Path, content: str | bytes) -> None:
    """Replace ``path`` with ``content``. A crash leaves either the old file or the new one, whole."""
    draft = draft_of(path)
    try:
        with naming(path):
            draft.write_bytes(content.encode() if isinstance(content, str) else content)
        sync(draft)
        os.replace(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    sync(path.parent)


def draft_of(path: Path) -> Path:
    """A hidden name beside ``path``, of this process and thread: several may write the same file at once."""
    return path.with_name(f".{path.name}.tmp{os.getpid()}_{threading.get_ident()}")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8. An error names the file."""
    with naming(path):
        path.write_text(text, encoding="utf-8")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file's content. An error names the copy."""
    with naming(target):
        shutil.copyfile(source, target)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ----------------------------------------------------------------------------------------------------
# What a file system may refuse. Modes and locks (``lock``) serve comfort, and may fail: those of cloud storage and of
# Windows have none. What keeps saved work may not.


def share_mode(path: Path) -> None:
    """Let those read ``path`` who can read its folder: safetensors makes files private, whatever the umask."""
    with suppress(OSError):
        path.chmod(path.parent.stat().st_mode & 0o666)


def require_durable(folder: Path) -> None:
    """Before anything is written into ``folder``: raise UserError if its file system refuses what keeps saved work.

    Tries each operation in a hidden folder there, or in the nearest folder above that exists.
    """
    place = nearest_folder(folder)
    scratch = place / f".dlr_pretrain-{uuid.uuid4().hex[:8]}"
    path, other, renamed = scratch / "a", scratch / "b", scratch.with_name(f"{scratch.name}-renamed")

    def map_into_memory() -> None:
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            os.pwrite(file.fileno(), b"b", 0)

    operations: dict[str, Callable[[], object]] = {
        "creating a folder": scratch.mkdir,
        "creating a file": lambda: (path.write_bytes(b"a"), other.write_bytes(b"b")),
        "flushing a file to the disk (fsync)": lambda: sync(path),
        "replacing a file by another (rename)": lambda: other.replace(path),
        "mapping a file into memory and overwriting it": map_into_memory,
        "flushing a folder to the disk (fsync)": lambda: sync(scratch),
        "renaming a folder that holds a file": lambda: scratch.rename(renamed),
        "deleting a file": (renamed / path.name).unlink,
    }
    try:
        for operation, act in operations.items():
            try:
                act()
            except OSError as error:
                raise UserError(
                    place,
                    f"{operation} fails on this file system ({file_system(place)}): {error.strerror}",
                    FIXES.get(error.errno or 0, "Saved work would not be safe there. Name a place on another disk"),
                ) from error
    finally:
        for left in (scratch, renamed):
            shutil.rmtree(left, ignore_errors=True)


def nearest_folder(path: Path) -> Path:
    """``path``, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def new_pool(kind: Callable[..., T], *options: Any) -> T:
    """A pool of threads or processes. Raises UserError if the system refuses its semaphores, which are files too."""
    try:
        return kind(*options)
    except OSError as error:
        raise UserError(
            SHARED_MEMORY,
            f"{error.strerror}. Pools of workers need it for semaphores",
            "Start the container with one that can be written, such as docker's --shm-size=8g",
        ) from error


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``, and where it is mounted (on Linux)."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return "of unknown type"
    kinds = {
        Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), mount)): kind for _, mount, kind, *_ in mounts
    }
    point = max((point for point in kinds if path.resolve().is_relative_to(point)), key=lambda point: len(point.parts))
    return f"{kinds[point]}, mounted at {point}"


def sha256_of(path: Path) -> str:
    with path.open("rb") as file, naming(path):
        return hashlib.file_digest(file, "sha256").hexdigest()


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether ``condition()`` becomes true within ``seconds``, as when a network file system shows a new file late."""
    deadline = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def refuse_foreign(folder: Path, key: str, kind: str, ours: bool, expected: Collection[str] = ()) -> None:
    """Before anything is written into ``folder``: raise UserError unless it is ``ours`` or holds no files.

    Hidden files, logs and the names ``expected`` do not count. The message names the ``key`` that chose the folder, and
    the ``kind`` of content that would be ours.
    """
    if ours or not folder.exists():
        return
    others = {path.name for path in folder.iterdir() if path.name[0] != "."} - {*expected}
    if names := sorted(name for name in others if not name.endswith((".log", ".out", ".err"))):
        raise UserError(f"{key}={folder}: is not empty (it has {names[0]}), and holds no {kind}. Name a new folder")


def claim(folder: Path, command: str) -> None:
    """Make ``folder`` that of the results of ``command``, which may then overwrite them; see ``refuse_foreign``."""
    path = folder / MARK
    ours = path.is_file() and path.read_text(encoding="utf-8", errors="replace") == command
    refuse_foreign(folder, "--output", f"results of {command}", ours)
    folder.mkdir(parents=True, exist_ok=True)
    if not ours:
        write_durably(path, command)


def user_cache() -> Path:
    """This project's folder in the user's cache, or among temporary files if that is not writable."""
    with suppress(OSError, RuntimeError):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dlr_pretrain")
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    folder = Path(tempfile.gettempdir(), f"dlr_pretrain-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise UserError(
            folder,
            "is a link, or other users may write to it, so its content may have been planted",
            "Remove it, or set XDG_CACHE_HOME to a folder of your own",
        )
    return folder


@contextmanager
def locked(folder: Path, wait: Callable[[str], None] | None = None) -> Iterator[bool]:
    """Hold ``folder`` for this process within the context. The kernel releases the lock if the process is killed.

    If another process holds it, ``wait`` is called with that process's name and this one waits; without ``wait`` this
    raises UserError. It also does if the file system refuses what keeps saved work. If it has no locks, every process
    may enter; yields whether it has. The lock is a file in the folder, which may be moved or deleted within.
    """
    require_durable(folder)
    path, waits = folder / LOCK, False
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8") as file:

            def is_current(file: TextIO = file) -> bool:
                with suppress(FileNotFoundError):
                    return os.path.samestat(os.fstat(file.fileno()), path.stat())
                return False

            if (alone := lock(file.fileno())) is False:
                file.seek(0)
                holder = file.read() or "another process"
                if wait is None:
                    fix = "Wait for it, stop it, or name another folder"
                    raise UserError(f"{folder} is being written by {holder}. {fix}")
                if not waits:
                    wait(holder)
                waits = True
                time.sleep(LOCK_SECONDS)
                continue
            if not is_current():  # the former holder has deleted it since it was opened
                continue
            with naming(path):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
            try:
                yield bool(alone)
            finally:
                if is_current():
                    path.unlink()
            return


def lock(descriptor: int) -> bool | None:
    """Lock an open file. Returns False if another process holds it, None if the file system (Lustre) has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def read_json(path: Path, shape: Shape) -> dict:
    """The object in a JSON file. Raises ValueError, which says why, if it does not fit ``shape`` (see ``misfit``)."""
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if wrong := misfit(content, shape):
        raise ValueError(wrong)
    return content


def fits(path: Path, shape: Shape) -> bool:
    """Whether a file exists and holds a JSON object of this ``shape``."""
    with suppress(OSError, ValueError):
        read_json(path, shape)
        return True
    return False


def misfit(content: Any, shape: Shape, name: str = "it") -> str:
    """The first difference of ``content``, from a JSON file, from ``shape``, in words; empty if it fits.

    A shape is a type, a list with the shape of every item, or a dict with the shapes of some entries. An entry whose
    name ends with a question mark may be missing; "*" gives the shape of all entries.
    """
    is_of_type = isinstance(content, type(shape) if isinstance(shape, (dict, list)) else shape)
    if not is_of_type:
        return f"{name} is of type {type(content).__name__}"
    parts: list[tuple[str, Any, Shape]] = []
    if isinstance(shape, list):
        parts = [(f"{name}[{i}]", item, shape[0]) for i, item in enumerate(content)]
    elif isinstance(shape, dict):
        for key, inside in shape.items():
            if key == "*":
                parts += [(f"{name}.{inner}", value, inside) for inner, value in content.items()]
            elif (inner := key.removesuffix("?")) in content:
                parts.append((inner, content[inner], inside))
            elif inner == key:
                return f"{name} has no {key}"
    return next(filter(None, (misfit(value, inside, inner) for inner, value, inside in parts)), "")


def read_beat(run_dir: Path, rank: int) -> dict:
    """The last heartbeat of a run's rank (see ``train.heartbeat``); {} if it is absent or damaged.

    Every call opens the file, because a file server shows other machines' writes only on opening.
    """
    try:
        return read_json(run_dir / ".beats" / str(rank), BEAT)
    except (FileNotFoundError, ValueError):
        return {}


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics file, without damaged lines, which a power failure may leave."""
    return sound_records(path)[0]


def last_record(path: Path) -> dict:
    """The last record of ``read_metrics``, from the end of the file alone; empty if it holds none."""
    return next(reversed(sound_records(path, last_bytes=1 << 16)[0]), {})


def sound_records(path: Path, last_bytes: int | None = None) -> tuple[list[dict], int]:
    """The records of ``read_metrics`` and the number of damaged lines; with ``last_bytes``, of that end of the file.

    An incomplete last line, which a killed run leaves, is neither. The last record of a step counts: a step is recorded
    again once an evaluation that was abandoned has been made up for.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        if last_bytes is not None and path.stat().st_size > last_bytes:
            file.seek(-last_bytes, os.SEEK_END)
            file.readline()  # the rest of a line
        lines = file.read().split(b"\n")[:-1]
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if not misfit(record, {"step": int}):
                records.append(record)
    return [*{record["step"]: record for record in records}.values()], len(lines) - len(records)
