"""Packed rows, sharded steps, memory, profiles, exports, the doctor and the benchmarks on a GPU."""

import gzip
import itertools
import json
import subprocess
import sys

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.protocol import warm_up_products
from dlr_pretrain.cli import load
from dlr_pretrain.data.packing import separated
from dlr_pretrain.data.tokenizer import EOS
from dlr_pretrain.deploy.export import open_folder
from dlr_pretrain.models import build_model
from dlr_pretrain.models.residual import add_
from dlr_pretrain.train.micro_batch import planned_memory
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import folded
from tests.conftest import ROOT, saved
from tests.deploy.models import exported, of_kind, tokenizer_of
from tests.golden.regenerate import VOCAB, batches
from tests.gpu.test_gpu import BATCH, SEQ_LEN, config
from tests.trial import random_batch, trial


@pytest.mark.parametrize("seq_len", [96, 61])  # 61 is not a multiple of the kernels' alignment
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_documents_of_a_row_are_what_they_are_alone(dtype, bound, compiled, seq_len):
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run with packed rows
    cfg = load(["scale=60m", "scale.vocab_size=500", "backbone=cola", "dlr=on", "data=sample", "logger=jsonl"])
    model = build_model(cfg, 500, torch.device("cuda"), dtype)
    ids = torch.randint(3, 500, (4, seq_len), device="cuda")
    ids[:, [7, 8, 40]] = EOS
    inputs = separated(ids, ids, EOS)
    add_(model.state_dict(), model, cfg.dlr)  # W, which the model multiplies by
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(50)
    with torch.no_grad():
        whole = model.logits(ids, inputs[2]).float()
        for first, end in ((0, 8), (8, 9), (9, 41), (41, seq_len)):
            alone = model.logits(ids[:, first:end].contiguous()).float()
            assert (whole[:, first:end] - alone).norm() < bound * alone.norm()
    eager = model(*inputs)
    eager.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    if compiled:
        model.compile_()
        loss = model(*inputs)
        loss.backward()
        assert abs(loss.item() - eager.item()) < bound * abs(eager.item())
        torch._dynamo.reset()


@pytest.mark.parametrize("backbone", ["lowrank", "cola_lax"])
def test_logits_are_those_of_the_cpu(tmp_path, backbone):
    spiece = tokenizer_of(tmp_path / "tokenizer", ["a few words of one text, in two lines"] * 20, pieces=40)
    folder = exported(tmp_path / "folded", spiece, of_kind(backbone))
    model, _ = open_folder(folder, torch.float32)
    ids = torch.randint(3, 90, (20, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        found = model.cuda()(input_ids=ids.cuda()).logits.cpu()
    assert (found - wanted).abs().max() < 1e-3 * wanted.std()


def losses(*words: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of eight steps, and the folded weights."""
    cfg = config("train.steps=8", *words)
    with Ranks(cfg) as ranks:
        updates = trial(cfg, ranks, VOCAB)
        some = itertools.islice(batches(BATCH, SEQ_LEN), 8)
        found = [updates(batch, index, 1e-3).loss for index, batch in enumerate(some)]
        return [loss.item() for loss in found], folded(cfg, updates.model, updates.optimizer, keep=True)


@pytest.mark.parametrize("compiled", ["compile=false", "compile=true"])
@pytest.mark.parametrize("words", [
    ("precision=fp32",),
    ("precision=bf16_mixed", "train.activation_checkpointing=latent"),
    ("precision=bf16",),
], ids=lambda words: words[0])  # fmt: skip
def test_a_sharded_rank_trains_as_a_whole_one_does(words, compiled):
    whole, a = losses(*words, compiled)
    sharded, b = losses(*words, compiled, "parallel=fsdp")
    assert sharded == pytest.approx(whole, rel=1e-4 if words[0] == "precision=fp32" else 5e-3)
    assert sharded[-1] < sharded[0] - 0.1 and a.keys() == b.keys()
    assert all(a[name].dtype == b[name].dtype and a[name].shape == b[name].shape for name in a)


SEVEN = ("scale=7b", "backbone=cola", "dlr=on", "train.activation_checkpointing=latent", "train.global_batch=8")
EIGHT_BIT = ("optimizer=adamw_8bit",)


@pytest.mark.parametrize(("words", "at_most"), [
    ((), 25.5e9),
    (EIGHT_BIT, 20e9),
    ((*EIGHT_BIT, "precision=bf16_sr"), 20e9),
], ids=["adamw", "8bit", "8bit_sr"])  # fmt: skip
def test_7b_takes_the_planned_memory(words, at_most):
    if torch.cuda.get_device_properties(0).total_memory < at_most + 4e9:
        pytest.skip("a smaller GPU")
    cfg = load([*SEVEN, *words, "data=sample", "logger=jsonl", "compile=false"])
    with Ranks(cfg) as ranks:
        ranks.use_device()
        warm_up_products(ranks.device)
        before = torch.cuda.memory_allocated()
        updates = trial(cfg, ranks, 32_000)
        batch = random_batch(cfg, ranks, 32_000)
        for index in range(4):
            if index == 2:
                torch.cuda.reset_peak_memory_stats()
            updates(batch, index, 1e-4)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < at_most
    assert peak == pytest.approx(planned_memory(cfg, 32_000, 1), rel=0.05)


def test_the_doctor_finds_this_machine_sound(tmp_path):
    words = ["scale=60m", "backbone=cola", "dlr=on", "data=sample", "logger=jsonl", "device=cuda", "compile=false",
             "train.global_batch=64"]  # fmt: skip
    command = [sys.executable, "scripts/doctor.py", *words, f"run.root={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name(0) in " ".join(done.stdout.split())
    assert list(tmp_path.iterdir()) == []


COMMON = ("backbone=cola", "dlr=on", "device=cuda", "train.steps=8", "checkpoint.every=100")


@pytest.fixture
def deterministic_kernels():
    """Kernels that add in a fixed order; torch warns of operations that have none."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("default::UserWarning")
@pytest.mark.usefixtures("no_export", "deterministic_kernels")
@pytest.mark.parametrize("how", [("precision=bf16",), ("precision=bf16_mixed", "compile=true")], ids=" ".join)
def test_a_profile_does_not_change_training(train, tmp_path, how):
    plain = train(tmp_path / "plain", *COMMON, *how)
    looked = train(tmp_path / "looked", *COMMON, *how, "profile=on", "profile.start=3")
    a, b = (saved(folder / "checkpoints" / "step_00000008") for folder in (plain, looked))
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    (trace,) = (looked / "profile").iterdir()
    text = gzip.decompress(trace.read_bytes()).decode()
    assert all(f'"{part}"' in text for part in ("forward", "backward", "optimizer", "kernel"))


@pytest.mark.parametrize("part", ["step", "memory"])
def test_a_step_is_measured_on_the_gpu(part, tmp_path):
    given = ["scale=60m", "scale.num_layers=2", "backbone=cola", "dlr=on", "compile=false", "device=cuda"]
    given += ["train.global_batch=8", "train.micro_batch=4", "--variant", "dlr=on", "--rounds", "6"]
    assert main([part, *given, "--json", f"{tmp_path}/found.json"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    if part == "memory":
        assert found["variants"][0]["peak"] == pytest.approx(found["variants"][0]["plan"], rel=0.05)
    else:
        assert found["variants"][0]["peak_flops"]["measured"] > 1e13
        assert found["device"] == torch.cuda.get_device_name()
