"""Zero-shot accuracy by the harness agrees with hand-written scores of each choice, in both conventions."""

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason='zero-shot tasks need lm-evaluation-harness: pip install -e ".[eval]"')

import lm_eval.tasks

from dlr_pretrain.deploy import zero_shot
from dlr_pretrain.deploy.export import open_folder
from tests.conftest import main_of
from tests.deploy.models import exported, of_kind, tokenizer_of

pytestmark = pytest.mark.full
HARNESS = Path(lm_eval.tasks.__file__).parent
SUBJECTS = sorted(path.stem.removeprefix("mmlu_") for path in (HARNESS / "mmlu/default").glob("mmlu_*.yaml"))
WORDS = "the sun sets at noon and it is so in ten towns on one hill by a river that runs down to an old mill"


def asked(task: str, row: dict) -> tuple[list[tuple[str, str]], int]:
    """The (context, continuation) of each choice, and the index of the right one."""
    if task == "boolq":
        context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
        return [(context, " no"), (context, " yes")], row["label"]
    about = f"The following are multiple choice questions (with answers) about {row['subject'].replace('_', ' ')}."
    lines = [f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True)]
    context = "\n".join([about, "", row["question"], *lines, "Answer:"])
    return [(context, f" {letter}") for letter in "ABCD"], row["answer"]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[dict]]:
    """The rows of two tasks, with the hub's field names."""
    rng = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(WORDS.split(), k=rng.randint(least, most)))

    def mmlu(subject: str) -> dict:
        choices = [text(1, 4) for _ in range(4)]
        return {"question": f"{text(3, 7)}?", "subject": subject, "choices": choices, "answer": rng.randrange(4)}

    return {
        "boolq": [{"passage": text(9, 30), "question": text(3, 6), "label": rng.randrange(2)} for _ in range(16)],
        "mmlu": [mmlu(subject) for subject in SUBJECTS],
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory, rows) -> Path:
    """The rows as <task>/<split>.jsonl and mmlu/<subject>/<split>.jsonl."""
    folder = tmp_path_factory.mktemp("data")
    files = {"boolq/validation": rows["boolq"]} | {f"mmlu/{row['subject']}/test": [row] for row in rows["mmlu"]}
    for name, lines in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory, rows) -> list[Path]:
    """Folders of two seeds, with a tokenizer that has a piece for each choice of BoolQ and MMLU."""
    root = tmp_path_factory.mktemp("runs")
    texts = [context + choice for task in rows for row in rows[task] for context, choice in asked(task, row)[0]]
    spiece = tokenizer_of(root / "tokenizer", texts + ["no yes A B C D"] * len(texts), pieces=95)
    return [exported(root / f"{seed}", spiece, replace(of_kind("cola"), seed=seed)) for seed in (1, 2)]


@pytest.mark.parametrize("as_in_paper", [False, True], ids=["plain", "as_in_paper"])
def test_accuracies_are_those_of_scores_written_by_hand(folders, data, rows, as_in_paper):
    """A score is the sum of log p over the tokens that the joint encoding adds to the context's, without padding. As in
    the paper, choices of one token tie, and the first one wins."""
    found = zero_shot.evaluate(folders[0], zero_shot.load_tasks(list(rows), data), as_in_paper, None, batch_size=7)
    assert (found["context_length"], found["dtype"], list(found["tasks"])) == (1024, "float32", list(rows))
    model, tokenizer = open_folder(folders[0])
    end = [tokenizer.eos_token_id] if as_in_paper else []

    def score(context: str, choice: str) -> float:
        before, whole = (tokenizer(text).input_ids + end for text in (context, context + choice))
        ids = before + whole[len(before) :]
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return round(sum(log_p[at - 1, ids[at]].item() for at in range(len(before), len(ids))), 4)

    for task, lines in rows.items():
        right, picked = [], set()
        for row in lines:
            choices, answer = asked(task, row)
            scores = [score(*choice) for choice in choices]
            picked.add(scores.index(max(scores)))
            right.append(scores.index(max(scores)) == answer)
        measured = found["tasks"][task]
        assert measured["acc"] == pytest.approx(statistics.fmean(right)), task
        assert measured["stderr"] == pytest.approx(statistics.stdev(right) / len(lines) ** 0.5)
        assert (measured["n"], measured["distinct_choices"]) == (len(lines), len(picked)), task
        assert not as_in_paper or measured["distinct_choices"] == 1


@pytest.fixture
def command(capsys):
    """Runs scripts/evaluate.py here: exit code, standard output, standard error."""
    return lambda *words: (main_of("evaluate", *words), *capsys.readouterr())


def test_several_seeds_give_mean_and_standard_deviation(command, tmp_path, folders, data):
    output = tmp_path / "new" / "seeds.json"
    words = ("--data", data, "--tasks", "boolq, mmlu", "--limit", 5, "--context", 256, "--output", output)
    code, said, _ = command(*folders, *words)
    report = json.loads(output.read_text())
    assert code == 0 and report["tasks"].keys() == {"boolq", "mmlu"}
    accs = {task: [each["tasks"][task]["acc"] for each in report["checkpoints"]] for task in report["tasks"]}
    means = list(map(statistics.fmean, zip(*accs.values(), strict=True)))
    for found, values in ((report["tasks"]["boolq"], accs["boolq"]), (report["average"], means)):
        assert found["acc"] == pytest.approx(statistics.fmean(values))
        assert found["std"] == pytest.approx(statistics.stdev(values))
    assert report["tasks"]["boolq"]["n"] == 5 and report["tasks"]["mmlu"]["n"] == len(SUBJECTS)
    assert (report["convention"], report["context_length"], report["limit"]) == ("plain", 256, 5)
    assert "convention plain" in said


def test_a_mistake_is_reported_in_one_line(command, folders, data, tmp_path):
    (tmp_path / "piqa").mkdir()
    (tmp_path / "piqa" / "validation.jsonl").write_text('{"goal": "a", "label": 0}\n')
    (tmp_path / "boolq").mkdir()
    (tmp_path / "boolq" / "train.jsonl").write_text('{"question": "a", "passage": "b", "label": 0}\n')
    for words, message in (
        ((folders[0], "--tasks", "piqua"), "'piqua' is not a task. Choose from arc_challenge, "),
        ((folders[0], "--tasks", "piqa", "--data", data / "nowhere"), "piqa: its documents cannot be read from"),
        ((folders[0], "--tasks", "piqa", "--data", tmp_path), "a folder that has <task>/<split>.jsonl"),
        ((folders[0], "--tasks", "boolq", "--data", tmp_path), "boolq: its documents cannot be read from"),
        ((data, "--tasks", "boolq", "--data", data), "has no config.json, which an export has"),
    ):
        code, _, said = command(*words)
        assert code == 3 and message in said, words
