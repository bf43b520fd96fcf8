"""What a command line means, and what it is told when it means nothing."""

import sys

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import CONFIG_DIR, Config, ConfigError
from dlr_pretrain.config.arguments import read
from dlr_pretrain.config.composition import check
from dlr_pretrain.util.errors import UserError

SMALL = ["scale=tiny", "data=sample", "logger=jsonl"]


def options(group: str) -> str:
    return ", ".join(sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")))


def configs(*argv: str, ranks: int = 1) -> list[Config]:
    return check(read(list(argv)), ranks)


def config(*argv: str, ranks: int = 1) -> Config:
    (cfg,) = configs(*argv, ranks=ranks)
    return cfg


def problems(*argv: str, ranks: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        configs(*argv, ranks=ranks)
    return list(dict.fromkeys(map(str, refused.value.problems)))


@pytest.fixture
def own(tmp_path):
    """A folder of options and recipes of one's own, for --config-dir."""
    files = {
        "backbone/gated.yaml": 'defaults: [lowrank]\nname: gated\ngate: 0.5\nactivation: "silu"\n',
        "scale/3b.yaml": "defaults: [1b]\nname: 3b\nnum_layers: 36\n",
        "experiment/mine/grid.yaml": "# @package _global_\n"
        "defaults:\n  - override /scale: 1b\n  - override /backbone: cola\n"
        '  - override /dlr: "on"\n  - override /logger: jsonl\ntrain: {lr: 0.5}\n',
        "experiment/unquoted.yaml": "# @package _global_\ndefaults:\n  - override /dlr: on\n",
        "experiment/typo.yaml": "# @package _global_\ntrain: {lrr: 0.5}\nbackbone: {rnk: 3}\n",
        "experiment/lost.yaml": "# @package _global_\ndefaults:\n  - override /scale: 9b\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return f"--config-dir={tmp_path}"


# ---------------------------------------------------------------------------------------------------- the same meaning


def test_defaults():
    cfg = config()
    chosen = [cfg.scale.name, cfg.backbone.name, cfg.dlr.name, cfg.optimizer.name, cfg.data.source, cfg.precision.name]
    assert chosen == ["60m", "lowrank", "off", "adamw", "c4", "bf16"]
    assert (cfg.parallel.name, cfg.logger.view, cfg.compile, cfg.seed) == ("ddp", "wandb", True, 42)
    assert (cfg.train.lr, cfg.train.steps, cfg.backbone.rank, cfg.optimizer.eps) == (0.01, 11_000, 128, 1e-8)
    assert cfg.run.dir == "runs/60m-lowrank-dlr_off-s42"


@pytest.mark.parametrize(
    "argv",
    [
        ["+scale=1b", "+backbone=cola", "+dlr=on", "+train.lr=0.001"],
        ["++scale=1b", "++backbone=cola", "dlr=true", "++train.lr=1e-3"],
        ["train.lr=0.0010", "dlr=True", "backbone=cola", "scale=1b"],
        ["scale = 1b", "dlr=yes", "+backbone=cola", "train={lr: 1e-3}", "probe=no", "profile=false"],
    ],
)
def test_spelling_and_order_do_not_matter(argv):
    assert config(*argv) == config("scale=1b", "backbone=cola", "dlr=on", "train.lr=1e-3")


def test_a_mapping_is_a_word_for_each_of_its_keys():
    words = ["dlr=on", "dlr={alpha: 2, scope: mlp}", "++train={steps: 300, init_from: null}", "log={every: 3}"]
    words += ["logger={project: 'a, b{c}'}", "run={dir: /x\\ y}", "scale={rank: 3}"]
    same = ["dlr=on", "dlr.alpha=2", "dlr.scope=mlp", "train.steps=300", "train.init_from=null", "log.every=3"]
    same += ["logger.project='a, b{c}'", "run.dir='/x y'", "scale.rank=3"]
    assert config(*SMALL[:1], *words) == config(*SMALL[:1], *same)


def test_a_key_in_a_mapping_and_by_itself_is_given_twice():
    assert problems(*SMALL, "train={lr: 1e-3}", "train.lr=2e-3") == [
        "train.lr=2e-3: given twice, first as train.lr=0.001. Keep one"
    ]


@pytest.mark.parametrize("off", ["off", "false", "False", "no", "null", "0", "'off'"])
def test_dlr_can_be_switched_off_in_any_way(off):
    assert not config(*SMALL, f"dlr={off}").dlr.enabled


def test_overrides_that_change_no_mathematics_keep_the_run_directory():
    name = config(*SMALL).run.dir
    idle = ["run.root=runs", "log.every=1", "train.micro_batch=2", "compile=false", "device=cpu", "train.stop_after=5"]
    assert config(*SMALL, *idle, "train.steps=300").run.dir == name
    assert config(*SMALL, "train.steps=301").run.dir.startswith(f"{name}-")
    assert config(*SMALL, "run.root=/elsewhere").run.dir == name.replace("runs", "/elsewhere")
    assert config(*SMALL, "run.dir=mine").run.dir == "mine"


def test_the_hash_of_a_run_directory_is_stable():
    assert config("scale=1b", "train.lr=1e-3", "seed=7").run.dir == "runs/1b-lowrank-dlr_off-s7-590ae857"


# ---------------------------------------------------------------------------------------------------- one's own options


def test_an_option_in_another_folder(own):
    cfg = config(own, *SMALL, "backbone=gated", "backbone.gate=1")
    assert cfg.backbone.knobs == config(*SMALL).backbone.knobs | {"gate": 1.0, "activation": "silu"}
    assert problems(own, *SMALL, "backbone=gated", "backbone.gat=1") == [
        "backbone.gat=1: no such key of backbone=gated. Did you mean backbone.gate?"
    ]
    assert config(own, "scale=3b").scale.num_layers == 36
    assert config(f"hydra.searchpath=[{own.removeprefix('--config-dir=')}]", "scale=3b").scale.name == "3b"


def test_a_recipe_chooses_and_the_command_line_wins(own):
    cfg = config(own, "+experiment=mine/grid")
    assert (cfg.scale.name, cfg.backbone.name, cfg.dlr.enabled, cfg.train.lr) == ("1b", "cola", True, 0.5)
    assert cfg.run.dir.startswith("runs/1b-cola-dlr_on-grid-s42-")
    cfg = config(own, "+scale=350m", "experiment=mine/grid", "train.lr=0.25")
    assert (cfg.scale.name, cfg.backbone.name, cfg.train.lr) == ("350m", "cola", 0.25)
    assert config("experiment=null") == config()


def test_mistakes_in_a_recipe(own):
    assert problems(own, "experiment=typo") == [
        "train.lrr=0.5: no such key. Did you mean train.lr?",
        "backbone.rnk=3: no such key of backbone=lowrank. Did you mean backbone.rank?",
    ]
    assert problems(own, "experiment=unquoted") == [
        "configuration: Unsupported item value in defaults : bool. Supported: string or list. "
        'Quote "on" and "off" in defaults lists: YAML reads them as booleans'
    ]
    assert problems(own, "experiment=lost") == [
        "configuration: In 'train': Could not find 'scale/9b' Available options in 'scale': 130m 1b 350m 3b 60m 7b tiny"
    ]
    assert problems(own, "experiment=grid") == [
        "experiment=grid: must be one of evidence_60m, evidence_cpu, lost, paper, typo, unquoted, "
        "mine/..., table1/.... "
        "Did you mean mine/grid?"
    ]
    assert problems(own, "experiment=mine") == ["experiment=mine: must be one of mine/grid. Did you mean mine/grid?"]
    assert problems("--config-dir=/nowhere") == ["--config-dir=/nowhere: no such folder"]


# ---------------------------------------------------------------------------------------------------- mistakes


HOME = "{0}=~{1}: ~ is expanded only by the shell, and only at the start of a word. Write {0}=$HOME{1}"


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("+scal=1b", "scal=1b: no such key. Did you mean scale=1b?"),
        ("+backbone=colla", f"backbone=colla: must be one of {options('backbone')}. Did you mean cola?"),
        ("scale=9z", "scale=9z: must be one of 130m, 1b, 350m, 60m, 7b, tiny"),
        ("dlr=maybe", f"dlr=maybe: must be one of {options('dlr')}"),
        ("logger=null", "logger=null: must be one of jsonl, tensorboard, wandb"),
        ("scale=[1b,7b]", "scale=[1b,7b]: must be one of 130m, 1b, 350m, 60m, 7b, tiny"),
        ("experiment=x", "experiment=x: must be one of evidence_60m, evidence_cpu, paper, table1/..."),
        ("train.lrr=1", "train.lrr=1: no such key. Did you mean train.lr?"),
        ("+train.lrr=1", "train.lrr=1: no such key. Did you mean train.lr?"),
        ("lr=1", "lr=1: no such key. Did you mean train.lr?"),
        ("train.lr.peak=1", "train.lr.peak=1: train.lr is a value, not a section. Write train.lr=<value>"),
        ("train=5", "train=5: a section, not a value. Set one of its keys, such as train.steps"),
        ("train={lrr: 1}", "train.lrr=1: no such key. Did you mean train.lr?"),
        ("data={rot: /x}", "data.rot=/x: no such key. Did you mean data.root?"),
        ("dlr={alhpa: 2}", "dlr.alhpa=2: no such key. Did you mean dlr.alpha?"),
        ("+trian={lr: 1}", "trian.lr=1: no such key. Did you mean train.lr?"),
        ("train={optim.lr: 1}", "train.optim.lr=1: no such key. Did you mean train.lr?"),
        ("train={max_skipped: 9}", "train.max_skipped=9: would be ignored: train.on_nonfinite=stop. Leave it out"),
        ("train={min_lr_ratio: {a: 1}}",
         "train.min_lr_ratio.a=1: train.min_lr_ratio is a value, not a section. Write train.min_lr_ratio=<value>"),
        ("dlr={enabled: false}",
         "dlr.enabled=False: says what the option is, and its file sets it. Choose another option: dlr=<option>"),
        ("dlr={alpha: choice(1,2)}",
         "dlr={alpha: choice(1,2)}: a sweep has plain values. Sweep over a key of it: dlr.<key>=<value>,<value>"),
        ("train={lr: 1},{lr: 2}",
         "train={lr: 1},{lr: 2}: a sweep has plain values. Sweep over a key of it: train.<key>=<value>,<value>"),
        ("optimizer.bta2=1", "optimizer.bta2=1: no such key of optimizer=adamw. Did you mean optimizer.beta2?"),
        ("train.lr=fast", "train.lr=fast: must be a number"),
        ("train.lr=???", "train.lr: needs a value. Set train.lr=<value>"),
        ("train.lr=${nope}", "train.lr=${nope}: Interpolation key 'nope' not found"),
        ("train.lr=", "train.lr=: not of the form key=value. Write train.lr=<value>"),
        ("--dry-run", "--dry-run: not a flag of this command. See --help"),
        ("model=cola", "model=cola: no such key. Did you mean backbone=cola?"),
        ("train.batch_size=3", "train.batch_size=3: no such key. Did you mean train.global_batch?"),
        ("train.lr", "train.lr: not of the form key=value. Write key=value"),
        ("--scale=1b", "--scale=1b: not a flag of this command. Write scale=1b"),
        ("--lr", "--lr: not a flag of this command. Write train.lr=<value>"),
        ("--config-path=x", "--config-path: the configuration tree cannot be replaced. "
         "Use --config-dir to add a folder of options and recipes"),
        ("data.root=(c4", "data.root=(c4: not a plain value to Hydra. Quote it: \"data.root='(c4'\""),
        ("data.root=~/c4", HOME.format("data.root", "/c4")),
        ("run.root='~/runs'", HOME.format("run.root", "/runs")),
        ("run.dir=~", HOME.format("run.dir", "")),
        ("run.root=2026_11_22", "run.root=20261122: must be text. "
         "Quote a number that is meant as text: \"run.root='...'\""),
        ("checkpoint.keep_every=2500", "checkpoint.keep_every=2500: must be a multiple of checkpoint.every=1000. "
         "Try 2000"),
        ("train.lr=1,2",
         "train.lr=1,2: several values for one run. train.py -m runs each. Or quote: \"train.lr='1,2'\""),
        ("~train.lr", "~train.lr: a run needs every group and key. Set it instead: train.lr=<value>"),
        ("~logger", "~logger: a run needs every group and key. Choose another option: logger=<option>"),
        ("dlr.enabled=true", "dlr.enabled=true: says what the option is, and its file sets it. "
         "Choose another option: dlr=<option>"),
        ("backbone.factorized=true", "backbone.factorized=true: says what the option is, and its file sets it. "
         "Choose another option: backbone=<option>"),
        ("dlr.alpha=2", "dlr.alpha=2.0: would be ignored: dlr=off. Leave it out"),
        ("hydra.run.dir=/runs/a", "hydra.run.dir=/runs/a: would be ignored: Hydra writes nothing, and a run makes its "
         "own directory. Use run.dir=<folder>, or run.root=<folder of the runs>"),
        ("train.lr='1e-3'", "train.lr=1e-3: must be a number. A quoted number is text: leave the quotes out"),
        ("hydra.verbose=true", "hydra.verbose=true: would be ignored. Of Hydra's own settings a run has hydra.mode, "
         "hydra.searchpath, hydra.sweeper, hydra.launcher, hydra.job.env_set"),
        ("hydra/job_logging=none", "hydra/job_logging=none: would be ignored. Of Hydra's own settings a run has "
         "hydra.mode, hydra.searchpath, hydra.sweeper, hydra.launcher, hydra.job.env_set"),
        ("hydra.sweeper.nope=1", "configuration: Could not override 'hydra.sweeper.nope'. "
         "To append to your config use +hydra.sweeper.nope=1"),
    ],
)  # fmt: skip
def test_a_mistake_is_told_with_its_fix(word, problem):
    assert problems(word) == [problem]


@pytest.mark.parametrize(("words", "rule"), [
    (("backbone=full", "optimizer.b_lr=2"), "optimizer.b_lr=2.0: would be ignored: "
     "backbone=full has no up-projection B"),
    (("backbone=cola", "backbone.learn_latent_scale=true", "backbone.latent_scale=2"),
     "backbone.latent_scale=2.0: would be ignored: backbone.learn_latent_scale=true"),
    (("backbone=lost", "backbone.channels=random", "backbone.residual_rank=9"),
     "backbone.residual_rank=9: would be ignored: backbone.channels=random"),
    (("scale.steps=50", "train.steps=9", "train.warmup_steps=2", "scale.warmup_steps=1"),
     ["scale.warmup_steps=1: would be ignored: train.warmup_steps is given",
      "scale.steps=50: would be ignored: train.steps and train.warmup_steps are set without it"]),
    (("experiment=table1/cola_authors", "scale=60m", "scale.steps=5000"),
     "scale.steps=5000: would be ignored: train.steps and train.warmup_steps are set without it"),
    (("data=sample", "tokenizer.hub=me/mine"),
     "tokenizer.hub=me/mine: would be ignored: data=sample comes with its tokenizer"),
    (("optimizer=loro", "train.lr_decay=linear"),
     "train.lr_decay=linear: would be ignored: optimizer.schedule=loro has a decay of its own"),
    (("train.lr_decay_steps=0", "train.min_lr_ratio=0.2"),
     "train.min_lr_ratio=0.2: would be ignored: train.lr_decay_steps=0"),
    (("dlr=no_b", "backbone.b_gain=2"), "backbone.b_gain=2.0: would be ignored: dlr.train_b=false freezes B at zero"),
])  # fmt: skip
def test_a_knob_that_nothing_would_read_is_refused(words, rule):
    rules = [rule] if isinstance(rule, str) else rule
    assert problems(*words) == [f"{rule}. Leave it out" for rule in rules]


@pytest.mark.parametrize(("steps", "rule"), [
    (901, "must not exceed 900, the steps after the warm-up"),
    (1, "must be 0 or at least 2: the first of these steps still has the peak rate"),
])  # fmt: skip
def test_the_decay_of_the_rate_fits_the_run(steps, rule):
    given = "train.steps=1000", "train.warmup_steps=100", f"train.lr_decay_steps={steps}"
    assert problems(*given) == [f"train.lr_decay_steps={steps}: {rule}"]
    ignored = f"train.lr_decay_steps={steps}: would be ignored: optimizer.schedule=loro has a decay of its own"
    assert problems(*given, "optimizer=loro") == [f"{ignored}. Leave it out"]


def test_blanks_around_the_equals_sign():
    assert problems("scale", "=", "1b") == ["scale = 1b: not of the form key=value. Write scale=1b"]
    assert problems("scale=", "1b", "seed=1") == ["scale= 1b: not of the form key=value. Write scale=1b"]


def test_a_key_given_twice():
    assert problems("train.lr=1", "+train.lr=2") == ["train.lr=2: given twice, first as train.lr=1. Keep one"]
    assert problems("scale=1b", "+scale=7b") == ["scale=7b: given twice, first as scale=1b. Keep one"]


def test_flags_that_exclude_each_other():
    assert problems("-m", "--cfg", "job") == ["--multirun --cfg: one command cannot do both. Keep one"]
    assert problems("--resolve") == ["--resolve: belongs to --cfg. Add --cfg job"]


def test_all_mistakes_of_a_command_line_are_told_at_once():
    """Rules that span keys are judged as if the fixes were taken, and not where a key that they need is in doubt."""
    argv = ["+scal=tiny", "+backbone=colla", "train.lrr=1", "train.steps=many", "train.stop_after=10", "--compile=no"]
    assert problems(*argv, "train.global_batch=7", "logger.entity=me", "logger=jsonl", ranks=2) == [
        "--compile=no: not a flag of this command. Write compile=no",
        "scal=tiny: no such key. Did you mean scale=tiny?",
        f"backbone=colla: must be one of {options('backbone')}. Did you mean cola?",
        "train.lrr=1: no such key. Did you mean train.lr?",
        "train.steps=many: must be a whole number",
        "train.global_batch=7: must be a multiple of the 2 ranks. Try 6 or 8",
        "logger.entity=me: would be ignored: logger=jsonl. Leave it out",
    ]


def test_showing_a_configuration_checks_its_keys_alone():
    assert config("--cfg", "job", "data=c4_local").data.root is None
    assert problems("--cfg", "job", "data=c4_local", "data.rot=x") == [
        "data.rot=x: no such key. Did you mean data.root?"
    ]


# ---------------------------------------------------------------------------------------------------- sweeps


def test_every_job_of_a_sweep_is_checked_before_the_first_runs():
    jobs = configs("-m", *SMALL, "+dlr=true,off", "train.lr=range(1,3)")
    assert [(cfg.dlr.name, cfg.train.lr) for cfg in jobs] == [("on", 1), ("on", 2), ("off", 1), ("off", 2)]
    assert problems("-m", *SMALL, "backbone=cola,colla", "seed=1,-1") == [
        "seed=-1: must be at least 0",
        f"backbone=colla: must be one of {options('backbone')}. Did you mean cola?",
    ]
    assert problems("-m", *SMALL, "log.every=1,2") == [
        "run.dir=runs/tiny-lowrank-dlr_off-sample-s42: several jobs of this sweep would share the run directory"
    ]
    assert problems("-m", *SMALL, "train.lr=interval(0,1)") == [
        "train.lr=interval(0,1): an interval has no list of values. Write train.lr=<value>,<value>"
    ]
    assert [cfg.scale.name for cfg in configs("-m", "scale=glob(1*)")] == ["130m", "1b"]


def test_a_script_of_another_checkout_than_the_package_is_refused(tmp_path, monkeypatch):
    """It would check what the package of another trains."""
    (tmp_path / "dlr_pretrain").mkdir()
    (tmp_path / "dlr_pretrain" / "cli.py").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "scripts" / "plan.py")])
    with pytest.raises(UserError, match=r"plan\.py belongs to another checkout .*Call pip install -e "):
        load(["scale=tiny", "data=sample"])
