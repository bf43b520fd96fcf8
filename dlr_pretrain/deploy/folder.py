"""Open a deployed folder: the model through ``transformers``, and its tokenizer through sentencepiece."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch

from dlr_pretrain.data.tokenizer import Tokenizer
from dlr_pretrain.models.shapes import listed, misfits
from dlr_pretrain.util.errors import UserError

FILES = ("config.json", "spiece.model")


def open_folder(folder: Path, dtype: torch.dtype | str = "auto"):
    """The ``PreTrainedModel`` of an exported folder, on the CPU and in evaluation mode, and its ``Tokenizer``.

    The weights are cast to ``dtype``; "auto" keeps that of the file. The low-rank layers are this package's own, so
    that no code of the folder runs. Raises UserError as ``check_folder`` does.
    """
    from transformers import AutoModelForCausalLM

    tokenizer = check_folder(folder)[1]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    return model.eval(), tokenizer


def check_folder(folder: Path) -> tuple[dict[str, list[int]], Tokenizer]:
    """The shapes of an exported folder's weights, by name, and its ``Tokenizer``; no weight is read.

    Raises UserError, which lists the tensors that do not fit, if the folder is not what an export wrote.
    """
    folder = Path(folder)
    for name in FILES:
        if not (folder / name).is_file():
            fix = "Name a folder that an export wrote, such as runs/<name>/folded (scripts/fold.py for a checkpoint)"
            if (folder / "folded" / name).is_file():
                fix = f"Name {folder / 'folded'}"
            raise UserError(f"{folder}: has no {name}. {fix}")
    tokenizer = Tokenizer(folder / "spiece.model")
    config, shapes = _described(folder)
    check_weights(folder, shapes)
    if getattr(config, "spiece_sha256", tokenizer.fingerprint) != tokenizer.fingerprint:
        raise UserError(f"{folder}/spiece.model: is another tokenizer than the one this model was trained with")
    if tokenizer.vocab_size > config.vocab_size:
        rule = f"more than the {config.vocab_size:,} rows of the model's embedding: it is another model's"
        raise UserError(f"{folder}/spiece.model: has {tokenizer.vocab_size:,} pieces, {rule}")
    return shapes, tokenizer


def _described(folder: Path):
    """transformers' configuration from ``config.json``, and the shapes of the model that it describes, by name."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM

    with contextlib.suppress(ValueError):  # an earlier call has registered them
        AutoConfig.register(LowRankLlamaConfig.model_type, LowRankLlamaConfig)
        AutoModelForCausalLM.register(LowRankLlamaConfig, LowRankLlamaForCausalLM)
    logging.disable_progress_bar()
    try:
        kind = json.loads((folder / "config.json").read_text()).get("model_type")
        if kind not in ("llama", LowRankLlamaConfig.model_type):
            raise ValueError(f"its model_type is {kind!r}. Name a folder in this package's own layout")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            expected = AutoModelForCausalLM.from_config(config, trust_remote_code=False).state_dict()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder}/config.json: is not that of an export: {error}") from error
    return config, {name: list(tensor.shape) for name, tensor in expected.items()}


def check_weights(folder: Path, expected: dict[str, list[int]]) -> None:
    """Raise UserError, which lists the differences, unless the folder's safetensors have the ``expected`` shapes."""
    found = stored_shapes(folder)
    if unfolded := [name for name in found if name.endswith((".dlr_mark", ".dlr_alpha"))]:
        fix = "call fold_ before saving, or fold the run's checkpoint with scripts/fold.py"
        more = f" and {len(unfolded) - 1} more" if unfolded[1:] else ""
        raise UserError(f"{folder}: residuals were not folded: {unfolded[0]}{more}; {fix}")
    if wrong := misfits(found, expected):
        raise UserError("\n".join([f"{folder}: its weights are not those of its config.json:", *listed(wrong)]))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that ``transformers`` reads: the single file, else the shards. Omits a user's copies."""
    whole = folder / "model.safetensors"
    return [whole] if whole.exists() else sorted(folder.glob("model-*-of-*.safetensors"))


def stored_shapes(folder: Path) -> dict[str, list[int]]:
    """Shapes by name, from the headers of ``weight_files``."""
    from safetensors import SafetensorError, safe_open

    shapes = {}
    for file in weight_files(folder):
        try:
            with safe_open(file, framework="pt") as stored:
                shapes |= {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{file}: not a whole safetensors file: {error}. Export the folder again") from error
    return shapes
