"""Writes folded weights as a folder that ``transformers`` loads.

The folder is written under another name, checked, and renamed at the end: it is either complete or absent.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.data.tokenizer import load_tokenizer
from dlr_pretrain.deploy.card import card
from dlr_pretrain.deploy.folder import agreement
from dlr_pretrain.deploy.tokenizer import export_tokenizer
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.models.linear import named_groups
from dlr_pretrain.models.llama import INIT_STD, NORM_EPS, ROPE_BASE, Llama, backbone
from dlr_pretrain.util.errors import UserError, write_to_stderr
from dlr_pretrain.util.files import sync
from dlr_pretrain.util.text import loading

POSITIONS = 1024  # at least; a run with longer sequences has its own length
SHARD_BYTES = 5 * 10**9
MODELING = Path(__file__).with_name("modeling_lowrank_llama.py")
EXPORTED = {  # the backbones that MODELING has a layer for, and the knobs that these layers take
    "lowrank": ("rank", "latent_scale"),
    "cola": ("rank", "latent_scale"),
    "lost": ("rank", "gamma", "sparsity", "activation"),
    "lax": ("rank", "gate"),
    "cola_lax": ("rank", "gate"),
}
AUTO_CLASSES = {
    "AutoConfig": "Config",
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
}


def export(
    folder: Path,
    cfg: Config,
    folded: dict[str, Tensor],
    tokenizer_path: Path,
    record: dict[str, object],
    ids: Tensor | None = None,
    merge: bool = False,
    dtype: torch.dtype | None = None,
) -> str:
    """Write ``folder`` from the folded parameters and buffers of the model of ``cfg``; says how it was checked.

    ``merge`` and ``dtype`` are those of ``deployed``, ``tokenizer_path`` is a file or folder, and ``record`` has the
    final numbers of the run, by name, for the folder's README and ``fold.json``. With token ``ids`` [B, T], what
    transformers loads is compared with our own model, on the CPU.

    Raises UserError if the folder is not what was trained; it then remains as ``.<folder>.partial``. An earlier folder
    becomes ``<folder>_1`` (or 2, 3, ...).
    """
    own, tensors = deployed(cfg, folded, merge, dtype)
    vocab_size, kind = len(tensors["lm_head.weight"]), tensors["lm_head.weight"].dtype
    tokenizer = load_tokenizer(tokenizer_path)
    ends = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
    settings = model_config(own, vocab_size, kind) | ends | {"tokenizer_sha256": tokenizer.fingerprint}
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_weights(partial, tensors)
    loadable = own.backbone.name in (DENSE.name, *EXPORTED)
    contents = {"config": settings, "generation_config": ends} if loadable else {}
    for name, content in (contents | {"fold": record}).items():
        (partial / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if loadable and own.backbone.name != DENSE.name:
        shutil.copyfile(MODELING, partial / MODELING.name)
    export_tokenizer(partial, tokenizer_path, settings["max_position_embeddings"])
    text = card(own, record, cfg, how_to_load(own, loadable))
    (partial / "README.md").write_text(text, encoding="utf-8")
    if not loadable:
        checked = f"transformers cannot load backbone={own.backbone.name} yet: deploy/ has no layer for it"
    elif ids is None:
        checked = "not verified"
    else:
        exact = own is cfg  # a merge rounds once more
        checked = agreement(partial, cfg, tensors if exact else folded, torch.float32 if exact else kind, ids)
    for path in (*partial.rglob("*"), partial):
        sync(path)
    if folder.exists():  # a run that was extended
        names = (folder.with_name(f"{folder.name}_{n}") for n in count(1))
        older = next(name for name in names if not name.exists())
        folder.rename(older)
        write_to_stderr(f"note: the earlier {folder} is {older} now")
    partial.rename(folder)
    sync(folder.parent)
    return checked


def deployed(
    cfg: Config, tensors: dict[str, Tensor], merge: bool = False, dtype: torch.dtype | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """The configuration and tensors to export for a run of ``cfg`` that ended with the folded ``tensors``.

    A backbone whose layers are dense weights made of parts (``Group.deployed_dense``) becomes a plain LLaMA; with
    ``merge`` every backbone does. Weights are formed in fp32, rounded once to the dtype of the weights of ``tensors``,
    and then cast to ``dtype``. Raises UserError if a backbone cannot be merged.
    """
    dtype = dtype or tensors["lm_head.weight"].dtype  # under bf16_sr learned scalars are trained in fp32
    if cfg.backbone.name != DENSE.name and (merge or deployed_dense(cfg)):
        cfg, tensors = replace(cfg, backbone=DENSE), _merged(cfg, tensors)
    return cfg, {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def _merged(cfg: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.device("meta"):
        model = Llama(cfg, len(tensors["lm_head.weight"]), grouped=False)
    merged = dict(tensors)
    for prefix, group in named_groups(model):
        for name, projection in zip(group.spec.names, group.projections, strict=True):
            own = {leaf: merged.pop(f"{prefix}{name}.{leaf}") for leaf in projection.state_dict()}
            merged[f"{prefix}{name}.weight"] = group.dense(own)
    return merged


def deployed_dense(cfg: Config) -> bool:
    """Whether a run of ``cfg`` ends with a plain LLaMA."""
    return cfg.backbone.name == DENSE.name or backbone(cfg).deployed_dense


def write_weights(folder: Path, tensors: dict[str, Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model.safetensors``, or shards of at most ``shard_bytes`` (at least one tensor each) with their index.

    Raises UserError if a file cannot be written.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    # a copy of each: projections of a group are views of one storage, which safetensors refuses
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        save_torch_state_dict(own, folder, max_shard_size=shard_bytes, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{folder}: its weights cannot be written: {error}") from error
    for file in folder.glob("model*.safetensors"):
        file.chmod(folder.stat().st_mode & 0o666)  # safetensors makes it readable by its owner alone


def model_config(cfg: Config, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a plain LLaMA or of one with the layers of ``cfg.backbone``, but for the tokenizer's ids."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": cfg.scale.hidden_size,
        "intermediate_size": cfg.scale.intermediate_size,
        "num_hidden_layers": cfg.scale.num_layers,
        "num_attention_heads": cfg.scale.num_heads,
        "num_key_value_heads": cfg.scale.num_heads,
        "max_position_embeddings": max(POSITIONS, cfg.train.seq_len),
        "hidden_act": "silu" if cfg.backbone.knobs.get("swiglu_silu", True) else "linear",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": INIT_STD,
        "bos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if cfg.backbone.name == DENSE.name:
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}
    return {
        "model_type": "lowrank_llama",
        "architectures": ["LowRankLlamaForCausalLM"],
        "auto_map": {auto: f"{MODELING.stem}.LowRankLlama{own}" for auto, own in AUTO_CLASSES.items()},
        "backbone": cfg.backbone.name,
        **{name: cfg.backbone.knobs[name] for name in EXPORTED.get(cfg.backbone.name, ())},
        **shape,
    }


def how_to_load(cfg: Config, loadable: bool) -> str:
    if not loadable:
        return f"The folded weights of backbone={cfg.backbone.name}, for which {MODELING.name} has no layer yet."
    return f"""```python
{loading(".", trust=cfg.backbone.name != "full")}
prompt = tokenizer("The house stands", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```"""
