"""The configuration tree: a dataclass for each section, its keys documented and bounded where they are declared.

The YAML files under ``configs/`` hold every default; the dataclasses hold names, types, rules and documentation.
``parse`` turns a composed mapping into a ``Config`` and collects every problem on the way instead of stopping at the
first; ``validate`` adds the rules that span several keys. This module imports no torch, so that ``--help`` and a
mistyped option answer at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path

from dlr_pretrain.errors import EXIT_CONFIG, UserError

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
GROUPS = ("scale", "backbone", "dlr", "optimizer", "data", "precision", "parallel", "logger", "experiment")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a configuration: the key, its value, the rule it breaks, and the mend."""

    key: str
    value: object
    rule: str
    mend: str = ""

    def __str__(self) -> str:
        given = self.key if self.value is MISSING else f"{self.key}={_shown(self.value)}"
        return f"{given}: {self.rule}" + (f". {self.mend}" if self.mend else "")


class ConfigError(UserError):
    """All problems of a configuration at once; its text has one line for each."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: list[Problem]):
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))


MISSING = object()


def _shown(value: object) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if _is_plain(value) else str(value)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool)


def key(doc: str, *, above=None, at_least=None, at_most=None, choices=None, identity: bool = True):
    """A documented configuration key with its bounds.

    ``identity`` says whether the value takes part in the mathematics of the run: such a value names the run directory
    and must not change on resume.
    """
    return field(
        metadata={
            "doc": doc, "above": above, "at_least": at_least, "at_most": at_most, "choices": choices,
            "identity": identity,
        }
    )  # fmt: skip


@dataclass
class Choice:
    """A group whose options bring knobs of their own; the option's YAML file declares them and their defaults."""

    name: str
    knobs: dict

    def __getattr__(self, knob: str):
        try:
            return self.__dict__["knobs"][knob]
        except KeyError:
            raise AttributeError(f"{self.__dict__.get('name')} has no knob {knob!r}") from None


@dataclass
class Scale:
    name: str = key("name of the scale")
    hidden_size: int = key("width of the residual stream", at_least=1)
    intermediate_size: int = key("width of the SwiGLU", at_least=1)
    num_heads: int = key("attention heads", at_least=1)
    num_layers: int = key("transformer blocks", at_least=1)
    rank: int = key("rank of the low-rank factors", at_least=1)
    vocab_size: int | None = key("embedding rows; null: the tokenizer's", at_least=4)
    lr: float = key("the paper's peak learning rate at this scale", above=0)
    steps: int = key("the paper's steps at this scale", at_least=1)
    warmup_steps: int = key("the paper's warm-up steps at this scale", at_least=0)
    adam_eps: float = key("the paper's epsilon of Adam at this scale", above=0)
    global_batch: int = key("the paper's sequences a step", at_least=1)
    micro_batch: int = key("the paper's sequences a GPU", at_least=1, identity=False)
    eval_every: int = key("steps between evaluations", at_least=1, identity=False)
    eval_tokens: int = key("tokens of validation text", at_least=1)
    checkpoint_every: int = key("steps between checkpoints", at_least=1, identity=False)


@dataclass
class Dlr:
    name: str = key("name of the choice")
    enabled: bool = key("whether the residual is there")
    alpha: float = key("strength of the residual before the variance correction")
    variance_correction: bool = key("beta = alpha / sqrt(K) rather than alpha")
    impl: str = key("weight space (free, exact fold) or the paper's branch", choices=("weight", "branch"))


@dataclass
class Precision:
    name: str = key("dtype of weights, gradients and moments", choices=("bf16", "bf16_mixed", "fp32"))


@dataclass
class Parallel:
    name: str = key("how ranks share the work", choices=("ddp",), identity=False)


@dataclass
class Data:
    source: str = key("where the text comes from", choices=("c4", "c4_local", "sample"))
    dataset: str | None = key("name of the dataset on the hub")
    root: str | None = key("folder of the shards (sample: its cache)")
    train_files: str = key("glob of the training shards, below data.root or absolute")
    validation_files: str = key("glob of the validation shards, below data.root or absolute")
    text_key: str = key("field of a record that holds the text")
    seed: int = key("orders the documents, and nothing else", at_least=0)
    packing: str = key("packed sequences, or one padded document each", choices=("packed", "pad"))


