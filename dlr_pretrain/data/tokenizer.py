"""The tokenizer: T5's SentencePiece model, or one in its layout, through raw sentencepiece.

Raw sentencepiece is some ten times faster than a fast tokenizer built from the same model, its ids are the reference,
and no text can produce a control symbol: "</s>" in a document is four ordinary characters.
"""

from __future__ import annotations

import hashlib
from array import array
from functools import cached_property
from pathlib import Path

import numpy as np

from dlr_pretrain.config import Config
from dlr_pretrain.data import hub
from dlr_pretrain.util.errors import UserError

PAD, EOS, UNK = 0, 1, 2  # T5's layout; the model's configuration and the exported checkpoint rely on it
WHOLE = 1 << 62  # a value of ``longest``: all of each text
SPACE = "\u2581"  # as sentencepiece writes it
CHARACTERS = 6  # per token; none of 600 documents of C4 has more on average over its first 257 tokens


class Tokenizer:
    """A SentencePiece model with T5's ids (pad 0, eos 1, unk 2); ``vocab_size`` counts its pieces."""

    pad_id, eos_id, unk_id = PAD, EOS, UNK

    def __init__(self, path: Path):
        import sentencepiece

        self.path = Path(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor()
            self._model.LoadFromSerializedProto(self.path.read_bytes())
        except (OSError, RuntimeError) as error:
            fix = "Set tokenizer.path to a sentencepiece model such as T5's spiece.model"
            raise UserError(f"{self.path}: not a readable sentencepiece model ({error}). {fix}") from error
        found = (self._model.pad_id(), self._model.eos_id(), self._model.unk_id())
        if found != (PAD, EOS, UNK):
            rule = f"its pad, eos and unk are {found}, and must be {(PAD, EOS, UNK)} as in T5's model"
            raise UserError(f"{self.path}: {rule}. Train one with pad_id=0, eos_id=1, unk_id=2")
        self.vocab_size: int = self._model.vocab_size()
        self._gives_arrays = _gives_arrays(self._model)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the model file."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without </s>. Uses one thread: a rank has one producer and its cores are shared."""
        return self._model.encode([_valid(text) for text in texts], num_threads=1)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without pad and </s>."""
        return self._model.decode(ids)

    def encode_documents(self, texts: list[str], longest: int = WHOLE) -> list[np.ndarray]:
        """Ids of each text, then </s>; int32. If a text has more than ``longest`` ids, later ones may be missing."""
        valid = [_valid(text) for text in texts]
        heads = [_head(text, CHARACTERS * longest) for text in valid] if self._words_are_apart else valid
        found = self._encode(heads)
        short = [i for i, head in enumerate(heads) if len(head) < len(valid[i]) and len(found[i]) <= longest]
        for i, ids in zip(short, self._encode([valid[i] for i in short]), strict=True):
            found[i] = ids
        return found

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if self._gives_arrays:
            return self._model.encode(texts, out_type="numpy", add_eos=True, num_threads=1)
        lists = self._model.encode(texts, add_eos=True, num_threads=1)
        return [np.frombuffer(array("i", one), np.intc) for one in lists]

    @cached_property
    def _words_are_apart(self) -> bool:
        """Whether spaces only begin pieces, so that the ids of a text up to a space do not depend on what follows."""
        pieces = self._model.id_to_piece(list(range(self._model.vocab_size())))
        return SPACE in pieces and not any(SPACE in piece[1:] for piece in pieces)


def _gives_arrays(model) -> bool:
    """Whether this version of sentencepiece returns arrays, which saves a tenth of the time that lists take."""
    try:
        return isinstance(model.encode("a", out_type="numpy"), np.ndarray)
    except (RuntimeError, ValueError):
        return False


def _head(text: str, characters: int) -> str:
    """The text up to the last space in its first ``characters``; the whole text if it is not longer or has no space."""
    space = text.rfind(" ", 1, characters) if len(text) > characters else -1
    return text if space == -1 else text[:space]


def _valid(text: str) -> str:
    """The text with its lone surrogates, which have no UTF-8 form, replaced by question marks."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def open_tokenizer(cfg: Config, source) -> Tokenizer:
    """The tokenizer of ``tokenizer.path``, else the source's own, else that of ``tokenizer.hub``."""
    path = cfg.tokenizer.path or source.tokenizer_path
    if path is None:
        fix = "Give a sentencepiece model with tokenizer.path=<spiece.model>, or train offline with data=sample"
        path = hub.download(cfg.tokenizer.hub, "spiece.model", fix)
    return Tokenizer(Path(path))
