"""Tables from traces whose times are known."""

from __future__ import annotations

import gzip
import json

import pytest

from dlr_pretrain.analysis.trace import own_times, read_trace, render, tables

MAIN, AUTOGRAD, STREAM = 1, 2, 7


def event(cat: str, name: str, ts: float, dur: float, tid: int = MAIN, correlation: int | None = None) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur,
            "args": {} if correlation is None else {"correlation": correlation}}  # fmt: skip


def step(start: float) -> list[dict]:
    """10 ms: data 1, publish 0.5 twice, forward 2, backward 4 (with 1 of communication in it), optimizer 1, other 1."""
    t = start
    return [
        event("user_annotation", f"ProfilerStep#{start:g}", t, 10_000),
        event("user_annotation", "data", t, 1_000),
        event("user_annotation", "publish", t + 1_000, 500),
        event("user_annotation", "forward", t + 1_500, 2_000),
        event("cpu_op", "aten::linear", t + 1_600, 1_000),
        event("cpu_op", "aten::addmm", t + 1_700, 800),
        event("user_annotation", "backward", t + 3_500, 4_000),
        event("user_annotation", "communication", t + 5_000, 1_000),
        event("user_annotation", "publish", t + 7_500, 500),
        event("user_annotation", "optimizer", t + 8_000, 1_000),
    ]


PARTS = {"data": 1, "publish": 1, "forward": 2, "backward": 3, "communication": 1, "optimizer": 1, "other": 1}


def test_the_parts_of_a_step_add_up_to_it():
    found = tables([*step(0), *step(10_000)])
    assert found.steps == 2 and found.wall == pytest.approx(10)
    assert found.host == pytest.approx(PARTS)
    assert found.gpu == {} and found.kernels == [
        ("aten::addmm", 1.0, pytest.approx(0.8)),
        ("aten::linear", 1.0, pytest.approx(0.2)),
    ]
    gloo = event("user_annotation", "gloo:all_reduce", 4_000, 3_000, tid=AUTOGRAD)
    found = tables([*step(0), gloo])
    assert found.host == pytest.approx(PARTS) and found.collectives == pytest.approx(3)
    assert "under way for 3.00 ms" in render(found, "a run")


def test_kernels_belong_to_the_part_that_launched_them():
    """Autograd launches from a thread of its own, kernels run later than they are launched, and NCCL's are apart."""
    events = [
        *step(0),
        event("cuda_runtime", "cudaLaunchKernel", 2_000, 5, correlation=1),
        event("kernel", "gemm", 9_500, 3_000, STREAM, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 4_000, 5, AUTOGRAD, correlation=2),
        event("kernel", "gemm", 12_500, 4_000, STREAM, correlation=2),
        event("cuda_driver", "cuLaunchKernel", 4_100, 5, AUTOGRAD, correlation=3),
        event("kernel", "ncclDevKernel_AllReduce_Sum_bf16", 13_000, 2_000, STREAM, correlation=3),
        event("kernel", "lost", 17_000, 500, STREAM, correlation=4),
    ]
    found = tables(events)
    assert {name: time for name, time in found.gpu.items() if time} == pytest.approx(
        {"forward": 3, "backward": 4, "communication": 2, "other": 0.5}
    )
    assert found.kernels[0] == ("gemm", 2.0, pytest.approx(7))
    text = render(found, "a run")
    assert "| backward | 3.00 | 30.0% | 4.00 |" in text and "| `gemm` | 2.0 | 7.000 |" in text
    assert "at work for 9.50 ms" in text


def test_time_in_itself_is_that_of_the_thread():
    outer, inner = event("cpu_op", "outer", 0, 10), event("cpu_op", "inner", 0, 4)
    beside = event("cpu_op", "beside", 2, 5, AUTOGRAD)
    times = {e["name"]: time for e, time in own_times([inner, outer, beside])}
    assert times == {"outer": 6, "inner": 4, "beside": 5}


def test_traces_are_read_gzipped_and_not(tmp_path):
    text = json.dumps({"traceEvents": [*step(0), {"ph": "i", "name": "an instant"}]})
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "a.json") == read_trace(tmp_path / "a.json.gz") == step(0)
    with pytest.raises(ValueError, match="holds no step"):
        tables([])
