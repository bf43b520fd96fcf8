"""dlr-geometry: each measure by its definition in float64, and where its value is known by hand; then runs."""

import math
import shutil

import numpy as np
import pandas as pd
import pytest
import torch

from dlr_pretrain.analysis.runs import read_runs
from dlr_pretrain.models import build_model
from dlr_pretrain.models.adapter import split
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.errors import UserError
from scripts import _scaling as scaling
from scripts.geometry import activations, landscape, page, spectra, study
from scripts.geometry.__main__ import main
from scripts.geometry.weights import Trained, inner, misfit, places
from tests.conftest import main_of, saved
from tests.fake_runs import COLA, COLA_DLR, a_run
from tests.parity.reference import CPU, VOCAB, r_transposed, small

Q = "model.layers.{}.self_attn.q_proj.weight"


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ----------------------------------------------------------------------------------------------------
# Spectra


def test_ranks_of_given_singular_values_are_known():
    found = spectra.measures(torch.tensor([3.0, 4.0]), first=1)
    assert found["norm"] == 5 and found["stable_rank"] == 25 / 16 and found["energy"] == 16 / 25
    entropy = -(3 / 7) * math.log(3 / 7) - (4 / 7) * math.log(4 / 7)
    assert found["effective_rank"] == pytest.approx(math.exp(entropy), rel=1e-12)
    even = spectra.measures(torch.ones(5), first=2)
    expected = {"norm": math.sqrt(5), "stable_rank": 5, "effective_rank": 5, "energy": 0.4}
    assert even == pytest.approx(expected, rel=1e-12)
    one = spectra.measures(torch.tensor([0.0, 2.0, 0.0]), first=1)
    assert one["effective_rank"] == one["stable_rank"] == one["energy"] == 1


def test_ranks_are_those_of_the_matrix_in_float64():
    matrix = drawn(7, 12)
    found = spectra.measures(torch.linalg.svdvals(matrix.float()), first=3)
    values = np.sqrt(np.linalg.eigvalsh((matrix @ matrix.T).numpy())[::-1])
    p = values / values.sum()
    assert found["norm"] == pytest.approx(np.linalg.norm(matrix.numpy()), rel=1e-6)
    assert found["stable_rank"] == pytest.approx((values**2).sum() / values[0] ** 2, rel=1e-6)
    assert found["effective_rank"] == pytest.approx(math.exp(-(p * np.log(p)).sum()), rel=1e-6)
    assert found["energy"] == pytest.approx((values[:3] ** 2).sum() / (values**2).sum(), rel=1e-6)


# ----------------------------------------------------------------------------------------------------
# Landscape


class Quadratic:
    """The loss x^T H x / 2 of one matrix, row by row of its entries."""

    def __init__(self, hessian: torch.Tensor):
        self.hessian = hessian

    def __call__(self, point):
        x = point[Q.format(0)].flatten()
        return (x @ self.hessian @ x / 2).item()

    def product(self, point, direction):
        return {name: (self.hessian @ tensor.flatten()).view_as(tensor) for name, tensor in direction.items()}


def test_curvatures_of_a_quadratic_are_exact():
    surface = Quadratic(torch.diag(torch.tensor([1.0, -2.0, 8.0, 0.5], dtype=torch.float64)))
    point = {Q.format(0): drawn(2, 2), "model.norm.weight": drawn(3)}
    value, direction = landscape.sharpest(surface, point, most=200, tolerance=1e-12)
    assert value == pytest.approx(8) and direction[Q.format(0)].abs().flatten()[2] == pytest.approx(1)
    fit, exact = landscape.curvature(surface, point, direction)
    assert fit == pytest.approx(8, rel=1e-6) and exact == pytest.approx(8)
    surface.hessian *= -1
    assert landscape.sharpest(surface, point, most=200, tolerance=1e-12)[0] == pytest.approx(-8)


