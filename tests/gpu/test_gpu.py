"""Properties that only a GPU can show: ``pytest -m gpu``.

The model has the 60m shape with a small vocabulary; batches are those of the golden curves.
"""

import itertools
import math
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dlr_pretrain.cli import load
from dlr_pretrain.data import inputs_and_targets
from dlr_pretrain.models import build_model, loss
from dlr_pretrain.models.llama import attention_bias
from dlr_pretrain.models.loss import summed_cross_entropy
from dlr_pretrain.optim.optimizer import Optimizer
from dlr_pretrain.optim.schedule import merge_due
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.loop import Loop
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import new_optimizer
from dlr_pretrain.util.tensors import STATE_DTYPE
from tests.golden.regenerate import VOCAB, batches
from tests.parity import test_loss as parity
from tests.parity import test_rotary_attention as attention_parity
from tests.parity.test_optim import CHOICES, assert_same_bits, chosen, draw, updated, updates_masks_and_states
from tests.trial import trial_loop

DEVICE = torch.device("cuda", 0)
BATCH, SEQ_LEN = 8, 128
SHAPE = [
    *("scale=60m", f"scale.vocab_size={VOCAB}", "backbone=cola", "dlr=on", "data=sample", "logger=jsonl"),
    *(f"train.global_batch={BATCH}", f"train.seq_len={SEQ_LEN}", "train.micro_batch=4", "train.steps=20"),
    *("train.warmup_steps=0", "train.lr=1e-3", "eval.every=20", "compile=false", "device=cuda"),
]


def config(*overrides: str):
    given = {word.split("=")[0] for word in overrides}
    return load([*(word for word in SHAPE if word.split("=")[0] not in given), *overrides])


@pytest.fixture
def trainer(tmp_path_factory):
    """Makes a ``Loop`` on the GPU without a data pipeline; checkpoints go to a scratch folder."""
    with ExitStack() as opened:

        def make(*overrides: str) -> Loop:
            cfg, folder = config(*overrides), tmp_path_factory.mktemp("run")
            ranks = opened.enter_context(Ranks(cfg))
            return trial_loop(cfg, ranks, VOCAB, folder)

        yield make


def steps(count: int) -> list:
    return list(itertools.islice(batches(BATCH, SEQ_LEN), count))


def gradients(trainer: Loop, peaks: list[int] | None = None) -> tuple[float, torch.Tensor]:
    """The loss of the first batch as one micro-batch, and its gradients as one vector. ``peaks`` gets its bytes."""
    (batch,) = steps(1)
    before = torch.cuda.memory_allocated()  # earlier trainers may still be allocated
    torch.cuda.reset_peak_memory_stats()
    ids, targets = inputs_and_targets(*map(trainer.ranks.to_device, (batch.tokens, batch.lengths)))
    update = trainer.update
    loss = update.forward_backward([(ids, targets)], (targets >= 0).sum())
    if peaks is not None:
        peaks.append(torch.cuda.max_memory_allocated() - before)
    found = torch.cat([g.flatten().double() for g in update.optimizer.collect()])
    update.optimizer.clear()
    return loss.item(), found


@pytest.mark.parametrize(("precision", "loss_bound", "gradient_bound"), [
    ("fp32", 1e-5, 1e-4),  # another order of sums (3e-7 on a CPU)
    ("bf16", 2e-3, 3e-2),  # fused kernels keep in fp32 what eager code rounds to 8 bits (4e-3 on a CPU)
    ("bf16_mixed", 2e-3, 3e-2),
])  # fmt: skip
@pytest.mark.parametrize("backbone", ["lowrank", "cola", "lost", "lax", "cola_lax", "full", "sltrain", "lora"])
def test_the_compiled_step_equals_the_eager_one(trainer, backbone, precision, loss_bound, gradient_bound):
    """The loss agrees to a relative bound, and the gradient to a share of its norm. Without the residual, the gradient
    differs by 1.2 of its norm."""
    dense = backbone in ("full", "sltrain", "lora")
    choice = ("scale.num_layers=2", f"precision={precision}", f"backbone={backbone}", f"dlr={'off' if dense else 'on'}")
    eager, compiled = (gradients(trainer(*choice, f"compile={c}")) for c in ("false", "true"))
    assert compiled[0] == pytest.approx(eager[0], rel=loss_bound)
    assert (compiled[1] - eager[1]).norm() < gradient_bound * eager[1].norm()
    if not dense:
        without = gradients(trainer(*choice[:3], "dlr=off", "compile=true"))
        assert (without[1] - eager[1]).norm() > 0.5 * eager[1].norm()


