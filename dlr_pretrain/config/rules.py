"""Rules that span several keys or concern the machine, and can be checked before a run starts.

The rules of a single backbone or optimizer are in the class of its options.
"""

import ctypes
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from dlr_pretrain.config import tree
from dlr_pretrain.config.key import ON_THE_HUB, Key
from dlr_pretrain.config.problems import MISSING, Problem, as_typed
from dlr_pretrain.config.run_folder import holds_weights
from dlr_pretrain.config.tree import CONFIG_DIR, GROUPS, OPEN_GROUPS, Config, largest_divisor
from dlr_pretrain.config.values import all_keys, flatten, target_of, to_dict
from dlr_pretrain.util.errors import first_line
from dlr_pretrain.util.secrets import redact


def validate(cfg: Config, world_size: int | None, machine: bool = True) -> list[Problem]:
    """Every broken rule that spans several keys, for a run on ``world_size`` ranks (None: unknown).

    Without ``machine``, rules about this machine's files and packages are not checked.
    """
    problems = [*_model(cfg), *_attention(cfg), *_dlr(cfg), *_schedule(cfg), *_texts(cfg), *_secrets(cfg)]
    if cfg.run.push is not None and not ON_THE_HUB.fullmatch(cfg.run.push):
        problems.append(Problem("run.push", cfg.run.push, "must be owner/name, a repository on the hub"))
    if cfg.run.start_optimizer and cfg.run.start_from is None:
        problems.append(Problem("run.start_optimizer", True, "needs a run to start from", "Set run.start_from"))
    problems += [*cfg.backbone.problems(cfg), *cfg.optimizer.problems(cfg)]
    if world_size is not None:
        problems += _batch(cfg, world_size)
    if machine:
        problems += _machine(cfg)
    return problems


