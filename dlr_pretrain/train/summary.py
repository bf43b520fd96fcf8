"""What a run will train, as a table for the console."""

from __future__ import annotations

from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.models.dlr import residuals
from dlr_pretrain.models.llama import backbone
from dlr_pretrain.optim.schedule import restarts
from dlr_pretrain.train.memory import PlannedMemory
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import describe_code, describe_device
from dlr_pretrain.train.text import MUCH_UNKNOWN, Text
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.text import amount, plural

FEW = 20_000  # tokens: a token's loss scatters by about 2.5 nats, so that their mean does by 0.02


def summary(
    cfg: Config, run_dir: Path, ranks: Ranks, text: Text, weights: Weights, planned_memory: PlannedMemory | None
) -> dict[str, str]:
    """Label and text of each row."""
    t, world, micro = cfg.train, ranks.world_size, cfg.micro_batch(ranks.world_size)
    knobs = ", ".join(f"{k} {v}" for k, v in cfg.backbone.knobs.items() if k != "factorized")
    dlr = f"DLR {cfg.dlr.name} ({cfg.dlr.impl}, alpha {cfg.dlr.alpha:g})" if cfg.dlr.enabled else "no DLR"
    layers = len(residuals(weights.model))
    total = sum(p.numel() for p in weights.model.parameters())
    trained = sum(p.numel() for p in weights.model.parameters() if p.requires_grad)
    after = "merged into dense weights at the end" if backbone(cfg).deployed_dense else "the same after folding"
    tokens, shape = t.global_batch * t.seq_len, "a line" if t.lr_decay == "linear" else "a cosine"
    falls = f"{shape} to {t.lr * t.min_lr_ratio:g} in {cfg.lr_decay_steps:,}" if cfg.lr_decay_steps else "constant"
    anew = f", anew every {plural(every, 'step')}" if (every := restarts(cfg)) else ""
    vocabulary, validation = len(weights.state["model.embed_tokens.weight"]), text.validation
    few = "; so few that the perplexity may be off by some per cent" if validation.real_tokens < FEW else ""
    table = {
        "run": str(run_dir),
        "model": f"{cfg.scale.name}, {cfg.backbone.name}{f' ({knobs})' if knobs else ''}, {dlr}"
        f"{f' on {layers} projections' if layers else ''}",
        "parameters": f"{total:,}{f' ({trained:,} of them trained)' if trained < total else ''}, {after}; "
        f"vocabulary {vocabulary:,}{', padded' if vocabulary > text.tokenizer.vocab_size else ''}",
        "data": f"{text.source.describe()}; "
        f"tokenizer with a vocabulary of {text.tokenizer.vocab_size:,}; {cfg.data.packing}",
        "validation": f"{len(validation.tokens):,} sequences, {validation.real_tokens:,} tokens, "
        f"{cfg.eval.packing}{few}",
        "batch": f"{plural(world, 'rank')} x {plural(t.global_batch // world // micro, 'micro-batch')} "
        f"x {plural(micro, 'sequence')} x {t.seq_len} = {tokens:,} tokens a step",
        "schedule": f"{t.steps:,} steps, {amount(t.steps * tokens)} tokens; lr {t.lr:g} after "
        f"{plural(cfg.warmup_steps, 'step')}, then {falls}{anew}",
        "precision": f"{cfg.precision.name}, {describe_device(ranks.device)}{', compiled' if cfg.compile else ''}",
        "code": describe_code(read_record(run_dir)["starts"][-1]),
    }
    if text.unknown > MUCH_UNKNOWN:
        rule = f"the tokenizer cannot express {text.unknown:.1%} of the text, which is learnt as one unknown token"
        table["warning"] = rule
    if ranks.device.type == "cuda" and planned_memory is not None:
        planned, whole = planned_memory(cfg, vocabulary, world), torch.cuda.mem_get_info(ranks.device)[1]
        more = (
            ". That is more than there is: see scripts/plan.py, and train.micro_batch=auto" if planned > whole else ""
        )
        table["memory"] = f"{planned / 1e9:.1f} GB planned (compiled code takes less) of {whole / 1e9:.1f} GB{more}"
    return table
