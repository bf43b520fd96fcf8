"""The paper's tables with our figures beside its own, and the tables of what was trained."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace

from dlr_pretrain.analysis.costs import Cost
from dlr_pretrain.analysis.groups import CONVENTION, PERPLEXITY, Group, Spread, difference, pairs
from dlr_pretrain.analysis.paper import MILESTONES, OWN_RATES, SCALES, SEEDS, fact, facts, marks
from dlr_pretrain.analysis.records import RunRecord
from dlr_pretrain.analysis.tables import MISSING, Cell, Table, figure, published, rounded
from dlr_pretrain.config.arguments import spread
from dlr_pretrain.config.tree import CONFIG_DIR

BESIDE = (
    "Ours follow the paper's convention, which divides the summed loss of n batches by n + 1: mean ± standard "
    "deviation (seeds). An evaluation on less than half as much text as the paper's has no such figure."
)

EIGHT_GPUS = "--gpus-per-node=8 --cpus-per-gpu=8 --mem=0 --time=48:00:00"  # a whole node, as options of sbatch


class Footnotes:
    """Footnote letters for figures whose setting is not the paper's."""

    def __init__(self):
        self.letters: dict[str, str] = {}

    def of(self, group: Group, studied: str | None = None) -> str:
        """The letter of the group's setting, in brackets; "" if it is the paper's except for the key ``studied``."""
        found = "; ".join(marks(group, studied))
        return f"[{self.letters.setdefault(found, _letter(len(self.letters)))}]" if found else ""

    def __call__(self, group: Group | None, studied: str | None = None, name: str = CONVENTION) -> Cell:
        """The cell of a perplexity after the last update, by default in the paper's convention, with its letter."""
        if not (group and group.finished):
            return None
        cell, letter = figure(group.final(name)), self.of(group, studied)
        return replace(cell, note=f"{cell.note} {letter}".strip()) if cell else f"too little text {letter}".strip()

    def notes(self) -> list[str]:
        return [f"[{letter}] not the paper's setting: {what}" for what, letter in self.letters.items()]


