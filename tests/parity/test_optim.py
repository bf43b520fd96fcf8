"""Every optimizer: fifty steps against its paper's algorithm in float64, and the behaviour that all share."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from dlr_pretrain.config import Config
from dlr_pretrain.config.tree import OptimizerOptions
from dlr_pretrain.models import build_model
from dlr_pretrain.models.adapter import split
from dlr_pretrain.optim import adamw as fast
from dlr_pretrain.optim.optimizer import MOMENTS, Optimizer, state_bytes
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.update import MATRIX_UPDATE_SECONDS
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import ALPHA
from tests.parity.reference import CPU, VOCAB, small
from tests.trial import random_batch, trial

ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}
GALORE = {"rank": 4, "update_scale": 0.25, "refresh_every": 3}
CHOICES: dict[str, dict] = {name: {} for name in ("adamw", "adamw_foreach", "adamw_8bit", "muon")}
CHOICES |= {"galore": GALORE, "fira": GALORE | {"limiter": 1.01}, "loro": {"exact_every": 4, "restart_warmup": 2}}
GO, SKIP = torch.tensor(0.0), torch.tensor(1.0)
LAYER = "model.layers.0."


@pytest.fixture(autouse=True)
def eager():
    """torchao compiles its step. Eager code has the same formula and saves seconds."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


def config_of(name: str) -> Config:
    backbone = "lowrank" if name == "loro" else "full"
    return small(backbone, f"optimizer={name}", "device=cpu", "compile=false")


def chosen(name: str, **given) -> OptimizerOptions:
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    return replace(config_of(name).optimizer, **ADAM | CHOICES[name] | given)


@pytest.fixture(params=CHOICES)
def choice(request) -> OptimizerOptions:
    return chosen(request.param)


def draw(dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    """Parameters as optimizers see them: views of one storage, column-major tensors, factors, vectors, alphas."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    qk = normal(2, 64, 64)
    drawn = {
        "model.embed_tokens.weight": normal(40, 64),
        f"{LAYER}self_attn.q_proj.weight": qk[0],
        f"{LAYER}self_attn.k_proj.weight": qk[1],
        f"{LAYER}self_attn.o_proj.a.weight": normal(8, 64),
        f"{LAYER}self_attn.o_proj.b.weight": normal(64, 8),
        f"{LAYER}mlp.down_proj.weight": normal(96, 64).T,
        f"{LAYER}mlp.up_proj.a.weight": normal(64, 8).T,
        f"{LAYER}mlp.up_proj.b.weight": normal(96, 8),
        f"{LAYER}input_layernorm.weight": normal(64),
        "lm_head.weight": normal(64, 40).T,
        ALPHA: normal(3, dtype=torch.promote_types(dtype, torch.float32)),  # never in bf16
    }
    return {name: p.detach().requires_grad_() for name, p in drawn.items()}


def give_gradients(optimizer: Optimizer, seed: int, scale: float = 1.0) -> None:
    """In each parameter's own memory layout, as autograd makes them."""
    given = draw(next(iter(optimizer.working.values())).dtype, seed=1000 + seed)
    for name, p in optimizer.working.items():
        p.grad = torch.empty_like(p, requires_grad=False).copy_(scale * given[name].detach())
    optimizer.collect()


def updated(optimizer: Optimizer, seeds: range) -> None:
    for seed in seeds:
        give_gradients(optimizer, seed)
        optimizer.update(0.01, GO.to(optimizer.working["lm_head.weight"].device), index=seed)


def everything(optimizer: Optimizer) -> dict[str, Tensor]:
    return {name: p.detach() for name, (p, *_) in optimizer.targets.items()} | optimizer.state_tensors()


def copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items()}


def assert_same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].stride(), a[name].device) == (b[name].dtype, b[name].stride(), b[name].device)
        assert torch.equal(a[name], b[name]), name


# ----------------------------------------------------------------------------------------------------
# The algorithms for one parameter: (start, gradients, rates, decay) -> its value after all updates


