"""Who belongs together in a report, what a group is called, and what stands beside the paper's figures."""

from __future__ import annotations

import json
import math
import shlex

import pytest
from run_folders import FINGERPRINTS, SHORT, TINY, a_run, as_of_an_older_version, moment, pairs_of_runs

from dlr_pretrain.analysis import layouts
from dlr_pretrain.analysis.compare import versus
from dlr_pretrain.analysis.costs import costs
from dlr_pretrain.analysis.figures import draw
from dlr_pretrain.analysis.groups import CONVENTION, PERPLEXITY, grouped, pairs
from dlr_pretrain.analysis.measured import system
from dlr_pretrain.analysis.paper import marks
from dlr_pretrain.analysis.records import find_runs, read_run
from dlr_pretrain.analysis.reports import write_reports
from dlr_pretrain.cli import load
from dlr_pretrain.train.record import update_record

COLA, COLA_DLR = (*SHORT, "backbone=cola", "dlr=off"), (*SHORT, "backbone=cola", "dlr=on")
PAPER = ("scale=60m", "experiment=table1/cola_dlr", "data=c4_local", "data.root=/c4", "train.steps=11000")


def groups_in(folder) -> list:
    return grouped(find_runs([folder])[0])[0]


def rows_of(table, scale: str = "tiny") -> list[list]:
    return [row for row in table.rows if row[0] == scale]


@pytest.fixture
def alphas(tmp_path):
    """One plain run with three partners that have DLR, and the ablations' other forms."""
    a_run(tmp_path / "plain", *COLA, level=4.0)
    for alpha, level in ((1, 3.9), (0.5, 3.95), (4, 4.2)):
        a_run(tmp_path / f"alpha{alpha}", *COLA_DLR, f"dlr.alpha={alpha}", level=level)
    a_run(tmp_path / "uncorrected", *SHORT, "backbone=cola", "dlr=uncorrected", level=4.1)
    return tmp_path


def test_each_partner_of_a_plain_group_has_its_row(alphas):
    groups = groups_in(alphas)
    values = {g.label: g.final(PERPLEXITY).mean for g in groups}
    rows = {row[1]: row for row in rows_of(layouts.pairs_table(groups))}
    assert {name: row[3].value for name, row in rows.items()} == {
        "cola": values["cola+dlr"],
        "cola (dlr.alpha=0.5)": values["cola+dlr (dlr.alpha=0.5)"],
        "cola (dlr.alpha=4.0)": values["cola+dlr (dlr.alpha=4.0)"],
    }
    assert {row[2].value for row in rows.values()} == {values["cola"]}
    assert rows["cola"][4].value == pytest.approx(values["cola+dlr"] - values["cola"])


def test_a_run_of_an_older_version_joins_its_seeds_and_its_partner(tmp_path):
    pairs_of_runs(tmp_path, "cola", seeds=(41, 42))
    as_of_an_older_version(tmp_path / "cola-off-s41")
    groups = groups_in(tmp_path)
    assert [len(group.runs) for group in groups] == [2, 2]
    assert len(pairs(groups)) == 1
    a_run(tmp_path / "linear", *COLA, "train.lr_decay=linear", seed=43)
    assert sorted(len(group.runs) for group in groups_in(tmp_path)) == [1, 2, 2]


def test_each_partner_is_in_the_ablations(alphas):
    groups = groups_in(alphas)
    rows = {row[2]: row[5].value for row in rows_of(layouts.ablation(groups, "variance_correction"))}
    values = {g.label: g.final(PERPLEXITY).mean for g in groups}
    assert rows == {
        "with": values["cola+dlr"],
        "with (dlr.alpha=0.5)": values["cola+dlr (dlr.alpha=0.5)"],
        "with (dlr.alpha=4.0)": values["cola+dlr (dlr.alpha=4.0)"],
        "without": values["cola+uncorrected"],
    }


def test_the_figure_of_pairs_names_each(alphas, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    write_reports([str(alphas)], out, "")
    assert (out / "figures" / "pairs_tiny.svg").exists()
    assert "dlr.alpha=0.5" in (out / "figures" / "pairs_tiny.svg").read_text()


# ----------------------------------------------------------------------------------------------------
# Beside the paper


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dlr.alpha=0.5", "dlr.alpha 0.5, not 1.0"),
        ("backbone.b_gain=2", "backbone.b_gain 2.0, not 1.0"),
        ("optimizer.beta2=0.95", "optimizer.beta2 0.95, not 0.999"),
        ("scale.hidden_size=768", "scale.hidden_size 768, not 512"),
        ("train.min_lr_ratio=0", "train.min_lr_ratio 0.0, not 0.1"),
        ("scale.lr=0.02", "train.lr 0.02, not 0.01"),
    ],
)
def test_any_key_of_the_setting_is_marked(word, said, tmp_path):
    a_run(tmp_path / "a", *PAPER, word, step=1)
    assert marks(groups_in(tmp_path)[0]) == [said]


