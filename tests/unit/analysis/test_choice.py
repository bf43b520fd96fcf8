"""Methods compared at their best learning rates: statistics on planted losses, and submit.py's report."""

import json
import math
import random
from itertools import product
from pathlib import Path

import pytest

from dlr_pretrain.analysis import figures
from dlr_pretrain.analysis.choice import compare, comparisons, difference_table, estimate, verdicts
from dlr_pretrain.analysis.report import write_reports
from dlr_pretrain.analysis.runs import read_runs
from dlr_pretrain.launch.runs import PlannedRun, load_runs, read_lines, read_table
from dlr_pretrain.train.record import record_state, update_record
from dlr_pretrain.util.errors import EXIT_FAILED
from slurm.submit import main
from tests.fake_runs import COLA, COLA_DLR, SHORT, a_run

METHODS, RATES = ("one", "two"), (0.001, 0.003, 0.01)


def trials(loss, methods=METHODS, rates=RATES, seeds=(1, 2, 3)) -> list[dict]:
    """An entry for each run; ``loss(method, lr, seed)`` gives both halves, or None for a diverged run."""
    found = []
    for method, lr, seed in product(methods, rates, seeds):
        a, b = halves if (halves := loss(method, lr, seed)) else (math.inf, math.inf)
        trial = {"method": method, "lr": lr, "seed": seed, "planned_tokens": 1, "loss_a": a, "loss_b": b}
        found.append(trial | {"state": "diverged" if halves is None else "finished"})
    return found


def shown(compared: dict):
    return difference_table([compared | {"scale": "tiny"}]).frame


def bowl(best: float, lr: float) -> float:
    """A loss whose minimum over the rates, 3, is at ``best``."""
    return 3 + math.log10(lr / best) ** 2


def test_a_rate_is_chosen_on_one_half_and_reported_on_the_other():
    """Half B has another best rate, and half A other losses."""
    best = {"one": 0.001, "two": 0.003}
    found = compare(trials(lambda m, lr, s: (bowl(best[m], lr), 10 * s - 100 * lr + (m == "two"))))
    assert {method: choice["lr"] for method, choice in found["chosen"].items()} == best
    assert found["chosen"]["two"]["losses"] == pytest.approx({1: 10.7, 2: 20.7, 3: 30.7})
    assert found["comparisons"][0]["by_seed"] == pytest.approx({1: 0.8, 2: 0.8, 3: 0.8})


def test_equal_methods_differ_as_often_as_the_level_says():
    """Hundreds of comparisons of a method with itself; noisy losses choose its rate among three each time."""
    rng, called = random.Random(0), 0
    for _ in range(800):
        noise = lambda *_: (rng.gauss(3, 0.1), rng.gauss(3, 0.1))  # noqa: E731
        found = compare(trials(noise, seeds=(1,)))
        chosen = {method: choice["lr"] for method, choice in found["chosen"].items()}
        fresh = [trial for method, lr in chosen.items() for trial in trials(noise, [method], [lr], (4, 5, 6))]
        found = compare([*found["trials"], *fresh])
        called += found["comparisons"][0]["better"] != "none shown"
    assert 0.027 < called / 800 < 0.073  # 5 % and three standard errors


def test_fresh_seeds_are_reported_and_choose_nothing():
    grid = trials(lambda m, lr, s: (bowl(0.003, lr), 1.0), seeds=[1])
    fresh = trials(lambda m, lr, s: (-9.0, 2.0 + s), rates=[0.003], seeds=[7, 8])
    found = compare(grid + fresh)
    assert (found["chosen"]["one"]["lr"], found["chosen"]["one"]["losses"]) == (0.003, {7: 9.0, 8: 10.0})
    assert found["comparisons"][0]["by_seed"] == {7: 0.0, 8: 0.0}
    fresh[-1] |= {"state": "diverged", "loss_b": math.inf}
    found = compare(grid + fresh)
    assert found["comparisons"][0]["reason"] == "two: no loss at its chosen rate with seed 8"
    assert shown(found)["PPL"][1] == "1 of 2 diverged"
    reason = "every rate has a run that diverged"
    assert shown(compare(trials(lambda *_: None))).Better[1] == f"not decided: one: {reason}; two: {reason}"


def test_methods_with_other_rates_or_seeds_are_not_compared():
    both = lambda m, lr, s: (bowl(0.003, lr), 3.0)  # noqa: E731
    for more in (trials(both, ["two"], rates=[0.03]), trials(both, ["two"], rates=[0.003], seeds=[4])):
        (result,) = compare(trials(both) + more)["comparisons"]
        assert (result["better"], result["reason"]) == (None, "its rates or seeds are not those of one")
    unfinished = trials(both)
    unfinished[0]["state"] = "unfinished"
    assert compare(unfinished)["chosen"]["one"]["reason"] == "1 of the 9 runs of the grid have not ended"