def adamw(w: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Loshchilov and Hutter, 2019."""
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), 1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = (1 - lr * decay) * w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
    return w


def muon(w: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    """Jordan et al., 2024, scaled as in Liu et al., 2025: 0.2 sqrt(max(m, n)) times an orthogonal matrix.

    The Newton-Schulz iteration of fifth order acts on the singular values alone.
    """
    momentum = torch.zeros_like(w)
    for g, lr in zip(gradients, rates, strict=True):
        momentum = 0.95 * momentum + 0.05 * g
        direction = 0.05 * g + 0.95 * momentum
        u, s, vh = torch.linalg.svd(direction / direction.norm(), full_matrices=False)
        for _ in range(5):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        w = (1 - lr * decay) * w - lr * 0.2 * math.sqrt(max(w.shape)) * u @ torch.diag(s) @ vh
    return w


def adam(w: Tensor, gradients: list[Tensor], rates: list[float], decay: float, restart: int = 50) -> Tensor:
    """As in GaLore's code: epsilon before the bias correction, decay after the update. LORO restarts its moments."""
    m = v = 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True)):
        k = t % restart + 1
        if k == 1:
            m = v = 0.0
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w - lr * math.sqrt(1 - 0.99**k) / (1 - 0.9**k) * m / (v.sqrt() + 1e-6)
        w = (1 - lr * decay) * w
    return w


def fira(w: Tensor, gradients: list[Tensor], rates: list[float], decay: float, rest: bool = True) -> Tensor:
    """GaLore (Zhao et al., 2024): Adam on R = G P^T or P^T G.

    Fira (Chen et al., 2024) adds the rest (G - a back(R)), scaled as Adam scales R. Its norm grows by at most 1% per
    update.
    """
    m = v = previous = 0.0
    right = w.shape[0] >= w.shape[1]
    for k, (g, lr) in enumerate(zip(gradients, rates, strict=True)):
        if k % 3 == 0:
            u, _, vh = torch.linalg.svd(g, full_matrices=False)
            p = vh[:4] if right else u[:, :4]

        def back(x: Tensor, p: Tensor = p) -> Tensor:
            return 0.25 * (x @ p if right else p @ x)

        r = g @ p.T if right else p.T @ g
        m, v = 0.9 * m + 0.1 * r, 0.99 * v + 0.01 * r * r
        n = m / (v.sqrt() + 1e-6)
        change = back(n)
        if rest:
            along = 1 if right else 0
            phi = n.norm(dim=along, keepdim=True) / (r.norm(dim=along, keepdim=True) + 1e-8)
            s = (g - back(r)) * phi
            limit = max(s.norm() / (previous + 1e-8), 1.01) / 1.01 if k else 1.0
            s, previous = s / limit, s.norm() / limit
            change = change + s
        w = w - lr * math.sqrt(1 - 0.99 ** (k + 1)) / (1 - 0.9 ** (k + 1)) * change
        w = w - lr * decay * w
    return w


def galore(w: Tensor, gradients: list[Tensor], rates: list[float], decay: float) -> Tensor:
    return fira(w, gradients, rates, decay, rest=False)


def loro(b: Tensor, a: Tensor, gradients: list[Tensor], rates: list[float], decay: float, hidden: int = 64) -> Tensor:
    """The product B A^T (Mo et al., 2025), A [d_in, r], from the gradients of the product.

    Every fourth step is exact: to the nearest matrix of rank r, along the tangent direction that Adam's directions of
    A and B represent.
    """
    r, ma, va, mb, vb = a.shape[1], 0.0, 0.0, 0.0, 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True)):
        k = t % 4 + 1
        if k == 1:
            ma = va = mb = vb = 0.0
        ga, gb = g.T @ b, g @ a
        ma, va, mb, vb = 0.9 * ma + 0.1 * ga, 0.99 * va + 0.01 * ga**2, 0.9 * mb + 0.1 * gb, 0.99 * vb + 0.01 * gb**2
        da, db = ma / (va.sqrt() + 1e-6), mb / (vb.sqrt() + 1e-6)
        eta = lr * math.sqrt(1 - 0.99**k) / (1 - 0.9**k)
        if k == 4:
            a_inverse, b_inverse = torch.linalg.pinv(a), torch.linalg.pinv(b)
            tangent = b_inverse.T @ da.T + (torch.eye(len(b), dtype=b.dtype) - b @ b_inverse) @ db @ a_inverse
            p, d, qh = torch.linalg.svd(b @ a.T - eta * tangent)
            a, b = qh[:r].T * d[:r].sqrt(), p[:, :r] * d[:r].sqrt()
        else:
            a, b = ((1 - decay * eta) * (x - eta * r / hidden * dx) for x, dx in ((a, da), (b, db)))
    return b @ a.T


