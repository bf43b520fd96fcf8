"""metrics.jsonl is the truth, and says what it lost; throughput counts what it says."""

from __future__ import annotations

import errno
import math
import os
import threading

import pytest
import torch

from dlr_pretrain.train import metrics
from dlr_pretrain.train.metrics import (
    SETTLING_STEPS,
    THROUGHPUT_WINDOW,
    MetricsFile,
    Pending,
    Throughput,
    missing_steps,
)
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.history import read_metrics


def write(path, steps, resumed_step: int = 0) -> None:
    with MetricsFile(path, resumed_step) as file:
        for step in steps:
            file.write({"step": step, "train/loss": step / 3})


def steps(path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


@pytest.mark.parametrize("torn", ["", '{"step": 6, "train/lo', '{"step": 6}', "\x00\x00\x00"])
def test_a_resume_cuts_what_lies_beyond_its_checkpoint_and_goes_on(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6))
    with path.open("a") as file:
        file.write(torn)
    assert steps(path) == [1, 2, 3, 4, 5]
    lines = path.read_text().splitlines(keepends=True)
    with MetricsFile(path, 3) as file:
        assert path.read_text() == "".join(lines[:3])
        file.write({"step": 4})
        assert steps(path) == [1, 2, 3, 4]  # no buffer of our own
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_start_leaves_no_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    write(path, [1, 2])
    write(path, [])
    assert path.read_bytes() == b""


def test_numbers_come_back_as_they_were(tmp_path):
    record = {"step": 1, "a": math.nan, "b": -math.inf, "c": None, "d": 0.1 + 0.2, "e": 10**15}
    with MetricsFile(tmp_path / "m", 0) as file:
        file.write(record)
        file.sync()
    (back,) = read_metrics(tmp_path / "m")
    assert back == record | {"a": None, "b": None}  # JSON has no such numbers


@pytest.mark.parametrize("full", ["refused", "cut short"])
def test_a_full_disk_is_named(tmp_path, full):
    class Disk:
        asked = False

        def write(self, line: bytes) -> int:
            if full == "refused" or self.asked:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.asked = True
            return len(line) - 1

        def close(self) -> None:
            pass

    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        file.file.close()
        file.file = Disk()
        file.write({"step": 1})
        with pytest.raises(UserError, match=r"metrics\.jsonl could not be written: .*No space left"):
            file.sync()


def test_lines_that_a_full_disk_did_not_take_are_written_when_there_is_room(tmp_path):
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

    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        file.file.close()
        file.file = disk = Disk(tmp_path / "metrics.jsonl")
        for step in (1, 2, 3):
            file.write({"step": step})
        assert (tmp_path / "metrics.jsonl").read_bytes() == b'{"step": '
        disk.room = 1000
        file.sync()
        assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_a_save_beside_the_training_writes_no_line_twice(tmp_path):
    """Its thread asks for what is written while the next lines come."""
    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        saving = threading.Thread(target=lambda: [file.sync() for _ in range(300)])
        saving.start()
        for step in range(1, 3001):
            file.write({"step": step})
        saving.join()
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 3001))


def test_on_a_cpu_metrics_are_due_at_once():
    pending = Pending(torch.device("cpu"))
    pending.push(1, torch.tensor([1.5, 2.0]))
    assert [*pending.ready(lambda: False)] == [(1, [1.5, 2.0])]
    assert [*pending.ready(lambda: True)] == []


def test_late_metrics_are_due_in_order_and_everything_when_asked():
    pending = Pending(torch.device("cpu"))
    seen = []
    for step in range(1, 6):
        pending.push(step, torch.tensor([float(step)]))
        pending.lag = 2
        seen.append([s for s, _ in pending.ready(lambda step=step: step == 4)])
        pending.lag = 0
    assert seen == [[], [], [1], [2, 3, 4], []]


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(metrics.time, "perf_counter", lambda: self.now)


def test_throughput_leaves_out_the_first_steps_and_pauses(monkeypatch):
    clock = Clock(monkeypatch)
    throughput = Throughput()
    for _ in range(SETTLING_STEPS):
        clock.now += 50.0
        assert throughput.step(64) is None and throughput.seconds_per_step() is None
    clock.now += 2.0
    assert throughput.step(64) == 32.0
    with throughput.paused():
        clock.now += 1000.0
    clock.now += 4.0
    assert throughput.step(64) == pytest.approx(2 * 64 / 6)
    with pytest.raises(ZeroDivisionError), throughput.paused():
        clock.now += 1000.0
        1 / 0  # noqa: B018
    clock.now += 3.0
    assert throughput.step(64) == pytest.approx(3 * 64 / 9)
    assert throughput.seconds_per_step() == pytest.approx(3.0)


def test_throughput_is_that_of_the_last_steps(monkeypatch):
    clock = Clock(monkeypatch)
    throughput = Throughput()
    for seconds in [1.0] * (SETTLING_STEPS + 5) + [4.0] * THROUGHPUT_WINDOW:
        clock.now += seconds
        rate = throughput.step(8)
    assert rate == 2.0


@pytest.mark.parametrize(("steps", "first", "last", "missing"), [
    ([1, 2, 3], 1, 3, ""),
    ([], 1, 0, ""),
    ([], 1, 4, "1-4"),
    ([2, 3], 1, 3, "1"),
    ([1, 2], 1, 5, "3-5"),
    ([1, 4, 5, 7], 1, 9, "2-3, 6, 8-9"),
    ([1, 2, 8, 9], 8, 9, ""),  # forked after step 7
    ([9, 8], 8, 10, "10"),
])  # fmt: skip
def test_lost_lines_are_named(steps, first, last, missing):
    assert missing_steps(iter(steps), first, last) == missing


def test_lost_lines_of_metrics_are_named_when_a_run_resumes(tmp_path, train, no_export, capsys):
    with pytest.raises(Stopped):
        train(tmp_path / "run", "train.stop_after=10")
    path = tmp_path / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[6:]))
    train(tmp_path / "run")
    assert "metrics.jsonl has lost steps 4-6 of the 10 that are trained" in " ".join(capsys.readouterr().out.split())
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3, *range(7, 21)]
