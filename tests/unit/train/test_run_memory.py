"""train.micro_batch=auto takes the largest micro-batch that fits, and running out of memory says what helps."""

from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain import __main__ as command
from dlr_pretrain.cli import load
from dlr_pretrain.doctor import RankChecks
from dlr_pretrain.train.guard import StopRequest
from dlr_pretrain.train.micro_batch import USABLE_SHARE, explain_out_of_memory, planned_memory, resolve_micro_batch
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.update import Update
from dlr_pretrain.util.errors import UserError


def test_auto_fits_the_rank_with_the_least_memory(words, tmp_path, monkeypatch):
    """Two ranks with 4 sequences each, which take 100 bytes a sequence and 50 in addition."""
    cfg, room = load(words("train.micro_batch=auto"), 2), [470.0, 299.0]
    planned = "dlr_pretrain.train.micro_batch.planned_memory"
    monkeypatch.setattr(planned, lambda of, vocab_size, world: 100 * of.train.micro_batch + 50)
    (tmp_path / "manifest.json").write_text('{"identity": {}, "starts": []}')

    def resolved() -> int:
        ranks = SimpleNamespace(device=torch.device("cuda"), world_size=2, on_main=lambda act: act())
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (room[0] / USABLE_SHARE, 1e9))
        other = max((n for n in (1, 2, 4) if 100 * n + 50 <= room[1]), default=0)
        ranks.gather = lambda own: [own, (other, room[1])]
        return resolve_micro_batch(cfg, ranks, 120, tmp_path).train.micro_batch

    assert resolved() == 2
    room[:] = [1e6, 1e6]
    assert resolved() == 2
    room[0] = 249.0  # a kept number needs no reserve
    assert resolved() == 2
    room[0] = 249.0 * USABLE_SHARE  # but it must fit
    assert resolved() == 1
    update_record(tmp_path, {"micro_batch": {}})
    room[0] = 1e6
    assert resolved() == 4
    room[1] = 149.0
    update_record(tmp_path, {"micro_batch": {}})
    with pytest.raises(UserError, match=r"auto: not even one sequence of train.seq_len=32 fits in 0.0 GB.* nvidia-smi"):
        resolved()
    assert cfg.micro_batch(2) == 4  # in a plan and on a CPU the scale decides


def test_runs_and_doctor_resolve_the_micro_batch(words, tmp_path, monkeypatch):
    class Asked(Exception):
        pass

    def resolve(cfg, ranks, vocab_size, run_dir):
        assert planned_memory(cfg, vocab_size, 1) > 0
        assert resolve_micro_batch(cfg, ranks, vocab_size, run_dir) is cfg  # on a CPU
        raise Asked

    monkeypatch.setattr("dlr_pretrain.train.run.resolve_micro_batch", resolve)
    monkeypatch.setattr("dlr_pretrain.doctor.resolve_micro_batch", resolve)
    given = [word for word in words(f"run.dir={tmp_path}/run") if not word.startswith("train.micro_batch=")]
    cfg = load(given)
    assert cfg.train.micro_batch == "auto"
    with pytest.raises(Asked):
        command.run_and_report(cfg)
    with Ranks(cfg) as ranks:
        checks = RankChecks(cfg, ranks, StopRequest(ranks))
        checks.corpus = SimpleNamespace(vocab_size=120)
        with pytest.raises(Asked):
            checks.step()


def test_a_run_that_is_out_of_memory_says_so(train, tmp_path, monkeypatch):
    def fails(*_, **_named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB")

    monkeypatch.setattr(Update, "__call__", fails)
    with pytest.raises(UserError, match=r"out of memory on rank 0 with train\.micro_batch=2 of 8 x 32 tokens"):
        train(tmp_path / "run")


@pytest.mark.parametrize(("place", "said"), [
    ("dlr_pretrain.train.run.new_model",
     "rank 0 with a model of scale=tiny, before any batch: .*Use parallel=fsdp"),
    ("dlr_pretrain.train.run.new_optimizer", "on rank 0 with a model of scale=tiny, before any batch"),
    ("dlr_pretrain.data.loader.np.empty",
     "the training data, 8 sequences of 32 tokens per rank .*train.global_batch"),
])  # fmt: skip
def test_other_memory_errors_do_not_blame_the_micro_batch(train, tmp_path, monkeypatch, place, said):
    def fails(*_, **_named):
        raise MemoryError("Unable to allocate 479. GiB")

    monkeypatch.setattr(place, fails)
    with pytest.raises(UserError, match=said) as caught:
        train(tmp_path / "run")
    assert "micro_batch" not in str(caught.value)


@pytest.mark.parametrize(("error", "kind"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has 79.11 GiB."), UserError),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), UserError),
    (RuntimeError("Triton Error [CUDA]: out of memory"), UserError),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5120000000000 bytes"), UserError),
    (MemoryError("Unable to allocate 479. GiB for an array with shape (1000000000, 257)"), UserError),
    (RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError),
])  # fmt: skip
def test_out_of_memory_says_what_helps(error, kind, words, capfd):
    rank_1 = SimpleNamespace(rank=1, world_size=2, is_main=False)
    with pytest.raises(kind) as caught, explain_out_of_memory(load(words(), 2), rank_1):
        raise error
    text = str(caught.value)
    if kind is UserError:
        assert text.startswith("out of memory on rank 1 with train.micro_batch=2 of 8 x 32") and "\n" not in text
        assert str(error).partition(". ")[0] in text
        assert "scripts/plan.py" in text
        assert capfd.readouterr().err == f"error: {text}\n"
