"""The grid of a comparison: its words, its runs on this machine and in a queue, and where it goes on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from dlr_pretrain import cli
from dlr_pretrain.config import Config, ConfigError, identity
from dlr_pretrain.launch import tune
from dlr_pretrain.launch.grid import read_grid
from dlr_pretrain.launch.queue import note
from dlr_pretrain.launch.runs import PlannedRun, load_runs
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import EXIT_FAILED
from tests.conftest import ROOT
from tests.unit.run_folders import FINGERPRINTS

LISTS = ["pair=cola,cola+dlr", "lr=0.003,0.001,0.01", "seeds=41,42"]
NOT_FINITE = "error: step 3: loss nan, gradient norm nan: not finite. The update was not applied.\n"


def loss_of(run: PlannedRun) -> float | None:
    """Planted: best at 0.003, with DLR better by 0.2; no more than 0.001 of a seed in it; the highest rate diverges."""
    if run.cfg.train.lr > 0.02:
        return None
    return 3 + math.log10(run.cfg.train.lr / 0.003) ** 2 - 0.2 * run.cfg.dlr.enabled + run.cfg.seed % 7 / 1000


def pretend(run: PlannedRun) -> None:
    """Leave what a training would."""
    run.dir.mkdir(parents=True, exist_ok=True)
    loss, last = loss_of(run), run.cfg.train.steps
    if loss is None:
        log = run.dir / "the.log"
        note(run.dir, "0_1", log)
        log.write_text(f"job 0_1, start 1: words\n{NOT_FINITE}job 0_1: ended with exit code 3\n")
        update_record(run.dir, {"identity": {}, "diverged": NOT_FINITE})
        return
    update_record(run.dir, {"identity": json.loads(json.dumps(identity(run.cfg))) | FINGERPRINTS, "saved": last})
    values = {"eval/loss": loss, "eval/loss_a": loss, "eval/loss_b": loss + 0.5, "eval/perplexity": math.exp(loss)}
    (run.dir / "metrics.jsonl").write_text(json.dumps({"step": last, "train/loss": loss} | values) + "\n")
    (run.dir / "folded").mkdir()
    for name in ("folded/config.json", "folded/model.safetensors", "report.md"):
        (run.dir / name).touch()


@pytest.fixture
def trained(monkeypatch):
    """The runs that were trained, which is pretended."""
    found: list[PlannedRun] = []

    def train(runs, at_once, ended):
        for run in runs:
            found.append(run)
            pretend(run)
            ended(run, 1.0)

    monkeypatch.setattr(tune, "train", train)
    monkeypatch.setattr("dlr_pretrain.analysis.tuning_view.plot", lambda *_: None)
    return found


@pytest.fixture
def command(words, tmp_path):
    """``tune.py`` with the words of a small run, and what it wrote."""

    def give(*own: str, code: int = 0) -> dict:
        assert tune.main([*give.words, *own, "--output", f"{tmp_path}/out"]) == code
        return json.loads((tmp_path / "out" / "tune.json").read_text())

    give.words = words(f"run.root={tmp_path}/runs")
    return give


@pytest.fixture
def words(words, monkeypatch):
    """Without a rate, which is the grid's. The same words are composed once, a quarter of a second each."""
    composed: dict[tuple, Config] = {}

    def load(own, *rest):
        key = (*own, *rest)
        if key not in composed:
            composed[key] = cli.load(own, *rest)
        return composed[key]

    monkeypatch.setattr("dlr_pretrain.launch.runs.load", load)
    return lambda *own: [word for word in words(*own) if not word.startswith("train.lr=")]


# ----------------------------------------------------------------------------------------------------
# Words


