"""tune.py: its statistics on planted losses, its grid, and its runs on this machine and in a queue."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import product
from pathlib import Path

import pytest

from dlr_pretrain.analysis import tune
from dlr_pretrain.config import identity
from dlr_pretrain.launch.runs import PlannedRun, load_runs, read_lines, read_table
from dlr_pretrain.train.record import record_state, update_record
from dlr_pretrain.util.errors import EXIT_FAILED
from scripts.tune import main

METHODS, RATES = ["one", "two"], [0.001, 0.003, 0.01]
TWO = {"methods": METHODS, "rates": RATES, "seeds": [1, 2, 3], "fresh": []}


def trials(design: dict, loss, seeds=None) -> list[dict]:
    """A trial for each cell; ``loss(method, lr, seed)`` gives both halves, or None for a diverged run."""
    found = []
    for method, lr, seed in product(design["methods"], design["rates"], seeds or design["seeds"]):
        a, b = halves if (halves := loss(method, lr, seed)) else (None, None)
        state = "diverged" if halves is None else "complete"
        found.append({"method": method, "lr": lr, "seed": seed, "state": state, "tokens": 1, "loss_a": a, "loss_b": b})
    return found


def bowl(best: float, lr: float) -> float:
    """A loss whose minimum over the rates, 3, is at ``best``."""
    return 3 + math.log10(lr / best) ** 2


def test_a_rate_is_chosen_on_one_half_and_reported_on_the_other():
    """Half B has another best rate, and half A other losses."""
    best = {"one": 0.001, "two": 0.003}
    found = tune.compare(TWO, trials(TWO, lambda m, lr, s: (bowl(best[m], lr), 10 * s - 100 * lr + (m == "two"))))
    assert {method: choice["lr"] for method, choice in found["chosen"].items()} == best
    assert found["chosen"]["two"]["losses"] == pytest.approx({1: 10.7, 2: 20.7, 3: 30.7})
    assert found["comparisons"][0]["by_seed"] == pytest.approx({1: 0.8, 2: 0.8, 3: 0.8})


def test_equal_methods_differ_as_often_as_the_level_says():
    """Hundreds of comparisons of a method with itself; noisy losses choose its rate among three each time."""
    rng = random.Random(0)
    design = TWO | {"fresh": [4, 5, 6]}
    called = 0
    for _ in range(800):
        noise = lambda *_: (rng.gauss(3, 0.1), rng.gauss(3, 0.1))  # noqa: E731
        found = tune.compare(design, trials(design, noise) + trials(design, noise, design["fresh"]))
        called += found["comparisons"][0]["better"] != "none shown"
    assert 0.027 < called / 800 < 0.073  # 5 % and three standard errors


def test_fresh_seeds_are_reported_and_choose_nothing():
    design = TWO | {"seeds": [1], "fresh": [7, 8]}
    grid = trials(design, lambda m, lr, s: (bowl(0.003, lr), 1.0))
    fresh = trials(design | {"rates": [0.003]}, lambda m, lr, s: (-9.0, 2.0 + s), [7, 8])
    found = tune.compare(design, grid + fresh)
    assert found["chosen"]["one"] == {"lr": 0.003, "losses": {7: 9.0, 8: 10.0}, "reason": ""}
    assert found["comparisons"][0]["by_seed"] == {7: 0.0, 8: 0.0}
    fresh[-1] |= {"state": "diverged", "loss_b": None}
    found = tune.compare(design, grid + fresh)
    assert found["comparisons"][0]["reason"] == "two: no loss at its chosen rate with seed 8"
    assert tune.methods_table(found).frame["PPL (held out)"][1] == "1 of 2 diverged"
    found = tune.compare(TWO, trials(TWO, lambda m, lr, s: None))
    reason = "every rate has a run that diverged"
    assert tune.methods_table(found).frame.Better[1] == f"not decided: one: {reason}; two: {reason}"


def test_intervals_are_students_t():
    """With four methods, each of the three intervals has the level 1 - 5 % / 3."""
    found = tune.estimate([2.0, 4.0, 9.0], 0.95)
    reach = 4.302653 * math.sqrt(13) / math.sqrt(3)
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((5, 5 - reach, 5 + reach), rel=1e-6)
    assert (tune.estimate([2.0, 2.0], 0.95)["low"], tune.estimate([2.0], 0.95)["low"]) == (2.0, None)
    design = TWO | {"methods": ["one", "two", "three", "four"], "seeds": [1]}
    found = tune.compare(design, trials(design, lambda m, lr, s: (bowl(0.003, lr), 3.0 - (m == "two"))))
    assert [c["difference"]["level"] for c in found["comparisons"]] == pytest.approx([1 - 0.05 / 3] * 3)
    assert "not decided: one seed" in tune.methods_table(found).frame.Better[1]


def test_the_files_hold_the_numbers_of_diverged_runs_too(tmp_path):
    def loss(method, lr, seed):
        level, scatter = (bowl(0.01, lr), 1e-3) if method == "one" else (bowl(0.003, lr) - 0.05, 2e-3)
        return None if (method, lr, seed) == ("two", 0.01, 3) else (level, level + seed * scatter)

    found = tune.compare(TWO, trials(TWO, loss)) | {"command": "tune.py"}
    tune.write(found, tmp_path)
    stored = json.loads((tmp_path / "tune.json").read_text())
    difference = stored["comparisons"][0]["difference"]
    assert stored["comparisons"][0]["better"] == "two" and difference == found["comparisons"][0]["difference"]
    text = (tmp_path / "report.md").read_text()
    assert f"| {difference['mean']:+.4f} (3) |" in text and "| two |\n" in text
    values = [math.exp(3 + seed / 1000) for seed in (1, 2, 3)]
    assert f"| one | 0.01 | {statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} (3)" in text
    assert "one: its best rate, 0.01, is at an end of the grid" in text and "two: its best rate" not in text
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "report.html").exists()


def pretend(run: PlannedRun, pieces: str = "t5") -> None:
    """Write what training leaves: best at 0.003, DLR better by 0.2, 0.001 between seeds, diverged at 0.03."""
    cfg, last = run.cfg, run.cfg.train.steps
    run.dir.mkdir(parents=True, exist_ok=True)
    update_record(run.dir, {"identity": identity(cfg) | {"tokenizer.pieces": pieces}, "saved": last})
    record_state(run.dir, "diverged" if cfg.train.lr > 0.02 else "complete")
    loss = 3 + math.log10(cfg.train.lr / 0.003) ** 2 - 0.2 * cfg.dlr.enabled + cfg.seed % 7 / 1000
    record = {"step": last, "eval/loss": loss, "eval/loss_a": loss, "eval/loss_b": loss + 0.5}
    (run.dir / "metrics.jsonl").write_text(json.dumps(record) + "\n")


class Trained(list):
    """Replaces ``local.train``: pretends to train, and lists the runs. After ``changes`` runs the tokenizer is
    another. Runs with a seed in ``failing`` fail."""

    failing, changes = (), math.inf

    def __call__(self, runs, at_once, after_each) -> None:
        for run in runs:
            self.append(run)
            pretend(run, "another" if len(self) > self.changes else "t5")
            if run.cfg.seed in self.failing:
                record_state(run.dir, "failed", "the disk is full")
            after_each()


@pytest.fixture
def trained(monkeypatch):
    found = Trained()
    monkeypatch.setattr("dlr_pretrain.launch.submit.train", found)
    monkeypatch.setattr("dlr_pretrain.analysis.tune.draw_rates", lambda *_: [])
    return found


@pytest.fixture
def given(words, tmp_path):
    """The arguments of ``tune.py`` for small runs, without a rate, which is the grid's."""
    small = [word for word in words(f"run.root={tmp_path}/runs") if not word.startswith("train.lr=")]
    return lambda *own: [*small, *own, "--output", f"{tmp_path}/out"]


