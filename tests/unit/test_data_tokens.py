"""Pre-tokenised shards give the very batches of the text that they were made from."""

import gzip
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from data_corpus import NASTY, REAL, global_batches, make_config, needs_real_data, same, write_shards
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from loopback_hub import Hub, serving_here

from dlr_pretrain.data import ORDER_VERSION, documents, inputs_and_targets, open_source, open_tokenizer, validation_set
from dlr_pretrain.data.prepare import prepare
from dlr_pretrain.data.streams import DocumentStream, Place
from dlr_pretrain.data.tokenizer import WHOLE
from dlr_pretrain.data.tokens import MANIFEST
from dlr_pretrain.util.errors import Stopped, UserError

T5 = REAL / "tokenizer" / "spiece.model"


def both(root: Path, model: Path, **keys):
    """The configurations of the shards in ``root`` and of the tokens made from them, which lie beside them."""
    text = make_config(data__root=root, tokenizer__path=model, **keys)
    tokens = make_config("tokens", data__root=root / "tokens", **keys)
    if not (root / "tokens").exists():
        source = open_source(text)
        prepare(source, open_tokenizer(text, source), root / "tokens", 1, lambda _: None)
    return text, tokens


def opened(cfg):
    source = open_source(cfg)
    return cfg, source, open_tokenizer(cfg, source)


def unpacked(found):
    return inputs_and_targets(torch.from_numpy(found.tokens), torch.from_numpy(found.lengths))


# ----------------------------------------------------------------------------------------------------
# The same batches

ODD = [*NASTY, "", "a", "a\x00b", "one\r\ntwo\r\n", "<extra_id_3>", "👩‍🚀", "word " * 20_000, "x" * 100_000]
TEXT = st.one_of(st.text(st.characters(codec=None), max_size=30), st.sampled_from(ODD), st.just("a word and more"))
RAW = st.sampled_from([b'{"text": "caf\xe9 \xff"}\r\n', b'{"text": "\xc3\xa9\xed\xa0\x80"}\n', b"\r\n", b"\n"])
LINE = st.one_of(TEXT.map(lambda text: json.dumps({"text": text}).encode() + b"\n"), RAW)
SHARD = st.lists(LINE, min_size=1, max_size=20)
SOME = b'{"text": "some text"}\n'
LONG = json.dumps({"text": "word " * 2_000_000}).encode() + b"\n"


def shards_of(folder: Path, lines: list[list[bytes]], streams: int) -> None:
    """C4-layout shards, in which every stream has some text."""
    write_shards(folder, [["validation text", "", "more"]], split="validation")
    for i, own in enumerate(lines):
        path = folder / f"c4-train.{i:05d}-of-{len(lines):05d}.json.gz"
        path.write_bytes(gzip.compress(b"".join([*own, *[SOME] * streams]), 1))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([[LONG, SOME], [SOME]], 2, 64, "packed", (3, 5000), 3, [1, 2], [2, 1]).via("a line of ten megabytes")
