"""What a run writes about itself: its configuration, its identity, its name and its record."""

from __future__ import annotations

import glob
import hashlib
import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path, PurePath

import yaml

from dlr_pretrain.config.parse import flatten, to_dict
from dlr_pretrain.config.problems import shown
from dlr_pretrain.config.tree import Config
from dlr_pretrain.util.errors import UserError, first_line

MANIFEST = "manifest.json"
# Sections and keys that take no part in the mathematics of a run: they may change on resume.
CHANGEABLE = (
    *("device", "compile", "parallel.", "logger.", "checkpoint.", "log.", "profile.", "eval.every"),
    *("run.root", "run.dir", "run.timeout_minutes", "scale.micro_batch", "data.revision", "data.cache"),
    *("tokenizer.eos", "train.micro_batch", "train.activation_checkpointing", "train.stop_after"),
    *("train.on_nonfinite", "train.max_skipped"),
)
# The origin of text and tokenizer may change, even from shards of text to tokens made from them. Fingerprints, not
# these keys, ensure that text and tokenizer stay the same.
ORIGIN = {
    *("data.source", "data.dataset", "data.root", "data.train_files", "data.validation_files", "data.text_key"),
    *("data.held_out", "data.document", "data.bad_rows", "tokenizer.path", "tokenizer.hub"),
}


def identity(cfg: Config) -> dict[str, object]:
    """The dotted keys that take part in the mathematics of a run, with their values as JSON returns them."""
    tree = to_dict(cfg)
    tree["data"]["streams"] = cfg.num_streams
    found = {name: value for name, value in flatten(tree).items() if not name.startswith(CHANGEABLE)}
    return json.loads(json.dumps(found))


def differences(there: Mapping, here: Mapping) -> dict[str, tuple[object, object]]:
    """The keys in which two runs differ, with both values. Keys of ORIGIN or of only one run do not count."""
    return {k: (there[k], here[k]) for k in there if k in here and k not in ORIGIN and there[k] != here[k]}


def describe_differences(changed: Mapping[str, tuple[object, object]], between: str = ", ") -> str:
    """The keys of ``differences`` as text."""
    return between.join(f"{name}: {shown(there)} there, {shown(here)} here" for name, (there, here) in changed.items())


def shorter_run(cfg: Config) -> str:
    """A line about a run beside a new one that differs from it in ``train.steps`` alone; empty if there is none."""
    own, folder = identity(cfg), Path(str(cfg.run.dir))
    family = re.sub(rf"(?<=-s{cfg.seed})-\w+$", "", folder.name)  # the name without the hash of its keys
    for path in [] if read_record(folder) else folder.parent.glob(f"{glob.escape(family)}*"):
        with suppress(UserError):  # a damaged record of another run
            changed = differences(read_record(path).get("identity", {}), own)
            if changed.keys() == {"train.steps"}:
                told = f"this is a new run: {path} has train.steps={changed['train.steps'][0]}. Continue it with that"
                return f"{told}, or start from it: run.start_from={path} run.start_optimizer=true"
    return ""


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


def read_config(run_dir: Path) -> dict:
    """The tree that ``run_dir/config.yaml`` holds; raises UserError if it is missing or damaged."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UserError(f"{path} is missing: {run_dir} is no run directory")
    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}). Restore it from a backup") from error


def read_record(run_dir: Path) -> dict:
    """``run_dir/manifest.json``: identity, state, starts, saved (the last step), started_from, micro_batch.

    Empty if there is no such file; raises UserError if it is damaged.
    """
    path = run_dir / MANIFEST
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record | {"identity": dict(record["identity"]), "starts": list(record["starts"])}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, KeyError, TypeError) as error:
        rule = "Move it away to resume; settings are then not checked against those of the run"
        raise UserError(f"{path} is damaged. {rule}") from error
