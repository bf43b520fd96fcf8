"""Checks, when a folder is exported, that ``transformers`` computes with it what was trained.

A separate process loads the folder on the CPU, from the folder's own modeling file, as a user will load it. The
training process does not import transformers, and no copy remains in transformers' cache of remote code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data.tokenizer import load_tokenizer
from dlr_pretrain.deploy.export import loadable
from dlr_pretrain.models import Llama
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.process import stop_signals

# Largest difference of any logit, in units of the logits' standard deviation, that passes. Measured on 2 x 256 ids with
# vocabulary 32,000, new and shortly trained models: fp32 3e-6 (tiny, 60m); bf16 0.03 (tiny, 60m) to 0.07 (350m, full).
# A residual that was left unfolded shows as 0.4, a wrong RoPE base as 0.06 to 0.14. Training lets rounding errors grow:
# fp32 against fp64 of 24 CoLA blocks differ by 4e-6 when new, by 8e-5 and 7e-3 with all weights doubled and tripled.
BOUNDS = {torch.float32: 1e-2, torch.bfloat16: 0.25}
VERIFIED_SEQUENCES = 2
PROBE = "The tokenizer's own check: 3,141 ways\nto write </s>, “naïve” ﬁnds and  two  spaces."
READER = Path(__file__).with_name("foreign_reader.py")
CANNOT_IMPORT = 4  # exit code of the reader


def agreement(
    folder: Path,
    cfg: Config,
    own: Config,
    weights: dict[str, torch.Tensor],
    folded: dict[str, torch.Tensor],
    ids: torch.Tensor,
    device: torch.device,
) -> str:
    """Compare ``folder`` with what was trained, on token ``ids`` [B, T] in fp32; returns the result in words.

    ``folded`` are the tensors of ``cfg``; ``own`` and ``weights`` are the configuration and tensors of the folder (see
    ``deployed``). Our own model computes on ``device``. Raises what ``verify`` raises.
    """
    if not loadable(own):
        return f"transformers cannot load backbone={own.backbone.name} yet: deploy/ has no layer for it"
    merged = own is not cfg
    with torch.device("meta"):
        model = Llama(cfg, len(folded["lm_head.weight"]))
    model.to_empty(device=device)
    model.load_state_dict(folded if merged else weights)
    with torch.no_grad():
        logits = model.logits(ids.to(device)).cpu()
    del model  # before the reader makes another
    bound = BOUNDS[weights["lm_head.weight"].dtype if merged else torch.float32]  # a merge rounds once more
    difference = verify(folder, logits, ids, torch.float32, bound)
    if difference is None:
        return "not verified: transformers 4.57 or newer cannot be imported here, or was killed for its memory"
    return f"transformers loads it, its logits agree to {difference:.0e} of their standard deviation"


def verify(
    folder: Path, trained: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype, bound: float | None = None
) -> float | None:
    """Load ``folder`` in ``dtype`` through transformers, and compare its logits for ``ids`` [B, T] with ``trained``.

    ``trained`` [B, T, vocabulary] are the trained model's. With bf16 weights the sharper test is fp32 and a model whose
    weights were cast to fp32, because then only the order of sums differs. ``bound`` is by default that of the dtype.

    Returns the largest difference in units of the logits' standard deviation, or None if nothing is known, because
    transformers 4.57 or newer cannot be imported or the reader was killed. Raises UserError if the difference is beyond
    the bound, the folder does not load strictly, or its tokenizer does not give the ids of training. Raises Stopped if
    a request to stop, which a scheduler sends to every process of a job, has ended the reader.
    """
    with tempfile.TemporaryDirectory() as scratch:
        answer = _read_elsewhere(folder.resolve(), ids, dtype, Path(scratch))
    if answer is None:
        return None
    bound, trained = bound or BOUNDS[dtype], trained.float()
    difference = ((answer["logits"] - trained).abs().max() / trained.std()).item()
    if not difference <= bound:  # NaN is beyond it too
        raise UserError(
            f"{folder}: the logits that transformers computes differ from the trained model's by {difference:.2g} of "
            f"their standard deviation, beyond the bound of {bound:g} for {dtype}"
        )
    if [answer["probe"]] != load_tokenizer(folder).encode([PROBE]):
        raise UserError(f"{folder}: its tokenizer.json does not give the ids that the model was trained on")
    return difference


def _read_elsewhere(folder: Path, ids: torch.Tensor, dtype: torch.dtype, scratch: Path) -> dict | None:
    """The reader's answer on ``folder``: logits (fp32) and the ids of PROBE; None if it cannot answer."""
    question, answer = scratch / "question.pt", scratch / "answer.pt"
    torch.save({"ids": ids, "probe": PROBE, "dtype": dtype}, question)
    own = {"HF_MODULES_CACHE": str(scratch / "modules"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(READER), str(folder), str(question), str(answer)],
        env=os.environ | own,
        cwd=scratch,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C then stops the run, not its reader
    )
    if done.returncode in (CANNOT_IMPORT, -signal.SIGKILL):  # the kernel kills a process for lack of memory
        return None
    if -done.returncode in stop_signals():
        raise Stopped(f"stopped before {folder} was verified (asked to stop). The same command continues")
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise UserError(f"{folder}: transformers does not load it: {reason}")
    return torch.load(answer)