@pytest.fixture(scope="module", params=["full", "cola", "lax"])
def surface(request):
    """A small model with visible weights, in float64, on a few tokens in two parts."""
    model = build_model(small(request.param, "dlr=off"), VOCAB, CPU).double().requires_grad_(False)
    for p in model.parameters():
        p.mul_(1.5)
    ids, targets = torch.randint(0, VOCAB, (2, 3, 12), generator=torch.Generator().manual_seed(0))
    targets[:, 9:] = -100
    point = {name: tensor.clone() for name, tensor in split(model, model.state_dict()).items()}
    return landscape.Surface(model, [(ids[:2], targets[:2]), (ids[2:], targets[2:])]), point


def test_the_loss_is_that_of_the_model(surface):
    loss, point = surface
    losses = [loss.model(*part).item() for part in loss.inputs]
    assert loss(point) == pytest.approx(sum(losses) / 27, rel=1e-9)


def test_the_fit_and_the_hessian_agree(surface):
    loss, point = surface
    value, direction = landscape.sharpest(loss, point, most=30, tolerance=1e-6)
    fit, exact = landscape.curvature(loss, point, direction, rise=1e-5)
    assert exact == pytest.approx(value, rel=1e-3) and fit == pytest.approx(exact, rel=1e-3)
    for seed in (1, 2):
        direction = landscape.random_direction(point, seed)
        fit, exact = landscape.curvature(loss, point, direction, rise=1e-5)
        assert fit == pytest.approx(exact, rel=1e-3)


def test_the_hessian_is_symmetric_and_no_larger_than_its_sharpest(surface):
    loss, point = surface
    one, other = (landscape.random_direction(point, seed) for seed in (1, 2))
    images = [loss.product(point, direction) for direction in (one, other)]
    assert inner(other, images[0]) == pytest.approx(inner(one, images[1]), rel=1e-9)
    value, _ = landscape.sharpest(loss, point)
    assert abs(inner(one, images[0])) / inner(one, one) <= abs(value) * 1.001


def test_a_random_direction_has_the_norms_of_the_rows(surface):
    _, point = surface
    direction = landscape.random_direction(point, 3)
    assert direction.keys() == places(point).keys() and "lm_head.weight" not in direction
    for name, tensor in direction.items():
        torch.testing.assert_close(tensor.norm(dim=1), point[name].norm(dim=1))
    again, other = (landscape.random_direction(point, seed) for seed in (3, 4))
    assert inner(direction, again) == pytest.approx(inner(direction, direction)) != inner(direction, other)


def test_principal_directions_of_a_known_trajectory():
    end = {Q.format(0): drawn(3, 3)}
    x, y = (torch.zeros(3, 3, dtype=torch.float64) for _ in range(2))
    x[0, 0] = y[1, 1] = 1
    points = [{Q.format(0): end[Q.format(0)] + a * x + b * y} for a, b in ((3, 0), (0, 1), (0, 0))]
    (first, share), (second, rest) = landscape.principal_directions(points, 5)
    length = end[Q.format(0)].norm()
    torch.testing.assert_close(first[Q.format(0)].abs(), x * length)
    torch.testing.assert_close(second[Q.format(0)].abs(), y * length)
    assert (share, rest) == (pytest.approx(0.9), pytest.approx(0.1))


def test_a_barrier_is_above_the_line_between_the_ends():
    def hill(point):  # 1 - x^2 + 2 x, with x from -1 to 1: the line is 2 x
        x = point[Q.format(0)].item()
        return 1 - x * x + 2 * x

    one, other = ({Q.format(0): torch.tensor([[x]], dtype=torch.float64)} for x in (-1.0, 1.0))
    losses, barrier = landscape.path(hill, one, other, np.linspace(0, 1, 5))
    assert barrier == pytest.approx(1) and losses[0] == -2 and losses[-1] == 2
    assert landscape.path(lambda point: point[Q.format(0)].item() ** 2, one, other, [0, 0.5, 1])[1] == pytest.approx(0)


def test_points_that_do_not_fit_are_refused_with_the_reason():
    one = {Q.format(0): drawn(2, 3), "channels": torch.tensor([1])}
    assert misfit(one, dict(one)) == ""
    assert "is [2, 3] in one and [3, 2] in the other" in misfit(one, one | {Q.format(0): drawn(3, 2)})
    assert misfit(one, one | {"channels": torch.tensor([2])}) == "channels selects other inputs in each"
    assert "such as lm_head" in misfit(one, one | {"lm_head": drawn(1)})


