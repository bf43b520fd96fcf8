"""The six zero-shot tasks in small: rows under the hub's field names, and what the harness asks about each, by hand."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

WORDS = "the sun sets at noon and it is so in ten towns on one hill by a river that runs down to an old mill"
LETTERS = ["A", "B", "C", "D"]


def write(folder: Path, subjects: list[str], seed: int = 0) -> dict[str, list[dict]]:
    """Writes <task>/<split>.jsonl and mmlu/<subject>/<split>.jsonl; returns the rows of each task in its order."""
    rng = random.Random(seed)

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=rng.randint(least, most)))

    def arc(count: int) -> dict:
        labels = ["1", "2", "3", "4", "5"][:count] if rng.random() < 0.5 else [*LETTERS, "E"][:count]
        choices = {"text": [text(1, 5) for _ in labels], "label": labels}
        return {"id": "x", "question": text(4, 9), "choices": choices, "answerKey": rng.choice(labels)}

    def hellaswag() -> dict:
        endings = [f"[step] {text(2, 6)} [title] {text(1, 3)}" for _ in range(4)]
        parts = {"ctx_a": f"{text(3, 8)}.", "ctx_b": text(0, 3), "activity_label": text(1, 2)}
        return parts | {"endings": endings, "label": str(rng.randrange(4)), "ind": 1}

    def winogrande() -> dict:
        options = {"option1": "Anna", "option2": "the mill"}
        return {"sentence": f"{text(2, 5)} _ {text(2, 5)}.", **options, "answer": rng.choice(["1", "2"])}

    def mmlu(subject: str) -> dict:
        choices = [text(1, 4) for _ in range(4)]
        return {"question": f" {text(3, 7)}? ", "subject": subject, "choices": choices, "answer": rng.randrange(4)}

    rows = {
        "arc_challenge": [arc(count) for count in (3, 4, 4, 5, 4, 4)],
        "boolq": [{"passage": text(9, 30), "question": text(3, 6), "label": rng.randrange(2)} for _ in range(16)],
        "hellaswag": [hellaswag() for _ in range(5)],
        "mmlu": [mmlu(subject) for subject in subjects for _ in range(2)],
        "piqa": [{"goal": text(3, 7), "sol1": text(2, 8), "sol2": text(2, 8), "label": i % 2} for i in range(6)],
        "winogrande": [winogrande() for _ in range(6)],
    }
    files = {f"{task}/{'test' if task == 'arc_challenge' else 'validation'}": rows[task] for task in rows}
    files["arc_challenge/validation"] = files.pop("mmlu/validation")[:1]  # named by the harness, and not asked
    files |= {f"mmlu/{subject}/test": rows["mmlu"][2 * i : 2 * i + 2] for i, subject in enumerate(subjects)}
    for name, lines in files.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return rows


def asked(task: str, row: dict) -> tuple[list[tuple[str, str]], int]:
    """(context, continuation) of each choice, and which of them is right."""
    if task == "arc_challenge":
        choices = row["choices"]
        right = choices["label"].index(row["answerKey"])
        return [(f"Question: {row['question']}\nAnswer:", f" {choice}") for choice in choices["text"]], right
    if task == "boolq":
        context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        return [(context, " no"), (context, " yes")], row["label"]
    if task == "hellaswag":

        def clean(text: str) -> str:
            return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

        context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        return [(context, f" {clean(ending)}") for ending in row["endings"]], int(row["label"])
    if task == "mmlu":
        about = f"The following are multiple choice questions (with answers) about {row['subject'].replace('_', ' ')}."
        lines = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, row["choices"], strict=True)]
        context = "\n".join([about, "", row["question"].strip(), *lines, "Answer:"])
        return [(context, f" {letter}") for letter in LETTERS], row["answer"]
    if task == "piqa":
        context = f"Question: {row['goal']}\nAnswer:"
        return [(context, f" {row[name]}") for name in ("sol1", "sol2")], row["label"]
    before, after = row["sentence"].split("_")
    return [(before + row[name], f" {after.strip()}") for name in ("option1", "option2")], int(row["answer"]) - 1


def all_texts(rows: dict[str, list[dict]]) -> list[str]:
    """Everything that is asked, for a tokenizer that has a piece for each choice of BoolQ and MMLU."""
    texts = [context + choice for task in rows for row in rows[task] for context, choice in asked(task, row)[0]]
    return texts + ["no yes A B C D"] * len(texts)
