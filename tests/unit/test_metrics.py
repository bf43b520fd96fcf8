"""metrics.jsonl is the truth; throughput counts what it says; W&B is a view that never stands in the way."""

from __future__ import annotations

import errno
import math
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from dlr_pretrain.analysis.history import read_metrics
from dlr_pretrain.cli import load
from dlr_pretrain.errors import Stopped, UserError
from dlr_pretrain.train import metrics
from dlr_pretrain.train.metrics import SETTLING_STEPS, WINDOW, MetricsFile, Pending, Throughput
from dlr_pretrain.train.wandb_view import WandbView


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
    assert math.isnan(back.pop("a")) and back == {k: v for k, v in record.items() if k != "a"}


@pytest.mark.parametrize("full", ["refused", "cut short"])
def test_a_full_disk_is_named(tmp_path, full):
    class Disk:
        def write(self, line: bytes) -> int:
            if full == "refused":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return len(line) - 1

        def close(self) -> None:
            pass

    with MetricsFile(tmp_path / "metrics.jsonl", 0) as file:
        file.file.close()
        file.file = Disk()
        with pytest.raises(UserError, match=r"metrics\.jsonl could not be written: .*(No space left|disk is full)"):
            file.write({"step": 1})


def test_on_a_cpu_metrics_are_due_at_once():
    pending = Pending(torch.device("cpu"))
    pending.push(1, torch.tensor([1.5, 2.0]))
    assert pending.ready() == [(1, [1.5, 2.0])]
    assert pending.ready(everything=True) == []


def test_late_metrics_are_due_in_order_and_everything_when_asked():
    pending = Pending(torch.device("cpu"))
    seen = []
    for step in range(1, 6):
        pending.push(step, torch.tensor([float(step)]))
        pending.lag = 2
        seen.append([s for s, _ in pending.ready(everything=step == 4)])
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
    for seconds in [1.0] * (SETTLING_STEPS + 5) + [4.0] * WINDOW:
        clock.now += seconds
        rate = throughput.step(8)
    assert rate == 2.0


# ----------------------------------------------------------------------------------------------------
# W&B


class FakeRun:
    url, dir = "https://address/of/the/run", "wandb/run-1"

    def __init__(self):
        self.logged, self.exit_code = [], None

    def define_metric(self, *_, **__) -> None:
        pass

    def log(self, values: dict) -> None:
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeWandb:
    """``wandb`` where ``init`` in the mode ``failing`` raises; it keeps what it was called with."""

    def __init__(self, failing: str | None = None):
        self.failing, self.calls, self.run = failing, [], FakeRun()

    class Settings:
        def __init__(self, **_):
            self.base_url = os.environ.get("WANDB_BASE_URL", "https://w.and.b")

    def init(self, **given):
        self.calls.append(given)
        if given["mode"] == self.failing:
            raise RuntimeError("no such host\nand much more")
        return self.run


