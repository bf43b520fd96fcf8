"""LaX on CoLA: latent crossing with a SiLU between the factors."""

from dataclasses import dataclass

from dlr_pretrain.config.key import key
from dlr_pretrain.models import lax
from dlr_pretrain.models.cola import SWIGLU, Cola
from dlr_pretrain.models.lax import Lax


@dataclass
class Options(lax.Options):
    swiglu_silu: bool = key(SWIGLU)
    exported_keys = lax.Options.exported_keys


class ColaLax(Cola, Lax):
    """y = B z, z = silu(norm(A x + G(c)))."""

    options: Options


Options.layer = ColaLax
