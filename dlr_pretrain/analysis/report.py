"""The report of a run: one screen of numbers and a picture of the loss, read from the run directory alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from dlr_pretrain.analysis.drawing import BLUE, SKY, VERMILLION, subplots, unframe
from dlr_pretrain.analysis.paths_view import plot_paths, probes, section
from dlr_pretrain.analysis.records import RunRecord, column, read_run
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import amount, loading, table

DATA, SMOOTH, EVALUATION = SKY, BLUE, VERMILLION
POINTS = 2000  # of the faint curve; more would not be visible
FEW = 20  # up to this many steps, the loss is not smoothed


def write_report(run_dir: Path) -> None:
    """Write ``report.md`` and ``plots/`` from ``metrics.jsonl``, ``config.yaml`` and ``manifest.json``."""
    run = read_run(run_dir.resolve())
    (run_dir / "plots").mkdir(exist_ok=True)
    plot_loss(run.metrics, run.name, run_dir / "plots" / "loss.png")
    if looks := probes(run.metrics):
        plot_paths(looks, run.name).savefig(run_dir / "plots" / "gradient_paths.png")
    write_durably(run_dir / "report.md", report(run))


# ----------------------------------------------------------------------------------------------------
# Words and numbers


def report(run: RunRecord) -> str:
    """The text of ``report.md``."""
    config, metrics = run.config, run.metrics
    sections = [
        f"# {run.name}",
        _facts(what_was_trained(config)),
        f"## After step {metrics[-1]['step']:,} of {config['train']['steps']:,}",
        *(f"Note: {remark}." for remark in run.remarks),
        _facts(final_numbers(run)),
        why_two_perplexities(metrics),
        "![loss](plots/loss.png)",
        section(looks) if (looks := probes(metrics)) else "",
        "## The folded checkpoint",
        how_to_load(run.folder / "folded", config),
        "## Made by",
        _facts(provenance(run.manifest)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def what_was_trained(config: dict) -> dict[str, str]:
    scale, backbone, dlr, train = config["scale"], config["backbone"], config["dlr"], config["train"]
    rank = f", rank {backbone['rank']}" if "rank" in backbone else ""
    residual = f"DLR {dlr['name']} (alpha {dlr['alpha']:g})" if dlr["enabled"] else "no DLR"
    shape = f"{scale['num_layers']} blocks of width {scale['hidden_size']:,} / {scale['intermediate_size']:,}"
    return {
        "model": f"LLaMA {scale['name']} ({shape}), {backbone['name']}{rank}, {residual}",
        "data": f"{config['data']['source']}, {config['data']['packing']}, {train['seq_len']:,} positions a sequence",
        "recipe": f"{config['optimizer']['name']}, peak lr {train['lr']:g}, {train['global_batch']:,} sequences a step",
        "precision": _precision(config),
        "seeds": f"{config['seed']} (initialisation), {config['data']['seed']} (data order)",
    }


def _precision(config: dict) -> str:
    return config["precision"]["name"]


def final_numbers(run: RunRecord) -> dict[str, str]:
    config, metrics = run.config, run.metrics
    last, evaluated = metrics[-1], _last_evaluation(metrics)
    precision, packing = _precision(config), config["eval"]["packing"]
    train_loss = column(metrics, "train/loss")
    tail = min(len(train_loss), max(10, len(train_loss) // 100))
    rows = {"tokens seen": f"{last['train/tokens']:,} positions, of which {last['train/real_tokens']:,} real tokens"}
    if evaluated:
        at = "" if evaluated is last else f", at step {evaluated['step']:,}"
        rows |= {
            f"evaluation loss ({precision}, {packing}{at})": _number(evaluated["eval/loss"], ".4f"),
            "perplexity, unbiased": f"**{_number(evaluated['eval/perplexity'], '.2f')}**",
        }
        if (found := evaluated["eval/perplexity_galore"]) is not None:
            rows["perplexity, GaLore convention"] = f"{found:.2f}"
    rows[f"training loss, median of the last {tail:,} steps"] = f"{_median(train_loss[-tail:]):.4f}"
    not_finite = int((~np.isfinite(train_loss)).sum())
    if not_finite:
        rows["steps with a loss that is not finite"] = f"{not_finite:,}"
    since = " since the last start" if len(run.trained) > 1 else ""
    for name, label, of, shown in (
        ("perf/tokens_per_second", "positions a second, median", np.median, ",.0f"),
        ("perf/mfu", "MFU, median", np.median, ".1%"),
        ("perf/max_memory_gb", "peak memory of a rank, GB", np.max, ".2f"),
    ):
        if len(values := run.since_last_start(name)):
            rows[f"{label}{since}"] = format(of(values), shown)
    return rows


def why_two_perplexities(metrics: list[dict]) -> str:
    """One sentence on the two conventions, with the n of this evaluation."""
    evaluated = _last_evaluation(metrics)
    if not evaluated:
        return "This run was not evaluated."
    if evaluated["eval/perplexity"] is None:
        return "The evaluation is not finite: the run diverged."
    rule = "The scripts of the GaLore family, and the published tables with them, divide the sum of n losses by n + 1"
    if evaluated["eval/perplexity_galore"] is None:
        return f"{rule}, with n near 100 (10M tokens of C4): this evaluation is of too few to be compared with them."
    return f"{rule}: compare the second perplexity with those tables, and use the first for everything else."


def how_to_load(folded: Path, config: dict) -> str:
    """Where the folded checkpoint is, and three lines that load it."""
    if not (folded / "README.md").exists():
        return "There is none: the run did not reach its end."
    if not (folded / "config.json").exists():
        return f"Its weights are in `{folded}`; transformers cannot load backbone={config['backbone']['name']} yet."
    return f"```python\n{loading(str(folded), trust=any(folded.glob('modeling_*.py')))}\n```"


def provenance(manifest: dict) -> dict[str, str]:
    """The entries of the manifest and of its latest start. The identity is left out: it repeats the configuration."""
    facts = {key: value for key, value in manifest.items() if key not in ("identity", "starts")}
    starts = manifest.get("starts", [])
    if len(starts) > 1:
        facts["starts"] = len(starts)
    return {key: _words(value) for key, value in (facts | (starts[-1] if starts else {})).items()}


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)


def _facts(rows: dict[str, str]) -> str:
    return table(["", ""], rows.items())


def _number(value: float | None, spec: str) -> str:
    return "not finite" if value is None else format(value, spec)


def _last_evaluation(metrics: list[dict]) -> dict | None:
    return next((line for line in reversed(metrics) if "eval/loss" in line), None)


def _median(values: np.ndarray) -> float:
    """The median of the finite values; NaN if there are none."""
    found = values[np.isfinite(values)]
    return float(np.median(found)) if len(found) else math.nan


# ----------------------------------------------------------------------------------------------------
# The picture


def plot_loss(metrics: list[dict], title: str, path: Path) -> None:
    """Draw the training loss (faint, and smoothed) and the evaluations over the tokens seen."""
    from matplotlib.ticker import FuncFormatter

    tokens, loss = column(metrics, "train/tokens"), finite(column(metrics, "train/loss"))
    evaluated = [line for line in metrics if "eval/loss" in line]
    x, y = column(evaluated, "train/tokens"), finite(column(evaluated, "eval/loss"))
    figure, (axes,) = subplots(1, width=8, height=4.5)
    every = max(1, -(-len(loss) // POINTS))
    mark = "." if np.isfinite(loss).sum() == 1 else ""  # a line needs two points
    axes.plot(tokens[::every], loss[::every], color=DATA, alpha=0.5, linewidth=0.8, marker=mark, label="training")
    if len(loss) > FEW:
        at, level = smoothed(loss)
        axes.plot(tokens[at], level, color=SMOOTH, linewidth=1.6, label="training, smoothed")
    if evaluated:
        axes.plot(x, y, color=EVALUATION, linewidth=1, marker="o", markersize=4, label="evaluation")
    if np.isfinite(y[-1:]).any():
        offset = {"textcoords": "offset points", "xytext": (0, 7), "ha": "right"}
        axes.annotate(f"{y[-1]:.3f}", (x[-1], y[-1]), color=EVALUATION, **offset)
    axes.set_ylim(*limits(loss, y))
    axes.set(title=title, xlabel="tokens seen (positions)", ylabel="loss (nats a token)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: amount(number, 6)))
    unframe(axes)
    axes.legend(frameon=False)
    figure.savefig(path)


def smoothed(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(steps, running medians) at up to 400 steps; the window is a fiftieth of the run, and narrower at its ends.

    A median shows neither spikes nor steps without a finite loss.
    """
    at = np.unique(np.linspace(0, len(values) - 1, 400).astype(int))
    reach = np.maximum(2, np.minimum.reduce([np.full(at.shape, len(values) // 100), at, len(values) - 1 - at]))
    return at, np.array([_median(values[max(0, i - r) : i + r + 1]) for i, r in zip(at, reach, strict=True)])


def limits(loss: np.ndarray, evaluated: np.ndarray) -> tuple[float, float]:
    """The range of losses to show, without training spikes above the first losses, which would flatten the curve."""
    level, evaluated = loss[np.isfinite(loss)], evaluated[np.isfinite(evaluated)]
    shown = np.concatenate((level[level <= level[:FEW].max()] if len(level) else level, evaluated))
    if not len(shown):
        return 0.0, 1.0
    room = 0.06 * (shown.max() - shown.min()) or 0.1
    return shown.min() - room, shown.max() + room


def finite(values: np.ndarray) -> np.ndarray:
    """``values`` with NaN in place of infinities, so that these are not drawn."""
    return np.where(np.isfinite(values), values, math.nan)
