"""Optimizers by name, with masked updates and with their state as named tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from dlr_pretrain.config import Choice
from dlr_pretrain.config.knobs import STOCHASTIC_ROUNDING
from dlr_pretrain.optim import adamw, galore
from dlr_pretrain.optim.adam import Adam, empty_state
from dlr_pretrain.util import sharded
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.sharded import Stored
from dlr_pretrain.util.tensors import named_generator

BUILDERS: dict[str, Callable] = {  # of any other name: ``build`` of the module of that name
    "adamw_foreach": partial(adamw.build, fused=False),
    "adamw_8bit": adamw.build_8bit,
    "fira": galore.build,
}
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def build(
    choice: Choice,
    parameters: Mapping[str, Tensor],
    *,
    compiled: bool = False,
    rounding_seed: int | None = None,
    heartbeat: Callable[[Iterable], Iterable] = iter,
) -> Optimizer:
    """Build the optimizer that ``choice`` names, over ``parameters`` by their checkpoint names.

    Scalars have no weight decay. Every update receives its learning rate. If parameters are sharded by rows, each rank
    updates its own rows; optimizers of matrices do not support sharded parameters.

    ``compiled`` compiles an update that is not one of torch's kernels. With ``rounding_seed`` bf16 parameters are
    rounded stochastically; optimizers other than adamw and adamw_8bit raise ValueError. ``heartbeat`` iterates over
    the parameters of updates that can take seconds (galore, fira, loro).
    """
    options = {}
    if choice.name in STOCHASTIC_ROUNDING:
        options = {"compiled": compiled, "rounding_seed": rounding_seed}
    elif rounding_seed is not None:
        raise ValueError(f"optimizer={choice.name} does not round stochastically")
    make = BUILDERS.get(choice.name) or importlib.import_module(f"dlr_pretrain.optim.{choice.name}").build
    parts = make(dict(parameters), choice.knobs, **options)
    for part in parts:
        if isinstance(part, Adam):
            part.heartbeat = heartbeat
    return Optimizer(parameters, parts)


def state_bytes(choice: Choice, parameters: Mapping[str, Tensor]) -> int:
    """Bytes of all state tensors after an update of every parameter, counters included, as in ``state_tensors``.

    The update runs on the meta device: of the parameters only names, shapes and dtypes matter.
    """
    shaped = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters.items()}
    for p in shaped.values():
        p.grad = torch.empty_like(p)
    optimizer = build(choice, shaped)
    optimizer.update(0.0, skip=torch.zeros(()), index=0)
    return sum(tensor.nbytes for tensor in optimizer.state_tensors().values())


def checkpoint_bytes(choice: Choice, state: Mapping[str, Tensor], trained: Iterable[str]) -> int:
    """Bytes of the tensors of a checkpoint: ``state`` (parameters and buffers), and the optimizer's for ``trained``."""
    optimized = {name: state[name] for name in trained}
    return sum(tensor.nbytes for tensor in state.values()) + state_bytes(choice, optimized)


