"""Run directories without training: invented figures, written by the trainer's own writers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from time import gmtime, strftime

import torch

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.train.evaluate import galore_perplexity
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.record import open_record, record_start, update_record

FINGERPRINTS = {"data.shards": "0" * 64, "tokenizer.pieces": "1" * 64, "data.order": 1}
BEGAN = 1_790_000_000.0
TINY = ("scale=tiny", "scale.vocab_size=8192", "data=sample", "compile=false", "logger=jsonl")
SHORT = (*TINY, "train.steps=60", "eval.every=20")


def moment(seconds: float) -> str:
    """A time after the runs began, as the manifest has it."""
    return strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(BEGAN + seconds))


@cache
def configured(*words: str) -> Config:
    return load(list(words), machine=False)


def a_run(
    folder: Path,
    *words: str,
    seed: int = 41,
    level: float = 4.0,
    step: int | None = None,
    final: float | None = None,
    judged: int = 10_000_000,
    device: str = "CPU, 4 cores",
    code: str = "abc",
) -> Path:
    """A run of ``words`` up to ``step`` (its last), whose loss falls to about ``level``; ``final`` is the last
    evaluation's loss instead, and an evaluation is of ``judged`` tokens."""
    cfg = configured(*words)
    cfg = replace(cfg, seed=seed, run=replace(cfg.run, dir=str(folder)))
    folder.mkdir(parents=True)
    open_record(folder, cfg, FINGERPRINTS)
    record_start(folder, 1, torch.device("cpu"), "some text")
    start = {"time": moment(0), "command": ["train.py", *words, f"seed={seed}"], "world_size": 1}
    start |= {"device": device, "git": code, "packages": {"torch": "2.13.0"}}
    update_record(folder, {"starts": [start], "parameters": 1_000_000, "flops_per_token": 6e6})
    noise = Random(f"{seed} {level}")
    with MetricsFile(folder / "metrics.jsonl", 0) as file:
        for at in range(1, (step or cfg.train.steps) + 1):
            file.write(a_record(cfg, at, level, final, judged, noise.gauss))
    return folder


def a_record(cfg: Config, step: int, level: float, final: float | None, judged: int, noise: Callable) -> dict:
    positions = cfg.train.global_batch * cfg.train.seq_len
    loss = level + 5 * math.exp(-12 * step / cfg.train.steps) + noise(0, 0.03)
    record = {
        "step": step, "train/loss": loss, "train/lr": cfg.train.lr,
        "train/grad_norm": abs(noise(0.6, 0.1)), "train/skipped": 0, "train/tokens": step * positions,
        "train/real_tokens": step * positions, "perf/tokens_per_second": noise(1000, 5) if step > 10 else None,
        "perf/mfu": None, "perf/max_memory_gb": 1.25, "time": BEGAN + step / 2,
    }  # fmt: skip
    if step % cfg.eval.every and step != cfg.train.steps:
        return record
    evaluated = final if final is not None and step == cfg.train.steps else loss + noise(0.1, 0.02)
    galore = galore_perplexity(evaluated, judged)
    return record | {
        "eval/loss": evaluated, "eval/loss_a": evaluated, "eval/loss_b": evaluated,
        "eval/perplexity": math.exp(evaluated), "eval/perplexity_galore": galore,
    }  # fmt: skip


def pairs_of_runs(root: Path, *backbones: str, seeds: tuple[int, ...] = (41, 42)) -> None:
    """Each backbone without and with DLR, which is better by about 0.1 nats."""
    for i, backbone in enumerate(backbones):
        for dlr, gain in (("off", 0.0), ("on", 0.1)):
            for seed in seeds:
                words = (*SHORT, f"backbone={backbone}", f"dlr={dlr}")
                a_run(root / f"{backbone}-{dlr}-s{seed}", *words, seed=seed, level=4.0 + i / 10 - gain)
