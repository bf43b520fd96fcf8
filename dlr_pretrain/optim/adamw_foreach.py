"""AdamW on torch's foreach kernels, which round after every operation, as in the published runs of this family.

In pure bf16 decay leaves a weight as it is where lr * weight_decay < 2^-9, and so does a second moment's own decay by
1 - beta2 = 0.001: another training than with the fused kernel.
"""

from __future__ import annotations

from functools import partial

from dlr_pretrain.optim import adamw

build = partial(adamw.build, fused=False)
state_bytes = adamw.state_bytes
