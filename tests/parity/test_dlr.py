"""DLR in our models: grouping, B and W around an update, folding, ablations in runs, and the gradient's two paths."""

import copy
import hashlib
import math

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn

from dlr_pretrain.config import Config
from dlr_pretrain.models import Llama, attach_dlr, build_model, fold_
from dlr_pretrain.models.adapter import load_, split
from dlr_pretrain.models.residual import Residuals, columns_of, divisor_of, entries
from dlr_pretrain.optim.optimizer import Optimizer
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import folded, new_optimizer
from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.tensors import ALPHA, STATE_DTYPE
from scripts import gradient_paths
from tests.conftest import main_of, saved
from tests.parity.reference import CPU, VOCAB, Operations, State, disturbed, r_transposed, small
from tests.resume.test_resume import assert_same, final
from tests.trial import random_batch, trial

Q = "model.layers.0.self_attn.q_proj"
PRECISIONS = ("fp32", "bf16", "bf16_mixed")


def made(cfg: Config) -> tuple[Llama, State, Optimizer]:
    """A model that holds W, its B by exported names, and its optimizer."""
    model = build_model(cfg, VOCAB, CPU, STATE_DTYPE[cfg.precision.name])
    b = {name: value.clone() for name, value in working(model).items()}
    return model, b, new_optimizer(cfg, model)


def working(model: Llama) -> State:
    return split(model, {name: p.detach() for name, p in model.named_parameters()})


def logits(model: Llama) -> Tensor:
    with torch.no_grad():
        return model.logits(torch.arange(24).view(2, 12))


@pytest.mark.parametrize(("d_out", "rank", "columns"), [
    (10, 4, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]),
    (14, 6, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]),  # latent 5 gets no copy
    (8, 8, list(range(8))),
    (3, 8, [0, 1, 2]),
])  # fmt: skip
def test_each_output_receives_the_latent_of_its_group(d_out, rank, columns):
    found = columns_of("contiguous", "weight", d_out, rank, 0)
    assert found.tolist() == columns
    assert torch.equal(nn.functional.one_hot(found, rank), r_transposed(d_out, rank))
    assert divisor_of(d_out, rank, True) == math.sqrt(math.ceil(d_out / rank)) and divisor_of(d_out, rank, False) == 1


def test_random_grouping_is_that_of_the_paper():
    hashed = int.from_bytes(hashlib.md5(Q.encode()).digest()[:8], "little")
    assert [(seed ^ hashed) % (2**63 - 1) for seed in (0, 42)] == [3723340643983772940, 3723340643983772966]
    assert columns_of("random", "fc1", 12, 4, 42).tolist() == [1, 2, 3, 1, 2, 0, 0, 1, 0, 0, 3, 2]
    cfg = small("cola", "dlr=random")
    drawn = entries(build_model(cfg, VOCAB, CPU), cfg.dlr)["model.layers.0.self_attn.qkv.b"].columns[:32]
    assert torch.equal(drawn, columns_of("random", Q, 32, 8, 0))


def test_offset_and_residual_start_from_the_same_weights():
    with_residual, offset = (made(small("cola", f"dlr={dlr}"))[0] for dlr in ("on", "init_offset"))
    assert all(map(torch.equal, with_residual.parameters(), offset.parameters()))


# ----------------------------------------------------------------------------------------------------
# B and W


