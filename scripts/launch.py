"""torchrun for jobs that are preempted: ``python scripts/launch.py --nproc-per-node 8 train.py scale=1b``.

It takes the arguments of torchrun, and differs in how it handles signals and failures. It passes SIGTERM, SIGINT,
SIGHUP, SIGUSR1 and SIGUSR2 on to this node's workers, and waits for as long as they need to save. (torchrun kills them
30 s after SIGTERM, and dies of SIGUSR1.) It exits with the code of the worker that ended first, such as 75 if the run
has saved and the same command continues it. (torchrun exits with 1 after any failure.)
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from dlr_pretrain.util.errors import EXIT_CONFIG, EXIT_FAILED, EXIT_LOST, EXIT_STOPPED
from dlr_pretrain.util.process import ignore_stop_signals, stop_signals

USAGE = """usage: launch.py [options of torchrun] train.py [key=value ...]

options, of which torchrun --help describes more:
  --nproc-per-node N         processes on this machine: one for each GPU
  --nnodes N                 machines (default: 1)
  --rdzv-backend c10d        how several machines meet
  --rdzv-endpoint HOST:PORT  the first machine, and a free port of it
  --rdzv-id NAME             the job's name, the same on all machines

example, on two machines:
  launch.py --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id 1 \\
      train.py scale=1b backbone=cola dlr=on"""
EXPLAINED = (EXIT_CONFIG, EXIT_FAILED, EXIT_LOST, EXIT_STOPPED)  # exit codes whose reason a worker has printed
GRACE = 60.0  # seconds that torchrun has to end after its workers have ended


def main() -> int:
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(f"{__doc__}\n{USAGE}")
        return 0
    if not sys.argv[1:]:
        print(USAGE, file=sys.stderr)
        return EXIT_CONFIG
    asked: set[int] = set()
    begun = threading.Event()  # set once workers have been started

    def pass_on(number: int, _frame) -> None:
        asked.add(number)
        running = workers()
        if not running and not begun.is_set():
            ignore_stop_signals()
            sys.exit(EXIT_STOPPED)
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    for number in stop_signals():
        signal.signal(number, pass_on)
    threading.Thread(target=end_with_workers, args=(asked, begun), daemon=True).start()
    try:
        return launch(asked)
    finally:
        ignore_stop_signals()


def launch(asked: set[int]) -> int:
    """Run torchrun; returns the exit code. ``asked`` holds the signals that have been passed on."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run

    given = get_args_parser().parse_args(sys.argv[1:])
    if given.max_restarts:
        print("error: --max-restarts: a run that has stopped would be started again. Leave it out", file=sys.stderr)
        return EXIT_CONFIG
    given.signals_to_handle = "SIGQUIT"  # torchrun must leave the others to pass_on
    try:
        run(given)
    except ChildFailedError as error:
        rank, first = error.get_first_failure()
        code = exit_code(first.exitcode, asked)
        if code not in EXPLAINED:
            print(error, file=sys.stderr)
        elif rank != 0 and code != EXIT_STOPPED:  # only rank 0 prints, and only this rank may have the reason
            said = first.message["message"] if isinstance(first.message, dict) else first.message
            print(f"error: rank {rank}: {said}", file=sys.stderr)
        return code
    except ValueError as error:  # such as --nproc-per-node=x
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except RendezvousError as error:  # most likely the node that hosts it is lost
        print(f"error: the rendezvous of the nodes at {given.rdzv_endpoint} is lost: {error}", file=sys.stderr)
        return EXIT_STOPPED if asked else EXIT_LOST
    return 0


def end_with_workers(asked: set[int], begun: threading.Event) -> None:
    """End this process after its workers if torchrun does not: it may wait to report the end to a node that is gone.

    Sets ``begun`` once workers have been started.
    """
    while not workers():
        time.sleep(0.05)
    begun.set()
    ended: dict[int, int] = {}  # the workers' exit codes, in the order in which they ended
    since = time.monotonic()
    while True:
        time.sleep(1)
        unreaped = workers()
        for pid in unreaped:
            with suppress(ChildProcessError):
                ending = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ending is not None:
                    status = ending.si_status
                    ended.setdefault(pid, status if ending.si_code == os.CLD_EXITED else -status)
        if not unreaped or any(pid not in ended for pid in unreaped):
            since = time.monotonic()
        elif time.monotonic() - since > GRACE:
            print(f"error: torchrun has not ended {GRACE:.0f} s after its workers", file=sys.stderr, flush=True)
            os._exit(exit_code(next(filter(None, ended.values()), 0), asked))


def exit_code(ended: int, asked: set[int]) -> int:
    """This process's exit code, from a worker's in the form of ``Popen``: negative after a signal.

    A worker that dies of a signal passed on to it does not handle signals yet, so it has nothing to save either.
    """
    if -ended in asked:
        return EXIT_STOPPED
    return ended if ended >= 0 else 128 - ended


def workers() -> list[int]:
    """The child processes of this one (Linux)."""
    pid = os.getpid()
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


if __name__ == "__main__":
    sys.exit(main())
