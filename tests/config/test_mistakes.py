"""Messages for keys and values that do not exist, are invalid or would be ignored: key, value, rule and fix."""

import importlib.util
from functools import partial

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import GROUPS, to_dict
from dlr_pretrain.config.problems import nearest, synonyms
from dlr_pretrain.config.tree import KEYS
from dlr_pretrain.config.values import all_keys
from tests.config.test_command_line import SMALL, problems
from tests.conftest import ROOT

SETTABLE = {name: key.kinds() for name, key in KEYS.items() if not key.fixed}
KNOWN = {*GROUPS, *all_keys(to_dict(load(["backbone=cola"], machine=False)))}
refusal = partial(problems, *SMALL)


MISTAKES = {  # a command line, and parts of its one-line message
    # keys that do not exist
    "+train.lrr=1": ["train.lrr=1: no such key", "Did you mean train.lr?"],
    "train=5": ["train=5: a section", "train.steps"],
    "train=[1]": ["train=[1]: a section", "train.steps"],
    "data.sources=[a]": ["must be named entries"],
    "dlr={alhpa: 2}": ["dlr.alhpa=2", "Did you mean dlr.alpha?"],
    "optimizer.bta2=1": ["optimizer.bta2=1: no such key of optimizer=adamw", "Did you mean optimizer.beta2?"],
    "dlr={enabled: true}": ["dlr.enabled=true", "Choose another option: dlr=<option>"],
    "--resume": ["--resume: not a flag", "The same command again resumes a run"],
    "train.epochs=3": ["train.epochs=3: no such key", "Set train.steps", "train.global_batch x train.seq_len"],
    # options and values
    f"train.steps={'9' * 400}": ["must be a whole number of at least 1"],
    "backbone=cloa": ["backbone=cloa: must be one of", "sltrain. Did you mean backbone=cola?"],
    "dlr=true": ["dlr=true: must be one of", "Did you mean dlr=on?"],
    "logger=false": ["Did you mean logger=jsonl?"],
    "wandb=false": ["wandb=false: no such key. Choose logger=jsonl"],
    "--scale tiny": ["--scale: not a flag of this command. Did you mean scale=tiny?"],
    "--train.lr=1e-3": ["Did you mean train.lr=1e-3?"],
    "data=/texts/mine": ["data=/texts/mine", "Write data=local data.root=/texts/mine"],
    "device=gpu": ["device=gpu: must be auto or cpu or cuda", "Did you mean device=cuda?"],
    "~train.lr": ["train.lr: needs a value", "Set train.lr=<value>"],
    "seed = 3": ["seed = 3: not of the form key=value", "without spaces"],
    "~logger": ["logger.view: needs a value", "logger=<option>"],
    "train.lr=${nope}": ["train.lr", "'nope' not found"],
    "train.lr=": ["train.lr=: must be a number above 0 (peak"],
    "run.root=a,b": ["run.root=a,b: several values", "Or quote: \"run.root='a,b'\""],
    "data.root=(c4": ["data.root=(c4: not a plain value to Hydra", "Quote it: \"data.root='(c4'\""],
    "data={root: (c4}": ["data={root: (c4}: not a plain value", "Quote the text inside it, as in {root: '~/text'}"],
    "logger.tags[0]=x": ["logger.tags[0]=x: not a key to Hydra", "words joined by dots"],
    "data@other=sample": ["data@other=sample: an option cannot stand elsewhere", "Write data=sample"],
    "run.root=None": ["run.root=None: must be text (folder of the runs)", "Write ./None for the path"],
    "run.root=": ["run.root=: must be text", "Write ./ for the path"],
    "run.root=2026_11_22": ["run.root=20261122: must be text", "Quote it: \"run.root='...'\""],
    "eval.every=0": ["eval.every=0: must be a whole number of at least 1", "train.steps or more: only the last step"],
    "hydra.sweeper.nope=1": ["Could not override 'hydra.sweeper.nope'"],
    "--local-rank=0": ["--local-rank=0: not a flag", "torchrun --nproc-per-node <GPUs> train.py"],
    "hydra.job.chdir=true": ["hydra.job.chdir=true: would move relative paths"],
}
RARE = {  # as MISTAKES; tested by -m full
    # typing errors that would make a check hang
    "data.streams=1000000000000": ["data.streams=1000000000000", "at most 1048576"],
    "train.micro_batch=1000000000000": ["train.micro_batch=1000000000000", "at most 1048576"],
    "train.seq_len=1e15": ["train.seq_len=1000000000000000.0", "at most 1048576"],
    "scale.num_layers=1e9": ["scale.num_layers=1000000000.0", "at most 10000"],
    "dlr=on dlr.alpha=1e308": ["dlr.alpha=1e+308", "at most 1000"],
    "optimizer.eps=1e-300": ["optimizer.eps=1e-300", "at least 1e-30"],
    # rules of the backbone, the optimizer and DLR
    "optimizer=adamw_8bit parallel=fsdp": ["8-bit moments come in whole blocks", "Use parallel=ddp"],
    "optimizer=muon parallel=hsdp": ["parallel=hsdp shards them", "Use parallel=ddp"],
    "parallel=fsdp parallel.shards=2": ["parallel.shards=2: would be ignored: parallel=fsdp"],
    "optimizer=galore": ["optimizer=galore", "backbone=lowrank", "Use backbone=full"],
    "optimizer=loro backbone=cola dlr=on": ["optimizer=loro", "backbone=cola", "Use backbone=lowrank"],
    "optimizer=loro optimizer.shift=30": ["optimizer.shift=30", "a multiple of optimizer.exact_every=50", "270"],
    "optimizer=loro train.lr_decay=linear": ["train.lr_decay=linear: would be ignored: optimizer.schedule=loro"],
    "optimizer=galore backbone=full optimizer.rank=129": ["optimizer.rank=129", "between 1 and", "128"],
    "dlr=init_offset dlr.train_b=false": ["dlr=init_offset: mode=offset and train_b=false are mutually exclusive"],
    "dlr=no_b dlr.learn_alpha=true": ["dlr=no_b: learn_alpha=true and train_b=false are mutually exclusive"],
    "backbone=relora backbone.merge_every=300": ["backbone.merge_every=300", "train.steps=300", "Use backbone=lora"],
    "backbone=relora backbone.merge_every=10": ["backbone.restart_warmup=10", "backbone.merge_every=10"],
    "profile=on train.stop_after=3": ["profile.start=20", "within the 3 steps"],
    "train.stop_after=301": ["train.stop_after=301: must be at most train.steps=300"],
    "data.packing=pad eval.packing=pad data.mask_documents=true": [
        "would be ignored: data.packing=pad and eval.packing=pad"
    ],
    "run.start_optimizer=true": ["run.start_optimizer=true", "Set run.start_from"],
    "train.lr_decay_steps=271": ["train.lr_decay_steps=271", "from 2 to 270"],
    "train.steps=3 train.warmup_ratio=0.9": ["train.warmup_ratio=0.9: gives 3 warm-up steps", "below train.steps=3"],
    "train.warmup_steps=300": ["train.warmup_steps=300", "below train.steps=300"],
    "checkpoint.keep_every=250": ["checkpoint.keep_every=250", "checkpoint.every=100. Try 200"],
    "data.bad_rows=skip": ["data.bad_rows=skip: would be ignored: data=sample. Leave it out"],
    "data.revision=main": ["data.revision=main: would be ignored: no text comes from the hub"],
    "train.lr_decay_steps=0 train.min_lr_ratio=0": ["train.min_lr_ratio=0.0: would be ignored", "lr_decay_steps=0"],
    "data.streams=3": ["data.streams=3: must divide train.global_batch=8. Try 2"],
    "backbone.rank=4 scale.rank=3": ["scale.rank=3: would be ignored: backbone.rank is given"],
    "backbone.rank=129": ["backbone.rank=129", "narrowest layer's width, 128"],
}
MISTAKES |= {  # text and files
    "run.dir=README.md": ["run.dir=README.md: is a file"],
    "data=local data.root=README.md": ["data.root=README.md: is a file", "data.train_files=<file>"],
    "data=local": ["data.root=null", "Set data.root=<folder>"],
    "data=c4_local data.root=/nowhere": ["data.root=/nowhere: no such folder. Set data.root=<folder"],
    "tokenizer.path=gpt2": ["tokenizer.path=gpt2: no such file", "tokenizer.hub=gpt2"],
}


