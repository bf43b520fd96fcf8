"""Supervised fine-tuning of deployed folders by transformers' Trainer, with the protocol of the DLR paper.

All parameters are trained. The loss is on the response and its </s> alone: the sum over the targets of a batch divided
by their count, for any micro-batch and any number of ranks. Weights and moments are fp32 even if the forward pass is
bf16: at 2e-5 most updates are smaller than half a step of bf16 at the size of a weight (|w| ~ 0.03: 6e-5), and pure
bf16 would round them away. The paper does not specify its prompt (here Alpaca's own), warm-up (3%), weight decay (0),
AdamW's betas and eps (0.9, 0.999, 1e-8) and clipping (1.0).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.data.tokenizer import EOS, PAD, Tokenizer
from dlr_pretrain.deploy.alpaca import Example, Examples, encode
from dlr_pretrain.deploy.export import WRITTEN, write_weights
from dlr_pretrain.deploy.folder import check_folder, open_folder, weight_files
from dlr_pretrain.deploy.job import decided, world_size
from dlr_pretrain.deploy.recipe import Recipe
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import sync, sync_all
from dlr_pretrain.util.tensors import IGNORE

RECORD = "sft.json"
LOG_EVERY = 10  # updates


def tune(
    folders: dict[str, Path],
    rows: list[dict[str, str]],
    held_out: list[dict[str, str]],
    recipe: Recipe,
    seeds: list[int],
    output: Path,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> list[dict]:
    """Tune every folder with every seed; returns the records of all, in order.

    ``folders`` maps names to folders; each name and seed becomes ``<output>/<name>/s<seed>``. If that exists and was
    made from the same weights and rows with the same recipe, it is kept and its record is read. If it was made from
    others, UserError is raised.
    """
    texts = {"rows": _digest(json.dumps(rows).encode()), "held_out": _digest(json.dumps(held_out).encode())}
    common = {name: value for name, value in asdict(recipe).items() if name != "micro_batch"} | texts
    plan = {(name, seed): output / name / f"s{seed}" for name in folders for seed in seeds}

    def begin() -> tuple[dict[str, dict], dict[tuple[str, int], dict | None]]:
        """Make the checks that may raise UserError before hours are spent."""
        recipe.accumulation(world_size())
        sizes = {name: sum(map(math.prod, check_folder(folder)[0].values())) for name, folder in folders.items()}
        settings = {name: common | {"model": _digest_of_weights(folder)} for name, folder in folders.items()}
        done = {key: _finished(folder, settings[key[0]]) for key, folder in plan.items()}
        _check_room(output, sum(4 * sizes[name] for (name, _), record in done.items() if record is None))
        return settings, done

    settings, done = decided(begin)
    for name, folder in folders.items():
        missing = [seed for seed in seeds if not done[name, seed]]
        if missing:
            tokenizer = Tokenizer(folder / "spiece.model")
            learned, held = (encode(part, tokenizer, recipe.length) for part in (rows, held_out))
            for part, none_fits in (("row", not learned.kept), ("held-out row", held_out and not held.kept)):
                if none_fits:
                    raise UserError(f"--length {recipe.length}: no {part} fits, prompts alone are longer. Raise it")
            say(f"{name}: {learned.describe()}; {recipe.updates(len(learned.kept)):,} updates")
            if held_out:
                say(f"{name}: held out: {held.describe()}")
        for seed in missing:
            facts = {"name": name, "seed": seed, "setting": settings[name]}
            done[name, seed] = fine_tune(folder, plan[name, seed], learned, held, recipe, facts, device, say)
            gc.collect()  # a model and its Trainer refer to each other and would remain in memory
    return list(done.values())


def _check_room(output: Path, needed: int) -> None:
    """Make ``output``; raise UserError if its disk has fewer than ``needed`` free bytes."""
    output.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(output).free
    if needed > free:
        rule = f"the weights to be written take {needed / 1e9:,.2f} GB, and {free / 1e9:,.2f} are free"
        raise UserError(f"{output}: {rule}. Name another --output, or fewer --seeds at once")


def _digest_of_weights(folder: Path) -> str:
    digests = []
    for file in weight_files(folder):
        with file.open("rb") as weights:
            digests.append(hashlib.file_digest(weights, "sha256").hexdigest())
    return _digest(" ".join(digests).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _finished(folder: Path, setting: dict) -> dict | None:
    """The record of an earlier call, None if there was none; UserError if that call had another ``setting``."""
    if not folder.exists():
        return None
    try:
        record = json.loads((folder / RECORD).read_text())
        other = [name for name, value in setting.items() if record["setting"].get(name) != value]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder} is in the way: it has no {RECORD} of this command. Name another --output") from error
    if other:
        raise UserError(f"{folder} was tuned with another {', '.join(other)}. Name another --output, or remove it")
    return record


def tuned_in(output: Path) -> list[dict]:
    """The records of all models and seeds in ``output``, without copies under other names and unreadable files."""
    found = []
    for path in sorted(output.glob(f"*/s*/{RECORD}")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(path.read_text())
            if path.parent == output / record["name"] / f"s{record['seed']}":
                found.append(record)
    return found


def fine_tune(
    folder: Path,
    output: Path,
    learned: Examples,
    held_out: Examples,
    recipe: Recipe,
    facts: dict,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> dict:
    """Tune ``folder`` on the examples in the order of ``facts["seed"]``, and write ``output``; returns its record.

    Rank 0 alone writes the files of the export, with fp32 weights and ``sft.json``, all of them or none.
    """
    model, _ = open_folder(folder, torch.float32)
    trainer = trainer_of(model, learned.kept, recipe, facts["seed"], output.parent, device, say)
    try:
        before = response_loss(model, held_out.kept, recipe)
        trainer.train()
        after = response_loss(model, held_out.kept, recipe)
    except torch.OutOfMemoryError as error:
        at_once = trainer.args.per_device_train_batch_size
        raise UserError(f"out of GPU memory at --micro-batch {at_once}: give a smaller one") from error
    losses = [(log["step"], log["loss"]) for log in trainer.state.log_history if "loss" in log]
    decided(lambda: _refuse_broken(output, model, losses, after, recipe))
    record = facts | {
        "source": str(folder),
        "updates": trainer.state.global_step,
        "rows": len(learned.kept),
        "rows_cut": learned.cut,
        "rows_dropped": learned.dropped,
        "held_out_rows": len(held_out.kept),
        "held_out_rows_cut": held_out.cut,
        "held_out_rows_dropped": held_out.dropped,
        "response_tokens": recipe.epochs * sum(example.targets for example in learned.kept),
        "response_loss_before": before,
        "response_loss": after,
        "training_loss": losses,
    }
    if trainer.is_world_process_zero():
        write(model.state_dict(), folder, output, record)
        if after is not None:
            say(f"held-out response loss {before:.4f} -> {after:.4f}")
        say(f"written {output}")
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # all ranks may read what rank 0 has written
    return record


def in_order(examples: list[Example], recipe: Recipe, seed: int) -> list[Example]:
    """The rows of all epochs, one after the other. Each epoch has a new order, which depends on ``seed`` alone.

    Each epoch is filled up to whole updates with rows that have no label. Without them accelerate would repeat some
    rows to give every rank the same number, and the last update of an epoch would count those twice.
    """
    generator = torch.Generator().manual_seed(seed)
    blanks = [Example([EOS], 1)] * (-len(examples) % recipe.batch)
    order: list[Example] = []
    for _ in range(recipe.epochs):
        order += [examples[i] for i in torch.randperm(len(examples), generator=generator).tolist()] + blanks
    return order


def _refuse_broken(
    output: Path, model, losses: list[tuple[int, float]], held_out: float | None, recipe: Recipe
) -> None:
    """Raise UserError if a loss or a weight is not finite. Weights are checked because most updates log no loss."""
    broken = [step for step, loss in losses if not math.isfinite(loss)]
    spoiled = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if broken:
        wrong = f"the loss is not finite from update {broken[0]} on"
    elif spoiled:
        wrong = f"{spoiled[0]} is not finite after the last update"
    elif not math.isfinite(held_out or 0.0):
        wrong = "the loss is not finite on the held-out rows"
    else:
        return
    raise UserError(f"{output}: {wrong}. Nothing was written. Lower --lr {recipe.lr:g}")


def trainer_of(
    model,
    examples: list[Example],
    recipe: Recipe,
    seed: int,
    output: Path,
    device: str | None = None,
    say: Callable[[str], None] = print,
):
    """A transformers ``Trainer`` that follows the recipe, on ``device`` (None: the GPU if there is one).

    It saves nothing, but makes the folder ``output``.
    """
    from torch.utils.data import DataLoader
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class InOrder(Trainer):
        def get_train_dataloader(self):
            """Micro-batches in the order of ``in_order``, one to each rank in turn."""
            pin = self.args.dataloader_pin_memory
            return self.accelerator.prepare(DataLoader(self.train_dataset, micro, collate_fn=collate, pin_memory=pin))

    class Say(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if state.is_world_process_zero and "loss" in logs:
                at = f"{state.global_step:,}/{state.max_steps:,}"
                say(f"update {at}  loss {float(logs['loss']):.4f}  lr {float(logs['learning_rate']):.2e}")

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    ranks = world_size()
    if not on_cpu and ranks == 1 and torch.cuda.device_count() > 1:
        gpus = torch.cuda.device_count()
        fix = f"Start with torchrun --nproc-per-node {gpus}, or set CUDA_VISIBLE_DEVICES to one"
        raise UserError(f"{gpus} GPUs are visible to one process. {fix}")
    micro, accumulated = recipe.accumulation(ranks)
    model.config.use_cache = False
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # from a launcher or an earlier Trainer: it overrides bf16=
    arguments = _arguments(recipe, len(examples), seed, output, on_cpu, micro, accumulated)
    order = in_order(examples, recipe, seed)
    trainer = InOrder(model=model, args=arguments, train_dataset=order, data_collator=collate, callbacks=[Say()])
    trainer.remove_callback(PrinterCallback)
    return trainer


def _arguments(recipe: Recipe, rows: int, seed: int, output: Path, on_cpu: bool, micro: int, accumulated: int):
    """transformers' ``TrainingArguments`` of the recipe."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(output),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=on_cpu,
        seed=seed,
        num_train_epochs=1,  # the rows' order already holds the recipe's epochs, one after the other
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulated,
        average_tokens_across_devices=True,
        learning_rate=recipe.lr,
        lr_scheduler_type="cosine",
        warmup_steps=round(recipe.warmup * recipe.updates(rows)),
        optim="adamw_torch",
        weight_decay=0.0,
        max_grad_norm=recipe.clip,
        bf16=recipe.precision == "bf16_autocast",
        logging_steps=LOG_EVERY,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        remove_unused_columns=False,
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
    )


