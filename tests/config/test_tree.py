"""The keys of a run: types, bounds, rules that span keys, identity, and the page that documents them."""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import yaml

from dlr_pretrain.analysis import runs
from dlr_pretrain.analysis.tune import FINGERPRINTS, MEASURE
from dlr_pretrain.cli import load
from dlr_pretrain.config import (
    CONFIG_DIR,
    GROUPS,
    Config,
    ConfigError,
    Problem,
    compiler_problem,
    identity,
    parse,
    to_dict,
    validate,
)
from dlr_pretrain.config.compose import default_choices
from dlr_pretrain.config.document import page
from dlr_pretrain.config.identity import ORIGIN
from dlr_pretrain.config.knobs import OPTIONS
from dlr_pretrain.config.parse import all_keys
from dlr_pretrain.config.problems import FOREIGN, SYNONYMS, nearest
from dlr_pretrain.config.rules import probed
from dlr_pretrain.config.tree import KEYS
from dlr_pretrain.deploy import card
from dlr_pretrain.train import start
from tests.conftest import ROOT

OPTION_FILES = {group: sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")) for group in GROUPS}
COMPOSED = [group for group in GROUPS if group != "experiment"]


@pytest.fixture(scope="module")
def loaded() -> Config:
    return load(["scale=tiny", "backbone=cola", "data=sample", "logger=jsonl"])


@pytest.fixture
def tree(loaded) -> dict:
    return to_dict(loaded)


@pytest.fixture
def cfg(tree) -> Config:
    cfg, _ = parse(tree)
    return cfg


def problems_of(tree: dict) -> list[str]:
    return list(map(str, parse(tree)[1]))


def broken_rules(cfg: Config, world_size: int = 1) -> list[str]:
    return list(map(str, validate(cfg, world_size)))


def refusal(*words: str) -> list[str]:
    """The problems of a command line."""
    scale = [] if any(word.startswith("scale=") for word in words) else ["scale=tiny"]
    with pytest.raises(ConfigError) as caught:
        load([*scale, "data=sample", "logger=jsonl", *words])
    return list(map(str, caught.value.problems))


def test_the_page_of_keys_is_that_of_the_code():
    command = "python -m dlr_pretrain.config.document > docs/configuration.md"
    assert (ROOT / "docs/configuration.md").read_text() == page(), f"run {command}"


def test_a_configuration_survives_being_written_and_read(loaded, tree):
    assert parse(tree) == (loaded, [])


# ---------------------------------------------------------------------------------------------------- one key


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("train.steps", 1e3, 1000),
        ("train.lr", 1, 1.0),
        ("train.clip", None, None),
        ("train.micro_batch", "auto", "auto"),
        ("compile", "off", False),
        ("compile", 1, True),
        ("logger.project", "007", "007"),
        ("logger.tags", "one", ["one"]),
    ],
)
def test_values_take_the_type_of_their_key(tree, key, value, parsed):
    *section, leaf = key.split(".")
    (tree[section[0]] if section else tree)[leaf] = value
    cfg, problems = parse(tree)
    assert problems == []
    got = getattr(getattr(cfg, section[0]) if section else cfg, leaf)
    assert got == parsed and type(got) is type(parsed)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("steps", 1.5, "train.steps=1.5: must be a whole number"),
        ("steps", True, "train.steps=true: must be a whole number"),
        ("steps", None, "train.steps=null: must be a whole number"),
        ("steps", 0, "train.steps=0: must be at least 1"),
        ("lr", float("nan"), "train.lr=nan: must be a number"),
        ("lr", 0, "train.lr=0: must be greater than 0"),
        ("clip", [1], "train.clip=[1]: must be a number or null"),
        ("micro_batch", "many", "train.micro_batch=many: must be a whole number or auto or null"),
        ("run.start_from", 1000.0, "run.start_from=1000.0: must be text or null. "
         "Quote a number that is meant as text: \"run.start_from='...'\""),
        ("min_lr_ratio", 2, "train.min_lr_ratio=2: must be at most 1"),
        ("warmup_ratio", 1, "train.warmup_ratio=1: must be below 1"),
        ("accumulate", "fp23", "train.accumulate=fp23: must be one of native, fp32. Did you mean fp32?"),
        ("lrr", 1, "train.lrr=1: no such key. Did you mean train.lr?"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(tree, key, value, problem):
    section, _, name = key.rpartition(".")
    tree[section or "train"][name] = value
    assert parse(tree)[0] is None and problems_of(tree) == [problem]


def test_all_problems_are_found_at_once(tree):
    del tree["scale"]["rank"], tree["eval"]["every"]  # which has a default
    tree["train"] |= {"lr": -1, "stepz": 3}
    tree["backbone"] |= {"rnk": 3, "rank": "many"}
    tree["tokenizer"] = "t5"
    tree["nonsense"] = {"a": 1}
    assert problems_of(tree) == [
        "backbone.rnk=3: no such key of backbone=cola. Did you mean backbone.rank?",
        "train.stepz=3: no such key. Did you mean train.steps?",
        "tokenizer=t5: a section, not a value. Set one of its keys, such as tokenizer.path",
        "nonsense.a=1: no such key. See docs/configuration.md",
        "scale.rank: needs a value. Set scale.rank=<value>",
        "train.lr=-1: must be greater than 0",
        "backbone.rank=many: must be a whole number",
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lr", "train.lr"),
        ("train.LR", "train.lr"),
        ("eval.steps", "train.steps"),
        ("scale.hidden", "scale.hidden_size"),
        ("trian.lr", "train.lr"),
        ("optimizer.lr", "train.lr"),
        ("train.seed", "seed"),
        ("train.weight_decay", "optimizer.weight_decay"),
        ("data.path", "data.root"),
        ("train.max_grad_norm", "train.clip"),
        ("output_dir", "run.dir"),
        ("train.foo", None),
        ("xyz", None),
    ],
)
def test_nearest_key(name, near):
    assert nearest(name, all_keys({"backbone": {"name": "cola"}, "optimizer": {"name": "adamw"}})) == near


