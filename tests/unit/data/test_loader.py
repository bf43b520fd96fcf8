"""Batches are the same on any ranks and after any resume. Also: their content, the thread, the validation set."""

import math
import threading
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch

from dlr_pretrain.data import Batch, TrainLoader, inputs_and_targets, open_source, streams, validation_set
from dlr_pretrain.data import loader as loading
from dlr_pretrain.data.streams import Position, Share, endless
from dlr_pretrain.util.errors import Stalled, Stopped, UserError
from dlr_pretrain.util.tensors import IGNORE
from tests.unit.data.data_corpus import (
    NASTY,
    PACKINGS,
    LetterTokenizer,
    MemorySource,
    corpus,
    documents_of,
    global_batches,
    make_config,
    same,
    tokens_of,
    write_shards,
)

TOKENIZER = LetterTokenizer()


def config(global_batch=8, seq_len=16, packing="packed", **keys):
    return make_config(train__global_batch=global_batch, train__seq_len=seq_len, data__packing=packing, **keys)


@pytest.mark.parametrize("mask", [False, True])
def test_an_empty_batch_has_the_form_of_a_real_one(mask):
    """Otherwise a failed rank would compile its model for another form while all ranks wait."""
    cfg = config(data__mask_documents=mask)
    with closing(TrainLoader(cfg, MemorySource(corpus(8, 9)), TOKENIZER, 0, 1, None)) as loader:
        real = loader.take()
    forms = []
    for batch in (real, Batch.empty(cfg, len(real.tokens))):
        inputs = inputs_and_targets(batch.tokens, batch.lengths, batch.separator)
        forms.append([(each.shape, each.dtype, each.stride()) for each in inputs])
    assert forms[0] == forms[1] and len(forms[0]) == 2 + mask
    assert not (inputs[1] != IGNORE).any()


@PACKINGS
@pytest.mark.parametrize(("shards", "global_batch", "streams", "ranks"), [
    (8, 8, None, (2, 4, 8)),
    (19, 8, None, (2, 8)),
    (64, 64, None, (4, 64)),
    (70, 64, None, (32,)),
    (15, 24, 12, (2, 3, 6, 12)),
    (128, 128, 128, (128,)),
    (1, 6, 1, ()),
])  # fmt: skip
def test_a_global_batch_is_the_same_on_any_number_of_ranks(packing, shards, global_batch, streams, ranks):
    """The number of streams is gcd(global_batch, 64) by default, or any divisor of the batch."""
    cfg, source = config(global_batch, packing=packing, data__streams=streams), MemorySource(corpus(shards, 20))
    alone = global_batches(cfg, source, TOKENIZER, 1, 6)
    assert len(alone[0][3]) == (streams or math.gcd(global_batch, 64))
    for world_size in ranks:
        assert same(global_batches(cfg, source, TOKENIZER, world_size, 6), alone)


@PACKINGS
def test_resume_at_every_step_twice_and_on_other_ranks_is_exact(packing, monkeypatch):
    """Also with empty or odd documents, small blocks, and chunks of another size after the resume."""
    monkeypatch.setattr(streams, "BLOCK_DOCUMENTS", 8)
    monkeypatch.setattr(streams, "CHUNK_DOCUMENTS", 3)
    cfg, source = config(packing=packing), MemorySource([*corpus(7, 8), ["", *NASTY, "some text"]])
    steps = 24  # more than an epoch of each stream
    undisturbed = global_batches(cfg, source, TOKENIZER, 1, steps)
    assert min(position[0] for position in undisturbed[-1][3].values()) >= 1
    monkeypatch.setattr(streams, "CHUNK_DOCUMENTS", 5)
    for k in range(1, steps):
        state = undisturbed[k - 1][3]
        once = global_batches(cfg, source, TOKENIZER, (1, 2, 4, 8)[k % 4], min(3, steps - k), state)
        assert same(once, undisturbed[k : k + 3])
        twice = global_batches(cfg, source, TOKENIZER, (2, 8, 1, 4)[k % 4], min(3, steps - k - 1), once[0][3])
        assert same(twice, undisturbed[k + 1 : k + 4])


def flat(source, stream, num_streams, documents, packed=True):
    """The tokens of each of the first documents of a stream."""
    chunks = endless(source, TOKENIZER, Share(42, stream, 0, num_streams, packed), Position())
    return [list(document) for _, document in islice(documents_of(chunks), documents)]


