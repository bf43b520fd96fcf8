"""``profile=on``: the same training, and a trace with every part of the step."""

from __future__ import annotations

import gzip
import json
from collections import Counter

import pytest

from dlr_pretrain.util.files import read_metrics
from tests.conftest import forked
from tests.resume.test_resume import assert_same, final

pytestmark = pytest.mark.usefixtures("no_export")
COMMON = ("backbone=cola", "dlr=on", "train.steps=8", "eval.every=4", "checkpoint.every=100")
PROFILE = ("profile=on", "profile.start=2", "profile.steps=3")


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_every_rank_leaves_a_trace_and_trains_the_same(words, tmp_path, ranks):
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    forked(words(f"run.dir={plain}", *COMMON), ranks)
    forked(words(f"run.dir={profiled}", *COMMON, *PROFILE), ranks)
    assert_same(final(plain), final(profiled))
    traces = sorted((profiled / "profile").iterdir())
    assert [path.name.split(".")[0] for path in traces] == [f"rank_{rank}" for rank in range(ranks)]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    found = Counter(event["name"] for event in events if event.get("ph") == "X")
    calls = {"data": 1, "forward": 4 // ranks, "backward": 4 // ranks, "optimizer": 1}  # in a step
    assert {name: found[name] for name in calls} == {name: 3 * times for name, times in calls.items()}


def test_a_disk_that_refuses_ends_no_run(train, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "profile").write_text("in the way")
    train(folder, *COMMON, *PROFILE)
    assert len(read_metrics(folder / "metrics.jsonl")) == 8
