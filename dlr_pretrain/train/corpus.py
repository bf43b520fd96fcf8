"""What a run trains on: data, tokenizer and validation set. They are opened and checked before anything else."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dlr_pretrain import data
from dlr_pretrain.config import Config
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.deploy.exportable import require_exportable
from dlr_pretrain.deploy.tokenizer import fast_tokenizer
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import UserError

# Shares of unknown tokens. SentencePiece reads a stretch of foreign text as two tokens, one of them unknown.
WARNED_UNKNOWN, REFUSED_UNKNOWN = 0.01, 0.3
FEW_TOKENS = 5_000  # of validation text: with fewer, the difference between two models is noise


@dataclass
class Corpus:
    """Data, tokenizer and validation set of a run."""

    source: data.Source
    tokenizer: data.Tokenizer
    validation: data.ValidationSet
    vocab_size: int  # embedding rows
    sets: dict[str, data.ValidationSet] = field(default_factory=dict)  # of ``eval.sets``

    @property
    def unknown(self) -> float:
        """The share of the validation set's tokens that are the unknown token."""
        unknown = self.tokenizer.unk_id
        if unknown in (None, self.tokenizer.eos_id, self.tokenizer.pad_id):
            return 0.0
        return float((self.validation.tokens == unknown).sum() / self.validation.real_tokens)

    def warnings(self, cfg: Config) -> list[str]:
        """What of text and tokenizer makes a result worth less, with the fix."""
        tokens, found = self.validation.real_tokens, []
        if self.unknown > WARNED_UNKNOWN:
            found.append(f"{self.unknown:.1%} of the tokens are the tokenizer's unknown token: see tokenizer.path")
        if tokens < min(cfg.eval.tokens, FEW_TOKENS):
            fix = "name more validation files" if cfg.data.validation_files else "hold out more, with data.held_out=0.1"
            fix = "prepare the tokens with data.held_out=0.1" if cfg.data.source == "tokens" else fix
            found.append(f"{tokens:,} tokens of validation text are too few to compare models: {fix}")
        return found

    @property
    def fingerprints(self) -> dict[str, str | int]:
        """What must stay the same when a run resumes, even if the files have moved."""
        return {
            "data.shards": self.source.fingerprint,
            "tokenizer.pieces": self.tokenizer.fingerprint,
            "data.order": self.source.order,
            **self.source.versions,  # by address, so they do not count for a copy elsewhere
            **{f"eval.text.{name}": one.text for name, one in {**self.validation.by_source, **self.sets}.items()},
        }


def open_corpus(cfg: Config, run_dir: Path, ranks: Ranks, say: Callable[[str], None]) -> Corpus:
    """Open the text of ``cfg``. All ranks must call this.

    Before that, raises UserError if the backbone's exported layer does not fit the trained one, and says so if it has
    none. Raises UserError, too, if the model or the export cannot hold the tokenizer.
    """
    if warning := require_exportable(cfg):
        say(f"warning: {warning}")
    opened = ranks.on_main(lambda: data.open_source(cfg, say, read_record(run_dir).get("data.version")))
    tokenizer = ranks.main_first(lambda: data.open_tokenizer(cfg, opened))
    vocab_size = data.embedding_rows(cfg, tokenizer)
    fast_tokenizer(tokenizer)  # refuses a tokenizer that the export could not write
    source = ranks.on_main(lambda: data.tokenised_once(opened, tokenizer, cfg.num_streams, say))
    validation = ranks.on_main(lambda: data.validation_set(cfg, source, tokenizer))
    sets = ranks.on_main(lambda: data.validation_sets(cfg, tokenizer))
    corpus = Corpus(source, tokenizer, validation, vocab_size, sets)
    if corpus.unknown > REFUSED_UNKNOWN:
        raise UserError(
            f"tokenizer {tokenizer.path}",
            f"cannot express the text: {corpus.unknown:.0%} of the tokens are the unknown token",
            "Set tokenizer.path to a tokenizer of this language",
        )
    return corpus
