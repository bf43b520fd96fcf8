"""Supervised fine-tuning of deployed folders by TRL's ``SFTTrainer``, with the protocol of the DLR paper.

All parameters are trained. The loss is on the response and its </s> alone, averaged over the tokens of an update.
Weights and moments are fp32 even if the forward pass is bf16: at 2e-5 most updates are smaller than half a step of bf16
at the size of a weight (|w| ~ 0.03: 6e-5), and pure bf16 would round them away. The paper does not specify its prompt
(here Alpaca's own), warm-up (3%), weight decay (0), AdamW's betas and eps (0.9, 0.999, 1e-8) and clipping (1.0).
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import write_durably
from dlr_pretrain.util.text import table

DATASET = "yahma/alpaca-cleaned"  # 51,760 rows
RECORD = "sft.json"
PROMPT = """Below is an instruction that describes a task{paired}. Write a response that appropriately completes the \
request.

### Instruction:
{instruction}
{context}
### Response:
"""


@dataclass(frozen=True)
class Recipe:
    """Epochs, rows of an update over all ranks, rows that a rank takes at once, peak learning rate (cosine to 0),
    maximal tokens of a row, and whether the forward pass is bf16."""

    epochs: int = 3
    batch: int = 64
    micro_batch: int = 8
    lr: float = 2e-5
    length: int = 512
    bf16: bool = True


def prompt_of(instruction: str, given: str = "") -> str:
    """Stanford Alpaca's prompt for a response to ``instruction`` about the input ``given``."""
    paired = ", paired with an input that provides further context" if given.strip() else ""
    context = f"\n### Input:\n{given}\n" if given.strip() else ""
    return PROMPT.format(instruction=instruction, paired=paired, context=context)


def read_rows(source: str):
    """Prompts and completions of a .json or .jsonl file, or of the split "train" of a dataset of the hub.

    Its rows have the texts ``instruction`` and ``output``, and may have ``input``.
    """
    from datasets import load_dataset

    local = Path(source).suffix in (".json", ".jsonl")
    try:
        rows = load_dataset("json", data_files=source, split="train") if local else load_dataset(source, split="train")
        return rows.map(
            lambda row: {
                "prompt": prompt_of(row["instruction"], row.get("input") or ""),
                "completion": row["output"],
            },
            remove_columns=rows.column_names,
        )
    except Exception as error:  # whatever the library raises: it differs between its versions
        fix = "Rows are instruction, input and output; name a local .json or .jsonl file with --data"
        raise UserError(f"{source}: cannot be read: {first_line(error)}. {fix}") from error


def fine_tune(folder: Path, output: Path, rows, held_out, recipe: Recipe, seed: int, device: str) -> dict:
    """Tune ``folder`` on ``rows`` and write ``output``, a folder of the same kind with fp32 weights and ``sft.json``.

    Returns the record; one that stands in ``output`` with the same setting is returned as it is. ``seed`` is that of
    the order of the rows. Under torchrun every rank calls this. Raises UserError if a loss or a weight is not finite.
    """
    from trl import SFTConfig, SFTTrainer

    setting = vars(recipe) | {"source": str(folder), "rows": len(rows), "held_out_rows": len(held_out or [])}
    if (output / RECORD).exists():
        record = json.loads((output / RECORD).read_text())
        if record["setting"] != setting:
            raise UserError(f"{output} was tuned in another way: {record['setting']}. Name another --output")
        return record
    model, tokenizer = open_folder(folder, torch.float32)
    arguments = SFTConfig(
        str(output),
        num_train_epochs=recipe.epochs,
        per_device_train_batch_size=recipe.micro_batch,
        per_device_eval_batch_size=recipe.micro_batch,
        learning_rate=recipe.lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(0.03 * recipe.epochs * math.ceil(len(rows) / recipe.batch)),
        max_length=recipe.length,
        bf16=recipe.bf16,
        gradient_checkpointing=False,
        seed=seed,
        data_seed=seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to="none",
        use_cpu=device == "cpu",
    )
    share, rest = divmod(recipe.batch, recipe.micro_batch * arguments.world_size)
    if rest or not share:
        rule = f"must be a multiple of {arguments.world_size} ranks x {recipe.micro_batch} rows at once (--micro-batch)"
        raise UserError(f"--batch={recipe.batch}: {rule}")
    arguments.gradient_accumulation_steps = share
    trainer = SFTTrainer(model, arguments, train_dataset=rows, eval_dataset=held_out, processing_class=tokenizer)
    before = trainer.evaluate()["eval_loss"] if held_out else None
    trainer.train()
    after = trainer.evaluate()["eval_loss"] if held_out else None
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if not all(map(math.isfinite, losses)) or not all(p.isfinite().all() for p in model.parameters()):
        raise UserError(f"{output}: the loss or a weight is not finite. Nothing was written. Lower --lr {recipe.lr:g}")
    record = {"seed": seed, "setting": setting, "updates": trainer.state.global_step}
    record |= {"response_loss_before": before, "response_loss": after, "training_loss": losses}
    if trainer.is_world_process_zero():
        left_out = shutil.ignore_patterns("*.safetensors*", "fold.json")
        shutil.copytree(folder, output, ignore=left_out, dirs_exist_ok=True)
        model.save_pretrained(output)
        with (output / "README.md").open("a", encoding="utf-8") as card:
            card.write(f"\n## Fine-tuned\n\nOn responses to instructions, all parameters: {setting}, seed {seed}.\n")
        write_durably(output / RECORD, json.dumps(record, indent=1) + "\n")  # last: the folder is whole
    trainer.accelerator.wait_for_everyone()
    return record


def write_table(output: Path, models: dict[str, list[dict]], zero_shot: str) -> str:
    """Write ``table.json`` and ``table.md``: mean and standard deviation over the seeds of each model, in percent.

    ``models`` has the records of each, with ``tasks`` where they were evaluated; ``zero_shot`` says how.
    """
    shown: list[dict[str, str]] = []
    whole: dict[str, dict] = {}
    for name, records in models.items():
        seeds = pd.DataFrame([_measured(record) for record in records], dtype=float).dropna(axis="columns")
        spread = {column: each.std() if len(each) > 1 else None for column, each in seeds.items()}
        found = {column: {"mean": mean, "std": spread[column]} for column, mean in seeds.mean().items()}
        whole[name] = {"seeds": [record["seed"] for record in records], "columns": found}
        cells = {str(c): f"{of['mean']:.4g}" + (f" ± {of['std']:.2g}" if of["std"] else "") for c, of in found.items()}
        shown.append({"model": name, "seeds": str(whole[name]["seeds"]), **cells})
    columns = list(dict.fromkeys(column for row in shown for column in row))
    text = table(columns, ([row.get(column, "") for column in columns] for row in shown))
    setting = next(iter(models.values()))[0]["setting"]
    write_durably(output / "table.json", json.dumps({"models": whole, "setting": setting, "zero_shot": zero_shot}))
    write_durably(output / "table.md", text + "\n")
    return text


def _measured(record: dict) -> dict[str, float | None]:
    accuracies = {task: 100 * found["acc"] for task, found in record.get("tasks", {}).items()}
    average = {"average": statistics.fmean(accuracies.values())} if accuracies else {}
    return {"loss before": record["response_loss_before"], "loss after": record["response_loss"]} | accuracies | average
