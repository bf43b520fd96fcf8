"""The linear layers of a block: projections of one shape that read the same input (q, k, v; gate, up; o; down).

A layer is an ordinary module. Its parameters are *fused*: each holds the tensors of all projections, one below the
other. ``adapter.split`` cuts them into the tensors of an exported model. Widths that are slow on tensor cores, such as
5461, are padded with zeros inside the parameters. The padding has zero gradients and stays zero.

A backbone is a subclass of ``Layer``, whose formula has two halves: ``latent(x, carried) -> (z, carried)`` and
``expand(z) -> y``. In ``LowRank`` layers B multiplies z, or its first r values. A dense layer has only the second half.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dlr_pretrain.config.tree import BackboneOptions
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import named_generator

INIT_STD = 0.02  # of dense weights
ALIGNMENT = 8  # widths of fast products are multiples of this


@dataclass(frozen=True)
class Spec:
    """The projections of a layer: their names, their common shape, and the index of their block.

    ``pad_in`` and ``pad_out`` are the widths of the activations: ``d_in`` and ``d_out`` plus padding. An ``alignment``
    of 1 means no padding.
    """

    names: tuple[str, ...]
    d_in: int
    d_out: int
    pad_in: int
    pad_out: int
    block: int
    alignment: int = ALIGNMENT


class Part(NamedTuple):
    """One projection's part of a fused tensor: its exported name, and its shape without padding."""

    leaf: str
    shape: tuple[int, ...]


