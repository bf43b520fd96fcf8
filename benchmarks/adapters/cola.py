"""The CoLA repository's model and step (github.com/alvin-zyl/CoLA in ``$PEERS_DIR/CoLA``; transformers 4.48).

``build`` is the step of its main script; ``build_lean`` omits its waits for the device and allows any attention kernel.
"""

import sys

from benchmarks.peers import EPS, PAD, AuthorsStep, checkout

CHECKOUT = checkout("CoLA")


class Step(AuthorsStep):
    def tensors(self):
        """The parameters under our names; their factors are the transposes of ours."""
        state = {name.replace("cola_a", "a.weight").replace("cola_b", "b.weight"): p.T if "cola_" in name else p
                 for name, p in self.model.named_parameters()}  # fmt: skip
        return {name: p.detach() for name, p in state.items()}


def ours(scale):
    """Their models from 350m up have no SiLU in the SwiGLU."""
    silu = "true" if scale in ("60m", "130m") else "false"
    return [EPS, "backbone=cola", "dlr=off", f"backbone.swiglu_silu={silu}"]


def build(scale, device, dtype, batch, T, compile, layers, lean=False):
    sys.path.insert(0, CHECKOUT)
    from cola import ColaConfig, ColaForCausalLM

    config = ColaConfig.from_pretrained(f"{CHECKOUT}/cola_configs/cola_{scale.lower()}.json")
    config.use_cache, config.pad_token_id = False, PAD
    config.num_hidden_layers = layers
    model = ColaForCausalLM(config).to(device=device, dtype=dtype)
    return Step(model, compile, lean)


def build_lean(*shape, **options):
    return build(*shape, **options, lean=True)
