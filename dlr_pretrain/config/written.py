"""Reads what describes a run in its directory: ``config.yaml``, its options, and ``manifest.json``, its record."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dlr_pretrain.util.errors import UserError, first_line

MANIFEST = "manifest.json"


def read_config(run_dir: Path) -> dict:
    """The tree that ``run_dir/config.yaml`` holds; raises UserError if it is missing or damaged."""
    path = run_dir / "config.yaml"
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError:
        raise UserError(f"{path} is missing: {run_dir} is no run directory") from None
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}). Restore it from a backup") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} is damaged: it holds no keys. Restore it from a backup")
    return tree


def read_record(run_dir: Path) -> dict:
    """``run_dir/manifest.json``: identity, state, starts, saved (the last step), started_from, micro_batch.

    Empty if there is no such file; raises UserError if it is damaged.
    """
    path = run_dir / MANIFEST
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sound = isinstance(record["identity"], dict) and isinstance(record["starts"], list)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise UserError(
            f"{path} is damaged. Move it away to resume; settings are then not checked against those of the run"
        )
    return record
