"""The tree of a configuration: a dataclass for each section, with the documentation and bounds of each key."""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from pathlib import Path

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
VOCABULARY = 32_000  # of the papers' models: the only size that gives 609M parameters at 1B
USUAL_STREAMS = 64  # document streams of the data order, where data.streams does not say it
GROUPS = ("scale", "backbone", "dlr", "optimizer", "data", "precision", "parallel", "logger", "probe", "profile",
          "experiment")  # fmt: skip


def key(
    doc: str,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
    words: tuple[str, ...] = (),
    identity: bool = True,
    fixed: bool = False,
    kind: type | None = None,
):
    """A documented key with its bounds, and the ``words`` that are accepted in place of a number.

    ``identity`` says whether the value takes part in the mathematics of the run: such a value names the run directory
    and must not change on resume. A ``fixed`` key says what an option is: its YAML file sets it, the command line
    cannot. ``kind`` is the type of a knob that may be null, because a default of null does not show the type.
    """
    return field(metadata=locals())


@dataclass
class Choice:
    """A group whose options bring knobs of their own; the option's YAML file declares them and their defaults."""

    name: str
    knobs: dict[str, object]

    def __getattr__(self, knob: str):
        try:
            return self.__dict__["knobs"][knob]
        except KeyError:
            raise AttributeError(f"{self.__dict__.get('name')} has no knob {knob!r}") from None


@dataclass
class Scale:
    name: str = key("name of the scale", fixed=True)
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
    global_batch: int = key("the paper's sequences per step", at_least=1)
    micro_batch: int = key("the paper's sequences per GPU", at_least=1, identity=False)
    eval_every: int = key("steps between evaluations", at_least=1, identity=False)
    eval_tokens: int = key("tokens of validation text", at_least=1)
    checkpoint_every: int = key("steps between checkpoints", at_least=1, identity=False)


@dataclass
class Dlr:
    name: str = key("name of the choice", fixed=True)
    enabled: bool = key("whether the residual is there", fixed=True)
    alpha: float = key("strength of the residual before the variance correction")
    learn_alpha: bool = key("alpha is a parameter of each layer, without weight decay")
    variance_correction: bool = key("beta = alpha / sqrt(K) rather than alpha")
    impl: str = key("weight space (free, exact fold) or the paper's branch", choices=("weight", "branch"))
    scope: str = key("which projections carry it", choices=("all", "attention", "mlp"))
    grouping: str = key("which output receives which latent", choices=("contiguous", "balanced", "random"))
    grouping_seed: int = key("of random grouping", at_least=0)
    train_b: bool = key("false: B is frozen at zero, the residual is all there is")
    mode: str = key(
        "a residual beside B, an offset added to B at the start, or one that weight decay pulls to",
        choices=("residual", "offset", "decayed_offset"),
    )


@dataclass
class Precision:
    name: str = key(
        "dtype of weights, gradients and moments, and how updates are rounded",
        choices=("bf16", "bf16_sr", "bf16_mixed", "fp32"),
        fixed=True,
    )


@dataclass
class Parallel:
    name: str = key("replicated or sharded state", choices=("ddp", "fsdp"), identity=False, fixed=True)


@dataclass
class Data:
    source: str = key("where the text comes from", choices=("c4", "c4_local", "local", "tokens", "sample"), fixed=True)
    dataset: str | None = key("name of the dataset on the hub")
    revision: str | None = key("its commit, tag or branch; null: the newest commit at the start", identity=False)
    cache: str | None = key("folder in which remote shards are kept; null: none are", identity=False)
    root: str | None = key("folder of the shards, or its address: hf://datasets/..., s3://, gs://, https://")
    train_files: str | None = key("glob of the training shards, below data.root or absolute; null: all files there")
    validation_files: str | None = key("the same for validation; null: a share of the documents is held out")
    held_out: float = key("share of the documents that is held out where no files are", above=0, below=1)
    text_key: str = key("field of a record that holds the text; meta.text is a field in a field")
    document: str = key("what a document of a .txt file is", choices=("file", "paragraph"))
    bad_rows: str = key("rows without a text: end the run, or are left out", choices=("stop", "skip"))
    streams: int | None = key(
        "document streams, which the ranks share; they divide global_batch; null: gcd(global_batch, 64)", at_least=1
    )
    seed: int = key("orders the documents, and nothing else", at_least=0, at_most=2**32 - 1)
    packing: str = key("packed sequences, or one padded document each", choices=("packed", "pad"))
    mask_documents: bool = key("documents in a packed sequence see only themselves, and are scored so")


