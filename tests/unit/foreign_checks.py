"""What a user of transformers does with exported folders. Run by test_export.py in a process without dlr_pretrain.

    python foreign_checks.py FOLDER_OF_FOLDERS ANSWERS

For every sub-folder: load it, run it, generate, save it, load it again. Facts only; the tests judge them.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def facts(folder: Path, ids: torch.Tensor) -> dict:
    trust = {"trust_remote_code": True}
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **trust, output_loading_info=True)
    again = folder.with_name(folder.name + "-again")
    model.save_pretrained(again)
    reloaded = AutoModelForCausalLM.from_pretrained(again, dtype="auto", **trust)
    fresh = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **trust), **trust)
    tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    prompts = tokenizer(["the house", "two thin matrices and the river"], return_tensors="pt", padding=True)
    greedy = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    with torch.inference_mode():
        return {
            "class": type(model).__name__,
            "loading": {kind: sorted(map(str, names)) for kind, names in report.items() if names},
            "dtype": model.dtype,
            "logits": model(input_ids=ids).logits,
            "cached": model.generate(ids[:, :8], **greedy),
            "uncached": model.generate(ids[:, :8], **greedy, use_cache=False),
            "batched": model.generate(**prompts, **greedy)[0, -12:],
            "alone": model.generate(**tokenizer("the house", return_tensors="pt"), **greedy)[0, -12:],
            "reloaded": reloaded(input_ids=ids).logits,
            "config": json.loads((again / "config.json").read_text()),
            "fresh_std": {name: p.std().item() for name, p in fresh.named_parameters()},
            "open": tokenizer("a b").input_ids,
            "ended": tokenizer("a b" + tokenizer.eos_token).input_ids,
            "literal": tokenizer("a </s> b", split_special_tokens=True).input_ids,
        }


def main(root: Path, answers: Path) -> None:
    ids = torch.load(root / "ids.pt")
    found = {folder.name: facts(folder, ids) for folder in sorted(root.iterdir()) if folder.is_dir()}
    found["imported"] = [name for name in sys.modules if name.split(".")[0] == "dlr_pretrain"]
    torch.save(found, answers)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