def test_every_method_gets_the_same_grid():
    grid = read_grid([*LISTS, "scale=tiny", "train.steps=60"])
    lines = [grid.line(*cell).words for cell in grid.cells()]
    assert len(lines) == len(set(lines)) == 12
    own = [[line[2:4] for line in lines[i : i + 6]] for i in (0, 6)]
    assert own == [[("backbone=cola", "dlr=off")] * 6, [("backbone=cola", "dlr=on")] * 6]
    assert [line[4:] for line in lines[:6]] == [line[4:] for line in lines[6:]]
    assert lines[0] == ("scale=tiny", "train.steps=60", "backbone=cola", "dlr=off", "train.lr=0.001", "seed=41")


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("lowrank+init_offset", ["backbone=lowrank", "dlr=init_offset"]),
        ("full+galore", ["backbone=full", "dlr=off", "optimizer=galore"]),
        ("lowrank+dlr+loro", ["backbone=lowrank", "dlr=on", "optimizer=loro"]),
        ("cola:train.steps=6:optimizer.eps=1e-6", ["backbone=cola", "dlr=off", "train.steps=6", "optimizer.eps=1e-6"]),
        ("experiment=table1/cola_dlr:scale=60m", ["experiment=table1/cola_dlr", "scale=60m"]),
    ],
)
def test_a_method_is_words_of_train(method, expected):
    assert list(read_grid([f"pair={method}", "lr=1", "seeds=1"]).words[method]) == expected


def test_words_of_a_method_take_the_place_of_those_of_all():
    grid = read_grid(["pair=cola,cola:train.steps=6", "lr=0.1", "seeds=0", "train.steps=60", "scale=tiny"])
    lines = [grid.line(*cell).words for cell in grid.cells()]
    assert [[word for word in line if word.startswith("train.steps")] for line in lines] == [
        ["train.steps=60"],
        ["train.steps=6"],
    ]


def test_a_word_that_one_method_does_not_override_is_for_that_one():
    grid = read_grid(["pair=full+galore,full", *LISTS[1:], "optimizer=muon", "dlr.alpha=2"])
    first, second = ([*grid.line(method, 0.001, 41).words] for method in grid.design.methods)
    assert "optimizer=galore" in first and "optimizer=muon" not in first and "optimizer=muon" in second


def test_the_results_keep_their_name_when_the_grid_grows():
    names = [read_grid([*lists, "scale=tiny"]).name for lists in (LISTS, [LISTS[0], "lr=0.1", "seeds=7"])]
    assert names[0] == names[1] != read_grid([*LISTS, "scale=60m"]).name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], ["pair: is needed. Write for instance pair=cola,cola+dlr", "lr: is needed", "seeds: is needed"]),
        (["pair=colla", *LISTS[1:]], ["pair=colla: colla is no backbone. Did you mean cola?"]),
        (["pair=cola+dlrr", *LISTS[1:]], ["dlrr is no choice of dlr or optimizer"]),
        (["pair=cola,cola", *LISTS[1:]], ["cola is given twice"]),
        ([*LISTS[::2], "lr=0.1,x,-1,nan,inf"], ["'x' is not a learning rate above 0", "'-1'", "'nan'", "'inf'"]),
        ([*LISTS[::2], "lr=1e-3,0.001"], ["0.001 is there already"]),
        ([*LISTS[:2], "seeds=1,1.5"], ["'1.5' is not a whole number from 0 on"]),
        ([*LISTS, "confirm=42,43"], ["confirm=42,43: the rates are chosen with seed 42"]),
        ([*LISTS, "train.lr=0.1", "seed=4"], ["train.lr=0.1: is the grid's", "Write lr=", "seed=4", "Write seeds="]),
        ([*LISTS, "train={lr: 0.1}"], ["train.lr=0.1: is the grid's"]),
        (["pair=cola:train.lr=0.1", *LISTS[1:]], ["train.lr=0.1: is the grid's"]),
        ([*LISTS, "dlr=uncorrected"], ["dlr=uncorrected: does nothing: every method of pair= has its own dlr"]),
        ([*LISTS, "+backbone=lost"], ["backbone=lost: does nothing"]),
        (["pair=full+galore,full+adamw", *LISTS[1:], "optimizer=muon"], ["optimizer=muon: does nothing"]),
        ([*LISTS, "seeds=43"], ["seeds=43: seeds=41,42 is there already. Write one list"]),
        ([*LISTS, "+lr=0.1"], ["lr=0.1: lr=0.003,0.001,0.01 is there already"]),
        ([*LISTS, "confirm="], ["confirm=: is an empty list. Leave it out, or fill it"]),
        (["pair=", "lr=", "seeds=41"], ["pair=: is an empty list", "lr=: is an empty list"]),
        ([*LISTS, "~seed"], ["seed=: is the grid's, and the same for all methods. Write seeds=<value>,<value>"]),
        (["pair=cola,cola+dlr+random", *LISTS[1:]], ["pair=cola+dlr+random: dlr and random are both a choice of dlr"]),
        (["pair=full+galore+muon", *LISTS[1:]], ["galore and muon are both a choice of optimizer. Keep one"]),
        (
            ["pair=cola+dlr:probe.layers=a,b", *LISTS[1:]],
            ["b is no backbone", "pair=cola+dlr:probe.layers=a,b: a comma ends a method, and a value with one is not"],
        ),
    ],
)
def test_what_is_wrong_with_a_grid_is_said(given, said):
    with pytest.raises(ConfigError) as caught:
        read_grid(given)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ("cola+dlr:train.seq_len=16", "train.seq_len=16: of cola+dlr:train.seq_len=16 is not that of cola, 32"),
        ("cola+dlr:eval.packing=packed", "eval.packing=packed: of"),
        ("lax:dlr.alfa=2", "lax:dlr.alfa=2 lr=0.001 seed=41: dlr.alfa=2: no such key. Did you mean dlr.alpha?"),
    ],
)
def test_methods_that_do_not_compare_or_exist_are_refused_before_any_is_trained(words, trained, capsys, own, said):
    assert tune.main([*words(), f"pair=cola,{own}", "lr=0.001", "seeds=41"]) == 2
    assert said in capsys.readouterr().err and not trained


