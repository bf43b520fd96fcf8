"""Methods compared at their own rates: the statistics, on losses that are planted."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import statistics
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from dlr_pretrain.analysis.measured import take_measured
from dlr_pretrain.analysis.paper import fact
from dlr_pretrain.analysis.reports import write_reports
from dlr_pretrain.analysis.student import estimate, quantile
from dlr_pretrain.analysis.tables import text
from dlr_pretrain.analysis.tuning import Design, Trial, compare, held_out
from dlr_pretrain.analysis.tuning_tables import comparison_tables
from dlr_pretrain.analysis.tuning_view import console, report, write
from dlr_pretrain.util.errors import UserError
from tests.unit.run_folders import SHORT, a_run

RATES = (0.001, 0.003, 0.01)


def trials(design: Design, loss, seeds=None) -> list[Trial]:
    """A finished run for each cell; ``loss(method, lr, seed)`` gives both halves, or None for a diverged run."""
    found = []
    for method in design.methods:
        for lr in design.rates:
            for seed in seeds or design.seeds:
                halves = loss(method, lr, seed)
                state = "finished" if halves else "diverged"
                a, b = halves or (None, None)
                found.append(
                    Trial(method, lr, seed, state, f"runs/{method}-{lr:g}-{seed}", a, b, halves and (a + b) / 2)
                )
    return found


def bowl(best: float, lr: float) -> float:
    """A loss whose minimum over the rates, 3, is at ``best``."""
    return 3 + math.log10(lr / best) ** 2


def dressed(found: dict) -> dict:
    """With what the command adds."""
    methods = found["design"]["methods"]
    budget = {method: {"steps": 60, "tokens": 6000} for method in methods}
    words = {method: f"backbone={method}" for method in methods}
    said = {"words": words, "shared": "scale=tiny", "command": "scripts/tune.py pair=..."}
    return found | said | {"budgets": budget, "ordered_by_seed": False}


# ----------------------------------------------------------------------------------------------------
# Student's t


@pytest.mark.parametrize(
    ("freedom", "p", "t"),
    [(1, 0.975, 12.7062), (2, 0.975, 4.30265), (3, 0.95, 2.35336), (4, 0.975, 2.77645), (5, 0.995, 4.03214),
     (10, 0.975, 2.22814), (30, 0.9, 1.310415), (120, 0.975, 1.97993)],
)  # fmt: skip
def test_the_quantiles_are_those_of_the_tables(freedom, p, t):
    assert quantile(p, freedom) == pytest.approx(t, rel=3e-6)


def test_an_estimate_is_the_textbooks():
    found = estimate([2.0, 4.0, 9.0])
    reach = 4.302653 * math.sqrt(13) / math.sqrt(3)
    assert (found.n, found.mean, found.std) == (3, 5.0, pytest.approx(math.sqrt(13)))
    assert (found.low, found.high) == pytest.approx((5 - reach, 5 + reach), rel=1e-6)


def test_one_value_has_no_interval():
    found = estimate([2.0])
    assert (found.mean, found.std, found.low, found.high) == (2.0, None, None, None)


# ----------------------------------------------------------------------------------------------------
# Choosing and comparing


def test_a_rate_is_chosen_on_one_half_and_reported_on_the_other():
    """Half B would have another best rate, and half A has other losses."""
    design = Design(("one", "two"), RATES, (1, 2))
    best = {"one": 0.001, "two": 0.003}
    found = compare(design, trials(design, lambda m, lr, s: (bowl(best[m], lr), 10 * s - 100 * lr + (m == "two"))))
    assert [choice["lr"] for choice in found["chosen"].values()] == [0.001, 0.003]
    assert [choice["edge"] for choice in found["chosen"].values()] == ["lowest", None]
    assert found["chosen"]["one"]["loss_a"] == 3
    assert found["chosen"]["two"]["held_out"]["losses"] == {1: 10.7, 2: 20.7}
    (comparison,) = found["comparisons"]
    assert comparison["by_seed"] == pytest.approx({1: 0.8, 2: 0.8})
    assert [round(c["difference"]["mean"], 6) for c in found["at_equal_rates"]] == [1, 1, 1]


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
    assert found["at_equal_rates"][1]["by_seed"] == {1: 0.0}


def test_a_diverged_run_rules_its_rate_out_and_no_edge_lies_before_it():
    design = Design(("one", "two"), RATES, (1, 2))
    found = compare(
        design,
        trials(design, lambda m, lr, s: None if m == "two" and lr == 0.01 and s == 2 else (bowl(0.01, lr), 3.0)),
    )
    assert [(c["lr"], c["edge"]) for c in found["chosen"].values()] == [(0.01, "highest"), (0.003, None)]
    assert found["comparisons"][0]["better"] == "none shown"
    assert [len(c["by_seed"]) for c in found["at_equal_rates"]] == [2, 2, 1]
    assert "two diverged at 0.01 (seed 2)." in report(dressed(found))


@pytest.mark.parametrize("gone", ["one", "two"])
def test_a_diverged_seed_is_left_out_of_no_mean_at_equal_rates(gone):
    """Neither of a difference nor of a perplexity, in report.md and in a report of runs."""
    design = Design(("one", "two"), RATES, (1, 2, 3))
    lost = lambda m, lr, s: None if (m, lr, s) == (gone, 0.01, 3) else (bowl(0.003, lr), 3.0 + s / 10)  # noqa: E731
    found = dressed(compare(design, trials(design, lost)))
    at = found["at_equal_rates"][2]
    assert (at["lr"], at["difference"], at["diverged"], len(at["by_seed"])) == (0.01, None, [3], 2)
    assert found["at_equal_rates"][1]["difference"]["n"] == 3 and found["at_equal_rates"][1]["diverged"] == []
    said = report(found)
    assert "| two | one | 0.01 | 1 of 3 diverged | 2 |" in said
    (row,) = (line for line in said.splitlines() if line.startswith("| 0.01 |"))
    assert row.count("1 of 3 diverged") == 1 and row.count("±") == 1
    tables = {table.name: table for table in comparison_tables([(Path("tune"), found)])}
    assert [text(row[3]) for row in tables["tune_equal"].rows] == ["+0.0000 (3)", "+0.0000 (3)", "1 of 3 diverged"]
    assert text(tables["tune_equal"].rows[2][4]) == "–"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: None if t.lr == 0.001 and t.seed == 2 and t.method == "two" else t, "1 of the 6 runs"),
        (lambda t: Trial(t.method, t.lr, t.seed, "running") if t.lr > 0.002 else t, "4 of the 6 runs"),
        (lambda t: Trial(t.method, t.lr, t.seed, "diverged"), "every rate has a diverged run"),
    ],
    ids=["missing", "running", "diverged"],
)
def test_nothing_is_decided_without_the_runs(change, reason):
    design = Design(("one", "two"), RATES, (1, 2))
    finished = trials(design, lambda m, lr, s: (bowl(0.003, lr), 3.0))
    found = dressed(compare(design, [changed for t in finished if (changed := change(t)) is not None]))
    (comparison,) = found["comparisons"]
    assert comparison["better"] is None and reason in comparison["reason"]
    assert "not decided" in console(found) and reason in report(found)


def test_a_fresh_seed_that_diverges_is_not_left_out_of_a_mean():
    design = Design(("one", "two"), RATES, (1,), fresh=(7, 8))
    fresh = [Trial("one", 0.003, s, "finished", "", 1.0, 1.0, 1.0) for s in (7, 8)]
    fresh += [Trial("two", 0.003, 7, "finished", "", 0.5, 0.5, 0.5), Trial("two", 0.003, 8, "diverged")]
    found = dressed(compare(design, trials(design, lambda m, lr, s: (bowl(0.003, lr), 1.0)) + fresh))
    (comparison,) = found["comparisons"]
    assert comparison["better"] is None and comparison["reason"] == "two diverges at its chosen rate with seed 8"
    table = next(comparison_tables([(Path("tune"), found)]))
    assert [text(row[2]) for row in table.rows] == ["2.72 ± 0.00 (2)", "1 of 2 diverged"]
    assert "two  " in console(found) and "1 of 2, 1 diverged" in console(found) and "1.65" not in console(found)


def test_a_method_that_diverges_is_the_last_of_the_order():
    design = Design(("cola", "cola+dlr"), (0.01,), (1, 2))
    lost = trials(design, lambda method, lr, seed: None if (method, seed) == ("cola+dlr", 2) else (3.0, 3.0))
    lost[2] = replace(lost[2], loss_a=1.0, loss_b=1.0)
    found = dressed(compare(design, lost))
    found["chosen"]["cola+dlr"] |= {"lr": 0.01, "held_out": held_out(design, lost, "cola+dlr", 0.01)}
    order = next(table for table in comparison_tables([(Path("tune"), found)]) if table.name == "tune_order")
    assert [text(row[1]) for row in order.rows] == ["20.09 ± 0.00 (2) [1]", "1 of 2 diverged [2]"]
    assert order.notes[-1].startswith("Of the 1 pair of these methods, the paper orders like ours: 0 at 60m, 0 at")


def test_a_difference_is_named_by_its_rate_where_its_method_is_compared_at_two(tmp_path):
    for rate in (0.003, 0.01, 0.01):
        design = Design(("one", "two", "three")[: 2 + (rate == 0.003)], (rate,), (1, 2, 3))
        made = trials(design, lambda m, lr, s: (3.0, 3.0 + s * lr * (m == "two")))
        write(dressed(compare(design, made)), tmp_path / f"tune/{len(list(tmp_path.glob('tune/*')))}")
    write_reports([str(tmp_path / "tune")], tmp_path / "report", "python scripts/report.py")
    names = re.findall(r"<!-- ((?:two|three).*?) -->", (tmp_path / "report/figures/tune_differences.svg").read_text())
    assert names == ["two at 0.003", "three", "two at 0.01"]


def test_a_difference_is_named_by_what_it_is_from_where_its_method_is_compared_with_two(tmp_path):
    for first in ("one", "three"):
        design = Design((first, "two"), (0.01,), (1, 2, 3))
        made = trials(design, lambda m, lr, s, first=first: (3.0, 3.0 + s * lr * (m == "two") + (first == "one")))
        write(dressed(compare(design, made)), tmp_path / f"tune/{first}")
    write_reports([str(tmp_path / "tune")], tmp_path / "report", "python scripts/report.py")
    names = re.findall(r"<!-- (two.*?) -->", (tmp_path / "report/figures/tune_differences.svg").read_text())
    assert names == ["two at 0.01 against one", "two at 0.01 against three"]


def test_one_seed_gives_a_difference_and_no_verdict():
    design = Design(("one", "two"), RATES, (1,))
    found = dressed(compare(design, trials(design, lambda m, lr, s: (bowl(0.003, lr), 3.0 - (m == "two")))))
    (comparison,) = found["comparisons"]
    assert comparison["better"] is None and comparison["difference"]["mean"] == -1
    assert comparison["difference"]["low"] is None
    assert "two against one: not decided: one seed" in console(found) and "(one seed)" in report(found)


def test_several_comparisons_hold_together():
    """Of four methods three intervals are as wide as one of 1 - 5 % / 3."""
    design = Design(("one", "two", "three", "four"), RATES, (1, 2, 3))
    found = compare(design, trials(design, lambda m, lr, s: (bowl(0.003, lr), 3.0 + s * (m != "one"))))
    for comparison in found["comparisons"]:
        d = comparison["difference"]
        assert d["level"] == pytest.approx(1 - 0.05 / 3)
        reach = quantile(1 - 0.05 / 6, 2) / math.sqrt(3)
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
        if trial["state"] == "finished":
            assert float(row["perplexity_b"]) == math.exp(trial["loss_b"])
        else:
            assert row["state"] == "diverged" and row["perplexity_b"] == row["loss_b"] == ""


def test_the_report_says_it_in_words_and_tables(written):
    found, folder = written
    text = (folder / "report.md").read_text()
    difference = statistics.fmean(found["comparisons"][0]["by_seed"].values())
    assert f"**cola+dlr against cola: cola+dlr is better. {difference:+.4f} nats a token, 95 % interval" in text
    values = [math.exp(3 + 2 * seed / 1000) for seed in (1, 2, 3)]
    spread = f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"
    assert f"| cola | 0.003 | {spread} |" in text and f"| 0.003 | **{spread}** |" in text
    assert "2 of 3" not in text and "| 0.01 | 1 of 3 diverged |" in text
    assert "the reported losses are slightly optimistic" in text
    assert all(len(line) <= 80 for line in console(found).splitlines())


def test_the_curve_is_drawn_for_what_there_is(written):
    folder = written[1]
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert ET.parse(folder / "curve.svg").getroot().tag.endswith("svg")
    nothing = dressed(compare(Design(("one",), RATES, (1,)), []))
    write(nothing, folder.parents[1] / "nothing")
    assert (folder.parents[1] / "nothing" / "curve.png").exists()


def test_a_report_of_runs_shows_it(written, tmp_path):
    found, folder = written
    write_reports([str(folder.parent)], tmp_path / "report", "python scripts/report.py")
    held_out = found["chosen"]["cola+dlr"]["held_out"]["perplexity"]
    row = f"| cola+dlr | 0.003 | {held_out['mean']:.2f} ± {held_out['std']:.2f} (3) |"
    d = found["comparisons"][0]["difference"]
    row += f" {d['mean']:+.4f} (3) | {d['low']:+.4f} to {d['high']:+.4f} | cola+dlr |"
    tables = tmp_path / "report" / "tables"
    assert row in (tables / "tune.md").read_text()
    by_rate = (tables / "tune_rates.md").read_text()
    assert "| Method | 0.001 | 0.003 | 0.01 |" in by_rate and "1 of 3 diverged" in by_rate
    assert f"| cola+dlr | cola | 0.003 | {d['mean']:+.4f} (3) |" in (tables / "tune_equal.md").read_text()
    for name in ("tune_rates", "tune_differences"):
        assert (tmp_path / "report" / "figures" / f"{name}.svg").exists()
    page = (tmp_path / "report" / "index.html").read_text()
    assert row.split(" | ")[-2] in page and "scripts/tune.py" not in page


def test_comparisons_are_told_apart_by_the_words_that_not_all_share(written, tmp_path):
    found, _ = written
    for name, shared in (("a", "scale=tiny optimizer=adamw"), ("b", "scale=tiny optimizer.weight_decay=0.1")):
        write(found | {"shared": shared}, tmp_path / "tune" / name)
    write_reports([str(tmp_path / "tune")], tmp_path / "report", "python scripts/report.py")
    table = (tmp_path / "report" / "tables" / "tune.md").read_text()
    assert "| optimizer=adamw | cola+dlr | 0.003 |" in table
    assert "| optimizer.weight_decay=0.1 | cola+dlr | 0.003 |" in table


def placed(folder: Path, *methods: str, gap: float) -> None:
    """A comparison at one rate, in which each method is worse than the one before by about ``gap``."""
    design = Design(methods, (0.01,), (1, 2, 3))
    made = trials(design, lambda m, lr, s: (3.0, 3.0 + gap * methods.index(m) * s))
    folder.mkdir(parents=True)
    (folder / "tune.json").write_text(json.dumps(dressed(compare(design, made))))


def test_several_comparisons_say_how_likely_one_of_them_errs(tmp_path):
    """The same runs in two of them are one chance."""
    for i in range(5):
        placed(tmp_path / f"tune/{i}", "one", "two", gap=0.1 + i / 10)
    placed(tmp_path / "tune/again", "one", "two", gap=0.1)
    write_reports([str(tmp_path / "tune")], tmp_path / "report", "python scripts/report.py")
    said = (
        "There are 5 comparisons, each with an interval of its own. If nothing differed, the chance that at least one "
    )
    said += "of them excludes zero would be 23 %."
    table, figure = (tmp_path / "report/report.md").read_text().split("## Figures")
    assert f"* {said}\n" in table and f"grey is undecided. {said}" in figure


def test_the_intervals_of_one_comparison_hold_together_and_need_no_such_word(tmp_path):
    placed(tmp_path / "tune/a", "one", "two", "three", gap=0.1)
    (path,) = tmp_path.glob("tune/a/tune.json")
    table = next(comparison_tables([(path.parent, json.loads(path.read_text()))]))
    assert len(table.rows) == 3 and "There are" not in " ".join(table.notes)


def test_a_comparison_is_read_by_the_rules_of_today(tmp_path):
    """Of its trials, whatever an earlier version has written beside them."""
    design = Design(("one", "two"), RATES, (1, 2, 3))
    lost = lambda m, lr, s: None if (lr, s) == (0.01, 3) else (bowl(0.003, lr), 3.0)  # noqa: E731
    found = dressed(compare(design, trials(design, lost)))
    for c in found["at_equal_rates"]:
        del c["diverged"]
    (tmp_path / "tune.json").write_text(json.dumps(found))
    for place in (tmp_path, tmp_path / "tune.json", f"{tmp_path.parent}/{tmp_path.name[:-1]}?"):
        left, others = take_measured([str(place), str(tmp_path)])
        ((folder, read),) = others.compared
        assert (left, folder) == ([], tmp_path) and read["at_equal_rates"][2]["diverged"] == [3]


def test_places_that_hold_nothing_are_named(tmp_path):
    for name, said in (("tune.json", "no such file. Name one of scripts/tune.py"), ("x.json", "no such file")):
        with pytest.raises(UserError, match=rf"{name}: {said}"):
            take_measured([str(tmp_path / name)])
    (tmp_path / "tune.json").write_text('{"trials": [{}], "design": {}}')
    with pytest.raises(UserError, match=r"tune\.json cannot be read as a file of scripts/tune\.py"):
        take_measured([str(tmp_path)])
    a_run(tmp_path / "sweep/a", *SHORT)
    placed(tmp_path / "sweep/b", "one", "two", gap=0.1)
    glob = str(tmp_path / "sweep/*")
    left, others = take_measured([glob])
    assert left == [glob] and [folder.name for folder, _ in others.compared] == ["b"]


def test_methods_of_table_1_stand_beside_the_papers(written, tmp_path):
    found, folder = written
    write_reports([str(folder)], tmp_path / "report", "python scripts/report.py")
    table = (tmp_path / "report" / "tables" / "tune_order.md").read_text()
    means = {m: found["chosen"][m]["held_out"]["perplexity"] for m in ("cola", "cola+dlr")}
    for place, method in ((1, "cola+dlr"), (2, "cola")):
        at_60m = fact("table1", "ppl", method=method, scale="60m")
        ours = f"{means[method]['mean']:.2f} ± {means[method]['std']:.2f} (3) [{place}]"
        assert f"| {method} | {ours} | {at_60m:.2f} [" in table
    a, b = (fact("table1", "ppl", method=method, scale="1b") for method in ("cola", "cola+dlr"))
    effect = (tmp_path / "report" / "tables" / "tune_effect.md").read_text().splitlines()
    row = next(line for line in effect if line.startswith("| cola+dlr |"))
    assert row.endswith(f"| {math.log(b / a):+.4f} |")


def test_a_method_that_is_compared_twice_has_no_place_beside_the_papers(written, tmp_path):
    found, _ = written
    for name in "ab":
        write(found, tmp_path / "tune" / name)
    write_reports([str(tmp_path / "tune")], tmp_path / "report", "python scripts/report.py")
    assert not (tmp_path / "report" / "tables" / "tune_order.md").exists()


def test_the_report_says_what_a_seed_is_of(written):
    found, _ = written
    assert "all runs of a method see the data in one order" in report(found)
    assert "A seed changes the initial weights and the order of the data" in report(found | {"ordered_by_seed": True})
