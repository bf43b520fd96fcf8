"""Batches: the same on any number of ranks and after any resume; what they hold, packed and padded; the thread."""

import gc
import math
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import torch
from data_corpus import LetterTokenizer, MemorySource, corpus, global_batches, make_config, same, write_shards
from hypothesis import given, settings
from hypothesis import strategies as st

from dlr_pretrain.data import TrainLoader, documents, inputs_and_targets, open_source
from dlr_pretrain.data import loader as loading
from dlr_pretrain.data.streams import DocumentStream, Position
from dlr_pretrain.util.errors import Stalled, Stopped, UserError

TOKENIZER = LetterTokenizer()
PACKINGS = pytest.mark.parametrize("packing", ["packed", "pad"])


def config(global_batch=8, seq_len=16, packing="packed", **keys):
    return make_config(train__global_batch=global_batch, train__seq_len=seq_len, data__packing=packing, **keys)


@PACKINGS
@pytest.mark.parametrize(
    ("shards", "global_batch", "steps"),
    [(1, 8, 20), (3, 8, 20), (9, 8, 20), (5, 24, 20), (2, 6, 20), (7, 64, 6), (70, 64, 6)],
)
def test_a_global_batch_is_the_same_on_any_number_of_ranks(packing, shards, global_batch, steps):
    cfg, source = config(global_batch, packing=packing), MemorySource(corpus(shards, 40))
    alone = global_batches(cfg, source, TOKENIZER, 1, steps)
    for world_size in (w for w in (2, 4, 8, 32, 64) if cfg.num_streams % w == 0):
        assert same(global_batches(cfg, source, TOKENIZER, world_size, steps), alone)


@PACKINGS
def test_resume_at_every_step_twice_and_on_other_ranks_is_exact(packing, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_DOCUMENTS", 8)
    cfg, source = config(packing=packing), MemorySource(corpus(3, 30))
    steps = 24  # more than an epoch of each stream
    undisturbed = global_batches(cfg, source, TOKENIZER, 1, steps)
    assert min(place[0] for place in undisturbed[-1][3].values()) >= 1
    for k in range(1, steps):
        state = undisturbed[k - 1][3]
        once = global_batches(cfg, source, TOKENIZER, (1, 2, 4, 8)[k % 4], min(3, steps - k), state)
        assert same(once, undisturbed[k : k + 3])
        twice = global_batches(cfg, source, TOKENIZER, (2, 8, 1, 4)[k % 4], min(3, steps - k - 1), once[0][3])
        assert same(twice, undisturbed[k + 1 : k + 4])


def flat(source, stream, num_streams, documents, seed=42):
    """The tokens of the first documents of a stream, document by document."""
    out = []
    for chunk in DocumentStream(source, TOKENIZER, seed, stream, num_streams).chunks(Position()):
        out += [tokens.tolist() for tokens in np.split(chunk.tokens, chunk.starts[1:])]
        if len(out) >= documents:
            return out[:documents]


def test_packed_windows_join_the_documents_without_a_gap_and_every_position_has_a_target():
    cfg, source = config(global_batch=8, seq_len=16), MemorySource(corpus(2, 40))
    batches = global_batches(cfg, source, TOKENIZER, 2, steps=12)
    for v in range(8):
        tokens = np.concatenate(flat(source, v, 8, documents=60))
        inputs = torch.cat([inputs[v] for inputs, *_ in batches]).numpy()
        targets = torch.cat([targets[v] for _, targets, *_ in batches]).numpy()
        assert np.array_equal(inputs, tokens[: 12 * 16]) and np.array_equal(targets, tokens[1 : 12 * 16 + 1])
    assert {real for *_, real, _ in batches} == {8 * 16}


def test_a_padded_sequence_is_one_document_that_ends_with_eos_also_when_it_is_cut():
    cfg, source = config(global_batch=2, seq_len=8, packing="pad"), MemorySource(corpus(2, 30))
    batches = global_batches(cfg, source, TOKENIZER, 1, steps=20)
    for v in range(2):
        for (inputs, targets, *_), document in zip(batches, flat(source, v, 2, documents=20), strict=True):
            kept = document if len(document) <= 8 else [*document[:7], 1]
            assert inputs[v].tolist() == kept + [0] * (8 - len(kept))
            assert targets[v].tolist() == kept[1:] + [-100] * (9 - len(kept))
    for inputs, _, real_tokens, _ in batches:
        assert real_tokens == (inputs != 0).sum()


def test_a_batch_is_the_ranks_share_in_two_bytes_a_token():
    cfg = config(global_batch=24, seq_len=16)
    loader = TrainLoader(cfg, MemorySource(corpus(2, 40)), TOKENIZER, 1, 2, None)
    batch = next(iter(loader))
    loader.close()
    assert batch.tokens.shape == (12, 17) and batch.tokens.dtype == torch.uint16 and batch.lengths.shape == (12,)
    assert set(batch.state) == {"4", "5", "6", "7"}  # 8 streams, of which rank 1 of 2 owns the second half


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32, torch.int64])
def test_rows_are_widened_to_inputs_and_their_next_tokens(dtype):
    rows, high = [[5, 6, 7, 8], [9, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]], 40_000
    tokens = (torch.tensor(rows) + high).to(dtype)
    inputs, targets = inputs_and_targets(tokens, torch.tensor([4, 2, 1, 0], dtype=torch.int32))
    assert inputs.dtype == targets.dtype == torch.int64 and inputs.is_contiguous()
    assert torch.equal(inputs - high, torch.tensor(rows)[:, :3])
    assert targets.tolist() == [[high + 6, high + 7, high + 8], [high + 1, -100, -100], [-100] * 3, [-100] * 3]


