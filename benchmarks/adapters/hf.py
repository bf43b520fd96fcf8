"""The dense LLaMA of transformers, with the lean step."""

from benchmarks.adapters.dlr import llama
from benchmarks.peers import EPS, AuthorsStep


class Step(AuthorsStep):
    def tensors(self):
        return {name: p.detach() for name, p in self.model.named_parameters()}


def ours(scale):
    return [EPS, "backbone=full", "dlr=off"]


def build(scale, device, dtype, batch, T, compile, layers=None):
    return Step(llama(scale, layers).to(device=device, dtype=dtype), compile, lean=True)
