"""The exported tokenizer: what ``AutoTokenizer`` reads without remote code.

A ``tokenizer.json`` is exported as it is, without what it adds to a text (the model has seen texts and ends alone). Of
a sentencepiece model this module makes one, whose normaliser and splits give raw sentencepiece's ids, with two known
differences. Sentencepiece adds scores in fp32 along the whole text, the ``tokenizers`` library in fp64, so that it can
choose another of several splits with equal scores (runs of "_" or "000"; 7 of 2,500 documents of C4 with some
versions). In random Unicode only, a combining mark after a character that NFKC rewrites is dropped.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from dlr_pretrain.data.tokenizer import MODELS, SETTINGS, SPACE, FastTokenizer, Tokenizer
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import copy_file, write_text

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE = 1, 2  # kinds of models


def export_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write ``tokenizer`` into ``folder`` for ``AutoTokenizer.from_pretrained(folder)``.

    The tokenizer appends no end of sequence. "</s>" in a text is read as the end of sequence, as tools expect that
    write it there (TRL, chat templates); with ``split_special_tokens=True`` it is four ordinary characters, as in
    training.
    """
    fast = fast_tokenizer(tokenizer)
    write_text(folder / MODELS[1], fast.to_str(pretty=True))  # its own ``save`` raises plain Exceptions
    if not isinstance(tokenizer, FastTokenizer):
        copy_file(tokenizer.path, folder / tokenizer.saved_as)
        if isinstance(fast.model, models.BPE):  # llama.cpp takes the pieces of a file of this name for those of BPE
            copy_file(tokenizer.path, folder / MODELS[2])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.specials,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, ensure_ascii=False, indent=1) + "\n"
    write_text(folder / SETTINGS, text)


def fast_tokenizer(tokenizer: Tokenizer) -> Fast:
    """The tokenizer as one of the ``tokenizers`` library. Raises UserError if that could not give its ids.

    This takes a fraction of a second: call it before a long run as well.
    """
    if isinstance(tokenizer, FastTokenizer):
        plain = {"post_processor": None, "truncation": None, "padding": None}
        fast = Fast.from_str(json.dumps(json.loads(tokenizer.path.read_text(encoding="utf-8")) | plain))
        special: set[int] = set()
    else:
        fast, special = _from_sentencepiece(tokenizer)
    special |= {id for id in (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) if id is not None}
    added = [tokenizer.token(id) for id in sorted(special - fast.get_added_tokens_decoder().keys())]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return fast


def _from_sentencepiece(tokenizer: Tokenizer) -> tuple[Fast, set[int]]:
    """A sentencepiece model in the other library, and the ids of its pieces that no text contains."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.path.read_bytes())  # type: ignore[attr-defined]
    kind, pieces, spec = proto.trainer_spec.model_type, proto.pieces, proto.normalizer_spec
    unsupported = {
        "is neither a unigram nor a BPE model": kind not in (UNIGRAM, BPE),
        "has user-defined or unused pieces": any(piece.type in (USER_DEFINED, UNUSED) for piece in pieces),
        "writes spaces as suffixes": proto.trainer_spec.treat_whitespace_as_suffix,
        "does not mark spaces": not spec.escape_whitespaces,
    }
    for reason in (text for text, found in unsupported.items() if found):
        rule = f"{reason}, and cannot be exported for transformers. Use a model such as T5's"
        raise UserError(f"{tokenizer.path}: {rule}")
    has_bytes = any(piece.type == BYTE for piece in pieces)
    unknown = next(i for i, piece in enumerate(pieces) if piece.type == UNKNOWN)
    if kind == UNIGRAM:
        fast = Fast(models.Unigram([(piece.piece, piece.score) for piece in pieces], unknown, has_bytes))
        fast.pre_tokenizer = _split_literal_specials(pieces)
    else:
        fast = Fast(_bpe(pieces, pieces[unknown].piece, has_bytes))
    fast.normalizer = normalizers.Sequence(_normalisers(spec))
    if has_bytes:  # bytes become characters before spaces become visible
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        fast.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix)
    else:
        fast.decoder = decoders.Metaspace(SPACE, "always" if spec.add_dummy_prefix else "never", split=False)
    return fast, {i for i, piece in enumerate(pieces) if piece.type in (UNKNOWN, CONTROL)}


def _bpe(pieces, unknown: str, has_bytes: bool) -> models.BPE:
    """Sentencepiece joins the two neighbours that make the piece of the best score: merges in the order of scores."""
    ids = {piece.piece: i for i, piece in enumerate(pieces)}
    ordinary = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    ranked = [
        (-score, ids[piece[:at]], ids[piece[at:]], piece[:at], piece[at:])
        for piece, score in ordinary.items()
        for at in range(1, len(piece))
        if piece[:at] in ordinary and piece[at:] in ordinary
    ]
    merges = [(left, right) for *_, left, right in sorted(ranked)]
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)


def _normalisers(spec) -> list[normalizers.Normalizer]:
    """Sentencepiece's steps in its order: character map, squeeze spaces, one space in front, spaces made visible."""
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"{SPACE}+\z"), ""))
    return steps


def _split_literal_specials(pieces) -> pre_tokenizers.PreTokenizer:
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
        patterns.append(f"{re.escape(literal[:cut])}(?={re.escape(literal[cut:])})")
    return pre_tokenizers.Split(Regex("|".join(patterns)), "merged_with_previous")