@pytest.mark.parametrize("words", [
    (), ("precision=bf16_mixed",), ("precision=bf16_sr", "optimizer=adamw_8bit"), ("optimizer=muon",),
    ("train.activation_checkpointing=latent",), ("data.mask_documents=true",), ("parallel=fsdp",),
    ("backbone=cola_lax",), ("backbone=relora", "dlr=off", "backbone.merge_every=4", "backbone.restart_warmup=2"),
    ("attention=triton",), ("attention=triton", "data.mask_documents=true"),
], ids=lambda words: " ".join(words) or "cola")  # fmt: skip
def test_updates_by_graphs_are_updates(trainer, words):
    """Losses of updates with four micro-batches agree to the rounding of sums in the order of arrival."""
    if "optimizer=adamw_8bit" in words:
        pytest.importorskip("torchao")
    losses = {}
    for graphs in ("true", "false"):
        loop = trainer(*words, "train.micro_batch=2", "scale.num_layers=2", "compile=true", f"cuda_graphs={graphs}")
        update = loop.update
        separator = 1 if "data.mask_documents=true" in words else None
        given = [replace(batch, separator=separator) for batch in steps(8)]
        losses[graphs] = []
        for index, batch in enumerate(given):
            losses[graphs].append(update(batch, index, 1e-3).loss.item())
            if merge_due(loop.cfg, index + 1):
                update.merge(index + 1)
        if graphs == "true":
            assert update.compute.failure is None and len(update.compute.recordings) == 3
            update.close()
    assert losses["true"][0] == losses["false"][0]
    assert losses["true"] == pytest.approx(losses["false"], rel=2e-3)


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("backbone", ["cola", "lost", "cola_lax"])
def test_kept_latents_give_the_same_gradients(trainer, backbone, compiled):
    """They take less memory: the activations of 8 x 128 positions of the 60m shape have a few hundred megabytes."""
    found, peaks = {}, {"none": [], "latent": [], "block": []}
    for kept in peaks:
        a = trainer(f"backbone={backbone}", f"compile={compiled}", f"train.activation_checkpointing={kept}")
        found[kept] = gradients(a)
        gradients(a, peaks[kept])
        del a
    for kept in ("latent", "block"):
        assert (found[kept][1] - found["none"][1]).norm() < 3e-2 * found["none"][1].norm(), kept
    assert peaks["block"] < peaks["none"] and peaks["latent"] < peaks["none"], peaks


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [32, 64, 128])
def test_attention_in_one_kernel_has_the_errors_of_bf16(width, masked):
    """Eight times those of fp16, which has three bits more: 5e-4 in Triton's interpreter."""
    for name, error in attention_parity.errors(3, width, torch.bfloat16, masked, DEVICE).items():
        assert error < 6e-3, name


@pytest.mark.parametrize("kept", ["none", "latent", "block"])
@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("backbone", ["cola", "full"])
def test_attention_in_one_kernel_gives_the_gradients_of_torchs(trainer, backbone, compiled, kept):
    if (backbone, kept) == ("full", "latent"):
        pytest.skip("a dense layer has no latents")
    words = ("dlr=off", f"backbone={backbone}", f"compile={compiled}", f"train.activation_checkpointing={kept}")
    ours, torchs = (gradients(trainer(*words, f"attention={how}")) for how in ("triton", "sdpa"))
    assert ours[0] == pytest.approx(torchs[0], rel=2e-3)
    assert (ours[1] - torchs[1]).norm() < 3e-2 * torchs[1].norm()


