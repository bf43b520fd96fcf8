"""What a run reports: metrics.jsonl has every trained step once, the console, and the trace of ``profile=on``."""

import errno
import gzip
import io
import json
import math
import os
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.train import loop, metrics
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.metrics import SPEED_WINDOW, WARMUP_STEPS, Meter, MetricsFile
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import TrainState
from dlr_pretrain.train.update import Outcome, to_host
from dlr_pretrain.util.files import read_metrics
from tests.conftest import forked
from tests.resume.test_resume import assert_same, final
from tests.trial import random_batch, trial_loop


def steps(path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


@pytest.mark.parametrize("torn", ["", '{"step": 6, "train/lo', '{"step": 6}', "\x00\x00\x00"])
def test_a_resume_cuts_records_beyond_its_checkpoint(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    with MetricsFile(path) as file:
        for step in range(1, 6):
            file.write({"step": step, "train/loss": step / 3})
    with path.open("a") as file:
        file.write(torn)
    assert steps(path) == [1, 2, 3, 4, 5]
    lines = path.read_text().splitlines(keepends=True)
    with MetricsFile(path, 3) as file:
        assert path.read_text() == "".join(lines[:3])
        file.write({"step": 4})
        assert steps(path) == [1, 2, 3, 4]  # without a buffer in this process
    MetricsFile(path).file.close()
    assert path.read_bytes() == b"" and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lost_records_are_counted_and_damaged_lines_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in range(3, 9)]
    path.write_text("\n".join([*lines[:2], "\x00\x00", *lines[4:]]) + "\n")
    with MetricsFile(path, 8, 2) as file:
        assert file.missing == 2
    assert "\x00\x00" in (tmp_path / "metrics.damaged.jsonl").read_text() and steps(path) == [3, 4, 7, 8]
    with MetricsFile(tmp_path / "gone.jsonl", 8, 2) as file:
        assert file.missing == 6


def test_numbers_are_read_as_written(tmp_path):
    record = {"step": 1, "a": math.nan, "b": -math.inf, "c": None, "d": 0.1 + 0.2, "e": 10**15}
    with MetricsFile(tmp_path / "m") as file:
        file.write(record)
        file.sync()
    (back,) = read_metrics(tmp_path / "m")
    assert back == record | {"a": None, "b": None}  # JSON has no such numbers


def test_lines_refused_by_a_full_disk_are_written_later(tmp_path):
    class Disk:
        room = 9

        def __init__(self, path):
            self.file = open(path, "ab", buffering=0)  # noqa: SIM115 - as MetricsFile has it
            self.fileno, self.close = self.file.fileno, self.file.close

        def write(self, content: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = self.file.write(content[: self.room])
            self.room -= written
            return written

    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        file.file.close()
        file.file = disk = Disk(path)
        for step in (1, 2, 3):
            file.write({"step": step})
        assert path.read_bytes() == b'{"step": '
        with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
            file.sync()
        disk.room = 1000
        file.sync()
        assert steps(path) == [1, 2, 3]


def test_a_concurrent_save_writes_no_line_twice(tmp_path):
    """Its thread calls ``sync`` while training writes the next lines."""
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        saving = threading.Thread(target=lambda: [file.sync() for _ in range(300)])
        saving.start()
        for step in range(1, 3001):
            file.write({"step": step})
        saving.join()
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 3001))


def test_an_outcome_reaches_the_host_as_it_was():
    values = Outcome(1.5, 2.0, 0.0, 0.0, 2.0**40 + 1, 0.0)
    on_device = [torch.tensor(value, dtype=torch.float64) for value in values]
    arrived = to_host(Outcome(*on_device))
    on_device[0].fill_(9.0)
    assert arrived() == values


class Updates:
    """Stands for ``Guard``: notes which updates are read after which step; asked to stop in step 4."""

    def __init__(self):
        self.seen = []

    def stops_after(self, step: int) -> bool:
        return step == 4

    def review(self, state, step, *_) -> bool:
        self.seen[-1].append(step)
        return True


