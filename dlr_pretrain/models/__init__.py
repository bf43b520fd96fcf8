"""The model, its backbones (one file each), and the DLR plug-in."""

from dlr_pretrain.models.attach import attach_dlr, fold_
from dlr_pretrain.models.library import factorize_, multiply_
from dlr_pretrain.models.llama import Llama, build_model

__all__ = ["Llama", "attach_dlr", "build_model", "factorize_", "fold_", "multiply_"]
