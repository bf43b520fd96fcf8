"""Opens a deployed folder through ``transformers``, and checks that it computes what was trained."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.data.tokenizer import load_tokenizer
from dlr_pretrain.models import Llama
from dlr_pretrain.models.start import listed
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.process import without_warnings

# Largest difference of any logit, in units of the logits' standard deviation, that passes. Measured on 2 x 256 ids with
# vocabulary 32,000, new and shortly trained models: fp32 3e-6 (tiny, 60m); bf16 0.03 (tiny, 60m) to 0.07 (350m, full).
# A residual that was left unfolded shows as 0.4, a wrong RoPE base as 0.06 to 0.14. Training lets rounding errors grow:
# fp32 against fp64 of 24 CoLA blocks differ by 4e-6 when new, by 8e-5 and 7e-3 with all weights doubled and tripled.
BOUNDS = {torch.float32: 1e-2, torch.bfloat16: 0.25}
VERIFIED_SEQUENCES = 2
PROBE = "The tokenizer's own check: 3,141 ways\nto write </s>, “naïve” ﬁnds and  two  spaces."


def open_folder(folder: Path, dtype: torch.dtype | str = "auto"):
    """The ``PreTrainedModel`` of an exported folder, on the CPU and in evaluation mode, and its tokenizer.

    The weights are cast to ``dtype``; "auto" keeps that of the file. The low-rank layers are this package's own, so
    that no code of the folder runs. Raises UserError, which lists the tensors that do not fit, unless ``folder`` is
    what an export wrote; ``transformers`` itself would only warn of missing weights, and draw them at random.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    with without_warnings():
        from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM

    AutoConfig.register(LowRankLlamaConfig.model_type, LowRankLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(LowRankLlamaConfig, LowRankLlamaForCausalLM, exist_ok=True)
    if not (folder / "config.json").is_file():
        fix = "Name a folder that an export wrote, such as runs/<name>/folded (scripts/fold.py for a checkpoint)"
        raise UserError(f"{folder}: has no config.json. {fix}")
    disable_progress_bar()
    lenient = {"ignore_mismatched_sizes": True, "output_loading_info": True, "trust_remote_code": False}
    try:
        with without_warnings():
            model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **lenient)
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of any type: from a configuration, a file of tensors or a tokenizer that is damaged
        raise UserError(f"{folder}: is not what an export wrote: {first_line(error)}. Export it again") from error
    unexpected = sorted(report["unexpected_keys"])
    if unfolded := [name for name in unexpected if name.endswith((".dlr_mark", ".dlr_alpha"))]:
        fix = "call fold_ before saving, or fold the run's checkpoint with scripts/fold.py"
        raise UserError(f"{folder}: {len(unfolded)} residuals were not folded, such as {unfolded[0]}; {fix}")
    wrong = [f"{name}: missing" for name in sorted(report["missing_keys"])]
    wrong += [f"{name}: not a tensor of this model" for name in unexpected]
    wrong += [f"{n}: has shape {[*has]} instead of {[*needs]}" for n, has, needs in sorted(report["mismatched_keys"])]
    if wrong:
        raise UserError("\n  ".join([f"{folder}: its weights are not those of its config.json:", *listed(wrong)]))
    return model.eval(), tokenizer


@torch.no_grad()
def agreement(folder: Path, cfg: Config, tensors: dict[str, Tensor], rounded: torch.dtype, ids: Tensor) -> str:
    """Compare ``folder`` with our model of ``cfg`` and ``tensors``, on token ids [B, T] in fp32; the result in words.

    The bound is that of the dtype to which the folder's weights were ``rounded`` once more than ``tensors``; fp32 if
    they are the same. Raises UserError as ``open_folder`` does, if the logits differ by more than the bound, or if the
    tokenizer does not give the ids of training.
    """
    try:
        with without_warnings():
            import transformers  # noqa: F401
    except Exception as error:  # also from its own imports, such as a torchvision built for another torch
        return f"not verified: transformers cannot be imported ({first_line(error)})"
    with torch.device("meta"):
        model = Llama(cfg, len(tensors["lm_head.weight"]))
    model.to_empty(device="cpu")
    model.load_state_dict(tensors)
    trained = model.logits(ids)
    del model  # before the folder's own is there
    exported, tokenizer = open_folder(folder, torch.float32)
    difference = ((exported(input_ids=ids).logits - trained).abs().max() / trained.std()).item()
    if not difference <= BOUNDS[rounded]:  # NaN is beyond it too
        raise UserError(
            f"{folder}: the logits that transformers computes differ from the trained model's by {difference:.2g} of "
            f"their standard deviation, beyond the bound of {BOUNDS[rounded]:g}"
        )
    if [tokenizer(PROBE, split_special_tokens=True).input_ids] != [load_tokenizer(folder).encode([PROBE])[0].tolist()]:
        raise UserError(f"{folder}: its tokenizer.json does not give the ids that the model was trained on")
    return f"transformers loads it, its logits agree to {difference:.0e} of their standard deviation"


def need(package: str, extra: str) -> str:
    """The installed version of ``package``, which ``pip install -e ".[extra]"`` installs; UserError if it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        fix = f'Install it with: pip install -e ".[{extra}]"'
        raise UserError(f"this command needs {package}, which is not installed. {fix}") from None