@pytest.mark.parametrize(("words", "precision"), [
    *((f"cola dlr={dlr}", precision) for dlr in ("on", "learnable_alpha") for precision in PRECISIONS),
    ("lost dlr=on backbone.rank=8 backbone.sparsity=0.2", "bf16"),
    ("cola_lax dlr=on", "bf16"),
])  # fmt: skip
def test_weights_are_b_plus_the_residual_rounded_once(words, precision):
    """The weights of the model and of the fold. Each update sees B, bit for bit."""
    cfg = small(*words.split(), f"precision={precision}")
    model, b, optimizer = made(cfg)
    for _ in range(2):
        with optimizer.taken_out() as values:
            seen = split(model, {name: value.clone() for name, value in values.items()})
        assert seen.keys() - b.keys() == ({ALPHA} if cfg.dlr.learn_alpha else set())
        assert all(torch.equal(seen[name], value) for name, value in b.items())
    found, whole = working(model), folded(cfg, model, optimizer, keep=True)
    changed = 0
    for name, value in b.items():
        expected = value
        if name.endswith(".b.weight"):
            root = math.sqrt(math.ceil(value.shape[0] / value.shape[1]))
            expected = value.float() + torch.tensor(1 / root) * r_transposed(*value.shape)
            changed += 1
        assert torch.equal(found[name], expected.to(found[name].dtype)), name
        assert whole[name].dtype == value.dtype and torch.equal(whole[name], expected.to(value.dtype)), name
    assert changed == 14


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_number_of_kernels_does_not_grow_with_depth(precision):
    def kernels(layers: int) -> int:
        _, _, optimizer = made(small("cola", "dlr=on", f"precision={precision}", layers=layers))
        seen = []
        with Operations(lambda operation, _: seen.append(operation)), optimizer.taken_out():
            pass
        return sum(not operation.is_view and operation is not torch.ops.prim.device.default for operation in seen)

    assert kernels(2) == kernels(5) <= 12


