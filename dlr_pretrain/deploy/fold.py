"""Folds a run's checkpoint of any step into a folder that ``transformers`` loads, and reports what folding changed.

Three models are compared: the residual as the paper's branch in activation space, the training forward (B + beta R^T in
the weights), and the folded model. The last two must be equal bit for bit, in weights and in logits. The first rounds
differently; the report says by how much, as the paper does: perplexity, error of the logits, latency, peak memory. What
is said of the folded model is measured on the tensors that are written.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.config.composition import recorded
from dlr_pretrain.config.written import MANIFEST, read_config, read_record
from dlr_pretrain.data import (
    Source,
    ValidationSet,
    inputs_and_targets,
    list_files,
    load_tokenizer,
    open_source,
    validation_set,
)
from dlr_pretrain.deploy.export import deployed, export, require_export
from dlr_pretrain.deploy.verify import VERIFIED_SEQUENCES, agreement
from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.dlr import folded_state, marks, residuals
from dlr_pretrain.models.precision import STATE_DTYPE, WORKING_DTYPE
from dlr_pretrain.models.publisher import Publisher
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import IGNORE
from dlr_pretrain.util.text import amount

SEQUENCES = 8  # in one forward pass
FORWARDS = 15  # timed forward passes of each form
CPU_TOKENS = 50_000  # of the report, where nothing else is asked for


def fold_checkpoint(
    run: Path,
    tensors: Mapping[str, Tensor],
    record: dict[str, object],
    output: Path,
    dtype: torch.dtype | None = None,
    dense: bool = False,
    layout: str = "own",
    tokens: int | None = None,
    device: torch.device | None = None,
) -> list[str]:
    """Write the folded weights of a checkpoint of ``run`` to ``output``; returns the lines of a report.

    ``tensors`` are those of the checkpoint's model. ``dtype`` casts the folded weights; None keeps the checkpoint's
    dtype, which is fp32 for runs with masters (a bf16 cast of these equals the working weights bit for bit). ``dense``
    multiplies linear factors out into a plain LLaMA. ``layout`` "cola" writes CoLA's layers for their authors' code.
    ``record`` is what the folder's README and ``fold.json`` say about the checkpoint.

    If the model has residuals, the report is measured on about ``tokens`` tokens of the run's validation text (0: not
    measured; None: ``eval.tokens`` on a GPU, fewer on a CPU) on ``device``, and recorded in ``fold.json``. In layout
    "own" the folder is compared with our own model through transformers. Raises UserError if a check fails; a folder
    that was written then keeps its temporary name. Raises UserError, before anything is measured, unless ``output`` is
    absent, empty or an earlier export.
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
    if tokens is None:
        tokens = CPU_TOKENS if device.type == "cpu" else cfg.eval.tokens
    if tokens and layers:
        validation = _validation(cfg, run, tokens)
        found = consistency(cfg, tensors, folded, own, weights, validation, device)
        report, record = lines(found), record | {f"fold/{name}": value for name, value in found.items()}
        if False in (found["weights_identical"], found["logits_identical"]):
            raise UserError(f"{run}: the folded model does not compute what was trained: {'; '.join(report)}")

    def check(folder: Path) -> None:
        (folder / "fold.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        if layout == "own":
            report.append(f"checked       {agreement(folder, cfg, own, weights, folded, ids, device)}")

    export(output, weights, own, rows, run / "tokenizer", record, check, trained=cfg, layout=layout)
    return report


def _validation(cfg: Config, run: Path, tokens: int) -> ValidationSet:
    """About ``tokens`` of the run's own validation text, and no more than the run was evaluated on."""
    few = replace(cfg, eval=replace(cfg.eval, tokens=min(tokens, cfg.eval.tokens)))
    try:
        source = open_source(few, listing=list_files(few, version=read_record(run).get("data.version")))
        _require_same_text(run, source)
        return validation_set(few, source, load_tokenizer(run / "tokenizer"))
    except (UserError, OSError) as error:
        raise UserError(f"the validation text of {run} cannot be read: {error}\n--tokens 0 folds without it") from error


def _require_same_text(run: Path, source: Source) -> None:
    """Raise UserError if ``source`` is not the one in the run's record: its perplexity would not be the run's."""
    trained = read_record(run).get("identity", {}).get("data.shards", source.fingerprint)
    if source.fingerprint != trained:
        rule = f"data.shards={source.fingerprint[:12]}, and the run was of {trained[:12]} ({MANIFEST})"
        raise UserError(f"{source.describe()}: is another text by now, {rule}. Bring the run's own back")


# ----------------------------------------------------------------------------------------------------
# The report


def lines(found: dict[str, object]) -> list[str]:
    """The report of ``consistency``, one line per finding."""
    trained = {None: "came of branches", True: "equal the folded bit for bit", False: "DIFFER from the folded"}
    memory = [found[f"peak_memory_{when}"] for when in ("before", "after")]
    peaks = (
        "not measured on a CPU" if None in memory else "{}B with the branch, {}B written".format(*map(amount, memory))
    )
    return [
        f"layers        {found['layers']} folded",
        f"parameters    {found['parameters_before']:,} before, {found['parameters_after']:,} written",
        f"training      its weights {trained[found['weights_identical']]}, "
        f"its logits {trained[found['logits_identical']]}",
        f"perplexity    {found['perplexity_before']:.4f} with the residual as a branch, "
        f"{found['perplexity_after']:.4f} written ({found['targets']:,} targets)",
        f"logits        mean absolute error {found['logits_mean_absolute_error']:.3g} against the branch, "
        f"{found['logits_mean_relative_error']:.2%} of their mean size",
        f"latency       {found['latency_before']:.2f} ms with the branch, {found['latency_trained']:.2f} ms with the "
        f"residual in the weights, {found['latency_after']:.2f} ms written ({found['shape']})",
        f"peak memory   {peaks}",
    ]


@torch.no_grad()
def consistency(
    cfg: Config,
    state: Mapping[str, Tensor],
    folded: dict[str, Tensor],
    own: Config,
    weights: dict[str, Tensor],
    validation: ValidationSet,
    device: torch.device,
) -> dict[str, object]:
    """What folding changed, by name, from the model of ``cfg`` with a checkpoint's ``state`` to ``folded``.

    ``own`` and ``weights`` are what is written (see ``deployed``). All compute in the run's working dtype. Latencies
    are medians in ms, memory is the peak of a forward pass in bytes (None on a CPU). ``weights_identical`` and
    ``logits_identical`` compare the folded model with the training forward; they are None for a run of branches.
    """
    trained = _model(cfg, state, device)
    publisher = Publisher(trained)
    if STATE_DTYPE[cfg.precision.name] == WORKING_DTYPE[cfg.precision.name]:
        publisher.publish()
    else:
        publisher.publish({name: state[name].to(device) for name, _ in trained.named_parameters()})
    plain = replace(cfg, dlr=replace(cfg.dlr, enabled=False))
    after = _model(plain, folded, device)
    weight = dict(after.named_parameters())
    same = all(torch.equal(p, weight[name]) for name, p in trained.named_parameters() if name in weight)
    kept = own is cfg and weights["lm_head.weight"].dtype == folded["lm_head.weight"].dtype
    written = after if kept else _model(replace(own, dlr=plain.dlr), weights, device)
    branch = _model(replace(cfg, dlr=replace(cfg.dlr, impl="branch")), state, device)
    identical, found = _compare(branch, trained, after, written, validation, device)
    timed = {"before": branch, "trained": trained, "after": written}
    branches = cfg.dlr.impl == "branch"
    return {
        "layers": len(publisher.carrying),
        "parameters_before": sum(p.numel() for p in trained.parameters()),
        "parameters_after": sum(p.numel() for p in written.parameters()),
        "weights_identical": None if branches else same,
        "logits_identical": None if branches else identical,
        **found,
        **_latencies(timed, validation, device),
        **{f"peak_memory_{when}": _peak_memory(timed[when], validation, device) for when in ("before", "after")},
    }


def _model(cfg: Config, tensors: Mapping[str, Tensor], device: torch.device) -> Llama:
    """The model of ``cfg`` in its working dtype; its products are those of training."""
    dtype = WORKING_DTYPE[cfg.precision.name]
    model = build(cfg, len(tensors["lm_head.weight"]), device, dtype, initialize=False)
    model.load_state_dict(dict(tensors) | marks(model))
    return model.requires_grad_(False)


def _batches(validation: ValidationSet, device: torch.device) -> Iterator[tuple]:
    """For a few sequences at a time, a mask [n, seq_len], false on padding, and (ids, targets[, documents])."""
    for start in range(0, len(validation.tokens), SEQUENCES):
        some = slice(start, start + SEQUENCES)
        tokens, lengths = (torch.from_numpy(a[some]).to(device) for a in (validation.tokens, validation.lengths))
        real = torch.arange(tokens.shape[1] - 1, device=device) < lengths[:, None]
        yield real, inputs_and_targets(tokens, lengths, validation.separator)


def _compare(
    branch: Llama, trained: Llama, folded: Llama, written: Llama, validation: ValidationSet, device: torch.device
) -> tuple[bool, dict[str, float]]:
    """Whether the logits of ``trained`` and ``folded`` are equal; perplexities and errors of ``written`` against
    ``branch`` over all positions but the padding."""
    identical, targets = True, 0
    losses, error, size, count = [0.0, 0.0], 0.0, 0.0, 0
    for real, (ids, target, *documents) in _batches(validation, device):
        logits = {id(m): m.logits(ids, *documents) for m in {branch, trained, folded, written}}
        identical &= torch.equal(logits[id(trained)], logits[id(folded)])
        before, after = (logits[id(model)][real].float() for model in (branch, written))
        for i, wide in enumerate((before, after)):
            losses[i] += F.cross_entropy(wide, target[real], ignore_index=IGNORE, reduction="sum").item()
        targets += (target != IGNORE).sum().item()
        error += (after - before).abs().sum(dtype=torch.float64).item()
        size += before.abs().sum(dtype=torch.float64).item()
        count += before.numel()
    return identical, {
        "targets": targets,
        "perplexity_before": math.exp(losses[0] / targets),
        "perplexity_after": math.exp(losses[1] / targets),
        "logits_mean_absolute_error": error / count,
        "logits_mean_relative_error": error / size,
    }


def _latencies(timed: dict[str, Llama], validation: ValidationSet, device: torch.device) -> dict[str, object]:
    """Median milliseconds of a forward pass of each of ``timed``, in turns, and the input in words."""
    ids, _, *documents = next(_batches(validation, device))[1]
    times: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(FORWARDS):
        for name, model in timed.items():
            _wait(device)
            start = time.perf_counter()
            model.logits(ids, *documents)
            _wait(device)
            times[name].append(1000 * (time.perf_counter() - start))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    kind = str(timed["after"].lm_head.weight.dtype).removeprefix("torch.")
    medians = {f"latency_{name}": statistics.median(own[3:]) for name, own in times.items()}  # the first ones warm up
    return medians | {"shape": f"{len(ids)} x {ids.shape[1]} tokens, {kind}, eager, {machine}"}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_memory(model: Llama, validation: ValidationSet, device: torch.device) -> int | None:
    """Bytes of the weights of ``model`` and what a forward pass adds to them at its peak; None on a CPU."""
    if device.type != "cuda":
        return None
    ids, _, *documents = next(_batches(validation, device))[1]
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    model.logits(ids, *documents)
    own = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return own + torch.cuda.max_memory_allocated(device) - before