def unused(cfg: Config, given: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each key in ``given``, the keys of a command line, that this run would ignore."""
    written = to_dict(cfg)
    keys, values = all_keys(written), flatten(written)
    for name in sorted(keys.keys() & set(given)):  # the other words choose options
        if why := next(_reasons(name, keys[name], cfg, values, given), None):
            yield Problem(name, values.get(name, {}), f"would be ignored: {why}", "Leave it out")


def _reasons(name: str, key: Key, cfg: Config, values: Mapping[str, object], given: Collection[str]) -> Iterator[str]:
    """Yields the reasons why the run would not read the key ``name``."""
    for other, wanted in key.read_if.items():
        if other in values and values[other] not in wanted:
            group, _, leaf = other.rpartition(".")
            value = values[f"{group}.name" if leaf == "enabled" else other]
            names_option = group in GROUPS and leaf in ("enabled", "view", "source", "name")
            yield f"{group}={value}" if names_option else f"{other}={as_typed(value)}"
    if name == "data.mask_documents" and "packed" not in (cfg.data.packing, cfg.eval.packing):
        yield f"data.packing={cfg.data.packing} and eval.packing={cfg.eval.packing}"
    if name == "backbone.init" and _starts_from_weights(cfg):
        yield "the factors start from run.start_from"
    places = (cfg.data.root, cfg.data.train_files, cfg.data.validation_files)
    if name == "data.revision" and not any((place or "").startswith("hf://") for place in places):
        yield "no text comes from the hub"
    if name in ("train.lr_decay", "train.min_lr_ratio") and cfg.train.lr_decay_steps == 0:
        yield "train.lr_decay_steps=0"
    if name == "scale.rank" and cfg.backbone.rank is cfg.optimizer.rank is None:
        yield f"backbone={cfg.backbone.name} has no rank"
    instead = {"scale.rank": {"backbone.rank", "optimizer.rank"}, "run.root": {"run.dir"}}
    yield from (f"{other} is given" for other in instead.get(name, set()) & set(given))


def _model(cfg: Config) -> Iterator[Problem]:
    s, factorized = cfg.scale, cfg.backbone.factorized
    options = target_of(cfg.backbone)
    ours = CONFIG_DIR / "backbone" / f"{cfg.backbone.name}.yaml"
    if ours.is_file() and options not in ours.read_text("utf-8"):
        rule = f"is the name of a backbone of this package, but the class {options} is not that backbone's"
        yield Problem("backbone.name", cfg.backbone.name, rule, "Choose another name in its YAML file")
    if "layer" not in vars(type(cfg.backbone)):  # not inherited: a run would have this name and the layers of another
        yield Problem("backbone", cfg.backbone.name, f"its class {options} names no layer", "Set its attribute layer")
    if s.head_dim is not None and s.head_dim % 2:
        yield Problem("scale.head_dim", s.head_dim, "must be even, because rotary embeddings turn pairs of values")
    if s.head_dim is None and s.hidden_size % (2 * s.num_heads):
        rule = f"must divide scale.hidden_size={s.hidden_size} into heads of even width"
        yield Problem("scale.num_heads", s.num_heads, rule, "Or set an even scale.head_dim")
    if s.num_heads % s.kv_heads:
        yield Problem("scale.num_kv_heads", s.num_kv_heads, f"must divide scale.num_heads={s.num_heads}")
    narrowest = min(s.hidden_size, s.intermediate_size, s.kv_heads * s.head_width or s.hidden_size)
    for group in OPEN_GROUPS:
        rank = getattr(cfg, group).rank
        if rank is not None and not 1 <= rank <= narrowest:
            yield Problem(f"{group}.rank", rank, f"must lie between 1 and the narrowest layer's width, {narrowest}")
    if cfg.train.activation_checkpointing == "latent" and not factorized:
        rule = f"backbone={cfg.backbone.name} has no latents to keep"
        yield Problem("train.activation_checkpointing", "latent", rule, "Use block, or a factorised backbone")
    if cfg.dlr.enabled and not factorized:
        rule = f"backbone={cfg.backbone.name} has no up-projection to carry the residual"
        yield Problem("dlr", cfg.dlr.name, rule, "Use dlr=off, or a low-rank backbone such as backbone=cola")
    if cfg.precision.name == "bf16_sr" and not cfg.optimizer.rounds_stochastically:
        rule = f"optimizer={cfg.optimizer.name} always rounds its weights to nearest"
        yield Problem("precision", "bf16_sr", rule, "Use optimizer=adamw or adamw_8bit, or precision=bf16_mixed")


def _attention(cfg: Config) -> Iterator[Problem]:
    if cfg.attention != "triton":
        return
    width, length, longest = cfg.scale.head_width, cfg.train.seq_len, tree.TRITON_POSITIONS
    if width not in tree.TRITON_HEADS or cfg.scale.kv_heads != cfg.scale.num_heads:
        rule = f"needs heads of width {', '.join(map(str, tree.TRITON_HEADS))}, as many of k and v as of q; those of "
        rule += f"scale={cfg.scale.name} have {width} ({cfg.scale.num_heads} of q, {cfg.scale.kv_heads} of k)"
        yield Problem("attention", "triton", rule, "Use attention=sdpa, or another scale.num_heads")
    if length % tree.TRITON_BLOCK or length > longest:
        rule = f"needs a multiple of {tree.TRITON_BLOCK} up to {longest} as train.seq_len, which is {length}"
        yield Problem("attention", "triton", rule, "Use attention=sdpa, or another train.seq_len")
    if cfg.precision.name == "fp32":
        yield Problem("attention", "triton", "multiplies in bf16, not in fp32", "Use attention=sdpa")
    if cfg.device == "cpu":
        yield from filter(None, [attention_problem(cfg, "cpu")])


def _dlr(cfg: Config) -> Iterator[Problem]:
    dlr, masters = cfg.dlr, cfg.precision.name not in ("bf16", "bf16_sr")
    free = masters and dlr.train_b and dlr.mode != "offset"
    if dlr.enabled and _starts_from_weights(cfg) and not free:
        rule = f"sets B to the weights minus the residual, which dlr={dlr.name} in {cfg.precision.name} would lose"
        fix = "Use dlr=off, or dlr=on with precision=bf16_mixed or fp32"
        yield Problem("run.start_from", cfg.run.start_from, rule, fix)
    special = {f"mode={dlr.mode}": dlr.mode != "residual", "learn_alpha=true": dlr.learn_alpha,
               "train_b=false": not dlr.train_b}  # fmt: skip
    if sum(special.values()) > 1:
        rule = f"{' and '.join(name for name, chosen in special.items() if chosen)} are mutually exclusive"
        yield Problem("dlr", dlr.name, rule, "Keep one of them")


def _starts_from_weights(cfg: Config) -> bool:
    """Whether ``run.start_from`` is a folder of weights. (A checkpoint, in contrast, holds B without the residual.)"""
    return cfg.run.start_from is not None and holds_weights(Path(cfg.run.start_from))


def _batch(cfg: Config, world_size: int) -> Iterator[Problem]:
    batch, streams, micro_batch = cfg.train.global_batch, cfg.num_streams, cfg.train.micro_batch
    share, shards = batch // world_size, cfg.shards(world_size)

    def fitting(share: int) -> int:
        return world_size * largest_divisor(share, max(1, tree.DEFAULT_STREAMS // world_size))

    if world_size % shards:
        fix = f"Try {largest_divisor(world_size, shards)}, or start {-(-world_size // shards) * shards} ranks"
        yield Problem("parallel.shards", shards, f"must divide the {world_size} ranks", fix)
    if batch % world_size:
        rule, fix = f"must be a multiple of the {world_size} ranks", f"Try {(share + 1) * world_size}"
        fix += f" data.streams={fitting(share + 1)}" if tree.DEFAULT_STREAMS % world_size else ""
        yield Problem("train.global_batch", batch, rule, fix)
    elif batch % streams:
        fix = f"Try {largest_divisor(batch, streams)}"
        yield Problem("data.streams", streams, f"must divide train.global_batch={batch}", fix)
    elif streams % world_size:
        rule = f"must be a multiple of the {world_size} ranks, which share the data streams evenly"
        fewer = largest_divisor(streams, world_size)
        fix = f"Set data.streams={fitting(share)} before the first start, or start {fewer} ranks"
        yield Problem("data.streams", streams, rule, fix)
    elif isinstance(micro_batch, int) and share % micro_batch:
        rule = f"must divide a rank's share of train.global_batch, {share} sequences"
        yield Problem("train.micro_batch", micro_batch, rule, f"Try {largest_divisor(share, micro_batch)}")


def _schedule(cfg: Config) -> Iterator[Problem]:
    t, every, keep_every = cfg.train, cfg.checkpoint.every, cfg.checkpoint.keep_every
    after = t.steps - cfg.warmup_steps
    if cfg.warmup_steps >= t.steps:
        name = "train.warmup_ratio" if t.warmup_steps is None else "train.warmup_steps"
        rule = f"gives {cfg.warmup_steps} warm-up steps, which must be below train.steps={t.steps}"
        yield Problem(name, t.warmup_ratio if t.warmup_steps is None else t.warmup_steps, rule)
    elif t.lr_decay_steps is not None and (t.lr_decay_steps > after or t.lr_decay_steps == 1):
        rule = f"must be 0, or from 2 to {after}, the number of steps after the warm-up"
        yield Problem("train.lr_decay_steps", t.lr_decay_steps, rule)
    if t.stop_after is not None and t.stop_after > t.steps:
        yield Problem("train.stop_after", t.stop_after, f"must be at most train.steps={t.steps}")
    if keep_every is not None and keep_every % every:
        fix = f"Try {max(1, round(keep_every / every)) * every}"
        yield Problem("checkpoint.keep_every", keep_every, f"must be a multiple of checkpoint.every={every}", fix)
    last, end = t.stop_after or t.steps, cfg.profile.start + cfg.profile.steps
    if cfg.profile.enabled and end > last:
        rule = f"with profile.steps={cfg.profile.steps}, the trace must end within the {last} steps of the run"
        yield Problem("profile.start", cfg.profile.start, rule)


def _texts(cfg: Config) -> Iterator[Problem]:
    data = cfg.data
    if data.source == "local" and data.root is None and data.train_files is None:
        rule = "data=local needs the folder of its files"
        yield Problem("data.root", None, rule, "Set data.root=<folder>, or use data=sample")
    if data.source == "mix" and not data.sources:
        fix = "Set data.sources.<name>={root: <folder of tokens>, weight: <number>} for each"
        yield Problem("data.sources", MISSING, "data=mix needs the texts that it mixes", fix)
    names = [f"data.sources.{name}" for name in data.sources] + [f"eval.sets.{name}" for name in cfg.eval.sets]
    for name in names:
        if not re.fullmatch(r"[\w-]+", name.split(".", 2)[2]):
            yield Problem(name, MISSING, "a name has only letters, digits, _ and -")
    for name in data.sources.keys() & cfg.eval.sets.keys():
        rule = f"data.sources.{name} is evaluated under this name"
        yield Problem(f"eval.sets.{name}", MISSING, rule, "Choose another name")


def _secrets(cfg: Config) -> Iterator[Problem]:
    for name, value in flatten(to_dict(cfg)).items():
        if isinstance(value, (str, list)) and redact(str(value)) != str(value):
            rule = "holds a password or a token, and a run stores its configuration"
            yield Problem(name, value, rule, "Use HF_TOKEN, WANDB_API_KEY or ~/.netrc")


def _machine(cfg: Config) -> Iterator[Problem]:
    path, data = cfg.tokenizer.path, cfg.data
    texts = {"data": data} | {f"data.sources.{name}": one for name, one in data.sources.items()}
    for name, text in (texts | {f"eval.sets.{name}": one for name, one in cfg.eval.sets.items()}).items():
        root = text.root or ""
        if text.source == "local" and root and "://" not in root and not os.path.isdir(root):
            files = "validation_files" if name.startswith("eval.") else "train_files"
            fix = f"Set {name}.root=<folder of the shards>, or {name}.{files}=<file>"
            yield Problem(f"{name}.root", root, "is a file" if os.path.isfile(root) else "no such folder", fix)
    if path is not None and not os.path.exists(path):
        on_the_hub = f"; on the hub: tokenizer.hub={path}" if re.fullmatch(r"[\w-]+(/[\w.-]+)?", path) else ""
        fix = f"Name a tokenizer.json, a sentencepiece model or a folder with one{on_the_hub}"
        yield Problem("tokenizer.path", path, "no such file", fix)
    for name, place in (("run.root", cfg.run.root), ("run.dir", cfg.run.dir)):
        if place is not None and os.path.isfile(place):
            yield Problem(name, place, "is a file, not a folder")
    for name, chosen, option, package, extra, instead in (
        ("optimizer", cfg.optimizer.name, "adamw_8bit", "torchao", "8bit", "adamw"),
        ("logger", cfg.logger.view, "tensorboard", "tensorboard", "tensorboard", "jsonl"),
    ):
        if chosen == option and importlib.util.find_spec(package) is None:
            fix = f'Use pip install -e ".[{extra}]", or {name}={instead}'
            yield Problem(name, option, f"needs the package {package}, which is not installed", fix)


def attention_problem(cfg: Config, device: str) -> Problem | None:
    """The problem if ``attention=triton`` finds no GPU, or no Triton."""
    if cfg.attention != "triton" or (device == "cuda" and importlib.util.find_spec("triton") is not None):
        return None
    missing = "Triton, which is not installed" if device == "cuda" else "a GPU"
    return Problem("attention", "triton", f"needs {missing}", "Use attention=sdpa")


def compiler_problem(cfg: Config, device: str) -> Problem | None:
    """The problem if ``compile=true`` finds no compiler on this machine (C++ for a CPU, else C), or cannot use it."""
    variable, usual = ("CXX", ["g++", "clang++"]) if device == "cpu" else ("CC", ["gcc", "clang"])
    compilers = [os.environ[variable]] if variable in os.environ else usual
    if not cfg.compile:
        return None
    if (compiler := next(filter(None, map(shutil.which, compilers)), None)) is None:
        rule = f"needs a compiler ({' or '.join(compilers)}), which is not installed"
        return Problem("compile", cfg.compile, rule, f"Use compile=false, or set {variable} to a compiler")
    cache = "TORCHINDUCTOR_CACHE_DIR"  # Triton's as well, unless it has its own
    cache = "TRITON_CACHE_DIR" if device != "cpu" and "TRITON_CACHE_DIR" in os.environ else cache
    places = {"TMPDIR": tempfile.gettempdir()}
    places[cache] = os.environ.get(cache) or places["TMPDIR"]
    for name, folder in places.items():
        if device == "cpu" and re.search(r"[\s'\"\\]", folder):  # torch splits its commands for the compiler there
            rule = f"torch cannot compile in {folder} ({name}), whose name holds a space, a quote or a backslash"
            return Problem("compile", cfg.compile, rule, f"Set {name} to another folder, or use compile=false")
    why = _library_error(Path(places[cache]), compiler, ".cpp" if device == "cpu" else ".c")
    if why is None:
        return None
    rule = f"compiled code cannot be kept in {places[cache]}: {why}"
    fix = f"Set {cache} to another folder on this machine"
    if "Python.h" in why:
        rule, fix = f"needs Python's headers: {why}", "Install them (python3-dev)"
    return Problem("compile", cfg.compile, rule, f"{fix}, or use compile=false")


def _library_error(folder: Path, compiler: str, suffix: str) -> str | None:
    """Why a library with Python's headers cannot be compiled in ``folder`` and loaded from there; None if it can."""
    include = sysconfig.get_paths()["include"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".dlr_pretrain-", dir=folder) as scratch:
            source, library = Path(scratch, f"empty{suffix}"), Path(scratch, "empty.so")
            source.write_text("#include <Python.h>\n")
            command = [compiler, "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                errors = [line for line in done.stderr.splitlines() if "error" in line]
                return f"{compiler}: {first_line((errors or [done.stderr])[0])}"
            ctypes.CDLL(str(library))
    except OSError as error:
        return first_line(error)
    return None