class SeededInit:
    """Initial values that depend on (seed, exported name) alone, not on the device, world size or backbone."""

    def __init__(self, seed: int):
        self.seed = seed

    def normal(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        """An fp32 tensor on the CPU with values from N(0, std^2)."""
        return torch.randn(shape, generator=self.generator(name)) * std

    def uniform(self, name: str, shape: tuple[int, ...], bound: float) -> Tensor:
        """An fp32 tensor on the CPU with values from U(-bound, bound)."""
        return (torch.rand(shape, generator=self.generator(name)) * 2 - 1) * bound

    def kaiming(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A weight [d_out, d_in] with values from U(-1/sqrt(d_in), 1/sqrt(d_in))."""
        return self.uniform(name, shape, shape[1] ** -0.5)

    def generator(self, name: str) -> torch.Generator:
        return named_generator(self.seed, name)


class Layer(nn.Module, ABC):
    """G projections of one shape that read the same input; the base class of every backbone.

    A subclass declares its parameters with ``fuse``, draws their initial values (``initial``) and computes the layer in
    two halves (``latent``, ``expand``). Its file also defines the class of its ``options``: the keys of ``backbone``.
    """

    deployed_dense = False  # True: the export is a plain LLaMA with the weights of ``dense``

    def __init__(self, spec: Spec, options: BackboneOptions):
        super().__init__()
        self.spec, self.options, self.count = spec, options, len(spec.names)
        self.parts: dict[str, Part] = {}

    def fuse(
        self,
        name: str,
        leaf: str,
        shape: tuple[int, ...],
        padded: tuple[int, ...] | None = None,
        trained: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Declare the fused parameter ``name``: the tensors ``leaf`` of all projections, padded from ``shape``.

        An integer ``dtype`` makes it a buffer.
        """
        rows, *others = padded or shape
        value = torch.zeros(self.count * rows, *others, dtype=dtype)
        if value.is_floating_point():
            self.register_parameter(name, nn.Parameter(value, requires_grad=trained))
        else:
            self.register_buffer(name, value)
        self.parts[name] = Part(leaf, shape)

    @abstractmethod
    def initial(self, seeded: SeededInit, name: str) -> dict[str, Tensor]:
        """The initial values of the projection with the exported name ``name``, by leaf."""

    def latent(self, x: Tensor, carried: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x [..., pad_in] -> the input of ``expand``, and the tensor to carry to the same layer of the next block."""
        return x, None

    @abstractmethod
    def expand(self, z: Tensor) -> Tensor:
        """The latent -> [G, ..., pad_out], the outputs of the projections."""

    def outputs(self, z: Tensor) -> tuple[Tensor, ...]:
        """The latent -> the output [..., pad_out] of each projection."""
        return self.expand(z).unbind(0)

    def dense(self, tensors: dict[str, Tensor]) -> Tensor:
        """The weight [d_out, d_in] of a projection, from its ``tensors`` by leaf.

        It is formed in fp32 (fp64 for fp64) and rounded once. Raises UserError if a projection is not a single matrix.
        """
        rule = "has no dense form, because its layers compute more than a product with one matrix"
        fix = "Fold without --dense: transformers loads the folder with trust_remote_code=True"
        raise UserError(f"backbone={self.options.name}", rule, fix)

    def each(self, fused: Tensor) -> Tensor:
        """[G n, ...] -> [G, n, ...]."""
        return fused.unflatten(0, (self.count, -1))

    def shared(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [..., d_in], weight [G d_out, d_in] -> [..., G, d_out]: one product for all projections.

        ``train.activation_checkpointing=latent`` keeps these products, the only ones in a block that are not batched.
        """
        y = x.flatten(0, -2) @ weight.T
        return y.view(*x.shape[:-1], self.count, -1)

    def batched(self, z: Tensor, *weights: Tensor) -> Tensor:
        """z [..., G, width], weights [G d_out, r_1], [G d_out, r_2], ... -> [G, ..., d_out].

        Each projection reads its own input. Several weights are concatenated along the input dimension.
        """
        rows, matrices = z.flatten(0, -3), [self.each(weight) for weight in weights]
        if torch.is_grad_enabled():  # Dynamo (torch 2.13) fails on autograd functions under no_grad
            y = _Batched.apply(rows, *matrices)
        else:
            y = torch.bmm(rows.transpose(0, 1), _side_by_side(matrices, rows.shape[-1]).mT)
        return y.view(self.count, *z.shape[:-2], -1)


class Joined:
    """Layers that read the same input, as one: their latents, carried tensors and outputs are in a row."""

    def __init__(self, *layers: Layer):
        self.layers = layers

    def latent(self, x: Tensor, carried: Sequence | None) -> tuple[tuple, tuple | None]:
        before = carried or (None,) * len(self.layers)
        z, after = zip(*(layer.latent(x, own) for layer, own in zip(self.layers, before, strict=True)), strict=True)
        return z, None if after[0] is None else after

    def outputs(self, z: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return sum((layer.outputs(own) for layer, own in zip(self.layers, z, strict=True)), ())


class _Batched(torch.autograd.Function):
    """z [N, G, width], weights [G, d_out, r_1], [G, d_out, r_2], ... -> [G, N, d_out], in one product.

    Several weights are concatenated: this moves fewer bytes than adding their outputs, and the sum is rounded once.
    The backward pass concatenates them again instead of keeping a second copy.
    """

    @staticmethod
    def forward(ctx, z: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(z, *weights)
        return torch.bmm(z.transpose(0, 1), _side_by_side(weights, z.shape[-1]).mT)

    @staticmethod
    def backward(ctx, dy: Tensor):
        z, *weights = ctx.saved_tensors
        dz = torch.bmm(dy, _side_by_side(weights, z.shape[-1])).transpose(0, 1)
        if not any(ctx.needs_input_grad[1:]):
            return dz, *[None] * len(weights)
        dw = torch.bmm(dy.mT, z.transpose(0, 1))
        widths = [weight.shape[-1] for weight in weights]
        return dz, *dw[..., : sum(widths)].split(widths, dim=-1)


def _side_by_side(weights: Sequence[Tensor], width: int) -> Tensor:
    """[G, d_out, r_1], [G, d_out, r_2], ... -> [G, d_out, width], zeros at the end; no copy if one weight fills it."""
    missing = width - sum(weight.shape[-1] for weight in weights)
    if len(weights) == 1 and not missing:
        return weights[0]
    return torch.cat((*weights, weights[0].new_zeros(*weights[0].shape[:-1], missing)), dim=-1)


def projections(path: str, layer: Layer) -> list[str]:
    """The exported names of the projections of ``layer``, whose name in the model is ``path``."""
    block = path.rpartition(".")[0]
    return [f"{block}.{name}" for name in layer.spec.names]


def named_layers(model: nn.Module) -> Iterator[tuple[str, Layer]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, Layer))
