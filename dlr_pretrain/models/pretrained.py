"""Initial weights from a folder (``run.start_from``): an export of this framework, or a plain LLaMA."""

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.config.run_folder import INDEX, WEIGHTS
from dlr_pretrain.config.shape import settings_of
from dlr_pretrain.models import adapter
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import read_json, sha256_of
from dlr_pretrain.util.text import shortened

DENSE_NAME = "model.layers.0.self_attn.q_proj.weight"  # exists in dense models, and in lora and relora (frozen)


class PretrainedFolder:
    """The weights in ``folder``: ``model.safetensors``, or shards with an index, and optionally ``config.json``.

    Names and shapes must be those of the export of ``cfg`` with ``vocab_size`` embedding rows. full, lora and relora
    start from a plain LLaMA, as transformers and the full-rank export of this framework write it. The constructor reads
    headers, but no tensors. It raises UserError with everything that does not fit, including an exported tokenizer
    whose fingerprint is not ``tokenizer``.
    """

    def __init__(self, folder: Path, cfg: Config, vocab_size: int, tokenizer: str):
        self.folder = folder
        try:
            self.files = _files(folder)
            wrong = [*self._misfits(cfg, vocab_size), *_other_settings(folder / "config.json", cfg, tokenizer)]
        except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
            wrong = [f"cannot be read: {type(error).__name__}: {error}"]
        if wrong:
            needed = "Name the folder of an exported model of this backbone and scale, with scale.vocab_size rows"
            raise UserError("\n  ".join([f"run.start_from={folder}: {needed}", *shortened(wrong)]))

    def _misfits(self, cfg: Config, vocab_size: int) -> list[str]:
        """One line for each tensor that does not fit the model."""
        expected = _shapes(cfg, vocab_size)
        if DENSE_NAME in self.files:
            if DENSE_NAME not in expected:
                return [f"it is dense, and backbone={cfg.backbone.name} cannot start from dense weights"]
            expected = _shapes(replace(cfg, backbone=DENSE), vocab_size)
        wrong = [f"{name}: missing" for name in expected if name not in self.files]
        for name, path in self.files.items():
            with safe_open(path, framework="pt") as file:
                shape = file.get_slice(name).get_shape()
            if name not in expected:
                unfolded = ", and was not folded: call fold_ before saving" if ".parametrizations." in name else ""
                wrong.append(f"{name}: not a tensor of this model{unfolded}")
            elif shape != expected[name]:
                wrong.append(f"{name}: has shape {shape} instead of {expected[name]}")
        return wrong

    def read(self, name: str) -> Tensor:
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def fingerprint(self) -> str:
        """SHA-256 over the SHA-256 digests of the tensor files, sorted by path."""
        digests = (bytes.fromhex(sha256_of(path)) for path in sorted(set(self.files.values())))
        return hashlib.sha256(b"".join(digests)).hexdigest()

    @torch.no_grad()
    def put_into_(self, model: Llama) -> None:
        """Copy these weights into ``model``, which is initialised; lora and relora keep their initial factors."""
        targets = adapter.split(model, model.state_dict())
        for name in self.files:
            targets[name].copy_(self.read(name))


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name."""
    if (folder / INDEX).exists():
        index = read_json(folder / INDEX, {"weight_map": {"*": str}})
        return {name: folder / file for name, file in index["weight_map"].items()}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / WEIGHTS)


def _shapes(cfg: Config, vocab_size: int) -> dict[str, list[int]]:
    with torch.device("meta"):
        model = Llama(cfg, vocab_size)
    return {name: list(tensor.shape) for name, tensor in adapter.split(model, model.state_dict()).items()}


def _other_settings(path: Path, cfg: Config, tokenizer: str) -> list[str]:
    """Settings in ``path`` that differ from ours and that shapes do not show (formats of transformers 4 and 5).

    Missing settings are accepted: a plain LLaMA has no backbone, and exports of other programs have no fingerprint.
    """
    if not path.exists():
        return []
    settings = {k: v for k, v in read_json(path, {}).items() if v is not None}
    if (kind := settings.get("model_type", "llama")) not in ("llama", "lowrank_llama"):
        return [f"config.json: model_type is {kind}, whose settings are not read. Remove this file if the weights fit"]
    settings = {"rope_theta": 1e4} | settings.get("rope_scaling", {}) | settings.get("rope_parameters", {}) | settings
    expected = settings_of(cfg.scale) | {"hidden_act": "silu" if cfg.backbone.swiglu_silu else "linear",
              "rope_type": "default", "type": "default",
              "backbone": cfg.backbone.name, **to_dict(cfg)["backbone"], "tokenizer_sha256": tokenizer}  # fmt: skip
    return [
        f"config.json: {name} is {settings[name]}, here {value}"
        for name, value in expected.items()
        if settings.get(name, value) != value
    ]
