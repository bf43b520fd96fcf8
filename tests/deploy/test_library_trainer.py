"""DLR trains, saves, resumes and folds under the trainers of transformers and TRL, and in PEFT's adapters."""

import re

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dlr_pretrain.models import attach_dlr, factorize_, fold_
from tests.conftest import ROOT

pytestmark = pytest.mark.full
STEPS = 6
SHAPE = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 38, "num_hidden_layers": 2, "num_attention_heads": 2}
IDS = torch.randint(2, 40, (4, 10), generator=torch.Generator().manual_seed(1))
ROWS = Dataset.from_list([{"input_ids": row, "labels": row} for row in IDS.tolist()])


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.model.embed_tokens.weight.data.mul_(50)
    return model


def factorised(**arguments) -> LlamaForCausalLM:
    model = llama()
    factorize_(model, 6, "*_proj")
    attach_dlr(model, **arguments)
    return model


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def trainer_of(model: torch.nn.Module, folder, steps: int = STEPS, kind: str = "Trainer"):
    """A trainer whose epoch is one batch of two micro-batches, with gradient checkpointing."""
    from transformers import Trainer, TrainingArguments  # seconds

    settings = {
        "output_dir": str(folder), "max_steps": steps, "save_steps": 3, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "per_device_eval_batch_size": 4, "report_to": "none",
        "use_cpu": True, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": True,
    }  # fmt: skip
    optimizer = optimizer_of(model)
    both = optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    given = {"train_dataset": ROWS, "eval_dataset": ROWS, "optimizers": both}
    if kind == "Trainer":
        return Trainer(model, TrainingArguments(**settings), **given)
    trl = pytest.importorskip("trl", reason='needs trl: pip install -e ".[sft]"')
    return trl.SFTTrainer(model, trl.SFTConfig(**settings), processing_class=words_of_ids(), **given)


def words_of_ids() -> PreTrainedTokenizerFast:
    """A tokenizer whose 40 words are their own ids."""
    words = Tokenizer(WordLevel({str(i): i for i in range(40)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")


@pytest.fixture(scope="module")
def plain() -> LlamaForCausalLM:
    """The model that a plain loop trains. An epoch of the trainer is the same batch, in any order."""
    model = factorised()
    optimizer = optimizer_of(model)
    for _ in range(STEPS):
        model(input_ids=IDS, labels=IDS).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def difference(one: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_trainer_takes_the_steps_of_a_plain_loop(plain, tmp_path, kind):
    trainer = trainer_of(factorised(), tmp_path, kind=kind)
    trainer.train()
    assert difference(trainer.model, plain) < 1e-5  # fp32; the batch is summed in another order
    assert difference(factorised(), plain) > 1e-3
    evaluated = trainer.evaluate()["eval_loss"]
    fold_(trainer.model)
    assert trainer.evaluate()["eval_loss"] == evaluated


def test_a_checkpoint_holds_b_says_so_and_resumes(plain, tmp_path):
    trainer = trainer_of(factorised(), tmp_path, steps=3)
    trainer.train()
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.b.parametrizations.weight"
    assert torch.equal(saved[f"{name}.original"], trainer.model.get_parameter(f"{name}.original"))
    assert sum(name.endswith(".b.parametrizations.weight.0._extra_state") for name in saved) == 14
    resumed = trainer_of(factorised(), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert difference(resumed.model, plain) < 1e-5
    with pytest.raises(RuntimeError, match=r"q_proj\.b was trained with another residual"):
        trainer_of(factorised(alpha=0.5), tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def code_of_the_page(number: int, folder) -> dict[str, object]:
    """Run a code block of docs/library.md on a small model, for two updates; returns its variables."""
    trl = pytest.importorskip("trl", reason='needs trl: pip install -e ".[sft]"')
    llama().save_pretrained(folder / "source")
    words_of_ids().save_pretrained(folder / "source")
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), flags=re.DOTALL)[number]
    settings = {"max_steps": 2, "learning_rate": 1e-3, "report_to": "none"}
    changes = {
        "a-llama": str(folder / "source"), "rank=256": "rank=6", "r=16": "r=4", "tuned": str(folder / "tuned"),
        '"adapter"': repr(str(folder / "adapter")), "from trl import SFTConfig,": "from trl import",
    }  # fmt: skip
    for old, new in changes.items():
        code = code.replace(old, new)
    config = lambda out, **given: trl.SFTConfig(str(folder / out), **settings, **given)  # noqa: E731
    exec(code, found := {"SFTConfig": config, "data": ROWS})
    return found


def test_the_trainer_of_the_page_runs(tmp_path):
    found = code_of_the_page(1, tmp_path)
    tuned = logits(LlamaForCausalLM.from_pretrained(tmp_path / "tuned"))
    assert torch.equal(tuned, logits(found["model"])) and not torch.equal(tuned, logits(llama()))


def test_the_adapters_of_the_page_are_trained_and_reloaded(tmp_path):
    peft = pytest.importorskip("peft")
    shown = logits(code_of_the_page(2, tmp_path)["trainer"].model)
    tuned = logits(peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter"))
    assert torch.equal(tuned, shown) and not torch.equal(tuned, logits(llama()))


def test_adapters_of_peft_are_found_trained_and_merged(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=["q_proj"]))
    names = attach_dlr(model)
    assert len(names) == 6 and all(name.endswith((".lora_B.default", ".lora_B.second")) for name in names)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    model(input_ids=IDS, labels=IDS).loss.backward()
    torch.optim.AdamW(trained, lr=1e-2).step()
    assert len(trained) == 8 and not any(map(torch.equal, trained, before))
    shown = logits(model)
    assert fold_(model) == 6 and torch.equal(logits(model), shown)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(peft.PeftModel.from_pretrained(llama(), tmp_path)), shown)
    torch.testing.assert_close(logits(model.merge_and_unload()), shown, rtol=0, atol=1e-5)
