"""Zero-shot tasks: the harness's prompts, scores and accuracies written by hand, both conventions, the command."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval", reason='zero-shot tasks need lm-evaluation-harness: pip install -e ".[eval]"')

import lm_eval.tasks

from dlr_pretrain.data.tokenizer import EOS, Tokenizer
from dlr_pretrain.deploy import zero_shot
from dlr_pretrain.deploy.folder import open_folder
from tests.conftest import ROOT, on_ranks
from tests.deploy.models import exported, tokenizer_of
from tests.deploy.questions import all_texts, asked, write

SCRIPT = ROOT / "scripts" / "evaluate.py"
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
    return [exported(root / f"{seed}", spiece, "backbone=cola", "scale.rank=8", seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def tasks(data, rows) -> zero_shot.Tasks:
    return zero_shot.load_tasks(list(zero_shot.TASKS), data)


@pytest.fixture(scope="module")
def model(folders):
    return open_folder(folders[0], torch.float64)


def by_hand(model, tokenizer: Tokenizer, context: str, choice: str, as_in_paper: bool) -> float:
    """The harness's rule: what the joint encoding has beyond the context's, one sequence, no padding."""
    end = [EOS] if as_in_paper else []
    before, whole = (tokenizer.encode([text])[0] + end for text in (context, context + choice))
    ids = before + whole[len(before) :]
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(log_p[at - 1, ids[at]].item() for at in range(len(before), len(ids)))


@pytest.mark.parametrize("as_in_paper", [False, True], ids=["plain", "as_in_paper"])
def test_accuracies_are_those_of_scores_written_by_hand(model, rows, tasks, as_in_paper):
    found = zero_shot.evaluate(*model, tasks, 1024, as_in_paper, batch_size=7)
    assert list(found) == list(rows) and len(SUBJECTS) == 57
    for task, lines in rows.items():
        right, picked = [], set()
        for row in lines:
            choices, answer = asked(task, row)
            scores = [by_hand(*model, *choice, as_in_paper) for choice in choices]
            picked.add(scores.index(max(scores)))
            right.append(scores.index(max(scores)) == answer)
        assert found[task]["acc"] == pytest.approx(statistics.fmean(right)), task
        assert (found[task]["n"], found[task]["distinct_choices"]) == (len(lines), len(picked)), task
        if task != "mmlu":
            assert found[task]["stderr"] == pytest.approx(statistics.stdev(right) / len(lines) ** 0.5)


def test_the_harness_asks_and_gets_what_is_written_by_hand(model, rows, tasks, monkeypatch):
    heard = {}

    class Listening(zero_shot.Scorer):
        def loglikelihood(self, requests, disable_tqdm=False):
            answers = super().loglikelihood(requests)
            heard.update((request.args, score) for request, (score, _) in zip(requests, answers, strict=True))
            return answers

    monkeypatch.setattr(zero_shot, "Scorer", Listening)
    zero_shot.evaluate(*model, tasks, 1024)
    texts = [pair for task, lines in rows.items() for row in lines for pair in asked(task, row)[0]]
    assert heard.keys() == set(texts)
    for pair in texts[:40] + texts[-40:]:
        assert heard[pair] == pytest.approx(by_hand(*model, *pair, False), rel=0, abs=1e-10)


def test_scores_are_those_of_the_harnesss_own_model_class(folders, data, rows, tasks):
    """HFLM encodes by the folder's tokenizer.json and batches in its own way. fp32, whose sums are in another order."""
    pytest.importorskip("accelerate", reason='HFLM needs accelerate: pip install -e ".[sft]"')
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    model, tokenizer = open_folder(folders[0], torch.float32)
    theirs = HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folders[0]), batch_size=3, max_length=1024)
    pairs = [pair for task in ("boolq", "piqa") for row in rows[task] for pair in asked(task, row)[0]]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    wanted = [score for score, _ in theirs.loglikelihood(requests, disable_tqdm=True)]
    assert zero_shot.log_likelihoods(model, zero_shot.encode_pairs(tokenizer, pairs), 1024) == pytest.approx(
        wanted, rel=1e-5
    )
    assert len(set(wanted)) > len(wanted) // 2


def test_as_in_the_paper_one_token_choices_tie_and_the_first_wins(model, rows, tasks):
    found = zero_shot.evaluate(*model, tasks, 1024, as_in_paper=True)
    for task, key in (("boolq", "label"), ("mmlu", "answer")):
        share = statistics.fmean(row[key] == 0 for row in rows[task])
        assert found[task]["acc"] == pytest.approx(share)
        assert (found[task]["distinct_choices"], found[task]["tied"]) == (1, len(rows[task]))
    plain = zero_shot.evaluate(*model, tasks, 1024)
    assert plain["boolq"]["tied"] == plain["mmlu"]["tied"] == 0


