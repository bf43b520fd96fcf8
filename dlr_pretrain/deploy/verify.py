"""Checks, when a folder is exported, that ``transformers`` computes with it what was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.data.tokenizer import load_tokenizer
from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.models import Llama
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.process import without_warnings

# Largest difference of any logit, in units of the logits' standard deviation, that passes. Measured on 2 x 256 ids with
# vocabulary 32,000, new and shortly trained models: fp32 3e-6 (tiny, 60m); bf16 0.03 (tiny, 60m) to 0.07 (350m, full).
# A residual that was left unfolded shows as 0.4, a wrong RoPE base as 0.06 to 0.14. Training lets rounding errors grow:
# fp32 against fp64 of 24 CoLA blocks differ by 4e-6 when new, by 8e-5 and 7e-3 with all weights doubled and tripled.
BOUNDS = {torch.float32: 1e-2, torch.bfloat16: 0.25}
VERIFIED_SEQUENCES = 2
PROBE = "The tokenizer's own check: 3,141 ways\nto write </s>, “naïve” ﬁnds and  two  spaces."


@torch.no_grad()
def agreement(
    folder: Path,
    cfg: Config,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    merged: bool,
    ids: Tensor,
    device: torch.device | None = None,
) -> str:
    """Compare ``folder`` with our model of ``cfg`` and ``tensors``, on token ids [B, T] in fp32; the result in words.

    Our own model computes on ``device`` (None: the CPU). ``dtype`` is that of the folder's weights, which are those of
    ``tensors``, or ``merged`` from them. Raises UserError if the folder does not load strictly, its logits differ by
    more than the bound, or its tokenizer does not give the ids of training.
    """
    try:
        with without_warnings():
            import transformers  # noqa: F401
    except Exception as error:  # also from its own imports, such as a torchvision built for another torch
        return f"not verified: transformers cannot be imported ({first_line(error)})"
    with torch.device("meta"):
        model = Llama(cfg, len(tensors["lm_head.weight"]))
    model.to_empty(device=device or "cpu")
    model.load_state_dict(tensors)
    trained = model.logits(ids.to(device or "cpu")).cpu()
    del model  # before the folder's own is there
    with without_warnings():
        exported, tokenizer = open_folder(folder, torch.float32)
    difference = ((exported(input_ids=ids).logits - trained).abs().max() / trained.std()).item()
    bound = BOUNDS[dtype if merged else torch.float32]  # a merge rounds once more
    if not difference <= bound:  # NaN is beyond it too
        raise UserError(
            f"{folder}: the logits that transformers computes differ from the trained model's by {difference:.2g} of "
            f"their standard deviation, beyond the bound of {bound:g}"
        )
    if [tokenizer(PROBE, split_special_tokens=True).input_ids] != [load_tokenizer(folder).encode([PROBE])[0].tolist()]:
        raise UserError(f"{folder}: its tokenizer.json does not give the ids that the model was trained on")
    return f"transformers loads it, its logits agree to {difference:.0e} of their standard deviation"