@pytest.mark.parametrize("line", [*MISTAKES, *(pytest.param(line, marks=pytest.mark.full) for line in RARE)])
def test_a_mistake_is_reported_with_its_fix(line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [line] if "{" in line else line.split()
    (found,) = refusal(*words)
    assert [named for named in (MISTAKES | RARE)[line] if named not in found] == [], found


@pytest.mark.parametrize("value", ["None", "none", "NONE", "'null'", "~", "", "''", "' '"])
def test_null_has_one_spelling_and_text_is_not_empty(value):
    plain = value.strip("'")
    may_be_null = {name: optional for name, (kind, _, optional) in SETTABLE.items() if optional or kind is str}
    names = [name for name, optional in may_be_null.items() if optional or not plain.strip()]
    found = refusal(*(f"{name}={value}" for name in names))
    for name, problem in zip(names, found, strict=True):
        assert problem.startswith(f"{name}={plain}: must be")
        assert ". Write null" in problem or not may_be_null[name]


def test_all_mistakes_are_reported_at_once():
    argv = ["+scal=tiny", "+backbone=colla", "train.lrr=1", "train.steps=many", "--compile=no", "train.clip=-1"]
    found = refusal(*argv)
    named = ["backbone", "--compile=no", "train.lrr", "scal", "train.steps", "train.clip"]
    assert all(problem.startswith(name) for problem, name in zip(found, named, strict=True)), found
    named = ["scale.num_heads", "backbone.rank", "train.warmup_steps", "train.global_batch", "logger.entity"]
    found = refusal(*(f"{name}={value}" for name, value in zip(named, (5, 129, 300, 7, "me"), strict=True)), ranks=2)
    assert all(problem.startswith(name) for problem, name in zip(found, named, strict=True)), found


def test_the_batch_must_fit_the_ranks():
    assert refusal("train.global_batch=7", ranks=2)[0].endswith("must be a multiple of the 2 ranks. Try 8")
    assert refusal("train.global_batch=3", ranks=8)[0].endswith("must be a multiple of the 8 ranks. Try 8")
    assert refusal("train.global_batch=512", ranks=3)[0].endswith("the 3 ranks. Try 513 data.streams=57")
    (found,) = refusal("train.global_batch=12", ranks=6)
    assert found.startswith("data.streams=4") and "Set data.streams=12 before the first start, or start 4" in found


def test_the_shards_must_divide_the_ranks(monkeypatch):
    (found,) = refusal("parallel=hsdp", "parallel.shards=3", ranks=4)
    assert found == "parallel.shards=3: must divide the 4 ranks. Try 2, or start 6 ranks"
    assert load([*SMALL, "parallel=hsdp", "train.global_batch=32"], 32).shards(32) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert load([*SMALL, "parallel=hsdp"], 8).shards(8) == 4
    assert refusal("parallel=hsdp", "train.global_batch=12", "data.streams=6", ranks=6)[0].startswith(
        "parallel.shards=4"
    )


def test_the_nearest_key_is_found():
    near = {"train.LR": "train.lr", "eval.steps": "train.steps", "scale.hidden": "scale.hidden_size", "xyz": "",
            "optimizer.lr": "train.lr", "train.seed": "seed", "train.weight_decay": "optimizer.weight_decay",
            "train.foo": ""}  # fmt: skip
    assert {name: nearest(name, KNOWN) for name in near} == near


def test_keys_of_other_trainers_lead_to_ours():
    ours = {meant for each in synonyms().values() for meant in each if " " not in meant}
    assert ours <= KNOWN | {"cuda", "on", "off", "jsonl"}
    assert not set(synonyms()) & KNOWN
    assert len(synonyms()) > 70
    for name, (key, *_) in synonyms().items():
        if key in KNOWN:
            assert nearest(name if "." in name else f"train.{name}", KNOWN) == key


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = refusal("optimizer=adamw_8bit")
    assert "needs the package torchao" in found and "or optimizer=adamw" in found


def test_valid_combinations_are_accepted():
    for words in (
        "optimizer=fira backbone=full scale.rank=128",
        "optimizer=loro backbone=lowrank optimizer.exact_every=90 optimizer.shift=270",
        "backbone=cola dlr=learnable_alpha precision=bf16_sr parallel=fsdp",
        "data.packing=pad eval.packing=packed data.mask_documents=true",
        "data.packing=packed eval.packing=pad data.mask_documents=true",
        "run.dir=./None tokenizer.path=NULL checkpoint.keep_every=Null train.activation_checkpointing=none",
    ):
        load([*SMALL, *words.split()])
