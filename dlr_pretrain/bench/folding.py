"""Checks that folding costs nothing at inference: latency of the logits before and after, and of the plain base."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import Tensor

from dlr_pretrain.bench.rounds import interleaved, paired, quartiles
from dlr_pretrain.cli import load
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.models import Llama, active, build, fold_
from dlr_pretrain.models.precision import WORKING_DTYPE
from dlr_pretrain.train.runtime import Runtime

BASE, FOLDED, PUBLISHED, BRANCH = "base, dlr=off", "folded", "published, as in training", "before folding, branch"


def measure(words: list[str], rounds: int, warmup: int) -> dict:
    """Returns ``batch`` and ``models``, a row for each: name, seconds of each round, ms (median) and ratio to the base.

    ``largest_difference`` is that of a logit from the folded model's (null for the base, which is another model).
    ``equal`` is whether the logits equal the folded model's bit for bit (null if they need not). They must if the
    residual is published, as in training; the branch rounds differently.
    """
    cfg = load(words)
    if not cfg.dlr.enabled or cfg.dlr.mode != "residual" or cfg.dlr.impl == "branch":
        raise ConfigError([Problem("dlr", cfg.dlr.name, "there is nothing to fold", "Give dlr=on")])
    with Runtime(cfg) as runtime, torch.no_grad():
        runtime.use_device()
        generator = torch.Generator().manual_seed(0)
        shape = cfg.train.global_batch, cfg.train.seq_len
        ids = runtime.to_device(torch.randint(2, cfg.planned_vocab_size, shape, generator=generator))
        off, branch = replace(cfg.dlr, enabled=False), replace(cfg.dlr, impl="branch")
        base, published, before = (
            _model(replace(cfg, dlr=choice), runtime.device) for choice in (off, cfg.dlr, branch)
        )
        folded = copy.deepcopy(published)
        fold_(folded)
        models = {BASE: base, f"{BASE}, once more": base, FOLDED: folded, PUBLISHED: published,
                  BRANCH: before}  # fmt: skip
        if cfg.compile:
            torch._dynamo.reset()
            for model in (base, folded, published, before):
                model.compile_()
        with active(published):
            acts = {name: lambda model=model: model.logits(ids) for name, model in models.items()}
            logits = {name: act() for name, act in acts.items()}
            times = interleaved(acts, warmup, rounds, runtime.device)
        rows = [_row(name, times, logits) for name in models]
    about = {"rows": shape[0], "seq_len": shape[1], "rounds": rounds, "warmup": warmup}
    return {"batch": about, "models": rows}


def _model(cfg: Config, device: torch.device) -> Llama:
    return build(cfg, cfg.planned_vocab_size, device, WORKING_DTYPE[cfg.precision.name])


def _row(name: str, times: dict[str, list[float]], logits: dict[str, Tensor]) -> dict:
    of_base = name.startswith(BASE)
    difference = None if of_base else (logits[name].double() - logits[FOLDED].double()).abs().max().item()
    return {
        "name": name,
        "seconds": times[name],
        "ms": 1e3 * quartiles(times[name]).median,
        "ratio": paired(times[name], times[BASE])._asdict(),
        "largest_difference": difference,
        "equal": torch.equal(logits[name], logits[FOLDED]) if name in (FOLDED, PUBLISHED) else None,
    }
