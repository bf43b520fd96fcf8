"""Instructions and responses as token ids, from rows in the format of Stanford Alpaca and with its prompt.

The prompt and the response are encoded separately and joined, and </s> is appended. Sentencepiece turns line breaks
into spaces and marks the start of a word, so that no piece spans the joint: a model that is asked with the prompt alone
sees exactly the ids that it was tuned on. T5's pieces have no line break, so line breaks in responses are not learned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.data import hub
from dlr_pretrain.data.tokenizer import EOS, Tokenizer
from dlr_pretrain.util.errors import UserError, first_line

FIELDS = {"instruction": str, "output": str, "input": str | None}
PROMPT = """Below is an instruction that describes a task. Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Response:
"""
PROMPT_WITH_INPUT = """Below is an instruction that describes a task, paired with an input that provides further \
context. Write a response that appropriately completes the request.

### Instruction:
{instruction}

### Input:
{input}

### Response:
"""


@dataclass(frozen=True)
class Example:
    """``ids`` are the prompt, of ``prompt`` tokens, then what is learned: the response and </s>."""

    ids: list[int]
    prompt: int

    @property
    def targets(self) -> int:
        """How many tokens have a loss."""
        return len(self.ids) - self.prompt


@dataclass(frozen=True)
class Examples:
    """The rows that fit. ``cut`` of them lost their end; ``dropped`` counts rows without room for any response."""

    kept: list[Example]
    cut: int
    dropped: int

    def describe(self) -> str:
        return f"{len(self.kept):,} rows, {self.cut:,} cut to the length, {self.dropped:,} dropped: longer prompts"


def read_rows(source: str | Path) -> list[dict[str, str]]:
    """Rows of a file (.json: a list; .jsonl: one a line), or of the split "train" of a dataset of the hub.

    Each has ``instruction`` and ``output``, and may have ``input``. Raises UserError that names a row that lacks one.
    """
    path = Path(source)
    if path.suffix in (".json", ".jsonl") or path.exists():
        rows = _from_file(path)
    else:
        rows = _from_hub(str(source))
    for i, row in enumerate(rows):
        for field, kind in FIELDS.items():
            if not isinstance(row, dict) or not isinstance(row.get(field), kind):
                raise UserError(f"{source}: row {i} has no text in {field!r}. Rows are instruction, input and output")
    if not rows:
        raise UserError(f"{source}: has no rows")
    return rows


def _from_file(path: Path) -> list:
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix == ".jsonl":
                return [json.loads(line) for line in file if line.strip()]
            return list(json.load(file))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path}: cannot be read as rows of JSON: {error}") from error


def _from_hub(name: str) -> list:
    from datasets import load_dataset
    from huggingface_hub import HfApi, constants

    fix = "Name a local .json or .jsonl file with --data"
    if not constants.HF_HUB_OFFLINE:  # offline, the library looks into its cache alone
        hub.first_contact(name, lambda: HfApi().dataset_info(name, timeout=hub.FIRST_CONTACT_SECONDS), fix)
    try:
        return load_dataset(name, split="train").to_list()
    except Exception as error:  # whatever the library raises: it differs between its versions
        raise UserError(f"{name}: cannot be loaded: {first_line(error)}. {fix}") from error


def prompt_of(instruction: str, given: str = "") -> str:
    """The prompt for a response to ``instruction`` about the input ``given``."""
    form = PROMPT_WITH_INPUT if given.strip() else PROMPT
    return form.format(instruction=instruction, input=given)


def encode(rows: list[dict[str, str]], tokenizer: Tokenizer, length: int) -> Examples:
    """The rows as ids, at most ``length`` tokens each. A response that is too long is cut and has no </s>."""
    prompts = tokenizer.encode([prompt_of(row["instruction"], row.get("input") or "") for row in rows])
    responses = tokenizer.encode([row["output"] for row in rows])
    whole = [Example([*p, *r, EOS], len(p)) for p, r in zip(prompts, responses, strict=True)]
    kept = [Example(one.ids[:length], one.prompt) for one in whole if one.prompt < length]
    return Examples(kept, sum(len(one.ids) > length > one.prompt for one in whole), len(whole) - len(kept))
