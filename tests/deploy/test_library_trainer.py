"""DLR under transformers' Trainer, which TRL's are: the steps of a plain loop, evaluated, saved, resumed, folded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dlr_pretrain.models import TrainsWithDlr, active, attach_dlr, factorize_, fold_

pytestmark = pytest.mark.full
STEPS = 6
SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 38, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(0, 40, (4, 10), generator=torch.Generator().manual_seed(1))
ROWS = [{"input_ids": row, "labels": row} for row in IDS]


class DlrTrainer(TrainsWithDlr, Trainer):
    pass


def factorised() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.model.embed_tokens.weight.data.mul_(50)
    factorize_(model, 6, "*_proj")
    attach_dlr(model)
    return model


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def trainer_of(model: torch.nn.Module, folder, steps: int = STEPS) -> DlrTrainer:
    """An epoch is one batch of two micro-batches, with gradient checkpointing."""
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.5,
        per_device_eval_batch_size=4, save_steps=3, report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=True,
    )  # fmt: skip
    optimizer = optimizer_of(model)
    both = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return DlrTrainer(model, arguments, train_dataset=ROWS, eval_dataset=ROWS, optimizers=both)


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    """What a plain loop trains: an epoch of the trainer is its one batch, in whatever order."""
    model = factorised()
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        with active(model):
            model(input_ids=IDS, labels=IDS).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def test_the_trainer_takes_the_steps_of_a_plain_loop(plain, tmp_path):
    trainer = trainer_of(factorised(), tmp_path)
    trainer.train()
    assert difference(trainer.model, plain) < 1e-5  # fp32; the batch is summed in another order
    assert difference(factorised(), plain) > 1e-3
    evaluated = trainer.evaluate()["eval_loss"]
    with pytest.raises(RuntimeError, match=r"is that of another model.*TrainsWithDlr"):  # B alone
        Trainer(trainer.model, trainer.args, eval_dataset=ROWS).evaluate()
    fold_(trainer.model)
    assert trainer.evaluate()["eval_loss"] == evaluated


def test_a_checkpoint_holds_b_says_so_and_resumes(plain, tmp_path):
    trainer_of(factorised(), tmp_path, steps=3).train()
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert sum(name.endswith("b.dlr_mark") for name in saved) == 14
    resumed = trainer_of(factorised(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert difference(resumed.model, plain) < 1e-5
