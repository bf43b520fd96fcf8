"""Measure a part of the framework on this machine: ``python scripts/benchmark.py data data=sample``."""

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError, Problem
from dlr_pretrain.errors import EXIT_FAILED, UserError

EXIT_INTERRUPTED = 130


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure a part of the framework on this machine.")
    parts = parser.add_subparsers(dest="part", required=True, metavar="part")
    data = parts.add_parser(
        "data",
        help="loading, tokenising, resuming: batches of the given source (default: data=sample)",
        usage="%(prog)s [data=... key=value ...] [--tokens N] [--rounds N] [--json FILE]",
    )
    data.add_argument("--tokens", type=int, default=20_000_000, help="in a round of a loader (default: 20 million)")
    data.add_argument("--rounds", type=int, default=5, help="of which the median is printed (default: 5)")
    saves = parts.add_parser(
        "checkpoint",
        help="how long an asynchronous save holds the training; under torchrun on several ranks",
        usage="%(prog)s [scale=... key=value ...] [--rounds N] [--json FILE]",
    )
    saves.add_argument("--rounds", type=int, default=8, help="of which the median is printed (default: 8)")
    for part in (data, saves):
        part.add_argument("--json", type=Path, help="write everything to this file as well")
    given, words = parser.parse_known_args()
    try:
        if min(given.rounds, getattr(given, "tokens", 1)) < 1:
            raise ConfigError([Problem("--rounds and --tokens", given.rounds, "must be positive")])
        return {"data": measure_data, "checkpoint": measure_saves}[given.part](given, words)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def measure_data(given: argparse.Namespace, words: list[str]) -> int:
    cfg = load(words if any(word.lstrip("+").startswith("data=") for word in words) else ["data=sample", *words])
    if cfg.data.source == "tokens":
        raise ConfigError([Problem("data", "tokens", "makes them itself, to compare", "Name the source of their text")])
    from dlr_pretrain.data.benchmark import measures

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # all of it on one core
    report(given, measures(cfg, given.tokens, given.rounds), {
        "batch": f"{cfg.train.global_batch} x {cfg.train.seq_len} tokens", "data": cfg.data.source,
    })  # fmt: skip
    return 0


def measure_saves(given: argparse.Namespace, words: list[str]) -> int:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    cfg = load([*([] if any("data=" in word for word in words) else ["data=sample"]), *words], ranks)
    from dlr_pretrain.train.benchmark import saving

    report(given, saving(cfg, given.rounds), {
        "run": f"{cfg.scale.name}, {cfg.backbone.name}, {cfg.precision.name}, {cfg.parallel.name}, {ranks} ranks",
        "batch": f"{cfg.train.global_batch} x {cfg.train.seq_len} tokens",
    })  # fmt: skip
    return 0


def report(given: argparse.Namespace, measures, about: dict[str, str]) -> None:
    """Print machine, versions, command and each measure as it comes; with ``--json`` to a file, too. Rank 0 alone."""
    from dlr_pretrain.train.record import git_state, versions

    about |= {
        "command": shlex.join(["python", *sys.argv]),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "commit": git_state() or "unknown",
    }
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
        given.json.write_text(json.dumps(about | {"measures": found}, indent=1) + "\n")


def machine() -> str:
    """Processor, cores and load of this machine."""
    listed = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in listed if line.startswith("model name")]
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores{load}, {platform.system()}"


if __name__ == "__main__":
    sys.exit(main())
