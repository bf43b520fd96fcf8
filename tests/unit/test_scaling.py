"""Scaling on paper: operations against closed forms, times by hand, and an independent count of the same bound."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace

import pytest

from dlr_pretrain.analysis import operations as counting
from dlr_pretrain.analysis.memory import memory
from dlr_pretrain.analysis.operations import Operation, work
from dlr_pretrain.analysis.scaling import (
    HEADER,
    Scaling,
    assume,
    communication,
    fitting,
    render,
    ring,
    roofline,
    update_bytes,
)
from dlr_pretrain.analysis.table1 import counts
from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.models.flops import flops_per_token
from tests.conftest import ROOT

SMALL = [
    *("scale=tiny", "scale.intermediate_size=256", "scale.vocab_size=512", "train.seq_len=64"),
    *("train.global_batch=32", "train.micro_batch=4", "data=sample", "logger=jsonl"),
]
H200 = assume("h200")


def config(*words: str):
    given = {word.split("=")[0] for word in words}
    return load([*(word for word in SMALL if word.split("=")[0] not in given), *words], machine=False)


# ---------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("backbone", ["full", "lowrank", "cola"])
def test_the_products_are_those_that_the_plan_counts(backbone):
    """Widths need no padding here; flash attention forms its scores once more: 7 T d L rather than 6."""
    cfg = config(f"backbone={backbone}")
    positions = 4 * 64
    flops = sum(n * op.flops for op, n in work(cfg, 512, 4).items())
    assert flops == positions * (flops_per_token(cfg, 512, 4) + 64 * 128 * 4)


def test_deep_models_are_counted_from_shallow_ones():
    cfg = config("backbone=cola_lax", "dlr=on", "scale.num_layers=5")
    assert work(cfg, 512, 4) == counting._work(cfg, 512, 4, 5)


def test_recomputation_is_work_and_views_are_none():
    plain, again = (
        work(config("backbone=cola", f"train.activation_checkpointing={c}"), 512, 4) for c in ("none", "block")
    )
    flops = [sum(n * op.flops for op, n in w.items()) for w in (plain, again)]
    assert 1.15 < flops[1] / flops[0] < 4 / 3
    assert min(op.bytes for op in plain) > 0


# ---------------------------------------------------------------------------------------------------- times


def test_each_operation_takes_the_longest_of_its_three_bounds():
    given = replace(H200, peak_tflops=1.0, gemm=0.5, memory_gbs=1.0, stream=0.5, kernel_us=1.0, fused=0.25)
    product, copy, small = (10**9, 10**6, True), (0, 10**6, False), (10, 10, True)
    assert roofline(Counter({Operation(*product): 2}), given) == pytest.approx(2 * 2e-3)
    assert roofline(Counter({Operation(10**6, 10**6, True): 1}), given) == pytest.approx(2e-3)
    assert roofline(Counter({Operation(*copy): 4}), given) == pytest.approx(4 * 0.25 * 2e-3)
    assert roofline(Counter({Operation(*small): 7}), given) == pytest.approx(7e-6)


def test_a_ring_by_hand():
    """1.22 GB, the bf16 gradients of CoLA 1B: 2 x 7/8 over NVLink, and at the pace of the adapters beyond a node."""
    free = replace(H200, network=1.0, hop_us=0.0, nvlink_gbs=400.0, infiniband_gbs=12.5)
    assert ring(1.22e9, 1, free) == 0
    assert ring(1.22e9, 8, free) == pytest.approx(1.22e9 * 2 * 7 / 8 / 400e9)
    assert ring(1.22e9, 32, free) == pytest.approx(1.22e9 * 2 * 31 / 32 / 100e9)
    assert ring(0, 1024, replace(free, hop_us=5.0)) == pytest.approx(2 * 10 * 5e-6)


def test_what_travels_is_what_the_ranks_sum():
    """DDP once an update; fsdp gathers twice and scatters once for each micro-batch; fp32 sums hide behind nothing."""
    free = replace(H200, network=1.0, hop_us=0.0, nvlink_gbs=1.0)

    def moved(*words: str) -> tuple[float, float]:
        cfg = config(*words)
        return communication(cfg, counts(cfg, 512), 4, 2, 3.0, free)

    size = 2 * counts(config("backbone=cola"), 512).total  # bf16
    assert moved("backbone=cola") == (pytest.approx(size * 1.5 / 1e9), 2.0)
    assert moved("backbone=cola", "train.accumulate=fp32") == (pytest.approx(2 * size * 1.5 / 1e9), 0.0)
    sharded, hiding = moved("backbone=cola", "parallel=fsdp")
    assert (sharded, hiding) == (pytest.approx(2 * size * 2.25 / 1e9), 6.0)


@pytest.mark.parametrize("backbone", ["lora", "sltrain"])
def test_what_is_not_trained_neither_travels_nor_is_updated(backbone):
    """Frozen weights have no gradient, and indices are no weights."""
    free, cfg = (
        replace(H200, network=1.0, hop_us=0.0, nvlink_gbs=1.0),
        config(f"backbone={backbone}", "train.clip=null"),
    )
    entries, held = counts(cfg, 512), memory(cfg, 512, 4)
    assert communication(cfg, entries, 4, 1, 3.0, free)[0] == pytest.approx(2 * entries.trained * 1.5 / 1e9)
    state = held.optimizer_state + held.masters
    assert update_bytes(cfg, entries, held, 4) == pytest.approx(2 * held.gradients + 2 * (2 * entries.trained + state))
    assert 2 * entries.trained < 0.95 * held.weights


def test_an_estimate_adds_up():
    cfg = config("backbone=cola", "dlr=on", "train.steps=1000")
    alone, eight = (Scaling(cfg, H200).estimate(n) for n in (1, 8))
    held = memory(replace(cfg, train=replace(cfg.train, micro_batch=4)), 512, 1)
    assert (alone.micro_batch, alone.micro_batches, eight.micro_batches) == (4, 8, 1)
    assert alone.communication == alone.exposed == 0 < eight.communication
    assert alone.memory == held.total
    assert alone.update == pytest.approx(update_bytes(cfg, counts(cfg, 512), held, 1) / (4.8e12 * 0.9 * 0.7))
    for e in (alone, eight):
        assert e.step == pytest.approx(e.compute + e.exposed + e.update)
        assert e.tokens_per_second * e.step == pytest.approx(32 * 64)
        assert e.hours * 3600 == pytest.approx(1000 * e.step)
        assert e.mfu == pytest.approx(flops_per_token(cfg, 512, 4) * e.tokens_per_second / (e.gpus * 989e12))


def test_better_machines_are_never_slower():
    scaling = Scaling(config("backbone=cola"), H200)
    usual = scaling.estimate(8).step
    for better in ("peak_tflops=2000", "memory_gbs=9000", "nvlink_gbs=900", "roofline=0.9", "kernel_us=0", "fused=0.1"):
        scaling.given = assume("h200", [better])
        assert scaling.estimate(8).step <= usual
    scaling.given = assume("a100")
    assert scaling.estimate(8).step > usual


@pytest.mark.parametrize(("scale", "backbone", "rate"), [
    ("60m", "full", 2080e3), ("60m", "cola", 2364e3), ("350m", "lowrank", 510e3), ("1b", "cola", 170e3),
    ("1b", "full", 88.7e3), ("7b", "cola", 39.0e3),
])  # fmt: skip
def test_the_bound_is_that_of_a_count_by_hand(scale, backbone, rate):
    """Positions a second on one H200, counted layer by layer with packed products and fused elementwise kernels."""
    cfg = load([f"scale={scale}", f"backbone={backbone}", "data=sample", "train.micro_batch=32"], machine=False)
    positions = 32 * 256
    assert positions / roofline(work(cfg, 32_000, 32), assume("h200")) == pytest.approx(rate, rel=0.12)


def test_the_largest_micro_batch_that_fits():
    cfg = config("backbone=cola")
    sizes = {n: memory(replace(cfg, train=replace(cfg.train, micro_batch=n)), 512, 1).total for n in (8, 16)}
    assert fitting(cfg, 512, 1, sizes[8]) == 8
    assert fitting(cfg, 512, 1, sizes[16] - 1) == 8
    assert fitting(cfg, 512, 1, 1000) is None


# ---------------------------------------------------------------------------------------------------- the command


def command(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "scripts/plan.py", *words], cwd=ROOT, capture_output=True, text=True)


def test_the_table_is_readable_and_names_every_assumption():
    found = [(cfg := config("backbone=cola"), Scaling(cfg, H200).estimates([1, 8, 32, 64, 1024]))]
    text = render(found, H200, "h200")
    assert max(map(len, text.splitlines())) <= 80
    assert text.count(HEADER) == 1 and "1,024  no even share of train.global_batch=32" in text
    assert all(f"  {name}=" in text for name in asdict(H200))


def test_ranks_beyond_the_data_order_are_marked_and_what_does_not_fit_is():
    cfg = config("backbone=cola", "train.global_batch=128")
    estimates = Scaling(cfg, assume("h200", ["memory_gb=0.001"])).estimates([64, 128])
    assert [e.trains for e in estimates.values()] == [True, False]
    lines = render([(cfg, estimates)], H200, "h200").splitlines()
    assert all("!" in row for row in lines[2:4]) and lines[3].endswith("*") and not lines[2].endswith("*")


def test_the_command_takes_lists_and_prints_json():
    done = command(*SMALL, "backbone=full,cola", "--gpus", "1,8", "--assume", "overlap=0", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["assumptions"]["overlap"] == 0
    assert [[e["gpus"] for e in run["estimates"]] for run in found["runs"]] == [[1, 8], [1, 8]]
    assert [run["run"].split(", ")[1] for run in found["runs"]] == ["full", "cola"]


def test_fp32_needs_a_peak_of_its_own(tmp_path):
    """The data sheets' are of bf16 products, sixteen times as fast."""
    lack = "precision=fp32: the peak of h200 that is known is of bf16 products. Give that of fp32 products by --assume"
    done = command(*SMALL, "precision=fp32", "--gpus", "1")
    assert done.returncode == 2 and f"{lack} peak_tflops=<number>" in done.stderr
    arm = {"name": "plain", "words": [*SMALL, "precision=fp32"], "ms": 2.0}
    found = {"device": "NVIDIA H200", "command": "python ...", "batch": {"rows": 32, "seq_len": 64}, "arms": [arm]}
    (tmp_path / "step.json").write_text(json.dumps(found))
    done = command("--measured", str(tmp_path / "step.json"))
    assert done.returncode == 2 and lack in done.stderr
    done = command("--measured", str(tmp_path / "step.json"), "--assume", "peak_tflops=67")
    assert done.returncode == 0 and "plain" in done.stdout
    done = command(*SMALL, "precision=fp32", "--gpus", "1", "--assume", "peak_tflops=67")
    assert done.returncode == 0 and "peak_tflops=67" in done.stdout
    done = command(*SMALL, "precision=fp32,bf16", "--gpus", "1", "--assume", "peak_tflops=67")
    assert done.returncode == 2 and "Estimate it by itself" in done.stderr
    assert command(*SMALL, "precision=fp32").returncode == 0  # a plan without times needs none


