"""Every key of a run, with all its facts (see ``key``). The files in ``configs/`` hold the values of options."""

from __future__ import annotations

import dataclasses
import math
import os
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from dlr_pretrain.config.key import Key, key, keys_of, section
from dlr_pretrain.config.problems import Problem

PACKAGE = Path(__file__).resolve().parents[1]
CONFIG_DIR = next(folder for folder in (PACKAGE / "configs", PACKAGE.parent / "configs") if folder.is_dir())
HUGE = 1 << 20  # bound on numbers that a typo could make so large that a check would hang
PAPER_VOCAB_SIZE = 32_000  # of the papers' models: the only size that gives 609M parameters at 1B
TRITON_HEADS, TRITON_BLOCK, TRITON_POSITIONS = (32, 64, 128), 64, 512  # what attention=triton can compute
GPUS_A_NODE = 8  # assumed for plans, where torchrun does not set it
DEFAULT_STREAMS = 64  # document streams of the data order, if data.streams is null and the batch allows it
GROUPS = ("scale", "backbone", "dlr", "optimizer", "data", "precision", "parallel", "logger", "profile", "experiment")
FILES = {"data.source": "local"}  # of keys that are read if the text is in files
ANY_FILES = {"data.source": ("local", "mix")}  # the same, also if a mixture reads files
count = partial(key, ge=1, le=HUGE)
changing = partial(key, changes=True)  # of keys that may change on resume
of_files, of_any_files = partial(key, origin=True, read_if=FILES), partial(key, origin=True, read_if=ANY_FILES)
TOKENISED = {"data.source": ("local", "sample", "mix")}  # of keys that are read unless the text is tokens already
COSINE = {"optimizer.schedule": "cosine"}  # of keys that are read unless the optimizer has its own schedule


@dataclass
class Options:
    """The options of a backbone or an optimizer. Its YAML file names the class as ``_target_``.

    A subclass is in the file that uses it, in this package or in a user's own. A field with a ``key`` is a key of
    the configuration, whose value is in the YAML file. The other attributes describe the backbone or optimizer.
    """

    name: str = key("name of the option", fixed=True)
    rank: int | None = None

    def problems(self, cfg: Config) -> Iterator[Problem]:
        """Yields the rules of this option that ``cfg`` breaks."""
        yield from ()


@dataclass
class BackboneOptions(Options):
    shared: ClassVar[Key] = section(binds="weights")
    layer: ClassVar[Any]  # the class of the projections, a ``models.layer.Layer``; not inherited
    factorized: ClassVar[bool] = False  # y = B z, so DLR can be attached
    swiglu_silu: bool = True
    merge_every: int | None = None  # updates between merges, after which the learning rate warms up again
    restart_warmup: int = 0
    exported_keys: ClassVar[tuple[str, ...]]  # keys that an exported layer reads; not inherited
    exported_layer: ClassVar[str] = ""  # the class of this layer, unless in ``deploy/exported_layers.py``


class How(NamedTuple):
    """How updates are computed and rounded."""

    compiled: bool = False  # compile AdamW's updates that are not torch's own kernels
    rounding_seed: int | None = None  # of stochastic rounding, for optimizers that support it; None: to nearest


@dataclass
class OptimizerOptions(Options):
    name: str = key("name of the option", fixed=True, binds="moments")
    elementwise: ClassVar[bool] = False  # the update of a fused parameter equals that of its parts
    rounds_stochastically: ClassVar[bool] = False

    @property
    def restart_every(self) -> int | None:
        """The updates between restarts, if the optimizer has its own schedule."""
        return None

    def rate(self, cfg: Config, index: int) -> float:
        """The learning rate of the update with this ``index``, counted from 0, by the optimizer's own schedule."""
        raise NotImplementedError

    def build(self, parameters: dict[str, Any], how: How) -> list[Any]:
        """Optimizers in the style of ``torch.optim`` for disjoint parts of the named ``parameters``."""
        raise NotImplementedError


