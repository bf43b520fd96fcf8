"""``profile=on``: the same training, and a trace with every part of the step."""

from __future__ import annotations

import re
import time

import pytest
import torch

from dlr_pretrain.analysis.history import read_metrics
from dlr_pretrain.analysis.trace import ASIDE, PARTS, read_trace, tables
from dlr_pretrain.config import ConfigError
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.util.errors import Stopped
from tests.conftest import forked, saved

pytestmark = pytest.mark.usefixtures("no_export")
COMMON = ("backbone=cola", "dlr=on", "train.steps=8", "eval.every=100", "checkpoint.every=100")
PROFILE = ("profile=on", "profile.start=2", "profile.steps=3")


def assert_same(one, other) -> None:
    a, b = (saved(folder / "checkpoints" / "step_00000008") for folder in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())
    for x, y in zip(*(read_metrics(folder / "metrics.jsonl") for folder in (one, other)), strict=True):
        assert all(x[name] == y[name] for name in x if name.startswith("train/"))


def test_training_is_the_same_and_its_parts_add_up(train, tmp_path, capsys):
    plain, profiled = train(tmp_path / "plain", *COMMON), train(tmp_path / "profiled", *COMMON, *PROFILE)
    assert_same(plain, profiled)
    assert not (plain / "profile").exists()
    assert sorted(path.name for path in (profiled / "profile").iterdir()) == ["profile.md", "trace_rank0.json.gz"]

    events = read_trace(profiled / "profile" / "trace_rank0.json.gz")
    calls = {name: sum(e["name"] == name for e in events) / 3 for name in PARTS}
    assert calls == {"data": 1, "publish": 2, "forward": 4, "backward": 4, "communication": 2, "optimizer": 1}
    found = tables(events)
    assert found.steps == 3 and found.host["forward"] > 0 and found.host["other"] > 0
    assert sum(found.host.values()) == pytest.approx(found.wall)
    text = (profiled / "profile" / "profile.md").read_text()
    assert all(re.search(rf"^\| {name} \| [\d.,]+ \| [\d.]+% \|$", text, re.MULTILINE) for name in (*PARTS, "other"))
    assert "| `aten::mm` |" in text or "| `aten::bmm` |" in text
    assert "profile.md, and traces" in capsys.readouterr().out


def test_an_evaluation_between_traced_steps_is_no_part_of_them(train, tmp_path, monkeypatch):
    call = Evaluator.__call__
    monkeypatch.setattr(Evaluator, "__call__", lambda *given: time.sleep(3) or call(*given))
    run = train(tmp_path / "run", "backbone=cola", "train.steps=8", "eval.every=3", "checkpoint.every=100", *PROFILE)
    events = read_trace(run / "profile" / "trace_rank0.json.gz")
    assert max(event["dur"] for event in events if event["name"] == ASIDE) > 3e6
    found = tables(events)
    assert found.steps == 3 and found.wall < 1000 and sum(found.host.values()) == pytest.approx(found.wall)


@pytest.mark.slow
def test_every_rank_leaves_its_trace(words, tmp_path):
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    forked(words(f"run.dir={plain}", *COMMON), 2)
    forked(words(f"run.dir={profiled}", *COMMON, *PROFILE), 2)
    assert_same(plain, profiled)
    names = sorted(path.name for path in (profiled / "profile").iterdir())
    assert names == ["profile.md", "trace_rank0.json.gz", "trace_rank1.json.gz"]
    assert tables(read_trace(profiled / "profile" / "trace_rank1.json.gz")).collectives > 0


def test_a_start_that_ends_before_its_profile_says_so(train, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"profile\.start=7: and profile\.steps=3 after it .* 8 steps .*Try 5"):
        train(tmp_path / "run", *COMMON, "profile=on", "profile.start=7")
    with pytest.raises(Stopped):
        train(tmp_path / "run", *COMMON, "train.stop_after=6")
    train(tmp_path / "run", *COMMON, *PROFILE)
    assert "warning: no profile: profile.start=2 was not reached" in capsys.readouterr().out
    assert list((tmp_path / "run" / "profile").iterdir()) == []


def test_a_disk_that_refuses_costs_a_warning(train, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "profile").write_text("in the way")
    train(folder, *COMMON, *PROFILE)
    assert "warning: no profile: " in capsys.readouterr().out
    assert len(read_metrics(folder / "metrics.jsonl")) == 8
