"""The projections that ``probe=on`` examines, by names such as ``0.self_attn.q_proj``, and the rules of probing."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from dlr_pretrain.config.problems import Problem, did_you_mean
from dlr_pretrain.config.tree import Config

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


def carrying(cfg: Config) -> list[str]:
    """The projections that carry the residual, as <block>.<part>.<projection>."""
    scope = {"all": ("self_attn", "mlp"), "attention": ("self_attn",), "mlp": ("mlp",)}[cfg.dlr.scope]
    blocks = range(cfg.scale.num_layers)
    return [f"{block}.{part}.{name}" for block in blocks for part in scope for name in PROJECTIONS[part]]


def probed(cfg: Config) -> list[str]:
    """The probed projections: the paper's three by default. Only projections that carry the residual are probed."""
    if cfg.probe.layers is not None:
        patterns = cfg.probe.layers.split()
        return [name for name in carrying(cfg) if any(fnmatchcase(name, pattern) for pattern in patterns)]
    last = cfg.scale.num_layers - 1
    chosen = ("0.self_attn.q_proj", f"{last // 2}.mlp.up_proj", f"{last}.mlp.up_proj")
    return [name for name in dict.fromkeys(chosen) if name in carrying(cfg)]


def probe_problems(cfg: Config) -> Iterator[Problem]:
    """Every rule that ``probe=on`` breaks."""
    if not cfg.probe.enabled:
        return
    if not cfg.dlr.enabled or cfg.dlr.mode != "residual":
        rule = f"compares the gradient's way through B with that through the residual, and dlr={cfg.dlr.name} has none"
        yield Problem("probe", cfg.probe.name, rule, "Use dlr=on, or probe=off")
        return
    if not cfg.dlr.train_b:
        rule = f"compares with the gradient's way through B, which dlr={cfg.dlr.name} holds at zero"
        yield Problem("probe", cfg.probe.name, rule, "Use dlr.train_b=true, or probe=off")
    if cfg.parallel.name == "fsdp":
        rule = "multiplies by whole weights, of which parallel=fsdp leaves a rank some rows"
        yield Problem("probe", cfg.probe.name, rule, "Use parallel=ddp, or probe=off")
    known = carrying(cfg)
    for pattern in (cfg.probe.layers or "").split():
        if not any(fnmatchcase(name, pattern) for name in known):
            fix = did_you_mean(pattern, known, f"Names are such as {known[0]}, or *.{known[-1].partition('.')[2]}")
            yield Problem("probe.layers", cfg.probe.layers, f"{pattern} is no projection with a residual", fix)
