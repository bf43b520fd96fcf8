"""``update.py KEY=VALUE ...``: updates of a new model on a stand-in CUDA device; prints what a steady one did, as JSON.

waits           calls for which the host waits for the device: as torch reports them, with their line, and what the
                device saw of streams, events and unpinned copies
to_device       bytes of each copy from the host
illegal         calls within a recording that a CUDA graph does not allow, in all updates
launches        kernels, products, copies, fills, collectives and graphs
triton, products, collectives     of these, by kind; triton_bytes: read and written by the Triton kernels
ahead           collectives before the first product or graph
peak, planned   bytes: of the device's allocator without the workspaces of products, and of the plan
reserved        bytes that the allocator holds, workspaces included
graph_breaks    of all updates; recompiled: graphs that were compiled after the first update
uncached        graphs that the compiler does not keep for a later start
host_ms         the host's processor time, of all its threads: the least of some later updates
"""

import ctypes
import json
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch._dynamo.utils import counters  # torch has no public count of graph breaks
from torch._inductor.runtime.triton_heuristics import CachingAutotuner  # nor of the bytes of a Triton kernel

from benchmarks.protocol import warm_up_products
from dlr_pretrain.cli import load
from dlr_pretrain.data import Batch
from dlr_pretrain.train import recorded
from dlr_pretrain.train.micro_batch import planned_memory
from dlr_pretrain.train.parallel import without_backward
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.state import new_model
from dlr_pretrain.train.update import Update, to_host
from tests.trial import random_batch, trial

TIMED = 10  # further updates, for host_ms
STEADY = 3  # the update that is reported: compiled, recorded, and with the optimizer's state
LAUNCHES = {"K": "kernels", "T": "triton", "G": "products", "N": "collectives", "MEMSET": "fills", "C": "copies"}
LAUNCHES |= {"GRAPH": "graphs"}  # whose kernels do not count


class TritonBytes:
    """Sums the bytes of the tensors that Triton kernels are given; what is changed in place counts twice."""

    def __init__(self):
        self.total, self.launch = 0, CachingAutotuner.run
        CachingAutotuner.run = lambda kernel, *args, **options: self.run(kernel, *args, **options)

    def stop(self) -> None:
        CachingAutotuner.run = self.launch

    def run(self, kernel: CachingAutotuner, *args, **options):
        for name, value in zip(kernel.fn.arg_names, args, strict=False):
            if isinstance(value, torch.Tensor):
                self.total += value.nbytes * (2 if name.startswith("in_out") else 1)
        return self.launch(kernel, *args, **options)


def mark(text: str) -> None:
    """Write a line to the device's log, and all that was logged before it."""
    ctypes.CDLL(None).fakecuda_mark(text.encode())


def logged(path: Path) -> tuple[list[list[str]], list[str]]:
    """The fields of each line of the device's log between the marks of the steady update, and all illegal calls."""
    lines = path.read_text(errors="replace").split("\n")
    steady = [line.split("\t") for line in lines[lines.index("# steady") + 1 : lines.index("# end")]]
    return steady, [line for line in lines if line.startswith("ILLEGAL")]


@torch.no_grad()
def evaluate(update: Update, batch: Batch) -> None:
    """One forward pass, as an evaluation does: beside a recorded micro-batch it needs memory of its own."""
    with without_backward(update.model):
        update.model(*(rows[: update.micro_batch] for rows in update.inputs(batch)))


def main(words: list[str]) -> dict:
    cfg = load([*words, "data=sample", "logger=jsonl", "device=cuda"], int(os.environ.get("WORLD_SIZE", "1")))
    vocab_size, moved = cfg.planned_vocab_size, TritonBytes()
    recorded.difference = lambda *_: None  # the device computes no values
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN itself needs a device; flash attention is torch's own
    with Ranks(cfg) as ranks:
        ranks.use_device()
        warm_up_products(ranks.device)
        workspaces = torch.cuda.memory_allocated()
        model = new_model(cfg, ranks, vocab_size, initialize=False)
        update, pending = trial(cfg, ranks, vocab_size, model), []
        batch, graphs = random_batch(cfg, ranks, vocab_size), []
        for index in range(STEADY):
            pending.append(to_host(update(batch, index, 1e-3)))
            graphs.append(counters["stats"]["unique_graphs"])
        moved.total = 0
        torch.cuda.reset_peak_memory_stats()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            mark("steady")
            pending.append(to_host(update(batch, STEADY, 1e-3)))
            mark("end")
            torch.cuda.set_sync_debug_mode("default")
        peak = torch.cuda.max_memory_allocated() - workspaces
        planned = planned_memory(cfg, vocab_size, ranks.world_size)
        moved.stop()  # it would take a twentieth of the time
        seconds = []
        for index in range(STEADY + 1, STEADY + 1 + TIMED):
            start = time.process_time()
            pending.append(to_host(update(batch, index, 1e-3)))
            seconds.append(time.process_time() - start)
        recompiled = counters["stats"]["unique_graphs"] - graphs[0]
        evaluate(update, batch)
        ranks.gather(None)  # all ranks have ended
    lines, illegal = logged(Path(os.environ["FAKECUDA_LOG"]))
    kinds = Counter(LAUNCHES[line[0]] for line in lines if line[0] in LAUNCHES)
    first = next(index for index, line in enumerate(lines) if line[0] in ("G", "GRAPH"))
    copies = [line[1:] for line in lines if line[0] == "C"]
    waits = [f"{w.filename}:{w.lineno} {w.message}" for w in seen if "called a synchronizing" in str(w.message)]
    waits += [" ".join(line) for line in lines if line[0] == "S"]
    waits += [" ".join(copy) for copy in copies if copy[0] == "sync" or "PAGEABLE" in copy[1]]
    return {
        "waits": waits,
        "to_device": [int(copy[2]) for copy in copies if copy[1].startswith("H2D")],
        "launches": kinds.total(),
        **{kind: kinds[kind] for kind in LAUNCHES.values()},
        "triton_bytes": moved.total,
        "ahead": sum(line[0] == "N" for line in lines[:first]),
        "illegal": illegal,
        "peak": peak,
        "reserved": torch.cuda.max_memory_reserved(),
        "planned": planned,
        "graph_breaks": dict(counters["graph_break"]),
        "recompiled": recompiled,
        "uncached": counters["aot_autograd"]["autograd_cache_bypass"],
        "host_ms": 1e3 * min(seconds),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