@pytest.mark.parametrize(
    ("words", "made", "said"),
    [
        ((), {"text": "/some: 4 train and 1 validation shards"}, "text of 4 train and 1 validation shards, not C4's"),
        (
            ("data=tokens",),
            {"text": "/some: 1024 train and 1 validation shards of tokens (5 to train on), made from /else"},
            "text of 1024 train and 1 validation shards, not C4's",
        ),
        ((), {"fingerprints": FINGERPRINTS | {"tokenizer.pieces": "ab" * 32}}, "tokenizer abababab, not T5's"),
        (("data=c4", "data.train_files=de/*"), {}, "data.train_files de/*, not en/c4-train"),
        (("train.warmup_steps=100",), {}, "warm-up 100 of 11,000 steps, not 1,100"),
        (("scale.warmup_steps=550",), {}, "warm-up 550 of 11,000 steps, not 1,100"),
    ],
)
def test_text_tokenizer_and_warm_up_are_marked(words, made, said, tmp_path):
    kept = [word for word in PAPER if not (words and words[0].startswith("data=") and word.startswith("data"))]
    a_run(tmp_path / "a", *kept, *words, step=1, **made)
    (mark,) = marks(groups_in(tmp_path)[0])
    assert mark.startswith(said)


def test_a_run_without_a_manifest_is_of_unknown_text(tmp_path):
    (a_run(tmp_path / "a", *PAPER, step=1) / "manifest.json").unlink()
    found = "; ".join(marks(groups_in(tmp_path)[0]))
    assert "text of unknown shards, not C4's" in found and "tokenizer unknown, not T5's" in found


def test_the_papers_share_of_warm_up_is_not_marked(tmp_path):
    a_run(tmp_path / "a", *PAPER[:-1], "train.steps=5500", step=1)
    assert not [mark for mark in marks(groups_in(tmp_path)[0]) if "warm-up" in mark]


def test_an_option_of_another_name_is_one_mark(tmp_path):
    a_run(tmp_path / "a", *PAPER, "optimizer=muon", step=1)
    assert [mark for mark in marks(groups_in(tmp_path)[0]) if "optimizer" in mark] == [
        "optimizer muon, not adamw_foreach"
    ]


def test_what_the_paper_varied_is_not_marked(tmp_path):
    a_run(tmp_path / "a", *PAPER[:1], "experiment=ablation/rank_050", *PAPER[2:], step=1)
    (group,) = groups_in(tmp_path)
    assert marks(group) == ["backbone.rank 64, not 128"] and marks(group, "backbone.rank") == []
    a_run(tmp_path / "b", *PAPER, "dlr=uncorrected", step=1)
    assert [marks(g) for g in groups_in(tmp_path) if g.method == "cola+uncorrected"] == [[]]


@pytest.mark.parametrize("recipe", ["full", "galore", "fira", "loro", "sltrain", "lora", "lost_dlr", "cola_lax"])
def test_our_recipes_are_the_papers_setting(recipe, tmp_path):
    a_run(tmp_path / "a", "scale=130m", f"experiment=table1/{recipe}", "data=c4_local", "data.root=/c4", step=1)
    assert not [mark for mark in marks(groups_in(tmp_path)[0]) if "tokens" not in mark]


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("train.seq_len=32", "train.seq_len"),
        ("eval.tokens=10000", "eval.tokens"),
        ("data.mask_documents=true", "data.mask_documents"),
    ],
)
def test_evaluations_of_another_text_are_told(word, key, tmp_path, monkeypatch):
    monkeypatch.setattr("dlr_pretrain.analysis.reports.draw", lambda *_: [])
    a_run(tmp_path / "runs" / "a", *SHORT, "backbone=cola", "eval.packing=packed")
    a_run(tmp_path / "runs" / "b", *SHORT, "backbone=lost", "eval.packing=packed", word)
    remarks = write_reports([str(tmp_path / "runs")], tmp_path / "out", "")
    assert any(f"evaluations at tiny are not all of the same text ({key})" in remark for remark in remarks)
    assert any(
        f"not of the same text ({key})" in warning for warning in versus(find_runs([tmp_path / "runs"])[0])["warnings"]
    )


