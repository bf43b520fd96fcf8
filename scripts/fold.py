"""Fold a saved checkpoint: ``python scripts/fold.py runs/<run>/checkpoints/step_00001000``."""

import argparse
import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from dlr_pretrain.config.arguments import Parser
from dlr_pretrain.util.errors import UserError, command
from dlr_pretrain.util.files import read_json, read_metrics

EXAMPLE = "example: fold.py runs/my-run/checkpoints/step_00001000 --dtype bfloat16"


def main() -> int:
    parser = Parser(description="Write a checkpoint's folded weights as a transformers folder.", epilog=EXAMPLE)
    add = parser.add_argument
    add("checkpoint", type=Path, help="<run>/checkpoints/step_*")
    add("--output", type=Path, help="the folder to write (default: <run>/folded_<step>[_<form>])")
    add("--dtype", choices=("float32", "bfloat16"), help="cast the folded weights")
    add("--dense", action="store_true", help="multiply linear low-rank layers out into a plain LLaMA")
    add("--push", metavar="OWNER/NAME", help="push the folder to this repository on the hub, in one commit")
    add("--public", action="store_true", help="with --push: a new repository is public (default: private)")
    add("--tokens", type=int, help="of validation text (default: eval.tokens, or 50,000 on a CPU; 0: no report)")
    given = parser.parse_args()
    return command(lambda: fold(given))


def fold(given: argparse.Namespace) -> None:
    checkpoint = given.checkpoint.resolve()
    run = checkpoint.parent.parent
    if not (checkpoint.is_dir() and re.fullmatch(r"step_\d+", checkpoint.name)):
        folder = next((f for f in (checkpoint / "checkpoints", checkpoint) if f.is_dir()), checkpoint.parent)
        there = ", ".join(sorted(path.name for path in folder.glob("step_*"))) or "none"
        raise UserError(f"{checkpoint}: not a checkpoint. Name one such as {folder}/step_00001000 (there: {there})")
    if given.public and given.push is None:
        raise UserError("--public: needs --push")
    if given.tokens is not None and given.tokens < 0:
        raise UserError(f"--tokens={given.tokens}: must be at least 0")
    forms = ["dense" if given.dense else "", given.dtype or ""]
    output = Path(os.path.abspath(given.output or run / "_".join(["folded", checkpoint.name, *filter(None, forms)])))
    if given.push is not None:
        from dlr_pretrain.deploy.hub import push, require_writable

        require_writable(given.push)
    # Only the default name says which run, and in which form.
    may_exist = given.push is not None and given.output is None
    pushes_again = may_exist and folds(output) == int(checkpoint.name.removeprefix("step_"))
    if output.exists() and not pushes_again:
        raise UserError(f"{output} exists already. Move it away, or name another folder with --output")
    if not pushes_again:
        print("\n".join([*write(given, checkpoint, run, output), f"{'written':<29} {output}"]))
    if given.push is not None:
        print(f"{'pushed':<29} {push(output, run / 'report.html', given.push, given.public)}")


def write(given: argparse.Namespace, checkpoint: Path, run: Path, output: Path) -> list[str]:
    """Fold ``checkpoint`` of ``run`` to ``output``; returns the lines of a report."""
    import torch

    from dlr_pretrain.deploy.fold import fold_checkpoint
    from dlr_pretrain.train.checkpoint import fault, load

    if damage := fault(checkpoint):
        raise UserError(f"{checkpoint}: {damage}. Name another checkpoint")
    saved = load(checkpoint)
    tensors = {name: stored.whole() for name, stored in saved.model.items()}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens = given.tokens
    if tokens is None:
        tokens = 50_000 if device.type == "cpu" else 10**12  # all that the run was evaluated on
    how = (getattr(torch, given.dtype or "", None), given.dense, tokens, device)
    return fold_checkpoint(run, tensors, facts(run, saved.state), output, *how)


def folds(folder: Path) -> int | None:
    """The step of the checkpoint that was folded to ``folder``, which is whole; None if it is no such folder."""
    with suppress(OSError, ValueError):
        return read_json(folder / "fold.json", {"step": int})["step"]
    return None


def facts(run: Path, state: dict) -> dict[str, object]:
    """What the folder's README says about the checkpoint: its step, tokens, and its own evaluation if it has one."""
    from dlr_pretrain.deploy.export import origin

    record = {name: state[name] for name in ("step", "tokens", "real_tokens")}
    lines = [one for one in read_metrics(run / "metrics.jsonl") if one["step"] == record["step"]]
    evaluation = {name: value for line in lines[-1:] for name, value in line.items() if name.startswith("eval/")}
    return record | evaluation | origin(run)


if __name__ == "__main__":
    sys.exit(main())