@example([[b'{"text": ""}\n'] * 50], 4, 8, "pad", (8, 9), 2, [4, 1], [1, 2]).via("almost nothing but empty documents")
@given(
    lines=st.lists(SHARD, min_size=1, max_size=5),
    global_batch=st.sampled_from([1, 2, 4, 6, 12, 32]),
    seq_len=st.integers(2, 40),
    packing=st.sampled_from(["packed", "pad"]),
    block=st.tuples(st.integers(1, 8), st.sampled_from([1, 9, 30, 5000])),
    kill=st.integers(1, 7),
    worlds=st.lists(st.sampled_from([1, 2, 4, 8, 32]), min_size=2, max_size=2),
    others=st.lists(st.sampled_from([1, 2, 4, 8, 32]), min_size=2, max_size=2),
)
def test_text_and_tokens_any_ranks_any_kills(model, lines, global_batch, seq_len, packing, block, kill, worlds, others):
    """One undisturbed run of the text; the tokens, and the text, killed and resumed twice, each time as the other."""
    streams = math.gcd(global_batch, 64)
    worlds, others = ([math.gcd(w, streams) for w in some] for some in (worlds, others))
    keys = {"train__global_batch": global_batch, "train__seq_len": seq_len, "data__packing": packing}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_DOCUMENTS", block[0])
        patch.setattr(documents, "BLOCK_CHARACTERS", block[1])
        shards_of(Path(folder), lines, streams)
        text, tokens = map(opened, both(Path(folder), model, **keys))
        undisturbed = global_batches(*text, 1, 10)
        assert same(global_batches(*tokens, worlds[0], 10), undisturbed)
        for first, second, third in ((tokens, text, tokens), (text, tokens, text)):
            head = global_batches(*first, worlds[0], kill)
            middle = global_batches(*second, worlds[1], 2, head[-1][3])
            tail = global_batches(*third, others[0], 2, middle[0][3])
            assert same(head + middle, undisturbed[: kill + 2]) and same(tail, undisturbed[kill + 1 : kill + 3])


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(SHARD, min_size=1, max_size=4), streams=st.sampled_from([1, 2, 4]), block=st.integers(1, 9))
def test_an_epoch_loses_and_repeats_no_document_and_epochs_reshuffle(model, lines, streams, block):
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_DOCUMENTS", block)
        shards_of(Path(folder), lines, streams)
        text, tokens = map(opened, both(Path(folder), model))
        wanted = []
        for shard in text[1].train_shards:
            texts = [t.encode("utf-8", "replace").decode() for t in text[1].read(shard)]
            wanted += [(*ids, 1) for ids in reference.encode(texts)]
        orders = []
        for _, source, tokenizer in (text, tokens):
            epochs = [[], [], []]
            for v in range(streams):
                for chunk in DocumentStream(source, tokenizer, 42, v, streams).chunks(Place()):
                    if chunk.place.epoch == 3:
                        break
                    cut = np.split(chunk.tokens, chunk.starts[1:])
                    epochs[chunk.place.epoch] += [tuple(one.tolist()) for one in cut]
            assert all(sorted(epoch) == sorted(wanted) for epoch in epochs)
            orders.append(epochs)
        assert orders[0] == orders[1]
        if block >= 4 and len({*wanted}) > 20:
            assert orders[0][0] != orders[0][1] != orders[0][2]


def test_a_block_is_gathered_document_by_document(tmp_path, model, monkeypatch):
    """Long documents, short ones and more than fit at once, against the tokens of each text."""
    monkeypatch.setattr("dlr_pretrain.data.tokens.TAKEN_TOKENS", 50)
    texts = [f"{'more words ' * (i * i % 23)}{i}" for i in range(200)]
    write_shards(tmp_path, [texts])
    write_shards(tmp_path, [["validation"]], split="validation")
    _, tokens = both(tmp_path, model)
    _, source, tokenizer = opened(tokens)
    ids = [[*one, 1] for one in tokenizer.encode(texts)]
    for first, step, longest in ((0, 1, WHOLE), (3, 7, WHOLE), (0, 1, 9), (199, 1, 1)):
        (block,) = source.documents(tokenizer).blocks(source.train_shards[0], first, step)
        order = np.random.default_rng(0).permutation(len(block))
        found = []
        for done, some in documents.in_order(block, order, longest, done=0):
            assert done == len(found) and (len(some.tokens) <= 50 or len(some.starts) == 1)
            found += [one.tolist() for one in np.split(some.tokens, some.starts[1:])]
        assert found == [ids[first::step][i][:longest] for i in order]


@pytest.mark.slow
@needs_real_data
@pytest.mark.parametrize(
    ("folder", "train", "validation"),
    [("c4/en", "c4-train.*", "c4-validation.*")],
)
def test_every_path_counts_the_tokens_of_sentencepiece(folder, train, validation, tmp_path, monkeypatch):
    """Streamed, local and tokens: one epoch's counts, those of validation, and the batches, packed and padded."""
    keys = {"train__global_batch": 64, "train__seq_len": 256, "eval__tokens": 10**9}
    names = (("data__train_files", train), ("data__validation_files", validation))
    local = opened(make_config(data__root=REAL / folder, tokenizer__path=T5, **keys, **dict(names)))
    counts = counts_of_sentencepiece(local[1])
    prepare(*local[1:], tmp_path / "tokens", 2, lambda _: None)
    tokens = opened(make_config("tokens", data__root=tmp_path / "tokens", **keys))
    entries = [json.loads((tmp_path / "tokens" / MANIFEST).read_text())["shards"][split] for split in counts]
    found = [(sum(e["documents"] for e in own), sum(e["tokens"] for e in own)) for own in entries]
    assert found == [count[:2] for count in counts.values()]
    hub = Hub({f"en/{path.name}": path.read_bytes() for path in (REAL / folder).iterdir()})
    with serving_here(hub, monkeypatch):
        globs = {key: f"en/{glob}" for key, glob in names}
        streamed = opened(make_config("c4", tokenizer__path=T5, **keys, **globs))
        assert streamed[1].fingerprint == local[1].fingerprint == tokens[1].fingerprint
        wanted = {}
        for arm in (local, streamed, tokens):
            assert counts_of_an_epoch(*arm[1:]) == counts["train"]
            for at, packing in ((1, "packed"), (2, "pad")):
                arm[0].eval.packing = arm[0].data.packing = packing
                assert validation_set(*arm).real_tokens == counts["validation"][at]
                batches = global_batches(*arm, 2, 30)
                assert same(wanted.setdefault(packing, batches), batches)


