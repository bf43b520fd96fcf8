"""What trainers and loaders of others do with exported folders; run by test_foreign_training.py without dlr_pretrain.

    python foreign_training.py FOLDER_OF_FOLDERS ANSWERS

Facts only; the tests judge them.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, pipeline

SETTINGS = {"per_device_train_batch_size": 4, "max_steps": 12, "learning_rate": 1e-2, "logging_steps": 1,
            "save_strategy": "no", "report_to": "none", "use_cpu": True, "seed": 1, "lr_scheduler_type": "constant",
            "disable_tqdm": True}  # fmt: skip
REMOTE = {"trust_remote_code": True, "dtype": torch.float32}


def losses(trainer) -> list[float]:
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained_by_transformers(folder: Path, texts: list[str], checkpointing: bool) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, **REMOTE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text + tokenizer.eos_token, truncation=True, max_length=24)["input_ids"] for text in texts]

    def collate(examples: list[dict]) -> dict:
        batch = tokenizer.pad(examples, return_tensors="pt")
        return dict(batch) | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}

    arguments = TrainingArguments(
        str(folder / "trained"), gradient_checkpointing=checkpointing, remove_unused_columns=False, **SETTINGS
    )
    data = Dataset.from_list([{"input_ids": row} for row in rows])
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collate)
    found = {"losses": losses(trainer)}
    trainer.save_model(str(folder / "trained"))
    again = AutoModelForCausalLM.from_pretrained(folder / "trained", **REMOTE).eval()
    ids = torch.tensor([rows[0]])
    with torch.no_grad():
        found["reloaded"] = torch.equal(again(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
    return found


def trained_by_trl(folder: Path, texts: list[str]) -> dict:
    from trl import SFTConfig, SFTTrainer

    model = AutoModelForCausalLM.from_pretrained(folder, **REMOTE)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arguments = SFTConfig(str(folder / "tuned"), max_length=64, bf16=False, **SETTINGS)
    data = Dataset.from_list([{"text": text} for text in texts])
    trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    rows = [row["input_ids"] for row in trainer.train_dataset]
    return {"losses": losses(trainer), "rows": rows, "checkpointing": arguments.gradient_checkpointing,
            "plain": [tokenizer(text).input_ids for text in texts]}  # fmt: skip


def loaded(folder: Path, texts: list[str]) -> dict:
    """Blocks that stand on the disk, as a model that is too large for its devices; and a pipeline."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(texts[:1], return_tensors="pt").input_ids
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" if i < 2 else "disk" for i in range(3)}
    try:
        offloaded = {"device_map": places, "offload_folder": str(folder / "offloaded")}
        spread = AutoModelForCausalLM.from_pretrained(folder, **offloaded, **REMOTE)
    except ValueError as error:
        return {"refused": str(error), "version": transformers.__version__}
    auto = AutoModelForCausalLM.from_pretrained(folder, device_map="auto", **REMOTE)
    plain = AutoModelForCausalLM.from_pretrained(folder, **REMOTE)
    with torch.no_grad():
        wanted = plain(input_ids=ids).logits
        found = {"spread": (spread(input_ids=ids).logits - wanted).abs().max().item(),
                 "auto": (auto(input_ids=ids).logits - wanted).abs().max().item(),
                 "on_disk": sum(p.device.type == "meta" for p in spread.parameters())}  # fmt: skip
        greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
        wanted = plain.generate(ids, **greedy)[0]
        found["spread_text"] = torch.equal(spread.generate(ids, **greedy)[0], wanted)
    speaks = pipeline("text-generation", model=str(folder), trust_remote_code=True, device="cpu")
    found["pipeline"] = speaks(texts[0], return_tensors=True, **greedy)[0]["generated_token_ids"]
    return found | {"wanted": wanted.tolist()}


def main(root: Path, answers: Path) -> None:
    texts = json.loads((root / "texts.json").read_text())
    found = {}
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        found[folder.name] = {
            "plain": trained_by_transformers(folder, texts, False),
            "checkpointing": trained_by_transformers(folder, texts, True),
            "loaded": loaded(folder, texts),
        }
        if importlib.util.find_spec("trl"):
            found[folder.name]["trl"] = trained_by_trl(folder, texts)
    found["imported"] = [name for name in sys.modules if name.split(".")[0] == "dlr_pretrain"]
    answers.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