# ----------------------------------------------------------------------------------------------------
# Activations


def test_hsic_is_its_definition_with_whole_kernels():
    x, y = drawn(9, 4), drawn(9, 3, seed=1)
    k, l = (side @ side.T - torch.diag((side**2).sum(1)) for side in (x, y))
    n, one = 9, torch.ones(9, dtype=torch.float64)
    expected = (k @ l).trace() + (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    expected = (expected - 2 * (one @ k @ l @ one) / (n - 2)) / (n * (n - 3))
    torch.testing.assert_close(activations.hsic(x, y), expected)


def test_cka_of_a_rotation_is_one_and_of_noise_is_zero():
    x = drawn(200, 30)
    rotation, _ = torch.linalg.qr(drawn(30, 30, seed=1))
    assert activations.cka(x, 3 * x @ rotation + 5) == pytest.approx(1, abs=1e-12)
    noise = [activations.cka(x, drawn(200, 30, seed=seed)) for seed in range(2, 22)]
    assert abs(np.mean(noise)) < 3 * np.std(noise) / math.sqrt(20) and np.std(noise) < 0.05


# ----------------------------------------------------------------------------------------------------
# Scale


def test_a_power_law_is_found_and_ends_one_step_beyond():
    sizes = (1e6, 2e6, 8e6)
    law = scaling.PowerLaw(sizes, [[-0.1 * (n / 1e6) ** -0.5 + e for e in (-1e-4, 0, 1e-4)] for n in sizes])
    k, low, high = law.exponent()
    assert k == pytest.approx(-0.5, abs=0.02) and low <= k <= high < low + 0.05
    assert law.reach == 32e6 and law(32e6)[0] == pytest.approx(-0.1 / math.sqrt(32), rel=0.05)
    with pytest.raises(ValueError, match=r"data end at 8e\+06, and one step beyond at 3.2e\+07"):
        law(33e6)
    constant = scaling.PowerLaw(sizes, [[0.2, 0.4]] * 3)
    assert (constant.c[0], constant.k[0]) == (pytest.approx(0.3), pytest.approx(0))


@pytest.fixture(scope="module")
def of_three_sizes(tmp_path_factory):
    """Two seeds of cola with and without DLR at three sizes; the gain halves from size to size."""
    root = tmp_path_factory.mktemp("runs")
    for number, rank in enumerate((8, 16, 32)):
        for words, gain in ((COLA, 0.0), (COLA_DLR, 0.4 / 2**number)):
            for seed in (41, 42):
                run = root / f"{rank}-{gain}-s{seed}"
                level = 4 - number / 2 - gain
                a_run(run, *words, f"scale.rank={rank}", seed=seed, final=level + seed / 1e4 * (gain > 0))
                update_record(run, {"parameters": 1_000_000 * 2**number})
    return root


@pytest.mark.full
def test_a_report_of_three_sizes_shows_the_gain_against_scale(of_three_sizes, tmp_path, capsys):
    assert main_of("report", of_three_sizes, "--output", tmp_path / "out") == 0
    table = pd.read_csv(tmp_path / "out" / "tables" / "scale.csv").iloc[0]
    assert table["1M"].startswith("'-0.39") or table["1M"].startswith("-0.39")
    assert float(table.k.lstrip("'").split()[0]) == pytest.approx(-1, abs=0.1)
    assert "-0.04" in table["8M by the law"]
    figures = {path.stem for path in (tmp_path / "out" / "figures").glob("scale_*.png")}
    assert figures == {f"scale_{x}" for x in ("parameters", "flops", "hours")} | {"scale_difference"}
    assert "Does the gain survive scale?" in (tmp_path / "out" / "report.html").read_text()


def test_means_of_both_signs_have_no_law(tmp_path):
    for number, (rank, gain) in enumerate(((8, 0.1), (16, 0.05), (32, -0.02))):
        for words, level in ((COLA, 4.0), (COLA_DLR, 4.0 - gain)):
            for seed in (41, 42):
                a_run(run := tmp_path / f"{rank}-{level}-{seed}", *words, f"scale.rank={rank}", seed=seed, final=level)
                update_record(run, {"parameters": 1_000_000 * 2**number})
    shown = scaling.parts(read_runs([tmp_path]), tmp_path / "figures")
    assert shown[1].frame.k.tolist() == ["no law: the means differ in sign"]
    assert (tmp_path / "figures" / "scale_difference.png").exists()


def test_two_sizes_show_nothing_and_several_settings_are_named(of_three_sizes, tmp_path):
    two = read_runs([str(of_three_sizes / "8-*"), str(of_three_sizes / "16-*")])
    assert scaling.parts(two, tmp_path) == []
    a_run(tmp_path / "other", *COLA, "scale.rank=8", "train.lr=0.02", seed=41)
    shown = scaling.parts(read_runs([str(of_three_sizes), str(tmp_path / "other")]), tmp_path / "figures")
    assert "Left out, as they have several settings: cola at 1M parameters." in shown[1].notes


# ----------------------------------------------------------------------------------------------------
# Statistics and pages


def frame(**columns) -> pd.DataFrame:
    common = {"scale": "tiny", "kind": "", "against": "cola"}
    return pd.DataFrame(columns).assign(**common)


def test_differences_are_by_seed_with_intervals_of_all_methods():
    runs = {(m, s): v for m, v in (("cola", 1.0), ("cola+dlr", 3.0)) for s, v in ((1, v), (2, v + 1), (3, v + 2))}
    every = pd.DataFrame([
        {"scale": "tiny", "method": m, "dlr": "dlr" in m, "seed": s, "run": f"{m}--{s}", "kind": "", "number": "n",
         "value": v}
        for (m, s), v in runs.items()
    ])  # fmt: skip
    every.loc[every.run == "cola+dlr--3", "value"] += 0.3
    (table,) = page.differences(every)
    row = table.frame.iloc[0]
    deviation = np.std([2, 2, 2.3], ddof=1)
    assert row.Difference == "+2.1 (3)" and row["With DLR"] == "higher"
    reach = 4.302652729 * deviation / math.sqrt(3)
    assert row.Interval == f"{2.1 - reach:+.3g} to {2.1 + reach:+.3g}"


def test_numbers_are_those_of_the_last_step_and_block():
    frames = {"activations": frame(
        run="a--b", method="cola+dlr", seed="41", dlr=True, step=[0, 0, 5, 5], block=[0, 1, 0, 1], refused=np.nan,
        cka=[0.1, 0.2, 0.3, 0.4],
    ).assign(kind="backbone")}  # fmt: skip
    found = page.numbers(frames)
    assert found.value.tolist() == [0.4] and found.number.tolist() == ["CKA, backbone"]


def test_a_part_without_a_number_says_why(tmp_path):
    refused = frame(run="a--b", method="cola", seed="41", dlr=False, step=[5], refused="their tokenizers differ")
    share = frame(run="a", method="cola+dlr", seed="41", dlr=True, step=[5], share=[0.5])
    page.write({"residuals": share, "activations": refused}, [], "", tmp_path)
    assert "cola with cola is refused: their tokenizers differ." in (tmp_path / "geometry.html").read_text()
    with pytest.raises(UserError, match=r"nothing to show: .* two runs"):
        page.numbers({"activations": refused})
    with pytest.raises(UserError, match="nothing to show"):
        page.numbers({})


# ----------------------------------------------------------------------------------------------------
# Runs


def test_weights_are_folded_and_step_0_is_where_training_began(train, tmp_path, no_export):
    run = train(tmp_path / "run", "backbone=lowrank", "dlr=on", "train.steps=10", "checkpoint.keep_last=2")
    of = Trained(read_runs([run]).runs.iloc[0])
    assert of.steps == [0, 5, 10]
    model = build_model(of.cfg, of.vocabulary, CPU)
    for step in (0, 10):
        stored = dict(model.state_dict()) if step == 0 else saved(run / "checkpoints" / f"step_{step:08d}")
        exported = split(model, {name: stored[name] for name in model.state_dict()})
        cfg, point = of.point(step)
        assert cfg.backbone.name == "full"
        for name in places(point):
            stem = name.removesuffix(".weight")
            a, of_b = exported[f"{stem}.a.weight"], exported[f"{stem}.b.weight"]
            beta = 1 / math.sqrt(-(-len(of_b) // of_b.shape[1]))
            torch.testing.assert_close(point[name], (of_b + beta * r_transposed(*of_b.shape)) @ a)


def test_a_result_is_kept_until_what_it_is_made_from_changes(tmp_path):
    computed = []

    def compute():
        computed.append(1)
        return [{"x": 1 / 3, "refused": ""}]

    for version in (1, 1, 2):
        found = study.kept(tmp_path / "a" / "b.csv", {"version": version}, compute)
    assert len(computed) == 2 and found.x[0] == pytest.approx(1 / 3, rel=1e-15) and found.refused.isna().all()


def test_one_checkpoint_has_no_line_and_none_leaves_a_run_out(train, tmp_path, no_export, capsys):
    first = train(tmp_path / "runs" / "a", "train.steps=5", "dlr=on")
    train(tmp_path / "runs" / "b", "train.steps=5", "dlr=on", f"run.start_from={first}", "checkpoint.keep_last=1")
    words = [str(tmp_path / "runs"), "--output", str(tmp_path / "out"), "--sequences", "2"]
    assert main([*words, "--parts", "interpolation"]) == 0
    reasons = pd.read_csv(tmp_path / "out" / "interpolation.csv").refused.dropna()
    assert "it has one checkpoint, and began with other weights" in reasons.tolist()
    shutil.rmtree(first / "checkpoints")
    assert main([*words, "--parts", "spectra"]) == 0
    assert "a is left out: " in (tmp_path / "out" / "geometry.html").read_text()
    assert main([str(first), *words[1:]]) == 3 and "no finished run has sound checkpoints" in capsys.readouterr().err


@pytest.mark.full
def test_a_study_is_complete_resumes_and_names_what_it_refuses(train, tmp_path, no_export, monkeypatch, capsys):
    shape = ("train.steps=10", "checkpoint.keep_last=2")
    for backbone, dlr, seed in (("cola", "off", 1), ("cola", "on", 1), ("cola", "on", 2), ("lowrank", "off", 1)):
        train(
            tmp_path / "runs" / f"{backbone}-{dlr}-{seed}", f"backbone={backbone}", f"dlr={dlr}", f"seed={seed}", *shape
        )
    monkeypatch.setattr(study, "POINTS", 3)
    words = [str(tmp_path / "runs"), "--output", str(tmp_path / "out"), "--sequences", "3"]
    assert main(words) == 0
    frames = {name: pd.read_csv(tmp_path / "out" / f"{name}.csv") for name in ("spectra", "landscape", "interpolation")}
    assert set(frames["spectra"].matrix) == {"W", "A", "B"} and set(frames["landscape"].space) == {"W", "A, B"}
    sharp = frames["landscape"].drop_duplicates(["run", "direction"])
    assert np.allclose(sharp.fit, sharp.hessian, rtol=0.05, atol=0.02)
    refused = frames["interpolation"].refused.dropna()
    assert refused.str.contains("compute different functions").all() and len(refused)
    page_text = (tmp_path / "out" / "geometry.html").read_text()
    assert all(title in page_text for title in ("Spectra", "Landscape", "Interpolation", "Activations", "is refused"))
    before = {path: path.read_bytes() for path in (tmp_path / "out" / "kept").rglob("*.csv")}
    monkeypatch.setattr(torch.linalg, "svdvals", None)  # would fail if it were used
    monkeypatch.setattr(landscape, "curvature", None)
    assert main(words) == 0 and before == {path: path.read_bytes() for path in before}
    assert main([*words[:3], "--parts", "spectrum"]) == 3 and "spectra" in capsys.readouterr().err