# ----------------------------------------------------------------------------------------------------
# Fifty steps


OF_MATRICES: dict[str, Callable] = {"adamw": adamw, "adamw_foreach": adamw, "adamw_8bit": adamw}
OF_MATRICES |= {"galore": galore, "fira": fira, "muon": muon}
STEPS = 50
RATES = [0.02 / (1 + t % 8) for t in range(STEPS)]


def fifty(optimizer: Optimizer) -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """Take fifty steps whose sizes vary over orders of magnitude.

    Returns the gradients of each parameter, and of the product of each pair of factors by the name of its B. The
    gradients of factors follow from those of the product at the current factors.
    """
    given = {name: [] for name in optimizer.targets}
    products = {name: [] for name in given if name.endswith(".b.weight")}
    for t in range(STEPS):
        give_gradients(optimizer, t, 10 ** math.sin(t))
        for name, found in products.items():
            b, a = (optimizer.targets[name.replace(".b.", f".{leaf}.")].tensor for leaf in "ba")
            g = torch.randn(len(b), a.shape[1], dtype=b.dtype, generator=torch.Generator().manual_seed(t))
            a.grad.copy_(b.detach().T @ g), b.grad.copy_(g @ a.detach().T)
            found.append(g)
        for name, (p, *_) in optimizer.targets.items():
            given[name].append(p.grad.clone())
        optimizer.update(RATES[t], skip=GO, index=t)
    return given, products


@pytest.mark.parametrize(("name", "rounding"), [
    *((name, None) for name in CHOICES), *((name, 0) for name in ("adamw", "adamw_8bit")),
])  # fmt: skip
def test_fifty_steps_match_the_papers_algorithm(name, rounding):
    """With ``rounding``, by the stochastically rounding update; it does not round these float64 parameters."""
    optimizer = Optimizer(chosen(name), draw(torch.float64), rounding_seed=rounding)
    given, products = fifty(optimizer)
    start = {full: p.detach() for full, p in draw(torch.float64).items()}
    plain = adamw if name.startswith(("adamw", "muon")) else partial(adam, restart=4 if name == "loro" else STEPS)
    for full, (p, *_) in optimizer.targets.items():
        decay, found = 0.0 if full == ALPHA else 0.1, p.detach()
        if name == "loro" and full in products:  # the signs of singular vectors are arbitrary
            a = full.replace(".b.", ".a.")
            expected = loro(start[full], start[a].T, products[full], RATES, decay)
            torch.testing.assert_close(found @ optimizer.targets[a].tensor.detach(), expected, rtol=0, atol=1e-12)
        if name == "loro" and full.replace(".a.", ".b.") in products:
            continue
        matrix = full.startswith("model.layers") and p.dim() == 2
        reference = OF_MATRICES[name] if matrix and name in OF_MATRICES else plain
        expected = reference(start[full], given[full], RATES, decay)
        moved = (expected - start[full]).norm()
        assert moved > 1e-3 * start[full].norm()
        if name == "muon" and matrix:
            assert (found - expected).norm() < 0.01 * moved, full  # torch iterates in bf16 (eps 2^-8)
        elif name == "adamw_8bit" and p.numel() >= 4096:
            assert 1e-3 * moved < (found - expected).norm() < 0.03 * moved, full  # moments of 4096 or more are rounded
        elif name == "adamw_8bit" or rounding is not None:
            assert (found - expected).norm() < 1e-6 * moved, full  # bias corrections are those of an fp32 counter
        else:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13, msg=full)


# ----------------------------------------------------------------------------------------------------
# What all optimizers share


