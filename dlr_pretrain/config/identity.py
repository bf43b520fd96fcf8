"""The keys that decide the mathematics of a run, and the run's name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import PurePath

from dlr_pretrain.config.parse import all_keys, flatten, to_dict
from dlr_pretrain.config.problems import shown
from dlr_pretrain.config.tree import Config

# The origin of text and tokenizer may change, even from shards of text to tokens made from them. Fingerprints, not
# these keys, ensure that text and tokenizer stay the same.
ORIGIN = {*(f"data.{name}" for name in ("source", "dataset", "root", "train_files", "validation_files", "text_key",
                                        "held_out", "document", "bad_rows")),
          "tokenizer.path", "tokenizer.hub"}  # fmt: skip


def identity(cfg: Config) -> dict[str, object]:
    """The dotted keys that take part in the mathematics of a run, with their values as JSON returns them."""
    tree = to_dict(cfg)
    tree["data"]["streams"] = cfg.num_streams
    keys = all_keys(tree)
    return json.loads(json.dumps({name: value for name, value in flatten(tree).items() if keys[name].identity}))


def differences(there: Mapping, here: Mapping) -> dict[str, tuple[object, object]]:
    """The keys in which two runs differ, with both values. Keys of ORIGIN or of only one run do not count."""
    return {k: (there[k], here[k]) for k in there if k in here and k not in ORIGIN and there[k] != here[k]}


def told(changed: Mapping[str, tuple[object, object]], between: str = ", ") -> str:
    """The keys of ``differences`` as text."""
    return between.join(f"{name}: {shown(there)} there, {shown(here)} here" for name, (there, here) in changed.items())


def run_name(cfg: Config, choices: Mapping[str, str], defaults: Mapping[str, str], given: Collection[str]) -> str:
    """A stable name: the chosen options, the seed, and a short hash of the other keys that were ``given``.

    The name leaves out options that are in ``defaults``, except scale, backbone and dlr. Only keys that take part in
    the mathematics count, by their values: spelling and order do not matter.
    """
    parts = [choices["scale"], choices["backbone"], f"dlr_{choices['dlr']}"]
    for group in ("optimizer", "data", "precision", "experiment"):
        if choices.get(group) and choices[group] != defaults.get(group):
            parts.append(PurePath(choices[group]).name)
    parts.append(f"s{cfg.seed}")
    matter = {name: value for name, value in identity(cfg).items() if name in given and name != "seed"}
    if matter:
        parts.append(hashlib.sha256(json.dumps(matter, sort_keys=True).encode()).hexdigest()[:8])
    return "-".join(parts)
