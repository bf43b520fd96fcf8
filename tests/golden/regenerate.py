"""The golden curves: 20 steps in fp32 of the smallest shape, for each backbone with and without DLR.

    python -m tests.golden.regenerate

rewrites ``curves.json``. Run it only for a change that is meant to move the curves, and explain in the commit why they
move. Tokens come from a fixed Markov chain over 40 ids, not from a corpus, so no version of a tokenizer matters.
"""

import itertools
import json
import random
from pathlib import Path

import torch

from dlr_pretrain.data import Batch
from dlr_pretrain.optim.schedule import rate
from dlr_pretrain.train.ranks import Ranks
from tests.trial import configured, trial

CURVES = Path(__file__).with_name("curves.json")
CHOICES = {
    "full": ("backbone=full",),
    "lowrank": ("backbone=lowrank",),
    "lowrank+dlr": ("backbone=lowrank", "dlr=on"),
    "cola": ("backbone=cola",),
    "cola+dlr": ("backbone=cola", "dlr=on"),
    "lost": ("backbone=lost",),
    "lost+dlr": ("backbone=lost", "dlr=on"),
    "lax": ("backbone=lax",),
    "lax+dlr": ("backbone=lax", "dlr=on"),
    "cola_lax": ("backbone=cola_lax",),
    "cola_lax+dlr": ("backbone=cola_lax", "dlr=on"),
}
VOCAB = 40


def batches(batch_size: int, seq_len: int):
    """Yields batches indefinitely, from a chain in which one of three ids follows each id."""
    rng = random.Random(0)
    followers = [[rng.randrange(VOCAB) for _ in range(3)] for _ in range(VOCAB)]
    while True:
        rows = []
        for _ in range(batch_size):
            row = [rng.randrange(VOCAB)]
            while len(row) <= seq_len:
                row.append(followers[row[-1]][rng.randrange(3)])
            rows.append(row)
        lengths = torch.full((batch_size,), seq_len + 1)
        yield Batch(torch.tensor(rows), lengths, batch_size * seq_len, {"0": [0, 0, 0, 0, 0]})


def curve(*overrides: str) -> list[float]:
    """The loss of every update of a new model, without a data pipeline or a run directory."""
    cfg = configured("train.lr=1e-3", *overrides)
    with Ranks(cfg) as ranks:
        update = trial(cfg, ranks, VOCAB)
        steps = itertools.islice(batches(cfg.train.global_batch, cfg.train.seq_len), cfg.train.steps)
        return [update(batch, index, rate(cfg, index)).loss.item() for index, batch in enumerate(steps)]


def main() -> None:
    curves = {name: [float(f"{loss:.8g}") for loss in curve(*overrides)] for name, overrides in CHOICES.items()}
    CURVES.write_text("{\n" + ",\n".join(f'  "{name}": {losses}' for name, losses in curves.items()) + "\n}\n")
    for name, losses in curves.items():
        print(f"{name:<12} {losses[0]:.4f} -> {losses[-1]:.4f}")


def golden() -> dict[str, list[float]]:
    return json.loads(CURVES.read_text())


if __name__ == "__main__":
    main()