def test_what_users_of_other_trainers_type_leads_to_keys_that_there_are():
    known = {*GROUPS, *all_keys({"backbone": {"name": "cola"}, "optimizer": {"name": "adamw"}})}
    assert set(FOREIGN) <= known and not set(SYNONYMS) & known
    assert len(SYNONYMS) > 70
    for name, key in SYNONYMS.items():
        assert nearest(name if "." in name else f"train.{name}", known) == key


def test_numbers_of_the_environment_are_numbers(monkeypatch):
    monkeypatch.setenv("MY_LR", "1e-3")
    assert load(["scale=tiny", "data=sample", "logger=jsonl", "train.lr=${oc.env:MY_LR}"]).train.lr == 1e-3


def test_one_problem_is_one_line_and_several_are_a_list():
    one, two = Problem("train.lr", 0, "must be greater than 0"), Problem("compile", None, "must be true or false")
    assert str(ConfigError([one])) == "train.lr=0: must be greater than 0"
    both = "2 problems\n  train.lr=0: must be greater than 0\n  compile=null: must be true or false"
    assert str(ConfigError([one, two, one])) == both


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


def test_lists_of_keys_elsewhere_name_keys_that_there_are():
    """Of a key that is renamed, they would say nothing."""
    knobs = {name for g, of in OPTIONS.items() for o in of for name in all_keys({g: {"name": o}})}
    known = {*KEYS, *knobs, *FINGERPRINTS, *GROUPS}
    lists = [*map(".".join, card.PATHS), *start.MODEL, *start.DATA, *start.RATES, *ORIGIN, *runs.TEXT, *MEASURE]
    assert [entry for entry in lists if not any(key.startswith(entry) for key in known)] == []


# ---------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("ranks", "batch", "problem"),
    [
        (2, 7, "train.global_batch=7: must be a multiple of the 2 ranks. Try 6 or 8"),
        (8, 3, "train.global_batch=3: must be a multiple of the 8 ranks. Try 8"),
        (6, 12, "data.streams=4: the ranks share the data streams out evenly, so the 6 ranks must divide their "
         "number. Set data.streams=12 before the first start, or start 4 ranks"),
    ],
)  # fmt: skip
def test_the_batch_must_fit_the_ranks(cfg, ranks, batch, problem):
    cfg.train.global_batch = batch
    assert broken_rules(cfg, ranks) == [problem]