def test_measurements_stand_beside_their_estimates(tmp_path):
    """One step of 32 rows, as scripts/benchmark.py writes it; the estimate is the plan's, peers are left out."""
    words = [*SMALL, "backbone=cola"]
    arms = [{"name": "plain", "words": words, "ms": 2.0, "memory": {"peak": 3.0e9}}, {"name": "a peer", "words": None}]
    found = {"device": "NVIDIA H200", "command": "python ...", "batch": {"rows": 32, "seq_len": 64}, "arms": arms}
    (tmp_path / "step.json").write_text(json.dumps(found))
    done = command("--measured", str(tmp_path / "step.json"))
    assert done.returncode == 0, done.stderr
    (row,) = [line.split() for line in done.stdout.splitlines() if line.endswith("plain")]
    e = Scaling(config("backbone=cola"), H200).estimate(1)
    assert row == ["2", f"{1e3 * e.step:.4g}", f"{2e-3 / e.step:.2f}", "3.0", f"{e.memory / 1e9:.1f}", "plain"]
    assert "a peer" not in done.stdout
    refused = command("--measured", str(tmp_path / "step.json"), "--device", "a100")
    assert (
        refused.returncode == 3 and "measured on NVIDIA H200, and the estimates are for --device a100" in refused.stderr
    )


def test_assumptions_that_make_no_sense_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        assume("h100", ["gem=0.7", "overlap=1.5", "stream=fast"])
    said = str(caught.value)
    assert "--assume gem: no such assumption. Did you mean gemm?" in said
    assert "--assume overlap=1.5: must be a number from 0 on and at most 1" in said and "--assume stream=fast" in said
