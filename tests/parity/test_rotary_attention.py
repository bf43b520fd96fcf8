"""Attention with rotary embedding inside the kernel: values, its place in the model, and what is refused.

Triton's interpreter computes the values on a CPU, in a process of its own: kernels are interpreted or compiled from
the import on. It knows no bf16 (it multiplies the bits as whole numbers); fp16 takes the same path.
"""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from importlib.metadata import distributions
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from dlr_pretrain.config import Config, ConfigError, attention_problem
from dlr_pretrain.models import build_model, llama
from dlr_pretrain.models.llama import attention_bias, rotary, rotate
from dlr_pretrain.models.rotary_attention import rotary_attention
from tests.conftest import ROOT
from tests.parity.reference import CPU, VOCAB, disturbed, small

ROWS, LENGTH = 2, 128
SHAPES = {"3 x 64": (3, 64), "1 x 128": (1, 128), "2 x 32": (2, 32)}  # heads and their width
DTYPES = {"fp32": (torch.float32, 2e-6), "fp16": (torch.float16, 1e-3)}  # and the largest relative error
BACKBONES = ("cola", "full", "lora", "lowrank train.activation_checkpointing=latent")
WIDE = "scale.hidden_size=64", "train.seq_len=64"  # two heads of 32
TRITON = next((each.version for each in distributions(name="triton")), None)
MISSING = {
    "Triton is not installed: it comes with CUDA builds of torch": TRITON is None,
    "the interpreter of Triton 3.6 fails with numpy 2.4": str(TRITON).startswith("3.6.")
    and np.lib.NumpyVersion(np.__version__) >= "2.4.0",
}
interpreted = [pytest.mark.skipif(missing, reason=reason) for reason, missing in MISSING.items()]


