"""The README.md of an exported folder: how to load it, what was trained, and how to cite it."""

from __future__ import annotations

from pathlib import Path
from string import Template

from omegaconf import OmegaConf

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.util.text import table

PEFT = """
For PEFT give `target_modules="all-linear"` or `["a", "b"]`: LLaMA's `q_proj` and so on are no single matrices here.
"""
OF_THE_MODEL = ("seed", "scale", "backbone", "dlr", "optimizer", "precision", "train", "eval")  # no paths


def card(cfg: Config, record: dict[str, object], trained: Config, loading: str) -> str:
    """The text of the README. ``loading`` says how to load the folder, ``cfg`` is the model in it, ``trained`` is the
    configuration of the run, and ``record`` has the final numbers by name; None is omitted."""
    name = trained.backbone.name
    title = name + (f" + DLR ({trained.dlr.name}), folded" if trained.dlr.enabled else "")
    title += ", merged into dense weights" if name != cfg.backbone.name else ""
    text = trained.data.dataset if trained.data.source == "c4" else None  # a path says nothing to a reader
    facts = {
        "trained on": f"{text or trained.data.source}, {trained.data.packing}",
        "evaluation text": trained.eval.packing,
        "precision": trained.precision.name,
    }
    rows = {key: value for key, value in (facts | record).items() if value is not None}
    tree = to_dict(trained)
    template, citation = (Path(__file__).with_name(f"{part}.md").read_text("utf-8") for part in ("card", "citation"))
    return Template(template).substitute(
        tags=", ".join(["pre-training", "low-rank", name, *["dlr"] * trained.dlr.enabled]),
        scale=cfg.scale.name,
        title=title,
        loading=loading,
        peft="" if cfg.backbone.name == "full" else PEFT,
        numbers=table(["", ""], ([key, shown(value)] for key, value in rows.items())),
        configuration=OmegaConf.to_yaml(OmegaConf.create({section: tree[section] for section in OF_THE_MODEL})),
        citation=citation if trained.dlr.enabled else "",
    )


def shown(value: object, digits: int = 4) -> str:
    """A number in few digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