@dataclass
class Tokenizer:
    path: str | None = key("a sentencepiece model; null: the data source's own")
    hub: str = key("repository on the hub whose spiece.model is used where path is null")


@dataclass
class Train:
    steps: int = key("optimizer updates, and the span of the schedule", at_least=1)
    lr: float = key("peak learning rate", above=0)
    warmup_steps: int | None = key("linear warm-up; null: the paper's share of the steps", at_least=0)
    min_lr_ratio: float = key("end of the cosine, as a share of the peak", at_least=0, at_most=1)
    global_batch: int = key("sequences an update, over all ranks", at_least=1)
    micro_batch: int | None = key("sequences a rank takes at once; null: chosen", at_least=1, identity=False)
    seq_len: int = key("positions a sequence", at_least=2)
    clip: float | None = key("bound of the gradient's global norm; null: none", above=0)
    accumulate: str = key("dtype in which micro-batches are summed", choices=("native", "fp32"))
    stop_after: int | None = key("stop and save after this step", at_least=1, identity=False)


@dataclass
class Eval:
    every: int = key("steps between evaluations; the last step is always evaluated", at_least=1, identity=False)
    tokens: int = key("real tokens of validation text, or all there is", at_least=1)
    packing: str = key("packed sequences, or one padded document each", choices=("packed", "pad"))


@dataclass
class Checkpoint:
    every: int = key("steps between checkpoints; the last step is always saved", at_least=1, identity=False)
    keep_last: int = key("checkpoints kept", at_least=1, identity=False)


@dataclass
class Log:
    every: int = key("steps between console lines where there is no terminal", at_least=1, identity=False)


@dataclass
class Logger:
    name: str = key("view beside metrics.jsonl", choices=("jsonl", "wandb"), identity=False)
    project: str = key("W&B project", identity=False)
    entity: str | None = key("W&B entity", identity=False)


@dataclass
class Run:
    root: str = key("folder of the runs", identity=False)
    dir: str | None = key("the run directory; null: a name made of the choices", identity=False)


@dataclass
class Config:
    """A whole run. ``choices`` are the option names by group; ``overrides`` the dotted overrides as given."""

    seed: int = key("initialisation, and nothing else", at_least=0)
    device: str = key("where to train", choices=("auto", "cpu", "cuda"), identity=False)
    compile: bool = key("torch.compile each transformer block", identity=False)
    scale: Scale
    backbone: Choice
    dlr: Dlr
    optimizer: Choice
    data: Data
    precision: Precision
    parallel: Parallel
    logger: Logger
    train: Train
    tokenizer: Tokenizer
    eval: Eval
    checkpoint: Checkpoint
    log: Log
    run: Run

    @property
    def warmup_steps(self) -> int:
        """The warm-up in steps; the paper's share of the steps unless given."""
        if self.train.warmup_steps is not None:
            return self.train.warmup_steps
        return round(self.train.steps * self.scale.warmup_steps / self.scale.steps)

    def micro_batch(self, world_size: int) -> int:
        """Sequences a rank takes at once: as given, or the largest divisor of its share up to the paper's."""
        share = self.train.global_batch // world_size
        if self.train.micro_batch is not None:
            return self.train.micro_batch
        return max(n for n in range(1, min(share, self.scale.micro_batch) + 1) if share % n == 0)

    @property
    def num_streams(self) -> int:
        """Document streams of the data order, V = gcd(global batch, 64); ranks share them out between them."""
        return math.gcd(self.train.global_batch, 64)


SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in typing.get_type_hints(Config).items()
    if dataclasses.is_dataclass(hint)
}  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# From a composed mapping to a Config


