"""What a run will train, as a table for the console."""

from __future__ import annotations

from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.data import uneven
from dlr_pretrain.models.dlr import residuals
from dlr_pretrain.models.llama import backbone
from dlr_pretrain.optim.schedule import restarts
from dlr_pretrain.train.memory import PlannedMemory
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import describe_code, describe_device
from dlr_pretrain.train.text import MUCH_UNKNOWN, Text
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.text import amount, plural


def summary(
    cfg: Config, ranks: Ranks, text: Text, weights: Weights, planned_memory: PlannedMemory | None
) -> dict[str, str]:
    """Label and text of each row."""
    run_dir, t, world = Path(cfg.run.dir), cfg.train, ranks.world_size
    knobs = ", ".join(f"{k} {v}" for k, v in cfg.backbone.knobs.items() if k != "factorized")
    total = sum(p.numel() for p in weights.model.parameters())
    trained = sum(p.numel() for p in weights.model.parameters() if p.requires_grad)
    after = "merged into dense weights at the end" if backbone(cfg).deployed_dense else "the same after folding"
    micro, tokens = cfg.micro_batch(world), t.global_batch * t.seq_len
    vocabulary, validation = len(weights.state["model.embed_tokens.weight"]), text.validation
    table = {
        "run": str(run_dir),
        "model": f"{cfg.scale.name}, {cfg.backbone.name}{f' ({knobs})' if knobs else ''}, "
        f"{describe_dlr(cfg, len(residuals(weights.model)))}",
        "parameters": f"{total:,}{f' ({trained:,} of them trained)' if trained < total else ''}, {after}; "
        f"vocabulary {vocabulary:,}",
        "data": f"{text.source.describe()}{uneven(text.source, cfg.num_streams)}; "
        f"tokenizer with a vocabulary of {text.tokenizer.vocab_size:,}; {cfg.data.packing}",
        "validation": f"{len(validation.tokens):,} sequences, {validation.real_tokens:,} tokens, {cfg.eval.packing}",
        "batch": f"{plural(world, 'rank')} x {plural(t.global_batch // world // micro, 'micro-batch')} "
        f"x {plural(micro, 'sequence')} x {t.seq_len} = {tokens:,} tokens a step",
        "schedule": f"{t.steps:,} steps, {amount(t.steps * tokens)} tokens; lr {t.lr:g} after "
        f"{plural(cfg.warmup_steps, 'step')}{describe_decay(cfg)}",
        "precision": f"{cfg.precision.name}, {describe_device(ranks.device)}{', compiled' if cfg.compile else ''}",
        "code": describe_code(read_record(run_dir)["starts"][-1]),
    }
    if text.unknown > MUCH_UNKNOWN:
        rule = f"the tokenizer cannot express {text.unknown:.1%} of the text, which is learnt as one unknown token"
        table["warning"] = rule
    if ranks.device.type == "cuda" and planned_memory is not None:
        whole = torch.cuda.mem_get_info(ranks.device)[1]
        table["memory"] = describe_memory(planned_memory(cfg, vocabulary, world), whole)
    return table


def describe_dlr(cfg: Config, projections: int) -> str:
    """The settings of DLR as text, with those of an ablation that are not the usual ones."""
    dlr = cfg.dlr
    if not dlr.enabled:
        return "no DLR"
    usual = {"learn_alpha": False, "variance_correction": True, "scope": "all", "grouping": "contiguous",
             "train_b": True, "mode": "residual"}  # fmt: skip
    departs = [f"{knob} {getattr(dlr, knob)}" for knob, value in usual.items() if getattr(dlr, knob) != value]
    where = f" on {projections} projections" if projections else ""
    return f"DLR {dlr.name} ({', '.join([dlr.impl, f'alpha {dlr.alpha:g}', *departs])}){where}"


def describe_decay(cfg: Config) -> str:
    """How the learning rate falls after its warm-up."""
    t, steps = cfg.train, cfg.train.steps - cfg.warmup_steps if cfg.own_schedule else cfg.lr_decay_steps
    anew = f", anew every {plural(restarts(cfg)[0], 'step')}" if restarts(cfg) else ""
    if not steps:
        return f", then constant{anew}"
    when = "then" if steps == t.steps - cfg.warmup_steps else f"and in the last {plural(steps, 'step')}"
    shape = "a line" if t.lr_decay == "linear" else "a cosine"
    return f", {when} {shape} to {t.lr * t.min_lr_ratio:g}{anew}"


def describe_memory(planned: int, whole: int) -> str:
    """The ``planned`` bytes and those of the GPU (``whole``) as text."""
    more = ". That is more than there is: see scripts/plan.py, and train.micro_batch=auto" if planned > whole else ""
    return f"{planned / 1e9:.1f} GB planned (eager; compiled code takes less) of {whole / 1e9:.1f} GB{more}"
