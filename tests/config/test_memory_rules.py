"""What train.memory=low cannot do is refused before the run, all at once, each with the reason and the fix."""

from __future__ import annotations

import pytest

from dlr_pretrain.cli import load
from tests.config.test_optimizer_rules import refusal

LOW = (
    "train.memory=low",
    "optimizer=adamw_8bit",
    "train.clip_by=previous_norm",
    "train.global_batch=8",
    "backbone=cola",
)


def given(*words: str) -> tuple[str, ...]:
    return tuple({word.split("=")[0]: word for word in (*LOW, *words)}.values())


@pytest.mark.parametrize("words", [
    (),
    ("dlr=on", "precision=bf16_sr", "train.activation_checkpointing=latent"),
    ("optimizer=adamw", "train.clip=null"),
    ("backbone=relora", "precision=bf16_mixed", "train.on_nonfinite=skip"),
])  # fmt: skip
def test_what_it_can_do_is_accepted(words):
    clip = {word for word in words if word == "train.clip=null"}
    load(["scale=tiny", "data=sample", "logger=jsonl", *(w for w in given(*words) if not clip or "clip_by" not in w)])


@pytest.mark.parametrize(("words", "problem"), [
    (
        ("train.clip_by=norm",),
        "train.clip=0.5: needs the norm of all gradients before the first update, and train.memory=low keeps none of "
        "them. Use train.clip_by=previous_norm, or train.clip=null",
    ),
    (
        ("optimizer=adamw_foreach",),
        "optimizer=adamw_foreach: does not update parameters one by one, as train.memory=low requires. "
        "Use optimizer=adamw_8bit, or adamw (more memory)",
    ),
    (
        ("train.micro_batch=4",),
        "train.micro_batch=4: train.memory=low sums no micro-batches, so it must be a rank's whole share of "
        "train.global_batch, 8. Use train.micro_batch=8, a smaller train.global_batch, or more ranks",
    ),
    (
        ("train.micro_batch=auto",),
        "train.micro_batch=auto: train.memory=low sums no micro-batches, so it must be a rank's whole share of "
        "train.global_batch, 8. Use train.micro_batch=8, a smaller train.global_batch, or more ranks",
    ),
    (
        ("train.accumulate=fp32",),
        "train.accumulate=fp32: needs a buffer of all gradients, which train.memory=low does not keep. "
        "Use train.accumulate=native",
    ),
    (
        ("parallel=fsdp",),
        "parallel=fsdp: shards gradients block by block, and train.memory=low sums them one by one. "
        "Use parallel=ddp, or train.memory=full",
    ),
    (
        ("dlr=learnable_alpha",),
        "dlr.learn_alpha=true: alpha's gradient is taken from that of B after the backward pass, when train.memory=low "
        "has released it. Use dlr=on, or train.memory=full",
    ),
    (
        ("dlr=init_offset_decay", "precision=bf16_mixed"),
        "dlr.mode=decayed_offset: gives back a share of the offset after a whole update, which train.memory=low may "
        "take in part. Use train.memory=full",
    ),
    (
        ("train.clip=null",),
        "train.clip_by=previous_norm: would be ignored: train.clip=null. Leave it out",
    ),
])  # fmt: skip
def test_what_it_cannot_do_is_refused(words, problem):
    assert refusal(*given(*words)) == [problem]


def test_all_contradictions_come_at_once():
    problems = refusal(
        "train.memory=low", "optimizer=muon", "parallel=fsdp", "train.accumulate=fp32", "train.micro_batch=1"
    )
    keys = ["train.clip", "optimizer", "train.micro_batch", "train.accumulate", "parallel"]
    assert all(any(problem.startswith(f"{key}=") for problem in problems) for key in keys)