@pytest.mark.parametrize("precision", ["bf16", "bf16_mixed"])
@pytest.mark.parametrize("words", [
    ("optimizer=adamw",), ("optimizer=adamw_foreach",), ("optimizer=adamw_8bit",), ("optimizer=muon",),
    *((f"optimizer={name}", "backbone=full", "dlr=off", "optimizer.rank=64", "optimizer.refresh_every=4")
      for name in ("galore", "fira")),
    ("optimizer=loro", "backbone=lowrank", "dlr=off", "backbone.init=xavier", "optimizer.exact_every=8"),
], ids=lambda words: words[0])  # fmt: skip
def test_every_optimizer_trains(trainer, words, precision):
    if "optimizer=adamw_8bit" in words:
        pytest.importorskip("torchao")
    update = trainer(*words, f"precision={precision}").update
    losses = [update(batch, index, 1e-3).loss.item() for index, batch in enumerate(steps(10))]
    assert losses[-1] < losses[0] - 0.1


def test_the_count_of_targets_is_not_rounded_to_bf16():
    """The reciprocal of this count would be off by 0.3 %."""
    x = torch.randn(512, 64, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    weight, targets = torch.randn_like(x[:100]).detach(), torch.randint(100, (512,), device=DEVICE)

    def norm(count: float) -> float:
        x.grad = None
        (summed_cross_entropy(x, weight, targets) / torch.tensor(count, device=DEVICE)).backward()
        return x.grad.double().norm().item()

    assert norm(104_531.0) * 104_531 == pytest.approx(norm(1.0), rel=5e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_pieces_of_the_loss_are_summed_in_fp32(monkeypatch, dtype):
    """In bf16 the product itself forms the sum, in fp32; a sum in bf16 would be off by a factor more."""
    monkeypatch.setattr(loss, "ROWS", 64)
    x, weight = (torch.randn(n, 64, device=DEVICE, dtype=torch.float64).to(dtype) for n in (2048, 128))
    targets = torch.randint(128, (2048,), device=DEVICE)
    exact = parity.gradients(parity.unfused, x.double(), weight.double(), targets)
    bound = {torch.bfloat16: 6e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for found, wanted in zip(parity.gradients(summed_cross_entropy, x, weight, targets), exact, strict=True):
        assert parity.error(found, wanted) < bound


@pytest.mark.parametrize("words", [
    ("precision=fp32",), ("precision=bf16",), ("precision=bf16_mixed",), ("precision=bf16_sr",),
    ("precision=bf16_sr", "optimizer=adamw_8bit"),
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_the_host_waits_for_nothing_in_a_step(trainer, words, compiled):
    """A step makes no synchronising call, and is enqueued while the GPU is still busy with earlier work.

    The second check is stricter: torch does not report copies from pageable memory, for which the driver waits. It
    covers updates of up to about a thousand launches, which a stream has room for; with more, the host waits for the
    queue itself. Stochastic rounding in eager code makes two to four thousand.
    """
    if "optimizer=adamw_8bit" in words:
        pytest.importorskip("torchao")
    few = compiled == "true" or "precision=bf16_sr" not in words
    a = trainer("scale.num_layers=1", *{"train.micro_batch=8", *words}, f"compile={compiled}")
    warm, measured = steps(4)[:3], steps(4)[3]
    for index, batch in enumerate(warm):
        a.pending.push(index + 1, a.update(batch, index, 1e-3), batch)
    list(a.pending.ready(lambda: True))
    torch.cuda.synchronize()
    if few:
        torch.cuda._sleep(4_000_000_000)  # cycles: about two seconds
    slept = torch.cuda.Event()
    slept.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        a.pending.push(4, a.update(measured, 3, 1e-3), measured)
        waited = slept.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not (few and waited)
    ((step, found, _),) = a.pending.ready(lambda: True)
    assert step == 4 and math.isfinite(found.loss) and found.real_tokens == BATCH * SEQ_LEN
    assert found.skipped == found.ends == found.stops == 0


def test_gradients_of_masked_documents_are_finite(trainer):
    """At 64 positions beyond a multiple of 128, with scores near -120, cuDNN's attention is NaN: pytorch #196678."""
    length, width = 192, 64
    trainer("data.mask_documents=true", "eval.packing=packed", f"train.seq_len={length}")
    shape = (1, 1, length, width)
    q, k, v = (0.1 * torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(width)
    for given in (q, k, v):
        given.requires_grad_()
    bias = attention_bias(torch.zeros(1, length, dtype=torch.int32, device=DEVICE), torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(q, k, v, bias).sum().backward()
    assert all(given.grad.isfinite().all() for given in (q, k, v))


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_a_residual_goes_out_and_in_bit_for_bit(precision, compiled):
    """W and B equal those on a CPU."""
    cfg = config(f"precision={precision}", f"compile={compiled}")
    models = [build_model(cfg, VOCAB, torch.device(device), STATE_DTYPE[precision]) for device in ("cuda", "cpu")]
    start = {name: p.detach().clone() for name, p in models[1].named_parameters()}
    on_gpu, on_cpu = (new_optimizer(cfg, model) for model in models)
    for _ in range(2):
        w = {name: p.cpu() for name, p in on_gpu.working.items()}
        changed = {name for name in w if not torch.equal(w[name], start[name].to(w[name].dtype))}
        assert changed == {name for name in w if name.endswith(".b")}
        assert all(torch.equal(w[name], p) for name, p in on_cpu.working.items())
        with on_gpu.taken_out() as values:
            assert all(torch.equal(values[name].cpu(), b) for name, b in start.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_mixed"])
def test_a_checkpoint_restores_the_state_bit_for_bit(trainer, tmp_path, precision):
    """After saving and loading, equal gradients make equal updates (a backward pass may not be repeatable)."""
    one, two = trainer(f"precision={precision}"), trainer(f"precision={precision}", "seed=7")
    for index, batch in enumerate(steps(3)):
        one.update(batch, index, 1e-3)
    one.state.step = 3
    one.save()
    one.update(next(iter(steps(1))), 3, 1e-3)  # the saving thread writes a copy
    one.saver.wait()
    for trained in (one, two):
        trained.resume(checkpoint.load(one.saver.root / "step_00000003"))
    optimizers = [trained.update.optimizer for trained in (one, two)]

    def everything(optimizer: Optimizer) -> dict[str, torch.Tensor]:
        working = {f"working {name}": p.detach().clone() for name, p in optimizer.working.items()}
        with optimizer.taken_out() as values:
            values = {name: value.detach().clone() for name, value in values.items()}
        return working | values | optimizer.state_tensors()

    assert_same_bits(*map(everything, optimizers))
    for k in range(2):
        for p, q in zip(*(optimizer.working.values() for optimizer in optimizers), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.collect()
            optimizer.update(1e-3, skip=torch.zeros((), device=DEVICE), index=k)
        assert_same_bits(*map(everything, optimizers))


def test_a_run_reports_every_step_at_most_one_late(trainer):
    records, seen = [], []
    a = trainer("precision=bf16", "train.steps=20")
    a.sinks = [lambda record: (seen.append((record["step"], a.state.step)), records.append(record))]
    torch.cuda.reset_peak_memory_stats()
    twenty = iter(steps(20))
    a.fit(SimpleNamespace(take=lambda *_: next(twenty)))
    assert [step for step, _ in seen] == list(range(1, 21))
    assert all(0 <= at - step <= 1 for step, at in seen) and any(at > step for step, at in seen)
    state = sum(p.nbytes for p in a.update.model.parameters()) / 1e9
    assert 3 * state < records[-1]["perf/max_memory_gb"] == torch.cuda.max_memory_allocated() / 1e9
    assert records[9]["perf/tokens_per_second"] is None and records[-1]["perf/tokens_per_second"] > 0
    assert (records[-1]["perf/mfu"] is None) == (a.meter.peak is None)
    assert records[-1]["train/loss"] < records[0]["train/loss"]


# ----------------------------------------------------------------------------------------------------
# Optimizers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", CHOICES)
def test_updates_masks_and_states(name, dtype):
    updates_masks_and_states(chosen(name), dtype, "cuda")


@pytest.mark.parametrize("name", [name for name in CHOICES if name != "adamw_8bit"])  # which computes in fp32
def test_a_gpu_takes_the_steps_of_the_cpu(name):
    """Two updates in fp64 agree. GaLore's next projector and LORO's exact step, whose signs may differ, come later."""
    optimizers = [Optimizer(chosen(name), draw(torch.float64, device=device)) for device in ("cuda", "cpu")]
    for optimizer in optimizers:
        updated(optimizer, range(2))
    gpu, cpu = ({name: p for name, (p, *_) in optimizer.targets.items()} for optimizer in optimizers)
    accuracy = 1e-3 if name == "muon" else 1e-9  # Muon iterates in bf16
    for full, p in cpu.items():
        torch.testing.assert_close(gpu[full].detach().cpu(), p.detach(), rtol=0, atol=accuracy)
