"""Groups of runs that differ only in their seed; the figures of a group are means over its finished seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dlr_pretrain.analysis.records import RunRecord
from dlr_pretrain.config import MISSING
from dlr_pretrain.config.identity import ORIGIN

PERPLEXITY, CONVENTION = "eval/perplexity", "eval/perplexity_galore"
# The keys that decide which text is evaluated, and how much of a document a position sees.
TEXT = ("data.shards", "tokenizer.pieces", "eval.tokens", "eval.packing", "train.seq_len", "data.mask_documents")


@dataclass(frozen=True)
class Spread:
    """The mean of a figure over seeds, and its standard deviation (n - 1 in the denominator; None for one seed).

    The mean is not finite if the figure of a seed is not: a diverged seed is never left out of a mean.
    """

    values: tuple[float, ...]

    @property
    def n(self) -> int:
        return len(self.values)

    @property
    def diverged(self) -> int:
        """The number of values that are not finite."""
        return sum(not math.isfinite(value) for value in self.values)

    @property
    def finite(self) -> bool:
        return not self.diverged

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float | None:
        return statistics.stdev(self.values) if self.n > 1 and self.finite else None


@dataclass(frozen=True)
class Group:
    """Runs whose identities differ only in the seed, one run per seed.

    ``shared`` is the identity without the seed and the keys of ``ORIGIN``; its ``data.seed`` is "seed" if the order of
    the data follows the seed. ``variant`` lists the overrides that set the group apart from others of its scale and
    method; it is "" for the most common one.
    """

    runs: tuple[RunRecord, ...]
    shared: dict[str, object] = field(repr=False)
    variant: str = ""

    @property
    def scale(self) -> str:
        return self.runs[0].scale

    @property
    def method(self) -> str:
        return self.runs[0].method

    @property
    def base(self) -> str:
        """The method without its residual: a backbone, or an optimizer such as galore."""
        return self.method.partition("+")[0]

    @property
    def label(self) -> str:
        return f"{self.method} ({self.variant})" if self.variant else self.method

    @property
    def config(self) -> dict:
        return self.runs[0].config

    @property
    def codes(self) -> list[str]:
        """The commits that trained it, each once."""
        return list(dict.fromkeys(code for run in self.runs for code in run.codes))

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        return tuple(run for run in self.runs if run.final)

    def final(self, name: str) -> Spread | None:
        """A figure of the evaluation after the last update, over the finished seeds; None if there is none."""
        return _told([run.final for run in self.finished], name)

    def at(self, step: int, name: str) -> Spread | None:
        """A figure of the evaluation at ``step``, over the seeds that have one; None if no seed has.

        A seed that diverged before that step counts as infinite.
        """
        lost: list[dict] = [{} for run in self.runs if run.diverged and run.step < step]
        found = [e for run in self.runs for e in run.evaluations if e["step"] == step]
        return _told(found + lost if found else [], name)

    def without(self, *prefixes: str) -> str:
        """The shared identity as text, without keys that start with a prefix, to compare it with another group's."""
        return _text({key: value for key, value in self.shared.items() if not key.startswith(prefixes)})


