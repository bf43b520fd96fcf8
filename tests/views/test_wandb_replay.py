"""A run that was offline, or that W&B lost sight of, becomes one clean history there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from loopback_wandb import Trained

from dlr_pretrain.config import to_dict
from dlr_pretrain.train import lock, wandb_replay
from dlr_pretrain.train.lock import RunLock
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.wandb_replay import replay
from dlr_pretrain.train.wandb_view import wandb_id
from dlr_pretrain.util.errors import UserError
from tests.conftest import ROOT

pytest.importorskip("wandb")
pytestmark = pytest.mark.usefixtures("wandb_alone")


def command(*words: str | Path) -> subprocess.CompletedProcess:
    line = [sys.executable, str(ROOT / "scripts" / "replay_wandb.py"), *map(str, words)]
    return subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)


def history(segment: Path) -> list[dict]:
    """The rows of a file of W&B, by its own reader."""
    words = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(segment)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    records = [json.loads(line) for line in text.splitlines()]
    assert records[-1]["type"] == "exit" and records[-1]["exit"]["exit_code"] == 0
    return [record["history"]["item"] for record in records if record["type"] == "history"]


@pytest.fixture
def trained(run) -> Trained:
    """A run that is over, in three starts without W&B."""
    (run.dir / "config.yaml").write_text(json.dumps(to_dict(run.cfg)))
    (run.dir / "manifest.json").write_text('{"identity": {}, "starts": []}')
    with MetricsFile(run.dir / "metrics.jsonl", 0) as run.file:
        run.train(*range(1, 10))
    return run


@pytest.mark.slow
def test_offline_segments_become_one_clean_history(trained, monkeypatch):
    """Three starts, the first one killed before wandb wrote a row; then everything, once."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    for start, (first, last) in enumerate([(1, 5), (4, 7), (8, 9)]):
        trained.start(resumed_step=first - 1)
        trained.connect()
        trained.train(*range(first, last + 1))
        if start == 0:
            time.sleep(1.5)  # the rows are logged by now
            trained.view.process.kill()
        trained.end()
    done = command(trained.dir)
    assert done.returncode == 0, done.stderr
    segments = sorted((trained.dir / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime)
    assert len(segments) == 4 and all(path.name.endswith(f"-{wandb_id(trained.dir)}") for path in segments)
    assert done.stdout.split() == f"{trained.dir}: 9 of 9 steps sent, wandb sync {segments[-1]}".split()
    assert [row["step"] for row in history(segments[-2])] == [8, 9]
    rows = history(segments[-1])
    assert [(row["step"], row["train/loss"], row["_timestamp"]) for row in rows] == [
        (step, 1 / step, 1e9 + step) for step in range(1, 10)
    ]


@pytest.mark.slow
def test_a_replay_sends_what_the_server_lacks_and_no_more(trained, server):
    trained.start(resumed_step=4)
    trained.train(5, 6)
    trained.connect()
    trained.end()
    with MetricsFile(trained.dir / "metrics.jsonl", 6) as trained.file:
        trained.train(7, 8, 9)
    own = wandb_id(trained.dir)
    assert server.steps(own) == [1, 2, 3, 4, 5, 6]
    for sent in (3, 0):
        done = command(trained.dir)
        assert done.returncode == 0 and f"{sent} of 9 steps sent" in done.stdout, done.stderr
        assert server.steps(own) == [*range(1, 10)]
    assert command(trained.dir, "--new-id", "--project", "other").returncode == 0
    assert server.steps(own) == server.steps(wandb_id(trained.dir)) and len(server.runs) == 2


def test_a_replay_refuses_what_it_cannot_do_right(trained, monkeypatch):
    with pytest.raises(UserError, match=r"checkpoints is no run: it has no config\.yaml"):
        replay(trained.dir / "checkpoints", print)
    assert not (trained.dir / "checkpoints").exists()
    monkeypatch.setattr(lock, "LISTEN", 0.1)
    with RunLock(trained.dir) as held, pytest.raises(UserError, match="is in use by process"):
        held.acquire()
        replay(trained.dir, print)
    MetricsFile(trained.dir / "metrics.jsonl", 4).__exit__()
    with pytest.raises(UserError, match=r"is at step 4 of 9. Let it finish, or send what there is: --partial"):
        replay(trained.dir, print)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with pytest.raises(UserError, match="WANDB_MODE=disabled: must be online, or offline"):
        replay(trained.dir, print)
    assert not (trained.dir / "wandb").exists()


@pytest.mark.slow
def test_each_run_is_replayed_whatever_becomes_of_the_others(trained, monkeypatch):
    MetricsFile(trained.dir / "metrics.jsonl", 4).__exit__()
    monkeypatch.setenv("WANDB_MODE", "offline")
    done = command(trained.dir / "checkpoints", trained.dir, "--partial")
    assert done.returncode == 3 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert f"{trained.dir}: 4 of 4 steps sent" in done.stdout
    monkeypatch.delenv("WANDB_MODE"), monkeypatch.delenv("WANDB_API_KEY")
    done = command(trained.dir, "--partial")
    assert done.returncode == 3 and done.stderr.startswith("error: no API key found: set WANDB_API_KEY")


def test_a_history_with_a_gap_is_sent_and_the_gap_said(trained, monkeypatch, capsys):
    path = trained.dir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2] + lines[4:]))
    monkeypatch.setattr("dlr_pretrain.train.wandb_replay.open_run", lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match=r"division by zero. The same command sends the rest"):
        replay(trained.dir, print)
    assert "metrics.jsonl lacks steps 3-4" in capsys.readouterr().out


def test_a_new_id_is_kept_when_wandb_has_it_and_not_drawn_twice(trained, monkeypatch):
    old = wandb_id(trained.dir)
    monkeypatch.setattr(wandb_replay, "open_run", lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match=r"division by zero. The same command sends the rest"):
        replay(trained.dir, print, new_id=True)
    assert wandb_id(trained.dir) == old
    asked = []
    monkeypatch.setattr(wandb_replay, "open_run", lambda _, chosen, *__, **___: asked.append(chosen))
    monkeypatch.setattr(wandb_replay, "last_step", lambda _: 1 / 0)
    with pytest.raises(UserError, match=r"division by zero. The same command without --new-id sends the rest"):
        replay(trained.dir, print, new_id=True)
    assert [wandb_id(trained.dir)] == asked != [old]
