"""Every key of a run: its type, default, bounds and meaning. The files in ``configs/`` hold what an option sets."""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from dlr_pretrain.config.problems import Problem

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = next(folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir())
HUGE = 1 << 20  # of what a slip of the keyboard could make so large that a check would hang
VOCABULARY = 32_000  # of the papers' models: the only size that gives 609M parameters at 1B
GPUS_A_NODE = 8  # where torchrun does not say it, for plans
USUAL_STREAMS = 64  # document streams of the data order, where data.streams does not say it
MANDATORY = "???"  # OmegaConf's mark of a value that an option or the user has to set
GROUPS = ("scale", "backbone", "dlr", "optimizer", "data", "precision", "parallel", "logger", "profile", "experiment")
KINDS: dict[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list[str]: "a list such as [a,b]",
}
BOUNDS = {
    "gt": ("above", operator.gt),
    "ge": ("of at least", operator.ge),
    "le": ("at most", operator.le),
    "lt": ("below", operator.lt),
}


def key(doc: str, default: object = MANDATORY, *, fixed: bool = False, **bounds: float) -> Any:
    """A documented key with its default, which may be an interpolation such as ``${scale.rank}``, and its ``BOUNDS``.

    A ``fixed`` key says what an option is: its YAML file sets it, the command line cannot.
    """
    return field(default=default, metadata={"doc": doc, "fixed": fixed, "bounds": bounds})


@dataclass
class Options:
    """What a backbone or an optimizer is set up by. Its YAML file names the class as ``_target_``.

    The class stands in the file that uses it, in this package or in a user's own. A field with a ``key``
    is a key of the configuration, whose value is in the YAML file. What else stands here describes the kind.
    """

    name: str = key("name of the choice", fixed=True)
    rank: int | None = None

    def problems(self, cfg: Config) -> Iterator[Problem]:
        """The rules of this option that a configuration with it breaks."""
        yield from ()


@dataclass
class BackboneOptions(Options):
    layer: ClassVar[Any]  # the class of the projections, a ``models.layer.Layer``
    factorized: ClassVar[bool] = False  # y = B z: DLR can be attached
    swiglu_silu: bool = True
    merge_every: int | None = None  # updates between merges, after which the learning rate warms up again
    restart_warmup: int = 0
    exported_keys: ClassVar[tuple[str, ...]]  # that the exported layer reads, if there is one; not inherited
    exported_layer: ClassVar[str] = ""  # its class, unless in ``deploy/modeling_lowrank_llama.py``


class How(NamedTuple):
    """How updates are computed: by compiled code, where they are not torch's kernels; and rounded by this seed."""

    compiled: bool = False
    rounding_seed: int | None = None  # None: to the nearest. Only for those that round stochastically


@dataclass
class OptimizerOptions(Options):
    elementwise: ClassVar[bool] = False  # a fused parameter is as good as its parts
    rounds_stochastically: ClassVar[bool] = False

    @property
    def restart_every(self) -> int | None:
        """The updates between restarts, if the optimizer has a schedule of its own."""
        return None

    def rate(self, cfg: Config, update: int) -> float:
        """The learning rate of update ``update``, from 0, by the schedule of its own."""
        raise NotImplementedError

    def build(self, parameters: dict[str, Any], how: How) -> list[Any]:
        """Optimizers in the style of ``torch.optim``, of disjoint parts of the named ``parameters``."""
        raise NotImplementedError


@dataclass
class Scale:
    name: str = key("name of the scale", fixed=True)
    hidden_size: int = key("width of the residual stream", ge=1, le=HUGE)
    intermediate_size: int = key("width of the SwiGLU", ge=1, le=HUGE)
    num_heads: int = key("attention heads", ge=1, le=HUGE)
    num_layers: int = key("transformer blocks", ge=1, le=10_000)
    rank: int = key("rank of the low-rank factors", ge=1)
    vocab_size: int | None = key("embedding rows; null: the tokenizer's", VOCABULARY, ge=4, le=10_000_000)
    micro_batch: int = key(
        "the paper's sequences per GPU, for train.micro_batch=null, and for auto without a GPU", ge=1, le=HUGE
    )


