"""Small exported folders for the tests of what is done with them."""

from __future__ import annotations

from pathlib import Path

import torch

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.data.sample import train_tokenizer
from dlr_pretrain.deploy.export import export
from dlr_pretrain.models.llama import Llama


def tokenizer_of(folder: Path, texts: list[str], pieces: int = 90) -> Path:
    """A sentencepiece model in T5's layout, trained on ``texts``."""
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer(folder / "spiece.model", texts, pieces=pieces)
    return folder / "spiece.model"


def configured(*overrides: str) -> Config:
    """The configuration of ``exported``."""
    small = ("scale=tiny", "scale.hidden_size=32", "scale.intermediate_size=83", "scale.num_heads=4")
    data = ("data=sample", "precision=fp32", "device=cpu", "logger=jsonl")
    return load([*small, "scale.num_layers=3", *data, *overrides])


def exported(folder: Path, spiece: Path, *overrides: str, rows: int = 100, seed: int = 0) -> Path:
    """``folder``, with a model of random weights so large that its choices differ."""
    cfg = configured(*overrides)
    torch.manual_seed(seed)
    model = Llama(cfg, rows)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape) * 0.2 if p.ndim > 1 else 0.5 + torch.rand(p.shape))
    export(folder, model.state_dict(), cfg, rows, spiece, {"step": 1})
    return folder
