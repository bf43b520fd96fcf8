"""Writes a safetensors file durably and hashes it in the same pass."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
          torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}  # fmt: skip
WRITE_BYTES = 1 << 22  # hashed and written at a time
Throttle = Callable[[float], object]


def unthrottled(seconds: float) -> None:
    """Makes no pause between blocks: the default of ``write_safetensors``."""


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], throttle: Throttle = unthrottled) -> dict:
    """Write ``tensors`` durably and hash them, in one pass; returns {"bytes", "sha256"} of the file.

    ``throttle(seconds)`` is called after each block, with the time that the block took. The safetensors library would
    first copy everything, and its file would have to be read again for the checksum.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for content in _contents(encoded, tensors.values()):
            for at in range(0, len(content), WRITE_BYTES):
                block, began = content[at : at + WRITE_BYTES], time.perf_counter()
                digest.update(block)
                if file.write(block) != len(block):  # on a full disk, an unbuffered file first writes less
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                size += len(block)
                throttle(time.perf_counter() - began)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _contents(header: bytes, tensors: Iterable[Tensor]) -> Iterable[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in tensors:
        if tensor.numel():
            yield memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