@dataclass
class Dlr:
    name: str = key("name of the choice", fixed=True)
    enabled: bool = key("whether the residual is there", True, fixed=True)
    alpha: float = key("strength of the residual before the variance correction", 1.0, ge=-1000, le=1000)
    learn_alpha: bool = key("alpha is a parameter of each layer, without weight decay", False)
    variance_correction: bool = key("beta = alpha / sqrt(K), K copies of a latent; false: beta = alpha", True)
    grouping: Literal["contiguous", "random"] = key("latent of output i: floor(i / K), or drawn", "contiguous")
    grouping_seed: int = key("of random grouping, beside the layer's name", 0, ge=0)
    train_b: bool = key("false: B is frozen at zero, the residual is all there is", True)
    mode: Literal["residual", "offset"] = key("beside B, or an initial offset of B, which then has none", "residual")


@dataclass
class Precision:
    name: Literal["bf16", "bf16_sr", "bf16_mixed", "fp32"] = key("dtype of the state, and its rounding", fixed=True)


@dataclass
class Parallel:
    name: Literal["ddp", "fsdp", "hsdp"] = key("replicated or sharded state, or both", fixed=True)
    shards: int | None = key("ranks that share the state out under hsdp; null: those of a node", None, ge=1, le=HUGE)


@dataclass
class Data:
    source: Literal["local", "tokens", "sample"] = key("where the text comes from", fixed=True)
    revision: str | None = key("on the hub: a commit, tag or branch; null: the newest commit at the start", None)
    cache: str | None = key("copies of remote shards; tokens of small text and places in .gz (null: in ~/.cache)", None)
    root: str | None = key("folder of the shards, or its address: hf://datasets/..., s3://, gs://, https://")
    train_files: str | None = key("glob of training shards, absolute or below data.root; null: all there", None)
    validation_files: str | None = key("the same for validation; null: by file name, else a held-out share", None)
    held_out: float = key("share of documents held out, by a hash, where no files are for validation", 0.01, gt=0, lt=1)
    text_key: str = key("field of a record that holds the text; meta.text is a field in a field", "text")
    document: Literal["file", "paragraph"] = key("document of a .txt file; blank lines end a paragraph", "file")
    bad_rows: Literal["stop", "skip"] = key("rows without a text: end the run, or are left out", "stop")
    streams: int | None = key("document streams, shared by the ranks; null: gcd(global_batch, 64)", None, ge=1, le=HUGE)
    seed: int = key("orders the documents, and nothing else", 42, ge=0, le=2**32 - 1)
    packing: Literal["packed", "pad"] = key("joined documents, or one truncated document a sequence", "packed")
    mask_documents: bool = key("documents in a packed sequence see only themselves, and are scored so", False)


@dataclass
class Tokenizer:
    path: str | None = key("tokenizer.json, sentencepiece model, or their folder; null: the source's, or hub's", None)
    hub: str = key("repository on the hub with the tokenizer where path is null", "google-t5/t5-base")
    eos: str | None = key("the token that ends a document; null: the tokenizer's own", None)


@dataclass
class Train:
    steps: int = key("optimizer updates, and the span of the schedule", ge=1, le=1_000_000_000)
    lr: float = key("peak learning rate", gt=0)
    warmup_ratio: float = key("share of the steps in which the rate rises linearly", 0.1, ge=0, lt=1)
    warmup_steps: int | None = key("warm-up steps; null: train.warmup_ratio of all", None, ge=0)
    min_lr_ratio: float = key("end of the learning rate's decay, as a share of the peak", 0.1, ge=0, le=1)
    lr_decay: Literal["cosine", "linear"] = key("shape of the learning rate's decay", "cosine")
    lr_decay_steps: int | None = key("last steps, of falling rate; null: all after warm-up; 0: none", None, ge=0)
    global_batch: int = key("sequences per update, over all ranks", 512, ge=1, le=HUGE)
    micro_batch: int | Literal["auto"] | None = key(
        "sequences a rank takes at once; auto: the most that fit on its GPU; null: by scale.micro_batch",
        "auto",
        ge=1,
        le=HUGE,
    )
    seq_len: int = key("positions per sequence", 256, ge=2, le=HUGE)
    clip: float | None = key("bound of the gradient's global norm; null: none", 0.5, gt=0)
    activation_checkpointing: Literal["none", "latent", "block"] = key("kept: all, input and latents, or input", "none")
    stop_after: int | None = key("stop and save after this step; the schedule spans train.steps", None, ge=1)
    on_nonfinite: Literal["stop", "skip"] = key("an update that is not finite ends the run, or is left out", "stop")
    max_skipped: int = key("updates that may be left out in a row", 10, ge=1)


