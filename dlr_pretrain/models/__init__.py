"""The model, its backbones (one file each), and the DLR plug-in."""

from dlr_pretrain.models.dlr import active, attach_dlr, fold_
from dlr_pretrain.models.llama import Llama

__all__ = ["Llama", "active", "attach_dlr", "fold_"]
