"""Plan a run: ``python scripts/plan.py scale=1b backbone=cola dlr=on``, with the overrides of train.py."""

import argparse
import json
import sys
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from dlr_pretrain.cli import load
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.launch.runs import expand
from dlr_pretrain.util.command import at_least_1, command, refuse
from dlr_pretrain.util.errors import UserError

DEVICE = "h200"
AUTO = "train.micro_batch=auto: by the estimate for one {}; a run tries real steps"


def main() -> int:
    parser = argparse.ArgumentParser(
        usage="plan.py [options] [key=value ...]",
        description="Parameters, arithmetic, memory, batch, tokens and schedule of a run; needs no data, GPU, network.",
        epilog="Everything else is an override, as train.py takes them.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=at_least_1, metavar="N", help="GPUs of the run (default: 1)")
    parser.add_argument(
        "--gpus", type=numbers, metavar="N[,N...]", help="estimates of speed on so many GPUs; overrides may be lists"
    )
    devices = ("a100", "h100", "h200", "b200")
    parser.add_argument("--device", choices=devices, help=f"GPU that is estimated for ({DEVICE})")
    parser.add_argument("--assume", action="append", default=[], metavar="NAME=VALUE", help="an assumption of --gpus")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="results of benchmark.py step beside estimates")
    parser.add_argument("--json", action="store_true", help="the same as JSON, in bytes and with stable keys")
    parser.add_argument("--table1", action="store_true", help="the paper's parameters and memory beside ours")
    given, words = parser.parse_known_args()
    for word in words:
        name = word.partition("=")[0]
        if word.startswith("--") and (meant := get_close_matches(name, parser._option_string_actions)):
            parser.error(f"{name}: did you mean {meant[0]}?")
    if words and (given.table1 or given.measured):
        fixed = "--table1 is of the recipes" if given.table1 else "--measured is of the configurations in FILE"
        parser.error(f"{fixed} as they stand: leave out {' '.join(words)}")
    if given.table1:
        refuse(parser, given, ("--ranks", "--gpus", "--device", "--assume", "--measured"), "says nothing of --table1")
    elif given.measured:
        refuse(parser, given, ("--ranks", "--gpus", "--json"), "has no place beside --measured")
    elif given.gpus:
        refuse(parser, given, ("--ranks",), "is what --gpus lists: leave it out")
    else:
        refuse(parser, given, ("--assume",), "is of estimates: add --gpus")
    return command(lambda: print(text(given, words)))


def text(given: argparse.Namespace, words: list[str]) -> str:
    """The output that the flags ask for."""
    if given.table1:
        return table1(given.json)
    if given.measured:
        return measured(given)
    if given.gpus:
        return scaling(words, given)
    return one(words, given.ranks or 1, given.json, given.device)


def numbers(text: str) -> list[int]:
    return [at_least_1(number) for number in text.split(",")]


def one(words: list[str], ranks: int, as_json: bool, device: str | None) -> str:
    cfg = load(words, ranks, machine=False)
    if device and cfg.train.micro_batch != "auto":
        raise ConfigError([Problem("--device", device, "changes nothing", "Add --gpus, or train.micro_batch=auto")])
    device = device or DEVICE
    from dlr_pretrain.analysis.plan import plan, render  # imports torch, so only after all checks of the arguments
    from dlr_pretrain.analysis.scaling import assume, on_paper

    found = plan(on_paper(cfg, ranks, assume(device)), ranks)
    if as_json:
        return json.dumps(found, indent=2)
    return render(found) + (f"\n{AUTO.format(device)}" if cfg.train.micro_batch == "auto" else "")


def scaling(words: list[str], given: argparse.Namespace) -> str:
    """Estimates for every configuration of a sweep such as ``scale=60m,1b backbone=full,cola``."""
    configs = [load(list(run.words), None, machine=False) for run in expand(words)]
    from dlr_pretrain.analysis.scaling import Scaling, assume, render, titled

    device = given.device or DEVICE
    assumed = assume(device, given.assume, {cfg.precision.name for cfg in configs})
    found = [(cfg, Scaling(cfg, assumed).estimates(given.gpus)) for cfg in configs]
    if not given.json:
        return render(found, assumed, device)
    runs = [{"run": titled(cfg), "estimates": [e and asdict(e) for e in of.values()]} for cfg, of in found]
    return json.dumps({"device": device, "assumptions": asdict(assumed), "runs": runs}, indent=2)


def measured(given: argparse.Namespace) -> str:
    """Results of ``scripts/benchmark.py step`` beside the estimates for the same steps."""
    from dlr_pretrain.analysis.scaling import against, assume

    try:
        found = json.loads(given.measured.read_text())
        on = found["device"] if found["arms"] else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--measured {given.measured}: no results of scripts/benchmark.py step ({error})") from None
    device = given.device or DEVICE
    if device not in str(on).lower():
        rule = f"measured on {on}, and the estimates are for --device {device}"
        raise UserError(f"--measured {given.measured}: {rule}. Name the GPU that it was measured on")
    configs = {
        tuple(arm["words"]): load(arm["words"], machine=False) for arm in found["arms"] if arm["words"] is not None
    }
    assumed = assume(device, given.assume, {cfg.precision.name for cfg in configs.values()})
    return against(found, lambda words: configs[tuple(words)], assumed)


def table1(as_json: bool) -> str:
    from dlr_pretrain.analysis.table1 import compare, render

    def configure(recipe: str, scale: str) -> Config:
        return load([f"scale={scale}", f"experiment={recipe}"], machine=False)

    cells = list(compare(configure))
    if as_json:
        return json.dumps([asdict(c) | {"agrees": c.agrees, "reason": c.reason} for c in cells], indent=2)
    return render(cells)


if __name__ == "__main__":
    sys.exit(main())
