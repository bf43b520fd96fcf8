"""Batches on a GPU: narrow over the wire, wide where they are used."""

from __future__ import annotations

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.data import inputs_and_targets
from dlr_pretrain.data.packing import separated
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.models import build


@pytest.mark.parametrize("seq_len", [96, 61])  # 61 is no multiple of what the kernels align to
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_documents_of_a_packed_row_are_on_the_gpu_what_they_are_alone(dtype, bound, compiled, seq_len):
    torch.backends.cuda.enable_cudnn_sdp(False)  # as a run with such rows does
    cfg = load(["scale=60m", "scale.vocab_size=500", "backbone=cola", "dlr=on", "data=sample", "logger=jsonl"])
    model = build(cfg, 500, torch.device("cuda"), dtype)
    ids = torch.randint(3, 500, (4, seq_len), device="cuda")
    ids[:, [7, 8, 40]] = EOS
    inputs = separated(ids, ids, EOS)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
        whole = model.logits(ids, inputs[2]).float()
        for first, end in ((0, 8), (8, 9), (9, 41), (41, seq_len)):
            alone = model.logits(ids[:, first:end].contiguous()).float()
            assert (whole[:, first:end] - alone).norm() < bound * alone.norm()
    eager = model(*inputs)
    eager.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if compiled:
        model.compile_()
        loss = model(*inputs)
        loss.backward()
        assert abs(loss.item() - eager.item()) < bound * abs(eager.item())
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_rows_are_widened_on_the_gpu_as_on_the_cpu(dtype):
    tokens = torch.randint(0, 65_536, (512, 257)).to(dtype)
    lengths = torch.randint(0, 258, (512,), dtype=torch.int32)
    there = [each.pin_memory().to("cuda", non_blocking=True) for each in (tokens, lengths)]
    assert there[0].dtype == dtype
    for here, found in zip(inputs_and_targets(tokens, lengths), inputs_and_targets(*there), strict=True):
        assert torch.equal(found.cpu(), here)
