"""Measures a part of the framework on this machine.

    python -m benchmarks step scale=60m backbone=cola train.global_batch=8

Overrides are those of train.py. Where none names them, data=sample (needs no download) and logger=jsonl are added.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from benchmarks import results
from dlr_pretrain.cli import load
from dlr_pretrain.config import MISSING, Config, ConfigError, Problem
from dlr_pretrain.util.errors import EXIT_FAILED, at_least_1, command

DLR = ("dlr=off", "dlr=on", "dlr=on by-branch", "dlr=random")
KEPT = [f"train.activation_checkpointing={kept}" for kept in ("none", "latent", "block")]
PARTS = {
    "step": "a training step of each --variant, by default DLR off, on by weight, on by branch, by a random map",
    "compare": "a training step beside those of each --peer",
    "data": "batches of the given source, and its resume, on one core",
    "memory": "peak of a step beside the plan's, for each --variant, by default each way of activation checkpointing",
}
Measured = tuple[dict, results.Columns, bool]  # the results, their table, and whether they are right


def parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:8} {doc}" for name, doc in PARTS.items())
    form = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser("python -m benchmarks", description=f"{__doc__}\n{listed}", formatter_class=form)
    made.add_argument("part", choices=PARTS)
    made.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of train.py")
    made.add_argument("--variant", action="append", default=[], metavar="OVERRIDES", help="step, memory: repeatable")
    made.add_argument("--peer", action="append", default=[], metavar="FILE[:FUNCTION]", help="compare: repeatable")
    made.add_argument("--rounds", type=at_least_1, default=30, help="timed rounds (30)")
    made.add_argument("--warmup", type=int, default=10, help="steps before (10)")
    made.add_argument("--tokens", type=at_least_1, default=20_000_000, help="data: in a round (20 million)")
    made.add_argument("--json", type=Path, help="write everything to this file, too")
    return made


def step(given: argparse.Namespace, overrides: list[str], cfg: Config) -> Measured:
    from benchmarks import step, variants

    names = given.variant or (DLR if cfg.backbone.factorized else [""])
    chosen = {name or "step": variants.joined(overrides, name.split()) for name in names}
    found = step.measure(chosen, [], given.rounds, given.warmup)
    return found, results.STEPS, all(v["parity"]["passes"] for v in found["variants"])


def compare(given: argparse.Namespace, overrides: list[str], cfg: Config) -> Measured:
    from benchmarks import peers, step

    if not given.peer:
        raise ConfigError([Problem("--peer", MISSING, "must be given", "The adapters are in benchmarks/adapters")])
    if not isinstance(cfg.train.micro_batch, int):  # a peer does not split a batch
        overrides = [*overrides, f"train.micro_batch={cfg.train.global_batch}"]
    beside = [peers.Peer(place, cfg.scale.name) for place in given.peer]
    found = step.measure({"ours": overrides}, beside, given.rounds, given.warmup)
    return found, results.STEPS, all(v["parity"]["passes"] for v in found["variants"] if v["overrides"])


def memory(given: argparse.Namespace, overrides: list[str], cfg: Config) -> Measured:
    from benchmarks import isolated, variants
    from dlr_pretrain.train.micro_batch import planned_memory

    chosen = {name: variants.joined(overrides, name.split()) for name in given.variant or KEPT}
    configs = {name: variants.compose(of)[0] for name, of in chosen.items()}
    plans = {name: planned_memory(cfg, cfg.planned_vocab_size, ranks=1) for name, cfg in configs.items()}
    found = [{"name": n, "overrides": of, "plan": plans[n]} | isolated.isolated(of) for n, of in chosen.items()]
    return {"variants": found}, results.MEMORY, True


def data(given: argparse.Namespace, overrides: list[str], cfg: Config) -> Measured:
    from benchmarks import data

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the whole measurement on one core
    batch = {"rows": cfg.train.global_batch, "seq_len": cfg.train.seq_len, "rounds": given.rounds}
    return {"batch": batch, "variants": list(data.measures(cfg, given.tokens, given.rounds))}, results.DATA, True


def measure(given: argparse.Namespace) -> int:
    """Measure ``given.part``, print and write what was found, and return the exit code."""
    named = {word.lstrip("+").partition("=")[0] for word in given.overrides}
    usual = [f"{key}={value}" for key, value in (("data", "sample"), ("logger", "jsonl")) if key not in named]
    overrides = given.overrides if "experiment" in named else [*usual, *given.overrides]
    part = {"step": step, "compare": compare, "data": data, "memory": memory}[given.part]
    found, columns, right = part(given, overrides, load(overrides))
    results.write(results.about() | found, f"{given.part} {' '.join(overrides)}", columns, given.json)
    return 0 if right else EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    given = parser().parse_intermixed_args(argv)
    return command(lambda: measure(given))


if __name__ == "__main__":
    sys.exit(main())
