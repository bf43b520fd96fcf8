"""What ``probe=on`` and ``profile=on`` look at, and what they refuse."""

from __future__ import annotations

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError, identity
from dlr_pretrain.config.probing import probed

BASE = ("scale=350m", "backbone=cola", "data=sample", "logger=jsonl")


def loaded(*words: str):
    return load([*BASE, *words], machine=False)


def test_the_paper_s_projections_or_those_that_are_named():
    assert probed(loaded("dlr=on", "probe=on")) == ["0.self_attn.q_proj", "11.mlp.up_proj", "23.mlp.up_proj"]
    assert probed(loaded("dlr=attention", "probe=on")) == ["0.self_attn.q_proj"]
    named = probed(loaded("dlr=on", "probe=on", "probe.layers=0.self_attn.q_proj 23.mlp.*"))
    assert named == ["0.self_attn.q_proj", "23.mlp.gate_proj", "23.mlp.up_proj", "23.mlp.down_proj"]


def test_looking_makes_no_other_run():
    plain, looking = loaded("dlr=on"), loaded("dlr=on", "probe=on", "probe.every=7", "profile=on", "profile.start=5")
    assert identity(plain) == identity(looking) and plain.run.dir == looking.run.dir


@pytest.mark.parametrize(("words", "problem"), [
    (("probe=on",), r"dlr=off has none\. Use dlr=on, or probe=off"),
    (("dlr=init_offset", "probe=on"), r"dlr=init_offset has none"),
    (("dlr=no_b", "probe=on"), r"dlr=no_b holds at zero\. Use dlr\.train_b=true"),
    (("dlr=on", "probe=on", "parallel=fsdp"), r"parallel=fsdp leaves a rank some rows\. Use parallel=ddp"),
    (("dlr=on", "probe=on", "probe.layers=0.self_atn.q_proj"), r"Did you mean 0\.self_attn\.q_proj\?"),
    (("dlr=mlp", "probe=on", "probe.layers=*.q_proj"), r"\*\.q_proj is no projection with a residual"),
    (("dlr=on", "probe.every=3"), r"probe\.every=3: would be ignored: probe=off"),
    (("profile.steps=2",), r"profile\.steps=2: would be ignored: profile=off"),
    (("profile=on", "train.steps=22", "train.warmup_steps=1"), r"profile\.start=20: .* 22 steps of the run\. Try 19"),
    (("profile=on", "train.stop_after=3"), r"3 steps of the run\. Use profile=off"),
])  # fmt: skip
def test_what_would_say_nothing_is_refused(words, problem):
    with pytest.raises(ConfigError, match=problem):
        loaded(*words)