def updates_masks_and_states(
    choice: OptimizerOptions, dtype: torch.dtype, device: str = "cpu", rounding_seed: int | None = None
) -> None:
    """Every parameter changes in place. A masked update, even the first, changes nothing.

    Between any two updates the state moves through tensors into a new optimizer, bit for bit. It takes the planned
    bytes.
    """
    built = partial(Optimizer, choice, rounding_seed=rounding_seed)
    one, two = built(draw(dtype, device=device)), built(draw(dtype, device=device))
    places = {name: (p.detach().clone(), p.data_ptr(), p.stride(), p.dtype) for name, (p, *_) in two.targets.items()}
    for seed in range(6):
        for skipped in (False, True) if seed else (True, False):
            before = copied(everything(two))
            if skipped:
                for p, *_ in two.targets.values():
                    p.grad = torch.full_like(p, math.nan)
                two.update(0.1, skip=SKIP.to(device), index=seed)
                if seed:
                    assert_same_bits(everything(two), before)
            else:
                updated(two, range(seed, seed + 1))
        updated(one, range(seed, seed + 1))
        tensors = {name: value.cpu().clone().contiguous() for name, value in two.state_tensors().items()}
        two = built(two.working)
        two.load_state_tensors(tensors)
        for value in tensors.values():  # nothing is shared with what was loaded
            value.zero_()
        assert_same_bits(everything(one), everything(two))
        for name, (p, *_) in two.targets.items():
            value, *place = places[name]
            assert [p.data_ptr(), p.stride(), p.dtype] == place and p.isfinite().all(), name
            # LORO's fourth step is exact: other factors of the same product
            assert seed != 2 or 1e-4 < (p.detach() - value).double().square().mean().sqrt() < 0.2, name
    measured = sum(value.numel() * value.element_size() for value in two.state_tensors().values())
    assert measured == state_bytes(choice, {name: p for name, (p, *_) in two.targets.items()})


@pytest.mark.parametrize(("name", "dtype", "rounding_seed"), [
    *((name, dtype, None) for name in CHOICES for dtype in (torch.bfloat16, torch.float32)),
    *((name, torch.bfloat16, 5) for name in ("adamw", "adamw_8bit")),
])  # fmt: skip
def test_updates_masks_and_states(name, dtype, rounding_seed):
    updates_masks_and_states(chosen(name), dtype, rounding_seed=rounding_seed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_factor_acts_like_scaled_gradients(choice, dtype):
    """The factor is a power of two, which rounds no value."""
    ways = []
    for factor in (torch.tensor(0.125), None):
        optimizer = Optimizer(choice, draw(dtype))
        for seed in range(2):
            give_gradients(optimizer, seed, 1.0 if factor is not None else 0.125)
            optimizer.update(0.01, GO, factor, index=seed)
        ways.append(copied(everything(optimizer)))
    assert_same_bits(*ways)


@pytest.mark.parametrize("rounding_seed", [None, 0])
def test_a_factor_is_not_rounded_to_the_gradients_dtype(rounding_seed):
    """Moments are a tenth of the gradient times the factor; 1.0039 is 1 in bf16."""
    p = torch.zeros(4096, dtype=torch.bfloat16, requires_grad=True)
    optimizer = Optimizer(chosen("adamw"), {"w": p}, rounding_seed=rounding_seed)
    p.grad = torch.linspace(0.5, 1, 4096).to(p.dtype)
    expected = (p.grad.float() * 1.0039 * 0.1).to(p.dtype)
    optimizer.collect()
    optimizer.update(0.01, GO, torch.tensor(1.0039), index=0)
    assert (optimizer.state_tensors()["w/exp_avg"] != expected).float().mean() < 0.01


def test_state_of_another_model_is_refused(choice):
    optimizer = Optimizer(choice, draw())
    with pytest.raises(UserError, match=r"optimizer state of model\.layers\.7\.other\.weight"):
        optimizer.load_state_tensors({"model.layers.7.other.weight/exp_avg": torch.zeros(3)})


def test_a_parameter_without_a_gradient_does_not_change(choice):
    idle = [f"{LAYER}self_attn.k_proj.weight", f"{LAYER}input_layernorm.weight"]
    optimizer = Optimizer(choice, draw())
    for seed in range(4):
        give_gradients(optimizer, seed)
        for name in idle:
            optimizer.targets[name].tensor.grad = None
        optimizer.update(0.01, skip=GO, index=seed)
    for name in idle:
        assert torch.equal(optimizer.targets[name].tensor.detach(), draw()[name].detach())
        assert not any(full.startswith(f"{name}/") for full in optimizer.state_tensors())


def values(optimizer: Optimizer) -> dict[str, Tensor]:
    """The state as numbers; quantised entries without the scales of their blocks."""
    tensors, found = optimizer.state_tensors(), {}
    for full, value in tensors.items():
        if full.endswith(".codes"):
            found[full.removesuffix(".codes")] = tensors[full.replace(".codes", ".map")][value.int()]
        elif not full.endswith((".scale", ".map")):
            found[full] = value.clone()
    return found


def test_pruning_keeps_a_seeded_random_share(choice):
    names = [f"{LAYER}self_attn.q_proj.weight", f"{LAYER}mlp.up_proj.b.weight"]

    def pruned(seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        optimizer = Optimizer(choice, draw())
        updated(optimizer, range(3))
        before = values(optimizer)
        optimizer.prune(names, keep=0.25, seed=seed)
        return before, values(optimizer)

    before, after = pruned(seed=1)
    again, other = pruned(seed=1)[1], pruned(seed=2)[1]
    moments = [full for full in before if full.rsplit("/", 1)[0] in names and full.rsplit("/", 1)[1] in MOMENTS]
    assert len(moments) == (2 if choice.name == "muon" else 4)
    assert all(torch.equal(again[full], value) for full, value in after.items())
    assert all(torch.equal(after[full], value) for full, value in before.items() if full not in moments)
    for full in moments:
        kept, zero = (after[full] == before[full]) & (before[full] != 0), before[full] == 0  # some 8-bit values are 0
        assert torch.equal(after[full] == 0, ~kept) and not torch.equal(after[full], other[full])
        share = kept.float().mean() / (~zero).float().mean()
        assert share == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / zero.numel()))


