"""What a run trains on: data, tokenizer and validation set, opened and checked before anything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.data import (
    ORDER_VERSION,
    Source,
    Tokenizer,
    ValidationSet,
    embedding_rows,
    open_source,
    open_tokenizer,
    validation_set,
)
from dlr_pretrain.deploy.tokenizer import fast_tokenizer
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import UserError

MUCH_UNKNOWN, TOO_MUCH_UNKNOWN = 0.01, 0.5  # shares of text without a token: a warning, and a refusal


@dataclass
class Text:
    """Data, tokenizer and validation set of a run."""

    source: Source
    tokenizer: Tokenizer
    validation: ValidationSet
    vocab_size: int  # embedding rows
    unknown: float  # share of the first text's characters without a token

    @property
    def fingerprints(self) -> dict[str, str | int]:
        """What must stay the same when a run resumes, also if the files lie elsewhere."""
        return {
            "data.shards": self.source.fingerprint,
            "tokenizer.pieces": self.tokenizer.fingerprint,
            "data.order": ORDER_VERSION,
        }


def open_text(cfg: Config, run_dir: Path, ranks: Ranks, say: Callable[[str], None]) -> Text:
    """Open the text of ``cfg``; all ranks must call. Raises UserError if model or export cannot hold the tokenizer."""
    version = ranks.on_main(lambda: read_record(run_dir)).get("data.version")
    source = ranks.on_main(lambda: open_source(cfg, say, version))
    tokenizer = ranks.main_first(lambda: open_tokenizer(cfg, source))
    vocab_size = embedding_rows(cfg, tokenizer)
    fast_tokenizer(tokenizer)  # refuses a tokenizer that the export could not write
    unknown = ranks.on_main(lambda: source.unknown_share(tokenizer))
    if unknown > TOO_MUCH_UNKNOWN:
        rule = f"cannot express {unknown:.0%} of the text: it would be learnt as one unknown token"
        raise UserError(f"tokenizer {tokenizer.path}: {rule}. Set tokenizer.path to a tokenizer of this language")
    validation = ranks.on_main(lambda: validation_set(cfg, source, tokenizer))
    return Text(source, tokenizer, validation, vocab_size, unknown)
