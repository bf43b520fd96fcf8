"""Memory of one GPU in training, counted from the tensors that the model's own code allocates on the meta device.

The figures are the allocations of eager code. ``torch.compile`` keeps fewer activations and makes fewer temporaries.
The CUDA context, library workspaces and fragmentation are not included.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode  # torch documents it, but under this name alone

from dlr_pretrain.config import Config
from dlr_pretrain.models.adapter import split
from dlr_pretrain.models.flops import by_depth
from dlr_pretrain.models.llama import Llama, build_model
from dlr_pretrain.models.residual import Residuals, entries, strengths
from dlr_pretrain.util.tensors import STATE_DTYPE, SUMS_IN_FLIGHT, WORKING_DTYPE, sum_dtype

META = torch.device("meta")
USABLE_SHARE = 0.9  # of a GPU's free memory: the plan is right within 5%, and NCCL and cuBLAS need some
StateBytes = Callable[..., int]  # ``optim.optimizer.state_bytes``: models do not import optimizers


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU. ``total`` is the peak; it differs from the sum of the parts if not all are alive at once.

    ``weights`` are the working weights with padding, and the indices of residuals. ``masters`` are their fp32 copies.
    ``gradients`` are those that the update reads. ``activations`` are what one micro-batch keeps for its
    backward pass, with logits. ``temporaries`` are everything else at the peak of forward and backward pass. The
    optimizer's temporaries are not counted.

    ``graphs`` is an evaluation's forward pass, if CUDA graphs keep the memory of their micro-batch.

    With ``parallel=fsdp`` or ``hsdp``, ``weights`` are a rank's rows of the state (without masters) and all tensors
    that every rank holds whole. ``temporaries`` include gathered weights, and whole gradients before their reduction.
    """

    weights: int
    masters: int
    gradients: int
    optimizer_state: int
    activations: int
    temporaries: int
    graphs: int
    total: int


def memory(cfg: Config, vocab_size: int, ranks: int, state_bytes: StateBytes) -> Memory:
    """The memory of ``cfg`` on one of ``ranks`` GPUs. ``state_bytes`` is the function of ``optim.optimizer``."""
    count = _replicated if cfg.parallel.name == "ddp" else _sharded
    n = by_depth(lambda shallow: count(shallow, vocab_size, ranks, state_bytes), cfg)
    backward = n["peak"] + n["held"] + n["gathered"] + n["reduced"]
    trained = n["masters"] + n["optimizer"] + n["graphs"] + max(backward, n["gradients"])
    return Memory(
        n["weights"], n["masters"], n["gradients"], n["optimizer"], n["activations"],
        n["peak"] - n["activations"] + n["gathered"], n["graphs"], n["weights"] + max(n["start"], trained),
    )  # fmt: skip


def _replicated(cfg: Config, vocab_size: int, ranks: int, state_bytes: StateBytes) -> dict[str, int]:
    """The bytes under ddp by name, for ``memory``: ``held`` gradients are summed over micro-batches, and ``reduced``
    is what the sum over ranks takes."""
    working, state = WORKING_DTYPE[cfg.precision.name], STATE_DTYPE[cfg.precision.name]
    model = build_model(cfg, vocab_size, META, working)
    values: dict[str, Tensor] = dict(model.named_parameters())
    if has_masters := working != state:
        values = {name: torch.empty_like(p, dtype=state) for name, p in values.items()}
    alphas = strengths(model, cfg.dlr, like=model.lm_head.weight)
    optimized = {name: values[name] for name, p in model.named_parameters() if p.requires_grad} | alphas
    residuals = _residual_bytes(cfg, working, has_masters)

    positions, masked = (cfg.micro_batch(ranks), cfg.train.seq_len), cfg.data.mask_documents
    summed = cfg.train.global_batch > ranks * positions[0]  # over micro-batches
    for p in model.parameters():
        p.grad_dtype = state if has_masters else p.dtype
    activations, peak, gradients = step_bytes(model, *positions, summed, masked)
    reduced = 0
    if ranks > 1 and (dtype := sum_dtype(cfg.precision.name, ranks)) != state:
        largest = max(sum(p.numel() for p in part.parameters()) for part in (model.lm_head, *model.model.layers))
        reduced = SUMS_IN_FLIGHT * largest * dtype.itemsize
    of_alphas = sum(tensor.nbytes for tensor in alphas.values())  # which the optimizer makes from those of the model
    return {
        "weights": _size([*model.parameters(), *model.buffers()]) + residuals,
        "masters": _size(values.values()) if has_masters else 0,
        "optimizer": state_bytes(cfg.optimizer, optimized, partial(split, model)),
        "activations": activations, "peak": peak, "gradients": gradients + of_alphas,
        "held": gradients if summed else 0, "gathered": 0, "reduced": reduced, "start": 0,
        "graphs": 0 if cfg.why_no_graphs(ranks) else forward_bytes(model, *positions, masked),
    }  # fmt: skip


