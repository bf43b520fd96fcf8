"""The problems of a configuration, with messages that say how to fix them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import SequenceMatcher

from dlr_pretrain.util.errors import EXIT_CONFIG, UserError

HIDDEN = "***"
SHORTEST = 8  # fewest characters of a variable's value that counts as a secret
VARIABLE = re.compile(r"(token|api_?key|access_?key|secret|passw(or)?d)$", re.IGNORECASE)  # names such as HF_TOKEN
SECRET = re.compile(  # user and password in an address; tokens of Hugging Face, W&B and GitHub
    r"(?<=://)[^/\s@]+(?=@)|\b(?:hf_|wandb_v\d_|gh[opsu]_|github_pat_)\w{20,}"
)


def redact(text: str) -> str:
    """``text`` without what looks like a password or token, and without the values of variables that hold one."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and VARIABLE.search(name):
            text = text.replace(value, HIDDEN)
    return SECRET.sub(HIDDEN, text)


class MISSING:
    """Takes the place of a value that was not given. It is a class, so that it is the same object after pickling."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the key, its value (or MISSING), the rule it breaks, and the fix."""

    key: str
    value: object
    rule: str
    fix: str = ""

    def __str__(self) -> str:
        given = self.key if self.value is MISSING else f"{self.key}={shown(self.value)}"
        return redact(f"{given}: {self.rule}" + (f". {self.fix}" if self.fix else ""))


class ConfigError(UserError):
    """All problems of a configuration at once; its text has one line for each."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        lines = list(dict.fromkeys(map(str, problems)))
        super().__init__(lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} problems", *lines]))

    def __reduce__(self):  # unpickling would otherwise call __init__ with the text
        return type(self), (self.problems,)


# What users of other trainers type (transformers, GaLore's and CoLA's scripts, nanoGPT, torchtitan), under our key for
# it, or under advice. Most are known by their last part; those with a dot, by the whole.
FOREIGN = {
    "train.global_batch": "batch_size total_batch_size global_batch_size train_batch_size",
    "train.micro_batch": "grad_accum gradient_accumulation gradient_accumulation_steps per_device_train_batch_size "
    "local_batch_size device_batch_size",
    "train.lr": "learning_rate",
    "train.min_lr_ratio": "min_lr min_lr_factor",
    "train.lr_decay": "scheduler lr_scheduler lr_scheduler_type decay_type",
    "train.lr_decay_steps": "lr_decay_iters decay_steps",
    "train.warmup_steps": "warmup_iters num_warmup_steps",
    "train.steps": "max_steps num_training_steps max_iters iterations",
    "train.seq_len": "max_length block_size sequence_length context_length",
    "train.clip": "grad_clip grad_clipping max_grad_norm clip_grad max_norm gradient_clip_val",
    "train.activation_checkpointing": "gradient_checkpointing activation_checkpoint ac",
    "eval.every": "eval_every eval_interval eval_steps",
    "eval.tokens": "eval_iters eval_tokens",
    "checkpoint.every": "save_every save_steps save_interval checkpoint_interval",
    "checkpoint.keep_last": "save_total_limit keep_latest_k",
    "log.every": "logging_steps log_interval log_freq",
    "run.dir": "run.name output_dir out_dir save_dir dump_folder",
    "run.start_from": "continue_from init_from",
    "optimizer.weight_decay": "wd",
    "data.root": "data.path data.dir data_path data_dir dataset_path",
    "data.dataset": "data.name dataset_name",
    "data.text_key": "text_field dataset_text_field text_column",
    "tokenizer.path": "data.tokenizer tokenizer_name tokenizer_path",
    "scale.num_layers": "n_layer n_layers num_hidden_layers",
    "scale.num_heads": "n_head n_heads num_attention_heads",
    "scale.hidden_size": "n_embd d_model dim",
    "backbone.rank": "lora_r r",
    "precision": "dtype bf16 mixed_precision",
    "backbone": "model peft_model",
    "scale": "model_config flavor",
    "logger": "wandb report_to wandb_log",
    "device": "use_cpu",
    "cuda": "gpu",  # of device
    "The same command again resumes a run; run.start_from starts another from it": "resume auto_resume "
    "resume_from_checkpoint",
    "Set train.steps: a step reads train.global_batch x train.seq_len tokens": "epochs num_epochs num_train_epochs",
    "Set WANDB_MODE=offline in the environment, or choose logger=jsonl": "logger.mode wandb.mode offline wandb_mode",
}
SYNONYMS = {name: meant for meant, names in FOREIGN.items() for name in names.split()}


def did_you_mean(name: str, known: Collection[str], otherwise: str = "") -> str:
    """A fix that names the nearest of the known names, or advises; ``otherwise`` if none is near."""
    for written in (name.lower(), name.lower().rpartition(".")[2]):
        if " " in (advice := SYNONYMS.get(written, "")):
            return advice
    near = nearest(name, known)
    return f"Did you mean {near}?" if near else otherwise


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that was most likely meant: another trainer's word for it, the same leaf elsewhere, or a typo."""
    name = name.lower()
    leaf = name.rpartition(".")[2]
    for written in (name, leaf):
        if name not in known and SYNONYMS.get(written) in known:
            return SYNONYMS[written]
    if leaf in known:
        return leaf

    def likeness(other: str) -> float:
        return SequenceMatcher(None, name, other if "." in name else other.rpartition(".")[2]).ratio()

    candidates = sorted(known, key=lambda other: "." in other)  # keys without a section first
    same = [other for other in candidates if other.rpartition(".")[2] == leaf]
    best = max(same or candidates, key=likeness, default="")
    return best if same or likeness(best) >= 0.75 else None


def shown(value: object) -> str:
    """A value as a user types it: null, true, 0.5."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
