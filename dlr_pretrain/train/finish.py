"""The end of a run: fold, export, compare the export with the trained model, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import indent

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.data import ValidationSet
from dlr_pretrain.deploy.export import deployed_dense, export
from dlr_pretrain.deploy.folder import VERIFIED_SEQUENCES
from dlr_pretrain.models.dlr import residuals
from dlr_pretrain.train.weights import Weights
from dlr_pretrain.util.errors import Diverged
from dlr_pretrain.util.history import read_metrics
from dlr_pretrain.util.text import loading

Report = Callable[[Path], None]  # writes the report of a run directory into it


def write_report(report: Report | None, run_dir: Path, say: Callable[[str], None]) -> None:
    """Write the report of a run that has trained. If that fails, one line says so, and the run is complete."""
    if report is None:
        return
    try:
        report(run_dir)
    except Exception as error:
        say(f"warning: no report, {type(error).__name__}: {error}. Try python scripts/report.py {run_dir} --output DIR")


def finish(cfg: Config, run_dir: Path, weights: Weights, folded: dict[str, Tensor], validation: ValidationSet) -> str:
    """Write ``<run>/folded`` from ``folded``, the result of ``weights.folded()``.

    Returns a line that says what was folded and how it was checked. Raises UserError if the export is not what was
    trained; it then stays in ``<run>/.folded.partial``, and the checkpoints stay as they are. Raises Diverged, and
    writes nothing, if the last evaluation is not finite.
    """
    record = (read_metrics(run_dir / "metrics.jsonl") or [{}])[-1]
    if record.get("eval/perplexity", 0.0) is None:
        raise Diverged(
            f"step {cfg.train.steps}: the last evaluation is not finite, and nothing was folded. "
            f"The checkpoints stay. Lower train.lr={cfg.train.lr:g}"
        )
    ids = torch.from_numpy(validation.tokens[:VERIFIED_SEQUENCES, :-1].astype("int64"))
    record.pop("time", None)
    if (unknown := read_record(run_dir).get("tokenizer.unknown_share")) is not None:
        record["unknown characters of the text"] = f"{unknown:.2%}"
    checked = export(run_dir / "folded", cfg, folded, run_dir / "tokenizer", record, ids)
    layers = len(residuals(weights.model))
    done = f"{layers} projections" if layers else "nothing to fold"
    merged = deployed_dense(cfg) and cfg.backbone.name != "full"
    return f"{'merged into dense weights' if merged else done}; {checked}"


def how_to_load(cfg: Config, run_dir: Path) -> str:
    """The lines that say where the result is and how to load it."""
    folded, report = run_dir / "folded", run_dir / "report.md"
    code = indent(loading(str(folded), trust=not deployed_dense(cfg)), "    ")
    return f"report      {report}\n" * report.exists() + f"export      {folded}\n\n{code}"