def test_packed_windows_join_documents_without_a_gap():
    cfg, source = config(global_batch=8, seq_len=16), MemorySource(corpus(8, 10))
    batches = global_batches(cfg, source, TOKENIZER, 2, steps=12)
    for v in range(8):
        tokens = np.concatenate(flat(source, v, 8, documents=60))
        inputs = torch.cat([inputs[v] for inputs, *_ in batches]).numpy()
        targets = torch.cat([targets[v] for _, targets, *_ in batches]).numpy()
        assert np.array_equal(inputs, tokens[: 12 * 16]) and np.array_equal(targets, tokens[1 : 12 * 16 + 1])
    assert {real for *_, real, _ in batches} == {8 * 16}


def test_a_padded_sequence_is_one_document_that_ends_with_eos():
    cfg, source = config(global_batch=2, seq_len=8, packing="pad"), MemorySource(corpus(2, 30))
    batches = global_batches(cfg, source, TOKENIZER, 1, steps=20)
    for v in range(2):
        for (inputs, targets, *_), document in zip(batches, flat(source, v, 2, 20, packed=False), strict=True):
            kept = document if len(document) <= 8 else [*document[:7], 1]
            assert inputs[v].tolist() == kept + [0] * (8 - len(kept))
            assert targets[v].tolist() == kept[1:] + [-100] * (9 - len(kept))
    for inputs, _, real_tokens, _ in batches:
        assert real_tokens == (inputs != 0).sum()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_rows_are_widened_to_inputs_and_their_next_tokens(dtype):
    rows, high = [[5, 6, 7, 8], [9, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], 40_000
    tokens = (torch.tensor(rows) + high).to(dtype)
    inputs, targets = inputs_and_targets(tokens, torch.tensor([4, 2, 1, 0], dtype=torch.int32))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous()
    assert torch.equal(inputs - high, torch.tensor(rows)[:, :3])
    assert targets.tolist() == [[high + 6, high + 7, high + 8], [high + 1, -100, -100], [-100] * 3, [-100] * 3]


def test_a_batch_is_the_ranks_share():
    cfg, source = config(global_batch=24), MemorySource(corpus(2, 40))
    loader = TrainLoader(cfg, source, TOKENIZER, 1, 2, None)
    batch = loader.take()
    loader.close()
    assert "data" not in [thread.name for thread in threading.enumerate()]  # its thread has ended
    assert batch.tokens.shape == (12, 17) and batch.tokens.dtype == torch.uint16 and batch.lengths.shape == (12,)
    assert set(batch.positions) == {"4", "5", "6", "7"}  # rank 1 of 2 owns the second half of 8 streams


class Waiting(MemorySource):
    """Calls ``wait`` before the first text of a shard, as a slow network waits."""

    def __init__(self, shards, wait):
        super().__init__(shards)
        self.wait = wait

    def _file_rows(self, name, start=0, piece=None):
        self.wait(name)
        yield from super()._file_rows(name, start, piece)


def test_streams_start_in_parallel_with_the_same_batches():
    cfg, texts = config(packing="pad"), corpus(8, 40)  # one shard per stream
    wanted = global_batches(cfg, MemorySource(texts), TOKENIZER, 1, 8)
    for resumed in (0, 4):
        together = threading.Barrier(8)  # nobody passes until all eight have arrived
        first = Waiting(texts, lambda shard, together=together: together.wait(600))
        loader = TrainLoader(cfg, first, TOKENIZER, 0, 1, wanted[3][3] if resumed else None)
        found = loader.take()
        first.wait = lambda shard: None
        loader.close()
        assert torch.equal(found.tokens[:, :-1].long(), wanted[resumed][0]) and found.positions == wanted[resumed][3]


@pytest.mark.parametrize("shards", [1, 8])
def test_a_stream_that_fails_ends_a_start_while_another_hangs(shards, monkeypatch):
    monkeypatch.setattr(loading, "CLOSE_SECONDS", 0.1)
    hang = threading.Event()

    def wait(shard):
        if shard == "shard-0":
            raise UserError("shard-0 is gone")
        hang.wait(600)

    loader = TrainLoader(config(), Waiting(corpus(shards, 40), wait), TOKENIZER, 0, 1, None)
    for _ in range(2):  # the error stays
        with pytest.raises(UserError, match="shard-0 is gone"):
            loader.take()
    hang.set()
    loader.close()


def test_a_wait_for_data_can_stop_and_continue(monkeypatch):
    monkeypatch.setattr(loading, "POLL_SECONDS", 0.01)
    cfg, texts, come = config(), corpus(2, 40), threading.Event()
    loader = TrainLoader(cfg, Waiting(texts, lambda shard: come.wait(600)), TOKENIZER, 0, 1, None)
    asked = []
    with pytest.raises(Stopped, match="asked to stop while waiting for data"):
        loader.take(lambda: len(asked) == 3 or asked.append(0))
    with pytest.raises(Stalled, match=r"no training data for 0 s: .* The same command continues"):
        loader.take(lambda: False, timeout=0.02)
    come.set()
    found = [loader.take(lambda: False), loader.take(lambda: False)]
    loader.close()
    expected = global_batches(cfg, MemorySource(texts), TOKENIZER, 1, 2)
    assert [batch.positions for batch in found] == [state for *_, state in expected]


TEXTS = ["abcdefghij", "", "klm", "nopqrstuvwxyz", "ab"] * 40 + ["c"]


@pytest.fixture
def root(tmp_path):
    write_shards(tmp_path, [["train"]])
    write_shards(tmp_path, [TEXTS[:70], TEXTS[70:]], split="validation")
    return tmp_path


def validated(root, packing, tokens, seq_len=8, **keys):
    cfg = make_config(data__root=root, eval__packing=packing, eval__tokens=tokens, train__seq_len=seq_len, **keys)
    return validation_set(cfg, open_source(cfg), TOKENIZER)


def unpacked(found):
    return inputs_and_targets(torch.from_numpy(found.tokens), torch.from_numpy(found.lengths))


def test_validation_is_in_file_order_without_a_gap(root):
    ids = [[*i, 1] for i in TOKENIZER.encode(TEXTS)]
    found = validated(root, "pad", 10**6)
    kept = [i if len(i) <= 8 else [*i[:7], 1] for i in ids]
    inputs, targets = unpacked(found)
    assert inputs.tolist() == [i + [0] * (8 - len(i)) for i in kept]
    assert targets.tolist() == [i[1:] + [-100] * (9 - len(i)) for i in kept]
    assert found.real_tokens == sum(map(len, kept)) == (inputs != 0).sum()
    found, tokens = validated(root, "packed", 10**6), [id for own in ids for id in own]
    more = 8 * len(found.tokens) - len(tokens)
    inputs, targets = (each.reshape(-1).tolist() for each in unpacked(found))
    assert inputs == [*tokens, *[0] * more] and targets == [*tokens[1:], *[-100] * (more + 1)]
    assert found.real_tokens == len(tokens) and more


@pytest.mark.parametrize("tokens_of_it", [False, True])
def test_a_long_validation_document_is_cut_where_text_is_packed(tmp_path, tokens_of_it):
    texts = [["x" * 9, "y" * 200_000, "z"]]
    if tokens_of_it:
        source = tokens_of(tmp_path, texts)
        source.train_shards, source.validation_shards = (), source.train_shards
    else:
        source = MemorySource(texts)
        source.validation_shards = source.train_shards
    for budget in (10, 11, 4096):
        cfg = make_config(eval__packing="packed", eval__tokens=budget, train__seq_len=8)
        found = validation_set(cfg, source, TOKENIZER)
        assert found.real_tokens == budget and len(found.tokens) == -(-budget // 8)
        assert unpacked(found)[1].ne(-100).sum() == budget - 1  # nothing follows the last token


@PACKINGS
def test_validation_ends_with_the_document_that_fills_it(root, packing):
    whole = validated(root, packing, 10**6)
    for budget in (2, 9, 333):
        found = validated(root, packing, budget)
        assert budget <= found.real_tokens < budget + (14 if packing == "pad" else 1)
        full = found.real_tokens // 8 if packing == "packed" else len(found.tokens)
        assert np.array_equal(found.tokens[:full, :8], whole.tokens[:full, :8])
        assert found.tokens.dtype == np.uint16 and found.lengths.dtype == np.int32
    other = validated(root, packing, 333, seed=1, data__seed=1, train__global_batch=64, train__micro_batch=2)
    assert np.array_equal(found.tokens, other.tokens) and np.array_equal(found.lengths, other.lengths)


def test_validation_without_text_is_refused(tmp_path):
    write_shards(tmp_path, [["train"]])
    write_shards(tmp_path, [["", ""]], split="validation")
    with pytest.raises(UserError, match="validation shards hold no text"):
        validated(tmp_path, "pad", 100)
