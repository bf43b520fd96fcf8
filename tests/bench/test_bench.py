"""Comparisons of steps: times are paired, and count only if the losses are right."""

import json
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import parity, protocol, results
from benchmarks.__main__ import KEPT, main
from benchmarks.isolated import isolated
from benchmarks.peers import AuthorsStep, as_batch, peer_ids
from benchmarks.variants import Variant, fixed_batch, joined
from dlr_pretrain.cli import load
from dlr_pretrain.data import inputs_and_targets
from dlr_pretrain.train.micro_batch import planned_memory
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED
from dlr_pretrain.util.tensors import IGNORE
from tests.conftest import SMALL

TINY = joined(SMALL, ["data=sample", "scale.vocab_size=64", "train.global_batch=4", "backbone=cola"])
QUICK = ("--rounds", "2", "--warmup", "0")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs ``python -m benchmarks`` in this process; returns the exit code and the variants by name."""
    monkeypatch.setattr("benchmarks.step.best_product", lambda *_: 1e12)  # takes seconds

    def run(part: str, *given: str) -> tuple[int, dict[str, dict]]:
        file = tmp_path / "found.json"
        code = main([part, *given, "--json", str(file)])
        return code, {v["name"]: v for v in json.loads(file.read_text())["variants"]} if file.exists() else {}

    return run


def test_actions_take_turns_and_ratios_are_within_a_round():
    order: list[str] = []
    actions = {name: lambda name=name: order.append(name) for name in "abc"}
    times = protocol.interleaved(actions, warmup=2, rounds=4, device=torch.device("cpu"))
    assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab" + "abc" and set(map(len, times.values())) == {4}
    slowing = [2.0**i for i in range(6)]
    assert set(protocol.paired([1.5 * t for t in slowing], slowing).values()) == {1.5}


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_parity_check_refuses_wrong_losses(precision):
    """Neither a residual of another strength nor a NaN passes."""
    overrides = joined(TINY, ["dlr=on", f"precision={precision}"])
    cfg, wrong = load(overrides), load([*overrides, f"dlr.alpha={1.1 if precision == 'fp32' else 2}"])
    with Ranks(cfg) as ranks:
        batch = fixed_batch(cfg, ranks)
        references = parity.References(ranks, batch)
        found = parity.losses(Variant("right", cfg, ranks).step, batch)
        assert references.judge(cfg, found).passes
        assert not references.judge(cfg, parity.losses(Variant("wrong", wrong, ranks).step, batch)).passes
        assert not references.judge(cfg, [*found[:-1], math.nan]).passes


def test_peers_and_we_score_the_same_targets():
    """The peers' targets are the ids shifted by one: T - 1 of T positions."""
    ids = torch.randint(2, 64, (2, 8))
    given = as_batch(ids)
    ours, targets = inputs_and_targets(given.tokens, given.lengths)
    assert torch.equal(ours, ids) and torch.equal(peer_ids(given), ids)
    assert torch.equal(targets[:, :-1], ids[:, 1:]) and (targets[:, -1] == IGNORE).all()


@pytest.mark.full
def test_every_variant_of_a_step_is_measured_in_each_round(bench, capsys, monkeypatch):
    variants = [word for of in ("dlr=off", "dlr=on", "dlr=on by-branch") for word in ("--variant", of)]
    code, found = bench("step", *TINY, *QUICK, *variants)
    assert code == 0 and list(found) == ["dlr=off", "dlr=off, once more", "dlr=on", "dlr=on by-branch"]
    assert all(len(v["seconds"]) == 2 and v["parity"]["passes"] for v in found.values())
    on = found["dlr=on"]
    assert found["dlr=off"]["ratio"]["median"] == 1 and on["overrides"][-1] == "dlr=on"
    assert on["tokens_per_second"] == pytest.approx(4 * 32 / (on["ms"] / 1e3))
    assert on["mfu"]["measured"] == pytest.approx(on["flops_per_token"] * on["tokens_per_second"] / 1e12)
    printed = capsys.readouterr().out
    assert "- command: `python -m benchmarks" in printed and "| dlr=on " in printed
    monkeypatch.setattr(parity, "FP32_BOUND", -1.0)
    assert bench("step", *TINY, "--variant", "dlr=on", *QUICK)[0] == EXIT_FAILED
    assert "DIFFER, the times do not count" in capsys.readouterr().out
    assert bench("step", *TINY, "--variant", "dlr=off by-branch", *QUICK)[0] == EXIT_CONFIG