def test_the_error_of_a_task_of_parts_is_pooled_over_them():
    parts = [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0]]
    samples = [[{"acc": acc, "filtered_resps": [(0, 0), (-1, 0)], "arguments": []} for acc in part] for part in parts]
    found = zero_shot.measures(samples)
    variance = (2 * statistics.variance(parts[0]) + 3 * statistics.variance(parts[1])) / (7 - 2)
    assert found["stderr"] == pytest.approx(math.sqrt(variance / 7))
    assert zero_shot.measures([part[:1] for part in samples])["stderr"] is None


def test_documents_that_do_not_fit_are_counted(model, rows, tasks):
    texts = [[context + choice for context, choice in asked("boolq", row)[0]] for row in rows["boolq"]]
    lengths = [max(map(len, model[1].encode(choices))) for choices in texts]
    just_fits = sorted(lengths)[len(lengths) // 2]  # its last token is scored and not read
    found = zero_shot.evaluate(*model, {"boolq": tasks["boolq"]}, just_fits - 1)["boolq"]
    assert found["cut"] == sum(length > just_fits for length in lengths) > 0


def test_seeds_give_mean_and_standard_deviation():
    def one(a: float, b: float, picked: int) -> dict:
        return {name: {"acc": acc, "stderr": acc / 10, "n": 9, "distinct_choices": picked, "tied": 0, "cut": 0}
                for name, acc in (("a", a), ("b", b))}  # fmt: skip

    tasks, average = zero_shot.combine([one(0.2, 0.5, 2), one(0.3, 0.5, 1), one(0.7, 0.5, 4)])
    assert tasks["a"]["acc"] == pytest.approx(0.4) and tasks["b"]["std"] == 0
    assert tasks["a"]["std"] == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert (tasks["a"]["n"], tasks["a"]["distinct_choices"]) == (9, 1)
    assert average == {"acc": pytest.approx(0.45), "std": pytest.approx(tasks["a"]["std"] / 2)}


def command(monkeypatch, *words: object) -> int:
    """The command in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words)])
    monkeypatch.setenv("TQDM_DISABLE", "1")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_the_command_of_several_seeds(monkeypatch, capsys, tmp_path, folders, data, rows):
    output = tmp_path / "new" / "seeds.json"
    assert command(monkeypatch, *folders, "--data", data, "--as-in-paper", "--output", output) == 0
    report, printed = json.loads(output.read_text()), capsys.readouterr().out
    accs = [each["tasks"]["piqa"]["acc"] for each in report["checkpoints"]]
    assert len(set(accs)) > 1 and report["tasks"]["piqa"]["acc"] == pytest.approx(statistics.fmean(accs))
    assert report["tasks"]["piqa"]["std"] == pytest.approx(statistics.stdev(accs))
    assert report["tasks"]["boolq"]["std"] == report["tasks"]["mmlu"]["std"] == 0
    assert (report["convention"], report["context_length"], report["limit"]) == ("as_in_paper", 1024, None)
    assert printed.count("always the same choice") == 2
    for words in (
        "convention      as_in_paper",
        "plain, the default",
        "context length  1,024 tokens",
        *map(str, folders),
    ):
        assert words in printed


def test_two_ranks_write_what_one_writes(monkeypatch, tmp_path, folders, data, rows):
    words = (folders[0], "--data", data, "--tasks", "piqa,mmlu", "--batch-size", 9, "--output")
    assert command(monkeypatch, *words, tmp_path / "1.json") == 0
    on_ranks(lambda: command(monkeypatch, *words, tmp_path / "2.json"), 2)
    assert (tmp_path / "1.json").read_text() == (tmp_path / "2.json").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{folder}", "--tasks", "piqua"), "'piqua' is no task: did you mean piqa?"),
        (("{folder}", "--limit", "0"), "0': must be a whole number of at least 1"),
        (("{folder}", "--context", "few"), "'few': must be a whole number"),
        (("{folder}", "--data", "{data}", "--device", "gpu"), "--device gpu: "),
        (("{folder}", "--data", "{data}", "--output", "{data}"), "is a folder. Name a file"),
        (("{folder}", "--data", "{data}/nowhere"), "has no <split>.jsonl. Name the folder that has it with --data"),
        (("{folder}", "--data", "{folder}/wrong"), "its files of piqa have not the splits and fields that"),
        (("{folder}", "--data", "{folder}/broken"), "validation.jsonl: not JSON lines"),
        (("{folder}", "{data}", "--data", "{data}/no"), "has no config.json. Name a folder that an export wrote"),
        (("{folder}", "--data", "{data}", "--context", "3"), "fit into a context of 3. Give --context "),
    ],
)
def test_mistakes_are_told_in_a_line(monkeypatch, capsys, folders, data, rows, words, message):
    for name, text in (("wrong", '{"goal": "a", "label": 0}\n'), ("broken", "{")):
        (folders[0] / name / "piqa").mkdir(parents=True, exist_ok=True)
        (folders[0] / name / "piqa" / "validation.jsonl").write_text(text)
    given = [word.format(folder=folders[0], data=data) for word in words]
    assert command(monkeypatch, *given, *(() if "--tasks" in words else ("--tasks", "piqa"))) in (2, 3)
    assert message in capsys.readouterr().err


def test_a_choice_that_does_not_fit_is_told_with_its_task_and_what_fits(monkeypatch, capsys, folders, data, rows):
    words = (folders[0], "--data", data, "--tasks", "piqa,winogrande", "--limit", 4)
    assert command(monkeypatch, *words, "--context", 2) == 3
    said = capsys.readouterr().err
    task, longest = re.search(r"error: (\w+): a choice of (\d+) tokens does not fit", said).groups()
    assert task in ("piqa", "winogrande")
    assert command(monkeypatch, *words, "--context", int(longest) - 1) == 3
    assert command(monkeypatch, *words, "--context", longest) == 0


def test_an_error_at_the_last_folder_loses_no_other(monkeypatch, capsys, tmp_path, folders, data, rows):
    measured, evaluate = [], zero_shot.evaluate

    def until_memory_ends(*given):
        if len(measured) == 2:
            raise torch.OutOfMemoryError
        measured.append(evaluate(*given))
        return measured[-1]

    monkeypatch.setattr(zero_shot, "evaluate", until_memory_ends)
    output = tmp_path / "seeds.json"
    assert command(monkeypatch, *folders, "--data", data, "--tasks", "piqa", "--output", output) == 3
    assert f"error: {folders[2]}: out of GPU memory at --batch-size 64" in capsys.readouterr().err
    report = json.loads(output.read_text())
    assert [each["tasks"] for each in report["checkpoints"]] == measured and len(measured) == 2
    assert report["tasks"]["piqa"]["acc"] == pytest.approx(statistics.fmean(each["piqa"]["acc"] for each in measured))


def test_folders_that_are_read_differently_are_not_averaged(monkeypatch, capsys, tmp_path, folders, data, rows):
    spiece = folders[0] / "spiece.model"
    longer = exported(tmp_path / "longer", spiece, "backbone=cola", "scale.rank=8", "train.seq_len=2048")
    assert command(monkeypatch, folders[0], longer, "--data", data, "--tasks", "piqa") == 3
    assert "differs from that of" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ConnectionError("no network"), ValueError("no network\nand no cache")])
def test_the_hub_out_of_reach_is_told(monkeypatch, capsys, tmp_path, folders, error):
    import datasets

    def unreachable(**_):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    assert command(monkeypatch, folders[0], "--tasks", "piqa") == 3
    assert "piqa do not come from the hub: no network. Name a folder" in capsys.readouterr().err


@pytest.mark.slow
def test_all_six_tasks_on_real_documents_with_the_published_tokenizer(tmp_path, test_data):
    folder = exported(
        tmp_path / "folded", test_data / "tokenizer/spiece.model", "backbone=lowrank", "scale.rank=4", rows=32_000
    )
    output = tmp_path / "report.json"
    words = ["--data", test_data / "eval", "--limit", 2, "--context", 256, "--output", output]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, [SCRIPT, folder, *words])], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "it/s]" not in done.stderr  # 62 bars
    report = json.loads(output.read_text())
    assert {name: task["n"] for name, task in report["tasks"].items()} == dict.fromkeys(zero_shot.TASKS, 2) | {
        "mmlu": 114
    }
    assert report["tasks"].keys() == zero_shot.TASKS.keys() and report["context_length"] == 256
    for name in report["tasks"]:
        assert f"\n{name} " in "\n" + done.stdout


def test_real_prompts_part_from_their_choices_between_two_tokens(test_data):
    """The ids of a context are the first ids of the joint text; choices of a letter, yes and no are one token each."""
    tokenizer = Tokenizer(test_data / "tokenizer/spiece.model")
    tasks = zero_shot.load_tasks(list(zero_shot.TASKS), test_data / "eval")
    for name, parts in tasks.items():
        for part in list(parts.values())[:3]:
            part.build_all_requests(limit=40)
            texts = [request.args for request in part.instances]
            wholes = tokenizer.encode([context + choice for context, choice in texts])
            for (before, after), whole in zip(zero_shot.encode_pairs(tokenizer, texts), wholes, strict=True):
                assert before + after == whole and after and EOS not in whole
                assert len(after) == 1 or name not in ("boolq", "mmlu")
