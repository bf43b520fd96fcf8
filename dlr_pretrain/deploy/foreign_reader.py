"""Reads an exported folder as any user of transformers would; ``verify`` runs this file in a process of its own.

    python foreign_reader.py FOLDER QUESTION ANSWER

QUESTION holds ``ids`` [B, T], a ``probe`` text and the ``dtype`` to load in; ANSWER receives the ``logits`` (as fp32)
and the tokenizer's ids of the probe. This file imports nothing from the
package.
"""

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_IMPORT = 4
OLDEST = (4, 57)


def end_with_parent() -> None:
    """Have Linux kill this process when its parent dies: no other process needs the answer."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(folder: str, question: str, answer: str) -> None:
    import torch

    try:
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except Exception:  # also from its own imports, such as a torchvision built for another torch
        sys.exit(CANNOT_IMPORT)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < OLDEST:
        sys.exit(CANNOT_IMPORT)
    asked = torch.load(question)
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=asked["dtype"], trust_remote_code=True, output_loading_info=True
    )
    problems = {kind: names for kind, names in report.items() if names}
    if problems:
        sys.exit(f"not loaded strictly: {problems}")
    with torch.inference_mode():
        logits = model.eval()(input_ids=asked["ids"]).logits.float()
    tokenizer = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False
    )  # its own files need no code; None would ask
    probe = tokenizer(asked["probe"], split_special_tokens=True).input_ids
    torch.save({"logits": logits, "probe": probe}, answer)


if __name__ == "__main__":
    end_with_parent()
    main(*sys.argv[1:])
