"""Figures of groups of runs, each as PNG and SVG: curves, perplexity against throughput and rank, gradient norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import numpy as np

from dlr_pretrain.analysis.costs import Cost
from dlr_pretrain.analysis.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    MARKS,
    ORANGE,
    PINK,
    SKY,
    VERMILLION,
    Picture,
    label_axes,
    legend_beside,
    metric,
    save,
    subplots,
    wrapped,
)
from dlr_pretrain.analysis.groups import PERPLEXITY, Group, Spread, difference, pairs, spread
from dlr_pretrain.analysis.measured import measured
from dlr_pretrain.analysis.records import THINNED, RunRecord, column
from dlr_pretrain.analysis.report import finite, smoothed
from dlr_pretrain.util.text import amount

PLAIN, DLR, OTHERS = BLUE, VERMILLION, (GREEN, PINK, ORANGE, SKY)
BACKBONES = {"lowrank": BLUE, "cola": VERMILLION, "lost": GREEN, "lax": PINK, "cola_lax": ORANGE, "full": BLACK}
CROWDED = 5  # a legend with more names than this stands beside the axes


@dataclass(frozen=True)
class Axis:
    """The x axis of a curve: ``of(run, cost)`` gives its value at each update, or None if it is not known.

    ``shown(value, position)`` is the text of a tick.
    """

    name: str
    label: str
    of: Callable[[RunRecord, Cost | None], np.ndarray | None]
    shown: Callable[[float, int], str]


def tokens(number: float, _position: int) -> str:
    """1500000000 -> 1.5B."""
    return amount(number, 4)


def duration(hours: float, _position: int) -> str:
    """1.5 -> 1.5 h, 0.5 -> 30 min."""
    size, unit = next(((size, unit) for size, unit in ((1, "h"), (1 / 60, "min")) if hours >= size), (1 / 3600, "s"))
    return f"{hours / size:.4g} {unit}"


TOKENS = Axis("tokens", "tokens seen (positions)", lambda run, _: run.column("train/tokens"), tokens)
AXES = (
    TOKENS,
    Axis("time", "time of training", lambda run, _: run.hours(), duration),
    Axis("flops", "FLOPs", lambda run, cost: cost and run.column("train/tokens") * cost.flops, metric),
)


def draw(groups: Sequence[Group], costs: Sequence[Cost | None], folder: Path) -> list[Picture]:
    """Write every figure for which the groups have the numbers into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for scale in dict.fromkeys(group.scale for group in groups):
        of = [(g, c) for g, c in zip(groups, costs, strict=True) if g.scale == scale and any(r.metrics for r in g.runs)]
        if of:
            drawn += list(_of_scale(scale, of, folder))
    return drawn


def _of_scale(scale: str, of: list[tuple[Group, Cost | None]], folder: Path) -> Iterator[Picture]:
    groups = [group for group, _ in of]
    if pair := _pairs(scale, groups, folder):
        yield pair
    for axis in AXES:
        if all(axis.of(group.runs[0], cost) is not None for group, cost in of):
            yield _curves(scale, of, axis, folder)
    for picture in (_overlay(scale, groups, folder), _throughput(scale, groups, folder), _rank(scale, groups, folder)):
        if picture:
            yield picture
    yield _gradients(scale, groups, folder)


# ----------------------------------------------------------------------------------------------------
# Curves, a panel for each backbone


def panels(groups: Sequence[Group]) -> list[tuple[str, list[Group]]]:
    """The name and the groups of each panel. There is one for each backbone, which also shows the dense model.

    The dense model has a panel of its own only if there is no other backbone.
    """
    bases = dict.fromkeys(group.base for group in groups)
    dense = [group for group in groups if group.method == "full"]
    found = [(name, [*(g for g in groups if g.base == name), *dense]) for name in bases if name != "full"]
    return found or [("full", dense)]


def look(groups: Sequence[Group]) -> list[dict]:
    """A colour and a line style for each group of a panel; those of plain, DLR and dense are the same in all panels."""
    others = iter([(color, dash) for dash in ("-", "--", ":", "-.") for color in OTHERS] * len(groups))
    looks = []
    for group in groups:
        fixed = {group.base: (PLAIN, "-"), f"{group.base}+dlr": (DLR, "-"), "full": (BLACK, "--")}
        color, dash = fixed.get(group.label) or next(others)
        looks.append({"color": color, "linestyle": dash})
    return looks


