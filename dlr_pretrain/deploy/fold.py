"""Folds a checkpoint into a folder that ``transformers`` loads, and reports what folding changed.

The folded weights must equal those of the training forward pass (B + beta R^T) bit for bit. The exported model is also
compared with the paper's form, in which the residual is a branch in activation space, whose rounding differs. As in
the paper, the report gives perplexity, logit errors and latency.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

from dlr_pretrain.config import Config, parse
from dlr_pretrain.config.run_folder import MANIFEST, read_config, read_record
from dlr_pretrain.data import ValidationSet, inputs_and_targets, load_tokenizer, open_source, validation_set
from dlr_pretrain.deploy.export import VERIFIED_SEQUENCES, deployed, export, few_digits, loaded_model
from dlr_pretrain.models import Llama, build_model
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.flops import parameter_counts
from dlr_pretrain.models.residual import Residuals, add_, branch_, entries
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import ALPHA, IGNORE, WORKING_DTYPE
from dlr_pretrain.util.text import perplexity

Tensors = Mapping[str, Tensor]  # by name
SEQUENCES = 8  # per forward pass
TIMED = 0.2  # minimum seconds of forward passes over which a latency is measured


def fold_checkpoint(
    run: Path,
    tensors: Tensors,
    record: dict[str, object],
    output: Path,
    dtype: torch.dtype | None,
    dense: bool,
    tokens: int,
    device: torch.device,
) -> list[str]:
    """Write the folded weights of a checkpoint of ``run`` to ``output``; returns the lines of a report.

    ``tensors`` are the checkpoint's, by their fused names. They are exported merged into dense weights if ``dense``,
    and in ``dtype``; fp32 masters cast to bf16 equal the working weights bit for bit. If the model has residuals, the
    report is measured on ``device``, on about ``tokens`` tokens of the run's validation text (0: not measured).
    ``record`` and the report go into ``fold.json`` and the folder's README. Raises UserError if a check fails.
    """
    cfg = parse(read_config(run))
    folded = folded_tensors(cfg, tensors)
    report = [] if cfg.dlr.has_residual else [f"{'layers':<29} nothing to fold"]
    if tokens > 0 and cfg.dlr.has_residual:
        target = deployed(cfg, folded, dense, dtype)
        same = {"weights_identical": weights_identical(cfg, tensors, folded)}
        try:
            text = validation_of(run, cfg, tokens)
        except UserError as error:
            raise UserError(f"{error}. scripts/fold.py --tokens 0 folds without the text") from error
        changes = same | consistency(cfg, tensors, *target, text, device)
        record = record | {f"fold/{name}": value for name, value in changes.items()}
        report = [f"{name.replace('_', ' '):<29} {few_digits(value, 6)}" for name, value in changes.items()]
        if not changes["weights_identical"]:
            raise UserError(f"{run}: the folded model does not compute what was trained: {'; '.join(report)}")
    shape = VERIFIED_SEQUENCES, cfg.train.seq_len
    ids = torch.randint(3, len(tensors["model.embed_tokens.weight"]), shape, generator=torch.Generator().manual_seed(0))
    checked = export(output, cfg, folded, run / "tokenizer", record, ids, dense, dtype)
    return [*report, f"{'checked':<29} {checked}"]


def validation_of(run: Path, cfg: Config, tokens: int) -> ValidationSet:
    """About ``tokens`` tokens of the run's own validation text, but no more than the run was evaluated on.

    Raises UserError if the text cannot be opened, or has changed since the run.
    """
    limited, record = replace(cfg, eval=replace(cfg.eval, tokens=min(tokens, cfg.eval.tokens))), read_record(run)
    source = open_source(limited, version=record.get("data.version"))
    trained = record.get("identity", {}).get("data.shards", source.fingerprint)
    if source.fingerprint != trained:  # the perplexity would not be comparable with the run's
        rule = f"the text has changed since the run, whose {MANIFEST} names its files"
        raise UserError(source.describe(), rule, "Restore the run's text")
    return validation_set(limited, source, load_tokenizer(run / "tokenizer"))


def folded_tensors(cfg: Config, tensors: Tensors) -> dict[str, Tensor]:
    """A checkpoint's ``tensors`` by their exported names, with the residuals folded into copies if there are any."""
    if cfg.dlr.has_residual:
        model = build_model(cfg, len(tensors["model.embed_tokens.weight"]), torch.device("meta"))
        tensors = {**tensors, **{name: tensors[name].clone() for name in entries(model, cfg.dlr)}}
        add_(tensors, model, cfg.dlr)
    return by_exported_name(cfg, tensors)