def test_intervals_are_students_t():
    """With four methods, each of the three intervals has the level 1 - 5 % / 3."""
    found = estimate([2.0, 4.0, 9.0], 0.95)
    reach = 4.302653 * math.sqrt(13) / math.sqrt(3)
    assert (found["mean"], found["low"], found["high"]) == pytest.approx((5, 5 - reach, 5 + reach), rel=1e-6)
    by_seed = lambda m, lr, s: (2.0, 3.0 + (m == "two") * (s - 2))  # noqa: E731
    same = compare(trials(by_seed, rates=[0.003]))
    assert [*verdicts([{"scale": "60m", **same}])] == ["60m: no difference in loss between two and one is shown"]
    assert (estimate([2.0, 2.0], 0.95)["low"], estimate([2.0], 0.95)["low"]) == (2.0, None)
    loss = lambda m, lr, s: (bowl(0.003, lr), 3.0 - (m == "two"))  # noqa: E731
    found = compare(trials(loss, ["one", "two", "three", "four"], seeds=[1]))
    assert found["comparisons"][0]["difference"]["level"] == 0.95  # one seed has no interval
    found = compare(trials(loss, ["one", "two", "three", "four"], seeds=[1, 2]))
    assert [c["difference"]["level"] for c in found["comparisons"]] == pytest.approx([1 - 0.05 / 3] * 3)
    found = compare(trials(loss, seeds=[1]))
    assert "not decided: one seed" in shown(found).Better[1]


def test_a_report_chooses_rates_and_says_what_a_reader_must_know(tmp_path, monkeypatch):
    """Runs that differ only in rate and seed are a method; an end of the rates and unequal budgets are named."""
    monkeypatch.setattr(figures, "IMAGES", ("png",))
    for words, gain in ((COLA, 0.0), ((*COLA_DLR, "dlr.alpha=0.5"), 0.2), ((*COLA_DLR, "train.steps=40"), 0.1)):
        for lr, seed in product((0.001, 0.003), (41, 42)):
            folder = tmp_path / f"runs/{gain}-{lr}-{seed}"
            a_run(folder, *words, f"train.lr={lr}", seed=seed, final=3 - gain + seed / 1e5 - 10 * lr)
    (found,) = comparisons(read_runs([tmp_path / "runs"]))
    named = ["cola", "cola+dlr", "cola+dlr (alpha=0.5, steps=60)"]
    assert sorted(found["chosen"]) == named and {c["lr"] for c in found["chosen"].values()} == {0.003}
    text = "\n".join(write_reports([str(tmp_path / "runs")], tmp_path / "out", "report.py"))
    assert "-0.2000 (2) | -0.2000 to -0.2000 (95 %)" in text  # the only interval
    assert "cola at tiny: 0.003 is at an end of its rates" in text
    assert "not decided: it is trained on 81,920 tokens, cola on 122,880" in text
    assert (tmp_path / "out/figures/rates_tiny.png").exists()
    page = (tmp_path / "out/report.md").read_text()
    assert "* tiny: cola+dlr (alpha=0.5, steps=60) is better than cola, by 0.2000 nats/token\n" in page
    assert json.loads((tmp_path / "out/choice.json").read_text())["scales"][0]["chosen"] == found["chosen"]
    a_run(tmp_path / "runs/longer", *SHORT, "backbone=lax", "train.seq_len=32")
    assert not [*comparisons(read_runs([tmp_path / "runs"]))]  # another text


# ----------------------------------------------------------------------------------------------------
# submit.py --report


def pretend(run: PlannedRun) -> None:
    """Write what training leaves: best at 0.003, DLR better by 0.2, 0.001 between seeds, diverged at 0.03."""
    cfg, words = run.cfg, [word for word in run.line.words if not word.startswith("seed=")]
    loss = 3 + math.log10(cfg.train.lr / 0.003) ** 2 - 0.2 * cfg.dlr.enabled + cfg.seed % 7 / 1000
    a_run(run.dir, *words, seed=cfg.seed, final=loss)
    update_record(run.dir, {"saved": cfg.train.steps})
    record_state(run.dir, "diverged" if cfg.train.lr > 0.02 else "complete")


@pytest.fixture
def trained(monkeypatch):
    """Replaces ``train_here``: pretends to train, and lists the runs."""
    found: list[PlannedRun] = []

    def train(runs, _at_once) -> None:
        found.extend(runs)
        for run in runs:
            pretend(run)

    monkeypatch.setattr("dlr_pretrain.launch.submit.train_here", train)
    monkeypatch.setattr("dlr_pretrain.analysis.report.draw", lambda *_: [])
    return found


