"""The keys of a run: types, bounds, rules that span keys, identity, and the page that documents them."""

import itertools
import os
import runpy
from dataclasses import dataclass

import pytest
import yaml

from dlr_pretrain.cli import load
from dlr_pretrain.config import CONFIG_DIR, GROUPS, Config, compiler_problem, identity, parse, to_dict
from dlr_pretrain.config.command_line import default_choices
from dlr_pretrain.config.identity import differences
from dlr_pretrain.config.key import key
from dlr_pretrain.config.values import all_keys
from dlr_pretrain.optim import adamw
from tests.conftest import ROOT

COMPOSED = [group for group in GROUPS if group != "experiment"]


@pytest.fixture(scope="module")
def loaded() -> Config:
    return load(["scale=tiny", "backbone=cola", "data=sample", "logger=jsonl"])


@pytest.fixture
def tree(loaded) -> dict:
    return to_dict(loaded)


@pytest.fixture
def cfg(tree) -> Config:
    return parse(tree)


def test_the_page_of_keys_is_up_to_date():
    page = runpy.run_path(str(ROOT / "docs/configuration.py"))["page"]
    assert (ROOT / "docs/configuration.md").read_text() == page(), "run docs/configuration.py > docs/configuration.md"


def test_a_configuration_is_read_as_it_was_written(loaded, tree):
    assert parse(tree) == loaded
    tree["train"] |= {"steps": 1e3, "lr": "1", "clip": None}  # from a variable: ${oc.env:LR}
    tree["eval"] |= {"tokens": 2**53 + 1}  # no float can hold it
    tree["logger"] |= {"project": "007", "tags": "one"}
    cfg = parse(tree)
    got = cfg.train.steps, cfg.train.lr, cfg.train.clip, cfg.logger.project, cfg.logger.tags
    assert repr(got) == "(1000, 1.0, None, '007', ['one'])"
    assert cfg.eval.tokens == 2**53 + 1


@pytest.mark.parametrize(("section", "name", "given", "kept"), [
    *(("data", "root", place, place) for place in ("/", ".", "a/../b", "s3://", "s3://b/a//")),  # a may be a link
    *(("data", "root", f"{place}/", place) for place in ("/a", "a", "../a", "s3://b", "s3://b/a")),
    *(("data", "root", place, "a") for place in ("a//", "./a", "./a/.")),
    ("data", "train_files", "./a//**/", "./a//**/"),  # a glob
    ("run", "dir", "None", "None"),  # a folder may have this name
])  # fmt: skip
def test_a_path_keeps_its_target(tree, section, name, given, kept):
    tree[section][name] = given
    assert to_dict(parse(tree))[section][name] == kept


def test_another_spelling_of_a_path_is_not_a_difference(cfg):
    cfg.run.start_from = "x"
    here = identity(cfg)
    assert differences(here | {"run.start_from": "./x/"}, here) == {}
    assert list(differences(here | {"run.start_from": "y"}, here)) == ["run.start_from"]


def test_derived_values(cfg):
    assert (cfg.warmup_steps, cfg.num_streams) == (30, 8)
    cfg.train.steps = 100
    assert cfg.warmup_steps == 10
    cfg.train.warmup_steps = 7
    assert (cfg.warmup_steps, cfg.lr_decay_steps) == (7, 93)
    cfg.train.global_batch = 48
    assert cfg.num_streams == 16
    assert [cfg.micro_batch(ranks) for ranks in (1, 2, 4, 8, 16)] == [8, 8, 6, 6, 3]
    cfg.train.micro_batch = 4
    assert cfg.micro_batch(2) == 4


def test_conditions_name_existing_keys():
    """Otherwise a renamed key would silently drop out of them."""
    files = itertools.product(*((CONFIG_DIR / group).glob("*.yaml") for group in ("backbone", "optimizer")))
    trees = [{path.parent.name: yaml.safe_load(path.read_text()) for path in pair} for pair in files]
    keys = {name: key for tree in trees for name, key in all_keys(tree).items()}
    assert {other for key in keys.values() for other in key.read_if} <= keys.keys()
    assert {key.binds for key in keys.values()} == {None, "weights", "moments", "position"}


