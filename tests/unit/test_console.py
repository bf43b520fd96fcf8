"""What a person sees fits the terminal, whatever the numbers."""

from __future__ import annotations

import io
import math
import re

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.train.console import Console, duration
from dlr_pretrain.train.record import describe_code
from dlr_pretrain.train.summary import describe_decay, describe_memory
from dlr_pretrain.util.history import perplexity
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


def evaluation(loss: float) -> dict:
    galore = perplexity(loss * 101 / 102)
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss), "eval/perplexity_galore": galore}


VALUES = [
    {},
    {"train/loss": 99999.99994, "train/grad_norm": None, "perf/tokens_per_second": None, "perf/mfu": None},
    {"train/loss": 3e38, "train/grad_norm": 1.5e30, "perf/tokens_per_second": 9.99999e9, "perf/mfu": 0.99999},
    {"train/loss": math.nan, "train/grad_norm": math.inf, "train/lr": 1e-300},
    evaluation(3.1),
    evaluation(11.0),
    evaluation(690.0),  # its perplexity has 300 digits
    evaluation(math.nan) | {"eval/perplexity": math.nan},
    evaluation(1e30),
]


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_no_line_is_wider_than_the_terminal(monkeypatch, columns, stream, values):
    monkeypatch.setenv("COLUMNS", str(columns))
    out = stream()
    shown = console(out, "log.every=1")
    for step in (1, 99_999, 140_000):
        shown.step(record(step, **values), seconds_per_step=47 * 3600.0)
    shown.summary({"run": "a/run/directory", "model": "words of a line that has to be wrapped, " * 9})
    lines = [re.sub(r"\x1b\[K", "", line) for line in re.split(r"[\n\r]", out.getvalue())]
    assert max(map(len, lines)) < columns
    for step in (1, 99_999, 140_000):
        assert any(line.startswith(f"step {step:6}/140000  loss ") for line in lines)


def test_a_wide_terminal_shows_everything_and_a_narrow_one_the_most_useful(monkeypatch):
    out = io.StringIO()
    for columns in (120, 80, 46):
        monkeypatch.setenv("COLUMNS", str(columns))
        console(out, "log.every=1").step(record(1000), seconds_per_step=1.0)
    wide, narrow, tiny = out.getvalue().splitlines()
    full = "step   1000/140000  loss 3.1234  lr 1.00e-03  grad 0.321  123k tok/s  MFU 45.7%  71.3 GB  eta 38:36:40"
    assert wide == full
    assert narrow == full.replace("lr 1.00e-03  grad 0.321  ", "")
    assert tiny == "step   1000/140000  loss 3.1234  eta 38:36:40"


def test_without_a_terminal_the_first_step_every_interval_and_evaluations_are_said():
    out = io.StringIO()
    shown = console(out, "log.every=4")
    for step in range(1, 11):
        shown.step(record(step, **(evaluation(3.0) if step == 6 else {})), None)
    lines = out.getvalue().splitlines()
    assert [int(line.split()[1].split("/")[0]) for line in lines if line.startswith("step")] == [1, 4, 6, 8]
    assert lines[3] == "  eval  loss 3.0000  perplexity 20.09  (galore convention 19.50)"


def test_a_terminal_has_one_live_line_which_makes_room_for_others():
    out = Terminal()
    shown = console(out)
    for step in (1, 2):
        shown.step(record(step), None)
    assert "\n" not in out.getvalue() and out.getvalue().count("\r\x1b[K") == 2
    shown.say("a word")
    assert out.getvalue().endswith("\r\x1b[Ka word\n")
    shown.step(record(3), None)
    shown.close_line()
    shown.close_line()
    assert out.getvalue().endswith("71.3 GB\r\x1b[K")


def test_a_warning_stands_out_on_a_terminal_alone(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        console(stream).say("warning: lost")
        console(stream).say("no warning: kept")
    assert terminal.getvalue() == "\x1b[1;33mwarning:\x1b[0m lost\nno warning: kept\n"
    assert log.getvalue() == "warning: lost\nno warning: kept\n"
    monkeypatch.setenv("NO_COLOR", "1")
    console(terminal).say("warning: plain")
    assert terminal.getvalue().endswith("\nwarning: plain\n")


def test_only_an_enabled_console_writes():
    for stream in (io.StringIO(), Terminal()):
        shown = console(stream, "log.every=1", enabled=False)
        shown.step(record(1, **evaluation(3.0)), 1.0)
        shown.say("word")
        shown.summary({"label": "text"})
        shown.close_line()
        assert stream.getvalue() == ""


def test_the_summary_is_a_column_of_labels_and_wrapped_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    out = io.StringIO()
    console(out).summary({"run": "runs/a", "model": "one two three four five six seven eight nine"})
    assert out.getvalue().splitlines() == [
        "run         runs/a",
        "model       one two three four five six seven",
        "            eight nine",
    ]


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (3599.7, "1:00:00"), (11045, "3:04:05"),
    (48 * 3600 - 1, "47:59:59"), (48 * 3600, "2d 0h"), (51 * 3600 + 3599, "2d 3h"),
])  # fmt: skip
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [
    (0, "0"), (7.25, "7.25"), (999.4, "999"), (999.6, "1k"), (1000, "1k"), (1234567, "1.23M"), (999_499, "999k"),
    (999_999, "1M"), (13.1e9, "13.1B"), (999.99e9, "1T"), (2.5e12, "2.5T"),
])  # fmt: skip
def test_counts_have_three_digits_and_a_unit(number, text):
    assert amount(number) == text


def test_the_code_and_the_plan_beside_the_gpu_are_told():
    start = {"git": "0123456789abcdef+", "python": "3.11.7", "packages": {"torch": "2.13.0", "transformers": "5.23.0"}}
    assert describe_code(start) == "commit 0123456789ab, with local changes; Python 3.11.7, torch 2.13.0, " \
        "transformers 5.23.0"  # fmt: skip
    assert describe_code(start | {"git": None}).startswith("dlr_pretrain not installed; ")
    assert describe_memory(10**10, 8 * 10**10) == "10.0 GB planned (eager; compiled code takes less) of 80.0 GB"
    assert "train.micro_batch=auto" in describe_memory(9 * 10**10, 8 * 10**10)


@pytest.mark.parametrize(("words", "text"), [
    ("", ", then a cosine to 0.0005"),
    ("train.lr_decay=linear train.lr_decay_steps=90", ", then a line to 0.0005"),
    ("train.lr_decay_steps=20", ", and in the last 20 steps a cosine to 0.0005"),
    ("train.lr_decay_steps=0", ", then constant"),
    ("train.lr_decay_steps=0 backbone=relora backbone.merge_every=30 backbone.restart_warmup=5",
     ", then constant, anew every 30 steps"),
])  # fmt: skip
def test_the_decay_of_the_rate_is_told(words, text):
    given = ["scale=tiny", "data=sample", "train.lr=0.005", "train.steps=100", "train.warmup_steps=10"]
    assert describe_decay(load([*given, *words.split()])) == text