def test_broken_rules_are_told_together(cfg):
    cfg.train.micro_batch, cfg.train.warmup_steps, cfg.scale.num_heads, cfg.backbone.knobs["rank"] = 3, 300, 5, 129
    keys = ["scale.num_heads", "backbone.rank", "train.warmup_steps", "train.micro_batch"]
    assert [problem.partition("=")[0] for problem in broken_rules(cfg)] == keys


def test_files_must_exist(cfg, tmp_path):
    (tmp_path / "[one]").mkdir()  # no glob
    (tmp_path / "[one]" / "c4-train.00000.json.gz").touch()
    cfg.data.source, cfg.data.root = "c4_local", str(tmp_path / "[one]")
    cfg.data.train_files, cfg.data.validation_files = "c4-train.*.json.gz", "c4-validation.*.json.gz"
    cfg.tokenizer.path = str(tmp_path / "none")
    found = broken_rules(cfg)
    keys = [f"tokenizer.path={tmp_path}/none", "data.validation_files=c4-validation.*.json.gz"]
    assert [problem.split(":")[0] for problem in found] == keys
    cfg.data.root, cfg.tokenizer.path = "/nowhere", None
    assert broken_rules(cfg) == ["data.root=/nowhere: no such folder. Set data.root=<folder of the shards>"]
    cfg.data.root = None
    assert [problem.partition(":")[0] for problem in broken_rules(cfg)] == ["data.root=null"]


