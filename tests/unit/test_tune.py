"""tune.py: the grid, its runs on this machine and in a queue, one text for all, and where it goes on."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from dlr_pretrain.config import ConfigError, identity
from dlr_pretrain.launch import tune
from dlr_pretrain.launch.grid import read_grid
from dlr_pretrain.launch.runs import PlannedRun, load_runs
from dlr_pretrain.train.record import record_state, update_record
from dlr_pretrain.util.errors import EXIT_FAILED
from tests.conftest import ROOT
from tests.unit.test_launch import composed_once, scheduler

__all__ = ["composed_once", "scheduler"]
LISTS = ["pair=cola,cola+dlr", "lr=0.003,0.001,0.01", "seeds=41,42"]


def pretend(run: PlannedRun, text: dict[str, object]) -> None:
    """Leave what a training would: best at 0.003, with DLR better by 0.2, with 0.001 of each seed; diverged at 0.03."""
    cfg, last = run.cfg, run.cfg.train.steps
    run.dir.mkdir(parents=True, exist_ok=True)
    update_record(run.dir, {"identity": identity(cfg) | text, "saved": last})
    if cfg.train.lr > 0.02:
        record_state(run.dir, "diverged", "step 3: loss nan")
        return
    record_state(run.dir, "complete")
    loss = 3 + math.log10(cfg.train.lr / 0.003) ** 2 - 0.2 * cfg.dlr.enabled + cfg.seed % 7 / 1000
    values = {"eval/loss": loss, "eval/loss_a": loss, "eval/loss_b": loss + 0.5, "eval/perplexity": math.exp(loss)}
    (run.dir / "metrics.jsonl").write_text(json.dumps({"step": last, "train/loss": loss} | values) + "\n")


class Trained(list):
    """Stands in for ``local.train``: the runs that were trained, which is pretended. From ``changes`` runs on, the
    tokenizer is another. Runs with a seed in ``failing`` fail."""

    failing, changes = (), math.inf
    text = MappingProxyType({"data.shards": "text", "tokenizer.pieces": "t5"})

    def __call__(self, runs, at_once, check) -> None:
        for run in runs:
            self.append(run)
            pretend(run, dict(self.text) | ({"tokenizer.pieces": "another"} if len(self) > self.changes else {}))
            if run.cfg.seed in self.failing:
                record_state(run.dir, "failed", "the disk is full")
            check()


@pytest.fixture
def trained(monkeypatch):
    found = Trained()
    monkeypatch.setattr(tune, "train", found)
    monkeypatch.setattr("dlr_pretrain.analysis.tune.draw_rates", lambda *_: [])
    return found


@pytest.fixture
def words(words):
    """Without a rate, which is the grid's."""
    return lambda *own: [word for word in words(*own) if not word.startswith("train.lr=")]


@pytest.fixture
def command(words, tmp_path):
    """``tune.py`` with the words of a small run, and what it wrote."""

    def give(*own: str, code: int = 0) -> dict:
        assert tune.main([*words(f"run.root={tmp_path}/runs"), *own, "--output", f"{tmp_path}/out"]) == code
        written = tmp_path / "out" / "tune.json"
        return json.loads(written.read_text()) if written.exists() else {}

    return give


# ----------------------------------------------------------------------------------------------------
# The grid


def test_every_method_gets_the_same_grid():
    grid = read_grid([*LISTS, "scale=tiny", "train.steps=60"])
    lines = [grid.line(*cell).words for cell in grid.cells()]
    assert len(lines) == len(set(lines)) == 12
    own = [[line[2:4] for line in lines[i : i + 6]] for i in (0, 6)]
    assert own == [[("backbone=cola", "dlr=off")] * 6, [("backbone=cola", "dlr=on")] * 6]
    assert [line[4:] for line in lines[:6]] == [line[4:] for line in lines[6:]]
    assert lines[0] == ("scale=tiny", "train.steps=60", "backbone=cola", "dlr=off", "train.lr=0.001", "seed=41")
    assert grid.name == read_grid([LISTS[0], "lr=0.1", "seeds=7", "scale=tiny", "train.steps=60"]).name
    assert grid.name != read_grid([*LISTS, "scale=60m", "train.steps=60"]).name


