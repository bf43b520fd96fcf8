"""The runs of comparisons cut down to what a report reads, small enough to stand in a repository beside its figures.

    python -m dlr_pretrain.analysis.keep runs/evidence/pairs benchmarks/evidence/pairs

For each ``tune/*/tune.json`` of the first folder: that file, and of every run that it names the configuration, the
manifest without the name of the machine, and of ``metrics.jsonl`` the first update, the last, each that was evaluated
or probed, and every twenty-fifth. ``scripts/report.py`` reads them like whole runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlr_pretrain.analysis.comparison import ENDED
from dlr_pretrain.analysis.costs import exported_vocabulary
from dlr_pretrain.analysis.history import read_metrics
from dlr_pretrain.analysis.records import THINNED, VOCABULARY
from dlr_pretrain.errors import UserError

EVERY = 25


def keep(folder: Path, output: Path, every: int = EVERY) -> int:
    """Write the comparisons of ``folder`` and their runs into ``output``, in place of those that are kept there; how
    many runs. UserError where one of them has not ended, or ``output`` has others than those: it stays as it was."""
    comparisons = sorted(folder.glob("tune/*/tune.json"))
    if not comparisons:
        raise UserError(f"{folder}: there is no tune/*/tune.json. Name a folder with results of scripts/tune.py")
    runs: dict[str, Path] = {}
    for path in comparisons:
        trials = json.loads(path.read_text(encoding="utf-8"))["trials"]
        if open_ones := [trial["run"] for trial in trials if trial["state"] not in ENDED]:
            raise UserError(f"{path}: {open_ones[0]} has not ended. Give its command again first")
        runs |= {Path(trial["run"]).name: Path(trial["run"]) for trial in trials}
    if output.exists() and {path.name for path in output.iterdir()} - {"tune", "runs"}:
        raise UserError(f"{output} is in the way: it holds more than comparisons and runs. Name another folder")
    kept = {path.parent.name for path in output.glob("tune/*/tune.json")}
    if gone := sorted(kept - {path.parent.name for path in comparisons}):
        raise UserError(
            f"{output} holds {gone[0]}, and {folder} has none. Train it there too, or remove {output} first"
        )
    aside = output.with_name(f".{output.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    for path in comparisons:
        target = aside / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    for name, run in runs.items():
        _keep_run(run, aside / "runs" / name, every)
    shutil.rmtree(output, ignore_errors=True)
    aside.rename(output)
    return len(runs)


def _keep_run(run: Path, target: Path, every: int) -> None:
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(run / "config.yaml", target / "config.yaml")
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    for start in manifest["starts"]:
        start.pop("host", None)
        start["command"] = [Path(start["command"][0]).name, *start["command"][1:]]
    text = json.dumps(manifest | {THINNED: every, VOCABULARY: exported_vocabulary(run)}, indent=1)
    (target / "manifest.json").write_text(text + "\n", encoding="utf-8")
    lines = (json.dumps(record) + "\n" for record in _thinned(read_metrics(run / "metrics.jsonl"), every))
    (target / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")


def _thinned(records: Sequence[dict], every: int) -> Iterator[dict]:
    for i, record in enumerate(records):
        told = any(name.startswith(("eval/", "probe/")) for name in record)
        if told or i in (0, len(records) - 1) or record["step"] % every == 0:
            yield record


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="keep", description="Keep what a report reads of comparisons and their runs.")
    parser.add_argument("folder", type=Path, help="with tune/*/tune.json")
    parser.add_argument("output", type=Path)
    parser.add_argument("--every", type=int, default=EVERY, help=f"updates between kept records (default: {EVERY})")
    given = parser.parse_args(argv)
    try:
        print(f"{keep(given.folder, given.output, given.every)} runs are in {given.output / 'runs'}")
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", UserError.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
