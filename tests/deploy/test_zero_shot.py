"""Zero-shot accuracy is the harness's, on what a hand-written score of each choice gives, in both conventions."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason='zero-shot tasks need lm-evaluation-harness: pip install -e ".[eval]"')

import lm_eval.tasks

from dlr_pretrain.deploy import zero_shot
from dlr_pretrain.deploy.folder import open_folder
from tests.conftest import script
from tests.deploy.models import exported, of_kind, tokenizer_of
from tests.deploy.questions import all_texts, asked, write

pytestmark = pytest.mark.full
HARNESS = Path(lm_eval.tasks.__file__).parent
SUBJECTS = sorted(path.stem.removeprefix("mmlu_") for path in (HARNESS / "mmlu/default").glob("mmlu_*.yaml"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def rows(data):
    return write(data, SUBJECTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, rows) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    spiece = tokenizer_of(root / "tokenizer", all_texts(rows), pieces=95)
    return [exported(root / f"{seed}", spiece, of_kind("cola"), seed=seed) for seed in (1, 2)]


def by_hand(model, tokenizer, context: str, choice: str, as_in_paper: bool) -> float:
    """The sum of log p over what the joint encoding has beyond the context's; one sequence, no padding."""
    end = [tokenizer.eos_token_id] if as_in_paper else []
    before, whole = (tokenizer(text).input_ids + end for text in (context, context + choice))
    ids = before + whole[len(before) :]
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(log_p[at - 1, ids[at]].item() for at in range(len(before), len(ids)))


@pytest.mark.parametrize("as_in_paper", [False, True], ids=["plain", "as_in_paper"])
def test_accuracies_are_those_of_scores_written_by_hand(folders, data, rows, as_in_paper):
    """As in the paper choices of one token tie, and the first of them wins."""
    tasks = zero_shot.load_tasks(list(zero_shot.TASKS), data)
    found = zero_shot.evaluate(folders[0], tasks, 1024, as_in_paper, batch_size=7)
    assert found["context_length"] == 1024 and found["dtype"] == "float32"
    assert list(found["tasks"]) == list(rows) and len(SUBJECTS) == 57
    model, tokenizer = open_folder(folders[0])
    for task, lines in rows.items():
        right, picked = [], set()
        for row in lines:
            choices, answer = asked(task, row)
            scores = [round(by_hand(model, tokenizer, *choice, as_in_paper), 4) for choice in choices]
            picked.add(scores.index(max(scores)))
            right.append(scores.index(max(scores)) == answer)
        measured = found["tasks"][task]
        assert measured["acc"] == pytest.approx(statistics.fmean(right)), task
        assert measured["stderr"] == pytest.approx(statistics.stdev(right) / len(lines) ** 0.5)
        assert (measured["n"], measured["distinct_choices"]) == (len(lines), len(picked)), task
        if as_in_paper and task in ("boolq", "mmlu"):
            assert measured["distinct_choices"] == 1


def test_seeds_give_mean_and_standard_deviation():
    def one(a: float, b: float, picked: int) -> dict:
        return {name: {"acc": acc, "n": 9, "distinct_choices": picked} for name, acc in (("a", a), ("b", b))}

    tasks, average = zero_shot.combine([one(0.2, 0.5, 2), one(0.3, 0.5, 1), one(0.7, 0.5, 4)])
    assert tasks["a"]["acc"] == pytest.approx(0.4) and tasks["b"]["std"] == 0
    assert tasks["a"]["std"] == pytest.approx(((0.04 + 0.01 + 0.09) / 2) ** 0.5)
    assert (tasks["a"]["n"], tasks["a"]["distinct_choices"]) == (9, 1)
    assert average == {"acc": pytest.approx(0.45), "std": pytest.approx(tasks["a"]["std"] / 2)}


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs scripts/evaluate.py here: exit code, standard output, standard error."""
    module = script("evaluate")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words)])
        return module.main(), *capsys.readouterr()

    return run


def test_the_command_of_several_seeds(command, tmp_path, folders, data, rows):
    output = tmp_path / "new" / "seeds.json"
    words = ("--data", data, "--tasks", "piqa,boolq", "--as-in-paper", "--limit", 5, "--output", output)
    code, said, _ = command(*folders, *words)
    report = json.loads(output.read_text())
    assert code == 0 and report["tasks"].keys() == {"boolq", "piqa"}
    accs = [each["tasks"]["piqa"]["acc"] for each in report["checkpoints"]]
    assert report["tasks"]["piqa"]["acc"] == pytest.approx(statistics.fmean(accs)) and report["tasks"]["piqa"]["n"] == 5
    assert report["tasks"]["piqa"]["std"] == pytest.approx(statistics.stdev(accs))
    assert (report["convention"], report["context_length"], report["limit"]) == ("as_in_paper", 1024, 5)
    assert "always the same choice" in said and "as_in_paper" in said


def test_mistakes_are_told_in_a_line(command, folders, data, rows, tmp_path):
    for name, text in (("wrong", '{"goal": "a", "label": 0}\n'), ("broken", "{")):
        (tmp_path / name / "piqa").mkdir(parents=True)
        (tmp_path / name / "piqa" / "validation.jsonl").write_text(text)
    for words, message in (
        ((folders[0], "--tasks", "piqua"), "'piqua' is no task: did you mean piqa?"),
        ((folders[0], "--data", data, "--device", "gpu"), "--device gpu: "),
        ((folders[0], "--data", data / "nowhere"), "has no .jsonl file. Name a folder"),
        ((folders[0], "--data", tmp_path / "wrong"), "piqa: its documents cannot be read from"),
        ((folders[0], "--data", tmp_path / "broken"), "JSONDecodeError"),
        ((folders[0], data, "--data", data), "has no config.json. Name a folder that an export wrote"),
        ((folders[0], "--data", data, "--context", 3), "fit into 3 tokens: raise --context"),
    ):
        code, _, said = command(*words, *(() if "--tasks" in words else ("--tasks", "piqa")))
        assert code == 3 and message in said, words


def test_all_six_tasks_on_real_documents_with_the_published_tokenizer(command, tmp_path, test_data):
    spiece = test_data / "tokenizer/spiece.model"
    folder = exported(tmp_path / "folded", spiece, of_kind("lowrank"), rows=32_100)
    output = tmp_path / "report.json"
    assert command(folder, "--data", test_data / "eval", "--limit", 2, "--context", 256, "--output", output)[0] == 0
    found = {name: task["n"] for name, task in json.loads(output.read_text())["tasks"].items()}
    assert found == dict.fromkeys(zero_shot.TASKS, 2) | {"mmlu": 114}
