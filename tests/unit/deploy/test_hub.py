"""A folded model is handed on to the hub in one commit, by a run and by fold.py; a failed push loses nothing."""

import json
import sys
from pathlib import Path

import pytest

from dlr_pretrain.__main__ import run_and_report
from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.deploy.export import origin
from dlr_pretrain.deploy.hub import push, require_writable
from dlr_pretrain.util.errors import EXIT_FAILED, UserError
from tests.conftest import forked, main_of
from tests.unit.deploy.stand_in_hub import Hub, serving

REPO = "me/model"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with what an export has, and a report beside it."""
    (tmp_path / "folded").mkdir()
    for name, content in (("README.md", "---\ntags: [x]\n---\n"), ("config.json", "{}"), ("tokenizer.json", "{}"),
                          ("model.safetensors", "weights")):  # fmt: skip
        (tmp_path / "folded" / name).write_text(content)
    (tmp_path / "report.html").write_text("<html>")
    return tmp_path / "folded"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_push_is_one_commit_and_private_unless_said(folder, monkeypatch):
    hub, report = Hub(), folder.parent / "report.html"
    with serving(hub, monkeypatch) as address:
        said = push(folder, report, REPO)
        assert said.startswith(f"{address}/{REPO}/commit/") and hub.private == {REPO: True}
        assert hub.commits[REPO] == [contents(folder) | {"report.html": b"<html>"}]
        push(folder, report, REPO)  # nothing has changed
        assert len(hub.commits[REPO]) == 1 and hub.uploads == 1
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
        report.unlink()
        push(folder, report, REPO)
        assert hub.files(REPO) == contents(folder) | {"report.html": b"<html>"}  # the other weights are gone
        push(folder, report, "me/other", public=True)
        assert hub.private["me/other"] is False


@pytest.mark.parametrize("refused", ["/upload/", "/commit/", "/repos/create"])
def test_a_push_that_fails_changes_nothing_and_is_repeated(folder, monkeypatch, refused):
    hub, report = Hub(), folder.parent / "report.html"
    with serving(hub, monkeypatch):
        hub.refused = refused
        with pytest.raises(UserError, match=r"push to me/model: failed: .+\. The same command pushes again"):
            push(folder, report, REPO)
        assert not hub.commits.get(REPO)
        hub.refused = ""
        push(folder, report, REPO)
    assert len(hub.commits[REPO]) == 1 and hub.uploads == 1  # weights that had arrived were not sent again


@pytest.mark.parametrize(("role", "scopes", "writes"), [
    ("write", (), True), ("read", (), False), ("fineGrained", ("repo.write",), True),
    ("fineGrained", ("repo.content.read",), False),
])  # fmt: skip
def test_a_token_that_cannot_write_is_refused(monkeypatch, role, scopes, writes):
    hub = Hub(role, scopes)
    with serving(hub, monkeypatch):
        if writes:
            require_writable(REPO)
        else:
            with pytest.raises(UserError, match=r"push to me/model: the token .* may only read.*hf auth login"):
                require_writable(REPO)
        hub.known = False
        with pytest.raises(UserError, match="the hub accepts no token of this machine"):
            require_writable(REPO)


def test_a_run_refuses_before_it_reads_and_hands_on_at_its_end(words, tmp_path, monkeypatch, capsys):
    hub, run_dir = Hub("read"), tmp_path / "run"
    command = words(f"run.dir={run_dir}", f"run.push={REPO}", "train.steps=4")
    monkeypatch.setattr(sys, "argv", ["/home/me/train.py", *command])
    with serving(hub, monkeypatch):
        with pytest.raises(UserError, match="may only read"):
            run_and_report(load(command))
        assert not (run_dir / "tokenizer").exists()
        hub.token, hub.refused = {"role": "write"}, "/commit/"
        assert run_and_report(load(command)) > 0
        assert "warning: push to me/model: failed" in capsys.readouterr().out
        assert json.loads((run_dir / "manifest.json").read_text())["state"]["name"] == "complete"
        hub.refused = ""
        run_and_report(load(command))
        assert "is complete" in (said := capsys.readouterr().out) and "pushed      http" in said
    (pushed,) = hub.commits[REPO]
    assert pushed == contents(run_dir / "folded") | {"report.html": (run_dir / "report.html").read_bytes()}
    card = pushed["README.md"].decode()
    for text in ("| trained on | local, packed |", "train.steps=4", "data.root=...", "run.push=me/model",
                 "eval/perplexity", "commit of the code", "compares only with models of the same"):  # fmt: skip
        assert text in card
    assert str(tmp_path) not in card and "/home/me" not in card


def test_fold_pushes_and_repeats_without_another_fold(train, tmp_path, monkeypatch, capsys):
    run_dir, hub = train(tmp_path / "run", "backbone=cola", "dlr=on", "train.steps=2"), Hub()
    given = (run_dir / "checkpoints/step_00000002", "--tokens", 0, "--push", REPO, "--public")
    with serving(hub, monkeypatch):
        hub.refused = "/commit/"
        assert main_of("fold", *given) == EXIT_FAILED
        folded, hub.refused = run_dir / "folded_step_00000002", ""
        before = {path.name: path.stat().st_mtime_ns for path in folded.iterdir()}
        assert main_of("fold", *given) == 0
        assert before == {path.name: path.stat().st_mtime_ns for path in folded.iterdir()}
        assert hub.files(REPO) == contents(folded) and hub.private == {REPO: False}
        precious = tmp_path / "thesis"
        precious.mkdir()
        capsys.readouterr()
        assert main_of("fold", *given, "--output", precious) == EXIT_FAILED
        assert "exists already" in capsys.readouterr().err
        assert main_of("fold", *given, "--output", folded) == EXIT_FAILED  # which may be another run's
        assert "exists already" in capsys.readouterr().err and len(hub.commits[REPO]) == 1
        hub.token = {"role": "read"}
        assert main_of("fold", *given, "--output", tmp_path / "new") == EXIT_FAILED
        assert not (tmp_path / "new").exists() and "may only read" in capsys.readouterr().err
    assert main_of("fold", *given[:3], "--public") == EXIT_FAILED
    for name in ("me", "a/b/c"):
        assert main_of("fold", *given[:3], "--push", name) == EXIT_FAILED
        assert "must be owner/name" in capsys.readouterr().err


@pytest.mark.full
def test_of_several_ranks_the_first_asks_the_hub(words, tmp_path, monkeypatch):
    with serving(hub := Hub("read"), monkeypatch), pytest.raises(AssertionError, match="may only read"):
        forked(words(f"run.dir={tmp_path}/run", f"run.push={REPO}"), 2)
    assert not hub.commits


def test_a_card_names_no_path_of_this_machine(tmp_path):
    words = ["train.py", "data.root=/a/b", "tokenizer.path=~/t", "run.root=../runs", "data.train_files='[/x/1,/x/2]'",
             "experiment=table1/galore", "data.root=hf://datasets/a/b", "--config-dir=./mine"]  # fmt: skip
    start = {"time": "", "command": words, "world_size": 1, "device": "cpu", "git": "1a2b+"}
    (tmp_path / "manifest.json").write_text(json.dumps({"identity": {}, "starts": [start]}))
    assert origin(tmp_path) == {
        "command": "`train.py data.root=... tokenizer.path=... run.root=... 'data.train_files='\"'\"'[...,...]'\"'\"'' "
                   "experiment=table1/galore data.root=hf://datasets/a/b --config-dir=...`",
        "commit of the code": "1a2b+",
    }  # fmt: skip


def test_a_repository_has_an_owner_and_a_name():
    with pytest.raises(ConfigError, match=r"run\.push=model: must be owner/name"):
        load(["scale=tiny", "data=sample", "logger=jsonl", "run.push=model"])
