"""Training with ``probe=on``: the same run bit for bit, and numbers that do not depend on how it is run."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dlr_pretrain.train.checkpoint import load
from dlr_pretrain.util.history import read_metrics
from tests.conftest import forked, saved

pytestmark = pytest.mark.usefixtures("no_export")
NUMBERS = {"through_b", "through_residual", "rho", "rho_mean", "cosine", "isotropic"}
PROBE = ("probe=on", "probe.every=4")
LAYERS = ("0.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj")
COMMON = ("train.lr=1e-3", "train.steps=6", "eval.every=100", "checkpoint.every=100")


@pytest.fixture
def run(train, words, tmp_path):
    """Trains CoLA with DLR in a folder of its own; overrides may choose another."""

    def of(name: str, *overrides: str, ranks: int = 1):
        given = ("backbone=cola", *(() if any(word.startswith("dlr=") for word in overrides) else ("dlr=on",)), *COMMON)
        if ranks == 1:
            return train(tmp_path / name, *given, *overrides)
        forked(words(f"run.dir={tmp_path / name}", *given, *overrides), ranks)
        return tmp_path / name

    return of


def probes(folder) -> dict[int, dict]:
    records = read_metrics(folder / "metrics.jsonl")
    found = {r["step"]: {k: v for k, v in r.items() if k.startswith("probe/")} for r in records}
    return {step: values for step, values in found.items() if values}


def assert_same(one, other) -> None:
    """Losses, weights, moments, data positions and random states, bit for bit."""
    a, b = (folder / "checkpoints" / "step_00000006" for folder in (one, other))
    tensors, others = saved(a), saved(b)
    assert tensors.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())
    first, second = load(a), load(b)
    assert all(torch.equal(x, y) for x, y in zip(first.random, second.random, strict=True))
    assert first.state == second.state
    for x, y in zip(*(read_metrics(folder / "metrics.jsonl") for folder in (one, other)), strict=True):
        assert all(x[name] == y[name] for name in x if name.startswith("train/"))


@pytest.mark.parametrize("how", [
    pytest.param(("train.activation_checkpointing=latent", "precision=bf16"), marks=pytest.mark.full),
    ("precision=bf16_mixed", "train.accumulate=fp32", "data.mask_documents=true"),
    pytest.param(("dlr=learnable_alpha",), marks=pytest.mark.full),
    pytest.param(("dlr.impl=branch",), marks=pytest.mark.full),
], ids=" ".join)  # fmt: skip
def test_training_does_not_notice(run, how):
    plain, probed = run("plain", *how), run("probed", *how, *PROBE)
    assert_same(plain, probed)
    assert probes(plain) == {}
    assert list(probes(probed)) == [1, 2, 4, 5]  # after 0, 1, 3 and 4 updates
    for values in probes(probed).values():
        assert set(values) == {f"probe/{layer}/{number}" for layer in LAYERS for number in NUMBERS}
        assert all(value is not None for value in values.values())
        for layer in LAYERS:
            assert 0.3 < values[f"probe/{layer}/rho"] / values[f"probe/{layer}/isotropic"] < 3


@pytest.mark.full
def test_compiled_training_on_ranks_does_not_notice(run, monkeypatch):
    """Ahead-of-time autograd: the graphs and their guards are inductor's."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert_same(run("plain", "compile=true", ranks=2), run("probed", "compile=true", *PROBE, ranks=2))


def test_numbers_are_those_of_all_ranks_together_and_their_training_does_not_notice(run):
    """Whole shares of a batch as micro-batches: the same positions, whoever has them."""
    alone, shared = run("alone", *PROBE, "train.micro_batch=8"), run("shared", *PROBE, "train.micro_batch=4", ranks=2)
    assert_same(run("plain", "train.micro_batch=4", ranks=2), shared)
    assert list(probes(alone)) == list(probes(shared))
    for step, values in probes(alone).items():
        assert probes(shared)[step] == pytest.approx(values, rel=1e-3, abs=1e-6), step
