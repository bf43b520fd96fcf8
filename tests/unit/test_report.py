"""The report is written from any record that a run can leave."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from dlr_pretrain.analysis.report import limits, smoothed, write_report

CONFIG = {
    "seed": 1,
    "scale": {"name": "tiny", "hidden_size": 128, "intermediate_size": 344, "num_layers": 4},
    "backbone": {"name": "cola", "rank": 32, "factorized": True},
    "dlr": {"name": "on", "enabled": True, "alpha": 1.0, "impl": "weight"},
    "optimizer": {"name": "adamw"},
    "data": {"source": "sample", "packing": "packed", "seed": 42},
    "precision": {"name": "bf16_mixed"},
    "train": {"steps": 300, "lr": 0.005, "global_batch": 16, "seq_len": 256},
    "eval": {"packing": "pad"},
}
MANIFEST = {
    "identity": {"seed": 1},
    "starts": [
        {"command": ["train.py"]},
        {"command": ["train.py", "+scale=tiny"], "git": "abc", "packages": {"torch": "2.13"}},
    ],
}


def a_line(step: int, **values) -> dict:
    return {
        "step": step, "train/loss": 3 + 6 * math.exp(-step / 60) + random.Random(step).gauss(0, 0.1), "train/lr": 0.001,
        "train/grad_norm": 0.3, "train/tokens": step * 4096, "train/real_tokens": step * 4000,
        "perf/tokens_per_second": 1000.0 if step > 10 else None, "perf/mfu": None, "perf/max_memory_gb": 1.25, **values,
    }  # fmt: skip


def an_evaluation(loss: float, n: int = 101) -> dict:
    galore = math.exp(loss * n / (n + 1))
    return {"eval/loss": loss, "eval/perplexity": math.exp(loss), "eval/perplexity_galore": galore}


def a_run(folder: Path, lines: list[dict], manifest: dict = MANIFEST) -> str:
    """Write a run directory and its report; returns the text, after a look that the picture is one."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    OmegaConf.save(OmegaConf.create(CONFIG), folder / "config.yaml")
    (folder / "manifest.json").write_text(json.dumps({"identity": {}} | manifest))
    write_report(folder)
    png = (folder / "plots/loss.png").read_bytes()
    assert png.startswith(b"\x89PNG") and len(png) > 5_000
    return (folder / "report.md").read_text()


def test_the_whole_record(tmp_path):
    lines = [a_line(step, **(an_evaluation(3.5 + 9 / step) if step % 50 == 0 else {})) for step in range(1, 301)]
    (tmp_path / "folded").mkdir()
    for name in ("README.md", "config.json", "modeling_lowrank_llama.py"):
        (tmp_path / "folded" / name).touch()
    text = a_run(tmp_path, lines)
    for words in (
        "After step 300 of 300", "cola, rank 32, DLR on (alpha 1)", "bf16_mixed", "packed", "**34.12**",
        "1,228,800 positions, of which 1,200,000 real tokens", "trust_remote_code=True", f'"{tmp_path / "folded"}"',
        "| command | train.py +scale=tiny |", "| starts | 2 |", "torch 2.13",
        "| positions a second, median | 1,000 |", "| peak memory of a rank, GB | 1.25 |",
    ):  # fmt: skip
        assert words in text
    assert "MFU" not in text  # unknown is blank, not guessed
    assert len(text.splitlines()) < 50


def test_speed_is_of_the_last_start(tmp_path):
    """The first was on another machine; the last update's own speed is no median."""
    began = [{"command": ["train.py"], "time": f"2026-01-01T0{hour}:00:00Z"} for hour in (0, 1)]
    lines = [
        a_line(
            s,
            time=1767225600 + 3600 * (s > 30) + s,
            **{"perf/tokens_per_second": 9e9 if s in (5, 40) else 10.0 * s, "perf/mfu": s / 100},
        )
        for s in range(1, 41)
    ]
    text = a_run(tmp_path, lines, {"starts": began})
    assert "| positions a second, median since the last start | 355 |" in text
    assert "| MFU, median since the last start | 35.5% |" in text


ODD = {
    "one step": [a_line(1)],
    "one step, evaluated": [a_line(1, **an_evaluation(9.0))],
    "loss not finite": [a_line(s, **({"train/loss": math.nan} if s > 20 else {})) for s in range(1, 41)],
    "no finite loss": [a_line(s, **{"train/loss": None}) for s in range(1, 31)],
    "evaluation not finite": [a_line(s, **an_evaluation(math.inf if s > 1 else 9.0)) for s in range(1, 3)],
    "perplexity overflows": [a_line(1, **{**an_evaluation(1.0), "eval/loss": 900.0, "eval/perplexity": math.inf})],
    "perfect": [a_line(1, **an_evaluation(0.0))],
}


@pytest.mark.parametrize("lines", ODD.values(), ids=ODD.keys())
@pytest.mark.filterwarnings("error")
def test_odd_records(tmp_path, lines):
    text = a_run(tmp_path, lines, manifest={"starts": [], "anything": {"a": [1, 2]}})
    assert f"After step {len(lines)} of 300" in text
    assert "| anything | a 1 2 |" in text
    assert "There is none" in text


def test_steps_without_a_finite_loss_are_counted(tmp_path):
    assert "not finite | 20 |" in a_run(tmp_path, ODD["loss not finite"])


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    a_run(tmp_path, [a_line(1), a_line(2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "train/lo')
    write_report(tmp_path)
    assert "After step 2" in (tmp_path / "report.md").read_text()


def test_smoothing():
    values = np.full(10_000, 2.0)
    values[5000], values[::3], values[:2] = 1e6, math.nan, 2.0
    at, level = smoothed(values)
    assert len(at) == 400 and (at[0], at[-1]) == (0, 9999)
    assert np.allclose(level, 2.0)
    assert np.isnan(smoothed(np.full(30, math.nan))[1]).all()


def test_a_spike_does_not_flatten_the_curve():
    loss = np.linspace(10, 3, 500)
    loss[250] = 1e6
    low, high = limits(loss, np.array([2.9]))
    assert low < 2.9 and 10 < high < 11
