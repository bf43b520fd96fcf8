"""The optimizer of a run: masked updates, fp32 masters, residuals (DLR), and a state of named tensors."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dlr_pretrain.config.tree import How, OptimizerOptions
from dlr_pretrain.optim.adam import Adam, empty_state
from dlr_pretrain.util import sharded
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import ALPHA, named_generator

Split = Callable[[dict[str, Tensor]], dict[str, Tensor]]  # fused tensors by name -> views of their matrices by name
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def uncut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fused tensors as they are: the ``split`` of optimizers that do not need matrices."""
    return tensors


def state_bytes(options: OptimizerOptions, parameters: Mapping[str, Tensor], split: Split = uncut) -> int:
    """Bytes of all ``state_tensors`` (counters included) after an update of every parameter.

    The update runs on the meta device: it needs only the names, shapes and dtypes of ``parameters``.
    """
    shaped = {name: torch.empty(p.shape, dtype=p.dtype, device="meta") for name, p in parameters.items()}
    for p in shaped.values():
        p.requires_grad_().grad = torch.empty_like(p)
    optimizer = Optimizer(options, shaped, split=split)
    optimizer.collect()
    optimizer.update(0.0, skip=torch.zeros(()), index=0)
    return sum(tensor.nbytes for tensor in optimizer.state_tensors().values())


def checkpoint_bytes(
    options: OptimizerOptions, state: Mapping[str, Tensor], trained: Iterable[str], split: Split = uncut
) -> int:
    """Bytes of a checkpoint's tensors: ``state`` (parameters, buffers, learned alphas), and the optimizer's state.

    ``trained`` are the names of the parameters that the optimizer updates.
    """
    optimized = {name: state[name] for name in (*trained, ALPHA) if name in state}
    return sum(tensor.nbytes for tensor in state.values()) + state_bytes(options, optimized, split)


class InOut(Protocol):
    """``models.residual.Residuals``: residuals in the working weights, which an update must not see."""

    alpha: Tensor | None

    def take_out(self) -> None: ...

    def put_in(self) -> None: ...

    def alpha_gradient(self, gradients: Mapping[str, Tensor]) -> Tensor: ...


class Target(NamedTuple):
    """A tensor that one of the optimizers updates."""

    tensor: Tensor  # over all ranks
    rows: Tensor  # of this rank: the parameter that it updates, and ``tensor`` itself where nothing is sharded
    optimizer: torch.optim.Optimizer


