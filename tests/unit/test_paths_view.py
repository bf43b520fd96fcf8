"""The report's part on gradient paths, from records as the probe leaves them."""

from __future__ import annotations

import math

from dlr_pretrain.analysis.paths_view import probes
from tests.unit.test_report import a_line, a_run

NUMBERS = {"through_b": 0.2, "through_residual": 0.1, "rho_mean": 0.55, "isotropic": 0.8412, "cosine": -0.25}


def looks(step: int, layer: str, rho: float | None) -> dict:
    return {f"probe/{layer}/{name}": value for name, value in (NUMBERS | {"rho": rho}).items()}


def test_numbers_are_found_by_projection_and_step():
    lines = [a_line(1, **looks(1, "0.self_attn.q_proj", 1.5)), a_line(2), a_line(3, **looks(3, "1.mlp.up_proj", None))]
    found = probes(lines)
    assert list(found) == ["0.self_attn.q_proj", "1.mlp.up_proj"]
    assert found["0.self_attn.q_proj"] == [(1, NUMBERS | {"rho": 1.5})]
    ((step, numbers),) = found["1.mlp.up_proj"]
    assert step == 3 and math.isnan(numbers["rho"])
    assert probes([a_line(1)]) == {}


def test_the_report_has_the_figure_and_the_first_and_last_look(tmp_path):
    steps = {1: 1.5, 2: 1.25, 4: 0.75}
    lines = [a_line(s, **(looks(s, "0.self_attn.q_proj", steps[s]) if s in steps else {})) for s in range(1, 6)]
    text = a_run(tmp_path, lines)
    assert "| 0.self_attn.q_proj | 1 | 1.500 (0.550) | 0.841 | -0.250 |" in text
    assert "| 0.self_attn.q_proj | 4 | 0.750 (0.550) | 0.841 | -0.250 |" in text
    assert "1.250" not in text and "![gradient paths](plots/gradient_paths.png)" in text
    assert (tmp_path / "plots" / "gradient_paths.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "plots" / "gradient_paths.png").unlink()
    assert "Gradient paths" not in a_run(tmp_path, lines[4:])
    assert not (tmp_path / "plots" / "gradient_paths.png").exists()
