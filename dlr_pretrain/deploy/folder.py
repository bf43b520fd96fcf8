"""Opens a deployed folder through ``transformers``, and what the commands on such folders share."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from dlr_pretrain.models.start import listed, misfits
from dlr_pretrain.util.errors import UserError, first_line


def open_folder(folder: Path, dtype: torch.dtype | str = "auto"):
    """The ``PreTrainedModel`` of an exported folder, on the CPU and in evaluation mode, and its tokenizer.

    The weights are cast to ``dtype``; "auto" keeps that of the file. The low-rank layers are this package's own, so
    that no code of the folder runs. Raises UserError as ``check_folder`` does.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    check_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    return model.eval(), AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def check_folder(folder: Path) -> None:
    """Raise UserError, which lists the tensors that do not fit, unless ``folder`` is what an export wrote.

    Reads headers alone. ``transformers`` itself would warn of missing weights and draw them at random.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM

    disable_progress_bar()
    AutoConfig.register(LowRankLlamaConfig.model_type, LowRankLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(LowRankLlamaConfig, LowRankLlamaForCausalLM, exist_ok=True)
    if not (folder / "config.json").is_file():
        fix = "Name a folder that an export wrote, such as runs/<name>/folded (scripts/fold.py for a checkpoint)"
        if (folder / "folded" / "config.json").is_file():
            fix = f"Name {folder / 'folded'}"
        raise UserError(f"{folder}: has no config.json. {fix}")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            expected = AutoModelForCausalLM.from_config(config, trust_remote_code=False).state_dict()
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder}/config.json: is not that of an export: {first_line(error)}") from error
    whole = folder / "model.safetensors"
    found: dict[str, list[int]] = {}
    for file in [whole] if whole.exists() else sorted(folder.glob("model-*-of-*.safetensors")):
        try:
            with safe_open(file, framework="pt") as stored:
                found |= {name: stored.get_slice(name).get_shape() for name in stored.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{file}: not a whole safetensors file: {error}. Export the folder again") from error
    if unfolded := [name for name in found if name.endswith((".dlr_mark", ".dlr_alpha"))]:
        fix = "call fold_ before saving, or fold the run's checkpoint with scripts/fold.py"
        raise UserError(f"{folder}: {len(unfolded)} residuals were not folded, such as {unfolded[0]}; {fix}")
    if wrong := misfits(found, {name: list(tensor.shape) for name, tensor in expected.items()}):
        raise UserError("\n".join([f"{folder}: its weights are not those of its config.json:", *listed(wrong)]))


def need(package: str, extra: str) -> str:
    """The installed version of ``package``, which ``pip install -e ".[extra]"`` installs; UserError if it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        fix = f'Install it with: pip install -e ".[{extra}]"'
        raise UserError(f"this command needs {package}, which is not installed. {fix}") from None


def device_of(given: str | None) -> torch.device:
    """The device named ``given`` ("cuda": this rank's GPU; None: a GPU if there is one). UserError if it is absent."""
    given = given or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        if given == "cuda":
            device = torch.device(given, int(os.environ.get("LOCAL_RANK", 0)))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {given}: {first_line(error)}. Give cpu, cuda or cuda:<number>") from error
    return device