def _sharded(cfg: Config, vocab_size: int, ranks: int, state_bytes: StateBytes) -> dict[str, int]:
    """The same for rank 0, which holds the most rows: one of ``cfg.shards(ranks)`` parts.

    At the peak all weights are ``gathered``, or those of two dense blocks (the current and the next one) and of
    embedding, final norm and head. As many gradients, of two blocks in any case, wait for their sum.
    """
    working, state = WORKING_DTYPE[cfg.precision.name], STATE_DTYPE[cfg.precision.name]
    model = build_model(cfg, vocab_size, META, working)
    shards = cfg.shards(ranks)
    local = {name: p[: -(-len(p) // shards)].to(state) for name, p in model.named_parameters()}  # as in torch.chunk
    residuals = _residual_bytes(cfg, state, shards=shards)
    trained = {name: local[name] for name, p in model.named_parameters() if p.requires_grad}
    trained |= strengths(model, cfg.dlr, like=model.lm_head.weight)
    masked, positions = cfg.data.mask_documents, (cfg.micro_batch(ranks), cfg.train.seq_len)
    activations, peak, _ = step_bytes(model, *positions, held=True, masked=masked)

    blocks = [sum(p.numel() for p in block.parameters()) for block in model.model.layers]
    root = sum(p.numel() for p in model.parameters()) - sum(blocks)
    whole, some = root + sum(blocks), root + 2 * max(blocks)
    reduced = sum_dtype(cfg.precision.name, ranks)
    gathered = (whole if cfg.backbone.factorized else some) * working.itemsize
    gathered += some * (working.itemsize + (reduced.itemsize if reduced != working else 0))
    if cfg.parallel.name == "hsdp" and reduced != state:  # torch keeps the sum over nodes beside its cast
        gathered += sum(p.numel() for p in trained.values()) * reduced.itemsize
    gradients, graphs = sum(p.nbytes for p in trained.values()), 0
    if cfg.why_no_graphs(ranks) is None:
        graphs = some * working.itemsize + forward_bytes(model, *positions, masked=masked)
    return {
        "weights": sum(p.nbytes for p in local.values()) + _size(model.buffers()) + residuals, "masters": 0,
        "optimizer": state_bytes(cfg.optimizer, trained),
        "activations": activations, "peak": peak, "gradients": gradients, "held": gradients,
        "gathered": gathered, "reduced": 0, "graphs": graphs,
        "start": whole * state.itemsize,  # each rank first allocates the whole model
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------
# One micro-batch


def step_bytes(model: Llama, micro_batch: int, seq_len: int, held: bool, masked: bool = False) -> tuple[int, int, int]:
    """Bytes of a micro-batch of ``model`` on the meta device: kept after the forward pass, at the peak, of gradients.

    Weights do not count. With ``held``, every parameter already has a gradient, to which the backward pass adds; these
    count only as gradients. With ``masked``, attention is masked by document.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for p in trained:
        p.grad = torch.zeros_like(p, dtype=p.grad_dtype) if held else None
    known = [*model.parameters(), *model.buffers(), *(p.grad for p in trained if p.grad is not None)]
    with _Alive(known) as alive:
        ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64, device=META)
        loss = model(ids, ids, ids if masked else None)
        activations = alive.now()
        loss.backward()
    return activations, alive.peak, _size(p.grad for p in trained if p.grad is not None)


@torch.no_grad()
def forward_bytes(model: Llama, micro_batch: int, seq_len: int, masked: bool = False) -> int:
    """The bytes at the peak of a forward pass that keeps nothing, as ``step_bytes`` counts them."""
    with _Alive([*model.parameters(), *model.buffers()]) as alive:
        ids = torch.zeros(micro_batch, seq_len, dtype=torch.int64, device=META)
        model(ids, ids, ids if masked else None)
    return alive.peak


class _Alive(TorchDispatchMode):
    """Counts the bytes of live storages on the meta device that operations have allocated.

    A storage counts from the first operation that returns a tensor of it, except the storages of ``known`` tensors.
    Freed storages are removed only when the count is read or may be a new peak.
    """

    def __init__(self, known: Iterable[Tensor]):
        super().__init__()
        self.peak, self.bytes = 0, 0
        # ``_cdata`` identifies a storage; on the meta device the public ``data_ptr`` is 0
        self.known = {(storage := tensor.untyped_storage())._cdata: storage for tensor in known}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in self.made:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.bytes += storage.nbytes()
        if self.bytes > self.peak:
            self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """The bytes of live storages."""
        for key in [key for key, (reference, _) in self.made.items() if reference.expired()]:
            self.bytes -= self.made.pop(key)[1]
        return self.bytes


def _size(tensors: Iterable[Tensor]) -> int:
    """The bytes of the distinct storages of ``tensors``."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _residual_bytes(cfg: Config, dtype: torch.dtype, masters: bool = False, shards: int = 1) -> int:
    """Bytes that the residuals of a model in ``dtype`` take in addition to its weights and their masters, if any.

    With several ``shards`` these are the bytes for the rows of rank 0. Those of one block are counted.
    """
    if not cfg.dlr.has_residual:
        return 0
    model = build_model(replace(cfg, scale=replace(cfg.scale, num_layers=1)), 1, META, dtype)
    parameters = dict(model.named_parameters())
    values = {name: torch.empty_like(p, dtype=torch.float32) for name, p in parameters.items()}
    residuals = Residuals(model, cfg.dlr, values if masters else parameters)
    residuals.put_in()
    whole = 0 if residuals.alpha is None else residuals.alpha.nbytes
    rows = {name: each.rows for name, each in entries(model, cfg.dlr).items()}
    local = sum(int((r < -(-len(parameters[name]) // shards)).sum()) for name, r in rows.items())
    return cfg.scale.num_layers * (whole + (residuals.nbytes() - whole) * local // sum(map(len, rows.values())))