class Optimizer:
    """One or more of torch's optimizers over disjoint parts of the named ``parameters``."""

    def __init__(self, parameters: Mapping[str, Tensor], parts: list[torch.optim.Optimizer]):
        self.parameters, self.parts = dict(parameters), parts
        owner = {id(p): part for part in parts for group in part.param_groups for p in group["params"]}
        self.part_of = {name: owner[id(sharded.local_rows(p))] for name, p in self.parameters.items()}

    def update(self, lr: float, skip: Tensor, factor: Tensor | None = None, *, index: int) -> None:
        """Update all parameters at rate ``lr`` by the gradients times ``factor``, unless ``skip`` is 1.

        If ``skip`` is 1, parameters and state do not change. ``skip`` and ``factor`` are fp32 scalars on the device.
        An update may overwrite the gradients. ``index`` is the update's index in the run, from 0, by which loro goes.

        adamw and adamw_8bit read both scalars on the device, through the hooks of torch's gradient scaler: the host
        does not wait, and gradients are scaled in fp32 as they are read. If any part lacks these hooks, the host waits
        once for both, and steps no part if ``skip`` is 1.
        """
        number: Tensor | float | None = None  # the factor, where parts cannot read it on the device
        if not all(map(_reads_found_inf, self.parts)):
            skipped, number = _on_host(skip, factor)
            if skipped:
                return
        shards = [p for p in self.parameters.values() if sharded.is_sharded(p)]
        for p in shards:
            sharded.local_rows(p).grad = None if p.grad is None else sharded.local_rows(p.grad)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            if isinstance(part, Adam):
                part.index = index
            if _reads_found_inf(part):
                vars(part).update(grad_scale=None if factor is None else factor.reciprocal(), found_inf=skip)
            elif number is not None and number != 1.0:
                gradients = [p.grad for group in part.param_groups for p in group["params"] if p.grad is not None]
                torch._foreach_mul_(gradients, number)
            part.step()
        for p in shards:
            sharded.local_rows(p).grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The state as ``<parameter>/<entry>`` tensors, sharded like their parameters, except scalars."""
        return {
            f"{name}/{entry}": sharded.shard_like(self.parameters[name], value) if value.dim() else value
            for name, entry, value in self._entries()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor | Stored]) -> None:
        """Restore ``state_tensors``, bit for bit, in each parameter's own memory layout.

        ``tensors`` are whole; each rank takes its rows of the state of sharded parameters. Raises UserError for state
        of a parameter that this optimizer does not have.
        """
        states: dict[str, dict[str, Tensor]] = {}
        for full, stored in tensors.items():
            name, entry = full.rsplit("/", 1)
            if name not in self.parameters:
                raise UserError(f"optimizer state of {name}, which this model does not have")
            states.setdefault(name, {})[entry] = _own(self.parameters[name], self.part_of[name], entry, stored)
        for name, state in states.items():
            self.part_of[name].state[sharded.local_rows(self.parameters[name])] = state

    @torch.no_grad()
    def prune(self, names: Collection[str], keep: float, seed: int) -> None:
        """Zero the moments of ``names`` in place, except entries kept with probability ``keep``; nothing else changes.

        The choice depends on (seed, name, entry) alone. Source: ReLoRA (Lialin et al., 2023), which keeps 0.001.
        """
        state = {(name, entry): value for name, entry, value in self._entries()}
        for (name, entry), value in state.items():
            moment, _, part = entry.partition(".")
            if name in names and moment in MOMENTS and part in ("", "codes"):
                p, zero = self.parameters[name], 0
                if part == "codes":
                    zero = int(state[name, f"{moment}.map"].abs().argmin())
                shape = p.shape if sharded.is_sharded(p) else value.shape
                drawn = torch.rand(shape, generator=named_generator(seed, f"{name}/{moment}"))
                dropped = (drawn >= keep).to(value.device)
                value.masked_fill_(sharded.own_part(p, dropped), zero)

    def _entries(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, p in self.parameters.items():
            for entry, value in self.part_of[name].state.get(sharded.local_rows(p), {}).items():
                yield name, entry, value


def _on_host(skip: Tensor, factor: Tensor | None) -> tuple[bool, Tensor | float | None]:
    """Read ``skip`` and ``factor`` on the host, with one wait for the device.

    The factor is returned in a form that no kernel rounds to bf16 first: a number on GPUs, a tensor on CPUs.
    """
    if factor is None or not factor.is_cuda:
        return bool(skip), factor
    skipped, number = torch.stack((skip, factor)).tolist()
    return bool(skipped), number


def _reads_found_inf(part: torch.optim.Optimizer) -> bool:
    return getattr(part, "_step_supports_amp_scaling", False)  # the attribute that torch's gradient scaler checks


def _own(p: Tensor, part: torch.optim.Optimizer, entry: str, stored: Tensor | Stored) -> Tensor:
    """A copy of ``stored``, laid out as ``part`` itself would make the state of this rank's rows of ``p``."""
    value = sharded.whole(stored) if entry == "step" else sharded.own_part(p, stored)
    if entry == "step" and not _reads_found_inf(part):  # only fused kernels count steps on the device
        return value.to("cpu", copy=True)
    return empty_state(sharded.local_rows(p), value.shape, value.dtype).copy_(value)