@pytest.mark.parametrize("name", ["adamw", "galore", "fira", "loro", "muon"])
def test_a_fused_parameter_is_updated_matrix_by_matrix(name):
    """Bit for bit as separate parameters; padding stays zero."""
    choice, fused = chosen(name), build_model(config_of(name), VOCAB, CPU)
    generator = torch.Generator().manual_seed(1)
    of_split = partial(split, fused)
    own = {name: p.detach().clone().requires_grad_() for name, p in of_split(dict(fused.named_parameters())).items()}
    one, other = Optimizer(choice, dict(fused.named_parameters()), split=of_split), Optimizer(choice, own)
    for index in range(4):
        for p in fused.parameters():
            p.grad = torch.zeros_like(p)
        for name, gradient in of_split({name: p.grad for name, p in fused.named_parameters()}).items():
            own[name].grad = gradient.normal_(generator=generator).clone()
        for optimizer in (one, other):
            optimizer.collect()
            optimizer.update(0.01, GO, index=index)
    found = of_split(dict(fused.named_parameters()))
    assert all(torch.equal(found[name], p) for name, p in own.items())
    assert fused.model.layers[0].mlp.gate_up.spec.pad_out > 91
    assert sum(p.count_nonzero() for p in fused.parameters()) == sum(p.count_nonzero() for p in own.values())


@pytest.mark.parametrize("name", ["adamw", "galore", "loro", "muon"])
def test_matrix_updates_get_a_longer_timeout(name):
    """A refresh of all projections may take longer than the heartbeat's usual limit."""
    cfg, waits = config_of(name), []
    with Ranks(cfg) as ranks:
        ranks.heartbeat.may_wait = lambda seconds: waits.append(seconds) or nullcontext()
        trial(cfg, ranks, VOCAB)(random_batch(cfg, ranks, VOCAB), 0, 0.01)
    assert waits == ([] if name == "adamw" else [MATRIX_UPDATE_SECONDS])


# ----------------------------------------------------------------------------------------------------
# Parts of single optimizers


