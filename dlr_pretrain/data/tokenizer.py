"""Tokenizers of sentencepiece and of the ``tokenizers`` library; T5's SentencePiece model is the default.

Each format is read by its own library. Raw sentencepiece is about ten times faster than a fast tokenizer built from the
same model. Every document ends with one end-of-sequence token, which text cannot produce: "</s>" in a document is four
ordinary characters, and so is every other special token unless ``data.special_tokens`` is ``tokens``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dlr_pretrain.config import Config
from dlr_pretrain.data.files import FIRST_CONTACT_SECONDS, first_contact, hub_error
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import copy_file, read_json, write_text

EOS = 1  # in T5's layout: <pad> 0, </s> 1, <unk> 2
SPACE = "\u2581"  # as sentencepiece writes it
CHARACTERS_PER_TOKEN = 6  # none of 600 documents of C4 has more on average over its first 257 tokens
MODELS = ("spiece.model", "tokenizer.json", "tokenizer.model")  # the first that a folder holds is taken
SETTINGS, SPECIALS = "tokenizer_config.json", "special_tokens_map.json"
IN_TEXT = "special_tokens_in_text"  # in our settings: see ``data.special_tokens``
ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>")  # if no configuration names the end
PADDED_FROM, MULTIPLE = 1024, 64  # vocabularies from this size are padded: matrices of odd widths are slower


class Tokenizer(ABC):
    """Encodes texts as ids."""

    path: Path  # of the model file
    saved_as: str  # the name of the model file in a folder
    vocab_size: int  # one more than the largest id
    eos_id: int
    pad_id: int  # means nothing to the model; eos_id if the tokenizer has no padding
    unk_id: int | None  # for text that the tokenizer cannot express; None if it can express any text
    special_in_text: str  # what data.special_tokens says
    special: tuple[str, ...]  # the special tokens as they would stand in a text
    fingerprint: str  # SHA-256 of what decides the ids (a model file, or parts of a tokenizer.json) and of the end
    _model: Any  # the library's object: sentencepiece and tokenizers have no types

    @abstractmethod
    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [n], without an end of sequence. Uses one thread: a rank has one producer."""

    def beginnings(self, longest: int) -> Tokenizer:
        """A tokenizer that may return only the first ``longest`` ids of a text, which is faster for long texts."""
        return self

    @abstractmethod
    def token(self, id: int) -> str:
        """The token of an id, as the vocabulary spells it."""

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without padding and ends of sequence."""
        return self._model.decode([int(id) for id in ids if id not in (self.pad_id, self.eos_id)])

    @property
    def settings(self) -> dict[str, str]:
        """The special tokens that training uses, under transformers' names, and ours for what a text's are."""
        ids = {"pad_token": self.pad_id, "eos_token": self.eos_id, "unk_token": self.unk_id}
        used = {name: self.token(id) for name, id in ids.items() if id is not None}
        return used | ({IN_TEXT: self.special_in_text} if self.special_in_text != "text" else {})

    def has_special(self, text: str) -> bool:
        """Whether a special token stands in a text."""
        return any(token in text for token in self.special)

    def save(self, folder: Path) -> None:
        """Write the files that ``load_tokenizer`` reads into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.resolve() != (folder / self.saved_as).resolve():
            copy_file(self.path, folder / self.saved_as)
        write_text(folder / SETTINGS, json.dumps(self.settings, indent=1) + "\n")


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model of any kind."""

    saved_as = MODELS[0]

    def __init__(self, path: Path, end: str | None = None):
        import sentencepiece

        self.path = path
        try:
            content = path.read_bytes()
            self._model = model = sentencepiece.SentencePieceProcessor()
            model.LoadFromSerializedProto(content)
        except (OSError, RuntimeError) as error:
            raise UserError(
                path,
                f"not a readable sentencepiece model ({error})",
                "Set tokenizer.path to a sentencepiece model, a tokenizer.json, or a folder that holds one",
            ) from error
        self.vocab_size, self.unk_id, self.special_in_text = model.vocab_size(), model.unk_id(), "text"
        self.special = tuple(model.id_to_piece(i) for i in range(self.vocab_size) if model.is_control(i))
        default_end = model.eos_id() if model.eos_id() >= 0 else None
        ids = {model.id_to_piece(i): i for i in range(self.vocab_size)}
        self.eos_id = _end_of_sequence(path, end, ids, default_end)
        self.pad_id = model.pad_id() if model.pad_id() >= 0 else self.eos_id
        # If spaces occur only at the start of tokens, the ids of a text up to a space do not depend on what follows.
        self._can_cut = SPACE in ids and not any(SPACE in token[1:] for token in ids)
        self._longest: int | None = None
        another_end = b"" if self.eos_id == default_end else self.token(self.eos_id).encode()
        self.fingerprint = hashlib.sha256(content + another_end).hexdigest()

    def beginnings(self, longest: int) -> Tokenizer:
        cutting = copy.copy(self)
        cutting._longest = longest if self._can_cut else None
        return cutting

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        encode = partial(self._model.encode, out_type="numpy", num_threads=1)
        texts = [valid_text(text) for text in texts]
        if self._longest is None:
            return encode(texts)
        heads = [_head(text, CHARACTERS_PER_TOKEN * self._longest) for text in texts]
        encoded = encode(heads)
        for i, (text, head) in enumerate(zip(texts, heads, strict=True)):
            if len(head) < len(text) and len(encoded[i]) < self._longest:
                encoded[i] = encode(text)
        return encoded

    def token(self, id: int) -> str:
        return self._model.id_to_piece(id)


class FastTokenizer(Tokenizer):
    """A ``tokenizer.json`` of the ``tokenizers`` library."""

    saved_as = MODELS[1]

    def __init__(self, path: Path, end: str | None = None, special_in_text: str | None = None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks share the cores, and may fork
        import tokenizers

        self.path = path
        try:
            content = path.read_text(encoding="utf-8")
            self._model = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(
                path,
                f"not a readable tokenizer.json ({first_line(error)})",
                "Set tokenizer.path to a tokenizer.json that the tokenizers library saved",
            ) from error
        self._model.no_truncation()
        self._model.no_padding()
        self.special_in_text = special_in_text or _configured(path).get(IN_TEXT, "text")
        self._model.encode_special_tokens = self.special_in_text == "text"
        # Scores are rounded, because the library changes their last digits.
        spec = json.loads(content, parse_float=lambda digits: round(float(digits), 9))
        vocabulary, model = self._model.get_vocab(with_added_tokens=True), spec["model"]
        if model.get("dropout"):
            raise UserError(f"{path}: drops merges at random, so no run can be repeated. Set its dropout to null")
        self.vocab_size = max(vocabulary.values()) + 1
        unknown = model.get("unk_id") if "unk_id" in model else vocabulary.get(model.get("unk_token"))
        self.unk_id = None if model.get("byte_fallback") else unknown
        self.eos_id = _end_of_sequence(path, end, vocabulary, None)
        self.pad_id = vocabulary.get(_configured(path).get("pad_token", ""), self.eos_id)
        parts = {name: spec.get(name) for name in ("model", "normalizer", "pre_tokenizer", "decoder")}
        parts["added_tokens"] = [token for token in spec.get("added_tokens", []) if not token["special"]]
        parts["end"] = self.token(self.eos_id)
        added = self._model.get_added_tokens_decoder().values()
        self.special = tuple(sorted({token.content for token in added if token.special}))
        if self.special_in_text == "tokens":
            parts["special"] = sorted({*self.special, *self.settings.values()})
        self.fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        try:
            encoded = self._model.encode_batch_fast([valid_text(text) for text in texts], add_special_tokens=False)
        except Exception as error:  # the library raises plain Exceptions
            raise UserError(
                self.path, f"cannot encode the text ({first_line(error)})", "Give the tokenizer an unknown token"
            ) from error
        ids = [np.array(one.ids, np.int32) for one in encoded]
        if self.special_in_text == "tokens":
            return ids
        return [each[each != self.eos_id] for each in ids]  # the end may be a word of the vocabulary as well

    def token(self, id: int) -> str:
        return self._model.id_to_token(id)


def _end_of_sequence(path: Path, given: str | None, vocabulary: Mapping[str, int], default: int | None) -> int:
    """The id of the token that ends documents: given, configured beside the file, the model's own, or a usual one."""
    usual = [token for token in ENDS if token in vocabulary]
    if given is not None and given not in vocabulary:
        raise UserError(
            f"tokenizer.eos={given}",
            f"is not a token of {path}",
            f"Perhaps {' or '.join(usual)}" if usual else "Name a token of its vocabulary",
        )
    token = given or _configured(path).get("eos_token", "")
    if token in vocabulary:
        return vocabulary[token]
    if default is not None:
        return default
    if not usual:
        raise UserError(
            path, "does not say which token ends a document", "Set tokenizer.eos=<a token of its vocabulary>"
        )
    return vocabulary[usual[0]]