def parse(tree: dict, declared: dict[str, dict]) -> tuple[Config | None, list[Problem]]:
    """Build a ``Config`` from a composed mapping.

    ``declared`` gives, for each open group (backbone, optimizer), the keys of the chosen option's own YAML file with
    their defaults. Returns the configuration (None where it cannot be built) and every problem found.
    """
    problems: list[Problem] = []
    hints = typing.get_type_hints(Config)
    values = {}
    for name in unknown_keys(tree, hints):
        problems.append(unknown_key(name, hints))
    for f in dataclasses.fields(Config):
        if f.name not in tree:
            problems.append(Problem(f.name, MISSING, "missing from the configuration"))
        elif hints[f.name] is Choice:
            values[f.name] = _parse_choice(f.name, tree[f.name], declared.get(f.name, {}), problems)
        elif dataclasses.is_dataclass(hints[f.name]):
            values[f.name] = _parse_section(f.name, hints[f.name], tree[f.name], problems)
        else:
            values[f.name] = _parse_value(f.name, tree[f.name], hints[f.name], f.metadata, problems)
    return (None if problems else Config(**values)), problems


def unknown_keys(tree: dict, known) -> list[str]:
    return [name for name in tree if name not in known]


def unknown_key(name: str, known, value: object = MISSING) -> Problem:
    """The problem of a key that does not exist, with the nearest one that does."""
    near = nearest(name, known)
    return Problem(name, value, "no such key", f"Did you mean {near}?" if near else "See train.py --help")