def numbers(rows: int, length: int) -> Tensor:
    """Document numbers [rows, length], of which some begin within a block and one has a single position."""
    starts = torch.zeros(rows, length, dtype=torch.int32)
    starts[0, [1, 2, 40]] = starts[-1, [length // 2, length - 1]] = 1
    return starts.cumsum(1).int()


def usual(qkv: Tensor, cos: Tensor, sin: Tensor, documents: Tensor | None, heads: int) -> Tensor:
    """The path of attention=sdpa."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in qkv.unbind(0))
    bias = None if documents is None else attention_bias(documents, qkv.dtype)
    y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, bias, is_causal=bias is None)
    return y.transpose(1, 2).flatten(2)


def errors(heads: int, width: int, dtype: torch.dtype, masked: bool, device: torch.device = CPU) -> dict[str, float]:
    """The relative errors of the kernels beside float64."""
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, ROWS, LENGTH, heads * width, generator=generator).to(dtype)
    dy = torch.randn(ROWS, LENGTH, heads * width, generator=generator).to(dtype)
    documents = numbers(ROWS, LENGTH).to(device) if masked else None
    tables, qkv, dy, outcomes = rotary(LENGTH, width, dtype, device, 1e4), qkv.to(device), dy.to(device), []
    for act, wide in ((rotary_attention, dtype), (usual, torch.float64)):
        x = qkv.to(wide).requires_grad_()
        y = act(x, *(t.to(wide) for t in tables), documents, heads)
        (dx,) = torch.autograd.grad(y, x, dy.to(wide))
        outcomes.append([t.double() for t in (y.detach(), *dx)])
    pairs = zip(("y", "dq", "dk", "dv"), *outcomes, strict=True)
    return {name: ((found - exact).norm() / exact.norm()).item() for name, found, exact in pairs}


def model_errors(case: str) -> dict[str, float]:
    """The relative differences of a model's loss and gradients with attention=triton and attention=sdpa.

    In "full", q, k and v of a position are neighbours, so that its strides are others.
    """
    model = disturbed(small(*case.split(), *WIDE), torch.float32)
    ids = torch.randint(VOCAB, (ROWS, 64), generator=torch.Generator().manual_seed(1))
    outcomes = []
    for attention in ("sdpa", "triton"):
        for module in (model.model, *(block.self_attn for block in model.model.layers)):
            module.triton = attention == "triton"
        loss = model(ids, ids, numbers(ROWS, 64))
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()))
        outcomes.append({"loss": loss.detach()} | dict(zip(trained, gradients, strict=True)))
    return {name: ((outcomes[1][name] - t).norm() / t.norm()).item() for name, t in outcomes[0].items()}


def checked_by_torch() -> str:
    """The result of torch's own tests of an operator: schema, autograd, shapes and strides, and tracing."""
    qkv = torch.randn(3, 1, 64, 64, requires_grad=True)
    operator = torch.ops.dlr_pretrain.rotary_attention.default
    arguments = (qkv, *rotary(64, 32, torch.float32, CPU, 1e4), numbers(1, 64), 2, [64, 4, 2])
    return " ".join(sorted(set(torch.library.opcheck(operator, arguments).values())))


def interpret() -> dict:
    """Everything that the interpreter computes."""
    cases = itertools.product(SHAPES, DTYPES, (False, True))
    found = {str(case): errors(*SHAPES[case[0]], DTYPES[case[1]][0], case[2]) for case in cases}
    with patch.object(llama, "covers", lambda x, head_width: True):
        models = {case: model_errors(case) for case in BACKBONES}
    return {"values": found, "models": models, "operator": checked_by_torch()}


@pytest.fixture(scope="module")
def outcome() -> dict:
    command, environment = (
        [sys.executable, "-m", "tests.parity.test_rotary_attention"],
        os.environ | {"TRITON_INTERPRET": "1"},
    )
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


class TestInterpreted:
    pytestmark = interpreted

    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_values_and_gradients_match_float64(self, outcome, shape, dtype, masked):
        for name, error in outcome["values"][str((shape, dtype, masked))].items():
            assert error < DTYPES[dtype][1], name

    @pytest.mark.parametrize("case", BACKBONES)
    def test_a_model_has_the_same_loss_and_gradients(self, outcome, case):
        assert outcome["models"][case]["loss"] < 1e-6
        assert {name: error for name, error in outcome["models"][case].items() if error > 1e-4} == {}

    def test_torch_finds_no_fault_in_the_operator(self, outcome):
        assert outcome["operator"] == "SUCCESS"


class Called(TorchDispatchMode):
    """The names of the operators of attention that were called."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.name():
            self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


def model_on_meta(*words: str) -> llama.Llama:
    cfg = small("cola", "attention=triton", *WIDE, *words)
    return build_model(cfg, VOCAB, torch.device("meta"), torch.bfloat16)


def on_meta(rows: int, length: int) -> Tensor:
    return torch.zeros(rows, length, dtype=torch.int64, device="meta")


@pytest.mark.parametrize(("mode", "masked"), [
    ("none", True), ("latent", False),
    *(pytest.param(*case, marks=pytest.mark.full) for case in (
        ("none", False), ("latent", True), ("block", False), ("block", True),
    )),
])  # fmt: skip
def test_each_block_calls_the_kernel_once_each_way(mode, masked, monkeypatch):
    """Also compiled without breaks. A block that keeps little calls the forward kernel again."""
    ids = on_meta(ROWS, 64)
    arguments = (ids, ids, ids) if masked else (ids, ids)
    model = model_on_meta(f"train.activation_checkpointing={mode}")
    with Called() as called:
        model(*arguments).backward()
    forward = 2 if mode == "none" else 4
    assert sorted(called.names) == ["rotary_attention"] * forward + ["rotary_attention_backward"] * 2
    backend = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model.compile_()
    model(*arguments).backward()
    modules = [module for graph in backend.graphs for module in graph.modules() if hasattr(module, "code")]
    assert any("rotary_attention" in module.code for module in modules)


@pytest.mark.parametrize(("length", "dtype"), [(96, torch.bfloat16), (576, torch.bfloat16), (64, torch.float32)])
def test_other_lengths_and_dtypes_take_the_usual_path(length, dtype):
    model = model_on_meta().to(dtype)
    with Called() as called, torch.no_grad():
        model.logits(on_meta(1, length), on_meta(1, length))
    assert not any("rotary" in name for name in called.names)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_sdpa_is_the_default(attention):
    model = build_model(small("cola", *WIDE, f"attention={attention}"), VOCAB, torch.device("meta"), torch.bfloat16)
    with Called() as called:
        model(on_meta(1, 64), on_meta(1, 64)).backward()
    assert not any("rotary" in name for name in called.names)


@pytest.mark.parametrize(("words", "said"), [
    ("train.seq_len=96", "attention=triton: needs a multiple of 64 up to 512 as train.seq_len, which is 96. Use"),
    ("train.seq_len=1024", "as train.seq_len, which is 1024"),
    ("scale.num_heads=8", "needs heads of width 32, 64, 128, as many of k and v as of q; those of scale=tiny have 8 ("),
    ("precision=fp32", "attention=triton: multiplies in bf16, not in fp32. Use attention=sdpa"),
    ("device=cpu", "attention=triton: needs a GPU. Use attention=sdpa"),
])  # fmt: skip
def test_what_the_kernel_cannot_compute_is_refused(words, said):
    with pytest.raises(ConfigError) as refused:
        small("cola", *WIDE, "attention=triton", *words.split())
    (problem,) = refused.value.problems
    assert said in str(problem)


def test_a_machine_without_triton_is_refused(monkeypatch):
    cfg: Config = small("cola", *WIDE, "attention=triton")
    assert "needs a GPU" in str(attention_problem(cfg, "cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs Triton, which is not installed" in str(attention_problem(cfg, "cuda"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(interpret()))