@dataclass
class Tokenizer:
    path: str | None = key(
        "a tokenizer.json, a sentencepiece model, or a folder with one; null: the source's, or hub's"
    )
    hub: str = key("repository on the hub whose tokenizer is used where path is null and the source has none")
    eos: str | None = key("the token that ends a document; null: the tokenizer's own", identity=False)


@dataclass
class Train:
    steps: int = key("optimizer updates, and the span of the schedule", at_least=1)
    lr: float = key("peak learning rate", above=0)
    warmup_steps: int | None = key("linear warm-up; null: the paper's share of the steps", at_least=0)
    min_lr_ratio: float = key("end of the learning rate's decay, as a share of the peak", at_least=0, at_most=1)
    lr_decay: str = key("shape of the learning rate's decay", choices=("cosine", "linear"))
    lr_decay_steps: int | None = key(
        "number of last steps over which the rate falls; null: all after the warm-up; 0: none", at_least=0
    )
    global_batch: int = key("sequences per update, over all ranks", at_least=1)
    micro_batch: int | str | None = key(
        "sequences a rank takes at once; null: the paper's, auto: the most that fit its memory",
        at_least=1,
        words=("auto",),
        identity=False,
    )
    seq_len: int = key("positions per sequence", at_least=2)
    clip: float | None = key("bound of the gradient's global norm; null: none", above=0)
    accumulate: str = key("dtype in which micro-batches are summed", choices=("native", "fp32"))
    activation_checkpointing: str = key(
        "what is kept for the backward pass: everything, each block's input and latents (CoLA-M), or its input alone",
        choices=("none", "latent", "block"),
        identity=False,
    )
    init_from: str | None = key("folder of a dense export to start from; null: drawn from the seed")
    stop_after: int | None = key("stop and save after this step", at_least=1, identity=False)
    on_nonfinite: str = key(
        "an update whose loss or gradient is not finite: ends the run, or is left out",
        choices=("stop", "skip"),
        identity=False,
    )
    max_skipped: int = key("updates that may be left out in a row", at_least=1, identity=False)


@dataclass
class Eval:
    every: int = key("steps between evaluations; the last step is always evaluated", at_least=1, identity=False)
    tokens: int = key("real tokens of validation text, or all there is", at_least=1)
    packing: str = key("packed sequences, or one padded document each", choices=("packed", "pad"))


@dataclass
class Checkpoint:
    every: int = key("steps between checkpoints; the last step is always saved", at_least=1, identity=False)
    keep_last: int = key("newest checkpoints kept", at_least=1, identity=False)
    keep_every: int | None = key("and those of every so many steps; null: none", at_least=1, identity=False)
    keep_best: bool = key("and the one of the lowest evaluation loss, saved as it is found", identity=False)


@dataclass
class Log:
    every: int = key("steps between console lines where there is no terminal", at_least=1, identity=False)


@dataclass
class Logger:
    view: str = key("view beside metrics.jsonl", choices=("jsonl", "tensorboard", "wandb"), identity=False, fixed=True)
    project: str | None = key("W&B project; null: WANDB_PROJECT, else dlr_pretrain", identity=False)
    entity: str | None = key("W&B entity; null: WANDB_ENTITY, else the user's own", identity=False)
    group: str | None = key("W&B group; null: WANDB_RUN_GROUP, else the run's name without its seed", identity=False)
    tags: list[str] | None = key("W&B tags; null: WANDB_TAGS", identity=False)  # noqa: RUF009 - a field, not a shared list
    name: str | None = key("name of the run in W&B; null: WANDB_NAME, else the run directory's", identity=False)
    notes: str | None = key("W&B notes; null: WANDB_NOTES", identity=False)


