"""Measures a part of the framework on this machine.

    python -m benchmarks step scale=60m backbone=cola train.global_batch=8

Overrides are those of train.py. data=sample, which needs no download, and logger=jsonl are the defaults.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import results
from dlr_pretrain.cli import load
from dlr_pretrain.config import MISSING, Config, ConfigError, Problem
from dlr_pretrain.config.arguments import at_least_1
from dlr_pretrain.util.errors import EXIT_FAILED, command

DLR = ("dlr=off", "dlr=on", "dlr=on by-branch", "dlr=random")
KEPT = [f"train.activation_checkpointing={kept}" for kept in ("none", "latent", "block")]
ENOUGH = 6  # the fewest rounds that give an interval
PARTS = {
    "step": "a training step of each --variant, by default DLR off, on in the weights, on by branch, and random",
    "compare": "our training step beside that of each --peer",
    "data": "batches from the given source, and its resume, on one core",
    "memory": "peak memory of a step beside the plan's, for each --variant, by default each kind of checkpointing",
    "train": "a short run of train.py itself for each --variant: the tokens/s of its record",
    "attention": "attention of each --variant, forward and backward, by each kernel",
    "launches": "what it costs the host to launch a kernel: from Python, from compiled code, and in a graph",
    "sums": "what a ring loses that sums gradients in bf16, for several numbers of ranks, by simulation",
    "fp8": "some products of each --variant in bf16 and in fp8, and the error of fp8",
    "card": "a GPU's clocks and power under load, the products of an update of each --variant, and attention",
}
if TYPE_CHECKING:
    from benchmarks.peers import Peer

Measured = tuple[dict, results.Columns, bool]  # the results, their table, and whether all losses agree
Keep = Callable[[dict], None]  # saves the results so far


def build_parser() -> argparse.ArgumentParser:
    listed = "\n".join(f"  {name:8} {doc}" for name, doc in PARTS.items())
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=f"{__doc__}\n{listed}", formatter_class=formatter
    )
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of train.py")
    parser.add_argument("--variant", action="append", default=[], metavar="OVERRIDES", help="step, memory: repeatable")
    parser.add_argument("--peer", action="append", default=[], metavar="FILE[:FUNCTION]", help="compare: repeatable")
    parser.add_argument("--rounds", type=at_least_1, default=30, help="timed rounds (30)")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them (10)")
    parser.add_argument("--tokens", type=at_least_1, default=20_000_000, help="data: tokens per round (20 million)")
    saves = "also write everything to this file, as it is measured; memory resumes from it, at the same commit"
    parser.add_argument("--json", type=Path, help=saves)
    first = "step, compare: time first, then compare the losses; resumes where it was cut off, at the same commit"
    parser.add_argument("--no-parity", action="store_true", help=first)
    now = "with --no-parity: compare the losses in the same run only if the timing took fewer seconds than this"
    parser.add_argument("--seconds", type=float, default=math.inf, help=now)
    parser.add_argument("--trace", action="store_true", help="step, compare: trace one more step of each on a GPU")
    return parser


def step(args: argparse.Namespace, overrides: list[str], cfg: Config, keep: Keep) -> Measured:
    from benchmarks import variants

    names = args.variant or (DLR if cfg.backbone.factorized else [""])
    chosen = {name or "step": variants.joined(overrides, name.split()) for name in names}
    return steps(args, chosen, [], keep)


def compare(args: argparse.Namespace, overrides: list[str], cfg: Config, keep: Keep) -> Measured:
    from benchmarks import peers

    if not args.peer:
        raise ConfigError([Problem("--peer", MISSING, "must be given", "The adapters are in benchmarks/adapters")])
    if not isinstance(cfg.train.micro_batch, int):  # a peer does not split its batch
        overrides = [*overrides, f"train.micro_batch={cfg.train.global_batch}"]
    return steps(args, {"ours": overrides}, [peers.Peer(place, cfg.scale.name) for place in args.peer], keep)


def steps(args: argparse.Namespace, chosen: dict[str, list[str]], peers: list[Peer], keep: Keep) -> Measured:
    from benchmarks import step

    began, timed = time.monotonic(), unchecked(args, chosen, peers)
    found = timed | step.measure(  # the machine of the times is kept
        chosen,
        peers,
        args.rounds,
        args.warmup,
        keep=lambda found: keep(timed | found),
        times_first=args.no_parity,
        may_check=lambda: time.monotonic() - began < args.seconds,
        timed=timed,
        trace=args.trace,
    )
    verdicts = [v["parity"] for v in found["variants"] if v["overrides"] or args.part == "step"]
    right = all(v["passes"] for v in verdicts if v) and (args.no_parity or None not in verdicts)
    return found, results.STEPS, right


def unchecked(args: argparse.Namespace, chosen: dict[str, list[str]], peers: list[Peer]) -> dict:
    """Earlier results of the same command and commit with unchecked losses, if their rounds suffice; else empty."""
    found = stored(args)
    asked = chosen | {peer.name: None for peer in peers}
    rows = {v["name"]: v for v in found["variants"] if not v["name"].endswith(results.NOISE)}
    if not args.no_parity or {name: row["overrides"] for name, row in rows.items()} != asked:
        return {}
    rounds = len(rows[next(iter(chosen))]["seconds"])
    same = found["commit"] == results.about()["commit"]  # losses of other code say nothing about these times
    return found if same and rounds >= min(ENOUGH, args.rounds) else {}


def stored(args: argparse.Namespace) -> dict:
    """What the file of ``--json`` has from an earlier run."""
    return json.loads(args.json.read_text()) if args.json and args.json.exists() else {"variants": []}


def memory(args: argparse.Namespace, overrides: list[str], cfg: Config, keep: Keep) -> Measured:
    from benchmarks import isolated, variants
    from dlr_pretrain.train.micro_batch import planned_memory

    chosen = {name: variants.joined(overrides, name.split()) for name in args.variant or KEPT}
    configs = {name: variants.compose(words)[0] for name, words in chosen.items()}
    plans = {name: planned_memory(cfg, cfg.planned_vocab_size, ranks=1) for name, cfg in configs.items()}
    before, now, found = stored(args), results.about(), {"variants": []}
    same = all(before.get(key) == now[key] for key in ("command", "commit"))
    kept = {row["name"]: row for row in before["variants"] if same}
    for name, words in chosen.items():
        row = {"name": name, "overrides": words, "plan": plans[name]}
        found["variants"].append(kept.get(name) or row | isolated.isolated(words))
        keep(found)
    return found, results.MEMORY, True


def card(args: argparse.Namespace, overrides: list[str], cfg: Config, keep: Keep) -> Measured:
    from benchmarks import card, probes, variants
    from dlr_pretrain.util.tensors import WORKING_DTYPE

    configs = [variants.compose(variants.joined(overrides, name.split()))[0] for name in args.variant or [""]]
    dtype = WORKING_DTYPE[cfg.precision.name]
    rows = {
        "card": lambda device: card.everything(configs, device, dtype),
        "attention": lambda device: (row for cfg in configs for row in card.attentions(cfg, device, dtype)),
        "launches": probes.launches,
        "sums": probes.sums,
        "fp8": lambda device: (row for cfg in configs for row in probes.fp8(cfg, device)),
    }[args.part]
    return on_device(cfg, rows, keep), results.SUMS if args.part == "sums" else results.CARD, True


def train(args: argparse.Namespace, overrides: list[str], cfg: Config, keep: Keep) -> Measured:
    from benchmarks import probes, variants

    chosen = {name or "run": variants.joined(overrides, name.split()) for name in args.variant or [""]}
    return on_device(cfg, lambda _: probes.training(chosen), keep), results.TRAINING, True


def on_device(cfg: Config, rows: Callable[[Any], Iterable[dict]], keep: Keep) -> dict:
    """The rows that ``rows`` yields for the device of ``cfg``, kept one by one."""
    import torch

    from dlr_pretrain.train.ranks import Ranks

    with Ranks(cfg) as ranks:
        ranks.use_device()
        on_gpu = ranks.device.type == "cuda"
        found: dict = {"device": torch.cuda.get_device_name(ranks.device) if on_gpu else "CPU", "variants": []}
        for row in rows(ranks.device):
            found["variants"].append(row)
            keep(found)
    return found


def data(args: argparse.Namespace, overrides: list[str], cfg: Config, keep: Keep) -> Measured:
    from benchmarks import data

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the whole measurement on one core
    batch = {"rows": cfg.train.global_batch, "seq_len": cfg.train.seq_len, "rounds": args.rounds}
    return {"batch": batch, "variants": list(data.measures(cfg, args.tokens, args.rounds))}, results.DATA, True


def amount(found: dict) -> int:
    """The rows, and the rounds in them."""
    return sum(1 + len(row.get("seconds", [])) for row in found["variants"])


def measure(args: argparse.Namespace) -> int:
    """Measure ``args.part``, print and save the results, and return the exit code."""
    named = {word.lstrip("+").partition("=")[0] for word in args.overrides}
    usual = [f"{key}={value}" for key, value in (("data", "sample"), ("logger", "jsonl")) if key not in named]
    overrides = args.overrides if "experiment" in named else [*usual, *args.overrides]
    parts = {"step": step, "compare": compare, "data": data, "memory": memory, "train": train}
    part = parts.get(args.part, card)
    about, before = results.about(), amount(stored(args))

    def keep(found: dict) -> None:
        if args.json and amount(found) >= before:  # a run that is cut off leaves no less than there was
            results.save(about | found, args.json)

    found, columns, right = part(args, overrides, load(overrides), keep)
    results.write(about | found, f"{args.part} {' '.join(overrides)}", columns, args.json)
    return 0 if right else EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_intermixed_args(argv)
    return command(lambda: measure(args))


if __name__ == "__main__":
    sys.exit(main())
