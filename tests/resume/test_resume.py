"""The same command continues a run, which ends bit for bit like an undisturbed run, also around ReLoRA's merges."""

import gzip
import json
import os
import shutil
import signal
import time
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.train import checkpoint, loop, run
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.loop import Loop
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests import conftest
from tests.conftest import ended, forked, saved

pytestmark = pytest.mark.usefixtures("no_export")
TIMING = ("time", "perf/tokens_per_second", "perf/max_memory_gb", "perf/mfu")
COLA = ("backbone=cola", "dlr=on")


def final(folder):
    """The folded tensors, and the metrics without what depends on the clock."""
    records = [{k: v for k, v in r.items() if k not in TIMING} for r in read_metrics(folder / "metrics.jsonl")]
    return load_file(folder / "folded" / "model.safetensors"), records


def assert_same(a, b):
    assert a[0].keys() == b[0].keys()
    for name in a[0]:
        assert torch.equal(a[0][name], b[0][name]), name
    assert a[1] == b[1]


@pytest.fixture
def stop(train):
    """``stop(folder, 7)`` trains the run in ``folder`` to step 7."""

    def after(folder, step: int, *choice: str) -> None:
        with pytest.raises(Stopped, match=f"after step {step} of 20"):
            train(folder, *choice, f"train.stop_after={step}")

    return after


@pytest.mark.parametrize("step", [10, pytest.param(20, marks=pytest.mark.full)])
def test_an_evaluation_that_a_stop_abandons_is_made_up_for(train, tmp_path, monkeypatch, step):
    """The step is saved, and the resumed run evaluates it, also if it is the last, or if it is stopped there again."""
    train(tmp_path / "whole", *COLA)
    stopped, batches = Evaluator._stopped, []

    def ask(evaluator, batch):
        batches.append(batch)
        if len(batches) == (2 if step == 10 else 14):  # within the first or the second evaluation, of 12 batches each
            os.kill(os.getpid(), signal.SIGTERM)
        return stopped(evaluator, batch)

    monkeypatch.setattr(Evaluator, "_stopped", ask)
    with pytest.raises(Stopped, match=f"after step {step} of 20" if step == 10 else "after the last step"):
        train(tmp_path / "run", *COLA)
    assert (tmp_path / "run" / "checkpoints" / f"step_{step:08d}").is_dir()
    last = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["step"] == step and "eval/loss" not in last
    train(tmp_path / "run", *COLA)
    assert_same(final(tmp_path / "run"), final(tmp_path / "whole"))


@pytest.mark.parametrize("choice", [
    ("backbone=full", "optimizer=galore", "optimizer.rank=8", "optimizer.refresh_every=3"),
    *(pytest.param(choice, marks=pytest.mark.full) for choice in (
        (*COLA, "precision=bf16_sr"),
        ("backbone=sltrain", "precision=bf16_mixed"),
        ("backbone=lowrank", "dlr=on", "precision=bf16"),
        ("backbone=full", "optimizer=adamw_8bit", "scale.hidden_size=64", "precision=bf16"),
        (*COLA, "optimizer=muon", "precision=bf16"),
        (*COLA, "dlr.learn_alpha=true"),
        ("backbone=full", "optimizer=fira", "optimizer.rank=8", "precision=bf16_mixed"),
        ("backbone=lowrank", "optimizer=loro", "optimizer.exact_every=6"),
    )),
])  # fmt: skip
def test_a_run_interrupted_twice_ends_the_same(train, stop, tmp_path, choice):
    """With the state of every optimizer. The run must learn, or equal losses would prove little."""
    eight_bit = "optimizer=adamw_8bit" in choice
    if eight_bit:
        pytest.importorskip("torchao")
    whole = final(train(tmp_path / "whole", *choice))
    assert [r["step"] for r in whole[1]] == list(range(1, 21))
    losses = [r["train/loss"] for r in whole[1]]
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.1
    stop(tmp_path / "parts", 7, *choice)
    assert any(".codes" in name for name in saved(tmp_path / "parts/checkpoints/step_00000007")) == eight_bit
    with open(tmp_path / "parts" / "metrics.jsonl", "ab") as file:  # as after a loss of power in a start that went on
        file.write(json.dumps({"step": 8, "train/loss": 1.0}).encode() + b"\n" + bytes(300) + b'\n{"step": 9, "tr')
    stop(tmp_path / "parts", 13, *choice)
    tokenizer = f"tokenizer.path={tmp_path}/parts/tokenizer"  # the run's own copy also works
    assert_same(final(train(tmp_path / "parts", *choice, tokenizer)), whole)


