"""Each method has the losses of ``curves.json`` up to rounding, and goes from training to an export that is reloaded.

``python -m tests.golden.regenerate`` rewrites curves that move on purpose. Measured on these curves: initial values
changed in their last bits, two threads, and kernels without AVX-512 or without any vector instructions move them by
less than 3e-7; alpha 1 -> 0.99 by 1e-4, clipping at 1 instead of 0.5 (where it acts) by 3e-4.

    DLR_MATRIX_BACKEND=inductor python -m pytest tests/golden -m exhaustive

runs every method end to end: 20 steps on one rank and on two, compiled, resumed, folded, exported and reloaded. The two
ranks are forked from this process. All methods but cola+dlr and lax are compiled with aot_eager, which takes inductor's
path up to its code generation, in a fraction of the time. ``DLR_MATRIX_BACKEND`` sets one backend for all.
"""

import functools
import os

import pytest
import torch

from dlr_pretrain.util.errors import Stopped
from dlr_pretrain.util.files import read_metrics
from tests.conftest import forked
from tests.golden.regenerate import CHOICES, curve, golden
from tests.parity.reference import TODAYS
from tests.resume.test_resume import assert_same, final

REL = 1e-5


PLAIN = {name for name in CHOICES if f"{name}+dlr" in CHOICES}  # their parts are in the curves with DLR


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n in PLAIN else n for n in CHOICES])
def test_the_curve_is_that_of_the_file(name):
    expected = golden()[name]
    assert len(expected) == 20
    assert curve(*CHOICES[name]) == pytest.approx(expected, rel=REL)


# ----------------------------------------------------------------------------------------------------
# End to end


METHODS = CHOICES | {
    "full+galore": ("backbone=full", "optimizer=galore", "optimizer.rank=8", "optimizer.refresh_every=6"),
    "full+fira": ("backbone=full", "optimizer=fira", "optimizer.rank=8", "optimizer.refresh_every=6"),
    "full+muon": ("backbone=full", "optimizer=muon"),
    "lowrank+loro": ("backbone=lowrank", "backbone.init=xavier", "optimizer=loro", "optimizer.exact_every=6"),
    "cola+dlr+latent": ("backbone=cola", "dlr=on", "train.activation_checkpointing=latent"),
    "cola+learnable_alpha": ("backbone=cola", "dlr=learnable_alpha"),
    "cola+dlr+adamw_foreach": ("backbone=cola", "dlr=on", "optimizer=adamw_foreach"),
    "cola+dlr+adamw_8bit": ("backbone=cola", "dlr=on", "optimizer=adamw_8bit"),
    "cola+dlr+bf16_sr": ("backbone=cola", "dlr=on", "precision=bf16_sr"),
    "cola_lax": ("backbone=cola_lax", "backbone.gate=dense"),
    "cola_lax+dlr": ("backbone=cola_lax", "dlr=on", "backbone.gate=dense"),
    "sltrain": ("backbone=sltrain",),
    "lora": ("backbone=lora",),
    "relora": ("backbone=relora", "backbone.merge_every=6", "backbone.restart_warmup=2"),
}
METHODS |= {
    f"{method}+todays": (*METHODS[method], *TODAYS)
    for method in ("full+galore", "full+muon", "lowrank+loro", "cola+dlr+adamw_8bit", "cola+dlr+bf16_sr", "lost+dlr",
                   "cola_lax+dlr", "sltrain", "lora", "relora")
}  # fmt: skip
INDUCTOR = ("cola+dlr", "lax")


def losses(folder) -> list[float]:
    return [record["train/loss"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
def test_a_method_trains_resumes_folds_exports_and_reloads(train, words, tmp_path, monkeypatch, capsys, method):
    common = (*METHODS[method], "train.lr=1e-3", "train.steps=20")
    whole = final(train(tmp_path / "whole", *common))
    records = whole[1]
    assert len(records) == 20 and records[-1]["train/loss"] < records[0]["train/loss"]
    assert "transformers loads it; its logits differ by at most" in capsys.readouterr().out

    with pytest.raises(Stopped):
        train(tmp_path / "parts", *common, "train.stop_after=7")
    assert_same(final(train(tmp_path / "parts", *common)), whole)

    backend = os.environ.get("DLR_MATRIX_BACKEND", "inductor" if method in INDUCTOR else "aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    shared = tmp_path / "shared"
    forked(words(f"run.dir={shared}", *common, "compile=true"), ranks=2)
    assert losses(shared) == pytest.approx([r["train/loss"] for r in records], rel=1e-4)