# ----------------------------------------------------------------------------------------------------
# Where it stands, and where it goes on


def test_it_goes_on_where_it_was(command, trained, capsys):
    """A second time nothing is trained; a wider grid trains its new rates, and a diverged run stays a result."""
    lists = ["pair=cola,cola+dlr", "lr=0.003,0.001", "seeds=41,42"]
    found = command(*lists)
    assert len(trained) == 8 and found["comparisons"][0]["better"] == "cola+dlr"
    assert found["comparisons"][0]["by_seed"] == pytest.approx({"41": -0.2, "42": -0.2})
    assert found["chosen"]["cola"]["held_out"]["losses"] == pytest.approx({"41": 3.506, "42": 3.5})
    assert "8/8  cola+dlr lr=0.003 seed=42: finished, perplexity 16.4" in capsys.readouterr().out
    assert command(*lists) == found and len(trained) == 8
    lists[1] = "lr=0.001,0.003,0.03"
    for _ in range(2):
        wider = command(*lists)
        assert [run.cfg.train.lr for run in trained[8:]] == [0.03] * 4
        assert [t["state"] for t in wider["trials"] if t["lr"] == 0.03] == ["diverged"] * 4
        assert wider["chosen"]["cola"]["edge"] is None
    assert "8 of 12 runs have ended before" in capsys.readouterr().out


def test_a_run_that_diverged_is_not_trained_again_though_its_log_is_gone(command, trained):
    """Nor is its log asked at all where another command has started it."""
    grid = ("pair=cola", "lr=0.003,0.03", "seeds=41")
    found = command(*grid)
    (run,) = (run for run in trained if run.cfg.train.lr == 0.03)
    (run.dir / "jobs.jsonl").unlink()
    (run.dir / "metrics.jsonl").write_text('{"step": 2, "train/loss": 9.0}\n')
    again = command(*grid)
    assert len(trained) == 2 and [t["state"] for t in again["trials"]] == ["finished", "diverged"]
    assert found["trials"][1]["remark"] == again["trials"][1]["remark"] and "not finite" in again["trials"][1]["remark"]


def test_an_edge_and_unequal_budgets_are_said(command, trained, capsys):
    found = command("pair=cola,cola:train.steps=2", "lr=0.003,0.005", "seeds=1,2")
    said = " ".join(capsys.readouterr().out.split())
    assert "cola: its best rate, 0.003, is the lowest of the grid, and a better one may lie below it" in said
    assert "The budgets are not equal: cola 20 steps, 5,120 tokens, cola:train.steps=2 2 steps, 512 tokens." in said
    assert found["comparisons"][0]["better"] == "none shown"


