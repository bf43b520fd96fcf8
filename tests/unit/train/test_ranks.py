"""What ranks agree on, and requests to stop at any stage of a run."""

import os
import resource
import signal
import time
from pathlib import Path

import pytest
import torch

from dlr_pretrain import __main__ as command
from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError, Problem
from dlr_pretrain.train import ranks
from dlr_pretrain.train.checkpoint import newest
from dlr_pretrain.train.device import find_device, slow_precision
from dlr_pretrain.train.guard import StopRequest
from dlr_pretrain.train.ranks import Ranks, require_files
from dlr_pretrain.train.run import run
from dlr_pretrain.train.state import new_model
from dlr_pretrain.train.update import Update
from dlr_pretrain.util import process
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests.conftest import SMALL, ended, on_ranks
from tests.trial import random_batch, trial


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which torch finds no GPU")
def test_a_slurm_job_with_gpus_does_not_train_on_the_cpu(monkeypatch):
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    cpu = ["scale=tiny", "data=sample", "logger=jsonl", "compile=false"]
    with pytest.raises(UserError, match="SLURM gave this job 8 GPUs on this node, but torch finds none"):
        find_device(load(cpu))
    assert find_device(load([*cpu, "device=cpu"])).type == "cpu"
    for seconds, said in ((0.058, "precision=fp32 is about 58 times as fast on this CPU"), (0.0015, "")):
        ticks = iter([0.0, 0.001, 1.0, 1.0 + seconds]).__next__  # of a product in fp32, then in bf16
        assert slow_precision(load([*cpu, "device=cpu"]), torch.device("cpu"), ticks).startswith(said)
    assert slow_precision(load([*cpu, "device=cpu", "precision=fp32"]), torch.device("cpu"), None) == ""


def test_two_ranks_agree_on_results_errors_and_stops():
    raised = (ConfigError([Problem("a", 1, "is odd")]), ZeroDivisionError("by zero"), Stopped("why"), None)

    def agree() -> None:
        own = int(os.environ["RANK"])

        def decide(error):
            if error:
                raise error
            return own

        said = []
        with Ranks(load(["scale=tiny", "data=sample", "logger=jsonl", "device=cpu", "compile=false"], 2)) as both:
            for error in raised:
                try:
                    said.append(both.on_main(lambda error=error: decide(error)))
                except Exception as caught:
                    said.append(f"{type(caught).__name__} {caught}")
            said.append(both.gather(own))
            stop = StopRequest(both)
            stop.asked = own == 1
            with pytest.raises(Stopped, match="stopped here"):
                stop.raise_if_asked("here")
        other = "ZeroDivisionError by zero" if own == 0 else "UserError rank 0 failed: ZeroDivisionError: by zero"
        assert said == ["ConfigError a=1: is odd", other, "Stopped why", 0, [0, 1]]

    on_ranks(agree, 2)


@pytest.mark.parametrize(("of_each", "named"), [
    (("backbone=cola", "backbone=full"), "backbone.name: {} on rank 0, {} on rank 1"),
    (("cpu", "meta"), "the device that was found: {} on rank 0, {} on rank 1"),
], ids=["a choice with other keys", "a device"])  # fmt: skip
def test_ranks_that_differ_in_a_key_or_device_are_refused(words, tmp_path, monkeypatch, of_each, named):
    def act() -> None:
        own = of_each[rank := int(os.environ["RANK"])]
        if "=" not in own:
            monkeypatch.setattr(ranks, "find_device", lambda _: torch.device(own))
        with pytest.raises(UserError, match="the ranks differ") as caught:
            run(load(words(f"run.dir={tmp_path}/run", *([own] if "=" in own else [])), ranks=2))
        values = [of.rpartition("=")[2] for of in of_each]
        if rank == 0:
            assert named.format(*values) in str(caught.value)

    on_ranks(act, 2)
    assert not (tmp_path / "run").exists()


def test_many_ranks_raise_the_limit_of_open_files():
    """The soft limit of most systems, 1,024 files, would end a job of 341 ranks in the middle of its connections."""

    def act():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, min(hard, 4000) if hard > 0 else 4000))
        require_files(64)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 3 * 64 + 512
        require_files(32)  # it is never lowered
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 3 * 64 + 512
        with pytest.raises(UserError, match=r"a rank of 2,048 needs 6,656 open files.*ulimit -Hn.*higher hard limit"):
            require_files(2048)

    on_ranks(act, 1)


