"""train.micro_batch=auto takes the largest micro-batch that fits, and running out of memory says what helps."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.analysis.memory import peak_bytes
from dlr_pretrain.cli import load
from dlr_pretrain.train import memory
from dlr_pretrain.train.memory import explained
from dlr_pretrain.train.update import Update
from dlr_pretrain.util.errors import Stopped, UserError
from tests.conftest import forked, saved


def room_for(rows: int, cfg, ranks: int, monkeypatch) -> None:
    """Let the machine have just the memory that ``rows`` sequences are estimated to take on each rank."""
    size = peak_bytes(cfg.with_micro_batch(rows), 120, ranks)
    monkeypatch.setattr(memory, "available_memory", lambda: int(size * ranks / memory.CPU_SHARE) + 1000)


def recorded(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())["micro_batch"]


@pytest.mark.usefixtures("no_export")
def test_a_run_keeps_what_it_chose_when_it_goes_on(train, words, tmp_path, monkeypatch):
    """Bit for bit the undisturbed run of that number, though the machine has less memory by then.

    What was noted by a start that saved nothing does not count.
    """
    asked = ("train.micro_batch=auto", "train.steps=6", "checkpoint.every=3", "backbone=cola", "dlr=on")
    cfg = load(words(*asked))
    (tmp_path / "auto").mkdir()
    (tmp_path / "auto" / "manifest.json").write_text('{"identity": {}, "starts": [], "micro_batch": {"1": 8}}')
    room_for(4, cfg, 1, monkeypatch)
    with pytest.raises(Stopped):
        train(tmp_path / "auto", *asked, "train.stop_after=3")
    assert recorded(tmp_path / "auto") == {"1": 4}
    room_for(1, cfg, 1, monkeypatch)
    train(tmp_path / "auto", *asked)
    assert recorded(tmp_path / "auto") == {"1": 4}
    train(tmp_path / "four", "train.micro_batch=4", *asked[1:])
    one, other = (saved(tmp_path / name / "checkpoints/step_00000006") for name in ("auto", "four"))
    assert all(one[name].equal(other[name]) for name in one | other)


@pytest.mark.usefixtures("no_export")
def test_ranks_take_the_smallest_answer(words, tmp_path, monkeypatch):
    """Rank 1 has room for one sequence, rank 0 for all four of its share."""
    given = words("train.micro_batch=auto", "train.steps=2", f"run.dir={tmp_path}/run")
    one = peak_bytes(load(given, 2).with_micro_batch(1), 120, 2)
    monkeypatch.setattr(memory, "free_memory", lambda ranks: one if ranks.rank == 1 else 1e12)
    forked(given, 2)
    assert recorded(tmp_path / "run") == {"2": 1}


def test_what_does_not_fit_at_all_is_said_before_the_model_is_made(train, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"micro_batch=auto: not one sequence of train.seq_len=32 fits in 0.0 GB. Use"):
        train(tmp_path / "run", "train.micro_batch=auto")


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
        assert "train.micro_batch=auto" in text and "scripts/plan.py" in text
        assert capfd.readouterr().err == f"error: {text}\n"