def test_fresh_seeds_are_trained_at_the_chosen_rate_alone(command, trained):
    found = command("pair=cola,cola+dlr", "lr=0.001,0.003", "seeds=41", "confirm=8,9")
    later = [(run.cfg.train.lr, run.cfg.seed) for run in trained[4:]]
    assert len(trained) == 8 and later == [(0.003, 8), (0.003, 9)] * 2
    assert found["chosen"]["cola"]["held_out"]["losses"] == pytest.approx({"8": 3.501, "9": 3.502})
    assert found["comparisons"][0]["better"] == "cola+dlr"


def test_a_run_that_failed_is_no_result(command, monkeypatch, trained, capsys):
    """It is named with its reason, nothing is decided, and the same command tries it again."""
    failing = True

    def train(runs, at_once, ended):
        for run in runs:
            if failing and run.cfg.seed == 42:
                log = run.dir / "the.log"
                note(run.dir, "0_1", log)
                log.write_text("job 0_1, start 1: w\nerror: the disk is full\njob 0_1: ended with exit code 3\n")
            else:
                pretend(run)
            ended(run, 1.0)

    monkeypatch.setattr(tune, "train", train)
    found = command("pair=cola", "lr=0.003,0.01", "seeds=41,42", code=EXIT_FAILED)
    assert found["chosen"]["cola"]["reason"] == "2 of the 4 runs of the grid have not ended"
    assert "cola lr=0.003 seed=42: failed the disk is full" in capsys.readouterr().out
    failing = False
    assert command("pair=cola", "lr=0.003,0.01", "seeds=41,42")["chosen"]["cola"]["lr"] == 0.003


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [("scale.hidden_size", 48, "holds another run: scale.hidden_size: 48 there, 32 here"),
     ("data.shards", "another", "data.shards is not that of")],
)  # fmt: skip
def test_a_directory_that_holds_another_run_or_one_of_another_text_is_no_result(
    command, trained, capsys, key, value, said
):
    grid = ("pair=cola", "lr=0.003,0.01", "seeds=41")
    command(*grid)
    record = json.loads((trained[1].dir / "manifest.json").read_text())
    record["identity"][key] = value
    update_record(trained[1].dir, record)
    assert tune.main([*command.words, *grid]) == EXIT_FAILED
    assert said in capsys.readouterr().err and len(trained) == 2


def test_a_probe_that_comes_after_the_end_is_refused(command, trained, capsys):
    grid = ["pair=cola+dlr,lowrank+dlr", "lr=0.003", "seeds=41"]
    command(*grid)
    command(*grid, "probe=on", code=EXIT_FAILED)
    assert "finished, and without probe=on, which comes too late" in capsys.readouterr().err
    for run in trained:
        metrics = run.dir / "metrics.jsonl"
        metrics.write_text(metrics.read_text().replace('"step"', '"probe/0/rho": 1.0, "step"'))
    command(*grid, "probe=on")


def test_runs_without_halves_are_refused(command, trained, capsys, tmp_path):
    command("pair=cola", "lr=0.003,0.01", "seeds=41")
    metrics = trained[0].dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("loss_a", "gone"))
    command("pair=cola", "lr=0.003,0.01", "seeds=41", code=EXIT_FAILED)
    assert "from an older version, which did not evaluate by halves" in capsys.readouterr().err


def test_a_dry_run_trains_nothing(words, trained, capsys, tmp_path):
    assert tune.main([*words(f"run.root={tmp_path}/runs"), "pair=cola", *LISTS[1:], "--dry-run"]) == 0
    assert "6 runs: 6 not started" in capsys.readouterr().out
    assert not trained and not (tmp_path / "runs").exists()


