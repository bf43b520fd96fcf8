"""Small corpora, configurations and tokenizers for the tests of the data room."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import sentencepiece
import torch
from hydra import compose
from omegaconf import DictConfig, OmegaConf

from dlr_pretrain import config
from dlr_pretrain.config.command_line import session
from dlr_pretrain.data import TrainLoader, inputs_and_targets
from dlr_pretrain.data.sources import TextSource
from dlr_pretrain.data.tokens import ENDS, FILES, FORMAT, MANIFEST, TokenSource, shard_names

NASTY = [
    "<extra_id_7> and <extra_id_0>", "</s>", "<pad><unk></s></s>", "a\0b\0", "\ud800 lone \udfff", "one\r\ntwo\r\n",
    "👩‍🚀 \U0001f9ff é 中文 नमस्ते", "", " ", "\n\n", "\u200b\ufeff", "\x1b[31mred", "ffi ½ Ⅷ",
]  # fmt: skip

PACKINGS = pytest.mark.parametrize("packing", ["packed", "pad"])
COMPRESS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


@cache
def composed(data: str) -> DictConfig:
    with session():
        words = ("scale=tiny", "dlr=on", "precision=fp32", "parallel=ddp", "logger=jsonl")
        return compose("train", [*words, f"data={data}", *["data.root=."] * (data == "c4_local"), "device=cpu"])


def make_config(data: str = "c4_local", **keys) -> config.Config:
    """A configuration of the smallest scale, without the rules; ``train__seq_len=8`` sets train.seq_len."""
    tree = composed(data).copy()
    for name, value in keys.items():
        OmegaConf.update(
            tree, name.replace("__", "."), str(value) if isinstance(value, Path) else value, force_add=True
        )
    return config.parse(OmegaConf.to_container(tree, resolve=True))


def lines_of(texts) -> bytes:
    return b"".join(json.dumps({"text": text, "meta": {"text": text}}).encode() + b"\n" for text in texts)


def write_table(path: Path, columns: dict, rows: int | None = None) -> None:
    """Write a table by suffix: .parquet, .arrow (a stream) or .file.arrow; ``rows`` per group (all) or batch (2)."""
    made = pyarrow.table(columns)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(made, path, row_group_size=rows)
        return
    writer = pyarrow.ipc.new_file if ".file" in path.suffixes else pyarrow.ipc.new_stream
    with writer(str(path), made.schema) as file:
        file.write_table(made, max_chunksize=rows or 2)


def in_key(key: str, array) -> dict:
    """The columns of a table with texts in a field, or in a nested field whose parent is null in the last row."""
    if key == "text":
        return {"id": range(len(array)), "text": array}
    mask = pyarrow.array([number == len(array) - 1 for number in range(len(array))])
    return {"id": range(len(array)), "meta": pyarrow.StructArray.from_arrays([array], ["text"], mask=mask)}


def write_shards(folder: Path, shards: list[list[str]], split: str = "train", prefix: str = "c4") -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i, texts in enumerate(shards):
        paths.append(folder / f"{prefix}-{split}.{i:05d}-of-{len(shards):05d}.json.gz")
        paths[-1].write_bytes(gzip.compress(lines_of(texts)))
    return paths


class LetterTokenizer:
    """One token per character: a sequence shows which documents it holds."""

    pad_id, eos_id, unk_id, vocab_size = 0, 1, 2, 40_000
    fingerprint = path = "letters"
    special_in_text, special = "text", ()

    def has_special(self, text: str) -> bool:
        return False

    def beginnings(self, longest: int) -> LetterTokenizer:
        return self

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array([3 + ord(c) % 39_000 for c in text], np.int32) for text in texts]


class MemorySource(TextSource):
    """A source whose shards are lists of texts."""

    tokenizer_path = None
    fingerprint = "memory"
    validation_shards = ()
    holds_out = False

    def __init__(self, shards: list[list[str]]):
        self._shards = {f"shard-{i}": texts for i, texts in enumerate(shards)}
        self.train_shards = tuple(self._shards)

    def _file_rows(self, name, start=0, part=None):
        yield from enumerate(self._shards[name][start:], start)

    def _sizes(self):
        return [max(1, sum(map(len, texts))) for texts in self._shards.values()]

    def describe(self):
        return "memory"


def corpus(shards: int, documents: int) -> list[list[str]]:
    """Distinct documents of varied length, each of which begins with its own character."""
    names = iter(range(0x4E00, 0x4E00 + shards * documents))
    return [[chr(name) + "x" * ((7 * name) % 23) for name in (next(names) for _ in range(documents))]
            for _ in range(shards)]  # fmt: skip


def documents_of(chunks) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The epoch and the tokens of each document of a stream's chunks."""
    for position, some in chunks:
        for tokens in np.split(some.tokens, some.starts[1:]):
            yield position.epoch, tuple(tokens.tolist())


