"""How every backbone starts: initial values, channels and supports; exact parameter counts; ReLoRA's merges."""

import math

import pytest
import torch
from torch import Tensor

from dlr_pretrain.cli import load
from dlr_pretrain.config.tree import CONFIG_DIR
from dlr_pretrain.deploy.export import exported_keys
from dlr_pretrain.models import build_model
from dlr_pretrain.models.adapter import split, unpadded_sizes
from dlr_pretrain.models.layer import SeededInit, named_layers
from dlr_pretrain.models.lowrank import LowRank, leading
from dlr_pretrain.util.errors import UserError
from tests.deploy.models import KINDS
from tests.parity import test_models
from tests.parity.reference import CPU, FORMULAS, PROJECTIONS, VOCAB, State, disturbed, small, weights

full = pytest.mark.full
LOST = ("lost", "backbone.rank=8", "backbone.sparsity=0.2")


def projections(state: State) -> dict[str, State]:
    """The tensors of each projection, by their leaves."""
    found: dict[str, State] = {}
    for name, tensor in state.items():
        for projection in PROJECTIONS:
            path, middle, leaf = name.partition(f".{projection}.")
            if middle:
                found.setdefault(f"{path}.{projection}", {})[leaf] = tensor
    return found


def at_60m(*words: str) -> State:
    return weights(build_model(load(["scale=60m", "data=sample", "scale.num_layers=2", *words]), 1000, CPU))


def assert_normal(weight: Tensor, std: float) -> None:
    assert weight.std().item() == pytest.approx(std, rel=0.02) and abs(weight.mean().item()) < 0.02 * std
    assert weight.abs().max() > 3.5 * std


def assert_uniform(weight: Tensor, bound: float, rel: float = 0.02) -> None:
    assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=rel)
    assert (1 - rel) * bound < weight.abs().max().item() <= bound


def test_every_backbone_has_its_formula():
    assert {path.stem for path in (CONFIG_DIR / "backbone").glob("*.yaml")} == FORMULAS.keys()
    assert {variant.split()[0] for variant in (*test_models.OTHERS, *test_models.CARRYING)} == FORMULAS.keys()
    exported = {name for name in FORMULAS if exported_keys(small(name)) is not None}
    assert {kind.split("-")[0] for kind in KINDS} == exported | {"full"}


@pytest.mark.parametrize("values", [
    lambda drawn: {"a.weight": drawn["a.weight"]},
    lambda drawn: drawn | {"b.weight": drawn["b.weight"][:1]},
], ids=["one is missing", "one row for all"])  # fmt: skip
def test_initial_values_that_do_not_fit_are_refused(monkeypatch, values):
    drawn = LowRank.initial
    monkeypatch.setattr(LowRank, "initial", lambda *of: values(drawn(*of)))
    with pytest.raises(UserError, match=r"cola: .* declares \{'a.weight': .* gives \{'a.weight': .* method initial$"):
        build_model(small("cola"), VOCAB, CPU)


@pytest.mark.parametrize("backbone", FORMULAS)
def test_initial_values_do_not_depend_on_padding(backbone):
    a, b = (build_model(small(backbone), VOCAB, CPU, alignment=alignment) for alignment in (8, 1))
    for (name, x), (same, y) in zip(weights(a).items(), weights(b).items(), strict=True):
        assert name == same and torch.equal(x, y), name


@pytest.mark.parametrize("backbone", ["cola", *(pytest.param(b, marks=full) for b in ("lowrank", "lax", "cola_lax"))])
@pytest.mark.parametrize("init", ["cola", "xavier", "kaiming"])
def test_factors_start_as_in_their_papers(backbone, init):
    """CoLA: Var[(B A)_ij] = 1 / (d_in + d_out). LORO: variance 2 / (fan_in + fan_out). Glentis et al.: uniform."""
    state = at_60m(f"backbone={backbone}", f"backbone.init={init}")
    for name, d_out in (("self_attn.q_proj", 512), ("mlp.gate_proj", 1376)):
        for factor in "ab":
            weight = state[f"model.layers.0.{name}.{factor}.weight"]
            if init == "cola":
                assert_normal(weight, 128**-0.25 * (512 + d_out) ** -0.25)
            elif init == "xavier":
                assert_normal(weight, math.sqrt(2 / sum(weight.shape)))
            else:
                assert_uniform(weight, 1 / math.sqrt(weight.shape[1]))
    assert_normal(state["lm_head.weight"], 0.02)


