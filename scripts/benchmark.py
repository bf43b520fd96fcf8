"""Measure a part of the framework on this machine: ``python scripts/benchmark.py step scale=60m backbone=cola``."""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from dlr_pretrain.bench.words import joined, with_source
from dlr_pretrain.cli import load
from dlr_pretrain.config import MISSING, ConfigError, Problem
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import EXIT_FAILED

DLR_ARMS = ("dlr=off", "dlr=on", "dlr=on dlr.impl=branch", "dlr=random")
KEPT = [f"train.activation_checkpointing={kept}" for kept in ("none", "latent", "block")]


def main() -> int:
    given, words = arguments()
    return command(lambda: measure(given, words))


def measure(given: argparse.Namespace, words: list[str]) -> int:
    bounds = {"tokens": 1, "warmup": 0, "rounds": 1 if given.part in ("data", "checkpoint") else 2}
    low = {f"--{name}": bound for name, bound in bounds.items() if getattr(given, name, bound) < bound}
    if low or not 0 <= getattr(given, "padding", 0) < 1:
        problems = [Problem(name, MISSING, f"must be at least {bound}") for name, bound in low.items()]
        raise ConfigError(problems or [Problem("--padding", given.padding, "must be at least 0 and below 1")])
    return PARTS[given.part](given, words)


def arguments() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Measure a part of the framework on this machine.")
    parts = parser.add_subparsers(dest="part", required=True, metavar="part")

    def part(name: str, doc: str, rounds: int, warmup: int | None = None) -> argparse.ArgumentParser:
        usage = "%(prog)s [scale=... key=value ...] [options]"
        found = parts.add_parser(name, help=doc, usage=usage, description=doc, allow_abbrev=False)
        if rounds:
            found.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds (default: {rounds})")
        if warmup is not None:
            found.add_argument("--warmup", type=int, default=warmup, help=f"steps before (default: {warmup})")
        found.add_argument("--json", type=Path, help="write everything to this file, too")
        if name not in ("data", "checkpoint"):
            found.add_argument("--markdown", type=Path, help="and the table to this one")
        return found

    arms = "overrides of an arm, by the first of which the others are measured (default: " + "; ".join(DLR_ARMS) + ")"
    step = part("step", "a training step: DLR off, on by weight, by branch, by a random map; or each --arm", 30, 10)
    step.add_argument("--arm", action="append", default=[], metavar="WORDS", help=arms)
    step.add_argument("--loader", action="store_true", help="the first arm again, on batches from the data source")
    step.add_argument("--compile-times", action="store_true", help="cold and warm, each in processes of their own")
    beside = part("compare", "a training step beside steps of others", 30, 10)
    beside.add_argument("--peer", action="append", required=True, metavar="FILE[:FUNCTION]", help="benchmarks/adapters")
    beside.add_argument("--peers-dir", type=Path, help="folder of the checkouts (default: $PEERS_DIR, or peers)")
    for one in (step, beside):
        one.add_argument("--padding", type=float, default=0.0, metavar="SHARE", help="of all positions (default: 0)")
    part("fold", "logits before and after folding, and of the plain base", 30, 3)
    memory = part("memory", "peak of a step, beside the estimate of scripts/plan.py", 0)
    settings = "overrides of a setting, each in a process of its own (default: each way of activation checkpointing)"
    memory.add_argument("--setting", action="append", default=[], metavar="WORDS", help=settings)
    data = part("data", "loading, tokenising, resuming: batches of the given source (default: data=sample)", 5)
    data.add_argument("--tokens", type=int, default=20_000_000, help="in a round of a loader (default: 20 million)")
    part("checkpoint", "how long an asynchronous save holds the training; under torchrun on several ranks", 8)
    return parser.parse_known_args()


# ----------------------------------------------------------------------------------------------------
# The step


def measure_step(given: argparse.Namespace, words: list[str]) -> int:
    words = with_source(words)
    arms = given.arm or (DLR_ARMS if load(words).backbone.knobs.get("factorized") else [""])
    named = {arm or "step": joined(words, arm.split()) for arm in arms}
    if len(named) < len(arms):
        raise ConfigError([Problem("--arm", "; ".join(arms), "one is there twice", "The first is always run twice")])
    for of in named.values():
        load(of)
    from dlr_pretrain.bench import alone, step, tables

    how = step.Protocol(given.rounds, given.warmup, given.padding, given.loader)
    found = tables.about() | step.measure(named, [], how, say)
    if given.compile_times:
        for arm in found["arms"]:
            if arm["name"] in named:
                arm["compile_s"] = alone.compile_times(named[arm["name"]])
                say(f"compile times of {arm['name']}: {arm['compile_s']}")
    write(given, found, f"Training step, {' '.join(words)}", tables.steps)
    return 0 if all(arm["parity"]["passes"] for arm in found["arms"] if arm["parity"]) else EXIT_FAILED


