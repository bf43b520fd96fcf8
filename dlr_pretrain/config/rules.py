"""The rules that span several keys or concern the machine: all that can be checked before a run starts."""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Collection, Iterator

from dlr_pretrain.config.compiler import compiler_problem
from dlr_pretrain.config.optimizer_rules import idle_knobs, optimizer_problems
from dlr_pretrain.config.parse import flatten, to_dict
from dlr_pretrain.config.probing import probe_problems
from dlr_pretrain.config.problems import Problem, no_home
from dlr_pretrain.config.secrets import redact
from dlr_pretrain.config.tree import USUAL_STREAMS, Config, largest_divisor

PREPARED = (
    "needed by data=tokens: a folder that scripts/prepare_data.py has finished",
    "Make it, and set data.root=<its --output>",
)


def validate(cfg: Config, world_size: int | None, machine: bool = True) -> list[Problem]:
    """Every broken rule that spans several keys, for a run on ``world_size`` ranks (None: not known yet).

    Without ``machine``, the rules about this machine's files, packages and compiler, and ``unnamed``, are left out.
    """
    found: list[Problem] = [*_model(cfg), *_dlr(cfg), *_start(cfg)]
    found += [] if world_size is None else _batch(cfg, world_size)
    found += [*_schedule(cfg), *optimizer_problems(cfg)]
    found += [*_strings(cfg), *_packing(cfg), *probe_problems(cfg), *_profile(cfg)]
    if not machine:
        return found
    for rules in (unnamed, _packages, _data, _files):
        found += rules(cfg)
    return found + [p for p in [compiler_problem(cfg, cfg.device)] if p]


def unused(cfg: Config, given: Collection[str]) -> list[Problem]:
    """The problems of keys in ``given``, those of a command line, that this run would ignore."""
    values, source = flatten(to_dict(cfg)), cfg.data.source
    idle = idle_knobs(cfg)
    if "rank" not in cfg.backbone.knobs | cfg.optimizer.knobs:
        idle["scale.rank"] = f"backbone={cfg.backbone.name} has no rank"
    elif "backbone.rank" in given:
        idle["scale.rank"] = "backbone.rank is given"
    if cfg.train.micro_batch is not None:
        idle["scale.micro_batch"] = "train.micro_batch is given"
    if cfg.train.warmup_steps is not None:
        idle["train.warmup_ratio"] = "train.warmup_steps is given"
    if cfg.backbone.knobs.get("learn_latent_scale"):
        idle["backbone.latent_scale"] = "backbone.learn_latent_scale=true"
    if cfg.backbone.knobs.get("channels") == "random":
        idle["backbone.residual_rank"] = "backbone.channels=random"
    if not cfg.dlr.enabled:
        idle |= {name: f"dlr={cfg.dlr.name}" for name in values if name.startswith("dlr.")}
    elif cfg.dlr.grouping != "random":
        idle["dlr.grouping_seed"] = f"dlr.grouping={cfg.dlr.grouping}"
    if cfg.run.start_from is not None and _holds_weights(cfg.run.start_from):
        idle |= dict.fromkeys(["backbone.init", "backbone.b_gain"], "the factors start from run.start_from")
    if cfg.dlr.enabled and not cfg.dlr.train_b:
        idle |= dict.fromkeys(["backbone.b_gain", "optimizer.b_lr"], "dlr.train_b=false freezes B at zero")
    elif "rank" not in cfg.backbone.knobs:
        idle["optimizer.b_lr"] = f"backbone={cfg.backbone.name} has no up-projection B"
    if cfg.run.start_from is None:
        idle["run.start_optimizer"] = "the run starts from no other: run.start_from=null"
    if cfg.own_schedule:
        own = "optimizer.schedule=loro has a decay of its own"
        idle |= dict.fromkeys(["train.lr_decay", "train.lr_decay_steps"], own)
    elif cfg.train.lr_decay_steps == 0:
        idle |= dict.fromkeys(["train.lr_decay", "train.min_lr_ratio"], "train.lr_decay_steps=0")
    if cfg.train.on_nonfinite == "stop":
        idle["train.max_skipped"] = "train.on_nonfinite=stop"
    data = cfg.data
    if source != "c4":
        idle["data.dataset"] = f"data={source}"
        if not any("://" in (place or "") for place in (data.root, data.train_files, data.validation_files)):
            idle |= dict.fromkeys(["data.revision", "data.cache"], "all files are local")
    if source == "c4":
        idle["data.root"] = "data=c4 streams from the hub; data=local reads a folder"
    if source in ("sample", "tokens"):
        text_keys = ("train_files", "validation_files", "text_key", "held_out", "document", "bad_rows")
        idle |= {f"data.{name}": f"data={source}" for name in text_keys}
        idle |= dict.fromkeys(["tokenizer.hub", "tokenizer.eos"], f"data={source} comes with its tokenizer")
    elif data.validation_files is not None:
        idle["data.held_out"] = "data.validation_files is given"
    if cfg.tokenizer.path is not None:
        idle["tokenizer.hub"] = "tokenizer.path is given"
    for group in ("probe", "profile"):
        if not values[f"{group}.enabled"]:
            idle |= {name: f"{group}=off" for name in values if name.startswith(f"{group}.")}
    if cfg.logger.view != "wandb":
        idle |= {name: f"logger={cfg.logger.view}" for name in values if name.startswith("logger.")}
    if cfg.run.dir is not None and "run.dir" in given:
        idle["run.root"] = "run.dir is given"
    return [
        Problem(name, values[name], f"would be ignored: {why}", "Leave it out")
        for name, why in idle.items()
        if name in given
    ]


