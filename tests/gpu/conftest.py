"""Every test of this folder is marked ``gpu``, and skips where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="torch finds no NVIDIA GPU on this machine"))
