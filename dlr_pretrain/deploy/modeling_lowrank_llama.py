"""LLaMA with low-rank linear layers, for transformers 4.57 and 5.x.

This file travels with the checkpoint (``trust_remote_code=True``) and needs torch and transformers only. Attention,
cache, generation and everything else are the library's own LLaMA; the seven projections of each block are

    lowrank    y = s B A x
    cola       y = s B silu(A x)
    lost       y = gamma B phi(A x) + (1 - gamma) S x_I, with x_I some of the input channels
    lax        y = B z, where z joins A x with the latent from the same projection of the previous block
    cola_lax   the same, with a SiLU between the factors

The library's blocks pass on hidden states alone. The latents of lax and cola_lax also pass from block to block, within
one forward pass: a ``CrossedBlock`` takes them as inputs and returns them, so that gradient checkpointing sees them,
and leaves them in a ``Crossing``, from which the next block takes them. A latent belongs to its position, so that a
cached position needs no latent, and the next call finds no latents left. Blocks must not run side by side in one
process: ``nn.DataParallel``, and a second thread while one runs the model, raise RuntimeError.
"""

import threading

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

PROJECTIONS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class LowRankLlamaConfig(LlamaConfig):
    """LLaMA's configuration, with the kind of low-rank layer (``backbone``), its ``rank``, and its formula's settings.

    lowrank, cola: s is ``latent_scale``, or learned with ``learn_latent_scale``. lost: ``gamma``, ``sparsity`` (the
    share of the channels of x that are in x_I) and phi (``activation``, "silu" or "none"). lax, cola_lax: ``gate``
    ("identity", "linear", "tensor" or "dense"), ``norm`` ("latent", "output" or "none"), ``crossing`` (where latents
    are added, "pre_act" or "post_act"), and ``recursive`` (whether a latent that is passed on contains earlier ones).
    """

    model_type = "lowrank_llama"
    base_model_tp_plan = None  # the library's plan splits dense projections

    def __init__(
        self,
        backbone: str = "lowrank",
        rank: int = 128,
        latent_scale: float = 1.0,
        learn_latent_scale: bool = False,
        gamma: float = 0.7,
        sparsity: float = 0.01,
        activation: str = "silu",
        gate: str = "tensor",
        norm: str = "latent",
        crossing: str = "pre_act",
        recursive: bool = True,
        **kwargs,
    ):
        self.backbone = backbone
        self.rank = rank
        self.latent_scale = latent_scale
        self.learn_latent_scale = learn_latent_scale
        self.gamma = gamma
        self.sparsity = sparsity
        self.activation = activation
        self.gate = gate
        self.norm = norm
        self.crossing = crossing
        self.recursive = recursive
        super().__init__(**kwargs)


class LowRankLinear(nn.Module):
    """y = s B A x with A [rank, d_in] and B [d_out, rank]; x [..., d_in] -> y [..., d_out].

    ``initial`` gives, for each parameter of a module, the function of ``nn.init`` that starts it, and its arguments.
    """

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int):
        super().__init__()
        self.a = nn.Linear(d_in, config.rank, bias=False)
        self.b = nn.Linear(config.rank, d_out, bias=False)
        std = (config.rank * (d_in + d_out)) ** -0.25  # Var[(B A)_ij] = 1 / (d_in + d_out)
        self.a.initial = self.b.initial = {"weight": ("normal_", {"std": std})}
        self.scale = config.latent_scale
        if config.learn_latent_scale:
            self.theta = nn.Parameter(torch.ones(()))
            self.initial = {"theta": ("ones_", {})}

    def activate(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        z = self.activate(self.a(x))
        return self.b(z * (self.theta.tanh() if hasattr(self, "theta") else self.scale))


class ColaLinear(LowRankLinear):
    """y = s B silu(A x)."""

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h)


class LostLinear(LowRankLinear):
    """y = gamma B phi(A x) + (1 - gamma) S x_I; I are the ``channels``."""

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int):
        super().__init__(d_in, d_out, config, block)
        count = max(1, int(config.sparsity * d_in))
        self.s = nn.Linear(count, d_out, bias=False)
        self.register_buffer("channels", torch.arange(count) * d_in // count)
        self.gamma, self.silu = config.gamma, config.activation == "silu"

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = F.silu(h) if self.silu else h
        return self.b(z * self.gamma) + self.s(x.index_select(-1, self.channels) * (1 - self.gamma))


class LinearGate(nn.Module):
    """G(c) = w * c."""

    def __init__(self, rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rank))
        self.initial = {"weight": ("ones_", {})}

    def forward(self, c: Tensor) -> Tensor:
        return c * self.weight


