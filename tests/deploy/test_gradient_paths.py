"""scripts/gradient_paths.py measures the gradient's two paths to a latent as they are defined, at every checkpoint."""

from __future__ import annotations

import copy
import math

import pandas as pd
import pytest
import torch
import yaml

from dlr_pretrain.models import build_model
from dlr_pretrain.models.adapter import split
from scripts import gradient_paths
from tests.conftest import main_of
from tests.parity.reference import CPU, VOCAB, r_transposed, small

PATHS = ("0.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj")


@pytest.mark.parametrize("separated", [False, True])
@pytest.mark.parametrize("backbone", ["lowrank", "cola_lax"])
def test_both_paths_are_their_definition(backbone, separated):
    """u and v are the gradients of the mean loss with respect to z through B alone and through the residual alone."""
    cfg = small(backbone, "dlr=on")
    model = build_model(cfg, VOCAB, CPU).double()
    ids, targets = torch.randint(0, VOCAB, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    targets[:, 9:] = -100
    documents = (torch.tensor([0] * 5 + [1] * 7).expand(3, 12),) if separated else ()
    inputs = [(ids[:2], targets[:2], *(d[:2] for d in documents)), (ids[2:], targets[2:], *(d[2:] for d in documents))]
    found = gradient_paths.measure(copy.deepcopy(model), cfg.dlr, None, inputs, PATHS)
    matrices = {}
    for full, weight in split(model, {name: p.data for name, p in model.named_parameters()}).items():
        if full.endswith(".b.weight"):  # the model multiplies by the sum of both
            residual = r_transposed(*weight.shape).double() / math.ceil(weight.shape[0] / weight.shape[1]) ** 0.5
            matrices[full] = weight.clone(), residual
            weight += residual
    for name in PATHS:
        b, residual = matrices[f"model.layers.{name}.b.weight"]
        at, _, projection = name.rpartition(".")
        layer = model.get_submodule(f"model.layers.{at}.{'qkv' if projection == 'q_proj' else 'gate_up'}")
        number, expand, ways = layer.spec.names.index(projection), layer.expand, []

        def by_two_ways(z, b=b, residual=residual, layer=layer, number=number, expand=expand, ways=ways):
            ways += (z[..., number, :].detach().clone().requires_grad_() for _ in range(2))
            y = torch.nn.functional.pad(ways[0] @ b.T + ways[1] @ residual.T, (0, layer.spec.pad_out - len(b)))
            return torch.stack([y if i == number else other for i, other in enumerate(expand(z))])

        layer.expand = by_two_ways
        u, v = torch.autograd.grad(model(ids, targets, *documents) / 27, ways)
        layer.expand = expand
        counts = targets != -100
        if "q_proj" in name:
            counts[:, [0, 5] if separated else [0]] = False
        u, v = u[counts], v[counts]
        sizes = u.norm(dim=-1), v.norm(dim=-1)
        expected = {"through_b": sizes[0].mean(), "through_residual": sizes[1].mean()}
        expected |= {"rho": sizes[1].mean() / sizes[0].mean(), "rho_mean": (sizes[1] / sizes[0]).mean()}
        expected |= {"cosine": ((u * v).sum(-1) / sizes[0] / sizes[1]).mean(), "isotropic": residual.norm() / b.norm()}
        cosine = (b * residual).sum() / b.norm() / residual.norm()
        expected |= {"share": residual.norm() / (b + residual).norm(), "angle": cosine.arccos() * 180 / math.pi}
        assert found[name] == pytest.approx({key: value.item() for key, value in expected.items()}, rel=1e-9), name


def test_a_run_is_measured_at_its_checkpoints(train, tmp_path, no_export, capsys):
    run = train(tmp_path / "run", "backbone=cola", "dlr=on", "train.steps=10", "precision=bf16")
    for which, steps in (("last", [10] * 3), ("all", [5, 10] * 3)):
        assert main_of("gradient_paths", run, "--checkpoints", which, "--sequences", 4) == 0
        found = pd.read_csv(run / "gradient_paths.csv")
        assert list(found.step) == steps and set(found.projection) == set(PATHS)
        assert (found.rho / found.isotropic).between(0.3, 3).all()
    assert capsys.readouterr().out.count(" 1.mlp.up_proj ") == 3
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["dlr"]["enabled"] = False
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main_of("gradient_paths", run) == 3 and "Name a run with dlr=on" in capsys.readouterr().err
