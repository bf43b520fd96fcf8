"""Keeps the batches of updates that were not finite in ``<run>/nonfinite``, for inspection."""

from __future__ import annotations

import json
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.data import Batch, DocumentStream, Place, Source, Tokenizer
from dlr_pretrain.util.files import write_durably


class KeptBatches:
    """Writes this rank's part of a batch: the positions of its documents in the data, their tokens and their text."""

    def __init__(self, cfg: Config, run_dir: Path, source: Source, tokenizer: Tokenizer, rank: int):
        self.cfg, self.source, self.tokenizer, self.rank = cfg, source, tokenizer, rank
        self.folder = run_dir / "nonfinite"

    def keep(self, step: int, loss: float, norm: float, batch: Batch, before: dict[str, list[int]]) -> Path:
        """Write the batch of ``step``; ``before`` is the position of each stream before it. Returns the file."""
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"step_{step:08d}_rank_{self.rank}.json"
        each = self.cfg.train.global_batch // self.cfg.num_streams
        streams = []
        for i, (name, after) in enumerate(batch.state.items()):
            documents = DocumentStream(self.source, self.tokenizer, self.cfg.data.seed, int(name), self.cfg.num_streams)
            own = slice(i * each, (i + 1) * each)
            pairs = zip(batch.tokens[own], batch.lengths[own], strict=True)
            rows = [tokens[:length].tolist() for tokens, length in pairs]
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