@dataclass
class Eval:
    every: int = key("steps between evaluations; train.steps or more: only the last step is evaluated", 1000, ge=1)
    tokens: int = key("real tokens of validation text, or all there is", 10_000_000, ge=1)
    packing: Literal["packed", "pad"] = key("packed, or one padded document each, as in published numbers", "pad")


@dataclass
class Checkpoint:
    every: int = key("steps between checkpoints; train.steps or more: only the last step is saved", 1000, ge=1)
    keep_last: int = key("newest checkpoints kept", 2, ge=1)
    keep_every: int | None = key("also keep a checkpoint every so many steps; null: none", None, ge=1)


@dataclass
class Log:
    every: int = key("steps between console lines where there is no terminal", 10, ge=1)


@dataclass
class Logger:
    view: Literal["jsonl", "tensorboard", "wandb"] = key("view beside metrics.jsonl", fixed=True)
    project: str | None = key("W&B project; null: WANDB_PROJECT, else dlr_pretrain", None)
    entity: str | None = key("W&B entity; null: WANDB_ENTITY, else the user's own", None)
    group: str | None = key("W&B group; null: WANDB_RUN_GROUP, else the name without its seed", None)
    tags: list[str] | None = key("W&B tags, such as [a,b]; null: WANDB_TAGS", None)  # noqa: RUF009
    name: str | None = key("name of the run in W&B; null: WANDB_NAME, else the run directory's", None)
    notes: str | None = key("W&B notes; null: WANDB_NOTES", None)


@dataclass
class Profile:
    name: str = key("name of the choice", fixed=True)
    enabled: bool = key("whether some steps are traced", fixed=True)
    start: int = key("steps of this start before the trace, compilation among them", 20, ge=1)
    steps: int = key("steps in the trace", 3, ge=1)


@dataclass
class Run:
    root: str = key("folder of the runs", "runs")
    dir: str | None = key("the run directory; null: <root>/<name of its choices, seed and other overrides>", None)
    timeout_minutes: float | None = key("minutes without progress that end a run; null: never", 10.0, gt=0, le=100_000)
    start_from: str | None = key("run, checkpoint or folder of weights to start from; null: the seed", None)
    start_optimizer: bool = key("with start_from: take over moments, step and position in the data, too", False)