def test_compile_needs_a_compiler(cfg, monkeypatch, tmp_path):
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "(gcc or clang), which is not installed. Use compile=false, or set CC" in str(compiler_problem(cfg, "cuda"))
    (tmp_path / "clang").write_text(f'#!/bin/sh\nPATH={path} exec cc "$@"\n')
    (tmp_path / "clang").chmod(0o755)
    assert compiler_problem(cfg, "cuda") is None
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "needs a compiler (no-such-compiler)" in str(compiler_problem(cfg, "cpu"))
    cfg.compile = False
    assert compiler_problem(cfg, "cpu") is None


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """Sets the compiler to a script of these lines; by default, to the system's."""

    def use(lines: str = 'exec cc "$@"') -> None:
        (tmp_path / "compiler").write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / "compiler").chmod(0o755)
        for name in ("CC", "CXX"):
            monkeypatch.setenv(name, str(tmp_path / "compiler"))

    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    use()
    return use


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_compile_needs_a_folder_that_holds_and_loads_libraries(cfg, monkeypatch, tmp_path, compiler, device):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "new"))
    assert compiler_problem(cfg, device) is None and not [*(tmp_path / "new").iterdir()]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    said = str(compiler_problem(cfg, device))
    assert f"kept in {tmp_path}/file: [Errno 17] File exists: '{tmp_path}/file'. Set TORCHINDUCTOR_CACHE" in said
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiler("echo note; echo 'x.c:1: fatal error: error closing x.s: No space left on device' >&2; exit 1")
    assert "x.c:1: fatal error: error closing x.s: No space left on device. Set" in str(compiler_problem(cfg, device))
    compiler('while [ "$1" != -o ]; do shift; done; echo no library > "$2"')  # as in a folder that is mounted noexec
    assert "/empty.so: file too short. Set TORCHINDUCTOR_CACHE_DIR to" in str(compiler_problem(cfg, device))
    compiler("echo 'empty.c:1:10: fatal error: Python.h: No such file or directory' >&2; exit 1")
    assert "needs Python's headers" in str(compiler_problem(cfg, device))
    compiler()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    assert ("Set TRITON_CACHE_DIR" in str(compiler_problem(cfg, device))) == (device == "cuda")


@pytest.mark.parametrize("name", ["a b", "a'b", 'a"b', "a\\b"])
def test_compile_on_a_cpu_needs_folders_without_spaces(cfg, monkeypatch, tmp_path, compiler, name):
    """torch compiles in both: in the temporary folder, even if compiled code is kept elsewhere."""
    rule = f"torch cannot compile in {tmp_path / name} ({{0}}), whose name holds a space, a quote or a backslash"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert rule.format("TMPDIR") in str(compiler_problem(cfg, "cpu"))
    assert compiler_problem(cfg, "cuda") is None
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
    assert rule.format("TORCHINDUCTOR_CACHE_DIR") in str(compiler_problem(cfg, "cpu"))


def test_identity_leaves_out_what_does_not_change_the_result(cfg):
    before = identity(cfg)
    cfg.compile, cfg.device, cfg.run.dir, cfg.train.micro_batch = False, "cpu", "elsewhere", 1
    cfg.log.every, cfg.logger.project, cfg.checkpoint.every = 1, "other", 5
    cfg.profile.steps = 9
    assert identity(cfg) == before
    cfg.backbone.rank = 16
    assert {key for key, value in identity(cfg).items() if before[key] != value} == {"backbone.rank"}


def test_options_are_named_as_their_files_and_quoted():
    """YAML reads a bare on or off as a boolean, and Hydra then crashes."""
    assert list(default_choices()) == [*COMPOSED, "experiment"]
    for path in CONFIG_DIR.rglob("*.yaml"):
        tree = yaml.safe_load(path.read_text())
        for entry in tree.get("defaults", []):
            assert not any(isinstance(v, bool) for v in (entry.values() if isinstance(entry, dict) else [entry])), path
        group = path.parent.name
        if group in COMPOSED and group != "data":
            own = tree["scale"] if group == "scale" else tree
            assert own["view" if group == "logger" else "name"] == path.stem


@dataclass
class Smoothed(adamw.Options):
    smoothing: float = key("a key that is newer than its option's file", 0.5, gt=0)


def test_a_default_of_an_option_needs_no_line_in_its_file(tree):
    tree["optimizer"]["_target_"] = f"{__name__}.Smoothed"
    cfg = parse(tree)
    assert cfg.optimizer.smoothing == 0.5 and to_dict(cfg)["optimizer"]["smoothing"] == 0.5
    assert identity(cfg)["optimizer.smoothing"] == 0.5
    tree["optimizer"]["smoothing"] = 0.25
    assert parse(tree).optimizer.smoothing == 0.25