@dataclass
class Scale:
    shared: ClassVar[Key] = section(binds="weights")
    name: str = key("name of the scale", fixed=True)
    source: str | None = key("what scale.from names, if it was given", None, fixed=True, changes=True)
    hidden_size: int = count("width of the residual stream")
    intermediate_size: int = count("width of the SwiGLU")
    num_heads: int = count("attention heads")
    num_kv_heads: int | None = count("heads of k and v, which those of q share; null: num_heads", None)
    head_dim: int | None = key("width of a head; null: hidden_size / num_heads", None, ge=2, le=HUGE)
    num_layers: int = key("transformer blocks", ge=1, le=10_000)
    rank: int = key("rank of the low-rank factors", ge=1)
    vocab_size: int | None = key("embedding rows; null: the tokenizer's", PAPER_VOCAB_SIZE, ge=4, le=10_000_000)
    rope_theta: float = key("base of the rotary embeddings", 10_000.0, gt=1)
    norm_eps: float = key("epsilon of the RMSNorms", 1e-6, gt=0, lt=1)
    tie_embeddings: bool = key("the head multiplies by the embedding, and has no weight of its own", False)
    micro_batch: int = count(
        "the paper's sequences per GPU, used by train.micro_batch=null, and by auto without a GPU",
        changes=True,
        read_if={"train.micro_batch": (None, "auto")},
    )

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads


@dataclass
class Dlr:
    shared: ClassVar[Key] = section(binds="weights", read_if={"dlr.enabled": True})
    name: str = key("name of the option", fixed=True)
    enabled: bool = key("whether there is a residual", True, fixed=True)
    alpha: float = key("strength of the residual before the variance correction", 1.0, ge=-1000, le=1000)
    learn_alpha: bool = key("alpha is learned for each projection, without weight decay", False)
    variance_correction: bool = key("beta = alpha / sqrt(K), with K copies of each latent; false: beta = alpha", True)
    grouping: Literal["contiguous", "random"] = key("latent of output i: floor(i / K), or random", "contiguous")
    grouping_seed: int = key(
        "seed of random grouping, combined with the layer's name", 0, read_if={"dlr.grouping": "random"}, ge=0
    )
    train_b: bool = key("false: B is frozen at zero, and only the residual remains", True)
    mode: Literal["residual", "offset"] = key("a residual beside B, or only an initial offset of B", "residual")

    @property
    def has_residual(self) -> bool:
        return self.enabled and self.mode == "residual"


@dataclass
class Precision:
    shared: ClassVar[Key] = section(binds="moments")
    name: Literal["bf16", "bf16_sr", "bf16_mixed", "fp32"] = key("dtype of the state, and its rounding", fixed=True)


@dataclass
class Parallel:
    shared: ClassVar[Key] = section(changes=True)
    name: Literal["ddp", "fsdp", "hsdp"] = key("replicated or sharded state, or both", fixed=True)
    shards: int | None = count(
        "ranks that hold one sharded copy under hsdp; null: those of a node", None, read_if={"parallel.name": "hsdp"}
    )


LOCAL_ENTRY = {".source": "local"}  # of the same source or set


@dataclass
class ValidationText:
    """A further validation set: ``eval.sets.<name>``."""

    root: str = key("folder of its tokens or files, or an address", path=True, origin=True)
    source: Literal["tokens", "local"] = key(
        "tokens of scripts/prepare_data.py, or files of text", "tokens", origin=True
    )
    validation_files: str | None = key("as data.validation_files", None, origin=True, read_if=LOCAL_ENTRY)
    text_key: str = key("as data.text_key", "text", origin=True, read_if=LOCAL_ENTRY)


@dataclass
class MixedText(ValidationText):
    """A source of a mixture: ``data.sources.<name>``."""

    shared: ClassVar[Key] = section(binds="position", read_if={"data.source": "mix"})
    weight: float = key("share of the sequences, relative to the others' weights", evaluates=True, ge=1e-6, le=1e6)
    train_files: str | None = key("as data.train_files", None, origin=True, read_if=LOCAL_ENTRY)


