"""Training steps of peer repositories, through the adapters in ``benchmarks/adapters``.

An adapter is our code around the user's checkout of a peer: a Python file with a function

    build(scale, device, dtype, batch, T, compile, layers) -> object with .step(ids) -> loss

``scale`` is "60M" ... "7B". ``ids`` [batch, T] are on the device, and none is ``PAD``. A step is a whole update. The
object has ``tensors()``, which returns its parameters under our names, so that losses can be compared. It may have
``attention()``, a context in which our model computes attention as the peer does. The file also has ``ours(scale)``,
which returns the overrides with which we compute the same; ``build_x`` may have its own ``ours_x``.
"""

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.variants import LR
from dlr_pretrain.config import Config, ConfigError, Problem
from dlr_pretrain.data import Batch
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import WORKING_DTYPE

PAD = 1
EPS = "optimizer.eps=1e-8"  # torch's default, which AuthorsStep uses


def checkout(name: str) -> str:
    """The folder of a peer's checkout: $PEERS_DIR/name, by default peers/name."""
    return os.path.join(os.environ.get("PEERS_DIR", "peers"), name)


class Peer:
    """An adapter, named as ``file``, or as ``file:function`` for a function other than ``build``."""

    def __init__(self, place: str, scale: str):
        path, _, function = place.partition(":")
        if not Path(path).is_file():
            raise ConfigError([Problem("--peer", path, "no such file", "The adapters are in benchmarks/adapters")])
        spec = importlib.util.spec_from_file_location(f"adapter_{Path(path).stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, function or "build"):
            has = ", ".join(name for name in vars(module) if name.startswith("build"))
            raise ConfigError([Problem("--peer", place, "the file has no such function", f"It has {has or 'none'}")])
        if not hasattr(module, "ours"):
            fix = "It returns the overrides with which we compute the same; see benchmarks/peers.py"
            raise ConfigError([Problem("--peer", place, "the file has no function ours(scale)", fix)])
        variant = function.removeprefix("build")
        self.name, self.scale, self.make = Path(path).stem + variant, scale, getattr(module, function or "build")
        self.ours: list[str] = getattr(module, f"ours{variant}", module.ours)(scale)
        self.built = None

    def build(self, cfg: Config, device: torch.device) -> None:
        """Build the peer's model and optimizer for the batch of ``cfg``."""
        shape = str(device), WORKING_DTYPE[cfg.precision.name], cfg.train.global_batch, cfg.train.seq_len
        try:
            self.built = self.make(self.scale.upper(), *shape, bool(cfg.compile), layers=cfg.scale.num_layers)
        except ImportError as error:
            raise UserError(f"--peer {self.name}: {error}. Set PEERS_DIR to the folder of its checkout") from error


def peer_ids(batch: Batch) -> Tensor:
    """The batch as ids [rows, T], which peers take: every id but the first of a row is a target."""
    return batch.tokens[:, :-1].long()


def as_batch(ids: Tensor) -> Batch:
    """The batch for ``ids`` [rows, T], the inverse of ``peer_ids``: T - 1 of T positions have a target."""
    tokens = torch.cat((ids, ids.new_full((len(ids), 1), PAD)), dim=1).int()
    lengths = torch.full((len(ids),), ids.shape[1], dtype=torch.int32, device=ids.device)
    return Batch(tokens, lengths, ids.numel(), {})


def with_own_code(model: nn.Module) -> Callable:
    """``model`` as a function with its own code object.

    torch keeps compiled graphs by code object, and does not notice that other attention kernels are allowed. Without
    this, the second of two steps would run the graph of the first.
    """

    def forward(**inputs):
        return model(**inputs)

    return FunctionType(forward.__code__.replace(), forward.__globals__, closure=forward.__closure__)


class AuthorsStep:
    """One update as written in the main scripts of GaLore and its descendants, such as CoLA.

    It waits for the device in order to count tokens, and copies every gradient to the host for a logged norm. Attention
    uses plain matrix products, because these scripts forbid flash and memory-efficient attention, and the torch of
    their time had no cuDNN attention. ``lean`` omits all three.
    """

    def __init__(self, model: nn.Module, compile: bool, lean: bool):
        self.model = model.train()
        self.forward = torch.compile(with_own_code(model), dynamic=False) if compile else model
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _: 1.0)
        self.lean = lean

    def attention(self) -> AbstractContextManager:
        """The context that selects the attention kernels; our losses are computed in it, too."""
        return nullcontext() if self.lean else sdpa_kernel(SDPBackend.MATH)

    def step(self, ids: Tensor) -> Tensor:
        mask = ids != PAD
        if not self.lean:
            mask.sum().item()
        with self.attention():
            loss = self.forward(input_ids=ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100)).loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 0.5)
        if not self.lean:
            sum(torch.norm(p.grad.clone().detach().cpu()) for p in self.trained if p.grad is not None)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.detach()