class TensorGate(nn.Module):
    """G(c) = E2^T C E1, where C [n1, n2] is c reshaped; n1 n2 = rank, and n1 <= n2 are as close as possible."""

    def __init__(self, rank: int):
        super().__init__()
        short = max(n for n in range(1, int(rank**0.5) + 1) if rank % n == 0)
        self.e1 = nn.Parameter(torch.empty(rank // short, rank // short))
        self.e2 = nn.Parameter(torch.empty(short, short))
        bounds = {name: (6 / len(e)) ** 0.5 for name, e in self.named_parameters()}
        self.initial = {name: ("uniform_", {"a": -bound, "b": bound}) for name, bound in bounds.items()}

    def forward(self, c: Tensor) -> Tensor:
        return (self.e2.T @ (c.unflatten(-1, (len(self.e2), len(self.e1))) @ self.e1)).flatten(-2)


class DenseGate(nn.Linear):
    """G(c) = W c + w."""

    def __init__(self, rank: int):
        super().__init__(rank, rank)
        start = ("uniform_", {"a": -(rank**-0.5), "b": rank**-0.5})
        self.initial = {"weight": start, "bias": start}


GATES = {"identity": lambda rank: nn.Identity(), "linear": LinearGate, "tensor": TensorGate, "dense": DenseGate}


class LaxLinear(LowRankLinear):
    """y = B z. In the first block z = phi(A x); the others add the latent c of the previous block:

    z = phi(norm(A x + G(c))), or norm(phi(A x) + G(c)) with crossing "post_act". The next block receives z, or phi(A x)
    if ``recursive`` is false. With norm "output" the norm is applied to y instead.
    """

    def __init__(self, d_in: int, d_out: int, config: LowRankLlamaConfig, block: int):
        super().__init__(d_in, d_out, config, block)
        self.first, self.last = block == 0, block == config.num_hidden_layers - 1
        self.recursive, self.pre_act = config.recursive, config.crossing == "pre_act"
        self.received: Tensor | None = None  # the latent of the previous block, while this block runs
        self.latent: Tensor | None = None
        self.norm_of = "none" if self.first else config.norm
        if not self.first:
            self.gate = GATES[config.gate](config.rank)
        if self.norm_of != "none":
            self.norm = nn.LayerNorm(config.rank if self.norm_of == "latent" else d_out, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = own = self.activate(h)
        if not self.first:
            crossed = self.gate(self.received.to(h.device))
            z = self.activate(self.normalise(h + crossed)) if self.pre_act else self.normalise(own + crossed)
        if not self.last:
            self.latent = z if self.recursive else own
        y = self.b(z)
        return self.norm(y) if self.norm_of == "output" else y

    def normalise(self, h: Tensor) -> Tensor:
        return self.norm(h) if self.norm_of == "latent" else h


class ColaLaxLinear(LaxLinear):
    """``LaxLinear`` with a SiLU for phi."""

    def activate(self, h: Tensor) -> Tensor:
        return F.silu(h)


LAYERS = {
    "lowrank": LowRankLinear,
    "cola": ColaLinear,
    "lost": LostLinear,
    "lax": LaxLinear,
    "cola_lax": ColaLaxLinear,
}


class Crossing:
    """The latents that pass from one block to the next, one for each projection. It serves one thread at a time."""

    def __init__(self):
        self.latents: list[Tensor] | None = None
        self.sender: int | None = None  # the thread that sent the latents
        self.running: dict[str, int] = {}  # the thread that is inside a block; a lock could not be copied

    def enter(self) -> None:
        here = _thread()
        if self.running.setdefault("thread", here) != here:  # setdefault is atomic
            raise RuntimeError(ONE_THREAD)

    def leave(self) -> None:
        self.running.clear()

    def send(self, latents: list[Tensor]) -> None:
        self.latents, self.sender = latents, _thread()

    def take(self) -> list[Tensor]:
        if self.latents is None:
            raise RuntimeError("a block runs without the block before it")
        if self.sender != _thread():
            raise RuntimeError(ONE_THREAD)
        latents, self.latents = self.latents, None
        return latents


ONE_THREAD = "latents cross between blocks, and another thread runs this model: take turns, or give each its own copy"


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class CrossedBlock(LlamaDecoderLayer):
    """The library's block with lax projections: latents go in and come out beside the hidden states.

    They are positional arguments, because reentrant checkpointing follows gradients through those alone.
    """

    def __init__(self, config: LowRankLlamaConfig, block: int, crossing: Crossing):
        super().__init__(config, block)
        self.crossing, self.first = crossing, block == 0

    def __call__(self, hidden_states: Tensor, **kwargs) -> Tensor:
        if getattr(self, "_is_replica", False):
            raise RuntimeError("latents cross between blocks: use DistributedDataParallel instead of nn.DataParallel")
        self.crossing.enter()
        try:
            latents = [] if self.first else self.crossing.take()
            hidden_states, *latents = super().__call__(hidden_states, *latents, **kwargs)
            self.crossing.send(latents)
            return hidden_states
        finally:
            self.crossing.leave()

    def forward(self, hidden_states: Tensor, *latents: Tensor, **kwargs) -> tuple[Tensor, ...]:
        crossed = [m for m in self.modules() if isinstance(m, LaxLinear)]
        try:
            for projection, latent in zip(crossed, latents, strict=not self.first):
                projection.received = latent
            hidden_states = super().forward(hidden_states, **kwargs)
            return hidden_states, *(projection.latent for projection in crossed if not projection.last)
        finally:  # a recomputation for checkpointing may end in the middle
            for projection in crossed:
                projection.received = projection.latent = None


class WholeWeights:
    """``from_pretrained`` that raises ValueError for missing and for unexpected weights.

    The library's own would draw missing weights at random, and drop unexpected ones.
    """

    other_parts: tuple[str, ...] = ()  # prefixes of a checkpoint's tensors that this class ignores

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        model, report = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        kinds = {kind: sorted(report[f"{kind}_keys"]) for kind in ("missing", "unexpected")}
        kinds["unexpected"] = [name for name in kinds["unexpected"] if not name.startswith(cls.other_parts)]
        wrong = [f"{name} ({kind})" for kind, names in kinds.items() for name in names]
        if any(".dlr_" in name for name in kinds["unexpected"]):
            wrong.insert(0, "a residual that was not folded (dlr_pretrain.models.fold_ does)")
        if wrong:
            more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
            raise ValueError(f"these weights are not those of {cls.__name__}: {', '.join(wrong[:10])}{more}")
        on_disk = "disk" in getattr(model, "hf_device_map", {}).values()
        if on_disk and model.config.backbone == "lost" and int(transformers.__version__.split(".")[0]) < 5:
            raise ValueError("transformers 4 does not read the channels of lost where blocks stay on the disk; 5 does")
        return (model, report) if output_loading_info else model


class LowRankLlamaModel(WholeWeights, LlamaModel):
    """The library's LLaMA without its head, the projections of each block replaced by the backbone's layers."""

    config_class = LowRankLlamaConfig
    _no_split_modules = ("LlamaDecoderLayer", "CrossedBlock")
    other_parts = ("lm_head.",)

    def __init__(self, config: LowRankLlamaConfig):
        super().__init__(config)
        layer = LAYERS[config.backbone]
        if issubclass(layer, LaxLinear):
            crossing = Crossing()
            self.layers = nn.ModuleList(CrossedBlock(config, i, crossing) for i in range(len(self.layers)))
        for i, block in enumerate(self.layers):
            for part, names in PROJECTIONS.items():
                parent = getattr(block, part)
                for name in names:
                    dense = getattr(parent, name)
                    setattr(parent, name, layer(dense.in_features, dense.out_features, config, i))
        self.post_init()  # again, for the new layers

    def _init_weights(self, module: nn.Module) -> None:
        initial = getattr(module, "initial", None)
        if initial is None:
            super()._init_weights(module)
        else:
            for name, (draw, arguments) in initial.items():
                getattr(nn.init, draw)(getattr(module, name), **arguments)


class LowRankLlamaForCausalLM(WholeWeights, LlamaForCausalLM):
    """``LowRankLlamaModel`` with its head: loss, cache and generation are the library's."""

    config_class = LowRankLlamaConfig
    _no_split_modules = ("LlamaDecoderLayer", "CrossedBlock")

    def __init__(self, config: LowRankLlamaConfig):
        super(LlamaForCausalLM, self).__init__(config)  # not LlamaForCausalLM's own, which builds a dense model
        self.model = LowRankLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