def test_a_run_killed_while_it_saves_ends_the_same(train, words, tmp_path, monkeypatch):
    """tests/kill kills runs at every other moment."""
    whole, commit = final(train(tmp_path / "whole", *COLA)), checkpoint.commit

    def deadly(folder, *given):
        if folder.name.startswith(".writing_step_00000010"):
            os.kill(os.getpid(), signal.SIGKILL)
        return commit(folder, *given)

    with monkeypatch.context() as patched, pytest.raises(AssertionError):
        patched.setattr(checkpoint, "commit", deadly)
        forked(words(f"run.dir={tmp_path}/run", *COLA), 1)
    assert max(checkpoint.directories(tmp_path / "run" / "checkpoints")).name == "step_00000005"
    assert_same(final(train(tmp_path / "run", *COLA)), whole)


def test_a_stopped_or_deleted_fold_is_made_again(train, tmp_path, monkeypatch, capsys):
    given, folder = ("train.steps=4", "dlr=on"), tmp_path / "run"
    whole = final(train(tmp_path / "whole", *given))

    def long(*_) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    with monkeypatch.context() as patched:
        patched.setattr("dlr_pretrain.train.run.finish", long)
        patched.setattr("dlr_pretrain.train.guard.exit_process", ended)
        with pytest.raises(Stopped, match=r"stopped after the last step, before the folded checkpoint"):
            train(folder, *given)
    assert not (folder / "folded").exists()
    for _ in range(2):
        assert_same(final(train(folder, *given)), whole)
        before = {p: p.stat().st_mtime_ns for p in (folder / "folded").iterdir()}
        capsys.readouterr()
        train(folder, *given)
        assert {p: p.stat().st_mtime_ns for p in (folder / "folded").iterdir()} == before
        assert "is complete" in capsys.readouterr().out
        shutil.rmtree(folder / "folded")