@pytest.mark.parametrize(("first", "left_out"), [(0, 3), (5, None), (9, 10)])
def test_loros_exact_steps_follow_the_runs_index(first, left_out):
    """An exact step resets all state, also after a skipped update and for new state in the middle of a run."""
    optimizer, anew = Optimizer(chosen("loro", exact_every=8), draw()), []
    for t in range(first, 25):
        give_gradients(optimizer, t)
        optimizer.update(0.01, skip=torch.tensor(float(t == left_out)), index=t)
        anew += [t] if not any(value.any() for value in optimizer.state_tensors().values()) else []
    assert anew == [t for t in (7, 15, 23) if t >= first]


@pytest.mark.full
def test_the_compiled_8_bit_step_equals_eager():
    results = []
    for stance in ("default", "force_eager"):
        with torch.compiler.set_stance(stance):
            optimizer = Optimizer(chosen("adamw_8bit"), draw(torch.bfloat16), compiled=stance == "default")
            places = [(p.data_ptr(), p.stride()) for p, *_ in optimizer.targets.values()]
            updated(optimizer, range(5))
            assert [(p.data_ptr(), p.stride()) for p, *_ in optimizer.targets.values()] == places
            results.append(torch.cat([p.detach().float().flatten() for p, *_ in optimizer.targets.values()]))
    assert (results[0] != results[1]).float().mean() < 0.01
    torch.testing.assert_close(*results, rtol=0.01, atol=1e-4)


def test_weight_decay_acts_only_if_an_update_rounds_once():
    """Pure bf16 AdamW on kernels that round after each operation, as in the papers of this family, has no decay.

    In exact arithmetic, decay leaves (1 - lr decay)^200 = 0.82 of the start.
    """
    start, *gradients = torch.randn(201, 4096, generator=torch.Generator().manual_seed(1)).bfloat16()

    def end(name: str, decay: float) -> Tensor:
        p = (0.02 * start).requires_grad_()
        optimizer = Optimizer(chosen(name, weight_decay=decay), {"p": p})
        for k, gradient in enumerate(gradients):
            p.grad = gradient
            optimizer.collect()
            optimizer.update(0.01, skip=GO, index=k)
        return p.detach().float()

    def left(name: str) -> float:
        first = (0.02 * start).float()
        return 1 + ((end(name, 0.1) - end(name, 0.0)) @ first / (first @ first)).item()

    assert left("adamw_foreach") == 1.0
    assert left("adamw") == pytest.approx(0.82, abs=0.06)


# ----------------------------------------------------------------------------------------------------
# precision=bf16_sr: unbiased rounding by bits that depend on (seed, name, step, entry) alone; AdamW with it


BETA2 = {"beta2": 0.999}
COUNT = 1 << 16


def random_words(count: int, step: int, seed: int = 0, name: str = "w") -> Tensor:
    keys = fast.keys(seed, name, 0, CPU)
    return fast.random_words(torch.Size([count]), keys, torch.tensor(float(step)))


def test_stochastic_rounding_is_exactly_unbiased():
    """With each of the 65,536 possible bit patterns once, the mean is exactly the value."""
    bits = torch.arange(COUNT)
    values = [1.0, -1.0, 1.00390624, 0.3, -0.7071, 1e-30, 3e38, -1e-39, 5e-324, 0.0]
    for value in torch.tensor(values, dtype=torch.float64).float().tolist():
        found = fast.rounded(torch.full((COUNT,), value), bits)
        assert found.dtype == torch.bfloat16 and len(found.unique()) <= 2
        assert found.double().mean().item() == value, value
        assert value not in torch.tensor([value]).bfloat16().double().tolist() or (found == value).all()


def test_infinities_and_nan_are_preserved():
    patterns = torch.tensor([0x7F800000, -0x800000, 0x7FC00000, 0x7FFFFFFF, -1], dtype=torch.int32)
    for bits in (0, 1, 0xFFFF):
        found = fast.rounded(patterns.view(torch.float32), torch.tensor(bits))
        assert found[:2].tolist() == [math.inf, -math.inf] and found[2:].isnan().all()