@dataclass
class Data:
    shared: ClassVar[Key] = section(binds="position")
    source: Literal["local", "tokens", "sample", "mix"] = key("where the text comes from", fixed=True, origin=True)
    sources: dict[str, MixedText] = key(  # noqa: RUF009
        "the texts of a mixture: data.sources.web={root: tokens/web, weight: 0.7}", {}, read_if={"data.source": "mix"}
    )
    revision: str | None = changing("on the hub: a commit, tag or branch; null: the newest commit at the start", None)
    cache: str | None = key(
        "folder for copies of remote shards, and for the tokens of text that is not streamed; null: in ~/.cache",
        None,
        path=True,
        changes=True,
        read_if=TOKENISED,
    )
    root: str | None = key(
        "folder of the shards, or its address: hf://datasets/..., s3://, gs://, https://",
        path=True,
        origin=True,
        read_if={"data.source": ("local", "tokens", "sample")},
    )
    train_files: str | None = of_files("glob of training shards, absolute or below data.root; null: all files", None)
    validation_files: str | None = of_files("the same for validation; null: by file name, else a held-out share", None)
    held_out: float = key(
        "share of documents held out, by a hash, if there are no validation files",
        0.01,
        origin=True,
        read_if=TOKENISED | {"data.validation_files": None},
        gt=0,
        lt=1,
    )
    text_key: str = of_files("field of a record that holds the text; meta.text is a nested field", "text")
    document: Literal["file", "paragraph"] = of_any_files(
        "what counts as a document in a .txt file; blank lines end a paragraph", "file"
    )
    bad_rows: Literal["stop", "skip"] = of_any_files("rows without text end the run, or are left out", "stop")
    special_tokens: Literal["text", "tokens"] = of_files(
        "special tokens of a tokenizer.json in a text, such as those of chats: ordinary characters, or tokens", "text"
    )
    streams: int | None = count("document streams, shared by the ranks; null: gcd(global_batch, 64)", None)
    seed: int = key("seed of the order of documents, and of nothing else", 42, ge=0, le=2**32 - 1)
    packing: Literal["packed", "pad"] = key("joined documents, or one truncated document per sequence", "packed")
    mask_documents: bool = key(
        "each document in a packed sequence is read and scored separately", False, evaluates=True
    )


@dataclass
class Tokenizer:
    shared: ClassVar[Key] = section(binds="weights")
    path: str | None = key(
        "tokenizer.json, SentencePiece model, or a folder with either; null: the source's, else tokenizer.hub",
        None,
        path=True,
        origin=True,
    )
    hub: str = key(
        "repository on the hub with the tokenizer, if path is null",
        "google-t5/t5-base",
        origin=True,
        read_if=ANY_FILES | {"tokenizer.path": None},
    )
    eos: str | None = key(
        "the token that ends a document; null: the tokenizer's own",
        None,
        changes=True,
        read_if=TOKENISED,
    )


@dataclass
class Train:
    steps: int = key("optimizer steps, and the span of the schedule", ge=1, le=1_000_000_000)
    lr: float = key("peak learning rate", gt=0)
    warmup_ratio: float = key(
        "share of the steps in which the rate rises linearly", 0.1, read_if={"train.warmup_steps": None}, ge=0, lt=1
    )
    warmup_steps: int | None = key("warm-up steps; null: train.warmup_ratio of all", None, ge=0)
    min_lr_ratio: float = key("final learning rate, as a share of the peak", 0.1, ge=0, le=1)
    lr_decay: Literal["cosine", "linear"] = key("shape of the learning rate's decay", "cosine", read_if=COSINE)
    lr_decay_steps: int | None = key(
        "steps of decay at the end; null: all after the warm-up; 0: none", None, read_if=COSINE, ge=0
    )
    global_batch: int = count("sequences per step, over all ranks", 512, binds="position")
    micro_batch: int | Literal["auto"] | None = count(
        "sequences that a rank processes at once; auto: as many as fit on its GPU; null: by scale.micro_batch",
        "auto",
        changes=True,
    )
    seq_len: int = key("positions per sequence", 256, binds="position", evaluates=True, ge=2, le=HUGE)
    clip: float | None = key("maximum of the gradient's global norm; null: none", 0.5, gt=0)
    activation_checkpointing: Literal["none", "latent", "block"] = changing(
        "what a block keeps: all activations, its input and latents, or its input", "none"
    )
    stop_after: int | None = changing("stop and save after this step; the schedule spans train.steps", None, ge=1)
    on_nonfinite: Literal["stop", "skip"] = changing("a step that is not finite ends the run, or is skipped", "stop")
    max_skipped: int = changing("steps that may be skipped in a row", 10, read_if={"train.on_nonfinite": "skip"}, ge=1)