# ----------------------------------------------------------------------------------------------------
# In a queue


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """An sbatch that notes its words and gives job 70, and a squeue that prints the file ``queue``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {folder}/asked\necho 70\n")
    (folder / "squeue").write_text(f"#!/bin/sh\ncat {folder}/queue\n")
    for name in ("sbatch", "squeue"):
        (folder / name).chmod(0o755)
    (folder / "queue").write_text("")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("RANKS_PER_NODE", raising=False)
    monkeypatch.chdir(ROOT)
    return folder


def test_a_queue_trains_the_grid_and_the_same_command_goes_on(command, words, scheduler, tmp_path, trained):
    lists = ["pair=cola,cola+dlr", "lr=0.003,0.01", "seeds=41"]
    queued = [*words(f"run.root={tmp_path}/runs"), *lists, "confirm=5"]
    given = [*queued, "--output", f"{tmp_path}/out", "--slurm", "--limit", "2", "--", "--gpus-per-node=2", "--time=9"]

    def give() -> dict:
        assert tune.main(given) == 0
        return json.loads((tmp_path / "out" / "tune.json").read_text())

    first = give()
    asked = (scheduler / "asked").read_text().splitlines()
    assert asked[1] == "--array=1-4%2" and asked[4:7] == ["--gpus-per-node=2", "--time=9", "slurm/array.sbatch"]
    lines = Path(asked[7]).read_text().splitlines()
    runs = load_runs([read_grid([*queued]).line(*cell) for cell in read_grid([*queued]).cells()], 2)
    assert lines == [str(run.line) for run in runs]
    assert first["comparisons"][0]["better"] is None

    (scheduler / "asked").unlink()
    (scheduler / "queue").write_text("".join(f"70_{i}|PENDING|Priority\n" for i in range(1, 5)))
    assert {t["state"] for t in give()["trials"]} == {"pending"} and not (scheduler / "asked").exists()

    for run in runs:
        pretend(run)
    (scheduler / "queue").write_text("")
    give()
    fresh = Path((scheduler / "asked").read_text().splitlines()[-1]).read_text().splitlines()
    assert [line.split()[-2:] for line in fresh] == [["train.lr=0.003", "seed=5"]] * 2
    assert not trained


# ----------------------------------------------------------------------------------------------------
# Trainings


@pytest.mark.usefixtures("no_export")
def test_a_tie_and_a_difference_are_reported_as_what_they_are(words, monkeypatch, tmp_path):
    """A method against itself with a residual of strength zero, and at a tenth of the steps.

    Another order of the data would be no tie: the seeds are of the initialisation, and share an order.
    """
    from dlr_pretrain.train.run import run as train
    from dlr_pretrain.util.errors import UserError

    def in_this_process(runs, at_once, ended):
        for run in runs:
            try:
                train(run.cfg)
                (run.dir / "report.md").touch()
            except UserError as error:
                pytest.fail(str(error))
            ended(run, 0.0)

    monkeypatch.setattr(tune, "train", in_this_process)
    pair = "pair=cola,cola+dlr:dlr.alpha=0,cola:train.steps=4"
    own = [f"run.root={tmp_path}/runs", pair, "lr=0.01,0.02", "seeds=1,2,3", "--output", f"{tmp_path}/out"]
    quick = words("train.steps=40", "train.micro_batch=8", "eval.every=40", "checkpoint.every=40")
    assert tune.main([*quick, *own]) == 0
    found = json.loads((tmp_path / "out" / "tune.json").read_text())
    assert [c["better"] for c in found["comparisons"]] == ["none shown", "cola"]
    assert list(found["comparisons"][0]["by_seed"].values()) == pytest.approx([0, 0, 0], abs=1e-4)
    for t in found["trials"]:
        assert min(t["loss_a"], t["loss_b"]) < t["loss"] < max(t["loss_a"], t["loss_b"])


@pytest.mark.slow
def test_the_command_trains_diverges_and_compares(words, tmp_path):
    """Real processes: a rate at which it learns, and one at which the first updates are not finite."""
    given = [*words(f"run.root={tmp_path}/runs", "train.steps=4"), "pair=cola", "lr=0.003,1e30", "seeds=1"]
    command = [sys.executable, str(ROOT / "scripts" / "tune.py"), *given, "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs" / "tune").iterdir()
    found = json.loads((folder / "tune.json").read_text())
    assert [t["state"] for t in found["trials"]] == ["finished", "diverged"]
    assert found["chosen"]["cola"]["lr"] == 0.003 and (folder / "curve.svg").exists()
