"""Checks, when a folder is exported, that ``transformers`` computes with it what was trained."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.data.tokenizer import load_tokenizer
from dlr_pretrain.deploy.export import loadable
from dlr_pretrain.models import Llama
from dlr_pretrain.util.errors import UserError, first_line

# Largest difference of any logit, in units of the logits' standard deviation, that passes. Measured on 2 x 256 ids with
# vocabulary 32,000, new and shortly trained models: fp32 3e-6 (tiny, 60m); bf16 0.03 (tiny, 60m) to 0.07 (350m, full).
# A residual that was left unfolded shows as 0.4, a wrong RoPE base as 0.06 to 0.14. Training lets rounding errors grow:
# fp32 against fp64 of 24 CoLA blocks differ by 4e-6 when new, by 8e-5 and 7e-3 with all weights doubled and tripled.
BOUNDS = {torch.float32: 1e-2, torch.bfloat16: 0.25}
VERIFIED_SEQUENCES = 2
PROBE = "The tokenizer's own check: 3,141 ways\nto write </s>, “naïve” ﬁnds and  two  spaces."


def agreement(
    folder: Path,
    cfg: Config,
    own: Config,
    weights: dict[str, Tensor],
    folded: dict[str, Tensor],
    ids: Tensor,
    device: torch.device,
) -> str:
    """Compare ``folder`` with what was trained, on token ``ids`` [B, T] in fp32; returns the result in words.

    ``folded`` are the tensors of ``cfg``; ``own`` and ``weights`` are the configuration and tensors of the folder (see
    ``deployed``). Our own model computes on ``device``. Raises what ``verify`` raises.
    """
    if not loadable(own):
        return f"transformers cannot load backbone={own.backbone.name} yet: deploy/ has no layer for it"
    try:
        import transformers  # noqa: F401
    except Exception as error:  # also from its own imports, such as a torchvision built for another torch
        return f"not verified: transformers cannot be imported ({first_line(error)})"
    merged = own is not cfg
    with torch.device("meta"):
        model = Llama(cfg, len(folded["lm_head.weight"]))
    model.to_empty(device=device)
    model.load_state_dict(folded if merged else weights)
    with torch.no_grad():
        logits = model.logits(ids.to(device)).cpu()
    del model  # before the folder's own is there
    bound = BOUNDS[weights["lm_head.weight"].dtype if merged else torch.float32]  # a merge rounds once more
    difference = verify(folder, logits, ids, torch.float32, bound)
    return f"transformers loads it, its logits agree to {difference:.0e} of their standard deviation"


@torch.no_grad()
def verify(folder: Path, trained: Tensor, ids: Tensor, dtype: torch.dtype, bound: float | None = None) -> float:
    """Load ``folder`` in ``dtype`` through transformers, and compare its logits for ``ids`` [B, T] with ``trained``.

    ``trained`` [B, T, vocabulary] are the trained model's. With bf16 weights the sharper test is fp32 and a model whose
    weights were cast to fp32, because then only the order of sums differs. ``bound`` is by default that of the dtype.

    Returns the largest difference in units of the logits' standard deviation. Raises UserError if the difference is
    beyond the bound, the folder does not load strictly, or its tokenizer does not give the ids of training.
    """
    from dlr_pretrain.deploy.folder import open_folder

    model, tokenizer = open_folder(folder, dtype)
    bound, trained, found = bound or BOUNDS[dtype], trained.float(), model(input_ids=ids).logits.float()
    difference = ((found - trained).abs().max() / trained.std()).item()
    if not difference <= bound:  # NaN is beyond it too
        raise UserError(
            f"{folder}: the logits that transformers computes differ from the trained model's by {difference:.2g} of "
            f"their standard deviation, beyond the bound of {bound:g} for {dtype}"
        )
    if [tokenizer(PROBE, split_special_tokens=True).input_ids] != load_tokenizer(folder).encode([PROBE]):
        raise UserError(f"{folder}: its tokenizer.json does not give the ids that the model was trained on")
    return difference
