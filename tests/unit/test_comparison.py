"""Methods compared at their own rates: the statistics, on losses that are planted, and what is written of them."""

from __future__ import annotations

import csv
import json
import math
import random
import statistics

import pytest

from dlr_pretrain.analysis.tune import Design, Trial, compare, console, estimate, tables, write

RATES = (0.001, 0.003, 0.01)


def trials(design: Design, loss, seeds=None) -> list[Trial]:
    """A finished run for each cell; ``loss(method, lr, seed)`` gives both halves, or None for a diverged run."""
    found = []
    for method in design.methods:
        for lr in design.rates:
            for seed in seeds or design.seeds:
                halves = loss(method, lr, seed)
                a, b = halves or (None, None)
                state, mean = ("finished", (a + b) / 2) if halves else ("diverged", None)
                found.append(Trial(method, lr, seed, state, f"runs/{method}-{lr:g}-{seed}", a, b, mean))
    return found


def bowl(best: float, lr: float) -> float:
    """A loss whose minimum over the rates, 3, is at ``best``."""
    return 3 + math.log10(lr / best) ** 2


def dressed(found: dict, shared: str = "scale=tiny") -> dict:
    """With what the command adds."""
    methods = found["design"]["methods"]
    words = {method: f"backbone={method}" for method in methods}
    said = {"words": words, "shared": shared, "command": "scripts/tune.py pair=..."}
    budget = {method: {"steps": 60, "tokens": 6000} for method in methods}
    return found | said | {"budgets": budget, "ordered_by_seed": False}


# ----------------------------------------------------------------------------------------------------
# Choosing and comparing


def test_an_estimate_is_the_textbooks():
    found = estimate([2.0, 4.0, 9.0], 0.95)
    reach = 4.302653 * math.sqrt(13) / math.sqrt(3)
    assert (found["n"], found["mean"], found["std"]) == (3, 5.0, pytest.approx(math.sqrt(13)))
    assert (found["low"], found["high"]) == pytest.approx((5 - reach, 5 + reach), rel=1e-6)
    assert (estimate([2.0, 2.0], 0.95)["low"], estimate([2.0, 2.0], 0.95)["high"]) == (2.0, 2.0)
    assert estimate([2.0], 0.95) == {"n": 1, "mean": 2.0, "level": 0.95, "std": None, "low": None, "high": None}


def test_a_rate_is_chosen_on_one_half_and_reported_on_the_other():
    """Half B would have another best rate, and half A has other losses."""
    design = Design(("one", "two"), RATES, (1, 2))
    best = {"one": 0.001, "two": 0.003}
    found = compare(design, trials(design, lambda m, lr, s: (bowl(best[m], lr), 10 * s - 100 * lr + (m == "two"))))
    assert [(choice["lr"], choice["edge"]) for choice in found["chosen"].values()] == [(0.001, "lowest"), (0.003, None)]
    assert found["chosen"]["one"]["loss_a"] == 3
    assert found["chosen"]["two"]["held_out"]["losses"] == {1: 10.7, 2: 20.7}
    assert found["comparisons"][0]["by_seed"] == pytest.approx({1: 0.8, 2: 0.8})


@pytest.mark.parametrize(("lead", "better"), [(-0.3, "two"), (0.3, "one"), (0.0, "none shown")])
def test_what_is_planted_is_found(lead, better):
    """Noise of the seeds is in both methods alike and in each by itself; the lead is beyond it, or is not there."""
    rng = random.Random(1)
    design = Design(("one", "two"), RATES, (1, 2, 3, 4))
    luck = {seed: rng.gauss(0, 1) for seed in design.seeds}

    def loss(method, lr, seed):
        level = bowl(0.003, lr) + luck[seed] + (lead if method == "two" else 0)
        return level + rng.gauss(0, 0.02), level + rng.gauss(0, 0.02)

    (found,) = compare(design, trials(design, loss))["comparisons"]
    assert found["better"] == better
    values = list(found["by_seed"].values())
    reach = 3.182446 * statistics.stdev(values) / 2  # t of 3 degrees of freedom at 97.5 %
    interval = found["difference"]["low"], found["difference"]["high"]
    assert interval == pytest.approx((statistics.mean(values) - reach, statistics.mean(values) + reach), rel=1e-5)