def global_batches(cfg, source, tokenizer, world_size: int, steps: int, state=None):
    """The global batches of the next steps, joined over all ranks.

    Returns a list of (inputs, targets, real tokens, state), the tensors concatenated and the states merged over ranks.
    """
    out = []
    with ExitStack() as opened:  # no thread survives a failure
        ranks = (TrainLoader(cfg, source, tokenizer, rank, world_size, state) for rank in range(world_size))
        loaders = [opened.enter_context(closing(loader)) for loader in ranks]
        for _ in range(steps):
            batches = [loader.take() for loader in loaders]
            rows = zip(*(inputs_and_targets(batch.tokens, batch.lengths) for batch in batches), strict=True)
            merged = {stream: place for batch in batches for stream, place in batch.positions.items()}
            real = sum(batch.real_tokens for batch in batches)
            out.append((*map(torch.cat, rows), real, json.loads(json.dumps(merged))))
    return out


def same(a, b) -> bool:
    """Whether two lists of global batches are equal in every token, count and state."""
    return len(a) == len(b) and all(
        torch.equal(x[0], y[0]) and torch.equal(x[1], y[1]) and x[2:] == y[2:] for x, y in zip(a, b, strict=True)
    )


def tokens_of(folder: Path, shards: list[list[str]]) -> TokenSource:
    """A token source of these texts, by the LetterTokenizer."""
    tokenizer = LetterTokenizer()
    about = {"sha256": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
    manifest = {"format": FORMAT, "source": "", "made_from": "letters", "contents": {}, "tokenizer": about}
    (folder / MANIFEST).write_text(json.dumps(manifest | {"shards": {"train": len(shards), "validation": 0}}))
    for number, (name, texts) in enumerate(zip(shard_names("train", len(shards)), shards, strict=True)):
        ids = [np.append(own, tokenizer.eos_id) for own in tokenizer.encode(texts)]
        np.concatenate([np.empty(0, int), *ids]).astype(np.uint16).tofile(folder / name)
        np.cumsum([0, *map(len, ids)]).tofile((folder / name).with_suffix(ENDS))
        np.array([number, len(ids), 0, 0]).tofile((folder / name).with_suffix(FILES))
    return TokenSource(folder)


# ----------------------------------------------------------------------------------------------------
# A SentencePiece model in T5's layout, small enough to be trained inside a test


PIECES = 160

SENTENCES = """\
The house stands on a hill above the river, and its windows look to the south.
Every number says its precision mode, its packing, and how many tokens were seen.
In 1913 the bridge was 1,250 feet long; by 1957 it carried 40,000 cars a day (or more).
She asked: "Where do the streams of the two valleys meet?" Nobody knew, so they walked on.
A low-rank layer multiplies by two thin matrices; the latent between them is what is copied.
Copper, tin & zinc cost £3.50 a pound -- 20% less than last year's price!
Don't mix up the quick brown fox with the lazy dog: one jumps, the other sleeps.
for i in range(10): total += weights[i] * values[i]  # a sum of products
The café's naïve owner, José Núñez, served crème brûlée at Zürich's oldest hotel.
Questions remain... Why is the sky blue? How deep is the ocean? What is it that we know?
Yesterday evening the committee voted against the proposal by a margin of five to four.
Meanwhile, far below, the engines were running at half their usual speed.
""".splitlines()


def small_model(folder: Path, **options) -> Path:
    """Write ``folder/small.model``, by default a unigram model with T5's normalisation, and return its path."""
    path = folder / "small.model"
    settings = {
        "model_type": "unigram", "vocab_size": PIECES, "character_coverage": 0.98, "num_threads": 1, "minloglevel": 2,
        "normalization_rule_name": "nmt_nfkc", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1,
    }  # fmt: skip
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(SENTENCES * 3), model_writer=file, **settings | options
        )
    return path
