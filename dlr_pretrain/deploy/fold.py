"""Folds a run's checkpoint of any step into a folder that ``transformers`` loads, and checks the result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.config.composition import recorded
from dlr_pretrain.config.written import MANIFEST, read_config, read_record
from dlr_pretrain.data import Source, Tokenizer, ValidationSet, open_source, validation_set
from dlr_pretrain.deploy.consistency import consistency
from dlr_pretrain.deploy.export import export, require_export
from dlr_pretrain.deploy.merge import deployed
from dlr_pretrain.deploy.verify import VERIFIED_SEQUENCES, agreement
from dlr_pretrain.models import build
from dlr_pretrain.models.dlr import folded_state, residuals
from dlr_pretrain.util.errors import UserError


def fold_checkpoint(
    run: Path,
    tensors: Mapping[str, Tensor],
    record: dict[str, object],
    output: Path,
    dtype: torch.dtype | None = None,
    dense: bool = False,
    layout: str = "own",
    tokens: int = 0,
    device: torch.device | None = None,
) -> list[str]:
    """Write the folded weights of a checkpoint of ``run`` to ``output``; returns the lines of a report.

    ``tensors`` are those of the checkpoint's model. ``dtype`` casts the folded weights; None keeps the checkpoint's
    dtype, which is fp32 for runs with masters (a bf16 cast of these equals the working weights bit for bit). ``dense``
    multiplies linear factors out into a plain LLaMA. ``layout`` "cola" writes CoLA's layers for their authors' code.
    ``record`` is what the folder's README and ``fold.json`` say about the checkpoint.

    If the model has residuals, ``consistency`` is measured on about ``tokens`` tokens of the run's validation text
    (0: not measured), on ``device``, and recorded in ``fold.json``. In layout "own" the folder is compared with our own
    model through transformers. Raises UserError if a check fails; a folder that was written then keeps its temporary
    name. Raises UserError, before anything is measured, unless ``output`` is absent, empty or an earlier export.
    """
    cfg, device = recorded(read_config(run)), device or torch.device("cpu")
    require_export(output)
    rows = len(tensors["lm_head.weight"])
    meta = build(cfg, rows, torch.device("meta"))
    folded = folded_state(meta, tensors)
    own, weights = deployed(cfg, folded, dense)
    if dtype is not None:
        weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in weights.items()}
    layers = len(residuals(meta))
    report = [] if layers else ["layers        nothing to fold"]
    ids = torch.randint(3, rows, (VERIFIED_SEQUENCES, cfg.train.seq_len), generator=torch.Generator().manual_seed(0))
    if tokens and layers:
        found = consistency(cfg, tensors, folded, _validation(cfg, run, tokens), device)
        report, record = found.lines(), record | found.numbers()
        if found.differs:
            raise UserError(f"{run}: the folded model does not compute what was trained: {'; '.join(report)}")

    def check(folder: Path) -> None:
        (folder / "fold.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if layout == "own":
            report.append(f"checked       {agreement(folder, cfg, own, weights, folded, ids, device)}")

    export(output, weights, own, rows, run / "spiece.model", record, check, trained=cfg, layout=layout)
    return report


def _validation(cfg: Config, run: Path, tokens: int) -> ValidationSet:
    """About ``tokens`` of the run's own validation text, and no more than the run was evaluated on."""
    few = replace(cfg, eval=replace(cfg.eval, tokens=min(tokens, cfg.eval.tokens)))
    try:
        source = open_source(few)
        _require_same_text(run, source)
        return validation_set(few, source, Tokenizer(run / "spiece.model"))
    except (UserError, OSError) as error:
        raise UserError(f"the validation text of {run} cannot be read: {error}\n--tokens 0 folds without it") from error


def _require_same_text(run: Path, source: Source) -> None:
    """Raise UserError if ``source`` is not the one in the run's record: its perplexity would not be the run's."""
    trained = read_record(run).get("identity", {}).get("data.shards", source.fingerprint)
    if source.fingerprint != trained:
        rule = f"data.shards={source.fingerprint[:12]}, and the run was of {trained[:12]} ({MANIFEST})"
        raise UserError(f"{source.describe()}: is another text by now, {rule}. Bring the run's own back")
