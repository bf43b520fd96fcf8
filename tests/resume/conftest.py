"""Runs that go on from what they have saved."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def local_disk(monkeypatch):
    """What is not there will not come."""
    monkeypatch.setattr("dlr_pretrain.train.start.LATE", 0.0)
