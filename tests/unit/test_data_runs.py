"""Runs: documents that do not see each other, and any number of ranks."""

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.data import TrainLoader, open_source, open_tokenizer
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.models import build
from dlr_pretrain.util.history import read_metrics
from tests.conftest import forked

pytestmark = pytest.mark.usefixtures("no_export")


def test_a_first_step_is_the_loss_of_the_documents_on_their_own(train, words, tmp_path):
    """Sequences so long that a micro-batch's documents are few and whole: cut, they would lose their beginnings."""
    given = ("data.mask_documents=true", "train.steps=1", "train.seq_len=256", "train.global_batch=4")
    train(tmp_path, *given)
    (first,) = read_metrics(tmp_path / "metrics.jsonl")
    cfg = load(words(*given))
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    loader = TrainLoader(cfg, source, tokenizer, 0, 1, None)
    tokens = next(loader).tokens.long()
    loader.close()

    model, summed, count = build(cfg, tokenizer.vocab_size, torch.device("cpu")), 0.0, 0
    with torch.no_grad():
        for row in tokens:
            for document in torch.tensor_split(row, (row == EOS).nonzero().flatten() + 1):
                if len(document) > 1:
                    summed += model(document[None, :-1], document[None, 1:]).item()
                    count += len(document) - 1
    assert first["train/loss"] == pytest.approx(summed / count, rel=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [6])
def test_ranks_that_are_no_power_of_two_give_the_losses_of_one(ranks, train, words, tmp_path):
    given = ("data.streams=12", "train.global_batch=24", "train.micro_batch=2", "train.steps=8", "train.lr=1e-3")
    alone, shared = train(tmp_path / "alone", *given), tmp_path / "shared"
    forked(words(f"run.dir={shared}", *given), ranks)
    losses = [[row["train/loss"] for row in read_metrics(run / "metrics.jsonl")] for run in (alone, shared)]
    assert len(losses[0]) == 8 and losses[1] == pytest.approx(losses[0], rel=2e-5)
