"""One writer a run directory: who is refused, who takes over, and what a damaged lease costs."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest

from dlr_pretrain.errors import UserError
from dlr_pretrain.train import lock
from dlr_pretrain.train.lock import EXPIRY, RunLock

HOLDER = """
import sys, time
from pathlib import Path
from dlr_pretrain.train.lock import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


def lease(run_dir) -> dict:
    return json.loads((run_dir / ".lock").read_text())


def write_lease(run_dir, age: float, host: str = "elsewhere") -> None:
    run_dir.mkdir(exist_ok=True)
    (run_dir / ".lock").write_text(json.dumps({"host": host, "pid": 123, "beat": time.time() - age}))


def test_a_second_start_is_refused_and_told_who_holds_it(tmp_path):
    with RunLock(tmp_path) as first:
        first.acquire()
        with pytest.raises(UserError, match=rf"in use by process {os.getpid()} on {socket.gethostname()}, "):
            RunLock(tmp_path).acquire()
    with RunLock(tmp_path) as second:
        second.acquire()


def test_the_lease_of_a_dead_process_is_taken_over_at_once(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on"):
            RunLock(tmp_path).acquire()
    finally:
        holder.kill()
        holder.communicate()
    assert lease(tmp_path)["pid"] == holder.pid
    with RunLock(tmp_path) as own:
        own.acquire()
        assert lease(tmp_path)["pid"] == os.getpid()


def test_a_fresh_lease_of_another_host_is_respected_until_it_expires(tmp_path):
    write_lease(tmp_path, age=EXPIRY - 5)
    with pytest.raises(UserError, match=r"process 123 on elsewhere, last heartbeat 55 s ago. .*its lease ends in 5 s"):
        RunLock(tmp_path).acquire()
    assert lease(tmp_path)["host"] == "elsewhere"  # the refused one left it as it was
    write_lease(tmp_path, age=EXPIRY + 1)
    with RunLock(tmp_path) as own:
        own.acquire()


def test_a_refused_start_keeps_nothing_locked(tmp_path):
    write_lease(tmp_path, age=0)
    refused = RunLock(tmp_path)
    with pytest.raises(UserError, match="elsewhere"):
        refused.acquire()
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    refused.release()  # without effect


DAMAGED = [b"", b"{", b"5", b"[]", b"\xff\xfe", b'{"host": "h"}', b'{"host": 1, "pid": "x", "beat": 2}']


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_lease_is_no_lease(tmp_path, content):
    (tmp_path / ".lock").write_bytes(content)
    with RunLock(tmp_path) as own:
        own.acquire()
        assert lease(tmp_path)["pid"] == os.getpid()
        (tmp_path / ".lock").write_bytes(content)
        with pytest.raises(UserError, match="in use by another process"):
            RunLock(tmp_path).acquire()


def test_the_heart_beats_and_no_reader_ever_sees_half_a_lease(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "HEARTBEAT", 0)
    with RunLock(tmp_path) as own:
        own.acquire()
        beats = {lease(tmp_path)["beat"] for _ in range(500)}
    assert len(beats) > 1
    assert (tmp_path / ".lock").read_text() == ""  # released


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
    with RunLock(tmp_path) as own:
        own.acquire()
        first = lease(tmp_path)["beat"]
        deadline = time.monotonic() + 10
        while lease(tmp_path)["beat"] == first and time.monotonic() < deadline:
            pass
        assert lease(tmp_path)["beat"] > first and calls >= 5


def test_without_kernel_locks_the_lease_decides_on_this_host_too(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with RunLock(tmp_path) as own:
        own.acquire()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} .*its lease ends in 60 s"):
            RunLock(tmp_path).acquire()
    with RunLock(tmp_path) as own:
        own.acquire()