def test_compile_needs_a_compiler(cfg, monkeypatch, tmp_path):
    """Without a compiler and Python's headers the first step would fail, on a CPU by inductor, on a GPU by Triton."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert broken_rules(cfg) == []  # device=auto: the trainer asks again
    assert "no-such-compiler. Use compile=false, or set CXX to a compiler" in str(compiler_problem(cfg, "cpu"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no gcc or clang" in str(compiler_problem(cfg, "cuda"))
    (tmp_path / "clang").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_paths", lambda **_: {"include": f"{tmp_path}/include"})
    cfg.device = "cuda"
    assert f"needs Python.h on a GPU, and {tmp_path}/include has none" in broken_rules(cfg)[0]
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "Python.h").touch()
    monkeypatch.setenv("CPATH", f"/nowhere:{tmp_path}/given")
    assert compiler_problem(cfg, "cuda") is None
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "there is no no-such-compiler" in str(compiler_problem(cfg, "cuda"))
    cfg.compile = False
    assert compiler_problem(cfg, "cuda") is None


REFUSED = {  # what cannot be, or would be ignored, and what the one line about it names
    "optimizer=galore": ["optimizer=galore", "backbone=lowrank", "Use backbone=full"],
    "optimizer=loro backbone=cola dlr=on": ["optimizer=loro", "backbone=cola", "Use backbone=lowrank"],
    "optimizer=loro dlr=on": ["optimizer=loro", "not the (B + beta R^T) A^T", "Use dlr=off"],
    "optimizer=loro optimizer.exact_every=301": ["optimizer.exact_every=301", "train.steps=300"],
    "optimizer=loro optimizer.restart_warmup=50": ["optimizer.restart_warmup=50", "optimizer.exact_every=50"],
    "optimizer=loro optimizer.shift=30": [
        "optimizer.shift=30",
        "null or a multiple of optimizer.exact_every=50",
        "270",
    ],
    "optimizer=loro scale=350m optimizer.shift=0.5": ["optimizer.shift=0.5: must be a whole number or null"],
    "optimizer=loro optimizer.schedule=cosine optimizer.shift=3": ["optimizer.shift=3: would be ignored"],
    "optimizer=loro optimizer.eps=0": ["optimizer.eps=0: must be greater than 0"],
    "optimizer=loro train.lr_decay=linear": ["train.lr_decay=linear: would be ignored: optimizer.schedule=loro"],
    "optimizer=galore backbone=full optimizer.rank=129": ["optimizer.rank=129", "between 1 and", "128"],
    "optimizer=galore backbone=full optimizer.rank=16 scale.rank=8": ["scale.rank=8: would be ignored"],
    "optimizer=muon optimizer.nesterov=false": ["optimizer.nesterov=false", "precision=bf16_mixed"],
    "optimizer=muon precision=bf16_sr": ["precision=bf16_sr: optimizer=muon", "Use optimizer=adamw"],
    "optimizer=muon parallel=fsdp": ["optimizer=muon", "Use parallel=ddp"],
    "optimizer=muon optimizer.momentum=1": ["optimizer.momentum=1: must be below 1"],
    "backbone=cola dlr=init_offset_decay": ["dlr.mode=decayed_offset", "Use precision=bf16_mixed"],
    "backbone=cola dlr=init_offset_decay precision=fp32 optimizer.weight_decay=0": ["dlr.mode=decayed_offset", "decay"],
    "dlr=init_offset dlr.train_b=false": ["dlr.mode=offset", "Use dlr.mode=residual"],
    "dlr=no_b dlr.learn_alpha=true": ["dlr.learn_alpha=true", "dlr.train_b=false"],
    "dlr=no_b backbone.b_gain=2": ["backbone.b_gain=2.0: would be ignored: dlr.train_b=false. Leave it out"],
    "backbone=relora backbone.merge_every=300": ["backbone.merge_every=300", "train.steps=300", "Use backbone=lora"],
    "backbone=relora backbone.merge_every=10": ["backbone.restart_warmup=10", "backbone.merge_every=10"],
    "probe=on": ["probe=on", "dlr=off lacks", "Use dlr=on"],
    "dlr=no_b probe=on": ["probe=on", "dlr=no_b lacks"],
    "dlr=on probe=on parallel=fsdp": ["probe=on", "Use parallel=ddp"],
    "dlr=on probe=on probe.layers=0.self_atn.q_proj": ["probe.layers=0.self_atn.q_proj", "0.self_attn.q_proj"],
    "profile=on train.stop_after=3": ["profile.start=20", "within the 3 steps"],
    "run.start_optimizer=true": ["run.start_optimizer=true", "set run.start_from"],
    "train.lr_decay_steps=271": ["train.lr_decay_steps=271", "from 2 to 270"],
    "train.lr_decay_steps=1": ["train.lr_decay_steps=1", "must be 0, or from 2"],
    "train.warmup_steps=300": ["train.warmup_steps=300", "below train.steps=300"],
    "train.micro_batch=3": ["train.micro_batch=3", "share of train.global_batch, 8 sequences. Try 2"],
    "train.micro_batch=1 scale.micro_batch=4": ["scale.micro_batch=4: would be ignored: train.micro_batch=1"],
    "train.warmup_steps=9 train.warmup_ratio=0.2": ["train.warmup_ratio=0.2: would be ignored: train.warmup_steps=9"],
    "checkpoint.keep_every=250": ["checkpoint.keep_every=250", "checkpoint.every=100. Try 200"],
    "data.held_out=0.1": ["data.held_out=0.1: would be ignored: data=sample. Leave it out"],
    "data.packing=pad data.mask_documents=true": ["data.mask_documents=true: would be ignored: data.packing=pad"],
    "data.streams=3": ["data.streams=3: must divide train.global_batch=8. Try 2"],
    "backbone=full optimizer.b_lr=2": ["optimizer.b_lr=2.0: would be ignored: backbone=full"],
    "backbone=full scale.rank=3": ["scale.rank=3: would be ignored: backbone=full has no rank"],
    "backbone=full dlr=on": ["dlr=on: backbone=full has no up-projection", "Use dlr=off"],
    "backbone=full train.activation_checkpointing=latent": ["train.activation_checkpointing=latent", "Use block"],
    "backbone.rank=4 scale.rank=3": ["scale.rank=3: would be ignored: backbone.rank is given"],
    "backbone.rank=129": ["backbone.rank=129", "narrowest layer's width, 128"],
    "backbone.learn_latent_scale=true backbone.latent_scale=2": ["backbone.latent_scale=2.0: would be ignored"],
    "precision=bf16 parallel=fsdp train.accumulate=fp32": ["train.accumulate=fp32", "Use precision=bf16_mixed"],
    "scale.num_heads=5": ["scale.num_heads=5: must divide scale.hidden_size=128"],
    "run.dir=README.md": ["run.dir=README.md: is a file"],
    "data=local data.root=README.md": ["data.root=README.md: is a file", "Set data.train_files=README.md"],
    "data=local": ["data.root=null", "Set data.root=<folder>"],
    "tokenizer.path=gpt2": ["tokenizer.path=gpt2: no such file", "tokenizer.hub=gpt2"],
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_or_would_be_ignored_is_refused(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    (found,) = refusal(*line.split())
    assert [named for named in REFUSED[line] if named not in found] == [], found


@pytest.mark.parametrize(
    "words",
    [
        ("optimizer=adamw", "backbone=lora", "optimizer.b_lr=16"),
        ("optimizer=fira", "backbone=full", "scale.rank=128"),
        ("optimizer=loro", "backbone=lowrank", "optimizer.exact_every=90", "optimizer.shift=270"),
        ("backbone=cola", "dlr=init_offset_decay", "precision=bf16_mixed", "optimizer.weight_decay=0.001"),
        ("optimizer=muon", "backbone=cola", "dlr=on", "optimizer.nesterov=false", "precision=bf16_mixed"),
        ("optimizer=adamw_8bit", "backbone=cola", "dlr=learnable_alpha", "precision=bf16_sr", "parallel=fsdp"),
    ],
)
def test_what_can_be_is_accepted(words):
    load(["scale=tiny", "data=sample", "logger=jsonl", *words])


def test_packages_are_asked_for(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else real(name))
    (found,) = refusal("optimizer=adamw_8bit")
    assert "needs the package torchao" in found and "use optimizer=adamw" in found


def test_the_probe_looks_at_the_papers_projections_or_those_that_are_named():
    def loaded(*words: str) -> Config:
        return load(["scale=350m", "backbone=cola", "data=sample", "logger=jsonl", *words], machine=False)

    assert probed(loaded("dlr=on", "probe=on")) == ["0.self_attn.q_proj", "11.mlp.up_proj", "23.mlp.up_proj"]
    assert probed(loaded("dlr=attention", "probe=on")) == ["0.self_attn.q_proj"]
    named = probed(loaded("dlr=on", "probe=on", "probe.layers=0.self_attn.q_proj 23.mlp.*"))
    assert named == ["0.self_attn.q_proj", "23.mlp.gate_proj", "23.mlp.up_proj", "23.mlp.down_proj"]


def test_identity_leaves_out_what_does_not_change_the_mathematics(cfg):
    before = identity(cfg)
    cfg.compile, cfg.device, cfg.run.dir, cfg.train.micro_batch = False, "cpu", "elsewhere", 1
    cfg.log.every, cfg.logger.project, cfg.checkpoint.every = 1, "other", 5
    cfg.probe.enabled, cfg.profile.steps = True, 9
    assert identity(cfg) == before
    cfg.backbone.knobs["rank"] = 16
    assert {key for key, value in identity(cfg).items() if before[key] != value} == {"backbone.rank"}


# ---------------------------------------------------------------------------------------------------- files


def test_every_option_is_named_as_its_file_and_quotes_its_switches():
    """YAML reads a bare on or off as a boolean, and Hydra then crashes."""
    assert list(default_choices()) == [*COMPOSED, "experiment"]
    for path in CONFIG_DIR.rglob("*.yaml"):
        tree = yaml.safe_load(path.read_text())
        for entry in tree.get("defaults", []):
            assert not any(isinstance(v, bool) for v in (entry.values() if isinstance(entry, dict) else [entry])), path
        group = path.parent.name
        if group in COMPOSED and group not in OPTIONS:
            own = tree["scale"] if group == "scale" else tree
            assert own[{"data": "source", "logger": "view"}.get(group, "name")] == path.stem
    assert {group: sorted(of) for group, of in OPTIONS.items()} == {group: OPTION_FILES[group] for group in OPTIONS}


@pytest.mark.full
def test_every_shape_composes():
    """Knobs of a backbone follow from the scale: their whole product, and the options of dlr in turn."""
    shapes = itertools.product(OPTION_FILES["scale"], OPTION_FILES["backbone"])
    for (scale, backbone), dlr in zip(shapes, itertools.cycle(OPTION_FILES["dlr"]), strict=False):
        carries = all_keys({"backbone": {"name": backbone}})["backbone.factorized"].default
        words = [f"dlr={dlr}"] if carries else []
        words += ["precision=fp32"] if dlr == "init_offset_decay" else []
        cfg = load([f"scale={scale}", f"backbone={backbone}", *words, "data=sample", "logger=jsonl"], machine=False)
        assert (cfg.scale.name, cfg.backbone.name) == (scale, backbone)
        assert cfg.run.dir.startswith(f"runs/{scale}-{backbone}-dlr_{dlr if carries else 'off'}-sample-")
