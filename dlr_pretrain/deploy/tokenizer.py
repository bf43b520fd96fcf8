"""Exports the tokenizer in the form that ``AutoTokenizer`` reads without remote code.

A ``tokenizer.json`` is exported without the tokens that it would add to a text, because training saw only texts and
ends of sequence. A sentencepiece model is converted to a ``tokenizer.json`` with the same ids, with two known
exceptions. (1) Sentencepiece sums scores in fp32 along the whole text, the ``tokenizers`` library in fp64, so they may
choose differently between splits with equal scores (runs of "_" or "000"; 7 of 2,500 documents of C4 with some
versions). (2) A combining mark after a character that NFKC rewrites is dropped; this was seen in random Unicode only.
"""

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Fast

from dlr_pretrain.data.tokenizer import MODELS, SETTINGS, SPACE, FastTokenizer, Tokenizer
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import copy_file, write_text

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # sentencepiece's types of pieces
UNIGRAM, BPE = 1, 2  # sentencepiece's types of models


def export_tokenizer(folder: Path, tokenizer: Tokenizer, max_length: int) -> None:
    """Write ``tokenizer`` to ``folder`` for ``AutoTokenizer.from_pretrained(folder)``.

    The exported tokenizer appends no end of sequence. It reads the special tokens in a text as training did, except for
    "</s>" and padding: these are tokens, as TRL and chat templates expect. ``split_special_tokens=True`` reads four
    ordinary characters.
    """
    fast = fast_tokenizer(tokenizer)
    write_text(folder / MODELS[1], fast.to_str(pretty=True))  # ``fast.save`` raises plain Exceptions
    if not isinstance(tokenizer, FastTokenizer):
        copy_file(tokenizer.path, folder / tokenizer.saved_as)
        if isinstance(fast.model, models.BPE):  # llama.cpp reads a file of this name as BPE
            copy_file(tokenizer.path, folder / MODELS[2])
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokenizer.settings,
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(settings, ensure_ascii=False, indent=1) + "\n"
    write_text(folder / SETTINGS, text)


def fast_tokenizer(tokenizer: Tokenizer) -> Fast:
    """The tokenizer as one of the ``tokenizers`` library. Raises UserError if that library cannot return its ids.

    The conversion takes a fraction of a second, so a long run also calls it before training.
    """
    if isinstance(tokenizer, FastTokenizer):
        spec = json.loads(tokenizer.path.read_text(encoding="utf-8"))
        if tokenizer.special_in_text == "text":
            used = tokenizer.settings.values()
            added_tokens = spec.get("added_tokens", [])
            spec["added_tokens"] = [t for t in added_tokens if not t["special"] or t["content"] in used]
        plain = {"post_processor": None, "truncation": None, "padding": None}
        fast = Fast.from_str(json.dumps(spec | plain))
    else:
        fast = _from_sentencepiece(tokenizer)
    special = {id for id in (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) if id is not None}
    added = [tokenizer.token(id) for id in sorted(special - fast.get_added_tokens_decoder().keys())]
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return fast


def _from_sentencepiece(tokenizer: Tokenizer) -> Fast:
    """A sentencepiece model converted to the ``tokenizers`` library, without its special tokens."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(tokenizer.path.read_bytes())  # type: ignore[attr-defined]
    kind, pieces, spec = proto.trainer_spec.model_type, proto.pieces, proto.normalizer_spec
    unsupported = {
        "is neither a unigram nor a BPE model": kind not in (UNIGRAM, BPE),
        "has user-defined or unused pieces": any(piece.type in (USER_DEFINED, UNUSED) for piece in pieces),
        "writes spaces as suffixes": proto.trainer_spec.treat_whitespace_as_suffix,
        "does not mark spaces": not spec.escape_whitespaces,
    }
    for reason in (reason for reason, applies in unsupported.items() if applies):
        raise UserError(f"{tokenizer.path}: {reason}, and cannot be exported for transformers. Use one such as T5's")
    has_bytes = any(piece.type == BYTE for piece in pieces)
    unknown = next(i for i, piece in enumerate(pieces) if piece.type == UNKNOWN)
    if kind == UNIGRAM:
        fast = Fast(models.Unigram([(piece.piece, piece.score) for piece in pieces], unknown, has_bytes))
        fast.pre_tokenizer = _split_literal_specials(pieces)
    else:
        fast = Fast(_bpe(pieces, pieces[unknown].piece, has_bytes))
    fast.normalizer = normalizers.Sequence(_normalisers(spec))
    if has_bytes:  # bytes are joined into characters before the leading space is stripped
        steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        fast.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * spec.add_dummy_prefix)
    else:
        fast.decoder = decoders.Metaspace(SPACE, "always" if spec.add_dummy_prefix else "never", split=False)
    return fast


def _bpe(pieces, unknown: str, has_bytes: bool) -> models.BPE:
    """The BPE model with sentencepiece's merges: it joins the two neighbours whose joint piece scores best."""
    ids = {piece.piece: i for i, piece in enumerate(pieces)}
    ordinary = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    splits = ((piece[:cut], piece[cut:]) for piece in ordinary for cut in range(1, len(piece)))
    merges = [(left, right) for left, right in splits if left in ordinary and right in ordinary]
    merges.sort(key=lambda pair: (-ordinary["".join(pair)], ids[pair[0]], ids[pair[1]]))
    return models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)


def _normalisers(spec) -> list[normalizers.Normalizer]:
    """Sentencepiece's steps, in its order: map characters, squeeze spaces, prepend a space, make spaces visible."""
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
    """A pre-tokenizer that splits a literal "</s>" in a text.

    Sentencepiece never matches a control piece in a text; the ``tokenizers`` library would, because the piece is in its
    vocabulary. If possible, no ordinary piece spans the cut, and the cut does not separate two unknown characters,
    which would otherwise become one <unk>.
    """
    ordinary = {piece.piece for piece in pieces if piece.type == NORMAL}
    patterns = []
    for literal in (piece.piece for piece in pieces if piece.type in (UNKNOWN, CONTROL, BYTE)):

        def harm(cut: int, literal: str = literal) -> tuple[bool, bool]:
            pair = literal[cut - 1 : cut + 1]
            return any(pair in piece for piece in ordinary), ordinary.isdisjoint(pair)

        cut = min(range(1, len(literal)), key=harm)
        patterns.append(f"{re.escape(literal[:cut])}(?={re.escape(literal[cut:])})")
    return pre_tokenizers.Split(Regex("|".join(patterns)), "merged_with_previous")
