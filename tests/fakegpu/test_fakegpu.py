"""The project's updates on a CUDA device that does nothing: torch, inductor and Triton are real, kernels are logged.

``FAKEGPU=<launcher> pytest -m fakegpu`` runs them with a CUDA build of torch; ``<launcher> COMMAND ...`` runs a command
on such a device. The launcher is not a part of this project: 55 KB of C, which only its developers need and only these
tests use. What such a device shows are waits, launches, memory and graph breaks; values and speed need a GPU.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from benchmarks.page import collected, page
from dlr_pretrain.analysis.plan import COMPILED
from tests.conftest import ROOT, killed_with_its_group

LAUNCHER = os.environ.get("FAKEGPU", "")
MISSING = {
    "FAKEGPU names no launcher of a stand-in CUDA device": not LAUNCHER,
    "torch is no CUDA build": torch.version.cuda is None,
    "Triton finds no gcc": shutil.which("gcc") is None,
}
pytestmark = [
    pytest.mark.full,
    pytest.mark.fakegpu,
    *(pytest.mark.skipif(missing, reason=reason) for reason, missing in MISSING.items()),
]

ROWS, LENGTH = 16, 256
SHAPE = ["scale=60m", "scale.num_layers=2", f"train.global_batch={ROWS}"]
BATCH = [4 * ROWS * (LENGTH + 1), 4 * ROWS, 4 * 8]  # bytes of tokens, lengths and counts
LAUNCHED = ("compile=true", "cuda_graphs=false")  # one by one, to count them
COMPILED_COLA = (*LAUNCHED, "backbone=cola")
DLR_LAUNCHES = {"bf16": 3, "bf16_mixed": 1}  # that DLR adds to an update: docs/concepts.md says why


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    """``update("dlr=on", ranks=2)``: what ``update.py`` prints, for each rank. The same words run once."""
    folder = tmp_path_factory.mktemp("fakegpu")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # what is tuned here is right nowhere else
        "NCCL_SOCKET_IFNAME": "lo",
    }

    @cache
    def run(*words: str, ranks: int = 1) -> list[dict]:
        given = {word.split("=")[0] for word in words}
        words = (*(word for word in SHAPE if word.split("=")[0] not in given), *words)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        running = []
        for rank in range(ranks):
            job = {"FAKECUDA_LOG": folder / f"{len(list(folder.iterdir()))}.log", "FAKECUDA_DEVICES": ranks}
            if ranks > 1:
                job |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
                job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            Path(job["FAKECUDA_LOG"]).touch()
            command = [LAUNCHER, sys.executable, str(Path(__file__).with_name("update.py")), *words]
            started = environment | {name: str(value) for name, value in job.items()}
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            running.append(subprocess.Popen(command, cwd=ROOT, env=started, **pipes))
        said = [each.communicate() for each in running]
        assert not any(each.returncode for each in running), "\n\n".join(error[-3000:] for _, error in said)
        return [json.loads(output.splitlines()[-1]) for output, _ in said]

    return run


@pytest.fixture
def rehearsal(tmp_path):
    """A slice's command and environment, for ``Popen``. PEERS_DIR and TF448 are the caller's."""
    given = {"GPU_REHEARSAL": "1", "PYTHON": sys.executable, "TMPDIR": str(tmp_path), "PACK": str(tmp_path / "none")}
    given |= {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1", "FAKECUDA_COPY_MAX": "0", "FAKECUDA_LOG": str(tmp_path / "log")}
    given |= {"TOKENS": "", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    environment = {"PEERS_DIR": str(tmp_path / "none")} | os.environ | given
    return lambda name: {"args": [LAUNCHER, ROOT / "benchmarks" / "gpu.sh", tmp_path / "out", name], "env": environment}


NOT_MEASURED = r"^\| `(\S+)` \|"  # a row of the page


def shown(out: Path, name: str) -> str:
    """The part of the results' page on a slice."""
    (own,) = re.findall(rf"^## {name}\. .*?(?=^## |\Z)", page(list(collected(out))), flags=re.MULTILINE | re.DOTALL)
    return own


