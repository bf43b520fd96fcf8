"""Whole runs that W&B shows: nothing of its trouble reaches them, and no secret leaves the machine's memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
from loopback_wandb import KEY

from dlr_pretrain.train import wandb_view
from dlr_pretrain.train.wandb_view import wandb_id
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.history import read_metrics

pytest.importorskip("wandb")
pytestmark = pytest.mark.usefixtures("wandb_alone", "no_export")

SECRETS = {
    "WANDB_API_KEY": KEY,
    "HF_TOKEN": "hf_" + "pLanted" * 5,
    "HTTPS_PROXY": "http://planted-user:planted-password@127.0.0.1:9",
    "AWS_SECRET_ACCESS_KEY": "planted/secret/access",
}


@pytest.mark.slow
def test_a_run_in_three_starts_is_one_curve(tmp_path, train, server, monkeypatch):
    monkeypatch.setattr(wandb_view, "LEAVE_SECONDS", 30.0)
    for stop in ("train.stop_after=7", "train.stop_after=12", "seed=42"):
        try:
            train(tmp_path / "run", "logger=wandb", stop)
        except Stopped:
            continue
    sent, trained = server.runs[wandb_id(tmp_path / "run")], read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in sent["history"]] == [*range(1, 21)] and sent["exit_code"] == 0
    for row, record in zip(sent["history"], trained, strict=True):
        assert row["train/loss"] == record["train/loss"] and row.get("eval/loss") == record.get("eval/loss")
    assert sent["config"]["backbone"]["value"]["name"] == "lowrank" and len(server.runs) == 1


@pytest.mark.slow
def test_the_same_run_comes_out_while_wandb_hangs(tmp_path, train, server, capsys):
    server.trouble = "stall"
    train(tmp_path / "shown", "logger=wandb")
    shown = capsys.readouterr().out
    train(tmp_path / "plain")
    told, plain = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("shown", "plain"))
    assert [record["train/loss"] for record in told] == [record["train/loss"] for record in plain]
    assert "W&B lacks the last metrics" in " ".join(shown.split())
    weights = [(tmp_path / name / "folded" / "model.safetensors").read_bytes() for name in ("shown", "plain")]
    assert weights[0] == weights[1]


def test_lost_lines_of_metrics_are_named_when_a_run_resumes(tmp_path, train, capsys):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=10")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[6:]))
    assert "has lost" not in capsys.readouterr().out
    train(tmp_path / "run")
    said = " ".join(capsys.readouterr().out.split())
    assert "metrics.jsonl has lost steps 4-6 of the 10 that are trained" in said
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, *range(7, 21)]


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_no_file_of_a_run_holds_a_secret(tmp_path, train, server, monkeypatch, mode, capfd):
    """Keys, tokens and passwords of the environment, of netrc, of git's remote and of the command line."""
    for name, value in (SECRETS | {"WANDB_MODE": mode, "NO_PROXY": "127.0.0.1"}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password planted-in-netrc")
    words = [f"hydra.job.env_set.HF_TOKEN={SECRETS['HF_TOKEN']}", "+hydra.job.env_set.MY_PASSWORD=planted-by-hydra"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "https://planted-user:planted-password@host/"])
    remote = ["git", "-C", str(tmp_path), "remote", "add", "origin", "https://planted-user:planted-password@host/x.git"]
    for command in (["git", "init", str(tmp_path)], remote):
        subprocess.run(command, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Stopped):
        train(tmp_path / "run", "logger=wandb", "train.stop_after=3")
    train(tmp_path / "run", "logger=wandb", "train.steps=20")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files) and any(path.name.startswith("debug") for path in files)
    texts = {str(path): path.read_bytes() for path in files} | {"the console": "".join(capfd.readouterr()).encode()}
    texts["the server"] = repr(server.runs).encode()
    planted = [KEY, SECRETS["HF_TOKEN"], SECRETS["AWS_SECRET_ACCESS_KEY"], "planted-"]
    found = [(where, secret) for where, text in texts.items() for secret in planted if secret.encode() in text]
    assert found == []
    assert len(server.runs) == (mode == "online") and b'"***' not in texts["the server"]
