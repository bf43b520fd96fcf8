"""How a gradient reaches the latents of a run, at each checkpoint: ``python scripts/gradient_paths.py runs/<run>``.

Let y = (B + beta R^T) z, and let g be the gradient of the mean loss with respect to y. The gradient with respect to z
is u + v: u = B^T g comes through B, and v = beta R g through the residual. Source: Wang et al. (2026), study of
gradient paths.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dlr_pretrain.config import parse
from dlr_pretrain.config.arguments import Parser, at_least_1
from dlr_pretrain.config.run_folder import read_config
from dlr_pretrain.config.tree import Dlr
from dlr_pretrain.util.errors import UserError, command

if TYPE_CHECKING:
    from torch import Tensor

    from dlr_pretrain.models import Llama
    from dlr_pretrain.models.layer import Layer


def main() -> int:
    about = "The gradient's two paths to the latents of a run with DLR: a table, and <run>/gradient_paths.csv."
    parser = Parser(description=about, epilog="example: gradient_paths.py runs/my-run --checkpoints last")
    parser.add_argument("run", type=Path, help="runs/<run>")
    parser.add_argument("--checkpoints", choices=("all", "last"), default="all", help="(default: all)")
    parser.add_argument("--sequences", type=at_least_1, default=32, help="of the run's validation text (default: 32)")
    given = parser.parse_args()
    return command(lambda: run(given.run, given.checkpoints, given.sequences))


def run(folder: Path, checkpoints: str, sequences: int) -> None:
    cfg = parse(read_config(folder))
    if not (cfg.dlr.has_residual and cfg.dlr.train_b):
        raise UserError(f"{folder}: dlr={cfg.dlr.name} lacks B or the residual as a path. Name a run with dlr=on")
    import pandas as pd
    import torch

    from dlr_pretrain.deploy.fold import batches, validation_of
    from dlr_pretrain.models import build_model
    from dlr_pretrain.train.checkpoint import directories, fault, load, step_of
    from dlr_pretrain.util.tensors import ALPHA

    saved = sorted(directories(folder / "checkpoints")[: 1 if checkpoints == "last" else None])
    if not saved:
        raise UserError(f"{folder}: has no checkpoint. Name a run that has saved one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = validation_of(folder, cfg, sequences * cfg.train.seq_len)
    text = replace(text, tokens=text.tokens[:sequences], lengths=text.lengths[:sequences])
    last, rows = cfg.scale.num_layers - 1, []
    names = ["0.self_attn.q_proj", f"{last // 2}.mlp.up_proj", f"{last}.mlp.up_proj"]  # the paper's
    for checkpoint in saved:
        if damage := fault(checkpoint):
            raise UserError(f"{checkpoint}: {damage}. Move it away")
        state = {name: stored.whole() for name, stored in load(checkpoint).model.items()}
        learned = state.pop(ALPHA, None)
        model = build_model(cfg, len(state["model.embed_tokens.weight"]), device, initialize=False)
        model.load_state_dict(state)
        measured = measure(model, cfg.dlr, learned, list(batches(text, device)), names)
        rows += [{"projection": n, "step": step_of(checkpoint), **numbers} for n, numbers in measured.items()]
    frame = pd.DataFrame(rows).sort_values("projection", kind="stable")
    frame.to_csv(folder / "gradient_paths.csv", index=False)
    print(frame.to_string(index=False, float_format="%.4g"))


def measure(
    model: Llama, dlr: Dlr, learned: Tensor | None, inputs: list[tuple[Tensor, ...]], names: Iterable[str] = ()
) -> dict[str, dict[str, float]]:
    """The numbers of the projections ``names``, or of all, over the scored positions of ``inputs``.

    ``through_b`` and ``through_residual`` are the means of |u| and |v|. ``rho`` is the second divided by the first,
    ``rho_mean`` the mean of the ratios, and ``cosine`` the mean of cos(u, v).
    ``isotropic`` is |beta R^T|_F / |B|_F: the ratio of root mean squares for a gradient without a preferred
    direction. ``share`` is |beta R^T|_F / |B + beta R^T|_F, and ``angle`` the one between B and R^T as vectors of their
    entries, in degrees. ``model`` holds B, and computes with branches afterwards. ``learned`` holds the learned
    strengths.
    """
    import torch

    from dlr_pretrain.models.adapter import split
    from dlr_pretrain.models.layer import named_layers
    from dlr_pretrain.models.residual import add_, branch_, entries
    from dlr_pretrain.util.tensors import ALPHA, IGNORE

    bs = {name: model.get_parameter(name).detach() for name in entries(model, dlr)}
    residuals = {name: torch.zeros_like(b) for name, b in bs.items()}
    add_(residuals if learned is None else residuals | {ALPHA: learned}, model, dlr)
    both = [split(model, tensors) for tensors in (bs, residuals)]
    suffix = ".b.weight"
    names = dict.fromkeys(names or (name[len("model.layers.") : -len(suffix)] for name in both[0]))  # each once
    matrices = {name: [side[f"model.layers.{name}{suffix}"] for side in both] for name in names}
    branch_(model, dlr, learned)
    outputs: dict[str, Tensor] = {}
    for path, layer in named_layers(model):
        block = path.removeprefix("model.layers.").rpartition(".")[0]
        record(layer, [f"{block}.{projection}" for projection in layer.spec.names], outputs)
    paths: dict[str, list[Tensor]] = {name: [] for name in names}
    count = sum((targets != IGNORE).sum() for _, targets, *_ in inputs)
    for ids, targets, *documents in inputs:
        gradients = torch.autograd.grad(model(ids, targets, *documents) / count, [outputs[name] for name in names])
        for name, g in zip(names, gradients, strict=True):
            g = g[..., : len(matrices[name][0])]
            counts = (targets != IGNORE) & g.any(-1)
            if "q_proj" in name:  # the first query of a document sees one key: its gradient is zero, up to rounding
                document = documents[0] if documents else torch.zeros_like(ids)
                counts &= document.diff(dim=1, prepend=document[:, :1] - 1) == 0
            paths[name].append(torch.stack([g[counts] @ matrix for matrix in matrices[name]]).double())
    results = {}
    for name, (b, residual) in matrices.items():
        u, v = torch.cat(paths[name], dim=1)
        through_b, through_residual = u.norm(dim=-1), v.norm(dim=-1)
        means = {"through_b": through_b.mean().item(), "through_residual": through_residual.mean().item()}
        results[name] = means | {
            "rho": means["through_residual"] / means["through_b"],
            "rho_mean": (through_residual / through_b).mean().item(),
            "cosine": torch.cosine_similarity(u, v, eps=0).mean().item(),
            "isotropic": (residual.norm() / b.norm()).item(),
            "share": (residual.norm() / (b + residual).norm()).item(),
            "angle": torch.rad2deg(torch.acos(torch.cosine_similarity(b.flatten(), residual.flatten(), 0))).item(),
        }
    return results


def record(layer: Layer, names: list[str], outputs: dict[str, Tensor]) -> None:
    """Make ``layer`` put the outputs of its projections into ``outputs``, by their ``names``."""
    import torch

    expand = layer.expand

    def recorded(z: Tensor) -> Tensor:
        separate = expand(z).unbind(0)
        outputs.update(zip(names, separate, strict=True))
        return torch.stack(separate)

    layer.expand = recorded  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
