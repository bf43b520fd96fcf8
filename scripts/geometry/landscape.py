"""The loss around a model in one dimension: along directions, its curvature, and between two models.

A point is the tensors of a model by name; a direction has some of these names. A surface maps a point to a loss.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlr_pretrain.models import Llama
from dlr_pretrain.models.adapter import split
from dlr_pretrain.util.tensors import IGNORE, named_generator

from .weights import Inputs, Point, inner, places, plus

RISE, WIDEST = 1e-4, 0.05  # of a fit's five points: about how far the loss moves (nats/token), and the largest distance


class Surface:
    """The mean loss of ``model`` on ``inputs``, in nats/token. The model's own weights are overwritten."""

    def __init__(self, model: Llama, inputs: Inputs):
        self.model, self.inputs, self.parameters = model, inputs, dict(model.named_parameters())
        self.count = sum(int((targets != IGNORE).sum()) for _, targets, *_ in inputs)

    @torch.no_grad()
    def put(self, point: Point) -> None:
        for name, view in split(self.model, self.parameters).items():
            view.copy_(point[name])

    def summed(self, ids: Tensor, targets: Tensor, *documents: Tensor) -> Tensor:
        logits, flat = self.model.logits(ids, *documents).flatten(0, 1), targets.flatten()
        return F.cross_entropy(logits, flat, ignore_index=IGNORE, reduction="none").double().sum()

    @torch.no_grad()
    def __call__(self, point: Point) -> float:
        self.put(point)
        return sum(self.summed(*part).item() for part in self.inputs) / self.count

    def product(self, point: Point, direction: Point) -> Point:
        """The Hessian times ``direction``, from the derivative of the gradient along it (Pearlmutter, 1994)."""
        self.put(point)
        vectors, images = ({name: torch.zeros_like(p) for name, p in self.parameters.items()} for _ in range(2))
        for name, tensor in direction.items():
            split(self.model, vectors)[name].copy_(tensor)
        vectors = {name: vector for name, vector in vectors.items() if vector.any()}
        chosen = [self.parameters[name].requires_grad_() for name in vectors]
        for part in self.inputs:
            with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
                gradients = torch.autograd.grad(self.summed(*part) / self.count, chosen, create_graph=True)
                slopes = [(g * vector).sum() for g, vector in zip(gradients, vectors.values(), strict=True)]
                for name, image in zip(vectors, torch.autograd.grad(torch.stack(slopes).sum(), chosen), strict=True):
                    images[name] += image
        self.model.requires_grad_(False)
        views = split(self.model, images)
        return {name: views[name] for name in direction}


def random_direction(point: Point, seed: int) -> Point:
    """A Gaussian direction over the projections, each of whose rows has the norm of the row of weights that it changes.

    Source: filter normalisation of Li et al. (2018), "Visualizing the loss landscape of neural nets".
    """
    direction = {}
    for name in places(point):
        drawn = torch.randn(point[name].shape, generator=named_generator(seed, name)).to(point[name])
        direction[name] = drawn * (point[name].norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True))
    return direction


def principal_directions(points: Sequence[Point], most: int) -> list[tuple[Point, float]]:
    """Up to ``most`` principal directions of a trajectory, as long as the last point's matrices, and their variances.

    They are those of the differences from the last point (Li et al., 2018), from the Gram matrix of these.
    """
    end = {name: points[-1][name] for name in places(points[-1])}
    steps = [{name: point[name] - tensor for name, tensor in end.items()} for point in points[:-1]]
    values, vectors = np.linalg.eigh([[inner(a, b) for b in steps] for a in steps])
    found = []
    for number in [i for i in np.argsort(-values)[:most] if values[i] > 1e-9 * values.max()]:
        weights = (vectors[:, number] * math.sqrt(inner(end, end) / values[number])).tolist()
        direction = {name: sum(w * step[name] for w, step in zip(weights, steps, strict=True)) for name in end}
        found.append((direction, float(values[number] / values.sum())))
    return found


def curvature(surface: Surface, point: Point, direction: Point, rise: float = RISE) -> tuple[float, float]:
    """The second derivative along ``direction``: of a polynomial of degree 4 through five losses, and by the Hessian.

    The first takes from the second only the distance of the points, at which the loss moves by about ``rise``: in fp32
    a smaller one loses digits, and over a larger one some losses are not quadratic.
    """
    exact = inner(direction, surface.product(point, direction))
    width = min(WIDEST, math.sqrt(2 * rise / abs(exact))) if exact else WIDEST
    distances = np.linspace(-width, width, 5)
    losses = [surface(plus(point, t, direction)) for t in distances.tolist()]
    return float(np.polynomial.Polynomial.fit(distances, losses, 4).deriv(2)(0.0)), exact


def sharpest(surface: Surface, point: Point, most: int = 20, tolerance: float = 0.01) -> tuple[float, Point]:
    """The Hessian's eigenvalue of the largest magnitude, over the projections, and its direction of length 1.

    Power iteration ends when the value changes by less than ``tolerance`` of itself, or after ``most`` products.
    """
    image, value = random_direction(point, 0), math.inf
    for _ in range(most):
        length = math.sqrt(inner(image, image))
        direction = {name: tensor / length for name, tensor in image.items()}
        image = surface.product(point, direction)
        before, value = value, inner(direction, image)
        if abs(value - before) <= tolerance * abs(value):
            break
    return value, direction


def path(surface: Surface, one: Point, other: Point, distances: Sequence[float]) -> tuple[list[float], float]:
    """The losses on the line from one point to another, and their largest height above the line between its ends.

    Source: the barrier of Entezari et al. (2022), with Frankle et al. (2020).
    """
    direction = {name: other[name] - tensor for name, tensor in one.items() if tensor.is_floating_point()}
    losses = [surface(plus(one, t, direction)) for t in distances]
    return losses, max(loss - (1 - t) * losses[0] - t * losses[-1] for t, loss in zip(distances, losses, strict=True))