def _curves(scale: str, of: list[tuple[Group, Cost | None]], axis: Axis, folder: Path) -> Picture:
    cost = {id(group): c for group, c in of}
    by_backbone = panels([group for group, _ in of])
    figure, axes = subplots(len(by_backbone))
    shown: list[float] = []
    for (name, groups), ax in zip(by_backbone, axes, strict=True):
        for group, style in zip(groups, look(groups), strict=True):
            for i, run in enumerate(run for run in group.runs if run.metrics):
                x, loss = axis.of(run, cost[id(group)]), run.column("train/loss")
                at, level = smoothed(loss)
                ax.plot(x[at], level, **style, linewidth=1.1, alpha=0.75, label=None if i else _result(group))
                steps = {record["step"]: j for j, record in enumerate(run.metrics)}
                where = [steps[e["step"]] for e in run.evaluations]
                levels = finite(column(run.evaluations, "eval/loss"))
                ax.plot(x[where], levels, "o", color=style["color"], markersize=3.5, zorder=3)
                shown += [*level[len(level) // 20 :], *levels]
        ax.set_title(name)
        _legend(ax, beside=len(ax.get_legend_handles_labels()[1]) > CROWDED)
    label_axes(axes, axis.label, "loss (nats a token)", _range(shown), axis.shown)
    caption = (
        f"{scale}: training loss (lines, a running median for each seed) and evaluations (dots) over {axis.label}, a "
        "panel for each backbone; behind each name the perplexity after the last update."
    )
    return save(figure, folder, f"loss_{axis.name}_{scale}", caption)


def _gradients(scale: str, groups: list[Group], folder: Path) -> Picture:
    by_backbone = panels(groups)
    figure, axes = subplots(len(by_backbone))
    for (name, members), ax in zip(by_backbone, axes, strict=True):
        for group, style in zip(members, look(members), strict=True):
            for i, run in enumerate(run for run in group.runs if run.metrics):
                x, norm = run.column("train/tokens"), finite(run.column("train/grad_norm"))
                at, level = smoothed(norm)
                ax.plot(x, norm, **style, linewidth=0.5, alpha=0.35)
                ax.plot(x[at], level, **style, linewidth=1.2, label=None if i else wrapped(group.label))
        clip = {group.config["train"]["clip"] for group in members} - {None}
        for bound in sorted(clip):
            ax.axhline(bound, color=GREY, linewidth=0.8, linestyle=":")
            ax.annotate(f"clipped to {bound:g}", (0.99, bound), xycoords=("axes fraction", "data"), fontsize=7,
                        ha="right", va="top", color="#595959")  # fmt: skip
        ax.set_yscale("log")
        ax.set_title(name)
        _legend(ax, beside=len(ax.get_legend_handles_labels()[1]) > CROWDED)
    label_axes(axes, TOKENS.label, "gradient norm (l2, before clipping)")
    thinned = any(THINNED in run.manifest for group in groups for run in group.runs)
    steps = "the steps that were kept" if thinned else "each step"
    caption = f"{scale}: global gradient norm before clipping, {steps} (faint) and its running median, by seed."
    return save(figure, folder, f"gradient_norm_{scale}", caption)


def _overlay(scale: str, groups: list[Group], folder: Path) -> Picture | None:
    """Draw the evaluation perplexity of all groups in one panel.

    The colour shows the backbone. The line style shows whether it is plain, with DLR or another variant. Variants of a
    single backbone have the looks of its panel instead.
    """
    evaluated = [group for group in groups if any(run.evaluations for run in group.runs)]
    if not evaluated:
        return None
    figure, (ax,) = subplots(1, width=8.0, height=5.0)
    spare = iter(OTHERS * len(groups))
    colors = {name: BACKBONES.get(name) or next(spare) for name in dict.fromkeys(group.base for group in evaluated)}
    for group, own in zip(evaluated, look(evaluated), strict=True):
        dash = "--" if group.label == group.base else "-" if group.label.endswith("+dlr") else ":"
        style = own if len(colors) == 1 else {"color": colors[group.base], "linestyle": dash}
        style["marker"] = "."
        steps, means = mean_curve(group)
        if steps:
            error = np.array([np.nan if s.std is None else s.std for s in means])
            x, y = np.array(steps) * group.runs[0].positions, finite(np.array([s.mean for s in means]))
            label = wrapped(f"{group.label} ({means[0].n})", 36)
            ax.errorbar(x, y, error, **style, linewidth=1.3, capsize=2, elinewidth=0.7, label=label)
        for i, run in enumerate(run for run in group.runs if not run.final and run.evaluations):
            x, y = column(run.evaluations, "step") * run.positions, finite(column(run.evaluations, PERPLEXITY))
            label = None if i or steps else wrapped(f"{group.label} (unfinished)", 36)
            ax.plot(x, y, **style, linewidth=0.6, markersize=2, alpha=0.6, label=label)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.6g}")
    ax.yaxis.set_minor_formatter(lambda value, _: f"{value:,.6g}")
    ax.tick_params(axis="y", which="minor", labelsize=7)
    ax.grid(axis="y", which="minor", alpha=0.15)
    _legend(ax, beside=True)
    label_axes([ax], TOKENS.label, "evaluation perplexity, unbiased (log)")
    caption = (
        f"{scale}: evaluation perplexity, mean and standard deviation over the finished seeds (their number behind "
        "each name; a line ends where one has diverged), unfinished ones thin"
    )
    caption += "." if len(colors) == 1 else "; solid with DLR, dashed without, dotted for other variants."
    return save(figure, folder, f"perplexity_{scale}", caption)


def mean_curve(group: Group) -> tuple[list[int], list[Spread]]:
    """The steps at which every finished seed has an evaluation or has already diverged, and the perplexities there.

    Every mean is over the same seeds, because a mean over fewer of them would jump where one seed stops.
    """
    ended = replace(group, runs=group.finished)
    steps = sorted({e["step"] for run in ended.runs for e in run.evaluations})
    found = [(step, at) for step in steps if (at := ended.at(step, PERPLEXITY)) and at.n == len(ended.runs)]
    return [step for step, _ in found], [at for _, at in found]


# ----------------------------------------------------------------------------------------------------
# Final figures


def _pairs(scale: str, groups: list[Group], folder: Path) -> Picture | None:
    told = [(pair, difference(*pair, lambda run: run.final.get(PERPLEXITY))) for pair in pairs(groups)]
    found = [pair for pair, change in told if change and change.finite]
    lost = [_name(*pair) for pair, change in told if change and not change.finite]
    if not found:
        return None
    figure, (ax,) = subplots(1, width=7.0, height=1.3 + 0.45 * len(found))
    for y, sides in enumerate(found):
        seeds = {run.seed for run in sides[0].finished} & {run.seed for run in sides[1].finished}
        values = [[run.final.get(PERPLEXITY) for run in side.finished if run.seed in seeds] for side in sides]
        means = [spread(v).mean for v in values]
        ax.annotate("", (means[1], y), (means[0], y), arrowprops={"arrowstyle": "->", "color": GREY})
        for side, (each, color, mark) in enumerate(zip(values, (PLAIN, DLR), "os", strict=True)):
            label = (("without DLR", "with DLR")[side]) if y == 0 else None
            ax.plot(each, [y] * len(each), mark, color=color, markersize=4, alpha=0.5)
            ax.plot(means[side], y, mark, color=color, markersize=8, label=label)
    ax.set_yticks(range(len(found)), [wrapped(_name(*pair)) for pair in found])
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    label_axes([ax], "perplexity after the last update, unbiased", "", shown=None)
    caption = (
        f"{scale}: what DLR changes by backbone, all else equal; small marks are the seeds of both, large ones means."
    )
    return save(figure, folder, f"pairs_{scale}", caption + _without(lost))


def _without(lost: Sequence[str]) -> str:
    """The sentence of a caption that names the groups without a mean; empty if there are none."""
    return f" Not drawn, since a seed has diverged: {', '.join(dict.fromkeys(lost))}." if lost else ""


def _name(plain: Group, other: Group) -> str:
    return replace(plain, variant=other.variant or plain.variant).label


def _throughput(scale: str, groups: list[Group], folder: Path) -> Picture | None:
    found: dict[str, list[tuple[Group, Spread, Spread]]] = {}
    lost = []
    for machine in dict.fromkeys(run.machine for group in groups for run in group.finished):
        for group in groups:
            runs = [run for run in group.finished if run.machine == machine]
            speed = measured(runs, "perf/tokens_per_second", np.median)
            quality = spread(run.final.get(PERPLEXITY) for run in runs)
            if speed and quality and quality.finite:
                found.setdefault(machine, []).append((group, speed, quality))
            elif quality and not quality.finite:
                lost.append(group.label)
    if not found:
        return None
    figure, axes = subplots(len(found), width=5.5, height=4.2, shared=False)
    backbones = {group.base for points in found.values() for group, _, _ in points}
    for (machine, points), ax in zip(found.items(), axes, strict=True):
        spare = iter(OTHERS * len(groups))
        marks: dict[str, Iterator[str]] = {}
        for group, speed, quality in points:
            color = (len(backbones) > 1 and BACKBONES.get(group.base)) or next(spare)
            filled = color if group.method.endswith("+dlr") else "white"
            mark = next(marks.setdefault(group.method, cycle(MARKS)))
            ax.errorbar(speed.mean, quality.mean, quality.std, speed.std, fmt=mark, color=color,
                        markerfacecolor=filled, elinewidth=0.7, capsize=2, label=wrapped(group.label))  # fmt: skip
        ax.set_title(machine)
        ax.margins(0.1)
        _legend(ax, beside=True)
    label_axes(axes, "positions a second (median)", "perplexity after the last update, unbiased")
    caption = (
        f"{scale}: perplexity against throughput, mean and standard deviation over seeds (filled: with DLR); "
        "down and to the right is better."
    )
    return save(figure, folder, f"throughput_{scale}", caption + _without(lost))


def _rank(scale: str, groups: list[Group], folder: Path) -> Picture | None:
    families: dict[str, list[Group]] = {}
    for group in groups:
        if group.finished and "rank" in group.config["backbone"]:
            families.setdefault(group.without("backbone.rank"), []).append(group)
    studies = [sorted(f, key=lambda g: g.config["backbone"]["rank"]) for f in families.values() if len(f) > 1]
    if not studies:
        return None
    figure, (ax,) = subplots(1, width=6.0, height=4.0)
    spare = iter(OTHERS * len(studies))
    for study in studies:
        color, dash = BACKBONES.get(study[0].base) or next(spare), "-" if study[0].method.endswith("+dlr") else "--"
        found = [group.final(PERPLEXITY) for group in study]
        ranks = [group.config["backbone"]["rank"] for group in study]
        error = [np.nan if s.std is None else s.std for s in found]
        y = finite(np.array([s.mean for s in found]))
        ax.errorbar(ranks, y, error, color=color, linestyle=dash, marker="o", capsize=3, label=study[-1].method)
    ax.set_xticks(sorted({group.config["backbone"]["rank"] for study in studies for group in study}))
    _legend(ax, beside=len(studies) > CROWDED)
    label_axes([ax], "rank", "perplexity after the last update, unbiased", shown=None)
    caption = f"{scale}: what a lower rank costs, all else equal; bars are standard deviations over seeds."
    lost = [group.label for study in studies for group in study if not group.final(PERPLEXITY).finite]
    return save(figure, folder, f"rank_{scale}", caption + _without(lost))


# ----------------------------------------------------------------------------------------------------
# Drawing


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    shown = np.array([v for v in values if np.isfinite(v)])
    if not len(shown):
        return None
    room = 0.04 * (shown.max() - shown.min()) or 0.1
    return shown.min() - room, shown.max() + room


def _legend(ax, beside: bool) -> None:
    """Add a legend inside the axes, or to their right if ``beside``."""
    if beside:
        legend_beside(ax)
    else:
        ax.legend(frameon=False, fontsize=8)


def _result(group: Group) -> str:
    last = group.final(PERPLEXITY)
    state = f"{last.mean:,.1f}" if last and last.finite else "diverged" if last else "unfinished"
    return wrapped(f"{group.label}  {state}")
