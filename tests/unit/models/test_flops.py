"""FLOPs of each backbone against the closed form, at the smallest and at the paper's size."""

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.models import flops, loss
from dlr_pretrain.models.flops import flops_per_token, peak_flops

SHAPES = {"tiny": (128, 344, 4, 32), "1b": (2048, 5461, 24, 512)}  # D, F, L, r
V, MICRO_BATCH = 8192, 4


def closed_form(backbone: str, scale: str, seq_len: int) -> float:
    """The expected ``flops_per_token``, from the formulas of the backbones.

    6 for each weight that multiplies a position (4 if frozen), including V D of the head, plus 6 T D L for causal
    attention. The projections of a block read D (q, k, v, o, gate, up) or F (down) and write D (q, k, v, o, down) or F.
    """
    D, F, L, r = SHAPES[scale]
    shapes = [(D, D)] * 4 + [(D, F)] * 2 + [(F, D)]
    dense = sum(m * n for m, n in shapes)
    factors = sum(r * (m + n) for m, n in shapes)
    n1, n2 = {32: (4, 8), 512: (16, 32)}[r]
    positions = MICRO_BATCH * seq_len
    block = {
        "full": 6 * dense,
        "lowrank": 6 * factors,
        "cola": 6 * factors,
        "no_b": 6 * factors - 2 * sum(r * n for _, n in shapes),
        "lora": 4 * dense + 6 * factors,
        # W = B A is formed once (2 r m n), its gradient split once (4 r m n) in each micro-batch
        "sltrain": 6 * dense + 6 * r * dense / positions,
    }
    lost_rank = {"tiny": 31, "1b": 499}[scale]
    block["lost"] = 6 * sum(lost_rank * (m + n) + max(1, int(0.01 * m)) * n for m, n in shapes)
    block["lax"] = block["cola"]
    gates = {"lax dense": 7 * 6 * r * r, "lax": 7 * 6 * r * (n1 + n2)}  # two-sided: n2 by every row, n1 by every column
    crossing = (L - 1) * gates.get(backbone, 0)
    return L * block[backbone.split()[0]] + crossing + 6 * V * D + 6 * seq_len * D * L


@pytest.mark.parametrize(("backbone", "words"), [
    ("full", "scale=tiny backbone=full"),
    ("lowrank", "scale=tiny backbone=lowrank dlr=on train.seq_len=1024"),
    ("cola", "scale=tiny backbone=cola dlr=on"),
    ("cola", "scale=tiny backbone=cola dlr=learnable_alpha train.activation_checkpointing=block"),  # not again
    ("no_b", "scale=tiny backbone=cola dlr=no_b"),
    ("lost", "scale=1b backbone=lost dlr=on"),
    ("lax", "scale=1b backbone=lax backbone.gate=tensor"),
    ("lax dense", "scale=tiny backbone=cola_lax backbone.gate=dense dlr=on"),
    ("lora", "scale=1b backbone=lora"),
    ("sltrain", "scale=1b backbone=sltrain"),
])  # fmt: skip
def test_flops_match_the_closed_form(backbone, words):
    cfg = load([*words.split(), "data=sample", "logger=jsonl"])
    expected = closed_form(backbone, cfg.scale.name, cfg.train.seq_len)
    assert flops_per_token(cfg, V, MICRO_BATCH) == pytest.approx(expected, rel=1e-12)


def test_grouped_heads_count_with_their_own_widths():
    words = "backbone=full scale.num_kv_heads=2 scale.head_dim=16 scale.tie_embeddings=true"  # 4 heads of q
    D, F, L, _ = SHAPES["tiny"]
    weights = 2 * D * 64 + 2 * D * 32 + 3 * D * F
    expected = L * 6 * weights + 6 * V * D + 6 * 256 * 64 * L
    cfg = load(["scale=tiny", *words.split(), "data=sample", "logger=jsonl"])
    assert flops_per_token(cfg, V, MICRO_BATCH) == pytest.approx(expected, rel=1e-12)


def test_flops_of_a_position_do_not_depend_on_loss_pieces(monkeypatch):
    cfg = load(["scale=tiny", "backbone=cola", "data=sample", "logger=jsonl"])
    alone = flops_per_token(cfg, V, MICRO_BATCH)
    monkeypatch.setattr(loss, "ROWS", MICRO_BATCH * cfg.train.seq_len // 4)
    assert flops_per_token(cfg, V, MICRO_BATCH) == alone


@pytest.mark.parametrize(("name", "peak"), [
    ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A100-SXM4-80GB", 312e12), ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("NVIDIA T4", None),
])  # fmt: skip
def test_an_unknown_gpu_has_no_peak(monkeypatch, name, peak):
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda _: name)
    for precision in ("bf16", "bf16_sr", "bf16_mixed"):
        assert peak_flops(torch.device("cuda"), precision) == peak
    assert peak_flops(torch.device("cuda"), "fp32") is None  # the table is of bf16 products
    assert peak_flops(torch.device("cpu"), "bf16") is None