def _letter(i: int) -> str:
    return chr(ord("a") + i) if i < 26 else _letter(i // 26 - 1) + _letter(i % 26)


def submit(scale: str, recipes: Sequence[str]) -> str:
    """The command that queues ``recipes`` at a scale, each with the paper's five seeds."""
    seeds = ",".join(map(str, SEEDS))
    words = f"scale={scale} experiment={','.join(dict.fromkeys(recipes))} seed={seeds}"
    return f"python slurm/submit.py {words} -- {EIGHT_GPUS}"


def _of(groups: Sequence[Group], scale: str, method: str) -> list[Group]:
    return [group for group in groups if (group.scale, group.method) == (scale, method)]


# ----------------------------------------------------------------------------------------------------
# Table 1


def table_1(groups: Sequence[Group]) -> Table:
    """Perplexity of each method at each scale, by the paper's convention. Each variant of a method has its own row."""
    mark, rows, missing = Footnotes(), [], {}
    for method in dict.fromkeys(row["method"] for row in facts("table1")):
        own = [group for scale in SCALES for group in _of(groups, scale, method)]
        for variant in dict.fromkeys(["", *(group.variant for group in own)]):
            cells: list[Cell] = []
            for scale in SCALES:
                row = {"method": method, "scale": scale}
                paper = published(*(fact("table1", column, **row) for column in ("ppl", "ppl_std")))
                cell = mark(next((g for g in own if (g.scale, g.variant) == (scale, variant)), None))
                cells += ["" if variant else paper, "" if variant and cell is None else cell]
                if cell is None and not variant:
                    missing.setdefault(scale, []).append(f"table1/{method.replace('+', '_')}")
            rows.append([f"{method} ({variant})" if variant else method, *cells])
    header = ["Method", *(name for scale in SCALES for name in (f"{scale} paper", f"{scale} ours"))]
    fill = [submit(scale, recipes) for scale, recipes in missing.items()]
    ours = any(group.scale in SCALES for group in groups)
    title = "Table 1: perplexity on C4's validation set"
    return Table("table1", title, header, rows, [BESIDE, *mark.notes()], fill, ours)


def pairs_table(groups: Sequence[Group]) -> Table:
    """Each backbone without and with DLR, all else equal, and the difference by seed.

    Footnote letters mark our perplexities only if the paper has the same pair.
    """
    mark, rows, fill = Footnotes(), [], []
    notes = ["Perplexities are unbiased; those in the last two columns follow the paper's convention."]
    found = pairs(groups)
    paired = {id(group) for pair in found for group in pair}
    alone = [group for group in groups if id(group) not in paired]
    shown: list[tuple[Group | None, Group | None]] = list(found)
    shown += [(group, None) for group in alone if group.config["dlr"]["name"] == "off"]
    shown += [(None, group) for group in alone if group.config["dlr"]["name"] == "on"]
    place = {id(group): i for i, group in enumerate(groups)}
    for a, b in sorted(shown, key=lambda sides: place[id(sides[0] or sides[1])]):
        group = a or b
        base = group.base
        if base not in OWN_RATES:
            continue
        theirs = [fact("table1", "ppl", method=method, scale=group.scale) for method in (base, f"{base}+dlr")]
        if None in theirs:
            cells = [figure(side.final(PERPLEXITY)) if side else None for side in (a, b)]
        else:
            cells = [mark(side, name=PERPLEXITY) for side in (a, b)]
        both = [figure(_changed(a, b, name), signed=True) if a and b else None for name in METRICS]
        gap = published(theirs[1] - theirs[0], signed=True) if None not in theirs else ""
        variant = (b.variant if b else "") or (a.variant if a else "")
        rows.append([group.scale, f"{base} ({variant})" if variant else base, *cells, *both, gap])
        if a is None or b is None:
            fill.append(without_partner(group))
        elif odd := {run.seed for run in a.finished} ^ {run.seed for run in b.finished}:
            notes.append(f"{base} at {group.scale}: without a partner, and not in the difference: seed {_listed(odd)}")
        if a and b and set(a.codes) != set(b.codes):
            codes = f"{', '.join(a.codes)} plain, and {', '.join(b.codes)} with DLR"
            notes.append(f"{base} at {group.scale}: trained by different code: {codes}")
    header = ["Scale", "Backbone", "plain", "with DLR", "Δ by seed", "Δ, convention", "Δ paper"]
    return Table("pairs", "DLR by backbone: what it changes", header, rows, [*notes, *mark.notes()], fill)


METRICS = (PERPLEXITY, CONVENTION)


def _changed(a: Group, b: Group, name: str) -> Spread | None:
    """The difference ``b`` - ``a`` of a figure of the last evaluation, by seed; None if one group does not have it."""
    return difference(a, b, lambda run: run.final.get(name)) if a.final(name) and b.final(name) else None


def without_partner(group: Group) -> str:
    """The command that trains the missing partner: that of the group's first run with DLR toggled, for all seeds."""
    run = group.runs[0]
    command = run.starts[-1].get("command", ["train.py"]) if run.starts else ["train.py"]
    residual = "off" if group.config["dlr"]["name"] == "on" else "on"
    kept, toggled = [], [f"dlr={residual}"]
    for word in spread(command[1:]):
        key, _, value = word.lstrip("+").partition("=")
        recipe = value.removesuffix("_dlr") if residual == "off" else f"{value}_dlr"
        if key == "experiment" and recipe != value and (CONFIG_DIR / "experiment" / f"{recipe}.yaml").exists():
            kept.append(f"experiment={recipe}")
            toggled = []
        elif key not in ("dlr", "seed", "run.dir") and not (residual == "off" and key.startswith(("dlr.", "probe"))):
            kept.append(word)
    seeds = ",".join(str(run.seed) for run in group.runs)
    return shlex.join(["python", "train.py", *(["-m"] if "," in seeds else []), *kept, *toggled, f"seed={seeds}"])


def _listed(seeds: set[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


# ----------------------------------------------------------------------------------------------------
# The other tables of the paper


def milestones(groups: Sequence[Group]) -> Table:
    """7B: perplexity at ``MILESTONES``, and memory per GPU."""
    own = [group for group in groups if group.scale == "7b"]
    rows: list[list[Cell]] = []
    recipes = {"full_adam": "full", "sltrain_8bit": "sltrain", "lost": "lost", "cola+dlr (r=1024)": "cola_dlr"}
    for row in facts("table7b"):
        cells = [row[f"ppl_{step // 1000}k"] for step in MILESTONES]
        shown = [c if c == "oom" else published(float(c)) if c else "" for c in cells]
        rows.append([f"{row['method']}, paper", *shown, published(float(row["mem_gb"]))])
    mark = Footnotes()
    for group in own:
        peaks = [run.since_last_start("perf/max_memory_gb") for run in group.runs]
        peak = max((float(each.max()) for each in peaks if len(each)), default=None)
        label = f"{group.label}, ours {mark.of(group)}".strip()
        rows.append([label, *(figure(group.at(step, CONVENTION)) for step in MILESTONES), peak and published(peak)])
    missing = [r for r in recipes.values() if r.replace("_dlr", "+dlr") not in {g.method for g in own}]
    fill = [f"sbatch --nodes=4 {EIGHT_GPUS} slurm/train.sbatch scale=7b experiment=7b/{r}" for r in missing]
    header = ["Method", *(f"{step // 1000}K" for step in MILESTONES), "GB a GPU"]
    notes = [f"steps of one schedule; {BESIDE}", *mark.notes()]
    return Table("milestones_7b", "7B: perplexity by step", header, rows, notes, fill, bool(own))


RANK = "backbone.rank"


def rank_table(groups: Sequence[Group]) -> Table:
    """Perplexity by rank, all else equal."""
    mark, rows, missing = Footnotes(), [], {}
    families: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        families.setdefault((group.scale, group.without(RANK)), []).append(group)
    studies = [members for members in families.values() if len(members) > 1 and "rank" in members[0].config["backbone"]]
    left = {id(group) for members in studies for group in members}  # not yet shown beside a row of the paper
    for row in (row for row in facts("ablations") if row["ablation"] == "rank"):
        scale, rank = row["scale"], int(row["setting"].removeprefix("r="))
        own = [g for g in _of(groups, scale, row["method"]) if g.config["backbone"].get("rank") == rank]
        rows.append([scale, row["method"], str(rank), published(float(row["ppl"]), float(row["std"]))])
        rows[-1] += [mark(own[0], RANK) if own else None, figure(own[0].final(PERPLEXITY)) if own else None]
        rows += [[scale, g.label, str(rank), "", mark(g, RANK), figure(g.final(PERPLEXITY))] for g in own[1:]]
        left -= {id(g) for g in own}
        if not own:
            share = 100 * rank // int(fact("table1", "rank", method=row["method"], scale=scale))
            missing.setdefault(scale, []).append(f"ablation/rank_{share:03d}" if share < 100 else "table1/cola_dlr")
    for members in studies:
        for group in sorted(members, key=lambda g: g.config["backbone"]["rank"]):
            if id(group) in left:
                r = str(group.config["backbone"]["rank"])
                rows.append([group.scale, group.method, r, "", mark(group, RANK), figure(group.final(PERPLEXITY))])
    header = ["Scale", "Method", "Rank", "paper", "ours, convention", "ours, unbiased"]
    fill = [submit(scale, recipes) for scale, recipes in missing.items()]
    return Table("rank", "Rank", header, rows, [BESIDE, *mark.notes()], fill, any(row[4] for row in rows))


ABLATIONS = {  # each setting of the paper: (option of dlr, recipe)
    "variance_correction": {"with": ("on", "table1/cola_dlr"), "without": ("uncorrected", "ablation/uncorrected")},
    "init_offset": {
        "plain": ("off", "table1/cola"),
        "init-offset": ("init_offset", "ablation/init_offset"),
        "full dlr": ("on", "table1/cola_dlr"),
    },
}
TITLES = {"variance_correction": "Variance correction", "init_offset": "An initial offset instead of a residual"}


def ablation(groups: Sequence[Group], name: str) -> Table:
    """The table of one of ``ABLATIONS``.

    Our rows are families of groups that differ only in DLR, if one of the groups has the option that is studied.
    """
    settings = ABLATIONS[name]
    studied = "uncorrected" if name == "variance_correction" else "init_offset"
    families: dict[tuple[str, str], dict[str, list[Group]]] = {}
    for group in groups:
        family = families.setdefault((group.scale, group.without("dlr.")), {})
        family.setdefault(group.config["dlr"]["name"], []).append(group)
    mark, rows, missing = Footnotes(), [], {}
    theirs = dict.fromkeys(row["scale"] for row in facts("ablations") if row["ablation"] == name)
    own = [(scale, family) for (scale, _), family in families.items() if studied in family]
    for scale in dict.fromkeys([*theirs, *(scale for scale, _ in own)]):
        for family in [family for at, family in own if at == scale] or [{}]:
            base = family[studied][0].config["backbone"]["name"] if family else "cola"
            for setting, (option, recipe) in settings.items():
                where = {"ablation": name, "scale": scale, "setting": setting} if base == "cola" else {"scale": ""}
                paper = published(*(fact("ablations", column, **where) for column in ("ppl", "std")))
                found = sorted(family.get(option, []), key=lambda group: len(marks(group)))
                if not found:
                    rows.append([scale, base, setting, paper or "", None, None])
                    if scale in theirs:
                        missing.setdefault(scale, []).append(recipe)
                for i, g in enumerate(found):
                    label = f"{setting} ({g.variant})" if len(found) > 1 and g.variant else setting
                    rows.append([scale, base, label, "" if i else paper or "", mark(g), figure(g.final(PERPLEXITY))])
    header = ["Scale", "Backbone", "Setting", "paper", "ours, convention", "ours, unbiased"]
    fill = [submit(scale, recipes) for scale, recipes in missing.items()]
    return Table(name, TITLES[name], header, rows, [BESIDE, *mark.notes()], fill, bool(own))


# ----------------------------------------------------------------------------------------------------
# What was trained


def groups_table(groups: Sequence[Group], costs: Sequence[Cost | None]) -> Table:
    """A row for each group: its setting, cost and results."""
    rows = []
    for group, cost in zip(groups, costs, strict=True):
        tokens = sorted({run.metrics[-1]["train/tokens"] for run in group.runs if run.metrics})
        rows.append(
            [
                group.scale,
                group.label,
                _listed({run.seed for run in group.finished}),
                figure(group.final(PERPLEXITY)),
                figure(group.final(CONVENTION)),
                _range([n / 1e6 for n in tokens]),
                published(cost.parameters / 1e6) if cost else None,
                _range([cost.flops * n / 1e15 for n in tokens]) if cost else None,
                group.config["precision"]["name"],
                group.config["data"]["packing"],
                f"{group.config['train']['lr']:g}",
            ]
        )
    header = ["Scale", "Method", "Seeds", "PPL", "PPL, convention", "M tokens", "M parameters", "PFLOPs"]
    notes = [
        "PPL is the unbiased perplexity after the last update, mean ± standard deviation (seeds). Convention: as in "
        f"published numbers of the GaLore family; {MISSING} if the evaluation is too small for it. Tokens are "
        "positions, with padding, up to the last update (fewest to most, if seeds have not seen the same). Parameters "
        "are the trained ones."
    ]
    return Table("groups", "What was trained", [*header, "Precision", "Packing", "lr"], rows, notes)


def _range(ascending: Sequence[float]) -> Cell:
    """The first and the last figure as a range, or one if they are equal when rounded; None if there are none."""
    if len(ascending) < 2:
        return rounded(ascending[0]) if ascending else None
    return " to ".join(dict.fromkeys(rounded(number).text for number in (ascending[0], ascending[-1])))


def runs_table(runs: Sequence[RunRecord]) -> Table:
    """Each run and how far it came."""
    rows = []
    for run in runs:
        last = run.evaluations[-1] if run.evaluations else {}
        loss = last.get("eval/loss")
        rows.append(
            [
                run.name,
                str(run.seed),
                "diverged" if run.diverged else "finished" if run.final else "unfinished",
                f"{run.step:,} of {run.planned:,}",
                published(loss, digits=4) if loss is not None else None,
                published(last.get("eval/perplexity")) if loss is not None else None,
                published(run.metrics[-1]["train/tokens"], digits=0) if run.metrics else None,
                run.machine,
                "; ".join(run.remarks),
            ]
        )
    header = ["Run", "Seed", "State", "Steps", "Last evaluation's loss", "PPL", "Tokens", "Machine", "Remarks"]
    return Table("runs", "Runs", header, rows)
