"""The run directory says what the run is, and refuses another run."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from omegaconf import OmegaConf

import dlr_pretrain
from dlr_pretrain.cli import load
from dlr_pretrain.config import identity, to_dict
from dlr_pretrain.config.identity import describe_differences
from dlr_pretrain.config.run_folder import require_run_folder
from dlr_pretrain.train import record
from dlr_pretrain.train.record import (
    bind_identity,
    describe_device,
    git_state,
    open_record,
    record_start,
    update_record,
)
from dlr_pretrain.util.errors import UserError


def config(*overrides: str):
    return load(["scale=tiny", "backbone=cola", "data=sample", "logger=jsonl", *overrides])


def open_in(folder, *overrides: str, fingerprint: str = "f", world_size: int = 1) -> dict:
    open_record(folder, config(*overrides), {"data.shards": fingerprint})
    record_start(folder, world_size, torch.device("cpu"), "some text", {})
    return json.loads((folder / "manifest.json").read_text())


def written(cfg) -> dict:
    """The identity as JSON has it."""
    return json.loads(json.dumps(identity(cfg))) | {"data.shards": "f"}


FOREIGN = ("config.yaml", "report.md", "tokenizer/tokenizer.json", "thesis.tex", "job.json",
           "checkpoints/step_1000/state.pt", "checkpoints/step_00000001/checkpoint.json")  # fmt: skip


@pytest.mark.parametrize("name", FOREIGN)
def test_a_folder_with_other_files_is_not_touched(tmp_path, train, name):
    """By a run, at whatever point it would be refused: not even a hidden file is written."""
    path = tmp_path / "theirs" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(UserError, match=r"run.dir=.* is not empty .*, and holds no run. Name a new folder"):
        train(tmp_path / "theirs")
    assert [path for path in (tmp_path / "theirs").rglob("*") if path.is_file()] == [path]
    assert path.read_text() == "mine"


@pytest.mark.parametrize(("name", "text"), [
    ("slurm-12.out", "a log"), (".beats/0", ""), ("job.json", ""), ("job.json", '{"time": 1, "job": "7", "log": "x"}'),
    ("checkpoints/step_00000001/checkpoint.json", '{"format": 4, "state": {"step": 1}, "files": {}}'),
])  # fmt: skip
def test_a_folder_with_logs_or_checkpoints_of_a_run_is_taken(tmp_path, name, text):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    require_run_folder(tmp_path)


def test_the_record_of_a_start_is_complete(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "scale=tiny"])
    manifest = open_in(tmp_path, "dlr=on", world_size=4)
    cfg = config("dlr=on")
    assert manifest["identity"] == written(cfg)
    (start,) = manifest["starts"]
    assert start["command"] == ["train.py", "scale=tiny"]
    device = describe_device(torch.device("cpu"))
    assert start.items() >= {"world_size": 4, "device": device, "git": git_state(), "text": "some text"}.items()
    assert start["python"] == ".".join(map(str, sys.version_info[:3]))
    assert start["packages"]["torch"] == torch.__version__ and "hydra-core" in start["packages"]
    kept = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    assert kept == json.loads(json.dumps(to_dict(cfg)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "manifest.json"]


def test_the_record_names_the_build_of_torch(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.13.0+cu130")  # the metadata of this build say 2.13.0
    assert record.versions()["torch"] == "2.13.0+cu130"


def test_a_second_start_may_change_keys_of_the_machine(tmp_path):
    first = open_in(tmp_path)
    second = open_in(tmp_path, "train.micro_batch=2", "log.every=3", "data.root=/moved", world_size=2)
    assert second["identity"] == first["identity"] | {"data.root": "/moved"}
    assert second["starts"][0] == first["starts"][0]
    assert [start["world_size"] for start in second["starts"]] == [1, 2]
    assert OmegaConf.load(tmp_path / "config.yaml").log.every == 3


def test_another_run_is_refused_with_every_key_that_differs(tmp_path):
    open_in(tmp_path, "train.clip=1.0")
    update_record(tmp_path, {"saved": 1})
    before = (tmp_path / "manifest.json").read_bytes(), (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(UserError) as refused:
        open_in(tmp_path, "train.clip=null", "seed=7", "dlr=on", fingerprint="g")
    text = str(refused.value)
    assert f"{tmp_path} holds another run" in text and "choose another run.dir" in text
    changed = {line.strip() for line in text.splitlines() if line.startswith("  ")}
    assert {
        "train.clip: 1.0 there, null here",
        "seed: 42 there, 7 here",
        "dlr.name: off there, on here",
        "dlr.enabled: false there, true here",
        "data.shards: f there, g here",
    } == changed
    assert before == ((tmp_path / "manifest.json").read_bytes(), (tmp_path / "config.yaml").read_bytes())


@pytest.mark.parametrize(("word", "from_weights", "from_moments"), [
    ("train.lr=1", True, True), ("precision=fp32", True, False), ("optimizer=adamw_foreach", True, False),
    ("dlr=on", False, False), ("scale.rank=8", False, False),
])  # fmt: skip
def test_another_run_may_start_from_what_fits_it(tmp_path, word, from_weights, from_moments):
    open_in(tmp_path, fingerprint="a" * 64)
    update_record(tmp_path, {"saved": 1})
    with pytest.raises(UserError) as refused:
        open_in(tmp_path, word, fingerprint="b" * 64)
    text = str(refused.value)
    assert ("run.start_from=" in text, "run.start_optimizer" in text) == (from_weights, from_moments)
    assert "data.shards: another text than there (see manifest.json)" in text and "a" * 16 not in text


def test_a_hash_is_told_as_contents_and_a_number_as_it_is():
    changed = {"eval.text.web": (f"9 tokens of {'a' * 64}", f"9 tokens of {'b' * 64}"), "train.lr": (1 / 3, 0.25)}
    said = "eval.text.web: other contents than there (see manifest.json), train.lr: 0.3333333333333333 there, 0.25 here"
    assert describe_differences(changed) == said


def test_a_run_has_the_default_of_a_newer_key(tmp_path):
    identity = open_in(tmp_path)["identity"]
    older = {key: value for key, value in identity.items() if key not in ("train.clip", "backbone.latent_scale")}
    update_record(tmp_path, {"identity": older, "saved": 1})
    with pytest.raises(UserError, match=r"run:\n  backbone.latent_scale: 1.0 there, 2.0 here\n  train.clip: 0.5 there"):
        open_in(tmp_path, "train.clip=null", "backbone.latent_scale=2")
    assert open_in(tmp_path)["identity"] == identity


def test_another_run_may_begin_if_nothing_was_saved(tmp_path):
    open_in(tmp_path, "train.clip=1.0")
    bind_identity(tmp_path, {"run.start_from.weights": "w"})
    assert open_in(tmp_path, "seed=7")["identity"] == written(config("seed=7"))


def test_the_commit_is_named_with_a_mark_on_local_changes(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)

    (tmp_path / "package").mkdir()
    monkeypatch.setattr(dlr_pretrain, "__file__", str(tmp_path / "package" / "__init__.py"))
    assert record.git_state() is None  # installed, not checked out
    git("init")
    (tmp_path / "package" / "__init__.py").write_text("")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "x")
    commit = record.git_state()
    assert len(commit) == 40 and set(commit) <= set("0123456789abcdef")
    (tmp_path / "untracked").touch()
    assert record.git_state() == commit
    (tmp_path / "package" / "__init__.py").write_text("changed")
    assert record.git_state() == commit + "+"
    monkeypatch.setenv("PATH", "")
    assert record.git_state() is None


def test_threads_that_write_the_record_lose_nothing(tmp_path):
    """The end of a run may meet the thread that has just saved."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: update_record(tmp_path, {f"entry {i}": i}), range(100)))
    record = json.loads((tmp_path / "manifest.json").read_text())
    assert all(record[f"entry {i}"] == i for i in range(100))


def test_a_git_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 600\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(dlr_pretrain, "__file__", str(tmp_path / "package" / "__init__.py"))
    monkeypatch.setattr(record, "GIT_SECONDS", 0.1)
    assert record.git_state() is None
