"""AdamW on torch's foreach kernels, which round after every operation, as in the published runs of this family.

In pure bf16, weight decay does not change a weight if lr * weight_decay < 2^-9. The decay of a second moment by
1 - beta2 = 0.001 does not change it either. Training therefore differs from training with the fused kernel.
"""

from __future__ import annotations

from functools import partial

from dlr_pretrain.optim import adamw

build = partial(adamw.build, fused=False)
