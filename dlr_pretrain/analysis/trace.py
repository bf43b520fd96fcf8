"""Tables of the time of traced steps, by the parts of a step and by kernel. Needs no torch.

``torch.profiler`` exports the trace. A step is a ``ProfilerStep#`` range in which an update begins. The names in
``PARTS`` are ranges, too, and so is ``ASIDE``: evaluations and saves, which are left out.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dlr_pretrain.util.text import table

PARTS = ("data", "publish", "forward", "backward", "communication", "optimizer")
ASIDE = "aside"
KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events on a GPU
LAUNCHES = ("cuda_runtime", "cuda_driver")
TOP = 15  # kernels that are shown


@dataclass
class Tables:
    """Times in milliseconds a step. ``host`` and ``gpu`` are by part, with "other"; ``gpu`` is empty without a GPU.

    ``kernels`` are (name, calls a step, time a step), the longest first: a GPU's kernels, or without one the operators
    by their own time. ``collectives`` is the time of gloo's collectives, which run beside the step's own thread.
    """

    steps: int
    wall: float
    host: dict[str, float]
    gpu: dict[str, float]
    collectives: float
    kernels: list[tuple[str, float, float]] = field(default_factory=list)


def read_trace(path: Path) -> list[dict]:
    """The complete events of an exported trace, gzipped or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X" and "dur" in event]


def tables(events: list[dict]) -> Tables:
    """The tables of a trace's events. Raises ValueError if it holds no step."""
    ranges = [e for e in events if e.get("cat") == "user_annotation"]
    updates = [e["ts"] for e in ranges if e["name"] == "optimizer"]
    steps = [e for e in ranges if e["name"].startswith("ProfilerStep#") and any(_lies_in(ts, e) for ts in updates)]
    if not steps:
        raise ValueError("the trace holds no step")
    pauses = [e for e in ranges if e["name"] == ASIDE and any(_lies_in(e["ts"], step) for step in steps)]
    events = [e for e in events if e.get("cat") in KERNELS or not any(_lies_in(e["ts"], pause) for pause in pauses)]
    launched = {_correlation(e): e["ts"] for e in events if e.get("cat") in LAUNCHES}
    kernels = [e for e in events if e.get("cat") in KERNELS and (not pauses or _correlation(e) in launched)]
    inside = [e for e in events if e.get("cat") not in KERNELS and any(_lies_in(e["ts"], step) for step in steps)]
    number, wall = len(steps), sum(e["dur"] for e in steps) - sum(e["dur"] for e in pauses)

    parts = [e for e in inside if e.get("cat") == "user_annotation" and e["name"] in PARTS]
    host = dict.fromkeys(PARTS, 0.0) | _total(own_times(parts), lambda e: e["name"])
    host["other"] = wall - sum(host.values())
    gpu = dict.fromkeys(host, 0.0) if kernels else {}
    for kernel in kernels:
        gpu[_part_of(kernel, parts, launched.get(_correlation(kernel)))] += kernel["dur"]

    gloo = [e for e in inside if e["name"].startswith("gloo:")]
    operators = [e for e in inside if e.get("cat") == "cpu_op"]
    timed = [(e, e["dur"]) for e in kernels] or own_times(operators)
    times, calls = _total(timed, lambda e: e["name"]), Counter(e["name"] for e, _ in timed)
    longest = sorted(times, key=lambda name: -times[name])[:TOP]
    each = 1000 * number
    return Tables(
        steps=number,
        wall=wall / each,
        host={name: time / each for name, time in host.items()},
        gpu={name: time / each for name, time in gpu.items()},
        collectives=sum(e["dur"] for e in gloo) / each,
        kernels=[(name, calls[name] / number, times[name] / each) for name in longest],
    )


def own_times(events: Iterable[dict]) -> list[tuple[dict, float]]:
    """Each event with its own time: its duration without the events nested in it on the same thread."""
    threads = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    own = []
    for of_thread in threads.values():
        open_events: list[list] = []
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while open_events and open_events[-1][0]["ts"] + open_events[-1][0]["dur"] <= event["ts"]:
                open_events.pop()
            if open_events:
                open_events[-1][1] -= event["dur"]
            open_events.append([event, event["dur"]])
            own.append(open_events[-1])
    return [(event, time) for event, time in own]


def _part_of(kernel: dict, parts: list[dict], launched: float | None) -> str:
    """The innermost part that was open when any thread launched ``kernel``; for NCCL's kernels, communication."""
    if "nccl" in kernel["name"].lower():
        return "communication"
    if launched is None:
        return "other"
    around = [p for p in parts if _lies_in(launched, p)]
    return min(around, key=lambda p: p["dur"])["name"] if around else "other"


def _lies_in(time: float, event: dict) -> bool:
    return event["ts"] <= time < event["ts"] + event["dur"]


def _correlation(event: dict) -> object:
    return event.get("args", {}).get("correlation")


def _total(timed: Iterable[tuple[dict, float]], key: Callable[[dict], str]) -> dict[str, float]:
    totals: dict[str, float] = defaultdict(float)
    for event, time in timed:
        totals[key(event)] += time
    return dict(totals)


def render(found: Tables, title: str) -> str:
    """The tables as Markdown."""
    gpu = bool(found.gpu)
    lines = [f"# {title}", "", f"{found.steps} steps, {found.wall:,.2f} ms each on the host.", ""]
    rows = [
        [name, f"{time:,.2f}", f"{time / found.wall:.1%}", *([f"{found.gpu[name]:,.2f}"] if gpu else [])]
        for name, time in found.host.items()
    ]
    header = ["part", "host, ms a step", "share", *(["GPU, ms a step"] if gpu else [])]
    lines.append(table(header, rows, right=range(1, 4)))
    if gpu or found.collectives:
        lines.append("")
    if gpu:
        lines.append(
            f"The GPU was at work for {sum(found.gpu.values()):,.2f} ms a step, kernels that overlap counted each; a "
            "kernel belongs to the part that launched it, those of NCCL to communication."
        )
    elif found.collectives:
        lines.append(f"Collectives were under way for {found.collectives:,.2f} ms a step, beside the parts.")
    what = "kernel" if gpu else "operator, in itself"
    rows = [
        [f"`{name if len(name) <= 90 else name[:87] + '...'}`", f"{n:,.1f}", f"{t:,.3f}"]
        for name, n, t in found.kernels
    ]
    lines += ["", table([what, "calls a step", "ms a step"], rows, right=range(1, 3))]
    return "\n".join(lines) + "\n"
