"""Latent crossing on CoLA: ``lax`` with a SiLU between the factors."""

from __future__ import annotations

from dlr_pretrain.models.cola import Cola
from dlr_pretrain.models.lax import Lax


class ColaLax(Cola, Lax):
    """y = B z, z = silu(norm(A x + G(c)))."""


BACKBONE = ColaLax
