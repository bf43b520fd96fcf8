"""Running out of memory says what helps."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.train.update import Update, explained
from dlr_pretrain.util.errors import UserError


def test_a_run_that_is_out_of_memory_says_so(train, tmp_path, monkeypatch):
    def fails(*_, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB")

    monkeypatch.setattr(Update, "__call__", fails)
    with pytest.raises(UserError, match=r"out of memory on rank 0 with train\.micro_batch=2 of 8 x 32 tokens"):
        train(tmp_path / "run")


@pytest.mark.parametrize(("error", "kind"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79.11 GiB."), UserError),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), UserError),
    (RuntimeError("Triton Error [CUDA]: out of memory"), UserError),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5120000000000 bytes"), UserError),
    (MemoryError("Unable to allocate 479. GiB for an array with shape (1000000000, 257)"), UserError),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
])  # fmt: skip
def test_out_of_memory_says_what_helps_also_where_a_rank_fails_alone(error, kind, words, capfd):
    rank_1 = SimpleNamespace(rank=1, world_size=2, is_main=False)
    with pytest.raises(kind) as caught, explained(load(words(), 2), rank_1):
        raise error
    text = str(caught.value)
    if kind is UserError:
        assert text.startswith("out of memory on rank 1 with train.micro_batch=2 of 8 x 32") and "\n" not in text
        assert str(error).partition(". ")[0] in text
        assert "scripts/plan.py" in text
        assert capfd.readouterr().err == f"error: {text}\n"