@pytest.mark.full
def test_times_come_first_and_a_cut_off_keeps_them(bench, monkeypatch, capsys):
    """The times are kept, unchecked; the same command then compares the losses without timing again."""
    given = ("step", *TINY, "--rounds", "7", "--warmup", "0", "--variant", "dlr=off", "--variant", "dlr=on")
    given, save, saved = (*given, "--no-parity"), results.save, []

    def cut_off(found, file):
        save(found, file)
        saved.append(file)
        if len(saved) == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(results, "save", cut_off)
    code, found = bench(*given)
    rows = list(found.values())
    assert code != 0 and len(rows) == 3 and all(len(v["seconds"]) == 6 and v["parity"] is None for v in rows)
    code, found = bench(*given)
    assert code == 0 and all(v["parity"]["passes"] for v in found.values())
    assert [v["seconds"] for v in found.values()] == [v["seconds"] for v in rows]
    capsys.readouterr()
    code, found = bench("step", *TINY, "--variant", "dlr=random", "--rounds", "2", "--no-parity", "--seconds", "0")
    assert code == 0 and [v["parity"] for v in found.values()] == [None, None]
    assert "| unchecked |" in capsys.readouterr().out


@pytest.mark.full
def test_times_of_another_commit_are_made_again(bench, monkeypatch):
    """Losses of other code do not check them. Until the new ones have as many rounds, the file keeps the old ones."""
    given, save, saved = ("step", *TINY, "--rounds", "6", "--warmup", "0", "--variant", "dlr=off"), results.save, []
    _, old = bench(*given, "--no-parity", "--seconds", "0")

    def watched(found, file):
        saved.append(len(found["variants"][0]["seconds"]))
        save(found, file)

    monkeypatch.setattr(results, "save", watched)
    monkeypatch.setattr(results, "git_state", lambda: "another commit+")
    code, new = bench(*given, "--no-parity")
    assert code == 0 and all(v["parity"]["passes"] and v["seconds"] != old[name]["seconds"] for name, v in new.items())
    assert set(saved) == {6}


def test_memory_resumes_and_a_cut_off_loses_no_row(bench, monkeypatch):
    """At another commit all is measured again."""
    given, measured = ("memory", *TINY), []

    def isolated(words):
        measured.append(words[-1])
        if len(measured) in (2, 6):
            raise KeyboardInterrupt
        return {"peak": 1, "first_step_s": 1.0, "step_s": 1.0}

    monkeypatch.setattr("benchmarks.isolated.isolated", isolated)
    assert list(bench(*given)[1]) == KEPT[:1]
    assert list(bench(*given)[1]) == KEPT and measured == [KEPT[0], KEPT[1], KEPT[1], KEPT[2]]
    monkeypatch.setattr(results, "git_state", lambda: "another commit+")
    code, found = bench(*given)
    assert code != 0 and list(found) == KEPT and measured[4:] == KEPT[:2]


def test_a_summary_has_busy_time_and_the_longest_kernels():
    found = protocol.summary([(0.0, 100.0, "a"), (50.0, 200.0, "b"), (300.0, 400.0, "a")])
    assert (found["ms"], found["busy_ms"], found["kernels"]) == (0.4, 0.3, 3)
    assert found["longest"] == [["a", 2, 0.2], ["b", 1, 0.15]]
    assert protocol.summary([])["ms"] == 0


ADAPTER = """
from benchmarks.peers import as_batch
from benchmarks.variants import BY_BRANCH, Variant, compose
from dlr_pretrain.models.adapter import split
from dlr_pretrain.train.ranks import Ranks

class Step:
    def __init__(self, scaled):
        cfg, by_branch = compose({overrides!r} + ["dlr=on", BY_BRANCH, "seed=7"])
        self.variant, self.scaled = Variant("peer", cfg, Ranks(cfg), by_branch=by_branch), scaled

    def tensors(self):
        model = self.variant.trainer.model
        return {{name: p.clone() for name, p in split(model, model.state_dict()).items()}}

    def step(self, ids):
        return self.scaled * self.variant.step(as_batch(ids))

def ours(scale):
    return ["dlr=on"]

def build(scale, device, dtype, batch, T, compile, layers):
    return Step(1.0)

def build_wrong(*shape, **options):
    return Step(1.1)
"""


