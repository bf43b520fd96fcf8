"""The exported tokenizer: a sentencepiece model as the files that ``AutoTokenizer`` reads.

``tokenizer.json`` is plain JSON, which this module writes from the model file itself, so that a run can end with a
complete folder even if none of transformers, tokenizers and protobuf is installed. The normaliser and the splits below
give raw sentencepiece's ids, with two known differences. Sentencepiece adds scores in fp32 along the whole text, the
``tokenizers`` library in fp64, so that it can choose another of several splits with equal scores (runs of "_" or
"000"). In random Unicode only, a combining mark after a character that NFKC rewrites is dropped.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.data.tokenizer import EOS, PAD, UNK, Tokenizer
from dlr_pretrain.util.errors import UserError

SPACE = "▁"  # sentencepiece's visible space
NORMAL, UNKNOWN, CONTROL = 1, 2, 3  # kinds of pieces
UNIGRAM = 1


@dataclass(frozen=True)
class Spiece:
    """The content of a sentencepiece model file: (piece, score, kind) by id, and how text is normalised first."""

    pieces: list[tuple[str, float, int]]
    charsmap: bytes
    add_prefix: bool
    squeeze: bool

    @property
    def specials(self) -> dict[str, str]:
        """The special tokens under transformers' names."""
        return {name: self.pieces[i][0] for name, i in (("pad_token", PAD), ("eos_token", EOS), ("unk_token", UNK))}


def read_spiece(path: Path) -> Spiece:
    """Read a sentencepiece model; raises UserError if the exported files could not reproduce its ids.

    This takes a fraction of a second: call it before a long run as well.
    """
    Tokenizer(path)  # raises UserError unless it is a sentencepiece model in T5's layout
    pieces, specs = [], {2: {}, 3: {}}
    for number, value in _fields(Path(path).read_bytes()):
        if number == 1:
            piece = dict(_fields(value))
            score = struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0
            pieces.append((piece[1].decode(), score, piece.get(3, NORMAL)))
        elif number in specs:
            specs[number] = dict(_fields(value))
    trainer, normaliser = specs[2], specs[3]
    unsupported = {
        "is not a unigram model": trainer.get(3, UNIGRAM) != UNIGRAM,
        "has user-defined, unused or byte pieces": any(kind > CONTROL for _, _, kind in pieces),
        "writes spaces as suffixes": trainer.get(24, 0),
        "does not mark spaces": not normaliser.get(5, 1),
    }
    for reason in (text for text, found in unsupported.items() if found):
        raise UserError(f"{path}: {reason}, and cannot be exported for transformers. Use a model such as T5's")
    return Spiece(pieces, normaliser.get(2, b""), bool(normaliser.get(3, 1)), bool(normaliser.get(4, 1)))


def export_tokenizer(folder: Path, model: Path, max_length: int) -> None:
    """Write ``model`` into ``folder`` with the files that make ``AutoTokenizer.from_pretrained(folder)`` work.

    The tokenizer appends no end of sequence. "</s>" in a text is read as the end of sequence, as tools expect that
    write it there (TRL, chat templates); with ``split_special_tokens=True`` it is four ordinary characters, as in
    training.
    """
    spiece = read_spiece(model)
    shutil.copyfile(model, folder / "spiece.model")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **spiece.specials,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("tokenizer.json", tokenizer_json(spiece)),
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", spiece.specials),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def tokenizer_json(spiece: Spiece) -> dict:
    """The model in the format of the ``tokenizers`` library."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": spiece.pieces[i][0], **flags} for i in (PAD, EOS, UNK)],
        "normalizer": {"type": "Sequence", "normalizers": _normalisers(spiece)},
        "pre_tokenizer": _split_literal_specials(spiece),
        "post_processor": None,
        "decoder": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "always" if spiece.add_prefix else "never",
            "split": False,
        },
        "model": {
            "type": "Unigram",
            "unk_id": UNK,
            "vocab": [[piece, score] for piece, score, _ in spiece.pieces],
            "byte_fallback": False,
        },
    }


def _normalisers(spiece: Spiece) -> list[dict]:
    """Sentencepiece's steps in its order: character map, squeeze spaces, one space in front, spaces made visible."""

    def replace(pattern: dict, content: str) -> dict:
        return {"type": "Replace", "pattern": pattern, "content": content}

    steps = []
    if spiece.charsmap:
        charsmap = base64.b64encode(spiece.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spiece.squeeze:
        steps += [replace({"Regex": r"\A +"}, ""), replace({"Regex": " {2,}"}, " ")]
    if spiece.add_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(replace({"String": " "}, SPACE))
    if spiece.squeeze:
        steps.append(replace({"Regex": rf"{SPACE}+\z"}, ""))
    return steps


def _split_literal_specials(spiece: Spiece) -> dict:
    """A pre-tokenizer that cuts "</s>" in a text in two.

    Sentencepiece never matches a control piece in a text; the ``tokenizers`` model would, because the piece is in its
    vocabulary. If possible, the cut is at a place that no ordinary piece spans and that does not separate two unknown
    characters, which would otherwise become one <unk>.
    """
    ordinary = {piece for piece, _, kind in spiece.pieces if kind == NORMAL}
    patterns = []
    for literal in (piece for piece, _, kind in spiece.pieces if kind != NORMAL):

        def harm(at: int, literal: str = literal) -> tuple[bool, bool]:
            pair = literal[at - 1 : at + 1]
            return any(pair in piece for piece in ordinary), ordinary.isdisjoint(pair)

        cut = min(range(1, len(literal)), key=harm)
        patterns.append(f"{_quoted(literal[:cut])}(?={_quoted(literal[cut:])})")
    pattern = {"Regex": "|".join(patterns)}
    return {"type": "Split", "pattern": pattern, "behavior": "MergedWithPrevious", "invert": False}


def _quoted(text: str) -> str:
    """``text`` as a pattern that matches itself, in the syntax that every regex engine shares."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


# ----------------------------------------------------------------------------------------------------
# The protobuf wire format, as far as a sentencepiece model needs it


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) in order: an int for a varint, bytes for everything else."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(message, at)
        elif wire in (1, 2, 5):
            size, at = _varint(message, at) if wire == 2 else (8 if wire == 1 else 4, at)
            if at + size > len(message):
                raise ValueError("cut off in the middle")
            value, at = message[at : at + size], at + size
        else:
            raise ValueError(f"wire type {wire}")
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The integer that starts at ``at``, with seven bits per byte, and the offset of its end."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
