"""The configuration without a command line: types, bounds, rules, identity."""

import dataclasses

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import (
    OPEN_GROUPS,
    Config,
    ConfigError,
    Problem,
    compiler_problem,
    identity,
    parse,
    run_name,
    to_dict,
    unused,
    validate,
)
from dlr_pretrain.config.parse import KNOWN
from dlr_pretrain.config.problems import nearest
from dlr_pretrain.config.tree import SECTIONS, Choice


@pytest.fixture(scope="module")
def loaded() -> Config:
    return load(["scale=tiny", "backbone=cola", "data=sample", "logger=jsonl"])


@pytest.fixture
def tree(loaded) -> dict:
    return to_dict(loaded)


@pytest.fixture
def cfg(tree) -> Config:
    return rebuilt(tree)[0]


def rebuilt(tree: dict) -> tuple[Config | None, list[str]]:
    cfg, problems = parse(tree, {group: tree[group] for group in OPEN_GROUPS})
    return cfg, list(map(str, problems))


def broken_rules(cfg: Config, world_size: int = 1) -> list[str]:
    return list(map(str, validate(cfg, world_size)))


def test_every_key_is_documented():
    for section in [Config, *(s for s in SECTIONS.values() if s is not Choice)]:
        for f in dataclasses.fields(section):
            assert f.name in SECTIONS or f.metadata["doc"], f"{section.__name__}.{f.name}"


def test_a_configuration_survives_being_written_and_read(loaded, tree):
    assert rebuilt(tree) == (loaded, [])


@pytest.mark.parametrize(
    ("key", "value", "parsed"),
    [
        ("train.steps", 1e3, 1000),
        ("train.lr", 1, 1.0),
        ("train.clip", None, None),
        ("compile", "off", False),
        ("compile", 1, True),
        ("logger.project", "007", "007"),
    ],
)
def test_values_take_the_type_of_their_key(tree, key, value, parsed):
    *section, leaf = key.split(".")
    (tree[section[0]] if section else tree)[leaf] = value
    cfg, problems = rebuilt(tree)
    assert problems == []
    got = getattr(getattr(cfg, section[0]) if section else cfg, leaf)
    assert got == parsed
    assert type(got) is type(parsed)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("steps", 1.5, "train.steps=1.5: must be a whole number"),
        ("steps", True, "train.steps=true: must be a whole number"),
        ("steps", None, "train.steps=null: must be a whole number"),
        ("steps", 0, "train.steps=0: must be at least 1"),
        ("lr", "fast", "train.lr=fast: must be a number"),
        ("lr", float("nan"), "train.lr=nan: must be a number"),
        ("lr", 0, "train.lr=0: must be greater than 0"),
        ("clip", [1], "train.clip=[1]: must be a number or null"),
        ("init_from", 1000.0, "train.init_from=1000.0: must be text or null. "
         "Quote a number that is meant as text: \"train.init_from='...'\""),
        ("min_lr_ratio", 2, "train.min_lr_ratio=2: must be at most 1"),
        ("accumulate", "fp23", "train.accumulate=fp23: must be one of native, fp32. Did you mean fp32?"),
        ("lrr", 1, "train.lrr=1: no such key. Did you mean train.lr?"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(tree, key, value, problem):
    tree["train"][key] = value
    assert rebuilt(tree) == (None, [problem])


def test_all_problems_are_found_at_once(tree):
    del tree["eval"]["every"]
    tree["train"] |= {"lr": -1, "stepz": 3}
    tree["tokenizer"] = "t5"
    tree["nonsense"] = {"a": 1}
    assert rebuilt(tree)[1] == [
        "train.stepz=3: no such key. Did you mean train.steps?",
        "tokenizer=t5: a section, not a value. Set one of its keys, such as tokenizer.path",
        "nonsense.a=1: no such key. See docs/configuration.md",
        "train.lr=-1: must be greater than 0",
        "eval.every: missing from the configuration",
    ]


def test_knobs_are_those_that_the_option_declares(tree):
    declared = {"backbone": dict(tree["backbone"]), "optimizer": tree["optimizer"]}
    tree["backbone"] |= {"rnk": 3, "rank": "many"}
    _, problems = parse(tree, declared)
    assert list(map(str, problems)) == [
        "backbone.rnk=3: no such key of backbone=cola. Did you mean backbone.rank?",
        "backbone.rank=many: must be a whole number",
    ]


def test_an_unknown_knob_is_an_attribute_error(cfg):
    assert cfg.backbone.rank == 32
    assert not hasattr(cfg.backbone, "gate")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("lr", "train.lr"),
        ("steps", "train.steps"),
        ("train.LR", "train.lr"),
        ("eval.steps", "train.steps"),
        ("scale.hidden", "scale.hidden_size"),
        ("trian.lr", "train.lr"),
        ("evl.packing", "eval.packing"),
        ("scale.steps_", "scale.steps"),
        ("train.foo", None),
        ("xyz", None),
    ],
)
def test_nearest_key(name, near):
    assert nearest(name, KNOWN) == near


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
    cfg.train.lr_decay_steps = 0
    assert cfg.lr_decay_steps == 0
    cfg.train.global_batch = 48
    assert cfg.num_streams == 16
    assert [cfg.micro_batch(ranks) for ranks in (1, 2, 4, 8, 16)] == [8, 8, 6, 6, 3]
    cfg.train.micro_batch = 4
    assert cfg.micro_batch(2) == 4


