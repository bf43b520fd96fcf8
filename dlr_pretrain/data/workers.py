"""Runs jobs in processes that end when their parent ends, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

from dlr_pretrain.util.errors import UserError

Job = TypeVar("Job")
Event = TypeVar("Event")
END = None  # marks the end of the jobs, and of a job's events


def in_processes(
    work: Callable[..., Iterator[Event]], shared: tuple, jobs: Iterable[Job], workers: int
) -> Iterator[Event]:
    """The events of ``work(*shared, job)`` for every job, as they arrive; each process does one job at a time.

    ``work`` must be a module's function, and all values picklable. A UserError ends all jobs and is raised here.
    """
    # The fork server imports once what all workers need, and has none of this process's threads.
    forkserver = "forkserver" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if forkserver else "spawn")
    if forkserver:
        context.set_forkserver_preload([work.__module__])
    waiting, processes = iter(jobs), {}
    try:
        for job in islice(waiting, workers):
            pipe, theirs = context.Pipe()
            processes[pipe] = context.Process(target=_serve, args=(theirs, work, shared), daemon=True)
            processes[pipe].start()
            theirs.close()
            pipe.send(job)
        while processes:
            for pipe in wait(list(processes)):
                event = _received(pipe, processes[pipe])
                if event is not END:
                    yield event
                    continue
                pipe.send(job := next(waiting, END))
                if job is END:
                    processes.pop(pipe).join()
    finally:
        for process in processes.values():
            process.kill()
            process.join()


def _received(pipe: Connection, process: BaseProcess) -> object:
    try:
        message = pipe.recv()
    except EOFError:
        process.join()
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
        fix = "Use fewer --workers if memory ran out"
        raise UserError(f"a worker process ended unexpectedly ({how}). {fix}; finished shards are kept") from None
    if isinstance(message, Exception):
        raise message
    return message


def _serve(pipe: Connection, work: Callable[..., Iterator], shared: tuple) -> None:
    """Do the jobs that arrive through ``pipe`` until END arrives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(BrokenPipeError):
        for job in iter(pipe.recv, END):
            try:
                for event in work(*shared, job):
                    pipe.send(event)
            except UserError as error:
                pipe.send(error)
            pipe.send(END)


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)