@dataclass
class Eval:
    every: int = changing("steps between evaluations; train.steps or more: only the last step is evaluated", 1000, ge=1)
    tokens: int = key(
        "real tokens of validation text; all of it, if there are fewer. The last padded document is whole",
        10_000_000,
        evaluates=True,
        ge=1,
    )
    packing: Literal["packed", "pad"] = key(
        "packed, or a padded document per sequence, as in published numbers", "pad", evaluates=True
    )
    sets: dict[str, ValidationText] = key(  # noqa: RUF009
        "further validation sets: eval.sets.code={root: tokens/code}", {}
    )


@dataclass
class Checkpoints:
    shared: ClassVar[Key] = section(changes=True)
    every: int = key("steps between checkpoints; train.steps or more: only the last step is saved", 1000, ge=1)
    keep_last: int = key("newest checkpoints kept", 2, ge=1)
    keep_every: int | None = key("steps between checkpoints that are kept for good; null: none", None, ge=1)


@dataclass
class Log:
    shared: ClassVar[Key] = section(changes=True)
    every: int = key("steps between console lines if the output is not a terminal", 10, ge=1)


@dataclass
class Logger:
    shared: ClassVar[Key] = section(changes=True, read_if={"logger.view": "wandb"})
    view: Literal["jsonl", "tensorboard", "wandb"] = key("view beside metrics.jsonl", fixed=True)
    project: str | None = key("W&B project; null: WANDB_PROJECT, else dlr_pretrain", None)
    entity: str | None = key("W&B entity; null: WANDB_ENTITY, else the user's own", None)
    group: str | None = key("W&B group; null: WANDB_RUN_GROUP, else the name without its seed", None)
    tags: list[str] | None = key("W&B tags, such as [a,b]; null: WANDB_TAGS", None)  # noqa: RUF009
    name: str | None = key("name of the run in W&B; null: WANDB_NAME, else the run directory's", None)
    notes: str | None = key("W&B notes; null: WANDB_NOTES", None)


@dataclass
class Profile:
    shared: ClassVar[Key] = section(changes=True, read_if={"profile.enabled": True})
    name: str = key("name of the option", fixed=True)
    enabled: bool = key("whether some steps are traced", fixed=True)
    start: int = key("steps of this start before the trace, including compilation", 20, ge=1)
    steps: int = key("steps in the trace", 3, ge=1)


@dataclass
class Run:
    root: str = changing("folder of the runs", "runs", path=True)
    dir: str | None = changing(
        "the run directory; null: <root>/<name of its options, seed and other overrides>", None, path=True
    )
    timeout_minutes: float | None = changing(
        "minutes without progress that end a run; null: never", 10.0, gt=0, le=100_000
    )
    start_from: str | None = key(
        "run, checkpoint or folder of weights to start from; null: drawn from the seed", None, path=True
    )
    start_optimizer: bool = key("with start_from: also load moments, step and position in the data", False)
    push: str | None = changing("owner/name on the hub to push the folded model to, private if new", None)


