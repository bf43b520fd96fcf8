"""Run folders without training: invented numbers, by the trainer's own writers."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from time import gmtime, strftime

import torch

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.record import open_record, record_start, update_record
from dlr_pretrain.util.files import read_metrics

SHORT = ("scale=tiny", "scale.vocab_size=8192", "data=sample", "train.steps=60", "eval.every=20", "logger=jsonl")
COLA, COLA_DLR = (*SHORT, "backbone=cola", "dlr=off"), (*SHORT, "backbone=cola", "dlr=on")
PAPER = ("scale=60m", "experiment=paper", "backbone=cola", "data=c4_local", "data.root=/c4", "train.steps=11000")
PERPLEXITY, CONVENTION = "eval/perplexity", "eval/perplexity_galore"
FINGERPRINTS = {"data.shards": "0" * 64, "tokenizer.pieces": "1" * 64, "data.order": 1}
BEGAN = 1_790_000_000.0


def moment(seconds: float) -> str:
    """A time after the runs began, as the manifest has it."""
    return strftime("%Y-%m-%dT%H:%M:%SZ", gmtime(BEGAN + seconds))


@cache
def configured(*words: str) -> Config:
    return load(list(words), machine=False)


def a_run(
    folder: Path, *words: str, seed: int = 41, level: float = 4.0, step: int | None = None, final: float | None = None,
    code: str = "abc",
) -> Path:  # fmt: skip
    """A run of ``words`` up to ``step`` (its last), whose loss falls to about ``level``; ``final`` is the last
    evaluation's loss instead."""
    cfg = configured(*words)
    cfg = replace(cfg, seed=seed, run=replace(cfg.run, dir=str(folder)))
    folder.mkdir(parents=True)
    open_record(folder, cfg, FINGERPRINTS)
    record_start(folder, 1, torch.device("cpu"), "some text", {})
    start = {"time": moment(0), "command": ["train.py", *words, f"seed={seed}"], "world_size": 1}
    start |= {"device": "CPU, 4 cores", "git": code, "packages": {"torch": "2.13.0"}}
    start |= {"files": {"left out": "LICENSE.txt"}}
    update_record(folder, {"starts": [start], "parameters": 1_000_000, "flops_per_token": 6e6})
    noise = Random(f"{seed} {level}").gauss
    with MetricsFile(folder / "metrics.jsonl", 0) as file:
        for at in range(1, (step or cfg.train.steps) + 1):
            positions = at * cfg.train.global_batch * cfg.train.seq_len
            loss = level + 5 * math.exp(-12 * at / cfg.train.steps) + noise(0, 0.03)
            record = {
                "step": at, "train/loss": loss, "train/grad_norm": abs(noise(0.6, 0.1)), "train/skipped": 0,
                "train/tokens": positions, "perf/tokens_per_second": noise(1000, 5) if at > 10 else None,
                "perf/mfu": None, "perf/max_memory_gb": 1.25, "time": BEGAN + at / 2,
            }  # fmt: skip
            if at % cfg.eval.every == 0 or at == cfg.train.steps:
                loss = final if final is not None and at == cfg.train.steps else loss + noise(0.1, 0.02)
                record |= {"eval/loss": loss, PERPLEXITY: math.exp(loss), CONVENTION: math.exp(0.99 * loss)}
                record |= {"eval/loss_a": loss, "eval/loss_b": loss + 0.5}
            file.write(record)
    return folder


def logged(folder: Path, step: int = -1, name: str = PERPLEXITY) -> float:
    """What a run has logged at a line of its metrics."""
    return read_metrics(folder / "metrics.jsonl")[step][name]