@pytest.mark.parametrize(("method", "expected"), [
    ("lowrank+init_offset", ["train.steps=60", "backbone=lowrank", "dlr=init_offset"]),
    ("lowrank+dlr+loro", ["train.steps=60", "backbone=lowrank", "dlr=on", "optimizer=loro"]),
    ("cola:train.steps=6:optimizer.eps=1e-6", ["backbone=cola", "dlr=off", "train.steps=6", "optimizer.eps=1e-6"]),
    ("experiment=table1/galore:scale=60m", ["train.steps=60", "experiment=table1/galore", "scale=60m"]),
])  # fmt: skip
def test_a_method_is_overrides_of_train_which_replace_those_of_all(method, expected):
    grid = read_grid([f"pair={method},full", "lr=1", "seeds=1", "train.steps=60"])
    assert list(grid.line(method, 1.0, 1).words) == [*expected, "train.lr=1.0", "seed=1"]


@pytest.mark.parametrize(("given", "said"), [
    ([], ["pair: needs a list. Write for instance pair=cola,cola+dlr"]),
    (["pair=cola,cola", *LISTS[1:]], ["cola is given twice"]),
    ([*LISTS[::2], "lr=0.1,x"], ["'x' is not a learning rate above 0"]),
    ([*LISTS[::2], "lr=nan"], ["'nan' is not a learning rate above 0"]),
    ([*LISTS[:2], "seeds=1,1.5"], ["'1.5' is not a whole number from 0 on"]),
    ([*LISTS, "confirm=42,43"], ["confirm=42,43: the rates are chosen with seed 42"]),
    (["pair=cola:train.lr=0.1", *LISTS[1:], "seed=4"], ["seed=4: is the grid's", "Write seeds="]),
    ([*LISTS, "dlr=uncorrected"], ["dlr=uncorrected: does nothing: every method of pair= has its own dlr"]),
    (["pair=cola,cola+dlr+random", *LISTS[1:]], ["pair=cola+dlr+random: on and random are both a choice of dlr"]),
])  # fmt: skip
def test_what_is_wrong_with_a_grid_is_said(given, said):
    with pytest.raises(ConfigError) as caught:
        read_grid(given)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(("own", "said"), [
    ("cola+dlr:train.seq_len=16", "train.seq_len=16: of cola+dlr:train.seq_len=16 is not that of cola, 32"),
    ("lax:dlr.alfa=2", "lax:dlr.alfa=2 lr=0.001 seed=41: dlr.alfa=2: no such key. Did you mean dlr.alpha?"),
    ("colla", "backbone=colla: must be one of"),
])  # fmt: skip
def test_methods_that_do_not_compare_or_exist_are_refused_before_any_is_trained(words, trained, capsys, own, said):
    assert tune.main([*words(), f"pair=cola,{own}", "lr=0.001", "seeds=41"]) == 2
    assert said in capsys.readouterr().err and not trained


# ----------------------------------------------------------------------------------------------------
# Where it stands, and where it goes on


def test_it_goes_on_where_it_was(command, trained, capsys):
    """A second time nothing is trained; a wider grid trains its new rates, and a diverged run stays a result."""
    lists = ["pair=cola,cola+dlr", "lr=0.003", "seeds=41,42"]
    assert command(*lists, "--dry-run") == {} and not trained
    assert "4 runs: 4 not started" in capsys.readouterr().out
    found = command(*lists)
    assert len(trained) == 4 and found["comparisons"][0]["better"] == "cola+dlr"
    assert found["comparisons"][0]["by_seed"] == pytest.approx({"41": -0.2, "42": -0.2})
    assert found["chosen"]["cola"]["held_out"]["losses"] == pytest.approx({"41": 3.506, "42": 3.5})
    assert command(*lists) == found and len(trained) == 4
    lists[1] = "lr=0.003,0.03"
    for _ in range(2):
        wider = command(*lists)
        assert [run.cfg.train.lr for run in trained[4:]] == [0.03] * 4
        assert [t["state"] for t in wider["trials"] if t["lr"] == 0.03] == ["diverged"] * 4
        assert wider["chosen"]["cola"]["lr"] == 0.003