def test_ties_are_called_differences_as_often_as_the_level_says():
    """Hundreds of comparisons of a method with itself, its rate chosen among three each time by noisy losses."""
    rng = random.Random(0)
    design = Design(("one", "two"), RATES, (1, 2, 3), fresh=(4, 5, 6))
    called = 0
    for _ in range(800):
        noise = lambda *_: (rng.gauss(3, 0.1), rng.gauss(3, 0.1))  # noqa: E731
        found = compare(design, trials(design, noise) + trials(design, noise, design.fresh))
        called += found["comparisons"][0]["better"] != "none shown"
    assert 0.027 < called / 800 < 0.073  # 5 % and three standard errors


def test_fresh_seeds_are_reported_and_choose_nothing():
    design = Design(("one", "two"), RATES, (1,), fresh=(7, 8))
    grid = trials(design, lambda m, lr, s: (bowl(0.003, lr), 1.0))
    fresh = [Trial(m, 0.003, s, "finished", "", -9.0, 2.0 + s, 0.0) for m in design.methods for s in design.fresh]
    found = compare(design, grid + fresh)
    assert found["chosen"]["one"]["lr"] == 0.003 and found["chosen"]["one"]["loss_a"] == 3
    assert found["chosen"]["one"]["held_out"]["losses"] == {7: 9.0, 8: 10.0}
    assert found["comparisons"][0]["by_seed"] == {7: 0.0, 8: 0.0}


def test_a_diverged_run_rules_its_rate_out_and_is_left_out_of_no_mean():
    design = Design(("one", "two"), RATES, (1, 2, 3))
    lost = lambda m, lr, s: None if (m, lr, s) == ("two", 0.01, 3) else (bowl(0.01, lr), 3.0 + s / 10)  # noqa: E731
    found = dressed(compare(design, trials(design, lost)))
    assert [(c["lr"], c["edge"]) for c in found["chosen"].values()] == [(0.01, "highest"), (0.003, None)]
    assert found["comparisons"][0]["better"] == "none shown"
    own, by_rate = tables(found)
    values = [math.exp(3.0 + seed / 10) for seed in (1, 2, 3)]
    mean = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} (3)"
    assert [cell.text(".2f") for cell in by_rate.frame["0.01"]] == [mean, "1 of 3 diverged"]
    assert "two diverged at 0.01 (seed 3)." in own.notes
    assert any("is the highest of the grid, and a better one may lie above it" in note for note in own.notes)
    assert own.frame["Learning rate"].tolist() == ["0.01 (edge of the grid)", "0.003"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: None if t.lr == 0.001 and t.seed == 2 and t.method == "two" else t, "1 of the 6 runs"),
        (lambda t: Trial(t.method, t.lr, t.seed, "running") if t.lr > 0.002 else t, "4 of the 6 runs"),
        (lambda t: Trial(t.method, t.lr, t.seed, "diverged"), "every rate has a diverged run"),
        (lambda t: None, "6 of the 6 runs"),
    ],
    ids=["missing", "running", "diverged", "nothing"],
)
def test_nothing_is_decided_without_the_runs(change, reason, tmp_path):
    design = Design(("one", "two"), RATES, (1, 2))
    finished = trials(design, lambda m, lr, s: (bowl(0.003, lr), 3.0))
    found = dressed(compare(design, [changed for t in finished if (changed := change(t)) is not None]))
    (comparison,) = found["comparisons"]
    assert comparison["better"] is None and reason in comparison["reason"]
    write(found, tmp_path)
    assert "not decided" in console(found) and reason in (tmp_path / "report.md").read_text()