def collate(examples: list[Example]) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` [B, longest], padded on the right; no label on the prompt."""
    shape = len(examples), max(len(example.ids) for example in examples)
    ids, mask, labels = (torch.full(shape, fill) for fill in (PAD, 0, IGNORE))
    for i, example in enumerate(examples):
        end = len(example.ids)
        ids[i, :end] = torch.tensor(example.ids)
        mask[i, :end] = 1
        labels[i, example.prompt : end] = ids[i, example.prompt : end]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@torch.no_grad()
def response_loss(model, examples: list[Example], recipe: Recipe) -> float | None:
    """Mean negative log-likelihood of the targets of ``examples``, in nats per token; None without examples.

    Every target counts the same. The ranks divide the examples, and each gets the result over all of them.
    """
    if not examples:
        return None
    ranks, rank = world_size(), torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    device, training = model.device, model.training
    mine = sorted(examples, key=lambda example: len(example.ids))[rank::ranks]
    total = torch.zeros(2, dtype=torch.float64, device=device)  # sum and number of the losses
    bf16 = recipe.precision == "bf16_autocast"
    with torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
        model.eval()
        for at in range(0, len(mine), 8):
            batch = {name: tensor.to(device) for name, tensor in collate(mine[at : at + 8]).items()}
            labels = batch.pop("labels")[:, 1:]
            logits = model(**batch).logits[:, :-1]
            total[0] += F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            total[1] += labels.ne(IGNORE).sum()
        model.train(training)
    if ranks > 1:
        torch.distributed.all_reduce(total)
    return (total[0] / total[1]).item()


def write(tensors: dict[str, Tensor], source: Path, output: Path, record: dict) -> None:
    """Write ``output``: the export ``source`` with the tuned ``tensors``, and the record in sft.json and README.md.

    Only files that an export writes are copied: ``source`` may also hold checkpoints or a user's notes.
    """
    aside = output.with_name(f".{output.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for path in source.iterdir():
        if WRITTEN.fullmatch(path.name) and ".safetensors" not in path.name:
            shutil.copyfile(path, aside / path.name)
    write_weights(aside, tensors)
    config = json.loads((aside / "config.json").read_text())
    config.pop("torch_dtype", None)
    (aside / "config.json").write_text(json.dumps(config | {"dtype": "float32"}, indent=2) + "\n")
    (aside / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    card = (aside / "README.md").read_text() if (aside / "README.md").exists() else ""
    (aside / "README.md").write_text(card + f"\n## Fine-tuned\n\n{_card(record)}", encoding="utf-8")
    sync_all(aside)
    aside.rename(output)
    sync(output.parent)


def _card(record: dict) -> str:
    setting = record["setting"]
    losses = [f"{record[name]:.4f}" for name in ("response_loss_before", "response_loss") if record[name] is not None]
    held_out = f" Held-out response loss {' -> '.join(losses)}." if losses else ""
    return (
        f"All parameters, on the responses of {record['rows']:,} instructions: {setting['epochs']} epochs of "
        f"{setting['batch']} rows an update, {record['updates']:,} updates, lr {setting['lr']:g} (cosine), at most "
        f"{setting['length']} tokens, {setting['precision']} with fp32 weights, seed {record['seed']}.{held_out}\n"
    )
