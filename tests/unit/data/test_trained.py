"""A trained model weights a small file by its share of the text, not of the files."""

import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from dlr_pretrain.data import load_tokenizer


@pytest.mark.full
@pytest.mark.parametrize("streamed", [False, True])
def test_a_model_learns_1_percent_from_1_percent_of_the_text(corpus, train, tmp_path, monkeypatch, streamed):
    if streamed:  # as a text that is too large to be tokenised first
        monkeypatch.setattr("dlr_pretrain.data.prepare.SMALL_BYTES", 0)
    rng, text = random.Random(0), tmp_path / "text"
    text.mkdir()
    for name, count, first in (("web", 6000, "aeiou"), ("wiki", 60, "t")):
        texts = (f"{rng.choice(first)} {' '.join(rng.choices('lnrs', k=rng.randint(3, 15)))}" for _ in range(count))
        (text / f"{name}.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    given = ("data=local", f"data.root={text}", "train.steps=150", "eval.every=150", "checkpoint.every=150")
    run_dir = train(tmp_path / "run", *given)
    tokenizer = load_tokenizer(corpus / "spiece.model")
    model = AutoModelForCausalLM.from_pretrained(run_dir / "folded", trust_remote_code=True)
    before = [*tokenizer.encode(["a l n r s l n"])[0], tokenizer.eos_id]
    begins = [tokenizer.encode([f"{letter} l"])[0].tolist() for letter in "aeiout"]
    assert len({len(tokens) for tokens in begins}) == 1  # otherwise they cannot be compared
    with torch.no_grad():
        logits = [model(torch.tensor([[*before, *tokens]])).logits[0].log_softmax(-1) for tokens in begins]
    chances = torch.tensor([
        sum(own[len(before) - 1 + i, token].item() for i, token in enumerate(tokens[:-1]))
        for own, tokens in zip(logits, begins, strict=True)
    ]).exp()  # fmt: skip
    assert 0.0001 < chances[-1] / chances.sum() < 0.1