@pytest.mark.parametrize("shift", [0, 16])
def test_bits_are_uniform_and_independent(shift):
    """Chi-square of 256 classes, and of the 256 pairs of classes of 16: within five standard deviations."""
    one = random_words(COUNT, step=7)
    others = [
        one.roll(1),
        random_words(COUNT, step=8),
        random_words(COUNT, 7, name="v"),
        random_words(COUNT, 7, seed=1),
    ]
    others.append(
        random_words(COUNT, step=7) << 16 if shift else random_words(COUNT, step=7) >> 16
    )  # the other half of the word

    def top(word: Tensor, bits: int) -> Tensor:
        return (word >> shift & 0xFFFF) >> (16 - bits)

    for classes in (top(one, 8), *(16 * top(one, 4) + top(other, 4) for other in others)):
        counted = torch.bincount(classes, minlength=256).double()
        expected = COUNT / 256
        chi_square = ((counted - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


def optimizer_of(p: Tensor, seed: int | None = 0, **options) -> Optimizer:
    return Optimizer(chosen("adamw", **BETA2 | options), {"w": p}, rounding_seed=seed)


@pytest.mark.parametrize(("start", "gradient", "lr", "decay", "end"), [
    (0.02, 0.0, 0.002, 0.1, 0.02 * (1 - 0.0002) ** 100),  # exp(-0.02) of a weight is left
    (1.0, 1.0, 1e-4, 0.0, 1 - 100 * 1e-4),
])  # fmt: skip
def test_changes_below_half_a_unit_have_an_effect(start, gradient, lr, decay, end):
    """The mean after 100 updates. Rounded to the nearest, they change nothing."""

    def mean(seed: int | None) -> float:
        p = torch.full((4096,), start).bfloat16().requires_grad_()
        optimizer = optimizer_of(p, seed, weight_decay=decay)
        for k in range(100):
            p.grad = torch.full_like(p, gradient)
            optimizer.collect()
            optimizer.update(lr, skip=GO, index=k)
        return p.detach().double().mean().item() / torch.tensor(start).bfloat16().item() * start

    assert mean(None) == start
    assert mean(0) - start == pytest.approx(end - start, rel=0.05)


def test_second_moments_shrink_on_average():
    """By 0.999 per update, which bf16 rounds to 1. A first moment of 1 is 0.8984375 after one update."""

    def moments(seed: int | None, updates: int) -> tuple[Tensor, Tensor]:
        p = torch.zeros(4096, dtype=torch.bfloat16).requires_grad_()
        optimizer = optimizer_of(p, seed)
        ones = torch.ones_like(p, requires_grad=False)
        optimizer.load_state_tensors({"w/exp_avg": ones, "w/exp_avg_sq": ones, "w/step": torch.tensor(1.0)})
        for k in range(updates):
            p.grad = torch.zeros_like(p)
            optimizer.collect()
            optimizer.update(1e-4, skip=GO, index=k)
        state = optimizer.state_tensors()
        return state["w/exp_avg"], state["w/exp_avg_sq"]

    assert (moments(None, 100)[1] == 1).all()
    assert moments(0, 100)[1].double().mean().item() == pytest.approx(0.999**100, rel=0.005)
    assert (moments(0, 1)[0] == 0.8984375).all()


@pytest.mark.parametrize(("name", "rows"), [("adamw", [291, 291, 58]), ("adamw_8bit", [256, 256, 128])])
def test_updating_in_pieces_changes_no_bit(name, rows, monkeypatch):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")

    def trained() -> list[Tensor]:
        p = torch.randn(640, 24, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        optimizer = Optimizer(chosen(name, **BETA2), {"w": p}, rounding_seed=5)
        for k in range(3):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(k)).bfloat16()
            optimizer.collect()
            optimizer.update(1e-3, skip=GO, index=k)
        return [p.detach(), *optimizer.state_tensors().values()]

    whole, calls, advance = trained(), [], fast._advance
    monkeypatch.setattr(fast, "MAX_PIECE", 7000)
    monkeypatch.setattr(fast, "_advance", lambda *given: (calls.append(len(given[0])), advance(*given)))
    assert all(torch.equal(a, b) for a, b in zip(whole, trained(), strict=True))
    assert calls == rows * 3