def by_exported_name(cfg: Config, tensors: Tensors) -> dict[str, Tensor]:
    """A checkpoint's ``tensors`` by their exported names."""
    model = build_model(cfg, len(tensors["model.embed_tokens.weight"]), torch.device("meta"))
    return split(model, {name: tensor for name, tensor in tensors.items() if name != ALPHA})


@torch.no_grad()
def weights_identical(cfg: Config, tensors: Tensors, folded: Tensors) -> bool:
    """Whether ``folded`` equal, bit for bit, the working weights that training forms from ``tensors``."""
    model = _model(cfg, by_exported_name(cfg, tensors), torch.device("cpu"))
    residuals = Residuals(model, cfg.dlr, {name: tensors[name].clone() for name, _ in model.named_parameters()})
    if residuals.alpha is not None:
        residuals.alpha.copy_(tensors[ALPHA])
    residuals.put_in()
    working = split(model, dict(model.named_parameters()))
    return all(torch.equal(p, folded[name].to(p.dtype)) for name, p in working.items())


@torch.no_grad()
def consistency(
    cfg: Config, state: Tensors, exported: Config, weights: Tensors, validation: ValidationSet, device: torch.device
) -> dict[str, object]:
    """What folding changed, by name, from the model of ``cfg`` with a checkpoint's ``state`` to the exported model.

    ``exported`` and ``weights`` are its configuration and tensors (see ``deployed``). Both models compute in the run's
    working dtype. Latencies are medians in ms.
    """
    before = _model(cfg, by_exported_name(cfg, state), device)
    branch_(before, cfg.dlr, state.get(ALPHA))
    plain = replace(exported, dlr=replace(cfg.dlr, enabled=False))
    after = _model(plain, weights, device)
    models = {"before": before, "after": after}
    return {
        "layers": 7 * cfg.scale.num_layers,
        "parameters_before": parameter_counts(cfg, before)["total"],
        "parameters_after": parameter_counts(plain, after)["total"],
        **_compare(models, validation, device),
        **_latencies(models, validation, device),
    }


def _model(cfg: Config, tensors: Tensors, device: torch.device) -> Llama:
    """The model of ``cfg`` in the working dtype of training."""
    return loaded_model(cfg, tensors, device, WORKING_DTYPE[cfg.precision.name])


def batches(validation: ValidationSet, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Yields (ids, targets[, documents]) of a few sequences at a time."""
    for start in range(0, len(validation.tokens), SEQUENCES):
        some = slice(start, start + SEQUENCES)
        tokens, lengths = (torch.from_numpy(a[some]).to(device) for a in (validation.tokens, validation.lengths))
        yield inputs_and_targets(tokens, lengths, validation.separator)


def _compare(models: dict[str, Llama], validation: ValidationSet, device: torch.device) -> dict[str, float]:
    """The perplexities of both models, and the errors of the logits of "after" against "before", over all targets."""
    targets, error, size = 0, 0.0, 0.0
    losses = dict.fromkeys(models, 0.0)
    for ids, target, *documents in batches(validation, device):
        scored = target != IGNORE
        logits = {name: model.logits(ids, *documents)[scored].float() for name, model in models.items()}
        for name, wide in logits.items():
            losses[name] += F.cross_entropy(wide, target[scored], reduction="sum").item()
        targets += int(scored.sum())
        error += (logits["after"] - logits["before"]).abs().mean(1, dtype=torch.float64).sum().item()
        size += logits["before"].abs().mean(1, dtype=torch.float64).sum().item()
    return {
        "targets": targets,
        **{f"perplexity_{name}": perplexity(loss / targets) for name, loss in losses.items()},
        "logits_mean_absolute_error": error / targets,
        "logits_mean_relative_error": error / size,
    }


def _latencies(models: dict[str, Llama], validation: ValidationSet, device: torch.device) -> dict[str, object]:
    """The median milliseconds of a forward pass of each model, and a description of the input."""
    ids, _, *documents = next(batches(validation, device))
    latencies: dict[str, object] = {}
    for name, model in models.items():
        variables = {"model": model, "inputs": (ids, *documents)}
        timer = Timer("model.logits(*inputs)", globals=variables, num_threads=torch.get_num_threads())
        latencies[f"latency_ms_{name}"] = 1000 * timer.blocked_autorange(min_run_time=TIMED).median
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    kind = str(models["after"].lm_head.weight.dtype).removeprefix("torch.")
    return latencies | {"shape": f"{len(ids)} x {ids.shape[1]} tokens, {kind}, eager, {machine}"}
