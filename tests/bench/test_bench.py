"""Comparisons of steps: times are paired, and none counts unless the losses are right."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.bench import gate, rounds, step
from dlr_pretrain.bench.alone import alone
from dlr_pretrain.bench.arms import Arm, fixed_batch
from dlr_pretrain.bench.peers import PAD, as_batch, peer_ids
from dlr_pretrain.bench.words import joined, with_source
from dlr_pretrain.cli import load
from dlr_pretrain.data import inputs_and_targets
from dlr_pretrain.train import benchmark
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED
from dlr_pretrain.util.tensors import IGNORE
from tests.conftest import ROOT, SMALL, script

CPU = torch.device("cpu")
WORDS = [w for w in SMALL if not w.startswith(("data=", "train.global_batch="))]
WORDS += ["data=sample", "scale.vocab_size=64", "train.global_batch=4", "backbone=cola"]


@pytest.fixture
def command(monkeypatch):
    module = script("benchmark")

    def run(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["scripts/benchmark.py", *words])
        return module.main()

    return run


def test_acts_take_turns_and_each_round_begins_with_the_next():
    order: list[str] = []
    acts = {name: lambda name=name: order.append(name) for name in "abc"}
    times = rounds.interleaved(acts, warmup=2, rounds=4, device=CPU)
    assert "".join(order) == "aabbcc" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(t) for name, t in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_ratios_are_of_the_same_round():
    """A machine that slows down by the round moves the medians, but no ratio."""
    reference = [1.0, 2.0, 4.0, 8.0, 16.0]
    found = rounds.paired([1.5 * t for t in reference], reference)
    assert found == (1.5, 1.5, 1.5)
    assert rounds.quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (3.0, 2.0, 4.0)


@pytest.mark.parametrize(("n", "rank"), [(5, 0), (6, 1), (8, 1), (9, 2), (100, 40), (2000, 956)])
def test_the_interval_of_a_median_is_the_narrowest_of_95_percent(n, rank):
    values = [float(i) for i in range(n, 0, -1)]
    found = rounds.median_interval(values)
    ends = (rank, n + 1 - rank) if rank else (-math.inf, math.inf)
    assert found == ((n + 1) / 2, *ends)
    covered = sum(math.comb(n, i) for i in range(rank, n - rank + 1)) / 2**n  # medians between the two ends
    narrower = sum(math.comb(n, i) for i in range(rank + 1, n - rank)) / 2**n
    assert covered >= 0.95 > narrower


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed", "bf16_sr"])
def test_the_gate_passes_what_is_right_and_stops_what_is_not(precision):
    """The fast form of each arm passes; a residual of another strength does not, and neither does a NaN."""
    words = joined(WORDS, ["dlr=on", f"precision={precision}"])
    cfg, wrong = load(words), load([*words, f"dlr.alpha={1.1 if precision == 'fp32' else 2}"])
    with Runtime(cfg) as runtime:
        batch = fixed_batch(cfg, runtime, padding=0.0)
        references = gate.References(runtime, batch)
        found = gate.losses(Arm("right", cfg, runtime).step, batch)
        verdict = references.judge(cfg, found)
        assert verdict.passes and len(references.known) == (1 if precision == "fp32" else 4)
        again = load([*words, "dlr.impl=branch", "run.dir=elsewhere"])
        assert references.judge(again, found) == verdict and len(references.known) == (1 if precision == "fp32" else 4)
        assert verdict.difference > 0 or precision != "fp32"  # another order of products
        assert not references.judge(cfg, gate.losses(Arm("wrong", wrong, runtime).step, batch)).passes
        assert not references.judge(cfg, [*found[:-1], math.nan]).passes


def test_the_plain_form_is_eager_ungrouped_and_has_the_branch():
    cfg = gate.plain(load([*WORDS, "dlr=on", "train.activation_checkpointing=latent"]))
    assert not cfg.compile and cfg.dlr.impl == "branch" and cfg.train.activation_checkpointing == "none"
    off = gate.plain(load([*WORDS, "dlr=off"]))
    with Runtime(off) as runtime:
        model = gate.plain_model(off, runtime, rounding=None)
    assert not any(group.stacks() for block in model.model.layers for group in block.mlp.groups())


def test_rounding_at_random_takes_a_neighbour_and_has_no_bias():
    model = torch.nn.Linear(200, 500, bias=False)
    torch.nn.init.constant_(model.weight, 1 + 2**-7 * 0.25)  # a quarter of the way between neighbours in bf16
    gate.round_at_random_(model, torch.Generator().manual_seed(0))
    found = model.weight.detach()
    assert set(found.unique().tolist()) == {1.0, 1 + 2**-7}
    assert (found > 1).float().mean().item() == pytest.approx(0.25, abs=0.005)  # 3.6 standard deviations


@pytest.mark.parametrize("padding", [0.0, 0.25])
def test_peers_and_we_score_the_same_targets(padding):
    """Theirs are the labels of the ids, shifted; T - 1 of T positions, and none behind a row's end."""
    cfg = load(WORDS)
    with Runtime(cfg) as runtime:
        ids = peer_ids(fixed_batch(cfg, runtime, padding))
    labels = ids.masked_fill(ids == PAD, IGNORE)
    batch = as_batch(ids, ids.numel())
    ours, targets = inputs_and_targets(batch.tokens, batch.lengths)
    assert torch.equal(ours, ids)
    assert torch.equal(targets[:, :-1], labels[:, 1:]) and (targets[:, -1] == IGNORE).all()
    assert (ids == PAD).float().mean().item() == padding


