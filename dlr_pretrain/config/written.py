"""The ``config.yaml`` that a run leaves in its directory."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dlr_pretrain.errors import UserError, first_line


def read_config(run_dir: Path) -> dict:
    """The tree that ``run_dir/config.yaml`` holds; UserError where it is missing or damaged."""
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