TEXTS = st.lists(st.text(st.characters(codec=None), max_size=40), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(
    shards=st.lists(TEXTS, min_size=1, max_size=5),
    global_batch=st.sampled_from([1, 2, 4, 6, 8]),
    seq_len=st.integers(2, 40),
    packing=st.sampled_from(["packed", "pad"]),
    block=st.integers(1, 8),
    stop=st.integers(1, 8),
    data=st.data(),
)
def test_any_corpus_any_ranks_any_stop(shards, global_batch, seq_len, packing, block, stop, data):
    streams_ = math.gcd(global_batch, 64)
    shards[0] += ["some text"] * streams_  # no stream of these is without text
    shards = [texts + ["more"] * streams_ for texts in shards]
    ranks = st.sampled_from([w for w in (1, 2, 4, 8) if streams_ % w == 0])
    cfg, source = config(global_batch, seq_len, packing), MemorySource(shards)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_DOCUMENTS", block)
        patch.setattr(documents, "CHUNK_DOCUMENTS", 3)
        undisturbed = global_batches(cfg, source, TOKENIZER, 1, 12)
        head = global_batches(cfg, source, TOKENIZER, data.draw(ranks), stop)
        patch.setattr(documents, "CHUNK_DOCUMENTS", 5)
        middle = global_batches(cfg, source, TOKENIZER, data.draw(ranks), 2, head[-1][3])
        tail = global_batches(cfg, source, TOKENIZER, data.draw(ranks), 2, middle[0][3])
        assert same(head + middle, undisturbed[: stop + 2]) and same(tail, undisturbed[stop + 1 : stop + 3])
    assert all(inputs.min() >= 0 and inputs.max() < TOKENIZER.vocab_size for inputs, *_ in undisturbed)


@PACKINGS
@pytest.mark.parametrize(
    ("global_batch", "streams", "ranks"), [(24, 12, (2, 3, 4, 6, 12)), (96, 96, (3, 32, 96)), (6, 1, (1,))]
)
def test_any_divisor_of_the_batch_is_a_number_of_streams(packing, global_batch, streams, ranks):
    cfg = config(global_batch, packing=packing, data__streams=streams)
    source = MemorySource(corpus(1, 200))
    alone = global_batches(cfg, source, TOKENIZER, 1, 6)
    assert len(alone[0][3]) == streams
    for world_size in ranks:
        assert same(global_batches(cfg, source, TOKENIZER, world_size, 6), alone)


def test_a_position_of_another_global_batch_is_refused():
    cfg, source = config(global_batch=4), MemorySource(corpus(2, 40))
    state = global_batches(config(global_batch=8), source, TOKENIZER, 1, 1)[0][3]
    with pytest.raises(UserError, match=r"8 streams, and this run has 4\. .*data\.streams"):
        TrainLoader(cfg, source, TOKENIZER, 0, 1, state)


def cut_off(tmp_path):
    """A source of one shard that ends in the middle, after some of its documents."""
    (path,) = write_shards(tmp_path, [["".join(map(chr, range(0x4E00, 0x4E00 + 5000)))[i::7] for i in range(3000)]])
    write_shards(tmp_path, [["validation"]], split="validation")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return open_source(config(global_batch=1, data__root=tmp_path)), path


def test_an_error_in_the_thread_is_raised_where_the_batch_is_wanted_and_again(tmp_path):
    source, path = cut_off(tmp_path)
    loader = TrainLoader(config(global_batch=1, seq_len=1024), source, TOKENIZER, 0, 1, None)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{path.name}: damaged or cut off after document \d+.*Fetch"):
            for _ in range(10_000):
                next(loader)
    loader.close()


class Waiting(MemorySource):
    """Waits before the first text of a shard, as a slow network does."""

    def __init__(self, shards, wait):
        super().__init__(shards)
        self.wait = wait

    def read(self, shard, start=0, step=1):
        self.wait(shard)
        yield from super().read(shard, start, step)


@PACKINGS
@pytest.mark.parametrize("resume", [False, True])
def test_the_streams_of_all_shards_begin_at_once_and_give_the_same_batches(packing, resume):
    cfg, texts = config(packing=packing), corpus(8, 40)
    wanted = global_batches(cfg, MemorySource(texts), TOKENIZER, 1, 8)
    together = threading.Barrier(8, timeout=30)  # lets nobody pass until all eight have come
    first = Waiting(texts, lambda shard: together.wait())
    loader = TrainLoader(cfg, first, TOKENIZER, 0, 1, wanted[3][3] if resume else None)
    found = next(loader)
    first.wait = lambda shard: None
    loader.close()
    inputs, _, real_tokens, state = wanted[4 if resume else 0]
    assert torch.equal(found.tokens[:, :-1].long(), inputs)
    assert (found.real_tokens, found.state) == (real_tokens, state)


def test_streams_of_one_shard_begin_one_after_another():
    """So that what the first has read and keeps, or caches, serves the others."""
    reading, most = set(), []

    def wait(shard):
        most.append((shard, shard in reading))
        reading.add(shard)
        time.sleep(0.05)
        reading.discard(shard)

    loader = TrainLoader(config(), Waiting(corpus(2, 40), wait), TOKENIZER, 0, 1, None)
    next(loader)
    loader.close()
    assert [shard for shard, _ in most].count("shard-0") >= 4 and not any(busy for _, busy in most)


@pytest.mark.parametrize("shards", [1, 8])
def test_a_stream_that_fails_at_the_start_ends_it_though_another_hangs(shards, monkeypatch):
    monkeypatch.setattr(loading, "CLOSE_SECONDS", 0.2)
    hang, begin = threading.Event(), time.monotonic()

    def wait(shard):
        if shard == "shard-0":
            raise UserError("shard-0 is gone")
        hang.wait(30)

    loader = TrainLoader(config(), Waiting(corpus(shards, 40), wait), TOKENIZER, 0, 1, None)
    with pytest.raises(UserError, match="shard-0 is gone"):
        next(loader)
    loader.close()
    hang.set()
    assert time.monotonic() - begin < 20


def test_a_wait_for_data_can_be_ended_and_gone_on_with(monkeypatch):
    monkeypatch.setattr(loading, "POLL_SECONDS", 0.05)
    cfg, texts, come = config(), corpus(2, 40), threading.Event()
    loader = TrainLoader(cfg, Waiting(texts, lambda shard: come.wait(30)), TOKENIZER, 0, 1, None)
    asked = []
    with pytest.raises(Stopped, match="asked to stop while waiting for data"):
        loader.take(lambda: len(asked) == 3 or asked.append(0))
    come.set()
    batch = loader.take(lambda: False)
    assert asked == [0, 0, 0]
    while not loader._queue.qsize():
        time.sleep(0.01)
    ready = loader.take(lambda: True)  # what is there is given
    loader.close()
    expected = global_batches(cfg, MemorySource(texts), TOKENIZER, 1, 2)
    assert [batch.state, ready.state] == [state for *_, state in expected]


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name == "data"]