def _model(cfg: Config) -> Iterator[Problem]:
    s, rank = cfg.scale, cfg.backbone.knobs.get("rank")
    if s.hidden_size % s.num_heads:
        yield Problem("scale.num_heads", s.num_heads, f"must divide scale.hidden_size={s.hidden_size}")
    elif (s.hidden_size // s.num_heads) % 2:
        yield Problem("scale.num_heads", s.num_heads, "rotary embeddings need heads of even width")
    if rank is not None and not 1 <= rank <= min(s.hidden_size, s.intermediate_size):
        narrowest = min(s.hidden_size, s.intermediate_size)
        yield Problem("backbone.rank", rank, f"must lie between 1 and the narrowest layer's width, {narrowest}")
    if cfg.train.activation_checkpointing == "latent" and not cfg.backbone.knobs.get("factorized"):
        rule = f"backbone={cfg.backbone.name} has no latents to keep"
        yield Problem("train.activation_checkpointing", "latent", rule, "Use block, or a factorised backbone")
    if cfg.dlr.enabled and not cfg.backbone.knobs.get("factorized"):
        rule = f"backbone={cfg.backbone.name} has no up-projection to carry the residual"
        yield Problem("dlr", cfg.dlr.name, rule, "Use dlr=off, or a low-rank backbone such as backbone=cola")


def _dlr(cfg: Config) -> Iterator[Problem]:
    dlr = cfg.dlr
    if not dlr.enabled:
        return
    if dlr.mode != "residual":
        for name, value, plain in (("impl", dlr.impl, "weight"), ("learn_alpha", dlr.learn_alpha, False),
                                   ("train_b", dlr.train_b, True)):  # fmt: skip
            if value != plain:
                rule = f"needs a residual, and dlr.mode={dlr.mode} trains plain weights after the start"
                yield Problem(f"dlr.{name}", value, rule, "Use dlr.mode=residual")
    if dlr.learn_alpha and not dlr.train_b:
        yield Problem("dlr.learn_alpha", True, "alpha's gradient is taken from B's, which dlr.train_b=false leaves out")
    if dlr.mode == "decayed_offset" and cfg.precision.name in ("bf16", "bf16_sr"):
        rule = "in bf16 the pull of a step is less than an offset's rounding: it would be dlr.mode=offset"
        yield Problem("dlr.mode", dlr.mode, rule, "Use precision=bf16_mixed or fp32")
    if dlr.mode == "decayed_offset" and not cfg.optimizer.knobs.get("weight_decay"):
        rule = f"pulls to the offset by weight decay, of which optimizer={cfg.optimizer.name} has none here"
        yield Problem("dlr.mode", dlr.mode, rule, "Use optimizer.weight_decay above 0, or dlr.mode=offset")


def _batch(cfg: Config, world_size: int) -> Iterator[Problem]:
    batch, micro_batch = cfg.train.global_batch, cfg.train.micro_batch
    streams = cfg.num_streams
    if batch % streams:
        fix = f"Try {largest_divisor(batch, streams)}"
        yield Problem("data.streams", streams, f"must divide train.global_batch={batch}", fix)
    elif batch % world_size:
        below = batch // world_size * world_size
        fix = f"Try {below} or {below + world_size}" if below else f"Try {world_size}"
        yield Problem("train.global_batch", batch, f"must be a multiple of the {world_size} ranks", fix)
    elif streams % world_size:
        rule = f"the ranks share the data streams out evenly, so the {world_size} ranks must divide their number"
        most = max(1, USUAL_STREAMS // world_size)
        fix = f"Set data.streams={world_size * largest_divisor(batch // world_size, most)} before the first start"
        yield Problem("data.streams", streams, rule, f"{fix}, or start {largest_divisor(streams, world_size)} ranks")
    elif isinstance(micro_batch, int) and (share := batch // world_size) % micro_batch:
        rule = f"must divide a rank's share of train.global_batch, {share} sequences"
        yield Problem("train.micro_batch", micro_batch, rule, f"Try {largest_divisor(share, micro_batch)}")
    fp32_sums = cfg.train.accumulate == "fp32"
    if fp32_sums and cfg.parallel.name == "fsdp" and cfg.precision.name in ("bf16", "bf16_sr"):
        rule = "parallel=fsdp sums micro-batches in the dtype of the state, which is bf16 here"
        yield Problem("train.accumulate", "fp32", rule, "Use precision=bf16_mixed, or leave it out")


def _schedule(cfg: Config) -> Iterator[Problem]:
    t, every, kept = cfg.train, cfg.checkpoint.every, cfg.checkpoint.keep_every
    falls = None if cfg.own_schedule else t.lr_decay_steps
    if kept is not None and kept % every:
        fix = f"Try {max(1, round(kept / every)) * every}"
        yield Problem("checkpoint.keep_every", kept, f"must be a multiple of checkpoint.every={every}", fix)
    if t.warmup_steps is not None and t.warmup_steps >= t.steps:
        yield Problem("train.warmup_steps", t.warmup_steps, f"must be below train.steps={t.steps}")
    elif falls is not None and falls > (after := t.steps - cfg.warmup_steps):
        rule = f"must not exceed {after}, the steps after the warm-up"
        yield Problem("train.lr_decay_steps", t.lr_decay_steps, rule)
    elif falls == 1:
        rule = "must be 0 or at least 2: the first of these steps still has the peak rate"
        yield Problem("train.lr_decay_steps", t.lr_decay_steps, rule)
    if t.stop_after is not None and t.stop_after > t.steps:
        yield Problem("train.stop_after", t.stop_after, f"must not exceed train.steps={t.steps}")
    merge_every, restart = (cfg.backbone.knobs.get(knob) for knob in ("merge_every", "restart_warmup"))
    if merge_every is not None and merge_every >= t.steps:
        rule = f"must be below train.steps={t.steps}: nothing would be merged"
        yield Problem("backbone.merge_every", merge_every, rule, "Use backbone=lora for that")
    elif merge_every is not None and restart >= merge_every:
        yield Problem("backbone.restart_warmup", restart, f"must be below backbone.merge_every={merge_every}")


def _packing(cfg: Config) -> Iterator[Problem]:
    if cfg.data.mask_documents and cfg.data.packing == "pad":
        rule = "does nothing where data.packing=pad: a sequence is one document"
        yield Problem("data.mask_documents", True, rule, "Leave it out, or use data.packing=packed")


def _profile(cfg: Config) -> Iterator[Problem]:
    there, end = cfg.train.stop_after or cfg.train.steps, cfg.profile.start + cfg.profile.steps
    if cfg.profile.enabled and end > there:
        rule = f"and profile.steps={cfg.profile.steps} after it must lie within the {there} steps of the run"
        latest = there - cfg.profile.steps
        yield Problem("profile.start", cfg.profile.start, rule, f"Try {latest}" if latest > 0 else "Use profile=off")


def _strings(cfg: Config) -> Iterator[Problem]:
    found = {name: value for name, value in flatten(to_dict(cfg)).items() if isinstance(value, str)}
    for name, value in found.items():
        derived = name == "run.dir" and value.startswith(cfg.run.root)
        if (problem := no_home(name, value)) and not derived:
            yield problem
        if redact(value) != value:
            rule = "holds a password or a token, and a run writes its configuration down"
            yield Problem(name, value, rule, "Use HF_TOKEN, WANDB_API_KEY or ~/.netrc")


def _packages(cfg: Config) -> Iterator[Problem]:
    view = cfg.logger.view
    found = importlib.util.find_spec(view) if view != "jsonl" else None
    if view != "jsonl" and (found is None or found.origin is None):  # a folder of W&B runs has no origin
        rule = f"needs the package {view}, which is not installed"
        yield Problem("logger", view, rule, "Install it, or use logger=jsonl")
    if cfg.data.source == "c4" and importlib.util.find_spec("huggingface_hub") is None:
        rule = "needs the package huggingface_hub, which is not installed"
        yield Problem("data", "c4", rule, "Install it, or use data=local or data=sample")
    if cfg.optimizer.name == "adamw_8bit" and importlib.util.find_spec("torchao") is None:
        rule = "needs the package torchao, which is not installed"
        yield Problem("optimizer", cfg.optimizer.name, rule, "Install the extra 8bit, or use optimizer=adamw")


def unnamed(cfg: Config) -> Iterator[Problem]:
    """The problem that no key names the text. A machine that trains needs the name; one that only plans does not."""
    data = cfg.data
    if data.source == "c4" and data.dataset is None:
        yield Problem("data.dataset", None, "needed by data=c4: a dataset on the hub")
    if data.source == "c4_local" and data.root is None and not all(map(_is_absolute, _globs(cfg).values())):
        rule = "needed by data=c4_local: the folder of c4-train.*.json.gz and c4-validation.*.json.gz"
        yield Problem("data.root", None, rule, "Set data.root=<folder>, or use data=sample")
    if data.source == "local" and data.root is None and data.train_files is None:
        rule = "needed by data=local, or data.train_files: the folder of the text"
        yield Problem("data.root", None, rule, "Set data.root=<folder>, or use data=sample")
    if data.source == "tokens" and data.root is None:
        yield Problem("data.root", None, *PREPARED)


def _data(cfg: Config) -> Iterator[Problem]:
    root = cfg.data.root
    if cfg.data.source == "tokens" and root is not None and not os.path.isfile(os.path.join(root, "manifest.json")):
        yield Problem("data.root", root, *PREPARED)
    if cfg.data.source not in ("c4_local", "local") or "://" in (root or ""):
        return
    if root is not None and not os.path.isdir(root):
        yield Problem("data.root", root, "no such folder", "Set data.root=<folder of the shards>")
        return
    for name, pattern in _globs(cfg).items():
        if "://" in pattern or (root is None and not os.path.isabs(pattern) and cfg.data.source == "c4_local"):
            continue
        if not any(os.path.isfile(os.path.join(root or "", f))
                   for f in glob.iglob(pattern, root_dir=root, recursive=True)):  # fmt: skip
            yield Problem(name, pattern, f"no file matches {os.path.join(root or '', pattern)}")


def _is_absolute(pattern: str) -> bool:
    return "://" in pattern or os.path.isabs(pattern)


def _globs(cfg: Config) -> dict[str, str]:
    """The globs that are given, by their keys."""
    globs = {f"data.{name}": getattr(cfg.data, name) for name in ("train_files", "validation_files")}
    return {name: pattern for name, pattern in globs.items() if pattern is not None}


WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def _holds_weights(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in WEIGHTS)


def _start(cfg: Config) -> Iterator[Problem]:
    """Rules of a start from a folder of weights, a dense model's or an exported one's; a checkpoint holds B itself."""
    key, folder = "run.start_from", cfg.run.start_from
    if folder is None or not _holds_weights(folder):
        return
    if cfg.dlr.enabled and cfg.dlr.mode == "offset":
        rule = f"gives B its start, so that the offset of dlr={cfg.dlr.name} would be lost"
        yield Problem(key, folder, rule, "Use dlr=on, dlr=off, or leave it out")
    elif cfg.dlr.enabled and cfg.precision.name in ("bf16", "bf16_sr"):
        rule = f"takes the residual of dlr={cfg.dlr.name} off B, whose own values bf16 would then round away"
        yield Problem(key, folder, rule, "Use precision=bf16_mixed or fp32, or dlr=off")
    if cfg.dlr.enabled and not cfg.dlr.train_b:
        rule = f"cannot start a B that dlr={cfg.dlr.name} holds at zero"
        yield Problem(key, folder, rule, "Use dlr.train_b=true, or leave it out")


def _files(cfg: Config) -> Iterator[Problem]:
    path = cfg.tokenizer.path
    if path is not None and not os.path.exists(path):
        fix = "Name a tokenizer.json, a sentencepiece model such as spiece.model, or a folder that holds one"
        yield Problem("tokenizer.path", path, "no such file", fix)
    for name, folder in (("run.root", cfg.run.root), ("run.dir", cfg.run.dir), ("data.cache", cfg.data.cache)):
        if folder is not None and os.path.isfile(folder):
            yield Problem(name, folder, "is a file, not a folder")