# ----------------------------------------------------------------------------------------------------
# LOST: everything from one dense weight W


@pytest.mark.parametrize("looks_at", [256, 5])
def test_lost_starts_from_the_svd_of_a_dense_weight(looks_at):
    """B A is the best approximation, with B^T B = A A^T. The channels are the largest columns of the remainder."""
    words = (f"backbone.residual_rank={looks_at}", "seed=0")
    for name, own in projections(weights(build_model(small(*LOST, *words), VOCAB, CPU, torch.float64))).items():
        a, b = own["a.weight"], own["b.weight"]
        dense = SeededInit(0).normal(f"{name}.weight", (b.shape[0], a.shape[1]), 0.02).double()
        u, s, vh = torch.linalg.svd(dense, full_matrices=False)
        of = slice(8, min(8 + looks_at, 32))
        left = (u[:, of] * s[of]) @ vh[of]
        count = max(1, int(0.2 * dense.shape[1]))
        expected = sorted(sorted(range(dense.shape[1]), key=lambda i: -left[:, i].norm().item())[:count])
        assert own["channels"].tolist() == expected and torch.equal(own["s.weight"], dense[:, expected])
        torch.testing.assert_close(b @ a, u[:, :8] * s[:8] @ vh[:8], rtol=0, atol=1e-12)
        torch.testing.assert_close(b.T @ b, torch.diag(s[:8]), rtol=0, atol=1e-12)
        torch.testing.assert_close(a @ a.T, torch.diag(s[:8]), rtol=0, atol=1e-12)


