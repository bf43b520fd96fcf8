"""One writer a run directory: who is refused, who takes over, and what a damaged lease costs."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from dlr_pretrain.train import lease as lock
from dlr_pretrain.train.lease import Lease
from dlr_pretrain.util import heartbeat
from dlr_pretrain.util.errors import UserError

HOLDER = """
import sys, time
from pathlib import Path
from dlr_pretrain.train.lease import Lease
lock = Lease(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def lease(run_dir) -> dict:
    return json.loads((run_dir / ".lock").read_text())


def write_lease(run_dir, age: float, token: str = "theirs") -> None:
    """As a process of another machine does."""
    run_dir.mkdir(exist_ok=True)
    lease = {"host": "elsewhere", "pid": 123, "kernel": "another", "token": token, "beat": time.time() - age}
    descriptor = os.open(run_dir / ".lock", os.O_WRONLY | os.O_CREAT)
    heartbeat.write(descriptor, lease)
    os.close(descriptor)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Everything a hundred times as fast."""
    for name in ("HEARTBEAT", "EXPIRY", "LISTEN", "POLL", "SETTLE"):
        monkeypatch.setattr(lock, name, getattr(lock, name) / 100)


@pytest.fixture(autouse=True)
def recorded(tmp_path):
    """What a run has recorded, so that its directory stays when it is released."""
    (tmp_path / "manifest.json").touch()


def test_a_start_that_recorded_nothing_leaves_nothing(tmp_path):
    with Lease(tmp_path / "run") as own:
        own.acquire()
        (tmp_path / "run" / ".beats").mkdir()
    assert not (tmp_path / "run").exists()


def unsupported(*_):
    raise OSError("Function not implemented")


def test_a_second_start_is_refused_and_told_who_holds_it(tmp_path):
    with Lease(tmp_path) as first:
        first.acquire()
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on {socket.gethostname()}, "):
            Lease(tmp_path).acquire()
    with Lease(tmp_path) as second:
        second.acquire()


def test_the_lease_of_a_dead_process_is_taken_over_at_once(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on"):
            Lease(tmp_path).acquire()
    finally:
        holder.kill()
        holder.communicate()
    assert lease(tmp_path)["pid"] == holder.pid
    with Lease(tmp_path) as own:
        own.acquire()
        assert lease(tmp_path)["pid"] == os.getpid()


def test_a_lease_of_another_machine_that_is_not_renewed_is_waited_for_and_taken_over(tmp_path, capsys):
    write_lease(tmp_path, age=0.2)  # of 0.6 s
    began = time.monotonic()
    with Lease(tmp_path) as own:
        own.acquire()
        assert lock.EXPIRY - 0.3 < time.monotonic() - began < 10
        assert lease(tmp_path)["pid"] == os.getpid()
    assert "to see whether process 123 on elsewhere, last heartbeat 0 s ago still lives" in capsys.readouterr().err


def test_the_lease_of_a_machine_that_died_long_ago_is_waited_for_only_as_long_as_it_would_beat(tmp_path):
    write_lease(tmp_path, age=11 * lock.EXPIRY)
    began = time.monotonic()
    with Lease(tmp_path) as own:
        own.acquire()
    assert time.monotonic() - began >= lock.LISTEN


@pytest.mark.parametrize("skew", [-11.0, 0.0, 11.0])  # seconds by which that machine's clock is ahead
def test_a_holder_on_another_machine_that_beats_is_respected_whatever_its_clock_says(tmp_path, skew):
    ended = threading.Event()
    write_lease(tmp_path, age=-skew)

    def live():
        while not ended.wait(lock.HEARTBEAT):
            write_lease(tmp_path, age=-skew)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(UserError, match=r"is in use by process 123 on elsewhere, last heartbeat -?\d+ s ago"):
            Lease(tmp_path).acquire()
    finally:
        ended.set()
        thread.join()
    assert lease(tmp_path)["host"] == "elsewhere"


def test_a_kernel_lock_that_another_machine_left_behind_is_not_broken(tmp_path):
    write_lease(tmp_path, age=11 * lock.EXPIRY)
    with open(tmp_path / ".lock") as left:
        fcntl.flock(left, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by process 123 on elsewhere"):
            Lease(tmp_path).acquire()


def test_a_holder_that_was_away_stops_at_its_next_beat_and_writes_nothing(tmp_path):
    told = []
    with Lease(tmp_path, lost=told.append) as own:
        own.acquire()
        write_lease(tmp_path, age=0)
        taken = (tmp_path / ".lock").read_bytes()
        with pytest.raises(UserError, match=f"{tmp_path} was taken over by process 123 on elsewhere"):
            own.require_held()
        deadline = time.monotonic() + 10
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "It writes nothing more" in str(told[0])
    assert (tmp_path / ".lock").read_bytes() == taken  # nor does it release what is another's


def test_a_holder_that_was_away_while_another_came_and_went_stops_too(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 600)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Lease(tmp_path) as away:
        away.acquire()
        away.require_held()
        with Lease(tmp_path) as other:
            other.acquire()
        with pytest.raises(UserError, match="was taken over"):
            away.require_held()


def test_a_lease_that_was_just_renewed_is_not_looked_at(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 600)
    with Lease(tmp_path) as own:
        own.acquire()
        (tmp_path / ".lock").unlink()
        own.require_held(at_most=60)
        with pytest.raises(UserError, match="was deleted"):
            own.require_held()


def test_of_two_that_write_the_same_lease_at_once_one_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SETTLE", 0.5)
    monkeypatch.setattr(fcntl, "flock", unsupported)
    write_lease(tmp_path, age=0)
    results = []

    def start():
        try:
            own = Lease(tmp_path, lost=results.append)
            own.acquire()
            results.append(own)
        except UserError as error:
            results.append(error)

    starts = [threading.Thread(target=start) for _ in range(4)]
    [s.start() for s in starts], [s.join() for s in starts]
    held = [r for r in results if isinstance(r, Lease)]
    assert len(held) == 1 and len(results) == 4
    held[0].require_held()
    held[0].release()


def test_a_refused_start_keeps_nothing_locked(tmp_path, monkeypatch):
    write_lease(tmp_path, age=0)
    refused, real = Lease(tmp_path), Lease._read
    beats = iter(range(9))
    monkeypatch.setattr(Lease, "_read", lambda self: real(self) | {"beat": time.time() + next(beats)})
    with pytest.raises(UserError, match="elsewhere"):
        refused.acquire()
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    refused.release()  # without effect


DAMAGED = [b"", b"{", b"5", b"[]", b"\xff\xfe", b'{"host": "h"}', b'{"host": 1, "pid": "x", "beat": 2}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_lease_is_no_lease(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    with Lease(tmp_path) as own:
        own.acquire()
        assert lease(tmp_path)["pid"] == os.getpid()
        own._stopped.set()  # no beat fixes it
        (tmp_path / ".lock").write_bytes(content)
        with pytest.raises(UserError, match="in use by another process"):
            Lease(tmp_path).acquire()
        own.require_held()


def test_the_heart_beats_and_no_reader_ever_sees_half_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0)
    with Lease(tmp_path) as own:
        own.acquire()
        beats = set()
        while len(beats) < 3:  # a lease that is half written has no beat
            beats.add(lease(tmp_path)["beat"])
    assert lease(tmp_path)["beat"] == 0  # released


def test_a_beat_that_fails_is_followed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0)
    real, calls = os.pwrite, 0

    def failing(*given):
        nonlocal calls
        calls += 1
        if 1 < calls < 5:
            raise OSError("the file server is away")
        return real(*given)

    monkeypatch.setattr(os, "pwrite", failing)
    with Lease(tmp_path) as own:
        own.acquire()
        first = lease(tmp_path)["beat"]
        while lease(tmp_path)["beat"] == first:
            time.sleep(0.001)
        assert calls >= 5


def test_without_kernel_locks_the_lease_decides_on_this_machine_too(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", unsupported)
    with Lease(tmp_path) as own:
        own.acquire()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} "):
            Lease(tmp_path).acquire()
    with Lease(tmp_path) as own:
        own.acquire()
