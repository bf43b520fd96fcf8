"""SLTrain's own layers and step (github.com/andyjm3/SLTrain in ``$PEERS_DIR/SLTrain``); g++ builds their operator."""

import contextlib
import io
import sys
import tempfile

from benchmarks.peers import EPS, PAD, AuthorsStep, checkout

CHECKOUT = checkout("SLTrain")
SETTINGS = {"60M": (128, 32), "130M": (256, 16), "350M": (256, 16), "1B": (512, 8), "7B": (1024, 8)}  # rank, alpha
NAMES = {"lora_A": "a.weight", "lora_B": "b.weight", "sparse_value": "values", "sparse_index": "index"}


class Step(AuthorsStep):
    def tensors(self):
        found = {}
        for name, value in self.model.state_dict().items():
            stem, _, leaf = name.removeprefix("wrapped_model.").rpartition(".")
            if "rotary" not in stem:
                found[f"{stem}.{NAMES.get(leaf, leaf)}"] = value
        return found


def ours(scale):
    return [EPS, "backbone=sltrain", "dlr=off"]


def build(scale, device, dtype, batch, T, compile, layers=None):
    import torch
    from torch.utils.cpp_extension import load

    sys.path.insert(0, CHECKOUT)
    folder = tempfile.mkdtemp(prefix="sltrain_linear")
    load("sltrain_linear", [f"{CHECKOUT}/sparse-lora/sparse_linear.cpp"], build_directory=folder)
    sys.path.insert(0, folder)
    from peft_pretraining.modeling_llama import LlamaForCausalLM
    from splora import SpLoRaModel
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(f"{CHECKOUT}/configs/llama_{scale.lower()}.json")
    config.use_cache, config.pad_token_id, config.vocab_size = False, PAD, 32_000
    if layers is not None:
        config.num_hidden_layers = layers
    (rank, alpha), empty = SETTINGS[scale], torch.cuda.empty_cache
    if not torch.cuda.is_available():
        torch.cuda.empty_cache = lambda: None  # called by their wrapper wherever it is
    with contextlib.redirect_stdout(io.StringIO()):
        model = SpLoRaModel(LlamaForCausalLM(config), r=rank, lora_alpha=alpha, sp_ratio=0.03,
                            target_modules=["attn", "mlp", "attention"])  # fmt: skip
    torch.cuda.empty_cache = empty
    return Step(model.to(device=device, dtype=dtype), compile, repo_sdp=True)