def test_a_resume_with_other_keys_or_text_is_refused(train, stop, tmp_path, corpus):
    texts = shutil.copytree(corpus, tmp_path / "texts")
    stop(tmp_path / "run", 3, f"data.root={texts}")
    with pytest.raises(UserError, match=r"train.lr: 0.01 there, 0.02 here"):
        train(tmp_path / "run", f"data.root={texts}", "train.lr=0.02")
    record = json.loads((tmp_path / "run" / "manifest.json").read_text())
    del record["saved"]  # as after a kill between the first save and its record
    (tmp_path / "run" / "manifest.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"belongs to another run \(train.lr: 0.01 there, 0.02 here\)"):
        train(tmp_path / "run", f"data.root={texts}", "train.lr=0.02")
    train(tmp_path / "run", f"data.root={texts}", "train.micro_batch=4", "checkpoint.keep_last=1", "train.steps=20")
    for split in ("train", "validation"):
        changed = sorted(texts.glob(f"c4-{split}*"))[-1]
        before = changed.read_bytes()
        changed.write_bytes(before + gzip.compress(b'{"text": "more"}\n'))
        with pytest.raises(UserError, match=r"holds another run:\n  data\.shards: "):
            train(tmp_path / "run", f"data.root={texts}")
        changed.write_bytes(before)


def test_missing_late_and_damaged_checkpoints(train, stop, tmp_path, capsys, monkeypatch):
    """tests/unit/train/test_checkpoint.py has the kinds of damage."""
    whole, folder, hidden = final(train(tmp_path / "whole")), tmp_path / "parts", tmp_path / "hidden"
    stop(folder, 6)
    root, lines = folder / "checkpoints", (folder / "metrics.jsonl").read_bytes()
    root.rename(hidden)
    with pytest.raises(UserError, match=r"checkpoints: no checkpoint, but step 6 was saved. Restore it"):
        train(folder)
    assert (folder / "metrics.jsonl").read_bytes() == lines
    hidden.rename(root)

    last, sleep = root / "step_00000006", time.sleep
    last.rename(hidden)

    def shows(seconds):  # as on a network file system, where another machine has saved it
        if hidden.exists():
            hidden.rename(last)
        sleep(seconds)

    capsys.readouterr()
    with monkeypatch.context() as late:
        late.setattr("dlr_pretrain.train.start.CHECKPOINT_WAIT", 600.0)
        late.setattr(time, "sleep", shows)
        stop(folder, 7)
    assert "after step 6" in (said := capsys.readouterr().out) and "warning" not in said

    (weights,) = (root / "step_00000007").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-5])
    assert_same(final(train(folder)), whole)
    said = capsys.readouterr().out
    assert "step_00000007: part_00000_of_00001.safetensors fails its checksum" in said and "after step 6" in said
    assert "the last saved checkpoint, of step 7, is missing" in said
    assert len(list(root.glob("damaged_step_00000007_*"))) == 1


def test_a_damaged_record_is_named(train, stop, tmp_path):
    stop(tmp_path / "run", 7)
    record = tmp_path / "run" / "manifest.json"
    for content in ("{{junk\n", "null\n", '{"step": "x", "starts": 3}\n'):
        record.write_text(content)
        with pytest.raises(UserError, match=r"manifest.json.* damaged"):
            train(tmp_path / "run")


