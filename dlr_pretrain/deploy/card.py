"""The README.md of an exported folder: how to load it, what was trained, and how to cite it."""

from __future__ import annotations

from omegaconf import OmegaConf

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.util.text import table

CITATION = """

## Citation

```bibtex
@misc{dlr2026,
  title  = {{DLR}: Zero-Inference-Cost Latent Residuals for Low-Rank Pre-Training},
  author = {Wang and Tang and Cheng and Saukh},
  year   = {2026}
}
```"""
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
    numbers = table(["", ""], ([key, shown(value)] for key, value in rows.items()))
    tree = to_dict(trained)
    configuration = OmegaConf.to_yaml(OmegaConf.create({section: tree[section] for section in OF_THE_MODEL}))
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags: [pre-training, low-rank, {name}{", dlr" if trained.dlr.enabled else ""}]
---

# LLaMA {cfg.scale.name}, {title}

{loading}
{"" if cfg.backbone.name == "full" else PEFT}
{numbers}

The tokenizer appends no end of sequence. Training read the name of a special token in a text as ordinary characters;
the tokenizer takes it for the token, as the tools of fine-tuning expect, unless `split_special_tokens=True` is given.

## Configuration

```yaml
{configuration}```{CITATION if trained.dlr.enabled else ""}
"""


def shown(value: object, digits: int = 4) -> str:
    """A number in few digits, anything else as it is."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
