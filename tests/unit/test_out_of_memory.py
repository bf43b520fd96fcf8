"""Running out of GPU memory ends a run with what to try, by the plan's figures, and leaves a snapshot."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.analysis.memory_savings import ways_to_save
from dlr_pretrain.cli import load
from dlr_pretrain.train.descent import Descent
from dlr_pretrain.train.out_of_memory import dump, explained
from dlr_pretrain.util.errors import EXIT_FAILED, UserError

ERROR = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.2 GiB is free."
)
BIG = ("scale=350m", "scale.num_layers=3", "data=sample", "logger=jsonl")


def without_machine(*words: str, ranks: int = 1):
    return load([*BIG, *words], ranks, machine=False)


def test_the_run_ends_with_overrides_to_try(train, tmp_path, monkeypatch):
    def fails(self, batch, index, lr, failed):
        if index == 3:
            raise torch.OutOfMemoryError(ERROR)
        return update(self, batch, index, lr, failed)

    update = Descent.update
    monkeypatch.setattr(Descent, "update", fails)
    with pytest.raises(UserError) as caught:
        train(tmp_path / "run", "backbone=cola", "dlr=on")
    text = str(caught.value)
    assert caught.value.exit_code == EXIT_FAILED
    assert text.startswith("out of GPU memory on rank 0 with train.micro_batch=2: 2.50 GiB were asked for\n")
    assert re.search(r"^  train\.micro_batch=1 +0\.00 GB$", text, re.MULTILINE)
    assert "  train.micro_batch=1 train.activation_checkpointing=latent " in text
    assert "goes on from the last checkpoint" in text
    monkeypatch.setattr(Descent, "update", update)
    assert (train(tmp_path / "run", "backbone=cola", "dlr=on", "train.micro_batch=1") / "folded").exists()


@pytest.mark.parametrize(("words", "ranks", "expected"), [
    (("backbone=cola", "train.micro_batch=8"), 2, {
        "train.micro_batch=4", "train.activation_checkpointing=latent", "train.activation_checkpointing=block",
        "train.micro_batch=4 train.activation_checkpointing=latent",
        "train.micro_batch=4 train.activation_checkpointing=block", "parallel=fsdp"}),
    (("backbone=full", "train.micro_batch=1", "train.global_batch=1"), 1, set()),  # the peak is in the update
    (("backbone=full", "precision=bf16_mixed", "train.micro_batch=1"), 1,
     {"precision=bf16"}),  # the peak is in the update
    (("backbone=lowrank", "train.micro_batch=1", "train.activation_checkpointing=block"), 1, set()),
    (("backbone=cola", "dlr=on", "probe=on", "train.micro_batch=1", "train.activation_checkpointing=block"), 2, set()),
])  # fmt: skip
def test_ways_are_those_that_the_run_can_take(words, ranks, expected):
    cfg = without_machine(*words, ranks=ranks)
    now, ways = ways_to_save(cfg, 32000, ranks)
    assert {way.words for way in ways} == expected
    assert now == memory(cfg, 32000, ranks).total
    assert [way.same for way in ways] == sorted((way.same for way in ways), reverse=True)
    for way in ways:
        given = {word.split("=")[0] for word in way.words.split()}
        other = [word for word in words if word.split("=")[0] not in given]
        assert way.bytes == memory(without_machine(*other, *way.words.split(), ranks=ranks), 32000, ranks).total < now


@pytest.fixture
def gpu(monkeypatch):
    """What a rank with a GPU would answer."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 77_100_000_000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1_000_000_000, 84_940_000_000))
    return SimpleNamespace(device=torch.device("cuda", 1), rank=1, world_size=2, is_main=False)


def test_a_gpu_says_what_it_held_and_leaves_a_snapshot(gpu, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: open(path, "w").close())
    cfg = without_machine("backbone=cola", "train.micro_batch=256", f"run.dir={tmp_path}/run", ranks=2)
    with pytest.raises(UserError) as caught, explained(cfg, gpu, 32000):
        raise torch.OutOfMemoryError(ERROR)
    text = str(caught.value)
    assert "2.50 GiB were asked for, 77.10 GB were allocated at the peak, and the GPU has 84.94 GB" in text
    assert "  train.micro_batch=128 " in text and "  parallel=fsdp " in text
    assert f"{tmp_path}/run/profile/out_of_memory_rank1.pickle, for https" in text
    assert (tmp_path / "run" / "profile" / "out_of_memory_rank1.pickle").exists()
    assert capfd.readouterr().err == f"error: {text}\n"  # a rank that fails alone speaks for itself


@pytest.mark.parametrize("error", [
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Triton Error [CUDA]: out of memory",
])  # fmt: skip
def test_what_allocates_past_the_allocator_runs_out_too(error, gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: open(path, "w").close())
    cfg = without_machine("backbone=cola", "train.micro_batch=256", f"run.dir={tmp_path}/run", ranks=2)
    with pytest.raises(UserError, match="out of GPU memory on rank 1"), explained(cfg, gpu, 32000):
        raise RuntimeError(error)
    with pytest.raises(RuntimeError, match="an illegal memory access"), explained(cfg, gpu, 32000):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_snapshot_that_cannot_be_written_hides_nothing(gpu, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    assert dump(tmp_path / "profile", gpu).startswith("No snapshot of the memory: ")
