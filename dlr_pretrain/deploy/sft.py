"""Supervised fine-tuning of exported folders by TRL's ``SFTTrainer``, with the protocol of the DLR paper.

All parameters are trained. The loss covers the response and its </s> alone, and is averaged over an update's tokens.
Weights and moments are fp32 even if the forward pass is bf16: at a learning rate of 2e-5 most updates are smaller than
half of bf16's spacing at the size of a weight (|w| ~ 0.03: 6e-5), and pure bf16 would round them away. The paper does
not specify its prompt (here Alpaca's), warm-up (3%), weight decay (0), AdamW's betas and eps (0.9, 0.999, 1e-8) or
clipping (1.0).
"""

import hashlib
import json
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dlr_pretrain.config.identity import describe_differences
from dlr_pretrain.util.errors import UserError, first_line, write_to_stderr
from dlr_pretrain.util.files import copy_file, read_json, refuse_foreign, sha256_of, write_text

DATASET = "yahma/alpaca-cleaned"  # 51,760 rows
RECORD = "sft.json"
PROTOCOL = {"num_train_epochs": 3, "learning_rate": 2e-5, "lr_scheduler_type": "cosine", "max_length": 512}
SILENT: dict = {"save_strategy": "no", "report_to": "none", "logging_steps": 1, "logging_nan_inf_filter": False}
PROMPT = """Below is an instruction that describes a task{paired}. Write a response that appropriately completes the \
request.

### Instruction:
{instruction}
{context}
### Response:
"""


def prompt_of(instruction: str, given: str = "") -> str:
    """Stanford Alpaca's prompt for an ``instruction`` about the input ``given``, if any."""
    paired = ", paired with an input that provides further context" if given.strip() else ""
    context = f"\n### Input:\n{given}\n" if given.strip() else ""
    return PROMPT.format(instruction=instruction, paired=paired, context=context)


def read_rows(source: str):
    """Prompts and completions from a .json or .jsonl file, or from the split "train" of a dataset on the hub.

    Source rows have the texts ``instruction`` and ``output``, and optionally ``input``.
    """
    from datasets import load_dataset

    def pair(row: dict) -> dict[str, str]:
        return {"prompt": prompt_of(row["instruction"], row.get("input") or ""), "completion": row["output"]}

    local = Path(source).suffix in (".json", ".jsonl")
    try:
        rows = load_dataset("json", data_files=source, split="train") if local else load_dataset(source, split="train")
        return rows.map(pair, remove_columns=rows.column_names)
    except Exception as error:  # the types of errors differ between versions of the library
        raise UserError(
            source,
            f"cannot be read: {first_line(error)}",
            "Rows have instruction, input and output; name a local .json or .jsonl file with --data",
        ) from error


def fine_tune(folder: Path, output: Path, rows, seed: int, batch: int = 64, fp32: bool = False, **settings) -> None:
    """Fine-tune ``folder`` on ``rows`` and write ``output``, an exported folder with fp32 weights and ``sft.json``.

    ``seed`` sets the order of the rows, ``batch`` is the number of rows per update over all ranks, and ``settings``
    of ``SFTConfig`` override the paper's. The forward pass is bf16 unless ``fp32``. An ``output`` that the same call
    has written stays as it is. Under torchrun every rank calls this. Raises UserError if a loss is not finite, or if
    ``output`` holds anything else.
    """
    import torch
    from trl import SFTConfig, SFTTrainer

    from dlr_pretrain.deploy.export import draft_folder, open_folder, written_whole

    setting: dict[str, Any] = PROTOCOL | settings | {"seed": seed, "bf16": not fp32, "gradient_checkpointing": False}
    made_from = {"source": str(folder), "rows": len(rows), "batch": batch, **digests(folder, rows)}
    if is_finished(output, setting | made_from):
        return
    model, tokenizer = open_folder(folder, torch.float32)
    main = os.environ.get("RANK", "0") == "0"
    with written_whole(output) if main else nullcontext(draft_folder(output)) as draft:
        arguments = SFTConfig(str(draft), use_cpu=not torch.cuda.is_available(), **SILENT, **setting)
        arguments.warmup_steps = round(0.03 * arguments.num_train_epochs * math.ceil(len(rows) / batch))
        at_once = arguments.world_size * arguments.per_device_train_batch_size
        arguments.gradient_accumulation_steps, rest = divmod(batch, at_once)
        if rest:
            raise UserError(f"--batch={batch}: must be a multiple of {at_once}, the number of ranks x --micro-batch")
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
        if not all(map(math.isfinite, losses)):
            raise UserError(
                output, "a loss is not finite. Nothing was written", f"Lower --lr {arguments.learning_rate:g}"
            )
        if main:
            for path in filter(Path.is_file, folder.rglob("*")):
                if ".safetensors" not in path.name and path.name != "fold.json":
                    (target := draft / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
                    copy_file(path, target)  # without its mode and times, which a file system may refuse
            model.save_pretrained(draft)
            setting |= made_from
            with (draft / "README.md").open("a", encoding="utf-8") as card:
                card.write(f"\n## Fine-tuned\n\nAll parameters, on responses to instructions: {setting}.\n")
            write_text(draft / RECORD, json.dumps({"setting": setting, "training_loss": losses}, indent=1) + "\n")
    trainer.accelerator.wait_for_everyone()


def digests(folder: Path, rows) -> dict[str, str]:
    """What identifies the weights of ``folder`` and the texts of ``rows``, wherever they lie."""
    files = "".join(sha256_of(path) for path in sorted(folder.glob("*.safetensors")))
    texts = json.dumps([*rows], sort_keys=True)
    return {name: hashlib.sha256(s.encode()).hexdigest()[:16] for name, s in (("weights", files), ("texts", texts))}


def is_finished(output: Path, setting: dict[str, Any]) -> bool:
    """Whether ``output`` holds a model that was fine-tuned with ``setting``. Raises UserError if it holds another."""
    path = output / RECORD
    if not path.is_file():
        refuse_foreign(output, "--output", "fine-tuned model", ours=False)
        return False
    try:
        before = read_json(path, {"setting": dict})["setting"]
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}). Name another --output") from error
    both = {name: (before.get(name), value) for name, value in setting.items() if name != "source"}  # may have moved
    if changed := {name: values for name, values in both.items() if values[0] != values[1]}:
        changes = describe_differences(changed)
        raise UserError(f"{output}: holds a model fine-tuned with other settings ({changes}). Name another --output")
    write_to_stderr(f"note: {output} exists already, and stays as it is")
    return True