def test_the_step_command_measures_every_arm_and_keeps_each_round(command, tmp_path, capsys):
    file, table = tmp_path / "out" / "step.json", tmp_path / "out" / "step.md"
    assert command("step", *WORDS, "--rounds", "2", "--warmup", "0", "--json", str(file), "--markdown", str(table)) == 0
    found = json.loads(file.read_text())
    names = ["dlr=off", "dlr=off, once more", "dlr=on", "dlr=on dlr.impl=branch", "dlr=random"]
    assert [arm["name"] for arm in found["arms"]] == names
    assert all(len(arm["seconds"]) == 2 and arm["parity"]["passes"] for arm in found["arms"])
    assert found["arms"][0]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert found["peak_flops"]["datasheet"] is None and found["peak_flops"]["measured"] > 0
    on = found["arms"][2]
    assert on["words"][-1] == "dlr=on" and on["config"]["impl"] == "weight" and on["mfu"]["datasheet"] is None
    assert on["tokens_per_second"] == pytest.approx(4 * 32 / (on["ms"] / 1e3))
    assert table.read_text() + "\n" == capsys.readouterr().out
    assert found["command"].startswith("python scripts/benchmark.py step") and found["commit"]


def test_each_arm_is_measured_by_the_peak_of_its_own_dtype(command, monkeypatch, tmp_path):
    asked = []
    peaks = {torch.float32: 1e12, torch.bfloat16: 4e12}
    monkeypatch.setattr(step, "best_product", lambda _, dtype: asked.append(dtype) or peaks[dtype])
    arms = ("--arm", "precision=fp32", "--arm", "precision=bf16")
    file = tmp_path / "step.json"
    words = [word for word in WORDS if not word.startswith("precision=")]
    assert command("step", *words, *arms, "--rounds", "2", "--warmup", "0", "--json", str(file)) == 0
    wide, _, narrow = json.loads(file.read_text())["arms"]
    for arm, peak in ((wide, 1e12), (narrow, 4e12)):
        achieved = arm["flops_per_token"] * arm["tokens_per_second"]
        assert arm["mfu"]["measured"] == pytest.approx(achieved / peak)
    assert sorted(asked, key=str) == [torch.bfloat16, torch.float32]


def test_ranks_that_save_take_their_own_gpu_first(monkeypatch):
    """Or what names no device goes to the first one, and the clock waits for that."""
    done, build = [], benchmark.bare_trainer
    monkeypatch.setattr(Runtime, "use_device", lambda self: done.append("device"))
    monkeypatch.setattr(benchmark, "bare_trainer", lambda *given: done.append("trainer") or build(*given))
    assert list(benchmark.saving(load(WORDS), 1))
    assert done == ["device", "trainer"]


def test_a_time_whose_losses_differ_does_not_count(command, monkeypatch, capsys):
    monkeypatch.setattr(gate, "FP32_BOUND", -1.0)
    assert command("step", *WORDS, "--arm", "dlr=on", "--rounds", "2", "--warmup", "0") == EXIT_FAILED
    assert "DIFFER, the times do not count" in capsys.readouterr().out


ADAPTER = """
import torch
from benchmarks.adapters.ours import Ours
from dlr_pretrain.bench.arms import Arm

def ours(scale):
    return ["dlr=off"]

def build(scale, device, dtype, batch, T, compile, layers=None, scaled=1.0):
    built = Ours({words!r} + ["dlr=off", "seed=7"])
    built.tensors = lambda: {{n: p.detach().clone() for n, p in built.arm.updates.weights.state.items()}}
    step = built.step
    built.step = lambda ids: scaled * step(ids)
    return built

def build_wrong(*shape, **options):
    return build(*shape, **options, scaled=1.0001)
"""