def _configured(path: Path) -> dict[str, str]:
    """The special tokens that the configuration beside a tokenizer's file names."""
    tokens: dict[str, str] = {}
    for file in (SPECIALS, SETTINGS):
        with suppress(OSError, ValueError):  # missing, or not an object
            settings = read_json(path.parent / file, {})
            texts = {
                name: value.get("content") if isinstance(value, dict) else value for name, value in settings.items()
            }
            tokens |= {name: text for name, text in texts.items() if isinstance(text, str)}
    return tokens


def _head(text: str, characters: int) -> str:
    """The text up to the last space in its first ``characters``; the whole text if it is short or has no space."""
    space = text.rfind(" ", 1, characters) if len(text) > characters else -1
    return text if space == -1 else text[:space]


def valid_text(text: str) -> str:
    """The text with question marks instead of lone surrogates, which UTF-8 cannot express."""
    return text.encode("utf-8", "replace").decode()


def load_tokenizer(path: Path, end: str | None = None, special_in_text: str | None = None) -> Tokenizer:
    """Load a tokenizer from a file, or from a folder that holds one.

    ``end`` is the token that ends a document, and ``special_in_text`` is ``data.special_tokens``. Without these, a
    folder that this program saved gives its own.
    """
    path = Path(path)
    if path.is_dir():
        files = [path / name for name in MODELS if (path / name).is_file()]
        if not files:
            raise UserError(f"{path}: holds none of {', '.join(MODELS)}. Name the folder or the file of a tokenizer")
        path = files[0]
    if path.suffix == ".json":
        return FastTokenizer(path, end, special_in_text)
    if special_in_text == "tokens":
        raise UserError(
            "data.special_tokens=tokens",
            f"a SentencePiece model reads its special tokens in a text as ordinary characters ({path})",
            "Leave the key out, or use a tokenizer.json",
        )
    return SentencePieceTokenizer(path, end)