def test_signs_of_singular_vectors_are_fixed():
    w = torch.randn(9, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for matrix in (w, w.T):
        u, s, vh = leading(matrix, 9)
        torch.testing.assert_close(u * s @ vh, matrix, rtol=0, atol=1e-12)
        shorter = u if len(u) == 9 else vh.T
        assert (shorter.gather(0, shorter.abs().argmax(0, keepdim=True)) > 0).all()


def test_random_supports_depend_on_seed_and_name():
    """Sorted and distinct positions among all entries (SLTrain)."""
    found, middles = [], []
    for seed in (0, 1):
        model = build_model(small("sltrain", "backbone.sparsity=0.05", f"seed={seed}"), VOCAB, CPU)
        for own in projections(weights(model)).values():
            places, chosen = len(own["b.weight"]) * own["a.weight"].shape[1], own["index"]
            assert len(chosen) == int(0.05 * places) and (chosen.diff() > 0).all()
            assert chosen[0] >= 0 and chosen[-1] < places
            found.append(tuple(chosen.tolist()))
            middles.append(chosen.double().mean().item() / places)
    assert len(set(found)) == 2 * 14
    assert sum(middles) / len(middles) == pytest.approx(0.5, rel=0.1)


# ----------------------------------------------------------------------------------------------------
# LaX, SLTrain, LoRA and ReLoRA


def test_gates_start_as_in_the_authors_code():
    tensor, dense = (at_60m("backbone=lax", f"backbone.gate={gate}") for gate in ("tensor", "dense"))
    for leaf, n in (("e1", 16), ("e2", 8)):  # 128 = 8 x 16; twice the variance: n times 2 / n
        values = [value for name, value in tensor.items() if name.endswith(f".gate.{leaf}")]
        assert len(values) == 7 and {value.shape for value in values} == {(n, n)}
        assert_uniform(torch.stack(values), (6 / n) ** 0.5, rel=0.05)
    norm = "model.layers.1.mlp.up_proj.norm"
    assert (tensor[f"{norm}.weight"] == 1).all() and (tensor[f"{norm}.bias"] == 0).all()
    gate = "model.layers.1.self_attn.q_proj.gate"
    assert_uniform(dense[f"{gate}.weight"], 128**-0.5)
    assert_uniform(dense[f"{gate}.bias"], 128**-0.5, rel=0.15)


@pytest.mark.parametrize("backbone", ["lora", "relora", "sltrain"])
def test_b_starts_at_zero_and_a_uniform(backbone):
    own = projections(at_60m(f"backbone={backbone}"))["model.layers.0.mlp.down_proj"]
    assert own["b.weight"].count_nonzero() == 0
    assert_uniform(own["a.weight"], 1376**-0.5)
    if backbone == "sltrain":
        assert_uniform(own["values"], 1376**-0.5)
    else:
        assert_normal(own["weight"], 0.02)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_relora_merges_the_product_and_redraws_a(dtype):
    """W0 becomes W0 + alpha / r B A. The new A depends on the seed, the name and the number of the merge alone."""
    model = disturbed(small("relora", "backbone.alpha=12"), dtype).requires_grad_(False)
    fused = dict(model.named_parameters())
    state = split(model, fused)
    drawn = [p.clone() for name, p in state.items() if name.endswith(".a.weight")]
    eps, exact = torch.finfo(dtype).eps, {}
    for number in (1, 2, 1):
        for name in (n for n in state if n.endswith("_proj.weight")):
            w, b, a = (state[name.replace("weight", leaf)].double() for leaf in ("weight", "b.weight", "a.weight"))
            exact[name] = w + 12 / 8 * (b @ a)
        for path, layer in named_layers(model):
            assert layer.merge_(fused, SeededInit(7), path, number) == [f"{path}.a", f"{path}.b"]
        for name, wanted in exact.items():
            # half a spacing, plus the order of a sum of eight where products are not exact
            slack = 0 if dtype == torch.bfloat16 else 4 * eps * wanted.abs().max()
            assert ((state[name].double() - wanted).abs() <= 0.502 * eps * wanted.abs() + slack).all(), name
            assert state[name.replace("weight", "b.weight")].count_nonzero() == 0
        drawn += [p.clone() for name, p in state.items() if name.endswith(".a.weight")]
        assert_uniform(state["model.layers.1.mlp.down_proj.a.weight"], 91**-0.5, rel=0.1)
    start, first, second, again = (drawn[i : i + 14] for i in range(0, 56, 14))
    assert all(map(torch.equal, first, again))
    assert len({tuple(p.flatten()[:8].tolist()) for p in start + first + second}) == 3 * 14


# ----------------------------------------------------------------------------------------------------
# Closed forms: 2 V d + 2 L d + d, and per block 4 d^2 + 3 d f (full) or r (8 d + 3 (d + f)) (low-rank) with entries of
# S (sltrain), k (4 d + 2 f) + int(0.01 f) d (lost, at the rank that keeps the budget), or from the second block on
# 7 (gate + 2 r) (lax; a dense gate has r^2 + r, at 60m and for cola_lax up to 350m, and a tensor gate n1^2 + n2^2).
# In millions they print as the paper's Table 1: 58 / 134 / 368 / 1339, 43 / 94 / 185 / 609, 44 / 94 / 185 / 610.

SCALES = ("60m", "130m", "350m", "1b", "7b")
LOWRANK = (42_770_944, 93_997_824, 185_222_144, 609_310_720, 2_820_935_680)
COUNTS = {
    "full": (58_073_600, 134_105_856, 367_969_280, 1_339_082_752, 6_738_415_616),
    "lowrank": LOWRANK,
    "cola": LOWRANK,
    "lora": LOWRANK,  # trained parameters
    "lost": (42_703_872, 93_908_736, 184_910_720, 608_999_416, 2_819_543_040),
    "sltrain": (43_529_832, 96_545_796, 194_293_544, 645_547_960, 3_144_735_808),
    "lax": (43_592_576, 94_076_672, 185_387_008, 609_681_664, 2_821_824_512),
    "cola_lax": (43_592_576, 99_103_232, 195_897_088, 609_681_664, 2_821_824_512),
}
OTHERS = {"sltrain backbone.sparsity=0.1": 730_101_664, "lost backbone.rank=512": 621_139_648}  # at 1b


@pytest.mark.parametrize("scales", [("60m",), pytest.param(("130m", "350m", "1b", "7b"), marks=full)])
@pytest.mark.parametrize("backbone", COUNTS)
def test_parameter_counts_are_exact(backbone, scales):
    def parameters(scale: str, words: str) -> int:
        cfg = load([f"scale={scale}", *f"backbone={words}".split(), "data=sample"])
        model = build_model(cfg, cfg.scale.vocab_size, torch.device("meta"))
        counts = unpadded_sizes(model)
        return sum(counts[name] for name, p in model.named_parameters() if p.requires_grad)

    expected = dict(zip(SCALES, COUNTS[backbone], strict=True))
    assert {scale: parameters(scale, backbone) for scale in scales} == {scale: expected[scale] for scale in scales}
    others = {words: count for words, count in OTHERS.items() if words.split()[0] == backbone and "1b" in scales}
    assert {words: parameters("1b", words) for words in others} == others
