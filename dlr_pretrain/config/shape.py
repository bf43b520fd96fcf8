"""``scale.from``: the shape of a LLaMA, read from the ``config.json`` that ``transformers`` writes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dlr_pretrain.config.problems import ConfigError, Problem, as_typed
from dlr_pretrain.config.tree import KEYS
from dlr_pretrain.util.errors import first_line

FROM = "scale.from"
OURS = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rope_theta")}
OURS |= {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
         "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings"}  # fmt: skip
ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "rope_scaling": "default"}  # fmt: skip


def name_of(source: str) -> str:
    """The name of a scale that is read from ``source``: of the repository, or of the folder with the file."""
    path = Path(source).resolve()
    return re.sub(r"[^\w.-]", "_", path.parent.name if path.name == "config.json" else path.name)


def read_shape(source: str, given: Collection[str]) -> dict[str, Any]:
    """The keys of ``scale`` from ``source``, a ``config.json``, its folder or a repository of the hub, without prefix.

    Keys that are missing there have our defaults, which are those of ``transformers``. Raises ConfigError if the file
    cannot be read, or describes a model that this project does not have. A rotary base in ``given``, the user's keys,
    stands for the whole embedding: the file's scaling of it is then ignored.
    """
    path = Path(source)
    try:
        if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", source):
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(source, "config.json"))
        text = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
        there = {name: value for name, value in json.loads(text).items() if value is not None}
        rope = there.get("rope_scaling", {}) | there.get("rope_parameters", {})  # of transformers 4, and of 5
        there |= {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        rule = f"cannot be read: {type(error).__name__}: {first_line(error)}"
        raise ConfigError([Problem(FROM, source, rule, "Name a file, its folder, or owner/name on the hub")]) from error
    there["rope_scaling"] = rope.get("rope_type", rope.get("type", "default"))
    fixes = {
        "rope_scaling": f"Without it, the model is another: for that, set scale.rope_theta={there.get('rope_theta')}"
    }
    problems = [
        Problem(FROM, source, f"{name} is {as_typed(there[name])}, here {as_typed(ours)}", fixes.get(name, ""))
        for name, ours in ONLY.items()
        if there.get(name, ours) != ours and not (name in fixes and "scale.rope_theta" in given)
    ]
    if problems:
        raise ConfigError(problems)
    return {ours: there.get(name, KEYS[f"scale.{ours}"].default) for name, ours in OURS.items()}