def _told(evaluations: Sequence[dict], name: str) -> Spread | None:
    """A figure over evaluations; None if it is the convention's and one of the evaluations is too small for that."""
    ended = [e for e in evaluations if e.get("eval/loss") is not None]
    if name == CONVENTION and any(e.get(CONVENTION) is None for e in ended):
        return None
    return spread(e.get(name) for e in evaluations)


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of ``values``; None if there are none. A null of metrics.jsonl (not finite) counts as infinite."""
    found = tuple(math.inf if value is None else float(value) for value in values)
    return Spread(found) if found else None


def grouped(runs: Sequence[RunRecord]) -> tuple[list[Group], list[str]]:
    """The groups in the order of scale and method, and a remark on each run that is left out.

    Of several runs with the same configuration and seed, the one with the most steps is kept.
    """
    found: dict[str, list[RunRecord]] = {}
    shared: dict[str, dict] = {}
    remarks: list[str] = []
    for run, same in _shared(runs):
        found.setdefault(_text(same), []).append(run)
        shared[_text(same)] = same
    groups = []
    for key, members in found.items():
        seeds: dict[int, list[RunRecord]] = {}
        for run in members:
            seeds.setdefault(run.seed, []).append(run)
        chosen = []
        for seed in sorted(seeds):
            first, *others = sorted(seeds[seed], key=lambda run: (-run.step, run.name))
            chosen.append(first)
            remarks += [f"{r.folder} is left out: {first.folder} has the same configuration and seed" for r in others]
        groups.append(Group(tuple(chosen), shared[key]))
    return sorted(_named(groups), key=_order), remarks


def _shared(runs: Sequence[RunRecord]) -> Iterator[tuple[RunRecord, dict]]:
    """Each run with the ``shared`` identity of its group.

    A run whose ``data.seed`` equals its seed is taken to order the data by its seed, unless a run with another seed has
    the same ``data.seed``. That order is then fixed for all runs, and equals the seed by chance. The runs that can show
    this are those that differ only in seed and residual; if these all have one seed, any run can.
    """
    families: dict[str, list[tuple[RunRecord, dict]]] = {}
    for run in runs:
        same = {k: v for k, v in run.identity.items() if k not in ("seed", "data.seed", *ORIGIN)}
        family = _text({k: v for k, v in same.items() if not k.startswith("dlr.")})
        families.setdefault(family, []).append((run, same))
    for family in families.values():
        alike = [run for run, _ in family] if len({run.seed for run, _ in family}) > 1 else runs
        one_order = {run.identity.get("data.seed") for run in alike if not ordered_by_seed(run)}
        for run, same in family:
            by_seed = ordered_by_seed(run) and run.seed not in one_order
            yield run, same | {"data.seed": "seed" if by_seed else run.identity.get("data.seed")}


def ordered_by_seed(run: RunRecord) -> bool:
    """Whether the order of the data may follow the seed (``data.seed=${seed}``); they may also be equal by chance."""
    return run.identity.get("data.seed") == run.seed


def pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """Pairs of groups (without DLR, with DLR) that differ in nothing else."""
    plain = {g.without("dlr."): g for g in groups if g.config["dlr"]["name"] == "off"}
    return [(plain[key], g) for g in groups if g.config["dlr"]["name"] == "on" and (key := g.without("dlr.")) in plain]


def difference(a: Group, b: Group, value: Callable[[RunRecord], float | None]) -> Spread | None:
    """b - a by seed, over the seeds that both have finished; None if there is no such seed."""
    first = {run.seed: value(run) for run in a.finished}
    both = [(first[run.seed], value(run)) for run in b.finished if run.seed in first]
    return spread(math.inf if None in pair else pair[1] - pair[0] for pair in both)


# ----------------------------------------------------------------------------------------------------
# Names

TAKEN_FROM_SCALE = {  # a variant leaves out a key of a scale if it has the key that takes its value
    "scale.rank": "backbone.rank",
    "scale.lr": "train.lr",
    "scale.steps": "train.steps",
    "scale.global_batch": "train.global_batch",
    "scale.adam_eps": "optimizer.eps",
    "scale.eval_tokens": "eval.tokens",
}


def _named(groups: list[Group]) -> list[Group]:
    """The groups with their variants: the keys in which a group differs from the main one of its scale and method.

    The main group is the one whose values most runs of that scale share.
    """
    common: dict[str, Counter] = {}
    for group in groups:
        for key, value in group.shared.items():
            common.setdefault(f"{group.scale} {key}", Counter())[_text(value)] += len(group.runs)
    named = []
    for group in groups:
        others = [g for g in groups if (g.scale, g.method) == (group.scale, group.method)]
        keys = differing([g.shared for g in others])

        def usual(g: Group, keys: list[str] = keys) -> tuple[int, int]:
            votes = sum(common[f"{g.scale} {k}"][_text(g.shared[k])] for k in keys if k in g.shared)
            return votes, len(g.runs)

        main = max(others, key=usual)  # the first if several are equal
        changed = [k for k in keys if group.shared.get(k, MISSING) != main.shared.get(k, MISSING)]
        own = [k for k in changed if TAKEN_FROM_SCALE.get(k) not in changed]
        named.append(Group(group.runs, group.shared, ", ".join(_override(k, group.shared) for k in own)))
    return named


def differing(identities: Sequence[dict]) -> list[str]:
    """The keys whose values are not the same in all ``identities``, in the order in which they appear."""
    keys = dict.fromkeys(key for identity in identities for key in identity)
    return [key for key in keys if len({_text(identity.get(key, "absent")) for identity in identities}) > 1]


def differing_text(runs: Iterable[RunRecord]) -> list[str]:
    """The keys by which the runs are evaluated on different text. If there are any, losses cannot be compared."""
    scored = [{key: run.identity.get(key, "absent") for key in TEXT} for run in runs]
    padded = {"data.mask_documents": False}  # a row holds one document, so nothing is masked
    return differing([one | padded if one["eval.packing"] == "pad" else one for one in scored])


def _override(key: str, shared: dict) -> str:
    value = shared.get(key, "absent")
    shown = f"{value:.8}…" if isinstance(value, str) and len(value) == 64 else value  # a digest
    return f"{key.removesuffix('.name')}={'null' if shown is None else shown}"


SCALE_ORDER = ("tiny", "60m", "130m", "350m", "1b", "7b")
METHODS = ("full", "lora", "relora", "galore", "fira", "sltrain", "loro", "lowrank", "cola", "lost", "lax", "cola_lax")


def _order(group: Group) -> tuple:
    return (*rank(group.scale, SCALE_ORDER), *rank(group.base, METHODS), len(group.method), group.method, group.variant)


def rank(name: str, known: Sequence[str]) -> tuple[int, str]:
    """A key to sort by: the known names in their order, then the others."""
    return (known.index(name) if name in known else len(known)), name


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
