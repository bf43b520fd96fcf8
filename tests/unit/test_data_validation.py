"""The validation set: the same sequences always, as many tokens as asked for or all there is."""

import numpy as np
import pytest
import torch
from data_corpus import LetterTokenizer, make_config, write_shards

from dlr_pretrain.data import inputs_and_targets, open_source, validation_set
from dlr_pretrain.util.errors import UserError

TEXTS = ["abcdefghij", "", "klm", "nopqrstuvwxyz", "ab"] * 40 + ["c"]


@pytest.fixture
def root(tmp_path):
    write_shards(tmp_path, [["train"]])
    write_shards(tmp_path, [TEXTS[:70], TEXTS[70:]], split="validation")
    return tmp_path


def build(root, packing, tokens, seq_len=8, **keys):
    cfg = make_config(data__root=root, eval__packing=packing, eval__tokens=tokens, train__seq_len=seq_len, **keys)
    return validation_set(cfg, open_source(cfg), LetterTokenizer())


def unpacked(found):
    return inputs_and_targets(torch.from_numpy(found.tokens), torch.from_numpy(found.lengths))


def test_padded_documents_in_file_order_and_packed_windows_without_a_gap(root):
    ids = [[*i, 1] for i in LetterTokenizer().encode(TEXTS)]
    found = build(root, "pad", 10**6)
    kept = [i if len(i) <= 8 else [*i[:7], 1] for i in ids]
    inputs, targets = unpacked(found)
    assert inputs.tolist() == [i + [0] * (8 - len(i)) for i in kept]
    assert targets.tolist() == [i[1:] + [-100] * (9 - len(i)) for i in kept]
    assert found.real_tokens == sum(map(len, kept)) == (inputs != 0).sum()
    found, tokens = build(root, "packed", 10**6), [id for own in ids for id in own]
    more = 8 * len(found.tokens) - len(tokens)
    inputs, targets = (each.reshape(-1).tolist() for each in unpacked(found))
    assert inputs == [*tokens, *[0] * more] and targets == [*tokens[1:], *[-100] * (more + 1)]
    assert found.real_tokens == len(tokens) and more


@pytest.mark.parametrize("packing", ["pad", "packed"])
def test_ends_with_the_document_that_fills_the_budget(root, packing):
    whole = build(root, packing, 10**6)
    for budget in (1, 9, 333):
        found = build(root, packing, budget)
        assert budget <= found.real_tokens < budget + 14
        full = found.real_tokens // 8 if packing == "packed" else len(found.tokens)
        assert np.array_equal(found.tokens[:full, :8], whole.tokens[:full, :8])
        assert found.tokens.dtype == np.uint16 and found.lengths.dtype == np.int32
    other = build(root, packing, 333, seed=1, data__seed=1, train__global_batch=64, train__micro_batch=2)
    assert np.array_equal(found.tokens, other.tokens) and np.array_equal(found.lengths, other.lengths)


def test_no_text_is_an_error(tmp_path):
    write_shards(tmp_path, [["train"]])
    write_shards(tmp_path, [["", ""]], split="validation")
    with pytest.raises(UserError, match="No text in the validation shards"):
        build(tmp_path, "pad", 100)
