"""A signal to the process that reads an export is followed, and one that the kernel kills leaves a run unverified."""

from __future__ import annotations

import signal

import pytest
import torch

from dlr_pretrain.deploy import verify
from dlr_pretrain.util.errors import Stopped, UserError


@pytest.mark.parametrize(("number", "expected", "message"), [
    (signal.SIGUSR1, Stopped, r"stopped before .*folded was verified .*The same command continues"),
    (signal.SIGTERM, Stopped, r"stopped before"),
    (signal.SIGSEGV, UserError, r"transformers does not load it: exit code -11"),
    (signal.SIGKILL, None, ""),
])  # fmt: skip
def test_a_signal_to_the_reader_is_followed(tmp_path, monkeypatch, number, expected, message):
    """SLURM sends it to every process of a step; the run would otherwise end as one whose export is wrong."""
    reader = tmp_path / "reader.py"
    reader.write_text(f"import os; os.kill(os.getpid(), {int(number)})")
    monkeypatch.setattr(verify, "READER", reader)
    given = (tmp_path / "folded", torch.zeros(1, 2), torch.float32, tmp_path)
    if expected is None:
        assert verify._read_elsewhere(*given) is None
        return
    with pytest.raises(UserError, match=message) as raised:
        verify._read_elsewhere(*given)
    assert type(raised.value) is expected
