"""Watches a run: scores how unusual a loss is, and keeps the batches of steps that were not finite."""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, DocumentStream, Place, Source, Tokenizer
from dlr_pretrain.util.files import write_durably

WINDOW = 128  # losses that a loss is compared with
SETTLED = 32  # losses before the first one that is scored


class SpikeScore:
    """How many standard deviations a loss lies above the mean of the ``WINDOW`` losses before it.

    Checkpoints hold these losses, so that a resumed run logs the same scores.
    """

    def __init__(self, losses: Iterable[float] = ()):
        self.losses = deque(losses, WINDOW)

    def score(self, loss: float) -> float | None:
        """The score of the next loss; None if it is not finite, or if the losses before it are too few or all equal."""
        if not math.isfinite(loss):
            return None
        found = None
        if len(self.losses) >= SETTLED and (deviation := statistics.pstdev(self.losses)) > 0:
            found = (loss - statistics.fmean(self.losses)) / deviation
        self.losses.append(loss)
        return found


class Suspects:
    """Keeps the batches of steps that were not finite in ``<run>/nonfinite``, for inspection."""

    def __init__(self, cfg: Config, run_dir: Path, source: Source, tokenizer: Tokenizer, rank: int):
        self.cfg, self.source, self.tokenizer, self.rank = cfg, source, tokenizer, rank
        self.folder = run_dir / "nonfinite"

    def keep(self, step: int, loss: float, norm: float, batch: Batch, before: dict[str, list[int]]) -> Path:
        """Write this rank's part of the batch: the places of its documents in the data, their tokens and their text."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step_{step:08d}_rank_{self.rank}.json"
        each = self.cfg.train.global_batch // self.cfg.num_streams
        streams = []
        for i, (name, after) in enumerate(batch.state.items()):
            documents = DocumentStream(self.source, self.tokenizer, self.cfg.data.seed, int(name), self.cfg.num_streams)
            rows = [
                tokens[:length].tolist()
                for tokens, length in zip(
                    batch.tokens[i * each : (i + 1) * each], batch.lengths[i * each : (i + 1) * each], strict=True
                )
            ]
            streams.append(
                {
                    "stream": int(name),
                    "from": _place(documents, Place(*before[name]) if name in before else Place()),
                    "to": _place(documents, Place(*after)),
                    "tokens": rows,
                    "text": [self.tokenizer.decode(row) for row in rows],
                }
            )
        content = {"step": step, "loss": str(loss), "grad_norm": str(norm), "rank": self.rank, "streams": streams}
        write_durably(path, json.dumps(content, indent=1, ensure_ascii=False))
        return path


def _place(documents: DocumentStream, place: Place) -> dict[str, int | str]:
    return place._asdict() | {"shard": documents.shard_name(place)}
