"""Small models, their configurations and exported folders, for the tests of what is deployed."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.data.sample import train_tokenizer
from dlr_pretrain.deploy.export import export
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.llama import Llama

HIDDEN, WIDE, HEADS, LAYERS, RANK = 32, 83, 4, 3, 8
KINDS = {  # a backbone, and what is special about it
    "full": (),
    "lowrank": (),
    "cola": (),
    "cola-linear": ("latent_scale=0.3", "swiglu_silu=false"),
    "lost": ("sparsity=0.1",),
    "lax": ("gate=tensor",),
    "lax-dense": ("gate=dense",),
    "cola_lax": (),
}


@cache
def configured(*overrides: str) -> Config:
    small = (f"scale.hidden_size={HIDDEN}", f"scale.intermediate_size={WIDE}", f"scale.num_heads={HEADS}")
    data = ("data=sample", "precision=fp32", "device=cpu", "logger=jsonl", "data.root=/private/texts")
    return load(["scale=tiny", *small, f"scale.num_layers={LAYERS}", *data, *overrides])


def of_kind(kind: str) -> Config:
    rank = () if kind == "full" else (f"backbone.rank={RANK}",)
    return configured(f"backbone={kind.split('-')[0]}", *rank, *(f"backbone.{knob}" for knob in KINDS[kind]))


def trained(cfg: Config, rows: int, seed: int = 0) -> Llama:
    """A model whose norms are not one and whose logits are not tiny, as after training."""
    generator = torch.Generator().manual_seed(seed)
    model = Llama(cfg, rows)
    for name, tensor in split(model, model.state_dict()).items():
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator) * 0.2
            tensor.copy_(drawn if tensor.ndim > 1 else 0.5 + drawn.abs())
        else:
            channels = torch.randperm(WIDE if "down_proj" in name else HIDDEN, generator=generator)[: len(tensor)]
            tensor.copy_(channels.sort().values)
    return model


def exported(folder: Path, spiece: Path, cfg: Config, rows: int = 100, seed: int = 0) -> Path:
    model = trained(cfg, rows, seed)
    export(folder, cfg, split(model, model.state_dict()), spiece, {"step": 1})
    return folder


def tokenizer_of(folder: Path, texts: list[str], pieces: int = 90) -> Path:
    """A sentencepiece model in T5's layout, trained on ``texts``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(train_tokenizer(texts, vocab_size=pieces))
    return folder / "spiece.model"
