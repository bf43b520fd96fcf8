"""Whole runs that stream from a hub: through trouble, to an end in good order without it, and on several ranks."""

import os
import signal
import threading
import time

import pytest
from loopback_hub import Hub, serving_here
from safetensors.torch import load_file

from dlr_pretrain.data import documents, hub, remote
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.history import read_metrics
from tests.conftest import forked

pytestmark = pytest.mark.usefixtures("no_export")


@pytest.fixture
def streamed(words, corpus, monkeypatch):
    """A hub with the shards of the corpus, and the words of a run that streams them in small pieces."""
    files = {f"en/{path.name}": path.read_bytes() for path in corpus.glob("c4-*.json.gz")}
    monkeypatch.setattr(documents, "BLOCK_DOCUMENTS", 4)  # or all would be read before the first step
    monkeypatch.setattr(remote, "RANGE_BYTES", 700)

    def run_of(*overrides: str) -> list[str]:
        local = ("data=", "data.root=")
        return ["data=c4", *(word for word in words(*overrides) if not word.startswith(local))]

    with serving_here(Hub(files), monkeypatch) as served:
        yield served, run_of


def start(given: list[str]) -> None:
    from dlr_pretrain.cli import load
    from dlr_pretrain.train.run import run

    run(load(given))


def record(folder):
    """What a run has computed, and the newest checkpoint."""
    rows = [(r["step"], r["train/loss"], r["train/grad_norm"]) for r in read_metrics(folder / "metrics.jsonl")]
    return rows, max((folder / "checkpoints").iterdir())


def test_a_run_ends_in_good_order_when_the_hub_does_not_come_back_and_goes_on_when_it_does(
    streamed, train, tmp_path, monkeypatch
):
    served, run_of = streamed
    whole = train(tmp_path / "local", "dlr=on")
    given = run_of("dlr=on", f"run.dir={tmp_path}/run")
    served.random_trouble(0, 0.2)
    inner = served.trouble
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 3.0)
    served.trouble = lambda path, first: "503" if "train" in path and first >= 2100 else inner(path, first)
    with pytest.raises(UserError) as caught:
        start(given)
    rows, newest = record(tmp_path / "run")
    done, message = rows[-1][0], str(caught.value)
    assert 0 < done < 20 and newest.name == f"step_{done:08d}"
    assert message.startswith(
        f"step {done + 1} was not taken. The {done} steps before it are saved. rank 0: allenai/c4: en/"
    )
    assert "did not come within 3 s" in message and "503 Service Unavailable" in message
    served.trouble = inner
    start(given)
    assert record(tmp_path / "run")[0] == record(whole)[0]
    a, b = (load_file(folder / "folded" / "model.safetensors") for folder in (tmp_path / "run", whole))
    assert all((a[name] == b[name]).all() for name in b)


def test_a_run_that_waits_for_the_hub_follows_a_signal_at_once(streamed, train, tmp_path, monkeypatch):
    served, run_of = streamed
    whole = train(tmp_path / "local", "dlr=on")
    monkeypatch.setattr(hub, "PATIENCE_SECONDS", 300.0)  # from when it is read ahead, some steps before it is missed
    given = run_of("dlr=on", f"run.dir={tmp_path}/run")
    served.trouble = lambda path, first: "503" if "train" in path and first >= 2100 else None
    told: list[float] = []

    def stop_when_it_stands() -> None:
        """A while after the last step: the hub's patience is far from its end."""
        metrics, size = tmp_path / "run" / "metrics.jsonl", -1
        while not metrics.exists() or metrics.stat().st_size != size:
            size = metrics.stat().st_size if metrics.exists() else -1
            time.sleep(1.5)
        told.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop_when_it_stands, daemon=True).start()
    with pytest.raises(Stopped, match=r"stopped after step \d+ of 20 \(asked to stop while waiting for data\); saved"):
        start(given)
    assert time.monotonic() - told[0] < 60  # of which 5 are for the thread that hangs
    rows, newest = record(tmp_path / "run")
    assert 0 < rows[-1][0] < 20 and newest.name == f"step_{rows[-1][0]:08d}"
    served.trouble = lambda path, first: None
    start(given)
    assert record(tmp_path / "run")[0] == record(whole)[0]


def test_shards_that_are_kept_serve_the_run_without_a_hub(streamed, train, words, tmp_path):
    served, run_of = streamed
    given = ("train.steps=50", "eval.tokens=100000")  # more than an epoch, and all of the validation shard
    whole = train(tmp_path / "whole", *given)
    with pytest.raises(Stopped):
        start(run_of(f"run.dir={tmp_path}/run", f"data.cache={tmp_path}/kept", *given, "train.stop_after=45"))
    kept = tmp_path / "kept" / f"allenai/c4@{served.commit}" / "en"
    assert sorted(path.name for path in kept.iterdir()) == sorted(path.split("/")[1] for path in served.files)
    served.files = {}
    start(words(f"run.dir={tmp_path}/run", f"data.root={kept}", *given))
    assert record(tmp_path / "run")[0] == record(whole)[0]


@pytest.mark.slow
def test_ranks_share_one_listing(streamed, train, tmp_path):
    served, run_of = streamed
    forked(run_of(f"run.dir={tmp_path}/run"), ranks=2)
    assert served.asked["info"] == served.asked["list"] == 1
    ours, theirs = record(tmp_path / "run")[0], record(train(tmp_path / "local"))[0]
    assert [step for step, *_ in ours] == list(range(1, 21))
    assert [loss for _, loss, _ in ours] == pytest.approx([loss for _, loss, _ in theirs], rel=2e-5)