def test_a_sound_configuration_breaks_no_rule(cfg):
    assert broken_rules(cfg) == broken_rules(cfg, 2) == broken_rules(cfg, 8) == []


@pytest.mark.parametrize(
    ("ranks", "batch", "problem"),
    [
        (2, 7, "train.global_batch=7: must be a multiple of the 2 ranks. Try 6 or 8"),
        (8, 3, "train.global_batch=3: must be a multiple of the 8 ranks. Try 8"),
        (
            6,
            12,
            "data.streams=4: the ranks share the data streams out evenly, so the 6 ranks must divide their number. "
            "Set data.streams=12 before the first start, or start 4 ranks",
        ),
    ],
)
def test_the_batch_must_fit_the_ranks(cfg, ranks, batch, problem):
    cfg.train.global_batch = batch
    assert broken_rules(cfg, ranks) == [problem]


def test_rules_that_span_keys(cfg):
    cfg.train.micro_batch, cfg.train.warmup_steps, cfg.train.stop_after = 3, 300, 301
    cfg.scale.num_heads, cfg.backbone.knobs["rank"] = 5, 129
    cfg.dlr.enabled, cfg.dlr.name, cfg.backbone.knobs["factorized"] = True, "on", False
    assert broken_rules(cfg) == [
        "scale.num_heads=5: must divide scale.hidden_size=128",
        "backbone.rank=129: must lie between 1 and the narrowest layer's width, 128",
        "dlr=on: backbone=cola has no up-projection to carry the residual. "
        "Use dlr=off, or a low-rank backbone such as backbone=cola",
        "train.micro_batch=3: must divide a rank's share of train.global_batch, 8 sequences. Try 2",
        "train.warmup_steps=300: must be below train.steps=300",
        "train.stop_after=301: must not exceed train.steps=300",
    ]


def test_a_mask_between_documents_needs_several_in_a_sequence(cfg):
    cfg.data.mask_documents = True
    assert broken_rules(cfg) == []
    cfg.data.packing = "pad"
    assert broken_rules(cfg) == [
        "data.mask_documents=true: does nothing where data.packing=pad: a sequence is one document. "
        "Leave it out, or use data.packing=packed"
    ]


def test_heads_of_odd_width_are_refused(cfg):
    cfg.scale.num_heads = 128
    assert broken_rules(cfg) == ["scale.num_heads=128: rotary embeddings need heads of even width"]


def test_files_must_exist(cfg, tmp_path):
    (tmp_path / "c4-train.00000.json.gz").touch()
    cfg.data.source, cfg.data.root = "c4_local", str(tmp_path)
    cfg.data.train_files, cfg.data.validation_files = "c4-train.*.json.gz", "c4-validation.*.json.gz"
    cfg.tokenizer.path = str(tmp_path / "none")
    cfg.run.dir = str(tmp_path / "c4-train.00000.json.gz")
    assert broken_rules(cfg) == [
        f"data.validation_files=c4-validation.*.json.gz: no file matches {tmp_path}/c4-validation.*.json.gz",
        f"tokenizer.path={tmp_path}/none: no such file. Name a tokenizer.json, a sentencepiece model such as "
        "spiece.model, or a folder that holds one",
        f"run.dir={cfg.run.dir}: is a file, not a folder",
    ]
    cfg.data.validation_files, cfg.data.root, cfg.tokenizer.path, cfg.run.dir = "/nowhere/*", "/nowhere", None, None
    assert broken_rules(cfg) == ["data.root=/nowhere: no such folder. Set data.root=<folder of the shards>"]


def test_the_root_of_the_shards_is_no_glob(cfg, tmp_path):
    cfg.data.source, cfg.data.root, cfg.data.validation_files = "c4_local", str(tmp_path / "[one]"), "**/*.gz"
    cfg.data.train_files = "*.gz"
    (tmp_path / "[one]").mkdir()
    (tmp_path / "[one]" / "a.gz").touch()
    assert broken_rules(cfg) == []


