"""What was trained in a run directory, compared with the planned run and with the runs beside it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dlr_pretrain.config import identity
from dlr_pretrain.config.identity import differences, told
from dlr_pretrain.config.written import read_record
from dlr_pretrain.launch.runs import PlannedRun
from dlr_pretrain.util.errors import UserError

FINGERPRINTS = {"data.shards", "tokenizer.pieces", "data.order"}  # of the text, the tokenizer, the order of the data


def trained(run_dir: Path) -> dict[str, object]:
    """The identity of the run that has saved a checkpoint in ``run_dir``; empty if none has."""
    record = _record(run_dir)
    return record.get("identity", {}) if "saved" in record else {}


def last_saved(run_dir: Path) -> int:
    """The step of the last checkpoint that the run in ``run_dir`` has made; 0 if it has made none.

    A checkpoint that it was forked from is not its own.
    """
    record = _record(run_dir)
    saved = record.get("saved", 0)
    return 0 if saved == record.get("forked", {}).get("step") else saved


def diverged(run: PlannedRun) -> str:
    """Why ``run`` diverged: its numbers were not finite, and nothing was saved since. Empty if it has not."""
    record = _record(run.dir)
    return "" if _changed(record.get("identity", {}), run) else str(record.get("diverged", ""))


def _record(run_dir: Path) -> dict:
    try:
        return read_record(run_dir)
    except UserError:
        return {}  # train.py reports a damaged record


def another(run: PlannedRun) -> str:
    """How the run in the directory of ``run`` differs from it; empty if it does not, or if there is none."""
    return told(_changed(trained(run.dir), run))


def _changed(there: dict, run: PlannedRun) -> dict[str, tuple[object, object]]:
    return differences(there, identity(run.cfg))


def require_comparable_records(runs: Iterable[PlannedRun]) -> None:
    """Raises UserError if a directory holds another run than the planned one, or if two were trained on other text.

    The names of runs show neither: an option's file, a default or the text itself may have changed since then.
    """
    first: dict[str, tuple[object, Path]] = {}
    for run in runs:
        if changed := another(run):
            raise UserError(f"{run.dir} holds another run: {changed}. Move it away, or choose another run.root")
        found = trained(run.dir)
        for name in FINGERPRINTS & found.keys():
            value, where = first.setdefault(name, (found[name], run.dir))
            if found[name] != value:
                raise UserError(
                    f"{run.dir}: {name} is not that of {where}: their losses do not compare. "
                    "Move away those that were trained on what the text was before, or choose another run.root"
                )