@dataclass
class Probe:
    name: str = key("name of the choice", identity=False, fixed=True)
    enabled: bool = key("whether gradient paths are probed", identity=False, fixed=True)
    layers: str | None = key("projections, as globs; null: three, as in the paper", identity=False)
    every: int = key("updates between two looks", at_least=1, identity=False)


@dataclass
class Profile:
    name: str = key("name of the choice", identity=False, fixed=True)
    enabled: bool = key("whether some steps are traced", identity=False, fixed=True)
    start: int = key("steps of this start before the trace", at_least=1, identity=False)
    steps: int = key("steps in the trace", at_least=1, identity=False)


@dataclass
class Run:
    root: str = key("folder of the runs", identity=False)
    dir: str | None = key("the run directory; null: a name made of the choices", identity=False)
    timeout_minutes: float | None = key(
        "after the first step, a run that stands still for so long ends; null: never",
        above=0,
        at_most=100_000,
        identity=False,
    )
    start_from: str | None = key("run, checkpoint or exported folder whose weights a new run starts from; null: none")
    start_optimizer: bool = key("with start_from: take over moments, step and position in the data, too")


@dataclass
class Config:
    """A whole run, section by section."""

    seed: int = key("initialisation, and the rounding of precision=bf16_sr", at_least=0, at_most=2**32 - 1)
    device: str = key("where to train", choices=("auto", "cpu", "cuda"), identity=False)
    compile: bool = key("torch.compile: one graph up to 350m on one GPU, else one a block", identity=False)
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
    probe: Probe
    profile: Profile
    run: Run

    @property
    def warmup_steps(self) -> int:
        """The warm-up in steps: as given, or the paper's share of the steps."""
        if self.train.warmup_steps is not None:
            return self.train.warmup_steps
        return round(self.train.steps * self.scale.warmup_steps / self.scale.steps)

    @property
    def lr_decay_steps(self) -> int:
        """The steps over which the learning rate decays: as given, or all after the warm-up."""
        given = self.train.lr_decay_steps
        return self.train.steps - self.warmup_steps if given is None else given

    @property
    def own_schedule(self) -> bool:
        """Whether the optimizer brings a schedule of its own (LORO's)."""
        return self.optimizer.knobs.get("schedule") == "loro"

    @property
    def planned_vocab_size(self) -> int:
        """Embedding rows, for code that opens no tokenizer: the scale's, or the papers' if the scale leaves it open."""
        return self.scale.vocab_size or VOCABULARY

    def micro_batch(self, world_size: int) -> int:
        """Sequences that a rank processes at once: as given, or the largest divisor of its share up to the paper's.

        Raises ValueError for ``auto``, which a run replaces by a number when it starts: see ``train/memory.py``.
        """
        if self.train.micro_batch == "auto":
            raise ValueError("train.micro_batch=auto is not settled yet")
        if self.train.micro_batch is not None:
            return self.train.micro_batch
        return largest_divisor(self.train.global_batch // world_size, self.scale.micro_batch)

    def micro_batches(self, world_size: int) -> list[int]:
        """The micro-batches that divide a rank's share of the global batch evenly, ascending."""
        share = self.train.global_batch // world_size
        return [n for n in range(1, share + 1) if share % n == 0]

    def with_micro_batch(self, rows: int) -> Config:
        """This configuration with ``train.micro_batch=rows``."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, micro_batch=rows))

    @property
    def num_streams(self) -> int:
        """The number of document streams of the data order, which the ranks share."""
        return self.data.streams or self.usual_streams

    @property
    def usual_streams(self) -> int:
        """The number of streams where ``data.streams`` is null."""
        return math.gcd(self.train.global_batch, USUAL_STREAMS)


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of ``number`` that is at most ``at_most``."""
    return max(n for n in range(1, min(number, at_most) + 1) if number % n == 0)


SECTIONS: dict[str, type] = {
    name: hint for name, hint in typing.get_type_hints(Config).items() if dataclasses.is_dataclass(hint)
}
OPEN_GROUPS = tuple(name for name, section in SECTIONS.items() if section is Choice)
