"""Scores of continuations are sums of log-probabilities, however they are batched, padded and shared out."""

from __future__ import annotations

import json
import random
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dlr_pretrain.data.tokenizer import EOS, Tokenizer
from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.deploy.likelihood import encode_pairs, log_likelihoods
from dlr_pretrain.util.errors import UserError
from tests.conftest import on_ranks
from tests.deploy.models import exported, tokenizer_of

WORDS = "the sun sets at noon yes no A B C D and it is so in ten towns on one hill"
TEXT = [" ".join(random.Random(i).choices(WORDS.split(), k=12)) for i in range(60)]


@pytest.fixture(scope="module")
def spiece(tmp_path_factory):
    return tokenizer_of(tmp_path_factory.mktemp("tokenizer"), TEXT, pieces=60)


@pytest.fixture(scope="module", params=["full", "lowrank", "cola_lax"])
def model(request, tmp_path_factory, spiece):
    rank = [] if request.param == "full" else ["scale.rank=8"]
    pytest.importorskip("transformers")
    folder = exported(tmp_path_factory.mktemp("runs") / "folded", spiece, f"backbone={request.param}", *rank)
    return open_folder(folder, torch.float64)[0]


def pairs(seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Contexts of 1 to 30 ids with several continuations each, some of one id, one of them asked for twice."""
    rng = random.Random(seed)
    made = []
    for length in (1, 7, 30, 12):
        context = rng.choices(range(3, 60), k=length)
        made += [(context, rng.choices(range(3, 60), k=k)) for k in (1, 1, 4, 9)]
    return [*made, made[5]]


def by_hand(model, context: list[int], after: list[int], positions: int) -> float:
    """The sum of log p(id | ids before it), one sequence, no padding; at most ``positions`` ids are read."""
    ids = (context + after)[-(positions + 1) :]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids[:-1]])).logits[0].double()
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return sum(p[len(ids) - 1 - i, ids[-i]].log().item() for i in range(1, len(after) + 1))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_scores_are_sums_of_log_probabilities(model, batch_size):
    for positions in (100, 11):  # with 11, most contexts lose their beginning
        found = log_likelihoods(model, pairs(), positions, batch_size)
        wanted = [by_hand(model, *pair, positions) for pair in pairs()]
        assert found == pytest.approx(wanted, rel=0, abs=1e-10)  # |score| is up to 100: thirteen digits
        assert found[5] == found[-1]


def test_what_is_not_a_choice_is_refused(model):
    with pytest.raises(UserError, match=r"a choice of 0 tokens .* must have 1 to 9"):
        log_likelihoods(model, [([3], [])], 9)
    with pytest.raises(UserError, match="a choice of 10 tokens"):
        log_likelihoods(model, [([3], [4] * 10)], 9)


def test_scores_in_bf16_are_not_rounded_to_bf16(model):
    halves = type(model)(model.config).bfloat16().eval()
    halves.load_state_dict(model.state_dict())
    found = log_likelihoods(halves, pairs(), 100, batch_size=1)
    wanted = [by_hand(halves, *pair, 100) for pair in pairs()]
    assert found == pytest.approx(wanted, abs=1e-4)
    rounded = torch.tensor(wanted).bfloat16().tolist()
    assert max(abs(a - b) for a, b in zip(rounded, wanted, strict=True)) > 1e-2


def test_two_ranks_give_the_scores_of_one(model, tmp_path):
    alone = log_likelihoods(model, pairs(), 100, batch_size=2)

    def share():
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        found = log_likelihoods(model, pairs(), 100, batch_size=2, progress=lambda done, of: heard.append(of))
        (tmp_path / f"{dist.get_rank()}.json").write_text(json.dumps([found, heard]))

    heard = []
    on_ranks(share, 2)
    answers = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert answers[0][0] == answers[1][0] == alone
    assert [len(heard) for _, heard in answers] == [3, 3]  # 17 pairs, 12 different inputs, six batches


def test_plain_pairs_are_the_ids_of_the_joint_text(spiece):
    tokenizer = Tokenizer(spiece)
    texts = [("the sun sets at", " noon"), ("the sun sets at ", "noon"), ("", "noon"), ("no", " it is so")]
    found = encode_pairs(tokenizer, texts)
    for (context, continuation), (before, after) in zip(texts, found, strict=True):
        assert before + after == ([] if context else [EOS]) + tokenizer.encode([context + continuation])[0]
        assert after == tokenizer.encode([continuation])[0]
    assert found[0] == found[1]


def test_plain_choices_of_one_token_differ_and_none_is_the_end_of_sequence(spiece):
    tokenizer = Tokenizer(spiece)
    for prompt, choices in (("the sun sets at ten", " no yes"), ("the towns", " A B C D")):
        encoded = encode_pairs(tokenizer, [(prompt, " " + choice) for choice in choices.split()])
        after = [after for _, after in encoded]
        assert all(len(ids) == 1 for ids in after) and len({ids[0] for ids in after}) == len(after)
        assert all(EOS not in before + ids for before, ids in encoded)


def test_as_in_the_paper_the_first_token_of_a_choice_gives_way_to_the_end_of_sequence(spiece, model):
    tokenizer = Tokenizer(spiece)
    context, one, three = "the sun sets at ten", [" no", " yes"], [" in ten towns", " on one hill"]
    found = encode_pairs(tokenizer, [(context, choice) for choice in one + three], as_in_paper=True)
    start = tokenizer.encode([context])[0]
    choices = [tokenizer.encode([choice])[0] for choice in one + three]
    assert found == [([*start, EOS], [*ids[1:], EOS]) for ids in choices]
    scores = log_likelihoods(model, found, 100)
    assert scores[0] == scores[1] and scores[2] != scores[3]
