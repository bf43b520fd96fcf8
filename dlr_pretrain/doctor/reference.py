"""The reference run: a recipe of minutes, and the band in which the final losses of recorded runs lie.

``reference.json`` beside this file holds those runs: command, seed, machine, text and final loss of each. The band
follows from them. ``python -m dlr_pretrain.doctor.reference <run directories>`` prints it. The text of ``data=sample``
comes from the installed packages, so another environment trains on another text. Its band is then that of the runs on
all recorded texts, which is wider.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, stdev

from dlr_pretrain.config.written import read_record
from dlr_pretrain.doctor.checks import FAIL, OK, WARN, Outcome, line
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.history import read_metrics
from dlr_pretrain.util.text import fill

RECORD = Path(__file__).with_name("reference.json")
TRAIN = Path(__file__).resolve().parents[2] / "train.py"
FREE = ("device", "compile", "data.root", "train.micro_batch", "parallel")  # keys that leave the result as it is
WIDTH = 3.0  # standard deviations on either side of the mean


def band(runs: list[dict], text: str) -> tuple[float, float, str]:
    """The lowest and highest final loss of a sound run on ``text`` (a fingerprint), and which runs they follow from."""
    of_text = [run["loss"] for run in runs if run["text"] == text]
    if len(of_text) >= 3:
        losses, basis = of_text, f"{len(of_text)} runs on this very text"
    else:
        losses = [run["loss"] for run in runs]
        basis = (
            f"{len(losses)} runs on {len({run['text'] for run in runs})} texts, fewer than three of them on this one"
        )
    spread = WIDTH * stdev(losses)
    return mean(losses) - spread, mean(losses) + spread, basis


def judge(loss: float, runs: list[dict], text: str) -> Outcome:
    low, high, basis = band(runs, text)
    said = f"final evaluation loss {loss:.4f}; the band is {low:.4f} to {high:.4f}, from {basis}"
    if low <= loss <= high:
        return Outcome(OK, said)
    if not any(run["text"] == text for run in runs):
        return Outcome(WARN, said, "Another text alone may explain that: compare with an environment of known packages")
    return Outcome(FAIL, said, "Numerics or data of this machine differ: look at torch, the driver, the git state")


def train(words: list[str]) -> bool:
    """Train the recipe in a temporary folder, show its output, and print the verdict. Returns False if it failed."""
    record = json.loads(RECORD.read_text())
    clash = [word for word in words if word.split("=")[0].lstrip("+") not in FREE]
    if clash:
        rule = f"--reference trains a recipe of its own: {' '.join(clash)} has no place beside it"
        raise UserError(f"{rule}. What it takes: {', '.join(FREE)}")
    with tempfile.TemporaryDirectory(prefix="dlr_reference_") as folder:
        run_dir = Path(folder, "run")
        print(fill(f"training experiment=reference in {run_dir}, which is removed afterwards"), flush=True)
        began = time.monotonic()
        command = [sys.executable, str(TRAIN), "experiment=reference", f"run.dir={run_dir}", *words]
        code = subprocess.run(command, check=False).returncode
        if code:
            raise UserError(f"the reference run ended with code {code}; what it said stands above")
        loss = read_metrics(run_dir / "metrics.jsonl")[-1]["eval/loss"]
        text = read_record(run_dir)["identity"]["data.shards"]
    outcome = judge(loss, record, text)
    print(line("reference", outcome, time.monotonic() - began))
    return outcome.level != FAIL


def collect(run_dirs: list[Path]) -> list[dict]:
    """The entries of ``reference.json`` for finished runs of the recipe."""
    found = []
    for run_dir in run_dirs:
        manifest, last = read_record(run_dir), read_metrics(run_dir / "metrics.jsonl")[-1]
        start = manifest["starts"][-1]
        words = [word for word in start["command"][1:] if not word.startswith("run.dir=")]
        found.append(
            {
                "command": f"python train.py {' '.join(words)}",
                "seed": manifest["identity"]["seed"],
                "device": start["device"],
                "torch": start["packages"]["torch"],
                "git": start["git"],
                "text": manifest["identity"]["data.shards"],
                "loss": last["eval/loss"],
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(collect([Path(word) for word in sys.argv[1:]]), indent=1))
