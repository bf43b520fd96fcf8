"""The shape of a LLaMA in the ``config.json`` of ``transformers``, from which ``scale.from`` reads it."""

import json
import re
from pathlib import Path
from typing import Any

from dlr_pretrain.config.key import ON_THE_HUB
from dlr_pretrain.config.problems import ConfigError, Problem, as_typed
from dlr_pretrain.config.tree import KEYS, Scale
from dlr_pretrain.util.errors import first_line

FROM = "scale.from"
OURS = {name: name for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rope_theta")}
OURS |= {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
         "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings"}  # fmt: skip
ONLY = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0}
PLAIN = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1}  # rotary embeddings


def settings_of(scale: Scale) -> dict[str, Any]:
    """The shape of ``scale`` by the names of ``transformers``, without the vocabulary."""
    shape = {theirs: getattr(scale, ours) for theirs, ours in OURS.items() if ours != "vocab_size"}
    return shape | {"num_key_value_heads": scale.kv_heads, "head_dim": scale.head_width}


def name_of(source: str) -> str:
    """The name of a scale that is read from ``source``: of the repository, or of the folder with the file."""
    path = Path(source).resolve()
    return re.sub(r"[^\w.-]", "_", path.parent.name if path.name == "config.json" else path.name.removesuffix(".json"))


def read_shape(source: str, given: set[str]) -> dict[str, Any]:
    """The keys of ``scale`` from ``source``, a ``config.json``, its folder or a repository of the hub, without prefix.

    Where the file has none, our defaults are those of ``transformers``. Raises ConfigError if it cannot be read, or is
    of a model that this project does not have; of its rotary embeddings, only if their base is not in ``given``.
    """
    path = Path(source)
    try:
        if not path.exists() and ON_THE_HUB.fullmatch(source):
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(source, "config.json"))
        text = (path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8")
        there = json.loads(text)
        if not isinstance(there, dict):
            raise ValueError("it holds no settings by name")
        rotary = (there.get("rope_scaling") or {}) | (there.get("rope_parameters") or {})  # of transformers 4, and of 5
        there = {name: value for name, value in (rotary | there).items() if value is not None}
    except (OSError, ValueError, TypeError) as error:
        rule = f"cannot be read: {type(error).__name__}: {first_line(error)}"
        raise ConfigError([Problem(FROM, source, rule, "Name a file, its folder, or owner/name on the hub")]) from error
    only = ONLY if "scale.rope_theta" in given else ONLY | PLAIN
    if other := [name for name, ours in only.items() if there.get(name, ours) != ours]:
        fixes = dict.fromkeys(PLAIN, "To train another model, with plain rotary embeddings, set scale.rope_theta")
        rules = {name: f"{name} is {as_typed(there[name])}, here {as_typed(only[name])}" for name in other}
        raise ConfigError([Problem(FROM, source, rules[name], fixes.get(name, "")) for name in other])
    return {ours: there.get(name, KEYS[f"scale.{ours}"].default) for name, ours in OURS.items()}