def test_a_peer_in_bf16_is_followed_with_its_own_clipping(command, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    words = [*(word for word in WORDS if not word.startswith("precision=")), "precision=bf16"]
    (tmp_path / "peer.py").write_text(ADAPTER.format(words=words))
    given = ("compare", *words, "dlr=on", "--rounds", "2", "--warmup", "0", "--json", str(tmp_path / "found.json"))
    assert command(*given, "--peer", f"{tmp_path}/peer.py") == 0
    assert json.loads((tmp_path / "found.json").read_text())["arms"][2]["parity"]["passes"]


def test_a_peer_starts_us_from_its_own_weights_and_must_give_our_losses(command, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT))
    (tmp_path / "peer.py").write_text(ADAPTER.format(words=WORDS))
    given = ("compare", *WORDS, "dlr=on", "--rounds", "2", "--warmup", "0", "--json", str(tmp_path / "found.json"))
    assert command(*given, "--peer", f"{tmp_path}/peer.py", "--peer", f"{tmp_path}/peer.py:build_wrong") == 0
    arms = json.loads((tmp_path / "found.json").read_text())["arms"]
    assert [arm["name"] for arm in arms] == ["ours", "ours, once more", "peer", "peer_wrong"]
    assert arms[2]["parity"]["passes"] and arms[2]["words"] is None
    assert not arms[3]["parity"]["passes"] and arms[3]["parity"]["difference"] == pytest.approx(1e-4, rel=0.1)
    assert command(*given, "--peer", f"{tmp_path}/none.py") == EXIT_CONFIG
    assert command(*given, "--peer", f"{tmp_path}/peer.py:build_other") == EXIT_CONFIG
    assert "It has build, build_wrong" in capsys.readouterr().err


def test_logits_are_the_same_bits_before_and_after_folding(command, tmp_path):
    file = tmp_path / "fold.json"
    given = ("fold", *joined(WORDS, ["precision=bf16"]), "--rounds", "2", "--warmup", "0", "--json", str(file))
    assert command(*given, "dlr=on") == 0
    models = {m["name"]: m for m in json.loads(file.read_text())["models"]}
    assert models["published, as in training"]["equal"] is True and models["base, dlr=off"]["equal"] is None
    assert models["before folding, branch"]["largest_difference"] > 0
    assert command(*given, "dlr=off") == EXIT_CONFIG


@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own_beside_the_plan(command, tmp_path):
    file = tmp_path / "memory.json"
    assert command("memory", *WORDS, "--setting", "dlr=on", "--json", str(file)) == 0
    (setting,) = json.loads(file.read_text())["settings"]
    assert setting["estimate"] > 0 and setting["first_step_s"] > 0 and setting["step_s"] > 0
    assert 0 <= setting["peak"] < 1e9


WIDE = [  # layers, not the logits, take most of the memory
    *("scale=tiny", "scale.vocab_size=512", "scale.hidden_size=256", "scale.intermediate_size=688", "data=sample"),
    *("train.global_batch=8", "train.micro_batch=8", "device=cpu", "compile=false"),
]


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    ("backbone=sltrain",), ("backbone=full", "optimizer=galore"), ("dlr=on", "precision=fp32"),
    ("dlr=on", "precision=bf16_mixed"), ("dlr=on", "train.micro_batch=2"), ("dlr=on", "data.mask_documents=true"),
    ("backbone=cola_lax", "dlr=on", "train.activation_checkpointing=latent"),
    ("dlr=on", "train.activation_checkpointing=block"),
], ids=" ".join)  # fmt: skip
def test_the_plan_tells_the_memory_of_an_eager_step(words):
    if "optimizer=adamw_8bit" in words:
        pytest.importorskip("torchao")
    given = joined([*WIDE, "backbone=cola"], list(words))
    cfg = load(given)
    assert alone(given)["peak"] == pytest.approx(memory(cfg, cfg.planned_vocab_size, 1).total, rel=0.005)


@pytest.mark.parametrize("words", [
    ("step", "--rounds", "1"), ("step", "--warmup", "-1"), ("step", "--padding", "1"), ("step", "train.clip=fast"),
    ("step", "--arm", "dlr=on", "--arm", "dlr=on"), ("step", "--arm", "dlr=on", "--arm", "train.seq_len=64"),
    ("step", "parallel=fsdp"), ("memory", "--setting", "train.activation_checkpointing=some"),
])  # fmt: skip
def test_what_cannot_be_measured_is_refused(command, words, capsys):
    assert command(words[0], *WORDS, *words[1:]) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith("error: ")


def test_words_of_an_arm_come_in_the_place_of_the_common_ones():
    assert joined(["dlr=off", "+scale=60m", "train.lr=1"], ["scale=1b", "dlr=on"]) == [
        "train.lr=1",
        "scale=1b",
        "dlr=on",
    ]
    assert with_source(["scale=tiny"]) == ["data=sample", "scale=tiny"]
    assert with_source(["+data=c4"]) == ["+data=c4"]
    assert joined(["train={lr: 1, steps: 2}"], ["train.lr=3"]) == ["train.steps=2", "train.lr=3"]
    assert with_source(["data={seed: 1}"]) == ["data=sample", "data={seed: 1}"]