def test_a_run_that_failed_is_no_result(command, trained, capsys):
    """It is named with its reason, nothing is decided, and the same command tries it again."""
    trained.failing = (42,)
    found = command("pair=cola", "lr=0.003,0.01", "seeds=41,42", code=EXIT_FAILED)
    assert found["chosen"]["cola"]["reason"] == "2 of the 4 runs of the grid have not ended"
    assert "cola lr=0.003 seed=42: failed the disk is full" in capsys.readouterr().out
    trained.failing = ()
    assert command("pair=cola", "lr=0.003,0.01", "seeds=41,42")["chosen"]["cola"]["lr"] == 0.003


def test_all_runs_of_a_grid_read_one_text_with_one_tokenizer(command, trained, capsys):
    """The first run that reads another text, or another tokenizer, than those before it stops the command there."""
    grid = ("pair=cola,cola+dlr", "lr=0.003", "seeds=41,42")
    command(*grid)
    trained.changes = 5
    command(*grid[:2], "seeds=7,8", code=EXIT_FAILED)
    assert len(trained) == 6 and "tokenizer.pieces is not that of the other runs" in capsys.readouterr().err


def test_a_queue_trains_the_grid_and_the_same_command_goes_on(words, scheduler, tmp_path, trained):
    queued = [*words(f"run.root={tmp_path}/runs"), "pair=cola,cola+dlr", "lr=0.003,0.01", "seeds=41", "confirm=5"]
    given = [*queued, "--output", f"{tmp_path}/out", "--slurm", "--limit", "2", "--", "--gpus-per-node=2", "--time=9"]

    def give() -> dict:
        assert tune.main(given) == 0
        return json.loads((tmp_path / "out" / "tune.json").read_text())

    first = give()
    asked = (scheduler / "asked").read_text().splitlines()
    assert asked[1:4] == ["--gpus-per-node=2", "--time=9", "--array=1,2,3,4%2"] and asked[6] == "slurm/array.sbatch"
    grid = read_grid(queued)
    runs = load_runs([grid.line(*cell) for cell in grid.cells()], None)
    assert Path(asked[7]).read_text().splitlines() == [str(run.line) for run in runs]
    assert first["comparisons"][0]["better"] is None

    (scheduler / "asked").unlink()
    (scheduler / "queue").write_text("".join(f"70_{i}|PENDING|Priority\n" for i in range(1, 5)))
    assert {t["state"] for t in give()["trials"]} == {"pending"} and not (scheduler / "asked").exists()

    for run in runs:
        pretend(run, {})
    (scheduler / "queue").write_text("")
    give()
    fresh = Path((scheduler / "asked").read_text().splitlines()[-1]).read_text().splitlines()
    assert [line.split()[-2:] for line in fresh] == [["train.lr=0.003", "seed=5"]] * 2
    assert not trained


@pytest.mark.full
def test_the_command_trains_diverges_and_compares(words, tmp_path):
    """Real processes: a rate at which it learns, and one at which the first updates are not finite."""
    given = [*words(f"run.root={tmp_path}/runs", "train.steps=4"), "pair=cola", "lr=0.003,1e30", "seeds=1"]
    command = [sys.executable, str(ROOT / "scripts" / "tune.py"), *given, "--jobs", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs" / "tune").iterdir()
    found = json.loads((folder / "tune.json").read_text())
    assert [t["state"] for t in found["trials"]] == ["finished", "diverged"]
    assert found["chosen"]["cola"]["lr"] == 0.003 and (folder / "curve.svg").exists()
