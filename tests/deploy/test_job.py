"""Commands under torchrun: rank 0 decides and speaks for all; what befalls another rank is said with its name."""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch.distributed as dist

from dlr_pretrain.deploy import job, sft
from dlr_pretrain.deploy.recipe import Recipe
from dlr_pretrain.deploy.sft import tune
from dlr_pretrain.util.errors import UserError
from tests.conftest import on_ranks, script
from tests.deploy.models import exported
from tests.deploy.test_sft import rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory, corpus):
    spiece = corpus / "spiece.model"
    return exported(tmp_path_factory.mktemp("run") / "folded", spiece, "backbone=cola", "scale.rank=8", rows=120)


def test_what_rank_0_finds_holds_on_all_ranks():
    def act() -> None:
        with job.joined("cpu"):
            assert job.decided(lambda: job.rank() + 7) == 7

    on_ranks(act, 2)
    assert job.decided(lambda: 3) == 3  # one process


def test_what_rank_0_refuses_it_says_alone(tmp_path):
    def refuse() -> None:
        raise UserError("no such thing")

    def act() -> None:
        with (tmp_path / str(job.rank())).open("w") as sys.stderr:
            try:
                code = job.command(lambda: joined_and_decided(refuse))
            except SystemExit as end:
                code = end.code
            print(code, file=sys.stderr)

    on_ranks(act, 2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["error: no such thing\n3\n", "3\n"]


def joined_and_decided(decide) -> None:
    with job.joined("cpu"):
        job.decided(decide)


def test_another_rank_says_who_it_is_to_torchrun_too(monkeypatch, capsys, tmp_path):
    def act() -> None:
        raise UserError("the disk is full")

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert job.command(act) == 3
    assert capsys.readouterr().err == "error on rank 3: the disk is full\n"
    assert "the disk is full" in (tmp_path / "error.json").read_text()


def test_ctrl_c_ends_a_command_in_a_line(capsys):
    def act() -> None:
        raise KeyboardInterrupt

    assert job.command(act) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize("name", ["cuda:99", "cpux", "gpu"])
def test_a_device_that_is_not_there_is_named(name):
    with pytest.raises(UserError, match=rf"--device {name}: .*\. Give cpu, cuda or cuda:<number>"):
        job.device_of(name)


def test_what_is_done_is_what_rank_0_finds_on_its_disk(folder, tmp_path, monkeypatch):
    """Nodes may have disks of their own: the others tune nothing that rank 0 has, and get its record."""
    recipe, learned = Recipe(epochs=1, batch=8, length=200, precision="fp32"), rows(16)
    first = tune({"a": folder}, learned, [], recipe, [1], tmp_path / "0", "cpu", lambda _: None)

    def act() -> None:
        monkeypatch.setattr(sft, "fine_tune", None)
        with job.joined("cpu"):
            found = tune({"a": folder}, learned, [], recipe, [1], tmp_path / str(job.rank()), "cpu", lambda _: None)
        assert json.dumps(found) == json.dumps(first)

    on_ranks(act, 2)


def test_zero_shot_is_shared_out_where_nothing_is_left_to_tune(folder, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    from dlr_pretrain.deploy import zero_shot

    (tmp_path / "rows.json").write_text(json.dumps(rows(16)))
    command = script("sft")
    given = [f"a={folder}", "--data", str(tmp_path / "rows.json"), "--output", str(tmp_path / "sft"), "--seeds", "1"]
    given += ["--epochs", "1", "--batch", "8", "--length", "200", "--precision", "fp32", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["sft.py", *given])
    assert command.main() == 0

    def measured(*_) -> dict:
        (tmp_path / f"rank{dist.get_rank()}of{dist.get_world_size()}").touch()
        return {"piqa": {"acc": 0.5}}

    def act() -> None:
        monkeypatch.setattr(sft, "fine_tune", None)
        monkeypatch.setattr(zero_shot, "load_tasks", lambda *_: {})
        monkeypatch.setattr(zero_shot, "evaluate", measured)
        monkeypatch.setattr(sys, "argv", ["sft.py", *given, "--tasks", "piqa"])
        assert command.main() == 0

    on_ranks(act, 2)
    assert {path.name for path in tmp_path.glob("rank*")} == {"rank0of2", "rank1of2"}
    assert "50.00" in (tmp_path / "sft" / "table.md").read_text()
    assert os.listdir(tmp_path / "sft" / "a") == ["s1"]
