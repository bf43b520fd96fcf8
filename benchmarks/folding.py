"""Checks that folding costs nothing at inference: latency of the logits before and after, and of the plain base."""

from __future__ import annotations

import copy
import statistics
from dataclasses import replace

import torch

from benchmarks.protocol import interleaved, paired
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.models import Llama, active, build, fold_
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.tensors import WORKING_DTYPE

BASE, FOLDED, TRAINED, BRANCH = "base, dlr=off", "folded", "with the residual, as in training", "branch, unfolded"


def measure(cfg: Config, rounds: int, warmup: int) -> dict:
    """Returns ``batch`` and ``variants``, for each: name, seconds of each round, ms (median) and ratio to the base.

    ``difference`` is the largest of a logit from the folded model's (null for the base, which is another model).
    ``equal`` is whether the logits equal the folded model's bit for bit, as they must if the residual is in the weights
    (null if they need not). The branch rounds differently.
    """
    if not cfg.dlr.enabled or cfg.dlr.mode != "residual" or cfg.dlr.impl == "branch":
        raise ConfigError([Problem("dlr", cfg.dlr.name, "there is nothing to fold", "Give dlr=on")])
    with Ranks(cfg) as ranks, torch.no_grad():
        ranks.use_device()
        generator = torch.Generator().manual_seed(0)
        shape = cfg.train.global_batch, cfg.train.seq_len
        ids = ranks.to_device(torch.randint(2, cfg.planned_vocab_size, shape, generator=generator))
        base = model(replace(cfg, dlr=replace(cfg.dlr, enabled=False)), ranks.device)
        trained = model(cfg, ranks.device)
        branch = model(replace(cfg, dlr=replace(cfg.dlr, impl="branch")), ranks.device)
        folded = copy.deepcopy(trained)
        fold_(folded)
        if cfg.compile:
            torch._dynamo.reset()
            for each in (base, folded, trained, branch):
                each.compile_()
        models = {BASE: base, f"{BASE}, once more": base, FOLDED: folded, TRAINED: trained, BRANCH: branch}
        with active(trained):
            acts = {name: lambda m=m: m.logits(ids) for name, m in models.items()}
            logits = {name: act() for name, act in acts.items()}
            times = interleaved(acts, warmup, rounds, ranks.device)
    found = []
    for name, seconds in times.items():
        far = (logits[name].double() - logits[FOLDED].double()).abs().max().item()
        found.append({
            "name": name,
            "seconds": seconds,
            "ms": 1e3 * statistics.median(seconds),
            "ratio": paired(seconds, times[BASE])._asdict(),
            "difference": None if name.startswith(BASE) else far,
            "equal": torch.equal(logits[name], logits[FOLDED]) if name in (FOLDED, TRAINED) else None,
        })  # fmt: skip
    about = {"rows": shape[0], "seq_len": shape[1], "rounds": rounds, "warmup": warmup}
    return {"batch": about, "variants": found}


def model(cfg: Config, device: torch.device) -> Llama:
    return build(cfg, cfg.planned_vocab_size, device, WORKING_DTYPE[cfg.precision.name])