class Output(NamedTuple):
    loss: Tensor


class Attends(nn.Module):
    """A model as peers have it, of one attention."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 16)

    def forward(self, input_ids, attention_mask, labels):
        x = self.embedding(input_ids)[:, None]
        return Output(scaled_dot_product_attention(x, x, x, is_causal=True).sum())


def test_each_step_of_a_peer_is_compiled_for_its_own_attention(monkeypatch):
    """torch would give the second step the graph of the first."""
    found = []

    def keep(graph, _):
        found.append({str(node.target) for node in graph.graph.nodes})
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=aot_autograd(fw_compiler=keep)))
    for lean in (False, True):
        AuthorsStep(Attends(), compile=True, lean=lean).step(torch.full((2, 4), 5))
    plain, fused = found[0], found[2]  # between them is the backward pass
    assert "aten._safe_softmax.default" in plain and not any("softmax" in target for target in fused)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_peer_must_give_our_losses_from_its_own_weights(bench, tmp_path, precision, capsys):
    overrides, file = joined(TINY, [f"precision={precision}"]), tmp_path / "peer.py"
    file.write_text(ADAPTER.format(overrides=overrides))
    given = ("compare", *overrides, "dlr=off", *QUICK)
    code, found = bench(*given, "--peer", str(file), "--peer", f"{file}:build_wrong")
    assert code == 0 and list(found) == ["ours", "ours, once more", "peer", "peer_wrong"]
    assert found["peer"]["parity"]["passes"] and not found["peer_wrong"]["parity"]["passes"]
    assert bench(*given, "--peer", f"{file}:build_other")[0] == EXIT_CONFIG
    assert "It has build, build_wrong" in capsys.readouterr().err


@pytest.mark.full
def test_a_data_source_is_measured(bench, corpus, monkeypatch):
    monkeypatch.setattr("os.sched_setaffinity", lambda *_: None, raising=False)  # pytest keeps its cores
    place = [f"data.root={corpus}", f"tokenizer.path={corpus}/spiece.model"]
    given = ["data=c4_local", *place, "train.global_batch=8", "train.seq_len=16", "--tokens", "2000", "--rounds", "2"]
    code, found = bench("data", *given)
    assert code == 0 and len(found) == 2
    assert all(len(measure["values"]) == 2 and min(measure["values"]) > 0 for measure in found.values())


WIDE = [  # layers, not the logits, take most of the memory
    *("scale=tiny", "scale.vocab_size=512", "scale.hidden_size=256", "scale.intermediate_size=688", "data=sample"),
    *("train.global_batch=8", "train.micro_batch=8", "device=cpu", "compile=false", "backbone=cola", "logger=jsonl"),
]


@pytest.mark.full
@pytest.mark.parametrize("overrides", [
    ("backbone=sltrain",), ("backbone=full", "optimizer=galore"), ("dlr=on", "precision=bf16_mixed"),
    ("dlr=on", "train.micro_batch=2"), ("backbone=cola_lax", "dlr=on", "train.activation_checkpointing=latent"),
    ("dlr=on", "train.activation_checkpointing=block"),
], ids=" ".join)  # fmt: skip
def test_the_plan_tells_the_memory_of_an_eager_step(overrides):
    given = joined(WIDE, overrides)
    cfg = load(given)
    assert isolated(given)["peak"] == pytest.approx(planned_memory(cfg, cfg.planned_vocab_size, 1), rel=0.005)


@pytest.mark.full
def test_compiled_code_takes_less_memory_than_the_plan():
    given = joined(WIDE, ("dlr=on", "compile=true"))
    cfg = load(given)
    assert 0.5 < isolated(given)["peak"] / planned_memory(cfg, cfg.planned_vocab_size, 1) < 1.0