@dataclass
class Config:
    """The configuration of a run."""

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
    checkpoint: Checkpoints
    log: Log
    profile: Profile
    run: Run
    seed: int = key("seed of initialisation, and of the rounding of precision=bf16_sr", 42, ge=0, le=2**32 - 1)
    device: Literal["auto", "cpu", "cuda"] = changing("where to train", "auto")
    compile: bool | Literal["max-autotune"] = changing(
        "torch.compile, block by block; max-autotune: tries more kernels", True
    )
    attention: Literal["auto", "sdpa", "triton"] = changing(
        "rotary embedding, then torch's attention (sdpa), or our kernel for both and document masks (triton); "
        "auto: sdpa, until both are timed",
        "auto",
    )
    cuda_graphs: bool = key(
        "on a GPU, record a compiled micro-batch once and replay it as a CUDA graph",
        True,
        changes=True,
        read_if={"compile": (True, "max-autotune")},
    )

    @property
    def warmup_steps(self) -> int:
        given = self.train.warmup_steps
        return round(self.train.steps * self.train.warmup_ratio) if given is None else given

    @property
    def lr_decay_steps(self) -> int:
        """The number of steps in which the learning rate decays: as given, or all after the warm-up."""
        given = self.train.lr_decay_steps
        return self.train.steps - self.warmup_steps if given is None else given

    @property
    def attention_kernel(self) -> Literal["sdpa", "triton"]:
        """The attention of training. For ``auto``, a table of measured times will decide here; there is none yet."""
        return "sdpa" if self.attention == "auto" else self.attention

    @property
    def planned_vocab_size(self) -> int:
        """Embedding rows for code that opens no tokenizer: the scale's, or else the papers'."""
        return self.scale.vocab_size or PAPER_VOCAB_SIZE

    def micro_batch(self, world_size: int) -> int:
        """The micro-batch of a rank: as given, or the largest divisor of its share up to the scale's.

        A run on GPUs resolves ``auto`` before this call (see ``train/micro_batch.py``). Elsewhere ``auto`` means null.
        """
        if isinstance(self.train.micro_batch, int):
            return self.train.micro_batch
        return largest_divisor(self.train.global_batch // world_size, self.scale.micro_batch)

    def why_no_graphs(self, world_size: int) -> str | None:
        """Why a GPU does not replay micro-batches as CUDA graphs; None if it does."""
        if not self.compile or not self.cuda_graphs:
            return "cuda_graphs=false" if self.compile else "compile=false"
        several = self.train.global_batch > world_size * self.micro_batch(world_size)
        if self.parallel.name == "hsdp" and several:
            return "hsdp sums several micro-batches outside their gradients"
        return None

    def shards(self, world_size: int) -> int:
        """The number of ranks that hold one copy of the state: 1 under ddp, all under fsdp, a node's under hsdp."""
        if self.parallel.name != "hsdp":
            return 1 if self.parallel.name == "ddp" else world_size
        of_node = os.environ.get("LOCAL_WORLD_SIZE", min(world_size, GPUS_A_NODE))
        return self.parallel.shards or int(of_node)

    @property
    def num_streams(self) -> int:
        return self.data.streams or math.gcd(self.train.global_batch, DEFAULT_STREAMS)


def largest_divisor(number: int, at_most: int) -> int:
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


SECTIONS: dict[str, type] = {
    name: hint
    for name, hint in typing.get_type_hints(Config).items()
    if isinstance(hint, type) and dataclasses.is_dataclass(hint)
}
OPEN_GROUPS = tuple(name for name, declared in SECTIONS.items() if issubclass(declared, Options))


def keys_in(name: str, declared: type) -> dict[str, Key]:
    """The keys that the class ``declared`` gives section ``name``, by dotted name."""
    shared = getattr(declared, "shared", section())
    return {f"{name}.{leaf}": key.within(shared, name) for leaf, key in keys_of(declared)}


def entry_keys(tree: Mapping[str, Any]) -> dict[str, Key]:
    """The keys of the named entries of a configuration, such as ``data.sources.web.root``."""
    keys: dict[str, Key] = {}
    for name, declared in ENTRIES.items():
        group, _, leaf = name.partition(".")
        entries = (tree.get(group) or {}).get(leaf)
        for entry in entries if isinstance(entries, Mapping) else ():
            keys |= keys_in(f"{name}.{entry}", declared)
    return keys


ENTRIES: dict[str, type] = {"data.sources": MixedText, "eval.sets": ValidationText}  # named by users
ROOT = dict(keys_of(Config))  # the keys without a section
KEYS = dict(ROOT)  # all keys but those of the chosen backbone and optimizer
for name, declared in SECTIONS.items():
    KEYS |= {} if name in OPEN_GROUPS else keys_in(name, declared)