@pytest.mark.full  # inductor
@pytest.mark.parametrize("dlr", ["on", "learnable_alpha"])
@pytest.mark.parametrize("with_masters", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_put_in_equals_eager_bit_for_bit(dtype, with_masters, dlr):
    """The path of a GPU, compiled here for a CPU."""
    cfg = small("cola", f"dlr={dlr}")
    eager = disturbed(cfg, dtype)
    start, fused = ({name: p.detach().clone() for name, p in eager.named_parameters()}, copy.deepcopy(eager))

    def residuals(model: Llama, compiled: bool) -> Residuals:
        masters = {name: value.float() * 1.001 for name, value in start.items()}
        return Residuals(model, cfg.dlr, masters if with_masters else dict(model.named_parameters()), compiled)

    both = residuals(eager, False), residuals(fused, True)
    for of in both:
        of.put_in()
    assert all(map(torch.equal, eager.parameters(), fused.parameters()))
    assert not torch.equal(start["model.layers.0.mlp.down.b"], eager.get_parameter("model.layers.0.mlp.down.b"))
    for of in both:
        of.take_out()
    if not with_masters:
        assert all(torch.equal(start[name], p) for name, p in fused.named_parameters())


# ----------------------------------------------------------------------------------------------------
# The trainer and a plain loop


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plain_loop_equals_the_trainer_bit_for_bit(precision):
    """50 updates of every B, each in a linear layer with ``attach_dlr``.

    The loop shares only the products with the trainer, because their order of summation is not fixed.
    """
    batch_of = ("train.global_batch=2", "train.micro_batch=2", "train.seq_len=8", "train.clip=null")
    cfg = small("cola", "dlr=on", "compile=false", "device=cpu", f"precision={precision}", *batch_of)
    products, start, _ = made(cfg)
    others = {name: nn.Parameter(value.clone()) for name, value in start.items() if not name.endswith(".b.weight")}
    ups, options = nn.ModuleDict(), cfg.optimizer
    for name in start.keys() - others.keys():
        ups[name.replace(".", "/")] = nn.Linear(*start[name].shape[::-1], bias=False)
        ups[name.replace(".", "/")].weight = nn.Parameter(start[name].clone())

    def weights() -> State:
        return others | {key.replace("/", "."): linear.weight for key, linear in ups.items()}

    assert len(attach_dlr(ups, match="*")) == 14
    trained, betas = [*others.values(), *ups.parameters()], (options.beta1, options.beta2)
    adamw = torch.optim.AdamW(trained, 0.01, betas, options.eps, options.weight_decay, fused=True)
    with Ranks(cfg) as ranks:
        update, batch = trial(cfg, ranks, VOCAB), random_batch(cfg, ranks, VOCAB)
        ids, targets = batch.tokens[:, :-1], batch.tokens[:, 1:].long()
        for index in range(50):
            update(batch, index, lr=0.01)
            formed = weights()
            load_(products, {name: weight.detach() for name, weight in formed.items()})
            (products(ids, targets) / torch.tensor(targets.numel())).backward()
            gradients = split(products, {name: p.grad for name, p in products.named_parameters()})
            torch.autograd.backward(list(formed.values()), [gradients[name] for name in formed])
            adamw.step()
            adamw.zero_grad(), products.zero_grad()
    with update.optimizer.taken_out() as values:
        b = {name: value.clone() for name, value in split(update.model, values).items()}
    for key, linear in ups.items():
        name = key.replace("/", ".")
        assert torch.equal(linear.parametrizations.weight.original, b[name]) and not torch.equal(b[name], start[name])
    assert fold_(ups) == 14
    found = working(update.model)
    assert all(torch.equal(weight, found[name]) for name, weight in weights().items())


# ----------------------------------------------------------------------------------------------------
# Ablations in runs


@pytest.mark.parametrize(("option", "precision"), [
    ("learnable_alpha", "bf16_mixed"),
    *(pytest.param(option, "fp32", marks=pytest.mark.full) for option in ("init_offset", "no_b", "random")),
])  # fmt: skip
@pytest.mark.usefixtures("no_export")
def test_ablations_train_resume_and_fold(train, tmp_path, option, precision):
    """Bit for bit, including masters. The run itself checks that the folded tensors are the last working weights."""
    given = ("backbone=cola", f"dlr={option}", f"precision={precision}", "train.steps=8", "train.lr=1e-3")
    whole = final(train(tmp_path / "whole", *given))
    with pytest.raises(Stopped):
        train(tmp_path / "parts", *given, "train.stop_after=5")
    assert_same(final(train(tmp_path / "parts", *given)), whole)


@pytest.mark.usefixtures("no_export")
@pytest.mark.parametrize("precision", ["bf16_mixed", "bf16_sr"])
def test_learned_alphas_are_not_decayed(train, tmp_path, precision):
    """At a decay of a tenth per update, which would leave 0.43 of them.

    They are not rounded to bf16 either, in which the neighbours of 1 are 0.996 and 1.008.
    """
    given = ("dlr=learnable_alpha", "backbone=cola", f"precision={precision}")
    folder = train(tmp_path / "run", *given, "train.steps=8", "train.lr=1e-3", "optimizer.weight_decay=100")
    state = saved(folder / "checkpoints" / "step_00000008")
    alphas = state[ALPHA]
    assert alphas.shape == (14,) and alphas.dtype == torch.float32
    assert ((alphas != 1) & ((alphas - 1).abs() < 0.01)).all()
    folded = load_file(folder / "folded" / "model.safetensors")
    assert len({value.dtype for value in folded.values()}) == 1 and ALPHA not in folded
    assert state["model.norm.weight"].max() < 0.7


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed"])
def test_a_learned_alpha_acts_in_fp32(precision):
    model, _, optimizer = made(small("cola", "dlr=learnable_alpha", f"precision={precision}"))
    outputs = [logits(model)]
    with optimizer.taken_out() as values:
        assert values[ALPHA].dtype == torch.float32
        values[ALPHA] += 0.001  # bf16 has nothing between 1 and 1.008
    assert not torch.equal(logits(model), *outputs)


# ----------------------------------------------------------------------------------------------------
# scripts/gradient_paths.py


PROJECTIONS = ("0.self_attn.q_proj", "0.mlp.up_proj", "1.mlp.up_proj")


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
    found = gradient_paths.measure(copy.deepcopy(model), cfg.dlr, None, inputs, PROJECTIONS)
    matrices = {}
    for full, weight in split(model, {name: p.data for name, p in model.named_parameters()}).items():
        if full.endswith(".b.weight"):  # the model multiplies by the sum of both
            residual = r_transposed(*weight.shape).double() / math.ceil(weight.shape[0] / weight.shape[1]) ** 0.5
            matrices[full] = weight.clone(), residual
            weight += residual
    for name in PROJECTIONS:
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
        assert list(found.step) == steps and set(found.projection) == set(PROJECTIONS)
        assert (found.rho / found.isotropic).between(0.3, 3).all()
    assert capsys.readouterr().out.count(" 1.mlp.up_proj ") == 3
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["dlr"]["enabled"] = False
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main_of("gradient_paths", run) == 3 and "Name a run with dlr=on" in capsys.readouterr().err
