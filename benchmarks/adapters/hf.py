"""The dense LLaMA of transformers, with the lean step."""

import importlib.util
from pathlib import Path

from dlr_pretrain.bench.peers import EPS, AuthorsStep

spec = importlib.util.spec_from_file_location("adapter_shapes", Path(__file__).with_name("dlr.py"))
shapes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(shapes)


class Step(AuthorsStep):
    def tensors(self):
        return {name: p.detach() for name, p in self.model.named_parameters()}


def ours(scale):
    return [EPS, "backbone=full", "dlr=off"]


def build(scale, device, dtype, batch, T, compile, layers=None):
    return Step(shapes.llama(scale, layers).to(device=device, dtype=dtype), compile, lean=True)