@pytest.mark.parametrize(("ranks", "given", "threads"), [("8", {}, "2"), ("1", {}, None),
                         ("8", {"TORCHINDUCTOR_COMPILE_THREADS": "5"}, "5")])  # fmt: skip
def test_the_ranks_of_a_node_share_its_cores_when_they_compile(monkeypatch, ranks, given, threads):
    environment = {"LOCAL_WORLD_SIZE": ranks, **given}
    monkeypatch.setattr(process.os, "environ", environment)
    monkeypatch.setattr(process, "cores", lambda: 16)
    process.share_compilers()
    assert environment.get("TORCHINDUCTOR_COMPILE_THREADS") == threads


def test_ranks_wait_for_one_that_is_late(tmp_path, monkeypatch):
    """Rank 1 enters its first update, as if it compiled for longer, when rank 0 already waits in a sum."""
    waits, own_inputs, own_sum = tmp_path / "waits", Update.inputs, Ranks.sum

    def inputs(update, batch):
        while update.ranks.rank == 1 and not waits.exists():
            time.sleep(0.01)
        return own_inputs(update, batch)

    def summed(ranks, tensor):
        if ranks.rank == 0 and tensor.numel() == 4:  # the counts of an update
            waits.touch()
        return own_sum(ranks, tensor)

    monkeypatch.setattr(Update, "inputs", inputs)
    monkeypatch.setattr(Ranks, "sum", summed)

    def act():
        cfg = load([*SMALL, "data=sample", "train.global_batch=8"], 2)
        with Ranks(cfg) as ranks:
            update = trial(cfg, ranks, 40)
            outcomes = [update(random_batch(cfg, ranks, 40), index, 0.01).loss.item() for index in range(2)]
            assert waits.exists() and ranks.gather(outcomes)[0] == outcomes

    on_ranks(act, 2)


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize("stage", ["corpus.data.open_source", "run.new_model", "update.Update.step"])
def test_a_signal_before_the_first_step_is_followed_at_once(train, tmp_path, monkeypatch, stage):
    before = signal.getsignal(signal.SIGTERM)

    def interrupted(*_given, **_named):
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("the stage goes on")

    with monkeypatch.context() as patched:
        patched.setattr(f"dlr_pretrain.train.{stage}", interrupted)
        patched.setattr("dlr_pretrain.train.guard.exit_process", ended)
        with pytest.raises(Stopped, match="stopped before the first step"):
            train(tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is before
    train(tmp_path / "run", "train.steps=20")
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 20


@pytest.mark.usefixtures("no_export")
def test_stop_after_a_past_step_stops_at_once(train, tmp_path):
    for stop in (7, 7, 3):
        with pytest.raises(Stopped, match=rf"stopped after step 7 of 20 \(train\.stop_after={stop}\); saved"):
            train(tmp_path / "run", f"train.stop_after={stop}")
    assert newest(tmp_path / "run" / "checkpoints")[0].name == "step_00000007"
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 7


def test_a_failing_report_does_not_fail_the_run(words, tmp_path, no_export, monkeypatch, capsys):
    def fails(_run_dir: Path) -> None:
        raise RuntimeError("no such colour")

    cfg = load(words(f"run.dir={tmp_path}", "train.steps=2"))
    with monkeypatch.context() as patched:
        patched.setattr("dlr_pretrain.analysis.report.write_report", fails)
        command.run_and_report(cfg)
    said = capsys.readouterr().out
    assert "warning: no report, RuntimeError: no such colour" in said and "export  " in said
    for _ in range(2):
        command.run_and_report(cfg)
        said = capsys.readouterr().out
        assert "is complete" in said and f"report      {tmp_path / 'report.html'}" in said


def test_a_job_of_a_sweep_leaves_no_network_to_the_next(words, monkeypatch):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    for given in (None, "eth0"):
        if given:
            monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
        cfg = load(words("parallel=fsdp"))
        with Ranks(cfg):
            new_model(cfg, Ranks(cfg), 120)
            assert os.environ["NCCL_SOCKET_IFNAME"] == (given or "lo")
        assert os.environ.get("NCCL_SOCKET_IFNAME") == given
