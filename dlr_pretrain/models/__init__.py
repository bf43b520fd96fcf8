"""The model, its backbones (one file each), and the DLR plug-in."""

from dlr_pretrain.models.dlr import active, attach_dlr, fold_
from dlr_pretrain.models.llama import Llama, build

__all__ = ["Llama", "active", "attach_dlr", "build", "fold_"]