@pytest.fixture
def given(words, tmp_path):
    """The arguments of ``submit.py`` for small runs, without a rate, which is the table's."""
    small = [word for word in words(f"run.root={tmp_path}/runs") if not word.startswith("train.lr=")]
    return lambda *more: [*small, *more, "--report", f"{tmp_path}/out"]


@pytest.fixture
def compared(tmp_path):
    return lambda: json.loads((tmp_path / "out/choice.json").read_text())["scales"][0]


PAIR = ("backbone=cola", "dlr=off,on")


def test_the_same_command_continues_the_table(given, trained, compared, capsys):
    """A second call trains nothing. A wider grid trains only its new rates, and a diverged run stays a result."""
    for _ in range(2):
        assert main(given(*PAIR, "train.lr=0.003", "seed=41,42", "--local")) == 0
        assert len(trained) == 4 and compared()["comparisons"][0]["better"] == "cola+dlr"
        assert compared()["comparisons"][0]["by_seed"] == pytest.approx({"41": -0.2, "42": -0.2})
        assert compared()["chosen"]["cola"]["losses"] == pytest.approx({"41": 3.006, "42": 3.0})
    assert "| cola+dlr |" in capsys.readouterr().out
    assert main(given(*PAIR, "train.lr=0.003,0.03", "seed=41,42", "--local")) == 0
    assert [run.cfg.train.lr for run in trained[4:]] == [0.03] * 4
    assert [t["state"] for t in compared()["trials"] if t["lr"] == 0.03] == ["diverged"] * 4
    assert compared()["chosen"]["cola"]["lr"] == 0.003
    assert compared()["chosen"]["cola"]["losses"] == pytest.approx({"41": 3.506, "42": 3.5})  # of the other half


def test_the_first_method_of_the_table_is_the_reference(given, trained, compared):
    """Except that a method with DLR is compared with the same one without it."""
    assert main(given("backbone=lowrank,cola", "dlr=on,off", "train.lr=0.003", "seed=41,42", "--local")) == 0
    against = {one["method"]: one["against"] for one in compared()["comparisons"]}
    assert against == {"lowrank+dlr": "lowrank", "cola": "lowrank", "cola+dlr": "cola"}


def test_confirmed_seeds_are_trained_at_the_chosen_rates(given, trained, compared, capsys):
    table = (*PAIR, "train.lr=0.003,0.01", "seed=41", "--local")
    assert main(given(*table, "--confirm", "5,6")) == 0
    assert [(run.cfg.train.lr, run.cfg.seed) for run in trained[4:]] == [(0.003, 5), (0.003, 6)] * 2
    assert {*compared()["chosen"]["cola"]["losses"]} == {"5", "6"}
    assert main(given(*table, "--confirm", "41")) == EXIT_FAILED and "not in seed=" in capsys.readouterr().err


def test_a_set_that_no_run_has_cannot_decide(given, trained, capsys):
    table = (*PAIR, "train.lr=0.003,0.01", "seed=41", "--local")
    assert main(given(*table, "--set", "wiki")) == EXIT_FAILED
    assert len(trained) == 4 and "has no validation set wiki" in capsys.readouterr().err


def test_a_queued_table_is_confirmed_when_its_runs_have_ended(given, scheduler, trained, compared):
    table, asked, queue = ("train.lr=0.003,0.01", *PAIR, "seed=41"), scheduler / "asked", scheduler / "queue"
    command = [*given(*table, "--confirm", "5", "--limit", "2"), "--", "--gpus-per-node=2"]
    assert main(command) == 0
    assert {"--gpus-per-node=2", "--array=1-4%2"} < set(asked.read_text().splitlines())
    asked.unlink()
    queue.write_text("".join(f"70_{i} PENDING\n" for i in range(1, 5)))
    assert main(command) == 0 and not asked.exists()
    runs = load_runs(read_table([word for word in given(*table) if "=" in word]))
    for run in runs:
        (run.dir / "job.json").unlink()
        run.dir.rmdir()
        pretend(run)
    queue.write_text("")
    assert main(command) == 0
    fresh = read_lines(Path(asked.read_text().splitlines()[-1]))
    assert ["train.lr=0.003" in line.words and line.words[-1] == "seed=5" for line in fresh] == [True, True]
    assert not trained and compared()["comparisons"][0]["better"] is None


@pytest.mark.full
def test_the_command_trains_diverges_and_compares(given, compared):
    """Real processes: a rate at which it learns, and one at which the first updates are not finite."""
    table = ("train.steps=4", "backbone=cola", "train.lr=0.003,1e30", "seed=1", "--limit", "2", "--local")
    assert main(given(*table)) == 0
    assert [t["state"] for t in compared()["trials"]] == ["finished", "diverged"]
    assert compared()["chosen"]["cola"]["lr"] == 0.003
