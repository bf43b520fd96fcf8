"""What an optimizer cannot do is refused before the run, with the reason and the fix."""

from __future__ import annotations

import importlib.util

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config.compiler import compiler_problem
from dlr_pretrain.config.rules import validate
from dlr_pretrain.util.errors import UserError


def checked(*words: str):
    scale = [] if any(word.startswith("scale=") for word in words) else ["scale=tiny"]
    return load([*scale, "data=sample", "logger=jsonl", *words])


def refusal(*words: str) -> list[str]:
    """The problems of a command line, one a line."""
    with pytest.raises(UserError) as caught:
        checked(*words)
    lines = str(caught.value).splitlines()
    return lines if len(lines) == 1 else [line.strip() for line in lines[1:]]


@pytest.mark.parametrize(
    "words",
    [
        *(("optimizer=adamw", f"backbone={backbone}", "dlr=on") for backbone in ("lowrank", "cola")),
        ("optimizer=adamw", "backbone=lora", "optimizer.b_lr=16"),
        ("optimizer=galore", "backbone=full"),
        ("optimizer=fira", "backbone=full", "scale.rank=128"),
        ("optimizer=loro", "backbone=lowrank", "optimizer.exact_every=90", "optimizer.shift=270"),
        ("optimizer=loro", "backbone=lowrank", "scale=350m", "optimizer.shift=null"),
        ("backbone=cola", "dlr=init_offset_decay", "precision=bf16_mixed", "optimizer.weight_decay=0.001"),
        ("optimizer=muon", "backbone=cola", "dlr=on", "optimizer.nesterov=false", "precision=bf16_mixed"),
        ("optimizer=adamw_8bit", "backbone=cola", "dlr=learnable_alpha", "precision=bf16_sr", "parallel=fsdp"),
    ],
)
def test_what_an_optimizer_can_do_is_accepted(words):
    checked(*words)


PROJECTS = (
    "projects the gradients of dense layers, and those of backbone={} are not. Use backbone=full, or optimizer=adamw"
)
PRODUCT = "moves the product B A^T"


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (("optimizer=galore",), ["optimizer=galore: " + PROJECTS.format("lowrank")]),
        (("optimizer=fira", "backbone=sltrain"), ["optimizer=fira: " + PROJECTS.format("sltrain")]),
        (
            ("optimizer=loro", "backbone=cola", "dlr=on"),
            [
                f"optimizer=loro: {PRODUCT} of linear factors, which backbone=cola does not multiply by. "
                "Use backbone=lowrank, or optimizer=adamw"
            ],
        ),
        (
            ("optimizer=loro", "dlr=on"),
            [
                f"optimizer=loro: {PRODUCT}, not the (B + beta R^T) A^T that dlr=on multiplies by. "
                "Use dlr=off, or optimizer=adamw"
            ],
        ),
        (
            ("optimizer=loro", "optimizer.exact_every=301", "optimizer.restart_warmup=301", "optimizer.shift=300"),
            [
                "optimizer.exact_every=301: must not exceed train.steps=300: no step would be exact",
                "optimizer.restart_warmup=301: must be below optimizer.exact_every=301",
                "optimizer.shift=300: must be null or a multiple of optimizer.exact_every=301 up to 270, the steps "
                "after the warm-up",
            ],
        ),
        *(
            (
                ("optimizer=loro", f"optimizer.shift={shift}"),
                [
                    f"optimizer.shift={shift}: must be null or a multiple of optimizer.exact_every=50 up to 270, the "
                    "steps after the warm-up"
                ],
            )
            for shift in (30, 300)
        ),
        *(
            (("optimizer=loro", scale, f"optimizer.shift={shift}"), [f"optimizer.shift={shown}: {rule}"])
            for scale in ("scale=tiny", "scale=350m")  # the default is null at one, a number at the other
            for shift, shown, rule in (
                ("soon", "soon", "must be a whole number or null"),
                ("0.5", "0.5", "must be a whole number or null"),
                ("true", "true", "must be a whole number or null"),
                ("-1", "-1", "must be at least 0"),
            )
        ),
        (
            ("optimizer=loro", "optimizer.schedule=cosine", "optimizer.shift=3", "optimizer.restart_warmup=2"),
            [
                "optimizer.restart_warmup=2: would be ignored: optimizer.schedule=cosine. Leave it out",
                "optimizer.shift=3: would be ignored: optimizer.schedule=cosine. Leave it out",
            ],
        ),
        (
            ("optimizer=galore", "backbone=full", "optimizer.rank=129"),
            ["optimizer.rank=129: must lie between 1 and the narrowest layer's width, 128"],
        ),
        (
            ("optimizer=galore", "backbone=full", "optimizer.rank=16", "scale.rank=8"),
            ["scale.rank=8: would be ignored: optimizer.rank is 16. Leave it out"],
        ),
        (
            ("backbone=cola", "dlr=init_offset_decay", "precision=bf16_mixed", "optimizer.weight_decay=0"),
            [
                "dlr.mode=decayed_offset: pulls to the offset by weight decay, of which optimizer=adamw has none here. "
                "Use optimizer.weight_decay above 0, or dlr.mode=offset"
            ],
        ),
        (
            ("optimizer=muon", "optimizer.nesterov=false"),
            [
                "optimizer.nesterov=false: torch (up to 2.13) then overwrites a momentum that is kept in bf16. "
                "Use optimizer.nesterov=true, or precision=bf16_mixed"
            ],
        ),
        *(
            (
                (f"optimizer={name}", f"backbone={backbone}", "precision=bf16_sr"),
                [
                    f"precision=bf16_sr: optimizer={name} writes its weights itself, rounded to the nearest. "
                    "Use optimizer=adamw or adamw_8bit, or precision=bf16_mixed"
                ],
            )
            for name, backbone in (("adamw_foreach", "cola"), ("muon", "cola"), ("galore", "full"), ("loro", "lowrank"))
        ),
        (("optimizer=muon", "optimizer.momentum=1"), ["optimizer.momentum=1: must be below 1"]),
        (("optimizer=muon", "optimizer.beta2=1"), ["optimizer.beta2=1: must be below 1"]),
        (("optimizer=loro", "optimizer.eps=0"), ["optimizer.eps=0: must be greater than 0"]),
        (("optimizer=loro", "optimizer.weight_decay=-1"), ["optimizer.weight_decay=-1: must be at least 0"]),
        (
            ("optimizer=galor", "backbone=full"),
            [
                "optimizer=galor: must be one of adamw, adamw_8bit, adamw_foreach, fira, galore, loro, muon. "
                "Did you mean galore?",
            ],
        ),
    ],
)
def test_what_it_cannot_do_is_refused(words, problems):
    assert refusal(*words) == problems


