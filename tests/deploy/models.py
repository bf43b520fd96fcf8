"""Small models, their configurations and exported folders, for the tests of exports."""

from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data.sample import train_tokenizer
from dlr_pretrain.deploy.export import export
from dlr_pretrain.models.llama import Llama
from tests.parity.reference import disturbed, small, weights

KINDS = {  # a backbone, with the options that differ from its defaults
    "full": (),
    "lowrank": (),
    "cola": (),
    "cola-linear": ("latent_scale=0.3", "swiglu_silu=false"),
    "lost": ("sparsity=0.1",),
    "lax": ("gate=tensor",),
    "lax-dense": ("gate=dense",),
    "cola_lax": (),
    "cola_lax-grouped": ("scale.num_heads=4", "scale.num_kv_heads=2", "scale.head_dim=6", "scale.rope_theta=500"),
}


def of_kind(kind: str) -> Config:
    """A configuration of three blocks. No export may name the folder of its text."""
    own = (knob if "." in knob.split("=")[0] else f"backbone.{knob}" for knob in KINDS[kind])
    return small(kind.split("-")[0], *own, "precision=fp32", "device=cpu", "data.root=/private/texts", layers=3)


def trained(cfg: Config, rows: int) -> Llama:
    """A model as after training: its norms are not one, and its logits are not tiny."""
    model = disturbed(cfg, torch.float32, rows)
    model.lm_head.weight.data.mul_(10)
    return model


def exported(folder: Path, spiece: Path, cfg: Config, rows: int = 100) -> Path:
    model = trained(cfg, rows)
    export(folder, cfg, weights(model), spiece, {"step": 1})
    return folder


def tokenizer_of(folder: Path, texts: list[str], pieces: int = 90) -> Path:
    """A sentencepiece model in T5's layout, trained on ``texts``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spiece.model").write_bytes(train_tokenizer(texts, vocab_size=pieces))
    return folder / "spiece.model"
