"""Learning rates as functions of the update: the cosine of the papers' scripts, LORO's restarts, ReLoRA's warm-ups."""

import math

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.optim.loro import rate as loro
from dlr_pretrain.optim.schedule import decayed, rate, restarted


def cosine(t: int, steps: int, warmup: int, peak: float, min_ratio: float) -> float:
    return decayed(t, steps, warmup, peak, min_ratio, decay=steps - warmup, shape="cosine")


def test_the_cosine_matches_the_papers_scripts():
    def factor(t: int) -> float:
        return cosine(t, steps=100, warmup=10, peak=2.0, min_ratio=0.1) / 2.0

    assert factor(0) == 0 and factor(5) == 0.5 and factor(10) == 1
    assert factor(55) == pytest.approx(0.55)
    assert factor(99) == pytest.approx(0.100274, abs=1e-6)
    assert cosine(0, steps=1, warmup=0, peak=0.3, min_ratio=0.1) == 0.3


@pytest.mark.parametrize(("shape", "decay"), [("cosine", 20), ("linear", 20), ("linear", 0)])
def test_the_rate_stays_at_its_peak_until_the_decay(words, shape, decay):
    """Warm-up, stable phase and decay (WSD); without a decay, the stable phase lasts to the end."""
    given = [f"train.lr_decay_steps={decay}", *([f"train.lr_decay={shape}"] if decay else [])]
    cfg = load(words("train.steps=60", "train.warmup_steps=6", "train.lr=0.01", *given))
    rates = [rate(cfg, t) for t in range(60)]
    assert rates[:6] == pytest.approx([0.01 * t / 6 for t in range(6)])
    assert set(rates[6 : 60 - decay]) == {0.01}
    progress = [since / 20 for since in range(decay)]  # ends one step above the minimum of a tenth
    share = [0.5 * (1 + math.cos(math.pi * p)) if shape == "cosine" else 1 - p for p in progress]
    assert rates[60 - decay :] == pytest.approx([0.01 * (0.1 + 0.9 * s) for s in share])


def formula(t: int, T: int, w: int, m: float, f: int, a: int, restart: int) -> float:
    """LORO's factor, case by case, as in its authors' script."""
    if t < w:
        top = 0.5 * (1 + math.cos(math.pi * a / (T - w)))
        j, k = t % f, t // f
        if k > 0 and j < restart:
            return j / restart * ((k * f / w) * (top - m) + m - 1e-6) + 1e-6
        return (t / w) * (top - m) + m
    t -= a
    j, k = t % f, math.floor(t / f)
    if k > 0 and j < restart:
        e = (k * f - w) / (T - w)
        return j / restart * (m + (1 - m) * 0.5 * (1 + math.cos(math.pi * e)) - 1e-6) + 1e-6
    p = (t - w) / (T - w)
    return m + (1 - m) * 0.5 * (1 + math.cos(math.pi * p))


@pytest.mark.parametrize(
    ("steps", "warmup", "every", "shift"),
    [(20_000, 2_000, 500, 2_000), (60_000, 2_000, 500, 6_000), (100_000, 10_000, 200, 10_000), (300, 30, 7, 30)],
)
def test_loros_schedule_matches_its_authors_script(steps, warmup, every, shift):
    for t in {*range(0, steps, 37), *range(3 * every), *range(warmup - 9, warmup + 9), steps - 1}:
        given = loro(t, steps, warmup, peak=2.0, min_ratio=0.1, every=every, restart=5, shift=shift)
        assert given == pytest.approx(2 * formula(t, steps, warmup, 0.1, every, shift, 5), rel=1e-12), t


def test_relora_warms_up_after_each_merge():
    factors = [restarted(t, every=10, restart=4) for t in range(25)]
    ramp = [0.0, 0.25, 0.5, 0.75]
    assert factors == [1.0] * 10 + ramp + [1.0] * 6 + ramp + [1.0]
    assert [restarted(t, every=10, restart=0) for t in range(25)] == [1.0] * 25


def test_a_run_uses_the_schedule_of_its_options(words):
    def rates(*overrides: str) -> list[float]:
        cfg = load(words("train.steps=60", "train.warmup_steps=6", "train.lr=0.01", *overrides))
        return [rate(cfg, t) for t in range(60)]

    plain = [cosine(t, 60, 6, 0.01, 0.1) for t in range(60)]
    assert rates() == plain
    relora = rates("backbone=relora", "backbone.merge_every=20", "backbone.restart_warmup=3")
    assert relora == [r * restarted(t, 20, 3) for t, r in enumerate(plain)]
    own = ("optimizer=loro", "optimizer.exact_every=20", "optimizer.restart_warmup=3")
    assert rates(*own) == [loro(t, 60, 6, 0.01, 0.1, every=20, restart=3, shift=0) for t in range(60)]
    shifted = [loro(t, 60, 6, 0.01, 0.1, every=20, restart=3, shift=40) for t in range(60)]
    assert rates(*own, "optimizer.shift=40") == shifted
