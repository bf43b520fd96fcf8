"""FLOPs of each backbone against the closed form, at the smallest and at the paper's size."""

from __future__ import annotations

import pytest
import torch

from dlr_pretrain.analysis import flops
from dlr_pretrain.analysis.flops import flops_per_token, peak_flops
from dlr_pretrain.cli import load
from dlr_pretrain.models import build
from dlr_pretrain.models.llama import padded

SHAPES = {"tiny": (128, 344, 4, 32), "1b": (2048, 5461, 24, 512)}  # D, F, L, r


def closed_form(backbone: str, scale: str, vocab_size: int, seq_len: int) -> int:
    """6 (L sum of GEMM weights + V D) + 6 T D L: four D x D and three D x F matrices a block, and causal attention."""
    D, F, L, r = SHAPES[scale]
    if backbone == "full":
        block = 4 * D * D + 3 * D * F
    else:
        block = 4 * r * (D + D) + 3 * r * (D + F)
    return 6 * (L * block + vocab_size * D) + 6 * seq_len * D * L


@pytest.mark.parametrize("seq_len", [256, 1024])
@pytest.mark.parametrize(("backbone", "dlr"), [
    ("full", "off"), ("lowrank", "off"), ("lowrank", "on"), ("cola", "on"), ("cola", "on dlr.impl=branch"),
])  # fmt: skip
@pytest.mark.parametrize("scale", SHAPES)
def test_flops_are_those_of_the_formula(scale, backbone, dlr, seq_len):
    cfg = load([f"scale={scale}", f"backbone={backbone}", *f"dlr={dlr}".split(), "data=sample", "logger=jsonl"])
    model = build(cfg, 8192, torch.device("meta"))
    counted = flops_per_token(model, seq_len, cfg.scale.hidden_size, cfg.scale.num_layers)
    assert counted == closed_form(backbone, scale, 8192, seq_len)


def test_padding_does_not_count():
    assert padded(5461) == 5504
    D, _, L, _ = SHAPES["1b"]
    assert closed_form("cola", "1b", 32000, 256) == 6 * (609_310_720 - 32000 * D - (2 * L + 1) * D) + 6 * 256 * D * L


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA GH200 480GB", 989e12),
    ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA B200", 2250e12), ("NVIDIA GeForce RTX 4090", None), ("NVIDIA T4", None),
    ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA GB200", None),
])  # fmt: skip
def test_an_unknown_gpu_has_no_peak(monkeypatch, name, peak):
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _: name)
    assert peak_flops(torch.device("cuda")) == peak
    assert peak_flops(torch.device("cpu")) is None