def test_data_that_do_not_come_are_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(loading, "POLL_SECONDS", 0.01)
    gate = threading.Event()

    class Away(MemorySource):
        def read(self, *given):
            assert gate.wait(30)
            return super().read(*given)

    loader = TrainLoader(config(), Away([["some text"] * 99]), TOKENIZER, 0, 1, None)
    with pytest.raises(Stalled, match=r"no training data for 0 s: .* The same command continues"):
        loader.take(lambda: False, patience=0.05)
    gate.set()
    assert loader.take(lambda: False, patience=30).tokens.shape[0] == config().train.global_batch
    loader.close()


def test_the_thread_reads_ahead_and_ends_with_the_loader():
    loader = TrainLoader(config(), MemorySource(corpus(2, 40)), TOKENIZER, 0, 1, None)
    next(loader)
    assert len(data_threads()) == 1
    loader.close()
    loader.close()
    assert not data_threads()
    with pytest.raises(StopIteration):
        next(loader)


def test_a_forgotten_loader_ends_its_thread():
    loader = TrainLoader(config(), MemorySource(corpus(2, 40)), TOKENIZER, 0, 1, None)
    next(loader)
    del loader
    gc.collect()
    assert not data_threads()


def test_a_consumer_that_dies_is_not_kept_alive_by_the_thread(tmp_path):
    program = """
        import sys
        sys.path[:0] = sys.argv[1:]
        from data_corpus import LetterTokenizer, MemorySource, corpus, make_config
        from dlr_pretrain.data import TrainLoader
        loader = TrainLoader(make_config(), MemorySource(corpus(9, 4000)), LetterTokenizer(), 0, 1, None)
        next(loader)
        raise SystemExit(7)
    """
    begin = time.monotonic()
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), *sys.path], capture_output=True, timeout=60)
    assert done.returncode == 7 and not done.stderr, done.stderr
    assert time.monotonic() - begin < 20