BOUNDS = {
    "fira": {
        "rank=0": "must be at least 1",
        "update_scale=0": "must be greater than 0",
        "refresh_every=0": "must be at least 1",
        "limiter=0.99": "must be at least 1",
    },
    "loro": {
        "exact_every=0": "must be at least 1",
        "restart_warmup=-1": "must be at least 0",
        "schedule=linear": "must be one of loro, cosine",
    },
    "muon": {"ns_steps=0": "must be at least 1"},
    "adamw_8bit": {"block_size=0": "must be at least 1"},
}


@pytest.mark.parametrize("optimizer", BOUNDS)
def test_every_knob_has_its_bounds(optimizer):
    words = [f"optimizer.{word}" for word in BOUNDS[optimizer]]
    problems = refusal(f"optimizer={optimizer}", f"backbone={'full' if optimizer == 'fira' else 'lowrank'}", *words)
    assert len(problems) == len(words)
    for word, rule in BOUNDS[optimizer].items():
        assert any(problem.startswith(f"optimizer.{word.split('=')[0]}=") and rule in problem for problem in problems)


@pytest.mark.parametrize("optimizer", ["galore", "fira", "loro", "muon"])
def test_a_matrix_optimizer_needs_whole_matrices(optimizer):
    cfg = checked(f"optimizer={optimizer}", f"backbone={'full' if optimizer in ('galore', 'fira') else 'lowrank'}")
    cfg.parallel.name = "fsdp"
    assert [str(problem) for problem in validate(cfg, 1)] == [
        f"optimizer={optimizer}: a matrix optimizer needs whole matrices, and parallel=fsdp shards them. "
        "Use parallel=ddp, or optimizer=adamw"
    ]


def test_8_bits_need_torchao(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else real(name))
    assert refusal("optimizer=adamw_8bit") == [
        "optimizer=adamw_8bit: needs the package torchao, which is not installed. "
        "Install the extra 8bit, or use optimizer=adamw"
    ]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler_problem(checked("optimizer=adamw_8bit", "compile=false"), "cpu") is None


@pytest.mark.parametrize(
    ("scale", "optimizer", "expected"),
    [
        ("1b", "galore", {"rank": 512, "refresh_every": 200, "update_scale": 0.25, "eps": 1e-6, "weight_decay": 0.0}),
        ("7b", "galore", {"rank": 1024, "refresh_every": 500}),
        ("1b", "fira", {"rank": 512, "update_scale": 0.0625, "refresh_every": 200, "limiter": 1.01}),
        ("7b", "fira", {"rank": 64, "update_scale": 0.0625, "refresh_every": 500}),
        ("130m", "fira", {"rank": 256, "update_scale": 0.25}),
        ("130m", "loro", {"exact_every": 500, "shift": None, "restart_warmup": 5, "eps": 1e-6}),
        ("350m", "loro", {"exact_every": 500, "shift": 6000}),
        ("1b", "loro", {"exact_every": 200, "shift": None}),
        ("60m", "muon", {"eps": 1e-8, "momentum": 0.95, "weight_decay": 0.1}),
        ("1b", "adamw_8bit", {"eps": 1e-6, "block_size": 256, "weight_decay": 0.1}),
    ],
)
def test_knobs_have_their_authors_values_at_each_scale(scale, optimizer, expected):
    backbone = "full" if optimizer in ("galore", "fira") else "lowrank"
    knobs = checked(f"scale={scale}", f"optimizer={optimizer}", f"backbone={backbone}").optimizer.knobs
    assert {name: knobs[name] for name in expected} == expected