@dataclass
class Config:
    """A whole run, section by section."""

    scale: Scale
    backbone: BackboneOptions
    dlr: Dlr
    optimizer: OptimizerOptions
    data: Data
    precision: Precision
    parallel: Parallel
    logger: Logger
    train: Train
    tokenizer: Tokenizer
    eval: Eval
    checkpoint: Checkpoint
    log: Log
    profile: Profile
    run: Run
    seed: int = key("initialisation, and the rounding of precision=bf16_sr", 42, ge=0, le=2**32 - 1)
    device: Literal["auto", "cpu", "cuda"] = key("where to train", "auto")
    compile: bool | Literal["max-autotune"] = key(
        "torch.compile: one graph up to 350m on one GPU, else one a block; max-autotune: tries more kernels first", True
    )

    @property
    def warmup_steps(self) -> int:
        """The warm-up in steps."""
        given = self.train.warmup_steps
        return round(self.train.steps * self.train.warmup_ratio) if given is None else given

    @property
    def lr_decay_steps(self) -> int:
        """The steps over which the learning rate decays: as given, or all after the warm-up."""
        given = self.train.lr_decay_steps
        return self.train.steps - self.warmup_steps if given is None else given

    @property
    def planned_vocab_size(self) -> int:
        """Embedding rows, for code that opens no tokenizer: the scale's, or the papers' if the scale leaves it open."""
        return self.scale.vocab_size or VOCABULARY

    def micro_batch(self, world_size: int) -> int:
        """Sequences that a rank processes at once: as given, or the largest divisor of its share up to the scale's.

        A run on GPUs has resolved ``auto`` before it asks, see ``train/update.py``. Elsewhere ``auto`` is ``null``.
        """
        if isinstance(self.train.micro_batch, int):
            return self.train.micro_batch
        return largest_divisor(self.train.global_batch // world_size, self.scale.micro_batch)

    def shards(self, world_size: int) -> int:
        """The ranks that share one copy of the state out: 1 under ddp, all under fsdp, those of a node under hsdp."""
        if self.parallel.name != "hsdp":
            return 1 if self.parallel.name == "ddp" else world_size
        of_node = os.environ.get("LOCAL_WORLD_SIZE", min(world_size, GPUS_A_NODE))
        return self.parallel.shards or int(of_node)

    @property
    def num_streams(self) -> int:
        """The number of document streams of the data order, which the ranks share."""
        return self.data.streams or math.gcd(self.train.global_batch, USUAL_STREAMS)


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of ``number`` that is at most ``at_most``."""
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


@dataclass(frozen=True)
class Key:
    """A key of a section or a knob of an option: its type, its default, and what ``key`` says of it."""

    hint: object
    default: object
    doc: str = ""
    fixed: bool = False
    bounds: Mapping[str, float] = field(default_factory=dict)

    def kinds(self) -> tuple[Any, tuple[str, ...], bool]:
        """The type of a plain value (None: there is none), the words of a Literal, and whether null is a value."""
        union = typing.get_origin(self.hint) in (typing.Union, types.UnionType)
        hints = typing.get_args(self.hint) if union else (self.hint,)
        words = tuple(w for hint in hints if typing.get_origin(hint) is Literal for w in typing.get_args(hint))
        plain = [h for h in hints if h is not type(None) and typing.get_origin(h) is not Literal]
        return plain[0] if plain else None, words, type(None) in hints

    def takes(self) -> str:
        """The values that the key takes, in words: ``a whole number of at least 1 or null``."""
        kind, words, optional = self.kinds()
        limits = [f"{BOUNDS[name][0]} {limit}" for name, limit in self.bounds.items()]
        plain = [f"{KINDS.get(kind, 'a value')} {' and '.join(limits)}".strip()] if kind else []
        return " or ".join([*plain, *words, *(["null"] if optional else [])])

    def read(self, value: Any) -> Any:
        """``value`` in the key's type; raises ValueError if the key does not take it.

        Nothing is rounded, and true and false are not numbers. The text of a number is one: that is what a variable
        gives, as in ``train.lr=${oc.env:LR}``. A number is no text: Hydra has turned 2026_11_22 into 20261122.
        """
        kind, words, optional = self.kinds()
        if (optional and value is None) or (isinstance(value, str) and value in words):
            return value
        fits = kind is object
        if kind is bool or (kind is int and type(value) is int):  # not by way of a float, which would round it
            fits = type(value) is kind and abs(value) < 1 << 63
        elif kind is str:
            fits = isinstance(value, str) and value.strip() != "" and bool(value.encode())  # raises ValueError
            value = os.path.expanduser(value) if fits else value
        elif kind == list[str]:
            value = [value] if isinstance(value, str) else value
            fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        elif kind in (int, float) and isinstance(value, (int, float, str)) and not isinstance(value, bool):
            number = float(value)
            fits = math.isfinite(number) and number == kind(number) and (kind is float or abs(number) < 1 << 63)
            value = kind(number) if fits else value
        if not fits or not all(BOUNDS[name][1](value, limit) for name, limit in self.bounds.items()):
            raise ValueError(f"must be {self.takes()}")
        return value


def keys_of(section: type) -> Iterator[tuple[str, Key]]:
    """The keys that a dataclass declares, by name."""
    hints = typing.get_type_hints(section)
    for f in dataclasses.fields(section):
        if f.metadata:
            yield f.name, Key(hints[f.name], f.default, **f.metadata)


SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in typing.get_type_hints(Config).items()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint)
}
OPEN_GROUPS = tuple(name for name, section in SECTIONS.items() if issubclass(section, Options))
ROOT = dict(keys_of(Config))  # the keys without a section
KEYS = ROOT | {  # all keys but those of the chosen backbone and optimizer
    f"{name}.{leaf}": found
    for name, section in SECTIONS.items()
    if name not in OPEN_GROUPS
    for leaf, found in keys_of(section)
}