@pytest.mark.parametrize("name", "gefhbd")
def test_a_slice_of_the_gpu_programme_runs_to_its_last_line(tmp_path, rehearsal, name):
    """Small; the same command leaves out what has a result, and the page shows all but other code that is not here."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    first, again = (subprocess.run(**rehearsal(name), **output) for _ in range(2))
    assert first.returncode == 0, first.stdout[-3000:]
    assert again.returncode == 0 and "exit code" not in again.stdout
    own, others = shown(tmp_path / "out", name), ["cola-60m", "cola-1b", "dlr-60m", "dlr-1b"]
    missing = others if name == "b" and "PEERS_DIR" not in os.environ else []
    assert re.findall(NOT_MEASURED, own, flags=re.MULTILINE) == missing
    assert not re.search("unchecked|not measured: ", own)  # the latter is a failed step, with its error


def test_a_slice_killed_in_its_first_rounds_goes_on(tmp_path, rehearsal):
    """All results are whole at the kill, and the same command completes them."""
    result, own = tmp_path / "out" / "g" / "few-60m.json", rehearsal("g")
    killed = subprocess.Popen(**own, stdin=subprocess.PIPE, start_new_session=True)
    while not result.exists():  # it is first written after the first round
        assert killed.poll() is None
        time.sleep(0.01)
    killed_with_its_group(killed)
    assert "unchecked" in shown(tmp_path / "out", "g")
    assert subprocess.run(**own).returncode == 0
    assert not re.search(f"unchecked|not measured: |{NOT_MEASURED}", shown(tmp_path / "out", "g"), flags=re.MULTILINE)


@pytest.mark.parametrize("words", [
    ("precision=fp32",),
    ("precision=bf16", "data.mask_documents=true"),
    ("precision=bf16_mixed", "train.micro_batch=4"),
    ("precision=bf16_sr",),
    ("precision=bf16", "train.micro_batch=4"),
    ("precision=bf16", "optimizer=adamw_8bit"),
    ("precision=bf16_sr", "optimizer=adamw_8bit"),
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("how", [("compile=false",), LAUNCHED, ("compile=true",)], ids=" ".join)
def test_the_host_waits_for_nothing_and_sends_the_batch_alone(update, words, how):
    if "optimizer=adamw_8bit" in words:
        pytest.importorskip("torchao")
    (found,) = update("backbone=cola", "dlr=on", *how, *words)
    assert found["illegal"] == []
    assert found["waits"] == []
    assert found["to_device"] == BATCH
    assert found["graph_breaks"] == {} and found["recompiled"] == 0 and found["uncached"] == 0


@pytest.mark.parametrize("words", [
    ("optimizer=adamw_foreach",),
    ("optimizer=muon",),
    ("optimizer=loro", "backbone=lowrank", "backbone.init=xavier", "optimizer.exact_every=100"),
], ids=lambda words: words[0])  # fmt: skip
def test_other_optimizers_wait_once(update, words):
    (found,) = update("backbone=cola", "dlr=off", "compile=false", *words)
    assert len([wait for wait in found["waits"] if "optim/optimizer.py" in wait]) == 1, found["waits"]
    assert len([wait for wait in found["waits"] if "synchronizing" in wait]) == 1, found["waits"]


@pytest.mark.parametrize("precision", DLR_LAUNCHES)
def test_dlr_adds_the_launches_that_the_docs_say_and_no_product(update, precision):
    (on,), (off,) = (update(*COMPILED_COLA, f"precision={precision}", f"dlr={dlr}") for dlr in ("on", "off"))
    assert on["products"] == off["products"] > 0 and on["triton"] > 0
    assert on["launches"] - off["launches"] == DLR_LAUNCHES[precision]


@pytest.mark.parametrize(
    "words", [(), ("data.mask_documents=true",), ("train.activation_checkpointing=latent",)], ids=" ".join
)
def test_attention_in_one_kernel_saves_launches(update, words):
    """Four or more a block: of the rotation's gradients, and of torch's attention around its two kernels."""
    (ours,), (torchs,) = (update(*COMPILED_COLA, "dlr=on", f"attention={how}", *words) for how in ("triton", "sdpa"))
    assert ours["waits"] == [] and ours["graph_breaks"] == {} and ours["recompiled"] == 0
    assert ours["products"] == torchs["products"] and ours["peak"] <= torchs["peak"]
    assert torchs["launches"] - ours["launches"] >= 2 * 4


@pytest.mark.parametrize("words", [
    *((f"backbone={name}",) for name in ("lowrank", "cola", "lost", "lax", "cola_lax", "full", "lora")),
    ("precision=bf16_mixed", "backbone=cola", "train.micro_batch=4"),
    ("precision=fp32", "backbone=sltrain"),
    ("backbone=cola", "train.activation_checkpointing=latent"),
], ids=" ".join)  # fmt: skip
def test_eager_code_takes_the_memory_of_the_plan(update, words):
    dense = {"backbone=full", "backbone=sltrain", "backbone=lora"} & set(words)
    (found,) = update("compile=false", "dlr=off" if dense else "dlr=on", *words)
    assert found["peak"] == pytest.approx(found["planned"], rel=0.05)


@pytest.mark.parametrize(("words", "most"), [
    (("scale=60m", "scale.num_layers=8"), 70),
    (("scale=1b", "scale.num_layers=24"), 130),
    (("scale=1b", "scale.num_layers=24", f"train.global_batch={4 * ROWS}", f"train.micro_batch={ROWS}"), 145),
    (("scale=1b", "scale.num_layers=24", "parallel=fsdp"), 420),
    (("scale=1b", "train.activation_checkpointing=latent"), 130),
    (("scale=1b", "data.mask_documents=true"), 130),
], ids=lambda given: " ".join(given) if isinstance(given, tuple) else None)  # fmt: skip
def test_a_graph_replaces_the_launches_of_a_micro_batch(update, words, most):
    """An update launches graphs and its optimizer. Beside a graph, evaluations have the memory that the plan counts."""
    (graphs,), (launched,) = (update("backbone=cola", "dlr=on", *how, *words) for how in (("compile=true",), LAUNCHED))
    assert graphs["illegal"] == graphs["waits"] == []
    assert graphs["graphs"] == (4 if f"train.micro_batch={ROWS}" in words else 1)
    assert graphs["launches"] <= most < launched["launches"]
    assert (
        graphs["reserved"] - launched["reserved"] < graphs["planned"] - launched["planned"] + 0.03 * graphs["planned"]
    )


@pytest.mark.parametrize(("parallel", "micro_batch"), [("ddp", 4), ("fsdp", 4), ("hsdp", 8)])
def test_ranks_replay_graphs_with_their_collectives(update, parallel, micro_batch):
    words = [f"parallel={parallel}", f"train.micro_batch={micro_batch}", "train.global_batch=16"]
    words += ["parallel.shards=1"] if parallel == "hsdp" else []
    for found in update("backbone=cola", "dlr=on", "compile=true", *words, ranks=2):
        assert found["illegal"] == found["waits"] == []
        assert found["graphs"] == 8 // micro_batch
        assert found["collectives"] == {"ddp": 2, "fsdp": 3, "hsdp": 3}[parallel]  # counts, loss; FSDP's norm


@pytest.mark.parametrize("how", [("compile=false",), LAUNCHED], ids=" ".join)
@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4)])
def test_several_ranks(update, parallel, ranks, how):
    """No rank waits; each sums the counts and the loss, and the gradients of each block, or FSDP's rows of them.

    The plan of FSDP is a bound: it counts all that may be gathered at a time. HSDP has two copies of two shards.
    """
    least, most = (0.95, 1.05) if parallel == "ddp" else (0.85, 1.0)
    words = (f"parallel={parallel}", "train.micro_batch=4", f"train.global_batch={8 * ranks}")
    words += ("parallel.shards=2",) if parallel == "hsdp" else ()
    for found in update("backbone=cola", "dlr=on", *how, *words, ranks=ranks):
        assert found["waits"] == []
        assert found["graph_breaks"] == {} and found["recompiled"] == 0
        assert found["collectives"] > 2
        # the counts; under FSDP embedding and head, the first block, and the second before the first computes
        assert found["ahead"] == (1 if parallel == "ddp" else 4)
        if how == ("compile=false",):
            assert least * found["planned"] < found["peak"] < most * found["planned"]


@pytest.mark.parametrize(("words", "share"), [
    (("scale=60m", "scale.num_layers=8", "train.global_batch=64"), 0.75),
    (("scale=1b", "scale.num_layers=24", "train.global_batch=32", "train.micro_batch=16"), 0.82),
], ids=["60m", "1b"])  # fmt: skip
def test_compiled_code_takes_the_share_that_the_plan_names(update, words, share):
    assert f" {share} " in COMPILED
    (found,) = update(*COMPILED_COLA, "dlr=on", *words)
    assert found["peak"] / found["planned"] == pytest.approx(share, abs=0.02)
