"""train.micro_batch=auto: the largest that fits, the same on all ranks and for as long as the run lives."""

from __future__ import annotations

import json

import pytest

from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.analysis.scaling import assume, on_paper, with_micro_batch
from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.train import micro_batch
from dlr_pretrain.train.micro_batch import largest
from dlr_pretrain.util.errors import Stopped, UserError
from tests.conftest import forked, saved


@pytest.mark.parametrize(("limit", "start"), [(8, 1), (8, 8), (8, 16), (1, 16), (16, 2), (0, 4), (0, 1)])
def test_sizes_are_tried_up_and_down_from_the_estimate(limit, start):
    tried = []

    def fit(size: int) -> bool:
        tried.append(size)
        return size <= limit

    assert largest([1, 2, 4, 8, 16], start, fit) == limit
    assert len(tried) == len(set(tried))


def room_for(rows: int, cfg, ranks: int, monkeypatch) -> None:
    """Let the machine have just the memory that ``rows`` sequences are estimated to take on each rank."""
    size = memory(with_micro_batch(cfg, rows), 120, ranks).total
    monkeypatch.setattr(micro_batch, "available_memory", lambda: int(size * ranks / micro_batch.CPU_SHARE) + 1000)


def recorded(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())["micro_batch"]


@pytest.mark.usefixtures("no_export")
def test_a_run_keeps_what_it_chose_when_it_goes_on(train, words, tmp_path, monkeypatch):
    """Bit for bit the undisturbed run of that number, though the machine has less memory by then."""
    asked = (
        "train.micro_batch=auto",
        "train.steps=6",
        "checkpoint.every=3",
        "precision=bf16",
        "backbone=cola",
        "dlr=on",
    )
    cfg = load(words(*asked))
    room_for(4, cfg, 1, monkeypatch)
    with pytest.raises(Stopped):
        train(tmp_path / "auto", *asked, "train.stop_after=3")
    assert recorded(tmp_path / "auto") == {"1": 4}
    room_for(1, cfg, 1, monkeypatch)
    train(tmp_path / "auto", *asked)
    assert recorded(tmp_path / "auto") == {"1": 4}
    train(tmp_path / "four", "train.micro_batch=4", *asked[1:])
    end = "checkpoints/step_00000006"
    one, other = saved(tmp_path / "auto" / end), saved(tmp_path / "four" / end)
    assert all(one[name].equal(other[name]) for name in one | other)


@pytest.mark.usefixtures("no_export")
def test_a_start_that_saved_nothing_leaves_no_choice_behind(train, words, tmp_path, monkeypatch):
    asked = ("train.micro_batch=auto", "train.steps=2")
    cfg = load(words(*asked))
    room_for(2, cfg, 1, monkeypatch)
    (tmp_path / "run").mkdir()
    record = {"identity": {}, "starts": [], "micro_batch": {"1": 8}}
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(record))
    train(tmp_path / "run", *asked)
    assert recorded(tmp_path / "run") == {"1": 2}


@pytest.mark.usefixtures("no_export")
def test_ranks_take_the_smallest_answer(words, tmp_path, monkeypatch):
    """Rank 1 has room for one sequence, rank 0 for all four of its share."""
    given = words("train.micro_batch=auto", "train.steps=2", f"run.dir={tmp_path}/run")
    monkeypatch.setattr(micro_batch, "free_memory", lambda runtime: 0.0 if runtime.rank == 1 else 1e12)
    monkeypatch.setattr(micro_batch, "fitting", lambda cfg, vocab_size, ranks, room: 4 if room else 1)
    forked(given, 2)
    assert recorded(tmp_path / "run") == {"2": 1}


def test_what_does_not_fit_at_all_is_said_before_the_model_is_made(train, tmp_path, monkeypatch):
    monkeypatch.setattr(micro_batch, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"micro_batch=auto: not one sequence of train.seq_len=32 fits in 0.0 GB. Use"):
        train(tmp_path / "run", "train.micro_batch=auto")


def test_the_plan_settles_it_by_its_estimate(words):
    cfg = load(words("train.micro_batch=auto", "scale.vocab_size=120"))
    with pytest.raises(ValueError, match="not settled"):
        cfg.micro_batch(1)
    size = memory(with_micro_batch(cfg, 2), 120, 1).total
    given = assume("h200", ["capacity=1", f"memory_gb={(size + 1) / 1e9}"])
    assert on_paper(cfg, 1, given).train.micro_batch == 2
    assert on_paper(cfg, 1, assume("h200")).train.micro_batch == 8


def test_other_words_are_refused(words):
    with pytest.raises(ConfigError, match=r"train.micro_batch=most: must be a whole number or auto or null"):
        load(words("train.micro_batch=most"))
