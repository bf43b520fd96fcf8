"""What a user sees: the metrics of a step, evaluations, and nothing if the console is off."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

from dlr_pretrain.cli import load
from dlr_pretrain.train.console import Console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(stream, *overrides: str, enabled: bool = True) -> Console:
    cfg = load(["scale=tiny", "data=sample", "logger=jsonl", "train.steps=140000", *overrides])
    return Console(cfg, enabled, stream)


def record(step: int, **values) -> dict:
    return {
        "step": step, "train/loss": 3.1234, "train/lr": 1e-3, "train/grad_norm": 0.321,
        "perf/tokens_per_second": 123392.0, "perf/mfu": 0.4567, "perf/max_memory_gb": 71.26, **values,
    }  # fmt: skip


EVALUATION = {"eval/loss": 3.0, "eval/perplexity": math.exp(3), "eval/perplexity_galore": 19.5}


def test_without_a_terminal_steps_are_printed_at_intervals():
    out = io.StringIO()
    shown = console(out, "log.every=4", "train.global_batch=482", "train.seq_len=256")  # a step takes a second
    for step in range(1, 11):
        shown.step(record(step, **(EVALUATION if step == 6 else {})))
    lines = out.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step")] == [1, 4, 6, 8]
    assert all(
        text in lines[0] for text in ("3.1234", "1.00e-03", "0.321", "123k tok/s", "45.7%", "71.3 GB", "14:53:19")
    )
    assert lines[3] == "  eval  loss 3.0000, perplexity 20.09 (GaLore-style 19.50)"


def test_only_an_enabled_console_writes():
    for stream in (io.StringIO(), Terminal()):
        shown = console(stream, "log.every=1", enabled=False)
        shown.step(record(1, **EVALUATION))
        shown.say("word")
        shown.summary({"label": "text"})
        shown.close_line()
        assert stream.getvalue() == ""


def test_the_live_line_makes_room_for_other_output():
    out = Terminal()
    shown = console(out)
    shown.step(record(2))
    assert "step      2/140000" in out.getvalue() and "\n" not in out.getvalue()
    shown.say("a word")
    assert out.getvalue().endswith("\r\x1b[Ka word\n")


def test_a_long_evaluation_shows_its_progress(monkeypatch):
    now = 100.0
    monkeypatch.setattr("dlr_pretrain.train.console.time", SimpleNamespace(monotonic=lambda: now))
    stream = io.StringIO()
    shown = console(stream)
    for share in (0.0, 0.25, 0.5, 0.75):
        shown.evaluating(share)
        now += 20.0
    assert stream.getvalue() == "  eval  50% done\n"