def nearest(name: str, known) -> str | None:
    """The known name most like ``name``, also where only the last part of a dotted key is mistyped or misplaced."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return close[0]
    leaf = name.rsplit(".", 1)[-1]
    return next((k for k in known if k.rsplit(".", 1)[-1] == leaf), None)


def all_keys(declared: dict[str, dict]) -> dict[str, tuple[object, typing.Mapping]]:
    """Every dotted key of the tree with its type and metadata; those of open groups as their option declares them."""
    keys: dict[str, tuple[object, typing.Mapping]] = {}
    hints = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        hint = hints[f.name]
        if hint is Choice:
            for knob, default in declared.get(f.name, {}).items():
                keys[f"{f.name}.{knob}"] = (type(default), {})
        elif dataclasses.is_dataclass(hint):
            inner = typing.get_type_hints(hint)
            for g in dataclasses.fields(hint):
                keys[f"{f.name}.{g.name}"] = (inner[g.name], g.metadata)
        else:
            keys[f.name] = (hint, f.metadata)
    return keys


def _parse_section(name: str, cls: type, tree: object, problems: list[Problem]):
    if not isinstance(tree, dict):
        problems.append(Problem(name, tree, "a section, not a value", f"Choose an option: {name}=<option>"))
        return None
    hints, before = typing.get_type_hints(cls), len(problems)
    known = [f"{name}.{k}" for k in hints]
    for extra in unknown_keys(tree, hints):
        problems.append(unknown_key(f"{name}.{extra}", known, tree[extra]))
    values = {}
    for f in dataclasses.fields(cls):
        if f.name not in tree:
            problems.append(Problem(f"{name}.{f.name}", MISSING, "missing from the configuration"))
        else:
            values[f.name] = _parse_value(f"{name}.{f.name}", tree[f.name], hints[f.name], f.metadata, problems)
    return cls(**values) if len(problems) == before else None


def _parse_choice(name: str, tree: object, declared: dict, problems: list[Problem]) -> Choice | None:
    if not isinstance(tree, dict) or "name" not in tree:
        problems.append(Problem(name, tree, "a section with a name", f"Choose an option: {name}=<option>"))
        return None
    known = [f"{name}.{k}" for k in declared]
    knobs = {}
    for knob, value in tree.items():
        full = f"{name}.{knob}"
        if knob not in declared:
            problems.append(unknown_key(full, known, value))
        elif knob != "name":
            default = declared[knob]
            hint = type(default) if not isinstance(default, str) or "${" not in default else type(value)
            knobs[knob] = _parse_value(full, value, hint, {}, problems) if default is not None else value
    return Choice(str(tree["name"]), knobs)


def _parse_value(name: str, value: object, hint, rules: typing.Mapping, problems: list[Problem]):
    """``value`` converted to ``hint`` and held against the bounds of its key; problems are appended."""
    optional = isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)
    if optional:
        if value is None:
            return None
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    converted = _convert(value, hint)
    if converted is MISSING:
        kind = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(hint, str(hint))
        problems.append(Problem(name, value, f"must be {kind}" + (" or null" if optional else "")))
        return value
    rule = _broken_rule(converted, rules)
    if rule:
        near = nearest(str(converted), rules["choices"]) if rules.get("choices") else None
        problems.append(Problem(name, value, rule, f"Did you mean {near}?" if near else ""))
    return converted


def _convert(value: object, hint):
    """``value`` as ``hint``, or MISSING where it is not one: no silent rounding, no number from a truth value."""
    if hint is bool:
        return value if isinstance(value, bool) else MISSING
    if hint is int:
        whole = isinstance(value, float) and value.is_integer()
        return int(value) if whole or (isinstance(value, int) and not isinstance(value, bool)) else MISSING
    if hint is float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if number and math.isfinite(value) else MISSING
    if hint is str:
        return str(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else MISSING
    return value


def _broken_rule(value, rules: typing.Mapping) -> str:
    if rules.get("choices") and value not in rules["choices"]:
        return "must be one of " + ", ".join(rules["choices"])
    if rules.get("above") is not None and not value > rules["above"]:
        return f"must be greater than {rules['above']}"
    if rules.get("at_least") is not None and value < rules["at_least"]:
        return f"must be at least {rules['at_least']}"
    if rules.get("at_most") is not None and value > rules["at_most"]:
        return f"must be at most {rules['at_most']}"
    return ""


# ----------------------------------------------------------------------------------------------------
# Rules that span several keys


def validate(cfg: Config, world_size: int) -> list[Problem]:
    """Every broken rule that spans several keys, for a run on ``world_size`` ranks."""
    t, s, problems = cfg.train, cfg.scale, []

    def refuse(name: str, value: object, rule: str, mend: str = "") -> None:
        problems.append(Problem(name, value, rule, mend))

    if s.hidden_size % s.num_heads:
        refuse("scale.num_heads", s.num_heads, f"must divide scale.hidden_size={s.hidden_size}")
    elif (s.hidden_size // s.num_heads) % 2:
        refuse("scale.num_heads", s.num_heads, "rotary embeddings need heads of even width")
    rank = cfg.backbone.knobs.get("rank")
    if rank is not None and not 1 <= rank <= min(s.hidden_size, s.intermediate_size):
        refuse("backbone.rank", rank, f"must lie between 1 and the layers' width {s.hidden_size}")
    if cfg.dlr.enabled and not cfg.backbone.knobs.get("supports_dlr"):
        mend = "Use dlr=off, or a low-rank backbone: backbone=cola"
        refuse("dlr", cfg.dlr.name, f"backbone={cfg.backbone.name} has no up-projection to carry the residual", mend)
    if t.global_batch % world_size:
        near = max(world_size, t.global_batch // world_size * world_size)
        refuse("train.global_batch", t.global_batch, f"must be a multiple of the {world_size} ranks", f"Try {near}")
    elif cfg.num_streams % world_size:
        rule = f"its {cfg.num_streams} data streams, gcd(global_batch, 64), must divide among {world_size} ranks"
        refuse("train.global_batch", t.global_batch, rule, "Use a power-of-two number of ranks that divides it")
    elif t.micro_batch is not None and (t.global_batch // world_size) % t.micro_batch:
        share = t.global_batch // world_size
        fit = max(n for n in range(1, min(share, t.micro_batch) + 1) if share % n == 0)
        refuse("train.micro_batch", t.micro_batch, f"must divide the rank's {share} sequences", f"Try {fit}")
    if t.warmup_steps is not None and t.warmup_steps >= t.steps:
        refuse("train.warmup_steps", t.warmup_steps, f"must be below train.steps={t.steps}")
    if t.stop_after is not None and t.stop_after > t.steps:
        refuse("train.stop_after", t.stop_after, f"must not exceed train.steps={t.steps}")
    if cfg.optimizer.knobs.get("weight_decay", 0) < 0:
        refuse("optimizer.weight_decay", cfg.optimizer.weight_decay, "must be at least 0")
    for beta in ("beta1", "beta2"):
        if not 0 <= cfg.optimizer.knobs.get(beta, 0) < 1:
            refuse(f"optimizer.{beta}", cfg.optimizer.knobs[beta], "must lie in [0, 1)")
    if cfg.optimizer.knobs.get("eps", 1) <= 0:
        refuse("optimizer.eps", cfg.optimizer.eps, "must be greater than 0")
    problems += _data_problems(cfg)
    return problems


def _data_problems(cfg: Config) -> list[Problem]:
    """Files that the configuration names and that are not there."""
    problems: list[Problem] = []
    path = cfg.tokenizer.path
    if path is not None and not Path(path).is_file():
        problems.append(Problem("tokenizer.path", path, "no such file", "Name a sentencepiece model (spiece.model)"))
    if cfg.data.source == "c4_local":
        root = cfg.data.root
        absolute = all(Path(g).is_absolute() for g in (cfg.data.train_files, cfg.data.validation_files))
        if root is None and not absolute:
            rule = "needed by data=c4_local: the folder that holds c4-train.*.json.gz and c4-validation.*.json.gz"
            problems.append(Problem("data.root", root, rule, "Set data.root=<folder>, or use data=sample"))
        elif root is not None and not Path(root).is_dir():
            problems.append(Problem("data.root", root, "no such folder", "Set data.root=<folder of the shards>"))
        else:
            for name in ("train_files", "validation_files"):
                pattern = Path(root or "/", getattr(cfg.data, name))
                if not any(Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
                           if pattern.is_absolute() else Path().glob(str(pattern))):  # fmt: skip
                    problems.append(Problem(f"data.{name}", str(pattern), "matches no file"))
    return problems


# ----------------------------------------------------------------------------------------------------
# The identity of a run


def identity(cfg: Config) -> dict[str, object]:
    """The dotted keys that take part in the mathematics of a run, with their values."""
    flat: dict[str, object] = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if isinstance(value, Choice):
            flat[f"{f.name}.name"] = value.name
            flat |= {f"{f.name}.{k}": v for k, v in value.knobs.items()}
        elif dataclasses.is_dataclass(value):
            flat |= {
                f"{f.name}.{g.name}": getattr(value, g.name)
                for g in dataclasses.fields(value)
                if g.metadata.get("identity", True)
            }
        elif f.metadata.get("identity", True):
            flat[f.name] = value
    return flat


def run_name(choices: dict[str, str], defaults: dict[str, str], seed: int, overrides: list[str]) -> str:
    """A stable name from the chosen options, the seed, and a short hash of the other overrides that matter.

    ``overrides`` are the dotted ``key=value`` overrides; those of keys outside the identity, and the seed, are left
    out, and their order does not matter.
    """
    parts = [choices["scale"], choices["backbone"], f"dlr_{choices['dlr']}"]
    for group in ("optimizer", "data", "precision", "experiment"):
        if choices.get(group) and choices[group] != defaults.get(group):
            parts.append(Path(choices[group]).name)
    parts.append(f"s{seed}")
    matter = sorted(o for o in overrides if _matters(o.split("=", 1)[0].lstrip("+~")))
    if matter:
        parts.append(hashlib.sha256(json.dumps(matter).encode()).hexdigest()[:6])
    return "-".join(parts)


def _matters(dotted: str) -> bool:
    if dotted == "seed" or dotted.startswith("hydra."):
        return False
    return all_keys({}).get(dotted, (None, {}))[1].get("identity", True)


def to_dict(cfg: Config) -> dict:
    """The configuration as plain nested mappings, as it is written to ``config.yaml``."""
    tree = {}
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if isinstance(value, Choice):
            tree[f.name] = {"name": value.name, **value.knobs}
        else:
            tree[f.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
    return tree