@pytest.fixture
def no_key(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def view(folder, monkeypatch, wandb) -> WandbView:
    folder.mkdir(exist_ok=True)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return WandbView(load(["scale=tiny", "data=sample", "logger=wandb"]), folder)


def test_without_wandb_the_mend_is_said(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"wandb is not installed. Install it, or use logger=jsonl"):
        view(tmp_path / "run", monkeypatch, None)


@pytest.mark.parametrize(("environment", "mode"), [
    ({}, "offline"),
    ({"WANDB_MODE": "online"}, "offline"),  # it would ask for a key
    ({"WANDB_API_KEY": "k"}, "online"),
    ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
    ({"WANDB_MODE": "disabled"}, "disabled"),
])  # fmt: skip
@pytest.mark.usefixtures("no_key")
def test_the_mode_follows_the_environment_and_the_key(tmp_path, monkeypatch, environment, mode):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    fake = FakeWandb()
    text = view(tmp_path / "run", monkeypatch, fake).describe()
    assert [call["mode"] for call in fake.calls] == [mode] and text.startswith(mode)
    assert ("WANDB_API_KEY" in text) == (mode == "offline" and environment.get("WANDB_MODE") != "offline")


@pytest.mark.parametrize(("machine", "mode"), [("w.and.b", "online"), ("another", "offline")])
@pytest.mark.usefixtures("no_key")
def test_a_key_in_netrc_counts_for_its_host(tmp_path, monkeypatch, machine, mode):
    (tmp_path / "netrc").write_text(f"machine {machine} login user password key")
    fake = FakeWandb()
    view(tmp_path / "run", monkeypatch, fake)
    assert fake.calls[0]["mode"] == mode


@pytest.mark.usefixtures("no_key")
def test_a_server_out_of_reach_leaves_the_run_offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k")
    fake = FakeWandb(failing="online")
    assert "offline (online failed: no such host)" in view(tmp_path / "run", monkeypatch, fake).describe()
    assert [call["mode"] for call in fake.calls] == ["online", "offline"]
    assert len({call["id"] for call in fake.calls}) == 1
    with pytest.raises(UserError, match="Use logger=jsonl"):
        monkeypatch.delenv("WANDB_API_KEY")
        view(tmp_path / "run", monkeypatch, FakeWandb(failing="offline"))


@pytest.mark.usefixtures("no_key")
def test_one_id_for_all_starts_of_a_run(tmp_path, monkeypatch):
    fake = FakeWandb()
    for folder in ("a", "a", "b"):
        view(tmp_path / folder, monkeypatch, fake)
    first, second, other = [call["id"] for call in fake.calls]
    assert first == second != other and len(first) == 12


@pytest.mark.usefixtures("no_key")
def test_a_view_that_fails_is_left_and_said_once(tmp_path, monkeypatch, capsys):
    shown = view(tmp_path / "run", monkeypatch, FakeWandb())
    run = shown.run
    with shown:
        shown.write({"step": 1, "perf/mfu": None})
        assert run.logged == [{"step": 1}]
        run.log = lambda _: 1 / 0
        shown.write({"step": 2})
        shown.write({"step": 3})
    assert capsys.readouterr().err.count("W&B was left") == 1


@pytest.mark.parametrize(
    ("error", "exit_code"), [(None, 0), (Stopped("asked"), 0), (UserError("full"), 1), (KeyError(), 1)]
)
@pytest.mark.usefixtures("no_key")
def test_a_run_that_failed_is_marked_so(tmp_path, monkeypatch, error, exit_code):
    fake = FakeWandb()
    with pytest.raises(type(error)) if error else nullcontext(), view(tmp_path / "run", monkeypatch, fake):
        if error:
            raise error
    assert fake.run.exit_code == exit_code


WANDB_START = """
import sys
from pathlib import Path
from dlr_pretrain.cli import load
from dlr_pretrain.train.wandb_view import WandbView
with WandbView(load(["scale=tiny", "data=sample", "logger=wandb"]), Path(sys.argv[1])) as view:
    print(view.describe())
    for step in (1, 2):
        view.write({"step": step, "train/loss": 3.0, "perf/mfu": None})
"""


@pytest.mark.slow
def test_the_real_one_is_offline_without_a_key_and_never_asks(tmp_path):
    """Two starts in a terminal-less process without a key: offline, one id, and nothing on standard input."""
    pytest.importorskip("wandb")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc")}
    for _ in range(2):
        command = [sys.executable, "-c", WANDB_START, str(run_dir)]
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("offline (no API key found") and len(done.stdout.splitlines()) == 1
        assert done.stderr == ""
    starts = [p.name for p in (run_dir / "wandb").glob("offline-run-*")]
    run_id = (run_dir / "wandb_id").read_text()
    assert len(starts) == 2 and all(name.endswith(f"-{run_id}") for name in starts)


@pytest.mark.slow
def test_no_file_holds_the_key(tmp_path):
    pytest.importorskip("wandb")
    key = "0123456789abcdef" * 2 + "01234567"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environment |= {
        "HOME": str(tmp_path),
        "NETRC": str(tmp_path / "netrc"),
        "WANDB_API_KEY": key,
        "WANDB_MODE": "offline",
    }
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", WANDB_START, str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and key not in done.stdout + done.stderr
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(p.suffix == ".wandb" for p in files)
    for path in files:
        assert key.encode() not in path.read_bytes(), path