@pytest.fixture
def command(given, tmp_path):
    """``tune.py``, and what it wrote."""

    def give(*own: str, code: int = 0) -> dict:
        assert main(given(*own, "--local")) == code
        written = tmp_path / "out" / "tune.json"
        return json.loads(written.read_text()) if written.exists() else {}

    return give


PAIR = ("backbone=cola", "dlr=off,on")


def test_methods_are_runs_that_differ_in_rate_and_seed_alone(tmp_path):
    path = tmp_path / "my.runs"
    path.write_text("dlr=on\ndlr=on dlr.alpha=0.5\nbackbone=full optimizer=galore train.steps=9\n")
    runs = load_runs(read_table([str(path), "scale=tiny", "train.lr=0.01,0.001", "seed=1,2"]))
    names = tune.method_names(runs)
    assert list(names.values()) == ["lowrank+dlr", "lowrank+dlr (dlr.alpha=0.5)", "galore"] and len(runs) == 12
    design = tune.grid(names, runs, [3])
    assert design == {"methods": list(names.values()), "rates": [0.001, 0.01], "seeds": [1, 2], "fresh": [3]}
    found = {
        "design": design,
        "chosen": {},
        "trials": [tune.trial_of(names[tune.own_words(run)], run, "") for run in runs],
    }
    (remark,) = tune.remarks(found)
    assert remark.startswith("The budgets are not equal: lowrank+dlr ")