def open_tokenizer(cfg: Config, source) -> Tokenizer:
    """The tokenizer at ``tokenizer.path``, else the source's own, else the one at ``tokenizer.hub``."""
    path = cfg.tokenizer.path or source.tokenizer_path or _from_hub(cfg.tokenizer.hub)
    special_in_text = None if cfg.data.source in ("tokens", "mix") else cfg.data.special_tokens
    tokenizer = load_tokenizer(Path(path), cfg.tokenizer.eos, special_in_text)
    if tokenizer.special_in_text == "tokens" and cfg.data.mask_documents:
        raise UserError(
            "data.mask_documents=true with data.special_tokens=tokens",
            f"documents are divided at {tokenizer.token(tokenizer.eos_id)}, which a text may hold as well",
            "Leave one of them out",
        )
    return tokenizer


def _from_hub(name: str) -> Path:
    """The folder with the tokenizer of a repository on the hub, from the local cache if possible."""
    from huggingface_hub import HfApi, snapshot_download

    wanted = [*MODELS, SETTINGS, SPECIALS]
    with suppress(OSError, ValueError):  # not in the cache
        folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
        if any((folder / model).is_file() for model in MODELS):
            return folder
    fix = "Give a tokenizer with tokenizer.path=<file or folder>, or train offline with data=sample"
    first_contact(f"tokenizer.hub={name}", lambda: HfApi().model_info(name, timeout=FIRST_CONTACT_SECONDS), fix)
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except OSError as error:  # the client's errors are OSErrors: a gated repository is described, but not given
        raise hub_error(f"tokenizer.hub={name}", error, fix) from error


def embedding_rows(cfg: Config, tokenizer: Tokenizer) -> int:
    """Rows of a model's embedding: ``scale.vocab_size``, else the tokenizer's size, padded where that is faster."""
    if (rows := cfg.scale.vocab_size) is None:
        size = tokenizer.vocab_size
        return size if size < PADDED_FROM else -(-size // MULTIPLE) * MULTIPLE
    if tokenizer.vocab_size > rows:
        raise UserError(
            f"tokenizer {tokenizer.path}",
            f"{tokenizer.vocab_size:,} ids, but the model has scale.vocab_size={rows}",
            f"Set scale.vocab_size={tokenizer.vocab_size} or more",
        )
    return rows