class Optimizer:
    """Updates the parameters of a model with its ``optimizers``, one or more in the style of ``torch.optim``.

    The same weights have three roles:

    working   by fused name, ``...qkv.b``: the model multiplies by them. With DLR they are W = round(B + beta R^T)
    values    by fused name, and alpha: fp32 masters, or the working weights themselves, which hold B only within
              ``taken_out``. An update changes the trained ones; a checkpoint holds them all
    targets   the trained values as the optimizers see them: by fused name, or by matrix, ``...q_proj.b.weight``, if
              one of them needs matrices. State is named after them
    """

    def __init__(
        self,
        options: OptimizerOptions,
        working: Mapping[str, Tensor],
        *,
        values: Mapping[str, Tensor] | None = None,
        residuals: InOut | None = None,
        split: Split = uncut,
        compiled: bool = False,
        rounding_seed: int | None = None,
    ):
        """``values`` are the fp32 masters of ``working``, if it has masters.

        ``split`` cuts fused tensors into matrices, for optimizers that treat them as matrices. These optimizers do not
        support sharded parameters. With others, each rank updates its own rows of such parameters.

        ``compiled`` compiles the updates of adamw and adamw_8bit that are not torch's kernels. With ``rounding_seed``
        bf16 parameters are rounded stochastically; other optimizers raise ValueError.
        """
        if rounding_seed is not None and not options.rounds_stochastically:
            raise ValueError(f"optimizer={options.name} does not round stochastically")
        whole = options.elementwise or any(map(sharded.is_sharded, working.values()))
        self.working, self.residuals, self.split = dict(working), residuals, uncut if whole else split
        self.has_masters = values is not None
        self.values = dict(working if values is None else values)
        self.trained = [name for name, p in working.items() if p.requires_grad]
        alpha = {} if residuals is None or residuals.alpha is None else {ALPHA: residuals.alpha}
        self.values |= alpha
        trained = {name: self.values[name] for name in self.trained}
        tensors = (trained if whole else self.split({n: v.detach() for n, v in trained.items()})) | alpha
        self.optimizers = options.build(tensors, How(compiled, rounding_seed))
        self.reads_on_device = all(map(_reads_found_inf, self.optimizers))
        optimizer_of = {p: optimizer for optimizer in self.optimizers for p in _parameters(optimizer)}
        rows = {name: sharded.local_rows(p) for name, p in tensors.items()}
        self.targets = {name: Target(p, rows[name], optimizer_of[rows[name]]) for name, p in tensors.items()}
        self.put_in()  # until now the working weights held B

    @torch.no_grad()
    def put_in(self) -> None:
        """Set the working weights to the values plus residuals, rounded once."""
        if self.has_masters:  # in few launches, for which torch has no public name; so below
            torch._foreach_copy_(list(self.working.values()), [self.values[name] for name in self.working])
        if self.residuals is not None:
            self.residuals.put_in()

    @contextmanager
    def taken_out(self) -> Iterator[dict[str, Tensor]]:
        """Within this context, the ``values`` are those of a checkpoint: they hold B, without the residual."""
        if self.residuals is not None:
            self.residuals.take_out()
        try:
            yield self.values
        finally:
            self.put_in()

    @torch.no_grad()
    def collect(self) -> list[Tensor]:
        """Give each target its gradient, in the target's dtype; returns all gradients."""
        gradients = {}
        for name in self.trained:
            if (gradient := self.working[name].grad) is not None:
                gradients[name] = gradient.to(self.values[name].dtype)
        if ALPHA in self.targets and self.residuals is not None:
            gradients[ALPHA] = self.residuals.alpha_gradient(gradients)
        for name, gradient in self.split(gradients).items():
            self.targets[name].rows.grad = sharded.local_rows(gradient)
        return list(gradients.values())

    def update(self, lr: float, skip: Tensor, factor: Tensor | None = None, *, index: int) -> None:
        """Update all parameters at rate ``lr`` with the collected gradients times ``factor``, unless ``skip`` is 1.

        If ``skip`` is 1, parameters and state do not change. ``skip`` and ``factor`` are fp32 scalars on the device.
        An update may overwrite the gradients. ``index`` is the update's index in the run, counted from 0: it decides
        when loro takes an exact step.

        adamw and adamw_8bit read both scalars on the device, through the hooks of torch's gradient scaler: the host
        does not wait, and gradients are scaled in fp32 as they are read. If any optimizer lacks these hooks, the host
        waits once for both scalars.
        """
        skipped, on_host = (False, None) if self.reads_on_device else _on_host(skip, factor)
        if skipped:
            return
        with self.taken_out():
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                if isinstance(optimizer, Adam):
                    optimizer.index = index
                if _reads_found_inf(optimizer):
                    vars(optimizer).update(grad_scale=None if factor is None else factor.reciprocal(), found_inf=skip)
                elif on_host is not None and on_host != 1.0:
                    gradients = [p.grad for p in _parameters(optimizer) if p.grad is not None]
                    torch._foreach_mul_(gradients, on_host)
                optimizer.step()

    def clear(self) -> None:
        """Free all gradients: those of the model, and those that ``collect`` made from them."""
        for p in (*self.working.values(), *(target.rows for target in self.targets.values())):
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """The state as ``<parameter>/<entry>`` tensors, sharded like their parameters (scalars are not sharded)."""
        return {
            f"{name}/{entry}": sharded.shard_like(self.targets[name].tensor, value) if value.dim() else value
            for name, entry, value in self._entries()
        }

    def load_state_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Restore ``state_tensors`` bit for bit, in the memory layout of each parameter.

        ``tensors`` are whole (see ``sharded.whole``); each rank takes its rows of sharded parameters. Raises UserError
        for state of a parameter that this optimizer does not have.
        """
        states: dict[str, dict[str, Tensor]] = {}
        for full, stored in tensors.items():
            name, entry = full.rsplit("/", 1)
            if name not in self.targets:
                raise UserError(f"optimizer state of {name}, which this model does not have")
            states.setdefault(name, {})[entry] = _own(self.targets[name], entry, stored)
        for name, state in states.items():
            self.targets[name].optimizer.state[self.targets[name].rows] = state

    def release(self) -> None:
        """Free the state after the last update: the device may lack the memory to hold it during the fold."""
        for optimizer in self.optimizers:
            optimizer.state.clear()

    @torch.no_grad()
    def prune(self, names: Collection[str], keep: float, seed: int) -> None:
        """Zero the moments of ``names`` in place, except entries that are kept with probability ``keep``.

        The choice depends on (seed, name, entry) alone. Source: ReLoRA (Lialin et al., 2023), which keeps 0.001.
        """
        names = set(self.split({name: self.values[name] for name in names}))
        state = {(name, entry): value for name, entry, value in self._entries()}
        for (name, entry), value in state.items():
            moment, _, piece = entry.partition(".")
            if name in names and moment in MOMENTS and piece in ("", "codes"):
                p, zero = self.targets[name].tensor, 0
                if piece == "codes":
                    zero = int(state[name, f"{moment}.map"].abs().argmin())
                shape = p.shape if sharded.is_sharded(p) else value.shape
                drawn = torch.rand(shape, generator=named_generator(seed, f"{name}/{moment}"))
                dropped = (drawn >= keep).to(value.device)
                value.masked_fill_(sharded.own_part(p, dropped), zero)

    def _entries(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, target in self.targets.items():
            for entry, value in target.optimizer.state.get(target.rows, {}).items():
                yield name, entry, value


def _on_host(skip: Tensor, factor: Tensor | None) -> tuple[bool, Tensor | float | None]:
    """``skip`` and ``factor`` on the host, after one wait for the device.

    The factor is a number for GPUs and a tensor for CPUs: in these forms, kernels do not round it to bf16.
    """
    if factor is None or not factor.is_cuda:
        return bool(skip), factor
    skipped, number = torch.stack((skip, factor)).tolist()
    return bool(skipped), number


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    return getattr(optimizer, "_step_supports_amp_scaling", False)  # torch's gradient scaler asks the same way


def _own(target: Target, entry: str, stored: Any) -> Tensor:
    """A copy of this rank's rows of ``stored``, laid out as the optimizer itself lays out its state."""
    value = sharded.whole(stored) if entry == "step" else sharded.own_part(target.tensor, stored)
    if entry == "step" and not _reads_found_inf(target.optimizer):  # only fused kernels count steps on the device
        return value.to("cpu", copy=True)
    return empty_state(target.rows, value.shape, value.dtype).copy_(value)
