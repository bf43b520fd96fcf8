"""Fold a saved checkpoint: from a run directory to a folder that ``transformers`` loads, at any step."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from dlr_pretrain.config import Config, ConfigError, parse
from dlr_pretrain.deploy.export import export
from dlr_pretrain.deploy.merge import deployed
from dlr_pretrain.errors import UserError
from dlr_pretrain.models import build
from dlr_pretrain.models.dlr import folded_state, residuals


def fold_checkpoint(
    checkpoint: Path, output: Path, dtype: torch.dtype | None = None, merge: bool = False
) -> tuple[int, bool]:
    """Write the folded weights of ``<run>/checkpoints/step_*`` to ``output``.

    ``dtype`` casts the folded weights; None keeps the checkpoint's own: fp32 for runs with masters, whose bf16 cast
    equals the working weights bit for bit. ``merge`` multiplies linear factors out into a plain LLaMA. Returns the
    number of folded layers, and whether they were merged.
    """
    run = checkpoint.resolve().parent.parent
    cfg = read_config(run / "config.yaml")
    tensors = load_file(checkpoint / "model.safetensors")
    rows = len(tensors["lm_head.weight"])
    model = build(cfg, rows, torch.device("meta"))
    own, tensors = deployed(cfg, folded_state(model, tensors), merge)
    if dtype is not None:
        tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    state = json.loads((checkpoint / "state.json").read_text())
    record = {name: state[name] for name in ("step", "tokens", "real_tokens")}
    export(output, tensors, own, rows, run / "spiece.model", record, trained=cfg)
    return len(residuals(model)), own.backbone != cfg.backbone


def read_config(path: Path) -> Config:
    """The configuration that a run has written."""
    if not path.exists():
        raise UserError(f"{path} is missing: name a checkpoint inside its run directory")
    tree = OmegaConf.to_container(OmegaConf.load(path))
    cfg, problems = parse(tree, {group: tree[group] for group in ("backbone", "optimizer")})
    if cfg is None:
        raise ConfigError(problems)
    return cfg