def test_masked_training_leaves_padded_evaluations_alone(tmp_path):
    a_run(tmp_path / "a", *SHORT, "backbone=cola")
    a_run(tmp_path / "b", *SHORT, "backbone=cola", "data.mask_documents=true")
    assert versus(find_runs([tmp_path])[0])["warnings"] == []


def test_pairs_of_different_code_are_named(tmp_path):
    pairs_of_runs(tmp_path, "cola", "lost", seeds=(41,))
    starts = read_run(tmp_path / "cola-on-s41").starts
    resumed = starts[0] | {"time": moment(10), "git": "fed" * 13 + "f+"}
    update_record(tmp_path / "cola-on-s41", {"starts": [*starts, resumed]})
    told = [note for note in layouts.pairs_table(groups_in(tmp_path)).notes if "code" in note]
    assert told == ["cola at tiny: trained by different code: abc plain, and abc, fedfedfedfed+ with DLR"]
    runs, _ = find_runs([tmp_path / "cola-o*"])
    (code,) = (entry for entry in versus(runs)["configuration"] if entry["key"] == "(code)")
    assert code["values"] == [["abc"], ["abc, then fedfedfedfed+"]]


def test_milestones_of_two_seeds_one_of_which_has_no_step(tmp_path):
    words = ("scale=7b", "experiment=7b/cola_dlr", "data=c4_local", "data.root=/c4")
    for seed in (41, 42):
        a_run(tmp_path / str(seed), *words, seed=seed, step=3)
    a_run(tmp_path / "43", *words, seed=43, step=1)
    (tmp_path / "43" / "metrics.jsonl").write_text("")
    (row,) = (row for row in layouts.milestones(groups_in(tmp_path)).rows if "ours" in row[0])
    assert row[-1].text == "1.25"


# ----------------------------------------------------------------------------------------------------
# Means, and who is in them


def test_a_seed_that_diverged_counts_at_every_later_step(tmp_path):
    for seed in (41, 42, 43):
        a_run(tmp_path / str(seed), *COLA, seed=seed, step=30 if seed == 43 else None)
    update_record(tmp_path / "43", {"state": {"name": "diverged"}})
    (group,) = groups_in(tmp_path)
    assert (group.at(20, CONVENTION).n, group.at(20, CONVENTION).finite) == (3, True)
    assert (group.at(40, CONVENTION).n, group.at(40, CONVENTION).mean) == (3, math.inf)
    assert group.at(41, CONVENTION) is None


def test_the_command_of_a_missing_partner_is_one_that_trains(tmp_path):
    words = (*SHORT, "backbone=cola", "dlr=on", "dlr.alpha=0.25", "probe=on", "probe.every=10")
    words = (*words, f"run={{dir: {tmp_path}/a}}")
    a_run(tmp_path / "a", *words)
    command = layouts.without_partner(groups_in(tmp_path)[0])
    assert "dlr=off" in command and "backbone=cola" in command and str(tmp_path) not in command
    assert not load(shlex.split(command)[2:], machine=False).dlr.enabled


def test_the_convention_is_of_no_evaluation_that_is_too_small_for_it(tmp_path):
    pairs_of_runs(tmp_path / "enough", "cola")
    for dlr in ("off", "on"):
        a_run(tmp_path / f"few/{dlr}", *SHORT, "backbone=cola", f"dlr={dlr}", judged=150_000)
    few, enough = (groups_in(tmp_path / name) for name in ("few", "enough"))
    assert all(group.final(CONVENTION) for group in enough) and not any(group.final(CONVENTION) for group in few)
    assert all(group.final(PERPLEXITY) for group in few)
    rows = [layouts.pairs_table(groups).rows[0] for groups in (few, enough)]
    assert [(row[4] is None, row[5] is None) for row in rows] == [(False, True), (False, False)]
    assert [layouts.groups_table(g, [None] * 2).rows[0][4] is None for g in (few, enough)] == [True, False]


def test_the_order_of_one_family_says_nothing_of_anothers(tmp_path):
    for backbone, order in (("cola", None), ("lowrank", 42)):
        for seed in (41, 42, 43):
            words = (*SHORT, f"backbone={backbone}", f"data.seed={order or seed}")
            a_run(tmp_path / f"{backbone}-{seed}", *words, seed=seed)
    assert [len(group.runs) for group in groups_in(tmp_path)] == [3, 3]


