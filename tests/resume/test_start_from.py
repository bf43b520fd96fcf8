"""A new run starts from another run, one of its checkpoints, or an exported folder."""

import shutil

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.config.run_folder import read_record
from dlr_pretrain.train.checkpoint import load as load_checkpoint
from dlr_pretrain.train.corpus import Corpus
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.run import run
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests.conftest import saved
from tests.resume.test_resume import assert_same, final
from tests.trial import trial_loop

pytestmark = pytest.mark.usefixtures("no_export")
CHOICE = ("backbone=cola", "dlr=on")
EVERYTHING = ("run.start_optimizer=true",)


@pytest.fixture(scope="module")
def stopped(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin")
    with pytest.raises(Stopped):
        run(load(words(f"run.dir={folder}", "train.stop_after=10", *CHOICE, "checkpoint.keep_last=2")))
    return folder


@pytest.fixture
def origin(stopped, tmp_path):
    """A run that was stopped after ten of twenty steps."""
    return shutil.copytree(stopped, tmp_path / "origin")


def weights(directory) -> dict[str, torch.Tensor]:
    return {name: t for name, t in saved(directory).items() if "/" not in name}


def test_a_start_with_the_optimizer_continues_the_run(train, tmp_path, origin):
    tensors, records = final(train(tmp_path / "whole", *CHOICE))
    given = (*CHOICE, f"run.start_from={origin}", *EVERYTHING)
    with pytest.raises(Stopped):
        train(tmp_path / "new", *given, "train.stop_after=13")
    assert {d.name for d in (origin / "checkpoints").iterdir()} == {"step_00000005", "step_00000010"}
    shutil.rmtree(origin)
    found, later = final(train(tmp_path / "new", *given))
    assert_same((found, later), (tensors, records[10:]))
    origin_of = {"checkpoint": str(origin / "checkpoints/step_00000010"), "step": 10}
    assert read_record(tmp_path / "new")["started_from"] == origin_of


def test_a_start_without_the_optimizer_takes_weights_only(train, tmp_path, origin, capsys):
    checkpoint = origin / "checkpoints" / "step_00000005"
    given = (*CHOICE, f"run.start_from={checkpoint}", "optimizer=adamw_foreach", "data.seed=7", "train.warmup_steps=2")
    new = train(tmp_path / "new", *given, "checkpoint.every=1", "checkpoint.keep_last=99")
    assert [r["step"] for r in read_metrics(new / "metrics.jsonl")] == list(range(1, 21))
    assert f"starting from the weights of {checkpoint}" in capsys.readouterr().out
    first, before = weights(new / "checkpoints" / "step_00000001"), weights(checkpoint)  # update 0 has rate 0
    assert first.keys() == before.keys() and all(torch.equal(first[name], before[name]) for name in first)


def test_a_start_from_an_export_computes_the_same(train, words, tmp_path):
    common = ("backbone=cola", "eval.every=1", "train.warmup_steps=2")
    origin = train(tmp_path / "origin", *common, "dlr=on")
    last, start = read_metrics(origin / "metrics.jsonl")[-1]["eval/loss"], f"run.start_from={origin}/folded"
    new = train(tmp_path / "new", *common, "dlr=off", start, "train.steps=3")
    assert read_metrics(new / "metrics.jsonl")[0]["eval/loss"] == pytest.approx(last, abs=1e-6)  # update 0 has rate 0
    for choice in (("dlr=on", "precision=bf16"), ("dlr=no_b",), ("dlr=init_offset",)):
        with pytest.raises(ConfigError, match=r"run\.start_from=.*: (takes the residual|cannot start|sets B to)"):
            load(words("backbone=cola", *choice, start))


def test_differing_keys_are_reported_and_new_text_restarts(train, tmp_path, origin, capsys):
    train(tmp_path / "new", *CHOICE, f"run.start_from={origin}", *EVERYTHING, "train.lr=0.002", "data.seed=7")
    said = capsys.readouterr().out
    assert (
        "after step 10: the learning rate there is 0.00126" in said
        and "train.lr: 0.01 there, 0.002 here" in said
        and "the data start from the beginning" in said
        and "data.seed: 42 there, 7 here" in said
    )


def test_a_start_that_does_not_fit_is_refused(train, words, tmp_path, origin, monkeypatch):
    last, nowhere = origin / "checkpoints" / "step_00000010", tmp_path / "nowhere"
    for start, choice, reason in (
        (origin, ("backbone=lowrank", "dlr=on"), r"another model .backbone.* cola there, lowrank here"),
        (last, ("backbone=cola",), r"another model .dlr"),
        (last, (*CHOICE, *EVERYTHING, "optimizer=adamw_foreach"), r"another optimizer .optimizer.name: adamw there"),
        (origin, (*CHOICE, *EVERYTHING, "train.steps=10"), r"train.steps=10: .* has already trained 10 steps"),
        (nowhere, CHOICE, r"run.start_from=.*: no checkpoint there"),
    ):
        with pytest.raises(UserError, match=reason):
            train(tmp_path / "new", *choice, f"run.start_from={start}")
    with monkeypatch.context() as patched:
        prints = Corpus.fingerprints.fget
        patched.setattr(Corpus, "fingerprints", property(lambda text: prints(text) | {"tokenizer.pieces": "another"}))
        with pytest.raises(UserError, match=r"another model .tokenizer.pieces: "):
            train(tmp_path / "new", *CHOICE, f"run.start_from={origin}")
    (last / "checkpoint.json").unlink()
    with pytest.raises(UserError, match=r"checkpoint.json is missing. Name another checkpoint"):
        train(tmp_path / "new", *CHOICE, f"run.start_from={last}")
    with pytest.raises(ConfigError, match=r"run.start_optimizer"):
        load(words(*CHOICE, *EVERYTHING))


def test_masters_start_from_a_bf16_run(train, tmp_path):
    with pytest.raises(Stopped):
        train(tmp_path / "origin", *CHOICE, "precision=bf16", "train.stop_after=10")
    given = (*CHOICE, "precision=bf16_mixed", f"run.start_from={tmp_path}/origin", "train.steps=2")
    state = weights(train(tmp_path / "new", *given) / "checkpoints" / "step_00000002")
    assert {t.dtype for t in state.values() if t.is_floating_point()} == {torch.float32}


def test_a_state_before_the_first_batch_has_no_position(words, tmp_path):
    """Otherwise a run on new data that ends with its first update could not start again."""
    cfg = load(words())
    with Ranks(cfg) as ranks:
        loop = trial_loop(cfg, ranks, 64, tmp_path)
        with loop.saver:
            loop.save(final=True)
    assert load_checkpoint(tmp_path / "checkpoints" / "step_00000000").state["streams"] == {}
