"""One writer per run directory: who is refused, who takes over, and what a damaged lease costs."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from dlr_pretrain.train import lease as module
from dlr_pretrain.train.lease import Lease
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import write_beat

HOLDER = """
import sys, time
from pathlib import Path
from dlr_pretrain.train.lease import Lease
lease = Lease(Path(sys.argv[1]))
lease.acquire()
print("held", flush=True)
time.sleep(600)
"""


def lease(run_dir) -> dict:
    return json.loads((run_dir / ".lock").read_text())


def write_lease(run_dir, beat: float) -> None:
    """As a process of another machine does."""
    descriptor = os.open(run_dir / ".lock", os.O_WRONLY | os.O_CREAT)
    write_beat(descriptor, {"host": "elsewhere", "pid": 7, "machine": "other", "token": "theirs", "beat": beat})
    os.close(descriptor)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Everything a hundred times as fast."""
    for name in ("HEARTBEAT", "EXPIRY", "POLL", "RACE"):
        monkeypatch.setattr(module, name, getattr(module, name) / 100)


@pytest.fixture
def no_flock(monkeypatch):
    def unsupported(*_):
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)


@pytest.mark.parametrize("flock", [True, False], ids=["flock", "no flock"])
def test_a_second_start_is_refused_and_told_who_holds_it(tmp_path, request, flock):
    flock or request.getfixturevalue("no_flock")
    with Lease(tmp_path / "run") as first:
        first.acquire()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
            Lease(tmp_path / "run").acquire()
    assert lease(tmp_path / "run")["beat"] == 0
    with Lease(tmp_path / "run") as second:
        second.acquire()


def test_the_lease_of_a_dead_process_is_taken_over(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} on"):
        Lease(tmp_path).acquire()
    holder.kill()
    holder.communicate()
    assert lease(tmp_path)["pid"] == holder.pid
    with Lease(tmp_path) as own:
        own.acquire()
        assert lease(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("age", [-7000.0, 0.2, 7000.0])  # the clocks of machines differ
def test_a_lease_of_another_machine_is_taken_over_if_it_is_not_renewed(tmp_path, capsys, age):
    write_lease(tmp_path, time.time() - age)
    with Lease(tmp_path) as own:
        own.acquire()
        assert lease(tmp_path)["pid"] == os.getpid()
    assert "to see whether process 7 on elsewhere, last heartbeat" in capsys.readouterr().err


@pytest.mark.parametrize("skew", [-7000.0, 0.0, 7000.0])
def test_a_holder_on_another_machine_that_renews_it_is_respected(tmp_path, monkeypatch, skew):
    times, read = iter(range(9)), module.read_beat

    def renewed(path):
        write_lease(tmp_path, time.time() + skew + next(times))
        return read(path)

    monkeypatch.setattr(module, "read_beat", renewed)
    refused = Lease(tmp_path)
    with pytest.raises(UserError, match=r"is in use by process 7 on elsewhere, last heartbeat -?[0-9]+ s ago"):
        refused.acquire()
    with open(tmp_path / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a refused start keeps nothing locked
    refused.release()  # without effect


def test_a_file_lock_that_another_machine_left_behind_is_not_broken(tmp_path):
    write_lease(tmp_path, time.time())
    with open(tmp_path / ".lock") as left:
        fcntl.flock(left, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
            Lease(tmp_path).acquire()


def test_a_holder_that_was_suspended_stops_and_writes_nothing(tmp_path):
    lost, told = threading.Event(), []
    with Lease(tmp_path, lost=lambda error: (told.append(error), lost.set())) as own:
        own.acquire()
        write_lease(tmp_path, time.time())
        taken = (tmp_path / ".lock").read_bytes()
        with pytest.raises(UserError, match=f"{tmp_path} was taken over by process 7 on elsewhere"):
            own.require_held()
        lost.wait()
        assert "It writes nothing more" in str(told[0])
    assert (tmp_path / ".lock").read_bytes() == taken  # nor does it release what is another's


@pytest.mark.usefixtures("no_flock")
def test_a_holder_that_was_suspended_while_another_came_and_went_stops_too(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT", 600)
    with Lease(tmp_path) as away:
        away.acquire()
        away.require_held()
        with Lease(tmp_path) as other:
            other.acquire()
        with pytest.raises(UserError, match="was taken over"):
            away.require_held()
        (tmp_path / ".lock").unlink()
        away.require_held(at_most=60)  # just renewed: not read
        with pytest.raises(UserError, match="was deleted"):
            away.require_held()


@pytest.mark.usefixtures("no_flock")
def test_of_several_that_write_the_lease_at_once_one_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RACE", 0.5)
    write_lease(tmp_path, time.time())
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
    (held,) = (r for r in results if isinstance(r, Lease))
    assert len(results) == 4
    held.require_held()
    held.release()


def test_a_damaged_lease_is_no_lease(tmp_path):
    for content in (b"", b"{", b"5", b"[]", b"\xff\xfe", b'{"host": "h"}', b'{"host": 1, "pid": "x", "beat": 2}'):
        (tmp_path / ".lock").write_bytes(content)
        with Lease(tmp_path) as own:
            own.acquire()
            assert lease(tmp_path)["pid"] == os.getpid()
            (tmp_path / ".lock").write_bytes(content)
            own.require_held()


def test_a_renewal_that_fails_is_followed_by_the_next_and_no_reader_sees_half_of_one(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HEARTBEAT", 0)
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
        beats = set()
        while len(beats) < 3:
            beats.add(lease(tmp_path)["beat"])
    assert calls > 5
