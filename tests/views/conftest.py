"""W&B on the loopback, and a run directory that is sent there."""

import os
from contextlib import suppress

import pytest
from loopback_wandb import KEY, NOBODY, Trained, wandb_server

from dlr_pretrain.train import wandb_view


@pytest.fixture
def wandb_alone(tmp_path, monkeypatch):
    """A key, a home of its own, nothing of W&B's from outside, no server, and short bounds."""
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    for name, value in {"WANDB_API_KEY": KEY, "NETRC": str(tmp_path / "netrc"), "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WANDB_BASE_URL", NOBODY)
    monkeypatch.setattr(wandb_view, "LEAVE_SECONDS", 3.0)


@pytest.fixture
def server(wandb_alone, monkeypatch):
    """A W&B server that clients find."""
    with wandb_server() as (server, url):
        monkeypatch.setenv("WANDB_BASE_URL", url)
        yield server


@pytest.fixture
def run(tmp_path):
    """A run directory whose metrics are sent to W&B."""
    run = Trained(tmp_path / "run")
    yield run
    with suppress(AttributeError):  # never started
        run.view.process.kill()