def test_shards_need_a_root_unless_their_globs_are_absolute(cfg, tmp_path):
    (tmp_path / "a.json.gz").touch()
    cfg.data.source = "c4_local"
    cfg.data.train_files = cfg.data.validation_files = str(tmp_path / "*.json.gz")
    assert broken_rules(cfg) == []
    cfg.data.train_files = "*.json.gz"
    assert broken_rules(cfg) == [
        "data.root=null: needed by data=c4_local: the folder of c4-train.*.json.gz and c4-validation.*.json.gz. "
        "Set data.root=<folder>, or use data=sample"
    ]


def test_compile_needs_a_compiler_on_a_cpu(cfg, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert broken_rules(cfg) == []  # device=auto: the trainer asks again
    assert compiler_problem(cfg, "auto") is None
    assert str(compiler_problem(cfg, "cpu")) == (
        "compile=true: needs a C++ compiler on a CPU, and there is no no-such-compiler. "
        "Use compile=false, or set CXX to a compiler"
    )
    cfg.compile = False
    assert compiler_problem(cfg, "cpu") is None


def test_compile_needs_a_c_compiler_and_pythons_headers_on_a_gpu(cfg, monkeypatch, tmp_path):
    """Of them Triton makes what launches its kernels: without, the first step fails."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert str(compiler_problem(cfg, "cuda")) == (
        "compile=true: needs a C compiler on a GPU, and there is no gcc or clang. "
        "Use compile=false, or set CC to a compiler"
    )
    (tmp_path / "clang").touch(mode=0o755)
    monkeypatch.setattr("sysconfig.get_paths", lambda **_: {"include": f"{tmp_path}/include"})
    rule = f"compile=true: needs Python.h on a GPU, and {tmp_path}/include has none. Use compile=false, or install "
    assert str(compiler_problem(cfg, "cuda")).startswith(rule)
    assert broken_rules(cfg) == []  # device=auto: the trainer asks again
    cfg.device = "cuda"
    assert broken_rules(cfg)[0].startswith(rule)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "Python.h").touch()
    with monkeypatch.context() as patched:
        patched.setenv("CPATH", f"/nowhere:{tmp_path}/given")
        assert compiler_problem(cfg, "cuda") is None
    (tmp_path / "given").rename(tmp_path / "include")
    assert compiler_problem(cfg, "cuda") is None
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "there is no no-such-compiler" in str(compiler_problem(cfg, "cuda"))
    cfg.compile = False
    assert compiler_problem(cfg, "cuda") is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dlr.alpha"}, "dlr.alpha=1.0: would be ignored: dlr=off. Leave it out"),
        ({"logger.project"}, "logger.project=null: would be ignored: logger=jsonl. Leave it out"),
        ({"scale.lr", "train.lr"}, "scale.lr=0.005: would be ignored: train.lr is given. Leave it out"),
        ({"data.dataset"}, "data.dataset=null: would be ignored: data=sample. Leave it out"),
    ],
)
def test_a_given_value_that_nothing_reads_is_refused(cfg, given, why):
    assert list(map(str, unused(cfg, given))) == [why]


def test_values_that_are_read_are_not_called_unused(cfg):
    assert unused(cfg, {"scale.lr", "scale.rank", "train.lrdata.root", "scale.steps", "train.steps"}) == []


def test_identity_leaves_out_what_does_not_change_the_mathematics(cfg):
    before = identity(cfg)
    cfg.compile, cfg.device, cfg.run.dir, cfg.train.micro_batch = False, "cpu", "elsewhere", 1
    cfg.log.every, cfg.logger.project, cfg.checkpoint.every = 1, "other", 5
    assert identity(cfg) == before
    cfg.backbone.knobs["rank"] = 16
    assert {key for key, value in identity(cfg).items() if before[key] != value} == {"backbone.rank"}


def test_run_names():
    choices = {"scale": "1b", "backbone": "cola", "dlr": "on", "optimizer": "adamw", "data": "c4", "experiment": None}
    defaults = {"scale": "60m", "optimizer": "adamw", "data": "c4"}
    assert run_name(choices, defaults, 42, {}) == "1b-cola-dlr_on-s42"
    assert run_name(choices, defaults, 7, {"seed": 7}) == "1b-cola-dlr_on-s7"
    other = {**choices, "optimizer": "muon", "experiment": "paper/table1"}
    assert run_name(other, defaults, 42, {}) == "1b-cola-dlr_on-muon-table1-s42"
    name = run_name(choices, defaults, 42, {"train.lr": 0.001, "train.steps": 5})
    assert name == run_name(choices, defaults, 42, {"train.steps": 5, "train.lr": 1e-3})
    assert name == "1b-cola-dlr_on-s42-5fe206a6"  # stable between versions: a resumed run must find its directory