def test_a_run_alone_has_the_order_of_the_others(tmp_path):
    for seed in (41, 42):
        a_run(tmp_path / f"off-{seed}", *COLA, "data.seed=42", seed=seed)
    a_run(tmp_path / "on-42", *COLA_DLR, "data.seed=42", seed=42)
    assert len(pairs(groups_in(tmp_path))) == 1


def test_a_scale_of_ones_own_is_named_beside_what_follows_from_it(tmp_path):
    a_run(tmp_path / "a", *COLA)
    a_run(tmp_path / "b", *COLA, "scale.hidden_size=256", "scale.rank=64", "scale.lr=0.001")
    named = {group.variant for group in groups_in(tmp_path)}
    assert named == {"", "scale.hidden_size=256, backbone.rank=64, train.lr=0.001"}


# ----------------------------------------------------------------------------------------------------
# Machines and costs


def test_a_start_that_trained_nothing_gave_no_speed(tmp_path):
    folder = a_run(tmp_path / "a", *COLA, device="NVIDIA A100")
    manifest = json.loads((folder / "manifest.json").read_text())
    exported = manifest["starts"][0] | {"device": "NVIDIA H100", "time": moment(3600)}
    update_record(folder, {"starts": [*manifest["starts"], exported]})
    run = read_run(folder)
    assert run.machine == "1 x NVIDIA A100" and len(run.since_last_start("perf/tokens_per_second")) > 10


def test_hours_are_of_one_machine(tmp_path):
    folder = a_run(tmp_path / "a", *COLA, device="NVIDIA A100")
    manifest = json.loads((folder / "manifest.json").read_text())
    later = manifest["starts"][0] | {"device": "NVIDIA H100", "time": moment(15)}  # half of its updates
    update_record(folder, {"starts": [*manifest["starts"], later]})
    groups = groups_in(tmp_path)
    assert groups[0].runs[0].machines == ["1 x NVIDIA A100", "1 x NVIDIA H100"]
    (row,) = rows_of(system(groups, [None]))
    assert row[2] == "1 x NVIDIA H100" and row[-1] is None


def test_the_cost_of_a_micro_batch_that_was_found(tmp_path):
    fixed = a_run(tmp_path / "fixed", *COLA, "train.micro_batch=4")
    auto = a_run(tmp_path / "auto", *COLA, "train.micro_batch=auto", seed=42)
    update_record(auto, {"micro_batch": {"1": 4}})
    each = [costs(groups_in(folder))[0][0] for folder in (fixed, auto)]
    assert each[0] == each[1] and each[0] is not None


@pytest.mark.parametrize("recipe", ["evidence_cpu", "ablation/rank_050"])
def test_the_command_of_a_missing_partner_names_recipes_that_are(recipe, tmp_path):
    words = (*TINY, f"experiment={recipe}", "data.seed=${seed}", "train.steps=60", "dlr=on")
    a_run(tmp_path / "on", *words, seed=41)
    (command,) = layouts.pairs_table(groups_in(tmp_path)).fill
    assert "'data.seed=${seed}'" in command
    given = shlex.split(command)[2:]
    assert f"experiment={recipe}" in given and given[-2:] == ["dlr=off", "seed=41"]
    a_run(tmp_path / "off", *given[:-1], seed=41)
    assert len(pairs(groups_in(tmp_path))) == 1


def test_recipes_of_a_pair_are_toggled(tmp_path):
    pairs_of_runs(tmp_path, "cola", seeds=(41,))
    a_run(tmp_path / "paper", *PAPER, step=1)
    (command,) = (line for line in layouts.pairs_table(groups_in(tmp_path)).fill if "60m" in line)
    assert "experiment=table1/cola " in command and "dlr=" not in command


def test_figures_name_the_groups_that_they_cannot_draw(tmp_path):
    for rank in (8, 16, 32):
        a_run(tmp_path / f"r{rank}", *COLA, f"backbone.rank={rank}", final=math.inf if rank == 8 else None)
    groups = groups_in(tmp_path)
    told = [p.caption for p in draw(groups, [None] * len(groups), tmp_path / "figures") if "Not drawn" in p.caption]
    assert len(told) == 2 and all("a seed has diverged: cola (backbone.rank=8)." in caption for caption in told)
