"""Results as Markdown and JSON, with their command, machine, versions and commit."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from dlr_pretrain.train.record import git_state, versions
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import markdown_table

NOISE = ", once more"  # suffix of the row of the first variant's second measurement
Columns = Mapping[str, Callable[[dict], str | bool | None]]


def about() -> dict[str, str]:
    """Command, machine, versions and commit."""
    listed = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in listed if line.startswith("model name")]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return {
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "machine": f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores{load}, {platform.system()}",
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit": git_state() or "unknown",
        **({"rehearsal": "no number means anything"} if os.environ.get("GPU_REHEARSAL") else {}),
    }


def write(found: dict, title: str, columns: Columns, file: Path | None) -> None:
    """Print the facts and the table of ``found``, and write all of it to ``file``."""
    print(f"# {title}\n")
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {shown}" for key, shown in value.items())
        if isinstance(value, str):
            print(f"- {name}: `{value}`" if name == "command" else f"- {name}: {value}")
    print(f"\n{table(columns, found['variants'])}")
    if file:
        save(found, file)


def save(found: dict, file: Path) -> None:
    """Write ``found``. A kill leaves either the old results or the new ones, whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_durably(file, json.dumps(found, indent=1) + "\n")


def table(columns: Columns, variants: Sequence[dict]) -> str:
    """A Markdown table of ``variants``, without empty columns."""
    filled = {name: [cell(variant) or "" for variant in variants] for name, cell in columns.items()}
    filled = {name: cells for name, cells in filled.items() if any(cells)}
    return markdown_table([*filled], zip(*filled.values(), strict=True), right=range(1, len(filled)))


def ratio(variant: dict) -> str | None:
    return "ratio" in variant and "{median:.4f} [{low:.4f}, {high:.4f}]".format(**variant["ratio"])


def parity(variant: dict) -> str:
    verdict = variant["parity"]
    if "error" in variant:
        return f"not measured: {variant['error']}"
    if verdict is None:
        return "unchecked"
    text = f"{verdict['difference']:.1e} / {verdict['bound']:.1e}"
    return text if verdict["passes"] else f"DIFFER, the times do not count: {text}"


def share(variant: dict, peak: str) -> str | None:
    found = variant.get("mfu", {}).get(peak)
    return found and f"{100 * found:.1f}%"


STEPS: Columns = {  # ratio: median [95 % interval] of the seconds over the first variant's in the same round
    "variant": lambda v: v["name"],
    "ms/step": lambda v: "ms" in v and f"{v['ms']:.4g}",
    "ratio": ratio,
    "tokens/s": lambda v: "ms" in v and f"{v['tokens_per_second']:,.0f}",
    "MFU, data sheet": lambda v: share(v, "datasheet"),
    "MFU, large products": lambda v: share(v, "measured"),
    "device busy": lambda v: "traced" in v and f"{v['traced']['busy_ms']:.4g} of {v['traced']['ms']:.4g} ms",
    "parity / bound": parity,  # the largest relative difference of a loss in 20 updates
}
MEMORY: Columns = {
    "variant": lambda v: v["name"],
    "peak GB": lambda v: f"{v['peak'] / 1e9:.2f}",
    "plan's GB (eager)": lambda v: f"{v['plan'] / 1e9:.2f}",
    "peak / plan's": lambda v: f"{v['peak'] / v['plan']:.3f}",
    "first step s": lambda v: f"{v['first_step_s']:.3g}",
    "step s": lambda v: f"{v['step_s']:.3g}",
}
DATA: Columns = {
    "measure": lambda v: f"{v['name']}, {v['unit']}",
    "median": lambda v: f"{median(v['values']):.4g}",
    "lowest": lambda v: f"{min(v['values']):.4g}",
    "highest": lambda v: f"{max(v['values']):.4g}",
    "by processor time": lambda v: "processor" in v and f"{median(v['processor']):.4g}",
}
SUMS: Columns = {
    "ranks": lambda v: v["name"],
    "bf16: lost": lambda v: f"{v['lost_bf16']:.1%}",
    "error": lambda v: f"{v['error_bf16']:.1%}",
    "fp32: lost": lambda v: f"{v['lost_fp32']:.1%}",
    "error, fp32": lambda v: f"{v['error_fp32']:.2%}",
}
TRAINING: Columns = {
    "variant": lambda v: v["name"],
    "steps": lambda v: str(v["steps"]),
    "tokens/s": lambda v: v["tokens_per_second"] and f"{v['tokens_per_second']:,.0f}",
    "MFU, data sheet": lambda v: v["mfu"] and f"{100 * v['mfu']:.1f}%",
    "peak GB": lambda v: f"{v['peak'] / 1e9:.2f}",
    "first step after s": lambda v: f"{v['first_s']:.3g}",
    "process s": lambda v: f"{v['wall_s']:.3g}",
    "last evaluation": lambda v: v["eval_loss"] and f"{v['eval_loss']:.4f}",
    "graphs": lambda v: " ".join(v["said"]),
}
CARD: Columns = {
    "what": lambda v: v["name"],
    "positions": lambda v: "positions" in v and f"{v['positions']:,}",
    "ms": lambda v: "ms" in v and f"{v['ms']:.4g}",
    "µs a launch": lambda v: "us" in v and f"{v['us']:.3g}",
    "TFLOP/s": lambda v: v.get("flops_per_second") and f"{v['flops_per_second'] / 1e12:.4g}",
    "GB/s": lambda v: "GB/s" in v and f"{v['GB/s']:,.0f}",
    "relative error": lambda v: ", ".join(f"{key} {value:.1e}" for key, value in v.get("errors", {}).items()),
    "state": lambda v: ", ".join(f"{key} {value}" for key, value in v.get("state", {}).items()),
    "not measured": lambda v: v.get("error"),
}
