"""The exported tokenizer: what ``AutoTokenizer`` reads without remote code.

A ``tokenizer.json`` is exported as it is, without what it adds to a text (the model has seen texts and ends alone). Of
a sentencepiece model this module makes one, whose normaliser and splits give raw sentencepiece's ids, with two known
differences. Sentencepiece adds scores in fp32 along the whole text, the ``tokenizers`` library in fp64, so that it can
choose another of several splits with equal scores (runs of "_" or "000"; 7 of 2,500 documents of C4 with some
versions). In random Unicode only, a combining mark after a character that NFKC rewrites is dropped.
"""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

from dlr_pretrain.data.tokenizer import MODELS, SETTINGS, SPACE, FastTokenizer, Tokenizer, load_tokenizer
from dlr_pretrain.util.errors import UserError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE = 1, 2  # kinds of models
ADDING = {"TemplateProcessing", "BertProcessing", "RobertaProcessing"}  # post-processors that add special tokens


def export_tokenizer(folder: Path, model: Path, max_length: int) -> None:
    """Write the tokenizer ``model``, a file or folder, into ``folder`` for ``AutoTokenizer.from_pretrained(folder)``.

    The tokenizer appends no end of sequence. "</s>" in a text is read as the end of sequence, as tools expect that
    write it there (TRL, chat templates); with ``split_special_tokens=True`` it is four ordinary characters, as in
    training.
    """
    tokenizer = load_tokenizer(model)
    if tokenizer.saved_as != MODELS[1]:
        shutil.copyfile(tokenizer.path, folder / tokenizer.saved_as)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.specials,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        (MODELS[1], tokenizer_json(tokenizer)),
        (SETTINGS, settings),
        ("special_tokens_map.json", tokenizer.specials),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def tokenizer_json(tokenizer: Tokenizer) -> dict:
    """The tokenizer in the format of the ``tokenizers`` library. Raises UserError if that could not give its ids.

    This takes a fraction of a second: call it before a long run as well.
    """
    if not isinstance(tokenizer, FastTokenizer):
        return _from_sentencepiece(tokenizer)
    content = json.loads(tokenizer.path.read_text(encoding="utf-8"))
    if (content.get("post_processor") or {}).get("type") in ADDING:
        content["post_processor"] = None
    elif (content.get("post_processor") or {}).get("type") == "Sequence":
        kept = [one for one in content["post_processor"]["processors"] if one["type"] not in ADDING]
        content["post_processor"]["processors"] = kept
    known = {token["content"] for token in content["added_tokens"]}
    content["added_tokens"] += [
        _added(token, id) for token, id in _special_ids(tokenizer).items() if token not in known
    ]
    return content | {"truncation": None, "padding": None}


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    ids = (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id)
    return {tokenizer.token(id): id for id in sorted({id for id in ids if id is not None})}


def _added(token: str, id: int) -> dict:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": id, "content": token, **flags}


def _from_sentencepiece(tokenizer: Tokenizer) -> dict:
    try:
        from sentencepiece import sentencepiece_model_pb2
    except ImportError as error:
        rule = f"its export needs the package protobuf ({error})"
        raise UserError(f"{tokenizer.path}: {rule}. Install it: pip install protobuf") from error
    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.path.read_bytes())
    kind, pieces, normaliser = proto.trainer_spec.model_type, proto.pieces, proto.normalizer_spec
    unsupported = {
        "is neither a unigram nor a BPE model": kind not in (UNIGRAM, BPE),
        "has user-defined or unused pieces": any(piece.type in (USER_DEFINED, UNUSED) for piece in pieces),
        "writes spaces as suffixes": proto.trainer_spec.treat_whitespace_as_suffix,
        "does not mark spaces": not normaliser.escape_whitespaces,
    }
    for reason in (text for text, found in unsupported.items() if found):
        raise UserError(
            f"{tokenizer.path}: {reason}, and cannot be exported for transformers. Use a model such as T5's"
        )
    has_bytes = any(piece.type == BYTE for piece in pieces)
    model = _unigram(pieces, has_bytes) if kind == UNIGRAM else _bpe(pieces, has_bytes)
    special = {piece.piece: i for i, piece in enumerate(pieces) if piece.type in (UNKNOWN, CONTROL)}
    special |= _special_ids(tokenizer)
    prefix = normaliser.add_dummy_prefix
    decoder = {
        "type": "Metaspace",
        "replacement": SPACE,
        "prepend_scheme": "always" if prefix else "never",
        "split": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(token, id) for token, id in sorted(special.items(), key=lambda item: item[1])],
        "normalizer": {"type": "Sequence", "normalizers": _normalisers(normaliser)},
        "pre_tokenizer": _split_literal_specials(pieces) if kind == UNIGRAM else None,
        "post_processor": None,
        "decoder": _byte_decoder(prefix) if has_bytes else decoder,
        "model": model,
    }


def _byte_decoder(prefix: bool) -> dict:
    """Of a model with byte pieces: bytes become characters before spaces become visible."""
    steps: list[dict] = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _unigram(pieces, has_bytes: bool) -> dict:
    unknown = next(i for i, piece in enumerate(pieces) if piece.type == UNKNOWN)
    vocabulary = [[piece.piece, piece.score] for piece in pieces]
    return {"type": "Unigram", "unk_id": unknown, "vocab": vocabulary, "byte_fallback": has_bytes}


def _bpe(pieces, has_bytes: bool) -> dict:
    """Sentencepiece joins the two neighbours that make the piece of the best score: merges in the order of scores."""
    ids = {piece.piece: i for i, piece in enumerate(pieces)}
    ordinary = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    merges = [
        (-score, ids[piece[:at]], ids[piece[at:]], piece[:at], piece[at:])
        for piece, score in ordinary.items()
        for at in range(1, len(piece))
        if piece[:at] in ordinary and piece[at:] in ordinary
    ]
    return {
        "type": "BPE",
        "vocab": ids,
        "merges": [[left, right] for *_, left, right in sorted(merges)],
        "unk_token": next(piece.piece for piece in pieces if piece.type == UNKNOWN),
        "fuse_unk": True,
        "byte_fallback": has_bytes,
    }


def _replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _normalisers(spec) -> list[dict]:
    """Sentencepiece's steps in its order: character map, squeeze spaces, one space in front, spaces made visible."""
    steps = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        steps += [_replace({"Regex": r"\A +"}, ""), _replace({"Regex": " {2,}"}, " ")]
    if spec.add_dummy_prefix:
        steps.append({"type": "Prepend", "prepend": SPACE})
    steps.append(_replace({"String": " "}, SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(_replace({"Regex": rf"{SPACE}+\z"}, ""))
    return steps


def _split_literal_specials(pieces) -> dict:
    """A pre-tokenizer that cuts "</s>" in a text in two.

    Sentencepiece never matches a control piece in a text; the ``tokenizers`` model would, because the piece is in its
    vocabulary. If possible, the cut is at a place that no ordinary piece spans and that does not separate two unknown
    characters, which would otherwise become one <unk>.
    """
    ordinary = {piece.piece for piece in pieces if piece.type == NORMAL}
    patterns = []
    for literal in (piece.piece for piece in pieces if piece.type in (UNKNOWN, CONTROL, BYTE)):

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