def test_a_checkpoint_of_another_run_is_refused(train, stop, tmp_path):
    stop(tmp_path / "one", 3)
    stop(tmp_path / "other", 3, "scale.hidden_size=48")
    shutil.rmtree(tmp_path / "one" / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", tmp_path / "one" / "checkpoints")
    with pytest.raises(UserError, match=r"step_00000003 belongs to another run \(scale.hidden_size: 48 there"):
        train(tmp_path / "one")


def test_a_resume_on_three_ranks_sums_in_the_same_order(train, words, tmp_path):
    """With three ranks, the rounding of a sum depends on its place in a buffer: that must not depend on the start."""
    common = (*COLA, "train.lr=1e-3", "train.steps=6", "checkpoint.every=3", "train.global_batch=6",
              "train.micro_batch=1", "data.streams=6")  # fmt: skip
    for name, steps in (("whole", ()), ("parts", ("train.stop_after=3",)), ("parts", ())):
        given = words(f"run.dir={tmp_path}/{name}", *common, *steps)
        if not steps:
            forked(given, 3)
            continue
        with pytest.raises(AssertionError, match="stopped after step 3 of 6"):
            forked(given, 3)
        shutil.copytree(tmp_path / "parts", tmp_path / "fewer")
    whole = final(tmp_path / "whole")
    assert_same(final(tmp_path / "parts"), whole)
    fewer = final(train(tmp_path / "fewer", *common))
    assert [r["train/real_tokens"] for r in fewer[1]] == [r["train/real_tokens"] for r in whole[1]]
    assert [r["train/loss"] for r in fewer[1]] == pytest.approx([r["train/loss"] for r in whole[1]], rel=1e-5)


def test_the_optimizer_is_freed_after_training(train, tmp_path, monkeypatch):
    """A GPU has no room to fold the weights beside the moments."""
    moments, there, save, folded = [], [], Loop.save, run.folded

    def saved(self, final=False):
        moments.extend(map(ref, self.update.optimizer.state_tensors().values()))
        save(self, final)

    monkeypatch.setattr(Loop, "save", saved)
    monkeypatch.setattr(run, "folded", lambda *given, keep: there.extend(m() for m in moments) or folded(*given, keep))
    train(tmp_path / "run", *COLA, "train.steps=1")
    assert there and set(there) == {None}


# ----------------------------------------------------------------------------------------------------
# ReLoRA's merges


RELORA = ("backbone=relora", "backbone.merge_every=6", "backbone.restart_warmup=2", "checkpoint.keep_last=99")
AT = "model.layers.0.mlp.down"


def state_at(folder, step: int) -> dict:
    return conftest.saved(folder / "checkpoints" / f"step_{step:08d}")


@pytest.mark.usefixtures("no_export")
@pytest.mark.full
def test_a_run_interrupted_around_merges_ends_the_same(train, tmp_path):
    choice = (*RELORA, "precision=bf16_mixed", "backbone.prune_ratio=0.9")
    whole = final(train(tmp_path / "whole", *choice))
    assert [r["step"] for r in whole[1]] == list(range(1, 21))
    for stop in (5, 6, 13):
        with pytest.raises(Stopped, match=f"after step {stop} of 20"):
            train(tmp_path / "parts", *choice, f"train.stop_after={stop}")
    assert_same(final(train(tmp_path / "parts", *choice)), whole)
    for step in (5, 10, 15, 20):
        one, other = state_at(tmp_path / "whole", step), state_at(tmp_path / "parts", step)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("no_export")
def test_a_checkpoint_at_a_merge_holds_the_merged_weights(train, tmp_path):
    """fp32 masters keep what the working weights would round away."""
    given = ("precision=bf16_mixed", "checkpoint.every=1", "train.steps=8", "train.warmup_steps=0")
    folder = train(tmp_path / "run", *RELORA, *given)
    initial, before, merged, after = (state_at(folder, step) for step in (1, 5, 6, 7))
    assert torch.equal(before[f"{AT}.w"], initial[f"{AT}.w"])
    change = (merged[f"{AT}.w"] - before[f"{AT}.w"])[:, :91]  # the rest is padding
    assert change.dtype == torch.float32 and change.count_nonzero() > 0.99 * change.numel()
    assert torch.linalg.matrix_rank(change.double(), rtol=1e-4) == 8
    assert before[f"{AT}.b"].any() and not merged[f"{AT}.b"].any()
    assert not torch.equal(merged[f"{AT}.a"], before[f"{AT}.a"])
    moments = [merged[name] for name in merged if name.endswith((".a/exp_avg", ".b/exp_avg"))]
    kept = sum(m.count_nonzero().item() for m in moments) / sum(m.numel() for m in moments)
    assert len(moments) == 16 and 0 < kept < 0.005  # prune_ratio 0.999
    assert merged["lm_head.weight/exp_avg"].count_nonzero() > 0.9 * merged["lm_head.weight/exp_avg"].numel()
    assert torch.equal(after[f"{AT}.w"], merged[f"{AT}.w"])
    rates = [r["train/lr"] for r in read_metrics(folder / "metrics.jsonl")]
    assert rates[5] > 0 and rates[6] == 0 and 0 < rates[7] < rates[5]


@pytest.mark.usefixtures("no_export")
def test_no_merge_follows_an_update_that_is_not_finite(train, tmp_path, monkeypatch):
    monkeypatch.setitem(loop.LAG, "cpu", 1)  # as on a GPU
    choice = ("backbone=relora", "backbone.merge_every=2", "backbone.restart_warmup=0", "train.warmup_steps=0")
    with pytest.raises(UserError, match=r"step 2: loss .* not finite"):
        train(tmp_path / "run", *choice, "train.lr=1e30", "train.clip=null", "checkpoint.every=1000")
    state = state_at(tmp_path / "run", 1)
    assert state[f"{AT}.b"].any() and all(torch.isfinite(t).all() for t in state.values())
