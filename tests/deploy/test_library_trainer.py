"""DLR under the Trainer of transformers: the steps of a plain loop, in evaluation too, saved, resumed and folded."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.models import TrainsWithDlr, active, attach_dlr, factorize_, fold_, multiply_

pytest.importorskip("transformers")
pytest.importorskip("accelerate", reason='accelerate is not installed: pip install -e ".[sft]"')
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dlr_pretrain.deploy.tokenizer import export_tokenizer
from tests.deploy.models import tokenizer_of

pytestmark = pytest.mark.full
STEPS = 6
SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 38, "num_hidden_layers": 2, "num_attention_heads": 2}


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


def rows() -> list[dict]:
    ids = torch.randint(0, 40, (4, 10), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer_of(model: torch.nn.Module, folder, steps: int = STEPS) -> DlrTrainer:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0.5,
        per_device_eval_batch_size=4, save_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR
    optimizer = optimizer_of(model)
    schedule = constant(optimizer, lambda _: 1.0)
    return DlrTrainer(model, arguments, train_dataset=rows(), eval_dataset=rows(), optimizers=(optimizer, schedule))


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.stack([row["input_ids"] for row in rows()])
    return model(input_ids=ids, labels=ids).loss


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    """What a plain loop trains: an epoch of the trainer is its one batch, in whatever order."""
    model = factorised()
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        with active(model):
            loss_of(model).backward()
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
    folded = trainer_of(factorised(), tmp_path)
    folded.model.load_state_dict(trainer.model.state_dict())
    fold_(folded.model)
    assert folded.evaluate()["eval_loss"] == evaluated
    without = Trainer(trainer.model, trainer.args, eval_dataset=rows())
    with pytest.raises(RuntimeError, match=r"is that of another model.*TrainsWithDlr"):  # B alone
        without.evaluate()


def test_trls_trainer_with_its_checkpointing_takes_them_too(plain, tmp_path):
    trl = pytest.importorskip("trl", reason='trl is not installed: pip install -e ".[test]"')

    class Tuner(TrainsWithDlr, trl.SFTTrainer):
        pass

    model = factorised()
    ours = trainer_of(model, tmp_path)
    arguments = trl.SFTConfig(
        str(tmp_path), max_steps=STEPS, per_device_train_batch_size=4, max_grad_norm=0.5, report_to="none",
        use_cpu=True, bf16=False, disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True},
        gradient_checkpointing=True,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(exported_tokenizer(tmp_path / "tokenizer"))
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    optimizers = (ours.optimizer, ours.lr_scheduler)
    tuner = Tuner(model, arguments, train_dataset=data, processing_class=tokenizer, optimizers=optimizers)
    tuner.train()
    assert difference(tuner.model, plain) < 1e-5


def exported_tokenizer(folder):
    folder.mkdir()
    export_tokenizer(
        folder, tokenizer_of(folder / "spiece", ["the house stands on a hill above the river"] * 3, 30), 64
    )
    return folder


def test_a_checkpoint_holds_b_says_so_and_resumes(plain, tmp_path):
    trainer_of(factorised(), tmp_path, steps=3).train()
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    assert sum(name.endswith("b.dlr_mark") for name in saved) == 14
    resumed = trainer_of(factorised(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert difference(resumed.model, plain) < 1e-5


def test_the_folded_model_is_saved_as_the_llama_that_it_was_made_of(plain, tmp_path):
    model = copy.deepcopy(plain)
    with active(model):
        trained = loss_of(model).item()
    fold_(model)
    assert loss_of(model).item() == trained
    multiply_(model)
    model.save_pretrained(tmp_path)
    again, report = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert loss_of(again).item() == pytest.approx(trained, rel=1e-5)
