"""Results as Markdown: what was measured, on what, by which command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from dlr_pretrain.train.record import git_state, versions

ABOUT = ("command", "machine", "device", "python", "versions", "commit", "run", "batch")


def about() -> dict[str, str]:
    """Command, machine, versions and commit."""
    return {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit": git_state() or "unknown",
    }


def machine() -> str:
    """Processor, cores and load of this machine."""
    listed = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in listed if line.startswith("model name")]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores{load}, {platform.system()}"


def header(found: dict) -> str:
    """A list with a line for each fact of ``ABOUT`` that ``found`` has."""
    lines = []
    for name in ABOUT:
        value = found.get(name)
        if isinstance(value, dict):
            value = ", ".join(f"{key} {shown}" for key, shown in value.items())
        if value:
            lines.append(f"- {name}: `{value}`" if name == "command" else f"- {name}: {value}")
    return "\n".join(lines)


def table(columns: list[str], rows: Iterable[list[str]]) -> str:
    """A Markdown table, padded so that its source is readable too. The first column is left-aligned, others right."""
    rows = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(first: str, *others: str) -> str:
        cells = (other.rjust(width) for other, width in zip(others, widths[1:], strict=True))
        return "| " + " | ".join((first.ljust(widths[0]), *cells)) + " |"

    rule = "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])])
    return "\n".join([line(*rows[0]), f"|{rule}|", *(line(*row) for row in rows[1:])])


def steps(found: dict) -> str:
    """A table of the arms of ``step.measure``; columns without a value are omitted."""
    columns = {
        "arm": lambda a: a["name"],
        "ms/step": lambda a: number(a["ms"]),
        "ratio": lambda a: ratio(a["ratio"]),
        "positions/s": lambda a: number(a["tokens_per_second"]),
        "real tokens/s": lambda a: number(a["real_tokens_per_second"]) if a["real_tokens_per_second"] else "",
        "MFU, datasheet": lambda a: percent(a, "mfu", "datasheet"),
        "MFU, measured": lambda a: percent(a, "mfu", "measured"),
        "HFU, measured": lambda a: percent(a, "hfu", "measured") if a.get("hfu") != a.get("mfu") else "",
        "peak GB": lambda a: f"{a['memory']['peak'] / 1e9:.2f}" if a.get("memory") else "",
        "compile s, cold": lambda a: f"{a['compile_s']['cold']:.1f}" if a.get("compile_s") else "",
        "warm": lambda a: f"{a['compile_s']['warm']:.1f}" if a.get("compile_s") else "",
        "losses": lambda a: parity(a["parity"]),
    }
    filled = {name: [cell(arm) for arm in found["arms"]] for name, cell in columns.items()}
    filled = {name: cells for name, cells in filled.items() if any(cells)}
    notes = ["ratio: seconds over the first arm's of the same round, median [quartiles]; the second row is its noise.",
             "losses: largest relative difference in 20 updates from the reference / what it may be."]  # fmt: skip
    peaks = {name: f"{value / 1e12:.3g} TFLOP/s {name}" for name, value in found["peak_flops"].items() if value}
    notes.append(f"peak: {', '.join(peaks.values())} (measured: large products in the working dtype).")
    if found["sm_clock_mhz"]:
        notes.append("SM clock before and after: {} and {} MHz.".format(*found["sm_clock_mhz"]))
    rows = [list(row) for row in zip(*filled.values(), strict=True)]
    return "\n".join([table(list(filled), rows), "", *notes])


def folds(found: dict) -> str:
    """A table of the models of ``folding.measure``."""

    def row(of: dict) -> list[str]:
        difference, equal = of["largest_difference"], of["equal"]
        return [of["name"], number(of["ms"]), ratio(of["ratio"]), "" if difference is None else f"{difference:.1e}",
                "" if equal is None else "yes" if equal else "NO"]  # fmt: skip

    columns = ["logits of", "ms", "ratio to the base", "largest difference from the folded", "equal bit for bit"]
    return table(columns, map(row, found["models"]))


def memories(found: dict) -> str:
    rows = [[m["name"], *(gigabytes(m.get(key)) for key in ("peak", "reserved", "estimate")),
             f"{m['peak'] / m['estimate']:.3f}"] for m in found["settings"]]  # fmt: skip
    return table(["setting", "peak GB", "reserved GB", "plan's GB (eager)", "peak / plan's"], rows)


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def ratio(of: dict[str, float]) -> str:
    return f"{of['median']:.4f} [{of['low']:.4f}, {of['high']:.4f}]"


def percent(arm: dict, name: str, peak: str) -> str:
    share = arm.get(name, {}).get(peak)
    return "" if share is None else f"{100 * share:.1f}%"


def parity(verdict: dict | None) -> str:
    if verdict is None:
        return "not compared"
    text = f"{verdict['difference']:.1e} / {verdict['bound']:.1e}"
    return text if verdict["passes"] else f"DIFFER, the times do not count: {text}"


def gigabytes(value: int | None) -> str:
    return "" if value is None else f"{value / 1e9:.2f}"
