"""One writer per run directory: who is refused, who takes over, and what a damaged beat means."""

import fcntl
import json
import os
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.train import heartbeat as module
from dlr_pretrain.train.heartbeat import Heartbeat
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import record_state, recorded_end
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import wait_for

CFG = SimpleNamespace(run=SimpleNamespace(timeout_minutes=None))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Everything a hundred times as fast."""
    for name in ("INTERVAL", "EXPIRY"):
        monkeypatch.setattr(module, name, getattr(module, name) / 100)


@pytest.fixture
def no_flock(monkeypatch):
    def unsupported(*_):
        raise OSError("Function not implemented")

    monkeypatch.setattr(fcntl, "flock", unsupported)


def take(run_dir) -> Heartbeat:
    own = Heartbeat(CFG)
    own.start(run_dir, own.take(run_dir))
    return own


def beat(run_dir) -> dict:
    return json.loads((run_dir / ".beats" / "0").read_text())


def write_beat(run_dir, when: float) -> None:
    """Write the beat of a process on another machine."""
    (run_dir / ".beats").mkdir(parents=True, exist_ok=True)
    record = {"host": "elsewhere", "pid": 7, "machine": "other", "token": "theirs", "time": when}
    descriptor = os.open(run_dir / ".beats" / "0", os.O_WRONLY | os.O_CREAT)
    os.pwrite(descriptor, json.dumps(record).ljust(module.BEAT_BYTES).encode(), 0)
    os.close(descriptor)


@pytest.mark.parametrize("flock", [True, False], ids=["flock", "no flock"])
def test_a_second_start_is_refused_and_names_the_holder(tmp_path, request, monkeypatch, flock):
    flock or request.getfixturevalue("no_flock")
    monkeypatch.setattr(module, "EXPIRY", 60.0)  # a busy disk may delay the holder's beat
    with take(tmp_path / "run"), pytest.raises(UserError, match=f"in use by process {os.getpid()} on "):
        take(tmp_path / "run")
    assert beat(tmp_path / "run")["time"] == 0
    with take(tmp_path / "run") as second:
        second.require_held()


def test_the_directory_of_a_dead_process_is_taken_over(tmp_path):
    if (holder := os.fork()) == 0:
        try:
            take(tmp_path)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(holder, 0)
    assert beat(tmp_path)["pid"] == holder
    with take(tmp_path):
        assert beat(tmp_path)["pid"] == os.getpid()


@pytest.mark.parametrize("age", [-7000.0, 0.2, 7000.0])  # the clocks of machines differ
def test_a_beat_of_another_machine_that_stops_is_taken_over(tmp_path, capsys, age):
    write_beat(tmp_path, time.time() - age)
    with take(tmp_path):
        assert beat(tmp_path)["pid"] == os.getpid()
    assert "to see whether process 7 on elsewhere, last heartbeat" in capsys.readouterr().err


@pytest.mark.parametrize("skew", [-7000.0, 7000.0])
def test_a_beat_of_another_machine_that_goes_on_is_respected(tmp_path, monkeypatch, skew):
    times, read = iter(range(9)), module.read_beat

    def renewed(*of):
        write_beat(tmp_path, time.time() + skew + next(times))
        return read(*of)

    monkeypatch.setattr(module, "read_beat", renewed)
    in_use = r"is in use by process 7 on elsewhere, last heartbeat -?[0-9]+ s ago"
    with Heartbeat(CFG) as own, pytest.raises(UserError, match=in_use):
        own.take(tmp_path)
    with open(tmp_path / ".beats" / "0") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a refused start keeps nothing locked


def test_a_file_lock_of_another_machine_is_not_broken(tmp_path):
    write_beat(tmp_path, time.time())
    with open(tmp_path / ".beats" / "0") as left:
        fcntl.flock(left, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="in use by process 7 on elsewhere"):
            take(tmp_path)


def test_a_holder_that_was_suspended_stops_and_writes_nothing(tmp_path, monkeypatch):
    lost, told = threading.Event(), []

    def exit_process(error):
        told.append(error)
        lost.set()

    monkeypatch.setattr(module, "exit_process", exit_process)
    with take(tmp_path) as own:
        for when in (time.time(), 0.0):  # another start holds it, or has come and gone
            write_beat(tmp_path, when)
            taken = f"{tmp_path} was taken over by (process 7 on elsewhere|another process)"
            with pytest.raises(UserError, match=taken):
                own.require_held()
        assert lost.wait(600)
        assert "writes nothing more" in str(told[0])
    assert beat(tmp_path)["token"] == "theirs"  # it does not release another's lease either


def test_a_damaged_beat_holds_nothing(tmp_path):
    for content in (b"", b"{", b"5", b"[]", b"\xff\xfe", b'{"host": "h"}', b'{"host": 1, "pid": "x", "time": 2}'):
        (tmp_path / ".beats").mkdir(exist_ok=True)
        (tmp_path / ".beats" / "0").write_bytes(content)
        with take(tmp_path) as own:
            assert beat(tmp_path)["pid"] == os.getpid()
            own.require_held()


def test_a_failed_renewal_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "INTERVAL", 0)
    real, calls = os.pwrite, 0

    def failing(*given):
        nonlocal calls
        calls += 1
        if 2 < calls < 6:
            raise OSError("the file server is away")
        return real(*given)

    monkeypatch.setattr(os, "pwrite", failing)
    with take(tmp_path):
        beats = set()
        assert wait_for(lambda: beats.add(beat(tmp_path)["time"]) or len(beats) == 3, 600)
    assert calls > 6


def test_a_rank_that_cannot_connect_ends_before_its_first_step(tmp_path, monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(module, "exit_process", lambda error, say: ended.set() if "no step for" in str(error) else None)
    own = Heartbeat(SimpleNamespace(run=SimpleNamespace(timeout_minutes=100)))
    own.start(tmp_path, own.take(tmp_path))
    with own:
        with own.may_wait():
            assert not ended.wait(10 * module.INTERVAL)
        with own.may_wait(2 * module.INTERVAL):
            assert ended.wait(600)
    assert "no progress for" in (tmp_path / "stacks" / "rank_0.txt").read_text()


def test_the_end_of_a_long_wait_is_not_a_hang(monkeypatch):
    """It ends while the watching thread reads the limits and the signs of progress."""
    own, ended, turns = Heartbeat(SimpleNamespace(run=SimpleNamespace(timeout_minutes=1e-12))), [], [False] * 99
    own.step, wait = 1, own.may_wait()

    class Limits(list):
        def __iter__(self):
            if not turns:
                wait.__exit__(None, None, None)
            return super().__iter__()

    monkeypatch.setattr(own, "_end", ended.append)
    monkeypatch.setattr(own, "_stopped", SimpleNamespace(wait=lambda _: not turns or turns.pop()))
    own._limits = Limits()
    wait.__enter__()
    own._watch()
    assert not own._limits and not ended


def record(folder) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_a_holder_that_has_lost_the_run_records_no_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "exit_process", lambda error: None)
    with pytest.raises(UserError, match="my own"), take(tmp_path) as own, recorded_end(tmp_path, own):
        record_state(tmp_path, "running")
        write_beat(tmp_path, time.time())
        before = record(tmp_path)
        raise UserError("my own")
    assert record(tmp_path) == before, "the new holder's end would not be recorded"


def test_rank_0_decides_nothing_on_a_run_that_it_has_lost(tmp_path, monkeypatch, words):
    monkeypatch.setattr(module, "exit_process", lambda error: None)
    with Ranks(load(words())) as ranks, ranks.heartbeat:
        ranks.start_heartbeat(tmp_path)
        ranks.on_main(lambda: (tmp_path / "one").touch())
        write_beat(tmp_path, time.time())
        with pytest.raises(UserError, match="was taken over"):
            ranks.on_main(lambda: (tmp_path / "two").touch())
    assert (tmp_path / "one").exists() and not (tmp_path / "two").exists()


@pytest.mark.parametrize("answers", [True, False], ids=["the disk answers", "the disk hangs"])
def test_an_end_by_a_hang_is_recorded(tmp_path, monkeypatch, answers):
    ended, told, disk = threading.Event(), [], threading.Event()

    def exit_process(error, say=True):
        told.append(error)
        ended.set()

    monkeypatch.setattr(module, "exit_process", exit_process)
    own = Heartbeat(SimpleNamespace(run=SimpleNamespace(timeout_minutes=0.001)))
    own.start(tmp_path, own.take(tmp_path))
    with own, recorded_end(tmp_path, own):
        record_state(tmp_path, "running")
        if not answers:
            monkeypatch.setattr(module, "DISK_SECONDS", 0.1)
            monkeypatch.setattr(os, "fsync", lambda _: disk.wait(600))
        own.stepped(1)
        assert ended.wait(600)
        disk.set()
        state = record(tmp_path)["state"]
        if answers:
            assert (state["name"], "no step for" in state["reason"]) == ("failed", True)
        else:
            assert f"the disk of {tmp_path} does not answer. The same command continues" in str(told[0])
        assert told[0].exit_code == 4
