"""``profile=on``: the same training, and a trace with every part of the step."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from dlr_pretrain.config import ConfigError
from dlr_pretrain.train.profile import UNTIMED
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.history import read_metrics
from tests.conftest import forked
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")
COMMON = ("backbone=cola", "dlr=on", "train.steps=8", "eval.every=4", "checkpoint.every=100")
PROFILE = ("profile=on", "profile.start=2", "profile.steps=3")
CALLS = {"data": 1, "forward": 4, "backward": 4, "optimizer": 1}  # in a step


def ranges(trace) -> Counter:
    with gzip.open(trace, "rt") as file:
        return Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")


def test_training_is_the_same_and_its_parts_are_named(train, tmp_path, capsys):
    plain, profiled = train(tmp_path / "plain", *COMMON), train(tmp_path / "profiled", *COMMON, *PROFILE)
    assert_same(final(plain), final(profiled))
    assert not (plain / "profile").exists()
    assert sorted(path.name for path in (profiled / "profile").iterdir()) == ["profile.txt", "trace_rank0.json.gz"]
    found = ranges(profiled / "profile" / "trace_rank0.json.gz")
    assert {name: found[name] for name in CALLS} == {name: 3 * calls for name, calls in CALLS.items()}
    # one evaluation, between two traced steps
    assert found[UNTIMED] > 0 and found["communication"] == 3 * 2 + 1 and found["with_residual"] == 3 * 2 + 2
    text = (profiled / "profile" / "profile.txt").read_text()
    assert all(name in text for name in ("forward", "backward", "optimizer", "aten::mm"))
    assert "profile.txt, and traces" in capsys.readouterr().out


@pytest.mark.full
def test_every_rank_leaves_its_trace(words, tmp_path):
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    forked(words(f"run.dir={plain}", *COMMON), 2)
    forked(words(f"run.dir={profiled}", *COMMON, *PROFILE), 2)
    assert_same(final(plain), final(profiled))
    names = sorted(path.name for path in (profiled / "profile").iterdir())
    assert names == ["profile.txt", "trace_rank0.json.gz", "trace_rank1.json.gz"]


def test_a_start_that_ends_before_its_profile_says_so(train, tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"profile\.start=7: and profile\.steps=3 after it .* 8 steps "):
        train(tmp_path / "run", *COMMON, "profile=on", "profile.start=7")
    with pytest.raises(Stopped):
        train(tmp_path / "run", *COMMON, "train.stop_after=6")
    train(tmp_path / "run", *COMMON, *PROFILE)
    assert "warning: no profile: profile.start=2 was not reached" in capsys.readouterr().out
    assert not (tmp_path / "run" / "profile").exists()


def test_a_disk_that_refuses_costs_a_warning(train, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "profile").write_text("in the way")
    train(folder, *COMMON, *PROFILE)
    assert "warning: no profile: " in capsys.readouterr().out
    assert len(read_metrics(folder / "metrics.jsonl")) == 8
