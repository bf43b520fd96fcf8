"""Comparable times: actions take turns in one process, and their times are compared within each round."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache

import torch
from scipy.stats import quantile_test
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """The seconds that ``action`` takes on ``device``: by CUDA events, or by the clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        action()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    action()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(
    actions: Mapping[str, Callable[[], object]],
    warmup: int,
    rounds: int,
    device: torch.device,
    after_round: Callable[[dict[str, list[float]]], object] = lambda _: None,
) -> dict[str, list[float]]:
    """The seconds of each action, one value per round. Actions take turns; each round begins with the next action.
    ``after_round`` receives the times so far."""
    names = list(actions)
    for action in actions.values():
        for _ in range(warmup):
            action()
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(seconds(actions[name], device))
        after_round(times)
    return times


def traced(action: Callable[[], object], device: torch.device) -> dict:
    """The ``summary`` of the kernels that the device runs during ``action``.

    ``calls_ms`` is the host's time in the calls of CUDA that launch them. It includes waiting while the queue is full.
    """
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        action()
        torch.cuda.synchronize(device)
    events = seen.events()
    found = summary([(e.time_range.start, e.time_range.end, e.name) for e in events if on_gpu(e)])
    calls = sum(e.time_range.elapsed_us() for e in events if not on_gpu(e) and "Launch" in e.name)
    return found | {"calls_ms": calls / 1e3}


def summary(kernels: Iterable[tuple[float, float, str]]) -> dict:
    """Summarises kernels, copies and fills, each given as its start and end in microseconds and its name.

    ms          from the first start to the last end
    busy_ms     during which the device was busy
    kernels     their number
    longest     [name, number, ms in all] of the 30 names that took longest
    """
    kernels = sorted(kernels)
    busy, until, by_name = 0.0, 0.0, defaultdict(list)
    for start, end, name in kernels:
        busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
        by_name[name[:100]].append(end - start)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:30]
    return {
        "ms": (until - kernels[0][0]) / 1e3 if kernels else 0.0,
        "busy_ms": busy / 1e3,
        "kernels": len(kernels),
        "longest": [[name, len(times), sum(times) / 1e3] for name, times in longest],
    }


def on_gpu(event: FunctionEvent) -> bool:
    return event.device_type == DeviceType.CUDA


def paired(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """The median ratio of ``times`` to the ``reference`` of the same round, with its 95 % confidence interval ``low``
    to ``high`` (NaN for fewer than six rounds)."""
    ratios = [t / r for t, r in zip(times, reference, strict=True)]
    low, high = quantile_test(ratios, p=0.5).confidence_interval(0.95)  # by order statistics, for any distribution
    return {"median": statistics.median(ratios), "low": float(low), "high": float(high)}


def warm_up_products(device: torch.device) -> None:
    """Make matrix products on a GPU allocate their workspaces: 32 MB for each thread that computes products. They are
    never freed, and must not be counted as a step's memory."""
    if device.type == "cuda":
        x = torch.ones(64, 64, device=device, requires_grad=True)
        (x @ x).sum().backward()
        torch.cuda.synchronize(device)


@cache
def best_product(device: torch.device, dtype: torch.dtype) -> float:
    """The FLOP/s that this device reaches in practice, in the fastest of the matrix products of a second."""
    n = 8192 if device.type == "cuda" else 1024  # a CPU without bf16 instructions takes 50 times as long as others
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times: list[float] = []
    while len(times) < 3 or sum(times) < 1:
        times.append(seconds(lambda: a @ b, device))
    return 2 * n**3 / min(times)
