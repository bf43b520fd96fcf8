"""The DLR authors' layers on the LLaMA of transformers (github.com/nanguoyu/DLR in ``$PEERS_DIR/DLR``).

They publish no training script, so the step is the lean one. ``build`` has DLR on, ``build_off`` off, ``build_random``
the random map; ``build_dense`` is the LLaMA of transformers.
"""

import sys

from benchmarks.peers import EPS, PAD, AuthorsStep, checkout

CHECKOUT = checkout("DLR")
SHAPES = {"60M": (512, 1376, 8, 128), "130M": (768, 2048, 12, 256), "350M": (1024, 2736, 16, 256),
          "1B": (2048, 5461, 32, 512), "7B": (4096, 11008, 32, 1024)}  # fmt: skip


class Step(AuthorsStep):
    def tensors(self):
        names = {name: name.removeprefix("wrapped_model.") for name, _ in self.model.named_parameters()}
        return {
            names[name].replace(".down.weight", ".a.weight").replace(".up.weight", ".b.weight"): p.detach()
            for name, p in self.model.named_parameters()
        }


def ours(scale):
    return [EPS, "backbone=cola", "dlr=on"]


def ours_off(scale):
    return [EPS, "backbone=cola", "dlr=off"]


def ours_random(scale):
    """Both implementations draw the same map, from the MD5 of a layer's name."""
    return [EPS, "backbone=cola", "dlr=random"]


def ours_dense(scale):
    return [EPS, "backbone=full", "dlr=off"]


def build(scale, device, dtype, batch, T, compile, layers, scope="all", expand="uniform"):
    sys.path.insert(0, CHECKOUT)
    from dlr import DLRModel

    rank = SHAPES[scale][-1]
    model = DLRModel(llama(scale, layers), rank=rank, activation="silu", dlr_scope=scope, expand_mode=expand)
    return Step(model.to(device=device, dtype=dtype), compile, lean=True)


def build_off(*shape, **options):
    return build(*shape, **options, scope="none")


def build_random(*shape, **options):
    return build(*shape, **options, expand="random_reuse")


def build_dense(scale, device, dtype, batch, T, compile, layers):
    return Step(llama(scale, layers).to(device=device, dtype=dtype), compile, lean=True)


def llama(scale, layers):
    """The dense LLaMA of transformers in the paper's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    d, f, heads, _ = SHAPES[scale]
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=32_000, hidden_size=d, intermediate_size=f, num_hidden_layers=layers,
        num_attention_heads=heads, rms_norm_eps=1e-6, max_position_embeddings=1024, use_cache=False,
        tie_word_embeddings=False, pad_token_id=PAD,
    ))  # fmt: skip
