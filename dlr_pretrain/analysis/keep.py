"""Reduces comparisons and their runs to what a report reads, small enough to keep in a repository beside its figures.

    python -m dlr_pretrain.analysis.keep runs/evidence/pairs/tune/cola benchmarks/evidence/pairs

A comparison is a folder with a ``tune.json``. This file is kept and, for every run that it names, the configuration,
the manifest without the host's name and folders of the machine, and these records of ``metrics.jsonl``: the first, the
last, those with an evaluation or a probe, and those of every twenty-fifth update. Comparisons that are already in the
output folder stay there. ``scripts/report.py`` reads the result like whole runs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlr_pretrain.analysis.costs import exported_vocabulary
from dlr_pretrain.analysis.history import read_metrics
from dlr_pretrain.analysis.records import THINNED, VOCABULARY
from dlr_pretrain.analysis.tuning import ENDED
from dlr_pretrain.config.written import MANIFEST, read_record
from dlr_pretrain.util.command import command
from dlr_pretrain.util.errors import UserError

EVERY = 25
FOLDERS = re.compile(r"(?<!\S)/\S*/")  # of an absolute path, up to its last name


def keep(comparisons: Sequence[Path], output: Path, every: int = EVERY) -> int:
    """Write ``comparisons`` and their runs into ``output``, beside those already there. Returns the number of runs.

    Raises UserError, and leaves ``output`` as it was, if two comparisons have the same name, if a run has not ended, if
    the loss of a run is not the one in a comparison that names it, or if ``output`` holds anything else.
    """
    if len({folder.name for folder in comparisons}) < len(comparisons):
        raise UserError(f"two of {', '.join(map(str, comparisons))} have one name. Keep them in different folders")
    found = {folder.name: _read(folder / "tune.json") for folder in comparisons}
    for folder in comparisons:
        if open_ones := [trial["run"] for trial in found[folder.name]["trials"] if trial["state"] not in ENDED]:
            raise UserError(f"{folder / 'tune.json'}: {open_ones[0]} has not ended. Give its command again first")
    if output.exists() and {path.name for path in output.iterdir()} - {"tune", "runs"}:
        raise UserError(f"{output} is in the way: it holds more than comparisons and runs. Name another folder")
    aside = output.with_name(f".{output.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    if output.exists():
        shutil.copytree(output, aside)
    for folder in comparisons:
        (aside / "tune" / folder.name).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / "tune.json", aside / "tune" / folder.name / "tune.json")
    runs = {Path(trial["run"]) for each in found.values() for trial in each["trials"]}
    for run in runs:
        _keep_run(run, aside / "runs" / run.name, every)
    named = _require_agreement(aside)
    for path in (aside / "runs").iterdir():
        if path.name not in named:
            shutil.rmtree(path)
    shutil.rmtree(output, ignore_errors=True)
    aside.rename(output)
    return len(runs)


def _read(path: Path) -> dict:
    if not path.is_file():
        raise UserError(f"{path}: no such file. Name a folder that scripts/tune.py has written its results to")
    return json.loads(path.read_text(encoding="utf-8"))


def _require_agreement(kept: Path) -> set[str]:
    """Raise UserError if a comparison has other losses than its runs. Returns the names of all runs."""
    named = set()
    for path in sorted(kept.glob("tune/*/tune.json")):
        for trial in _read(path)["trials"]:
            name = Path(trial["run"]).name
            named.add(name)
            if trial["loss"] is None:  # it has diverged
                continue
            loss = read_metrics(kept / "runs" / name / "metrics.jsonl")[-1].get("eval/loss")
            if loss != trial["loss"]:
                raise UserError(
                    f"{name}: its loss is {loss}, and {path.parent.name} was compared with {trial['loss']}. "
                    f"Train {path.parent.name} again too, or keep them in different folders"
                )
    return named


def _keep_run(run: Path, target: Path, every: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / "config.yaml", target / "config.yaml")
    if not (manifest := read_record(run)):
        raise UserError(f"{run / MANIFEST}: no such file")
    for start in manifest["starts"]:
        start.pop("host", None)
        start["command"] = [Path(start["command"][0]).name, *start["command"][1:]]
        if "text" in start:
            start["text"] = FOLDERS.sub("", start["text"])
    text = json.dumps(manifest | {THINNED: every, VOCABULARY: exported_vocabulary(run)}, indent=1)
    (target / MANIFEST).write_text(text + "\n", encoding="utf-8")
    lines = (json.dumps(record) + "\n" for record in _thinned(read_metrics(run / "metrics.jsonl"), every))
    (target / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def _thinned(records: Sequence[dict], every: int) -> Iterator[dict]:
    for i, record in enumerate(records):
        told = any(name.startswith(("eval/", "probe/")) for name in record)
        if told or i in (0, len(records) - 1) or record["step"] % every == 0:
            yield record


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="keep", description="Keep what a report reads of comparisons and their runs.")
    parser.add_argument("comparisons", type=Path, nargs="+", metavar="comparison", help="a folder with a tune.json")
    parser.add_argument("output", type=Path)
    parser.add_argument("--every", type=int, default=EVERY, help=f"updates between kept records (default: {EVERY})")
    given = parser.parse_args(argv)

    def act() -> None:
        print(f"{keep(given.comparisons, given.output, given.every)} runs are in {given.output / 'runs'}")

    return command(act)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
