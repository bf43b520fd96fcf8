"""The dtypes of each precision."""

from __future__ import annotations

import torch

# of the weights that the model multiplies by
WORKING_DTYPE = {
    "bf16": torch.bfloat16,
    "bf16_sr": torch.bfloat16,
    "bf16_mixed": torch.bfloat16,
    "fp32": torch.float32,
}
# of the weights that the optimizer updates and a checkpoint holds
STATE_DTYPE = {"bf16": torch.bfloat16, "bf16_sr": torch.bfloat16, "bf16_mixed": torch.float32, "fp32": torch.float32}