@pytest.mark.parametrize(("lag", "seen"), [(0, [[1], [2], [3], [4], [5]]), (2, [[], [], [1], [2, 3, 4], []])])
def test_outcomes_are_read_in_order_after_their_lag(tmp_path, monkeypatch, lag, seen):
    cfg, guard = load(["scale=tiny", "data=sample", "logger=jsonl", "device=cpu", "compile=false"]), Updates()
    monkeypatch.setitem(loop.LAG, "cpu", lag)
    with Ranks(cfg) as ranks:
        trained = trial_loop(cfg, ranks, 64, tmp_path)
    trained.guard, outcome = guard, Outcome(*torch.ones(6))
    for _ in range(5):
        guard.seen.append([])
        trained.state.step += 1
        trained.push(outcome, random_batch(cfg, ranks, 64))
        trained.drain(evaluates=False, at_once=False)
    assert guard.seen == seen


def test_speed_averages_the_last_steps_without_pauses(monkeypatch):
    now = 100.0
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now)
    cfg = load(["scale=tiny", "data=sample", "logger=jsonl", "train.global_batch=8", "train.seq_len=8"])
    ranks = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    meter, outcome = Meter(cfg, ranks, None, 1), Outcome(1.0, math.inf, 0.0, 0.0, 64.0, 0.0)

    def speed() -> float | None:
        return meter.record(1, outcome, TrainState())["perf/tokens_per_second"]

    for _ in range(WARMUP_STEPS):
        now += 50.0
        assert speed() is None
    now += 2.0
    assert speed() == 32.0
    with pytest.raises(ZeroDivisionError), meter.paused():
        now += 1000.0
        1 / 0  # noqa: B018
    now += 4.0
    assert speed() == pytest.approx(2 * 64 / 6)
    for _ in range(SPEED_WINDOW):
        now += 8.0
        last = speed()
    assert last == 8.0


def test_a_clock_that_is_set_does_not_change_the_duration(words, tmp_path, monkeypatch):
    cfg, outcome = load(words()), Outcome(*(1.0 for _ in Outcome._fields))
    with Ranks(cfg) as ranks:
        loop = trial_loop(cfg, ranks, 120, tmp_path)
        first = loop.meter.record(1, outcome, TrainState())["time"]
        monkeypatch.setattr(time, "time", lambda: 0.0)
        assert 0 <= loop.meter.record(2, outcome, TrainState())["time"] - first < 600


# ----------------------------------------------------------------------------------------------------
# The console


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


# ----------------------------------------------------------------------------------------------------
# ``profile=on``


COMMON = ("backbone=cola", "dlr=on", "train.steps=8", "eval.every=4", "checkpoint.every=100")
PROFILE = ("profile=on", "profile.start=2", "profile.steps=3")


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full)])
def test_every_rank_leaves_a_trace_and_trains_the_same(words, tmp_path, ranks):
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    forked(words(f"run.dir={plain}", *COMMON), ranks)
    forked(words(f"run.dir={profiled}", *COMMON, *PROFILE), ranks)
    assert_same(final(plain), final(profiled))
    traces = sorted((profiled / "profile").iterdir())
    assert [path.name.split(".")[0] for path in traces] == [f"rank_{rank}" for rank in range(ranks)]
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    found = Counter(event["name"] for event in events if event.get("ph") == "X")
    calls = {"data": 1, "forward": 4 // ranks, "backward": 4 // ranks, "optimizer": 1}  # in a step
    assert {name: found[name] for name in calls} == {name: 3 * times for name, times in calls.items()}


@pytest.mark.usefixtures("no_export")
def test_a_disk_that_refuses_ends_no_run(train, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "profile").write_text("in the way")
    train(folder, *COMMON, *PROFILE)
    assert len(read_metrics(folder / "metrics.jsonl")) == 8
