"""``scale.from``: the shape of a LLaMA, read from the ``config.json`` that ``transformers`` writes.

Only the architecture is read. The option of ``scale`` gives the rest: rank, micro-batch and recipe.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dlr_pretrain.config.problems import MISSING, ConfigError, Problem, as_typed
from dlr_pretrain.util.errors import first_line

FROM = "scale.from"
KEYS = {  # by the names of transformers: ours, and the default there
    "vocab_size": ("vocab_size", MISSING),
    "hidden_size": ("hidden_size", MISSING),
    "intermediate_size": ("intermediate_size", MISSING),
    "num_hidden_layers": ("num_layers", MISSING),
    "num_attention_heads": ("num_heads", MISSING),
    "num_key_value_heads": ("num_kv_heads", None),
    "head_dim": ("head_dim", None),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "rope_theta": ("rope_theta", 10_000.0),
    "tie_word_embeddings": ("tie_embeddings", False),
}
FIXED = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
         "attention_dropout": 0.0, "rope_scaling": "default"}  # fmt: skip


def name_of(source: str) -> str:
    """The name of a scale that is read from ``source``: of the repository, or of the folder with the file."""
    path = Path(source).resolve()
    return re.sub(r"[^\w.-]", "_", path.parent.name if path.name == "config.json" else path.name)


def read_shape(source: str, given: Collection[str]) -> dict[str, Any]:
    """The keys of ``scale`` from ``source``, a ``config.json``, its folder or a repository of the hub, without prefix.

    Keys in ``given``, which the user sets, are left out. Raises ConfigError if ``source`` cannot be read, or describes
    a model that this project does not have.
    """
    try:
        there = {k: v for k, v in json.loads(_file(source).read_text(encoding="utf-8")).items() if v is not None}
        rope = there.get("rope_scaling", {}) | there.get("rope_parameters", {})  # of transformers 4, and of 5
    except (OSError, ValueError, AttributeError, TypeError) as error:
        rule = f"cannot be read: {type(error).__name__}: {first_line(error)}"
        fix = "Name a config.json, its folder, or owner/name on the hub"
        raise ConfigError([Problem(FROM, source, rule, fix)]) from error
    there |= {"rope_theta": rope.get("rope_theta", there.get("rope_theta", 10_000.0))}
    there |= {"rope_scaling": rope.get("rope_type", rope.get("type", "default"))}
    fixes = {"rope_scaling": f"To train without it, which is another model, set scale.rope_theta={there['rope_theta']}"}
    if "scale.rope_theta" in given:
        del there["rope_scaling"]
    problems = [
        Problem(FROM, source, f"has {name}={as_typed(there[name])}, where models here have {as_typed(ours)}",
                fixes.get(name, ""))
        for name, ours in FIXED.items() if there.get(name, ours) != ours
    ]  # fmt: skip
    keys = {name: key for name, key in KEYS.items() if f"scale.{key[0]}" not in given}
    lacking = [name for name, (_, default) in keys.items() if default is MISSING and name not in there]
    if problems := problems + [Problem(FROM, source, f"lacks {name}") for name in lacking]:
        raise ConfigError(problems)
    return {ours: there.get(name, default) for name, (ours, default) in keys.items()}


def _file(source: str) -> Path:
    """The file that ``source`` names. Raises OSError or ValueError if the hub does not have it."""
    path = Path(source)
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(source, "config.json"))
    return path / "config.json" if path.is_dir() else path