def counts_of_sentencepiece(source) -> dict[str, tuple[int, int, int]]:
    """Documents, tokens, and tokens where each document is cut to 256, of both splits; each with its </s>."""
    reference, counts = sentencepiece.SentencePieceProcessor(model_file=str(T5)), {}
    for split in ("train", "validation"):
        texts = (text for shard in getattr(source, f"{split}_shards") for text in source.read(shard))
        lengths = [len(ids) + 1 for some in documents.text_chunks(texts) for ids in reference.encode(some)]
        counts[split] = (len(lengths), sum(lengths), sum(min(length, 256) for length in lengths))
    return counts


def counts_of_an_epoch(source, tokenizer) -> tuple[int, int, int]:
    """The same of what 64 streams yield before their second epoch."""
    counts = np.zeros(3, int)
    for v in range(64):
        for chunk in DocumentStream(source, tokenizer, 42, v, 64).chunks(Place()):
            if chunk.place.epoch:
                break
            lengths = np.diff(chunk.starts, append=len(chunk.tokens))
            counts += [len(lengths), lengths.sum(), np.minimum(lengths, 256).sum()]
    return tuple(counts.tolist())


@pytest.mark.parametrize("packing", ["pad", "packed"])
def test_the_validation_set_is_that_of_the_text(tmp_path, model, packing):
    write_shards(tmp_path, [["train"]])
    write_shards(tmp_path, [["a word", "", "more of the text " * 9] * 90, ["one", "two"]], split="validation")
    for budget in (1, 500, 10**6):
        cfgs = both(tmp_path, model, eval__packing=packing, eval__tokens=budget, train__seq_len=16)
        one, other = (validation_set(*opened(cfg)) for cfg in cfgs)
        assert one.real_tokens == other.real_tokens
        assert all(map(torch.equal, unpacked(one), unpacked(other)))


# ----------------------------------------------------------------------------------------------------
# A run on them


def test_a_run_on_text_goes_on_with_tokens_made_from_it(words, made, tmp_path, no_export):
    from dlr_pretrain.cli import load
    from dlr_pretrain.train.run import run
    from dlr_pretrain.util.history import read_metrics

    def train(folder, *overrides):
        given = words(f"run.dir={tmp_path / folder}", "train.steps=6", *overrides)
        if "data=tokens" in overrides:
            given = [word for word in given if not word.startswith("tokenizer.path")]
        run(load(given))

    def losses(folder):
        return [r["train/loss"] for r in read_metrics(tmp_path / folder / "metrics.jsonl")]

    train("whole")
    with pytest.raises(Stopped):
        train("parts", "train.stop_after=2")
    with pytest.raises(Stopped):
        train("parts", "data=tokens", f"data.root={made}", "train.stop_after=4")
    train("parts")
    assert losses("parts") == losses("whole")
    write_shards(tmp_path / "other", [["another text"] * 40] * 2)
    write_shards(tmp_path / "other", [["another"]], split="validation")
    with pytest.raises(UserError, match=r"holds another run:\n  data\.shards: \w+ there, \w+ here"):
        train("parts", f"data.root={tmp_path / 'other'}")


def test_a_run_goes_on_under_its_own_order_alone(train, tmp_path, no_export, monkeypatch):
    given, record = ("train.steps=3", "train.lr=1e-3"), tmp_path / "run" / "manifest.json"
    with pytest.raises(Stopped):
        train(tmp_path / "run", *given, "train.stop_after=1")
    monkeypatch.setattr("dlr_pretrain.train.text.ORDER_VERSION", ORDER_VERSION + 1)
    with pytest.raises(UserError, match=rf"data\.order: {ORDER_VERSION} there, {ORDER_VERSION + 1} here"):
        train(tmp_path / "run", *given)
    written = json.loads(record.read_text())
    written["identity"].pop("data.order")
    record.write_text(json.dumps(written))
    with pytest.raises(UserError, match=r"step_00000001: it is of another run \(1 keys differ: data\.order was"):
        train(tmp_path / "run", *given)  # the checkpoint knows it, too