def test_a_fresh_seed_that_diverges_decides_nothing():
    design = Design(("one", "two"), RATES, (1,), fresh=(7, 8))
    fresh = [Trial("one", 0.003, s, "finished", "", 1.0, 1.0, 1.0) for s in (7, 8)]
    fresh += [Trial("two", 0.003, 7, "finished", "", 0.5, 0.5, 0.5), Trial("two", 0.003, 8, "diverged")]
    found = dressed(compare(design, trials(design, lambda m, lr, s: (bowl(0.003, lr), 1.0)) + fresh))
    (comparison,) = found["comparisons"]
    assert comparison["better"] is None and comparison["reason"] == "two diverges at its chosen rate with seed 8"
    table = tables(found)[0]
    assert [cell.text(".2f") for cell in table.frame["PPL (held out)"]] == ["2.72 ± 0.00 (2)", "1 of 2 diverged"]
    assert "1.65" not in console(found)


def test_one_seed_gives_a_difference_and_no_verdict():
    design = Design(("one", "two"), RATES, (1,))
    found = dressed(compare(design, trials(design, lambda m, lr, s: (bowl(0.003, lr), 3.0 - (m == "two")))))
    (comparison,) = found["comparisons"]
    assert comparison["better"] is None and comparison["difference"]["mean"] == -1
    assert comparison["difference"]["low"] is None
    assert "two against one: not decided: one seed" in console(found)


def test_several_methods_hold_together():
    """Of four methods three intervals are as wide as one of 1 - 5 % / 3."""
    from scipy.stats import t

    design = Design(("one", "two", "three", "four"), RATES, (1, 2, 3))
    found = compare(design, trials(design, lambda m, lr, s: (bowl(0.003, lr), 3.0 + s * (m != "one"))))
    for comparison in found["comparisons"]:
        d = comparison["difference"]
        assert d["level"] == pytest.approx(1 - 0.05 / 3)
        reach = t.ppf(1 - 0.05 / 6, 2) / math.sqrt(3)
        assert (d["low"], d["high"]) == pytest.approx((2 - reach, 2 + reach))


# ----------------------------------------------------------------------------------------------------
# What is written


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A comparison with a diverged run, in files."""
    design = Design(("cola", "cola+dlr"), RATES, (1, 2, 3))

    def loss(method, lr, seed):
        if method == "cola" and lr == 0.01 and seed == 3:
            return None
        lead = -0.05 if method == "cola+dlr" else 0.0
        return bowl(0.003, lr) + lead, bowl(0.003, lr) + lead + seed / 1000 * (1 if lead else 2)

    found = dressed(compare(design, trials(design, loss)))
    folder = tmp_path_factory.mktemp("comparison") / "tune" / "cola"
    write(found, folder)
    return found, folder


def test_the_files_hold_the_numbers(written):
    found, folder = written
    stored = json.loads((folder / "tune.json").read_text())
    assert stored["comparisons"][0]["better"] == "cola+dlr"
    assert stored["comparisons"][0]["difference"] == found["comparisons"][0]["difference"]
    with open(folder / "curve.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 18
    for row, trial in zip(rows, found["trials"], strict=True):
        assert (row["method"], float(row["lr"]), int(row["seed"])) == (trial["method"], trial["lr"], trial["seed"])
        assert row["chosen"] == str(trial["lr"] == 0.003)
        assert row["loss_b"] == ("" if trial["state"] == "diverged" else repr(trial["loss_b"]))
    text = (folder / "report.md").read_text()
    difference = statistics.fmean(found["comparisons"][0]["by_seed"].values())
    assert f"* cola+dlr against cola: cola+dlr is better. {difference:+.4f} nats/token" in text
    values = [math.exp(3 + 2 * seed / 1000) for seed in (1, 2, 3)]
    mean = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} (3)"
    assert f"| cola | 0.003 | {mean} |" in text and "1 of 3 diverged" in text
    assert "the reported losses are slightly optimistic" in text and "in one order" in text
    assert "in one order" not in console(found | {"ordered_by_seed": True})
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG") and (folder / "report.html").exists()