@pytest.mark.parametrize(("rows", "own", "said"), [
    ("dlr=off\ndlr=on data.mask_documents=true", [], "data.mask_documents of lowrank+dlr is not that of lowrank"),
    ("dlr=off\ndlr=on train.lr=0.1", [], "a fair comparison gives all methods the same rates and seeds"),
    ("dlr=off", ["--confirm", "42,43"], "--confirm: the rates are chosen with seed 42"),
])  # fmt: skip
def test_a_grid_that_does_not_compare_is_refused_before_any_run(given, tmp_path, trained, capsys, rows, own, said):
    path = tmp_path / "my.runs"
    path.write_text(rows)
    assert main(given(str(path), *own, "--local")) == EXIT_FAILED
    assert said in capsys.readouterr().err and not trained


def test_the_same_command_continues_the_grid(command, trained):
    """A second call trains nothing. A wider grid trains only its new rates, and a diverged run stays a result."""
    for _ in range(2):
        found = command(*PAIR, "train.lr=0.003", "seed=41,42")
        assert len(trained) == 4 and found["comparisons"][0]["better"] == "cola+dlr"
        assert found["comparisons"][0]["by_seed"] == pytest.approx({"41": -0.2, "42": -0.2})
        assert found["chosen"]["cola"]["losses"] == pytest.approx({"41": 3.506, "42": 3.5})
    wider = command(*PAIR, "train.lr=0.003,0.03", "seed=41,42")
    assert [run.cfg.train.lr for run in trained[4:]] == [0.03] * 4
    assert [t["state"] for t in wider["trials"] if t["lr"] == 0.03] == ["diverged"] * 4
    assert wider["chosen"]["cola"]["lr"] == 0.003


def test_a_failed_run_decides_nothing(command, trained):
    """The same command tries it again."""
    grid, trained.failing = ("backbone=cola", "train.lr=0.003,0.01", "seed=41,42"), (42,)
    found = command(*grid, code=EXIT_FAILED)
    assert found["chosen"]["cola"]["reason"] == "2 of the 4 runs of the grid have not ended"
    assert [t["state"] for t in found["trials"] if t["seed"] == 42] == ["failed"] * 2
    trained.failing = ()
    assert command(*grid)["chosen"]["cola"]["lr"] == 0.003


def test_runs_of_another_text_or_tokenizer_are_not_compared(command, trained, capsys):
    trained.changes = 1
    assert command(*PAIR, "train.lr=0.003", "seed=41,42", code=EXIT_FAILED) == {}
    assert "tokenizer.pieces of" in capsys.readouterr().err and len(trained) == 2  # of four


def test_the_same_command_continues_after_a_queue(given, scheduler, tmp_path, trained):
    table, asked, queue = ("train.lr=0.003,0.01", *PAIR, "seed=41"), scheduler / "asked", scheduler / "queue"

    def give() -> dict:
        assert main([*given(*table, "--confirm", "5", "--limit", "2"), "--", "--gpus-per-node=2"]) == 0
        return json.loads((tmp_path / "out" / "tune.json").read_text())

    assert give()["comparisons"][0]["better"] is None
    assert {"--gpus-per-node=2", "--array=1-4%2"} < set(asked.read_text().splitlines())
    asked.unlink()
    queue.write_text("".join(f"70_{i} PENDING\n" for i in range(1, 5)))
    assert {t["state"] for t in give()["trials"]} == {"pending"} and not asked.exists()

    for run in load_runs(read_table([word for word in given(*table) if "=" in word])):
        pretend(run)
    queue.write_text("")
    give()
    fresh = read_lines(Path(asked.read_text().splitlines()[-1]))
    assert ["train.lr=0.003" in line.words and line.words[-1] == "seed=5" for line in fresh] == [True, True]
    assert not trained


@pytest.mark.full
def test_the_command_trains_diverges_and_compares(command, tmp_path):
    """Real processes: a rate at which it learns, and one at which the first updates are not finite."""
    found = command("train.steps=4", "backbone=cola", "train.lr=0.003,1e30", "seed=1", "--limit", "2")
    assert [t["state"] for t in found["trials"]] == ["complete", "diverged"]
    assert found["chosen"]["cola"]["lr"] == 0.003 and (tmp_path / "out" / "curve.png").exists()
