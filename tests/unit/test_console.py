"""What a person sees: progress, evaluations and a summary that fit the terminal, whatever the numbers."""

from __future__ import annotations

import io
import math
import re

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.train.console import Console, duration
from dlr_pretrain.util.text import amount


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def console(stream, *overrides: str, enabled: bool = True) -> Console:
    cfg = load(["scale=tiny", "data=sample", "logger=jsonl", "train.steps=140000", *overrides])
    return Console(cfg, enabled, stream)


def record(step: int, **values) -> dict:
    return {
        "step": step, "train/loss": 3.1234, "train/lr": 1e-3, "train/grad_norm": 0.321,
        "perf/tokens_per_second": 123456.0, "perf/mfu": 0.4567, "perf/max_memory_gb": 71.26, **values,
    }  # fmt: skip


EVALUATION = {"eval/loss": 3.0, "eval/perplexity": math.exp(3), "eval/perplexity_galore": 19.5}


def test_a_terminal_has_one_live_line_as_wide_as_it_is_which_makes_room_for_others(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    shown = console(out)
    for values in ({}, {"train/loss": 3e38, "train/grad_norm": None}, {"train/loss": math.nan, "train/lr": 1e-300}):
        shown.step(record(2, **values), seconds_per_step=47 * 3600.0)
    lines = re.split(r"\r\x1b\[K", out.getvalue())
    assert all(line.startswith("step      2/140000  loss ") and len(line) < 60 for line in lines[1:])
    assert "\n" not in out.getvalue()
    shown.say("a word")
    assert out.getvalue().endswith("\r\x1b[Ka word\n")
    shown.close_line()
    assert out.getvalue().endswith("a word\n")


def test_elsewhere_the_first_step_every_interval_and_evaluations_are_said():
    out = io.StringIO()
    shown = console(out, "log.every=4")
    for step in range(1, 11):
        shown.step(record(step, **(EVALUATION if step == 6 else {})), 1.0)
    lines = out.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step")] == [1, 4, 6, 8]
    assert all(
        text in lines[0] for text in ("3.1234", "1.00e-03", "0.321", "123k tok/s", "45.7%", "71.3 GB", "38:53:19")
    )
    assert lines[3] == "  eval  loss 3.0000  perplexity 20.09  (galore convention 19.50)"


def test_only_an_enabled_console_writes():
    for stream in (io.StringIO(), Terminal()):
        shown = console(stream, "log.every=1", enabled=False)
        shown.step(record(1, **EVALUATION), 1.0)
        shown.say("word")
        shown.summary({"label": "text"})
        shown.close_line()
        assert stream.getvalue() == ""


def test_the_summary_is_a_column_of_labels_and_wrapped_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    out = io.StringIO()
    console(out).summary({"run": "runs/a", "model": "one two three four five six seven eight nine"})
    first, second, third = out.getvalue().splitlines()
    assert (
        first == "run         runs/a" and second.startswith("model       one two") and third.startswith(" " * 12 + "e")
    )


@pytest.mark.parametrize(("shown", "text"), [
    (duration(59.6), "1:00"), (duration(11045), "3:04:05"), (duration(51 * 3600 + 3599), "2d 3h"),
    (amount(0), "0"), (amount(999.6), "1k"), (amount(1234567), "1.23M"), (amount(999_999), "1M"),
    (amount(2.5e12), "2.5T"),
])  # fmt: skip
def test_durations_and_counts(shown, text):
    assert shown == text