def measure_peers(given: argparse.Namespace, words: list[str]) -> int:
    if given.peers_dir:
        os.environ["PEERS_DIR"] = str(given.peers_dir.absolute())
    words = with_source(words)
    cfg = load(words)
    if cfg.train.micro_batch is None:  # a peer does not split a batch
        words = [*words, f"train.micro_batch={cfg.train.global_batch}"]
    from dlr_pretrain.bench import step, tables
    from dlr_pretrain.bench.peers import Peer

    peers = [Peer(place, cfg.scale.name) for place in given.peer]
    how = step.Protocol(given.rounds, given.warmup, given.padding)
    found = tables.about() | step.measure({"ours": words}, peers, how, say)
    write(given, found, f"Ours ({' '.join(words)}) beside {', '.join(peer.name for peer in peers)}", tables.steps)
    return 0 if all(arm["parity"]["passes"] for arm in found["arms"] if arm["words"]) else EXIT_FAILED


def measure_folding(given: argparse.Namespace, words: list[str]) -> int:
    words = with_source(words)
    load(words)
    from dlr_pretrain.bench import folding, tables

    found = tables.about() | folding.measure(words, given.rounds, given.warmup)
    write(given, found, f"Folding, {' '.join(words)}", tables.folds)
    return 0 if all(model["equal"] in (True, None) for model in found["models"]) else EXIT_FAILED


def measure_memory(given: argparse.Namespace, words: list[str]) -> int:
    words = with_source(words)
    settings = {name: joined(words, name.split()) for name in given.setting or KEPT}
    for of in settings.values():
        load(of)
    from dlr_pretrain.bench import alone, tables

    rows = []
    for name, of in settings.items():
        rows.append({"name": name, "words": of} | alone.memory(of))
        say(f"{name}: {rows[-1]['peak'] / 1e9:.2f} GB")
    write(given, tables.about() | {"settings": rows}, f"Memory of a step, {' '.join(words)}", tables.memories)
    return 0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write(given: argparse.Namespace, found: dict, title: str, table) -> None:
    """Print the table, and write it and all results to the files that were asked for."""
    from dlr_pretrain.bench import tables

    text = f"# {title}\n\n{tables.header(found)}\n\n{table(found)}\n"
    print(text)
    for path, content in ((given.json, json.dumps(found, indent=1) + "\n"), (given.markdown, text)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)


# ----------------------------------------------------------------------------------------------------
# Data and checkpoints


def measure_data(given: argparse.Namespace, words: list[str]) -> int:
    cfg = load(with_source(words))
    if cfg.data.source == "tokens":
        raise ConfigError([Problem("data", "tokens", "makes them itself, to compare", "Name the source of their text")])
    from dlr_pretrain.data.benchmark import measures

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the whole measurement on one core
    report(given, measures(cfg, given.tokens, given.rounds), {
        "batch": f"{cfg.train.global_batch} x {cfg.train.seq_len} tokens", "data": cfg.data.source,
    })  # fmt: skip
    return 0


def measure_saves(given: argparse.Namespace, words: list[str]) -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cfg = load(with_source(words), ranks)
    from dlr_pretrain.train.benchmark import saving

    report(given, saving(cfg, given.rounds), {
        "run": f"{cfg.scale.name}, {cfg.backbone.name}, {cfg.precision.name}, {cfg.parallel.name}, {ranks} ranks",
        "batch": f"{cfg.train.global_batch} x {cfg.train.seq_len} tokens",
    })  # fmt: skip
    return 0


def report(given: argparse.Namespace, measures, about: dict[str, str]) -> None:
    """On rank 0, print machine, versions, command and each measure as it comes; with ``--json`` also write a file."""
    from dlr_pretrain.bench import tables

    about |= tables.about()
    if os.environ.get("RANK", "0") != "0":
        list(measures)
        return
    for name, value in about.items():
        print(f"{name:<10}{value}")
    print(f"\n{'':<56}{'median':>9}{'lowest':>9}{'highest':>9}   by processor time")
    found = []
    for measure in measures:
        found.append(measure._asdict())
        columns = "".join(f"{f(measure.values):>9.4g}" for f in (statistics.median, min, max))
        busy = f"   {statistics.median(measure.processor):.4g}" if measure.processor else ""
        print(f"{measure.name + ', ' + measure.unit:<56}{columns}{busy}", flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(about | {"measures": found}, indent=1) + "\n")


PARTS = {
    "step": measure_step,
    "compare": measure_peers,
    "fold": measure_folding,
    "memory": measure_memory,
    "data": measure_data,
    "checkpoint": measure_saves,
}

if __name__ == "__main__":
    sys.exit(main())
