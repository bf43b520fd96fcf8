"""The cost of a group's model: trained parameters, and FLOPs per position, counted as ``plan`` counts them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.analysis.groups import Group
from dlr_pretrain.analysis.records import VOCABULARY, RunRecord
from dlr_pretrain.analysis.table1 import counts
from dlr_pretrain.config.composition import recorded
from dlr_pretrain.models.flops import flops_per_token
from dlr_pretrain.util.errors import UserError

IRRELEVANT = (
    *("data.", "eval.", "precision.", "optimizer.", "run.", "probe.", "tokenizer.hub", "tokenizer.path"),
    *("train.lr", "train.steps", "train.warmup_steps", "train.min_lr_ratio", "train.clip", "train.accumulate"),
    *("scale.lr", "scale.steps", "scale.warmup_steps", "scale.adam_eps", "scale.eval_tokens"),
)


@dataclass(frozen=True)
class Cost:
    """Trained parameters, and FLOPs of forward and backward for one position."""

    parameters: int
    flops: float


def costs(groups: Sequence[Group]) -> tuple[list[Cost | None], list[str]]:
    """The cost of each group, and remarks on groups without one.

    A cost is None if the current code cannot build the model, or if the size of its vocabulary is not known.
    """
    sizes = vocabularies(groups)
    known: dict[str, Cost | str] = {}
    found: list[Cost | None] = []
    remarks = []
    for group in groups:
        model = model_key(group)
        if model not in known:
            try:
                known[model] = _cost(group.runs[0], sizes[tokenizer(group)])
            except (UserError, ValueError, LookupError) as error:
                known[model] = f"neither parameters nor FLOPs of {group.label} at {group.scale} are known: {error}"
        cost = known[model]
        if isinstance(cost, str):
            remarks.append(cost)
        found.append(cost if isinstance(cost, Cost) else None)
    return found, list(dict.fromkeys(remarks))


def model_key(group: Group) -> str:
    """A key that is equal for groups whose models have the same parameters and products.

    A residual that is added to the weights (``impl=weight``) changes neither, unless B is frozen or alpha is learned.
    """
    dlr = group.config["dlr"]
    folded = not dlr["enabled"] or (dlr["impl"] == "weight" and dlr["train_b"] and not dlr["learn_alpha"])
    return group.without(*IRRELEVANT, *(["dlr."] if folded else []))


def _cost(run: RunRecord, vocabulary: int | None) -> Cost:
    if vocabulary is None:
        raise UserError("the size of its vocabulary is known when it has finished")
    cfg = recorded(run.config)
    ranks = run.starts[-1]["world_size"] if run.starts else 1
    auto = run.manifest.get("micro_batch", {}).get(str(ranks)) if cfg.train.micro_batch == "auto" else None
    if auto:
        cfg = cfg.with_micro_batch(auto)
    return Cost(counts(cfg, vocabulary).trained, flops_per_token(cfg, vocabulary, cfg.micro_batch(ranks)))


def vocabularies(groups: Sequence[Group]) -> dict[object, int | None]:
    """The vocabulary size for each ``tokenizer``: the configured one, else that of an exported model, else None."""
    sizes: dict[object, int | None] = {}
    for group in groups:
        for run in group.runs:
            known = sizes.get(tokenizer(group)) or run.config["scale"].get("vocab_size")
            sizes[tokenizer(group)] = known or run.manifest.get(VOCABULARY) or exported_vocabulary(run.folder)
    return sizes


def tokenizer(group: Group) -> tuple:
    """What determines the vocabulary: the tokenizer's fingerprint and the configured size."""
    return group.shared.get("tokenizer.pieces"), group.config["scale"].get("vocab_size")


def exported_vocabulary(run_dir: Path) -> int | None:
    """The embedding rows of the run's exported model; None if there is no such model."""
    try:
        return json.loads((run_dir / "folded" / "config.json").read_text())["vocab_size"]
    except (OSError, ValueError, KeyError):
        return None
