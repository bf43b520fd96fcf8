"""Shards of the hub on the local disk: each is written when it is first read, and later read from the disk.

An incomplete shard is named ``<shard>.part`` and holds the bytes read so far, from the first on without a gap, so that
a run that starts again fetches nothing twice. Any number of processes may share a cache: they write the same bytes to
the same positions, and none leaves a gap.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from dlr_pretrain.util.errors import UserError


class Stored:
    """A range of bytes of an open file. Another process may rename the file in the meantime."""

    def __init__(self, file: BinaryIO, first: int, end: int):
        self._file, self._first, self._end = file, first, end

    def result(self) -> bytes:
        with self._file as file:
            file.seek(self._first)
            content = file.read(self._end - self._first)
        if len(content) < self._end - self._first:
            raise UserError(f"{file.name}: became shorter while it was read. Leave the files in data.cache alone")
        return content

    def abandon(self) -> None:
        self._file.close()


class ShardCache:
    """The shards of one commit of a dataset, below ``folder`` under their names on the hub; ``sizes`` are in bytes."""

    def __init__(self, folder: Path, sizes: dict[str, int]):
        self._folder, self._sizes = folder, sizes

    def find(self, shard: str, first: int, end: int) -> Stored | None:
        """The bytes first..end of a shard; None if they are not all in the cache."""
        path, part = self._paths(shard)
        for place in (part, path):  # the part first: it may be renamed to the whole shard in between
            try:
                file = place.open("rb")
            except FileNotFoundError:
                continue
            except OSError as error:
                raise _failed(place, error) from error
            size = os.fstat(file.fileno()).st_size
            if place is path and size != self._sizes[shard]:
                file.close()
                rule = f"has {size:,} bytes, and {self._sizes[shard]:,} on the hub"
                raise UserError(f"{path}: {rule}. Delete it, and it is fetched again")
            if size >= end:
                return Stored(file, first, end)
            file.close()
        return None

    def add(self, shard: str, first: int, content: bytes) -> None:
        """Write a range of a shard, unless it is already there or the bytes before it are missing."""
        path, part = self._paths(shard)
        end = first + len(content)
        if path.exists():
            return
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(part, os.O_RDWR | (os.O_CREAT if first == 0 else 0), 0o666)
            with os.fdopen(handle, "r+b") as file:
                there = os.fstat(handle).st_size
                if first <= there < end:
                    file.seek(first)
                    file.write(content)
                    file.flush()
                if first <= there and end == self._sizes[shard]:
                    os.fsync(handle)
                    os.replace(part, path)
        except FileNotFoundError:  # there is no part yet, or another process has just completed it
            return
        except OSError as error:
            raise _failed(part, error) from error

    def _paths(self, shard: str) -> tuple[Path, Path]:
        """The paths of the whole shard and of its part."""
        return self._folder / shard, self._folder / f"{shard}.part"


def _failed(path: Path, error: OSError) -> UserError:
    return UserError(f"data.cache: {path}: {error.strerror}. Fix this, or leave data.cache out")
