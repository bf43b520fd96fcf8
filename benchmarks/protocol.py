"""Comparable times: acts take turns in one process, and are compared as ratios within each round."""

from __future__ import annotations

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


def seconds(act: Callable[[], object], device: torch.device) -> float:
    """Seconds from the start of ``act`` to its end on ``device``, by CUDA events or by the clock."""
    if device.type != "cuda":
        start = time.perf_counter()
        act()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(
    acts: Mapping[str, Callable[[], object]],
    warmup: int,
    rounds: int,
    device: torch.device,
    after_round: Callable[[dict[str, list[float]]], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of each act, one value per round. Acts take turns, and each round begins with the next act.
    ``after_round`` is given what was measured so far."""
    names = list(acts)
    for act in acts.values():
        for _ in range(warmup):
            act()
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        first = i % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(seconds(acts[name], device))
        after_round(times)
    return times


def traced(act: Callable[[], object], device: torch.device) -> dict:
    """The ``summary`` of what the device does during ``act``."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        act()
        torch.cuda.synchronize(device)
    return summary([(e.time_range.start, e.time_range.end, e.name) for e in seen.events() if on_gpu(e)])


def summary(kernels: Iterable[tuple[float, float, str]]) -> dict:
    """Of kernels (with copies and fills), given as start and end in microseconds and a name: the milliseconds from the
    first start to the last end, those in which the device was busy, and the number; of the longest names, the same."""
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
    """The median ratio of ``times`` to the ``reference`` of the same round, and an interval, ``low`` to ``high``, that
    contains the distribution's with 95 % probability or more (nan from fewer than six)."""
    ratios = [t / r for t, r in zip(times, reference, strict=True)]
    low, high = quantile_test(ratios, p=0.5).confidence_interval(0.95)  # by order statistics, of any distribution
    return {"median": statistics.median(ratios), "low": float(low), "high": float(high)}


def warm_up_products(device: torch.device) -> None:
    """Make a GPU's matrix products allocate their workspaces, 32 MB for each thread that computes products. They stay
    until the process ends, and must not count for a step."""
    if device.type == "cuda":
        x = torch.ones(64, 64, device=device, requires_grad=True)
        (x @ x).sum().backward()
        torch.cuda.synchronize(device)


@cache
def best_product(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of some large matrix products: what this device reaches in practice."""
    n, repeats = (8192, 20) if device.type == "cuda" else (2048, 50)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * n**3 / min(seconds(lambda: a @ b, device) for _ in range(repeats))
