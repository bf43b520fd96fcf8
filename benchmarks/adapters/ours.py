"""Our own step behind the protocol, for scripts that load adapters: ``$OURS`` are its overrides."""

import os

from benchmarks.peers import as_batch
from benchmarks.variants import Variant
from dlr_pretrain.cli import load
from dlr_pretrain.train.ranks import Ranks

OVERRIDES = "backbone=cola dlr=on"
PRECISION = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}


class Ours:
    def __init__(self, overrides):
        cfg = load(overrides)
        ranks = Ranks(cfg)
        ranks.use_device()
        self.variant = Variant("ours", cfg, ranks)
        self.n = sum(p.numel() for p in self.variant.trainer.weights.optimized.values())

    def step(self, ids):
        return self.variant.step(as_batch(ids, ids.numel()))


def build(scale, device, dtype, batch, T, compile, layers=None):
    overrides = {
        "scale": scale.lower(),
        "train.global_batch": batch,
        "train.micro_batch": batch,
        "train.seq_len": T,
        "device": str(device).split(":")[0],
        "precision": PRECISION[str(dtype)],
        "compile": str(compile).lower(),
        "data": "sample",
        "logger": "jsonl",
    } | ({} if layers is None else {"scale.num_layers": layers})
    return Ours([*(f"{key}={value}" for key, value in overrides.items()), *os.environ.get("OURS", OVERRIDES).split()])
