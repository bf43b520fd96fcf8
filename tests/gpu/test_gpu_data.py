"""Batches on a GPU: narrow over the wire, wide where they are used."""

from __future__ import annotations

import pytest
import torch

from dlr_pretrain.data import inputs_and_targets

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU on this machine"),
]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_rows_are_widened_on_the_gpu_as_on_the_cpu(dtype):
    tokens = torch.randint(0, 65_536, (512, 257)).to(dtype)
    lengths = torch.randint(0, 258, (512,), dtype=torch.int32)
    there = [each.pin_memory().to("cuda", non_blocking=True) for each in (tokens, lengths)]
    assert there[0].dtype == dtype
    for here, found in zip(inputs_and_targets(tokens, lengths), inputs_and_targets(*there), strict=True):
        assert torch.equal(found.cpu(), here)
