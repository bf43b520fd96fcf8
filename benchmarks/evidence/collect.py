"""Packs the runs of one piece of the experiments into a compressed table, small enough for a repository.

    python -m benchmarks.evidence.collect runs/evidence/pairs runs/evidence/pairs.jsonl.gz
    python -m benchmarks.evidence.collect runs/evidence/cost runs/evidence/cost.jsonl.gz

The folder holds comparisons, each a folder with the ``choice.json`` of a report, or runs, or results of
``python -m benchmarks step --json``. Every line of the table is JSON:

    comparison, shared, command, trials     shared: the overrides of all its runs; trials: method, lr, seed, name of run
    run, starts, commits, hours, config, fingerprints, metrics

``starts`` has the command, commit, machine and versions of each start; ``commits`` are those that made updates;
``hours`` are from the first update to the last. ``fingerprints`` identify the text and the tokenizer. ``metrics`` has,
as columns, the records that figures and tables use: the first, the last, those with an evaluation, and those of every
25th update. Benchmark results are kept unchanged. The same input gives the same bytes.
"""

import gzip
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import yaml

KEPT_EVERY = 25  # updates between kept records
COLUMNS = re.compile(r"step|train/loss|eval/loss(_[ab])?")
FOLDERS = re.compile(r"(?<!\S)/\S*/")  # an absolute path up to its last name


def comparisons(folder: Path) -> Iterator[dict]:
    """Yields the line of each comparison in ``folder``, then those of their runs. Exits if a run has not finished."""
    runs: dict[str, dict] = {}
    for path in sorted(folder.glob("*/choice.json")):
        report = json.loads(path.read_text())
        (compared,) = report["scales"]
        trials = []
        for trial in compared["trials"]:
            place = Path(trial["run"])
            if trial["state"] != "finished":
                sys.exit(f"error: {path}: {place} has not finished. Rerun the command of the comparison first")
            if place.name not in runs:
                runs[place.name] = packed(place)
            if (loss := runs[place.name]["metrics"]["eval/loss_b"][-1]) != trial["loss_b"]:
                sys.exit(f"error: {path}: {place} has a loss of {loss}, but the comparison has {trial['loss_b']}")
            trials.append({"method": trial["method"], "lr": trial["lr"], "seed": int(trial["seed"]), "run": place.name})
        first, *others = (runs[trial["run"]]["starts"][-1]["command"][1:] for trial in trials)
        shared = shlex.join(word for word in first if all(word in other for other in others))
        about = {"shared": shared, "command": report["command"]}
        yield {"comparison": path.parent.name} | about | {"trials": trials}
    runs |= {path.parent.name: packed(path.parent) for path in folder.glob("*/metrics.jsonl")}  # the piece `smoke`
    yield from (runs[name] for name in sorted(runs))


def packed(folder: Path) -> dict:
    """The line of a run."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    manifest = json.loads((folder / "manifest.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    commits, hours = trained(manifest["starts"], records)
    for start in manifest["starts"]:
        start.pop("host", None)
        start["command"] = [Path(start["command"][0]).name, *start["command"][1:]]
        start["text"] = FOLDERS.sub("", start.get("text", ""))
    kept = [
        record for i, record in enumerate(records)
        if i in (0, len(records) - 1) or record["step"] % KEPT_EVERY == 0
        or any(name.startswith("eval/") for name in record)
    ]  # fmt: skip
    names = dict.fromkeys(name for record in kept for name in record if COLUMNS.fullmatch(name))
    return {
        "run": folder.name,
        "starts": manifest["starts"],
        "commits": commits,
        "hours": hours,
        "config": config,
        "fingerprints": {key: manifest["identity"].get(key) for key in ("data.shards", "tokenizer.pieces")},
        "metrics": {name: [record.get(name) for record in kept] for name in names},
    }


def trained(starts: list[dict], records: list[dict]) -> tuple[list[str], float]:
    """The commits of the starts that made updates, and the hours of training without the pauses between starts.

    Hours include evaluations and saves. The first update after a start counts as one of median length.
    """
    times, steps = (np.array([record[name] for record in records]) for name in ("time", "step"))
    began = [datetime.fromisoformat(start["time"]).timestamp() for start in starts]
    ended = [*began[1:], np.inf]
    commits = [s["git"] for s, a, b in zip(starts, began, ended, strict=True) if ((times >= a) & (times < b)).any()]
    gaps, updates = np.diff(times, prepend=times[0]), np.diff(steps, prepend=steps[0] - 1)
    usual = np.median(gaps[1:] / updates[1:])
    first = np.unique([0, *(i for i in np.searchsorted(times, began) if i < len(gaps))])
    gaps[first] = usual * updates[first]
    return list(dict.fromkeys(commits)), float(gaps.sum() / 3600)


def write(lines: Iterable[dict], path: Path) -> None:
    content = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content.encode(), mtime=0))


def main(folder: str, output: str) -> None:
    found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]
    lines = found or list(comparisons(Path(folder)))
    if not lines:
        sys.exit(f"error: {folder}: has neither comparisons nor benchmark results")
    write(lines, Path(output))
    print(f"{output}: {len(lines)} lines, {Path(output).stat().st_size:,} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
