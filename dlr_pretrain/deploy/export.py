"""Writes folded weights to a folder that ``transformers`` loads, checks it, and opens such folders.

A folder is written under another name and renamed after its check: it is either complete or absent.
"""

import inspect
import json
import pkgutil
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from string import Template
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import Tensor

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.config.run_folder import exported_folder, read_record
from dlr_pretrain.config.shape import settings_of
from dlr_pretrain.data.tokenizer import FastTokenizer, Tokenizer, load_tokenizer
from dlr_pretrain.deploy.exported_layers import LAYERS, LowRankLinear
from dlr_pretrain.deploy.tokenizer import export_tokenizer
from dlr_pretrain.models.adapter import load_
from dlr_pretrain.models.full import DENSE
from dlr_pretrain.models.layer import named_layers, projections
from dlr_pretrain.models.llama import Llama, build_model
from dlr_pretrain.util.errors import UserError, first_line, write_to_stderr
from dlr_pretrain.util.files import LOCK, locked, read_json, share_mode, sync, write_text
from dlr_pretrain.util.process import without_warnings
from dlr_pretrain.util.text import loading, markdown_table, shortened

POSITIONS = 1024  # the smallest max_position_embeddings; a run with longer sequences exports their length
LAYER = "exported_layer"  # the key in config.json that names a user's own layer, which MODELING lacks
MODELING, EXPORTED_LAYERS = map(Path(__file__).with_name, ("modeling_lowrank_llama.py", "exported_layers.py"))
AUTO_CLASSES = {
    "AutoConfig": "Config",
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
}
CARD_SECTIONS = ("seed", "scale", "backbone", "dlr", "optimizer", "precision", "train", "eval")  # they hold no paths
USE = """```python
{}
prompt = tokenizer("The house stands", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```"""
NO_LAYER = "transformers cannot load backbone={} yet: its options name no exported_keys"
PEFT = """
With PEFT, pass `target_modules="all-linear"` or `["a", "b"]`: `q_proj` and LLaMA's other projections are pairs of
matrices here.
"""
# The largest difference in a logit that passes, in standard deviations of the logits. Measured on 2 x 256 ids with
# vocabulary 32,000, on new and briefly trained models: fp32 3e-6 (tiny, 60m); bf16 0.03 (tiny, 60m) to 0.07 (350m,
# full). An unfolded residual gives 0.4, a wrong RoPE base 0.06 to 0.14. Rounding errors grow with training: the fp32
# and fp64 logits of 24 CoLA blocks differ by 4e-6 when new, by 8e-5 and 7e-3 with all weights doubled and tripled.
LOGIT_BOUNDS = {torch.float32: 1e-2, torch.bfloat16: 0.25}
VERIFIED_SEQUENCES = 2
PROMPT, CONTINUED = 16, 48  # tokens in ``sample.json``: from the validation text, and generated
PROBE = "The tokenizer's own check: 3,141 ways\nto write </s>, “naïve” ﬁnds and  two  spaces."


def export(
    folder: Path,
    cfg: Config,
    folded: dict[str, Tensor],
    tokenizer_path: Path,
    record: dict[str, object],
    ids: Tensor | None = None,
    dense: bool = False,
    dtype: torch.dtype | None = None,
) -> str:
    """Write ``folder`` from the ``folded`` tensors of ``cfg``'s model, by exported names; returns how it was checked.

    ``tokenizer_path`` is a file or folder. ``record`` has the run's final numbers by name, for the README and
    ``fold.json``. ``dense`` and ``dtype`` are those of ``deployed``. With token ``ids`` [B, T], the model that
    transformers loads is compared with our own, on the CPU.

    Raises UserError if the folder does not compute what was trained; it then remains as ``.<folder>.partial``. An
    earlier folder is renamed to ``<folder>_1`` (or 2, 3, ...).
    """
    exported, tensors = deployed(cfg, folded, dense, dtype)
    rows, tokenizer = tensors["model.embed_tokens.weight"], load_tokenizer(tokenizer_path)
    special_ids = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id}
    settings = model_config(exported, len(rows), rows.dtype) | special_ids
    settings["tokenizer_sha256"] = tokenizer.fingerprint
    with written_whole(folder) as draft:
        write_weights(draft, tensors)
        loadable = exported.backbone.name == DENSE.name or exported_keys(exported) is not None
        contents = {"config": settings, "generation_config": special_ids} if loadable else {}
        for name, content in (contents | {"fold": record}).items():
            write_text(draft / f"{name}.json", json.dumps(content, indent=2) + "\n")
        if loadable and exported.backbone.name != DENSE.name:
            write_text(draft / MODELING.name, modeling(exported))
        export_tokenizer(draft, tokenizer, settings["max_position_embeddings"])
        write_text(draft / "README.md", card(exported, record, cfg, loadable))
        if not loadable:
            return NO_LAYER.format(exported.backbone.name)
        if ids is None:
            return "not verified"
        reference = (tensors, torch.float32) if exported is cfg else (folded, rows.dtype)  # those are rounded again
        return agreement(draft, cfg, tokenizer, *reference, ids)


def draft_folder(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """An empty draft of ``folder``, which replaces it at the end of the context. After an exception the draft remains.

    An earlier folder is renamed. Raises UserError if another process is writing the folder.
    """
    draft = draft_folder(folder)
    with locked(draft):
        for path in set(draft.iterdir()) - {draft / LOCK}:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield draft
        for path in draft.rglob("*"):
            sync(path)
        (draft / LOCK).unlink()  # only now: another process would clear the draft
        sync(draft)
        if folder.exists():
            _rename_earlier(folder)
        draft.rename(folder)
        sync(folder.parent)


def _rename_earlier(folder: Path) -> None:
    """Keep an earlier export under another name: a run may end a second time, for example after a lost checkpoint."""
    names = (folder.with_name(f"{folder.name}_{n}") for n in count(1))
    older = next(name for name in names if not name.exists())
    folder.rename(older)
    write_to_stderr(f"note: the earlier {folder} was renamed to {older}")


def deployed(
    cfg: Config, tensors: dict[str, Tensor], dense: bool = False, dtype: torch.dtype | None = None
) -> tuple[Config, dict[str, Tensor]]:
    """The configuration and tensors to export for a run of ``cfg`` that ended with the folded ``tensors``.

    A backbone whose layers are deployed as dense weights (``Layer.deployed_dense``) becomes a plain LLaMA; with
    ``dense`` every backbone does. The weights are computed in fp32, rounded once to the dtype of ``tensors``, and cast
    to ``dtype``. Raises UserError if a backbone cannot be merged.
    """
    dtype = dtype or tensors["model.embed_tokens.weight"].dtype  # under bf16_sr learned scalars are trained in fp32
    if cfg.backbone.name != DENSE.name and (dense or deployed_dense(cfg)):
        cfg, tensors = replace(cfg, backbone=DENSE), _merged(cfg, tensors)
    return cfg, {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}


def _merged(cfg: Config, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    merged = dict(tensors)
    for path, layer in named_layers(build_model(cfg, len(tensors["model.embed_tokens.weight"]), torch.device("meta"))):
        for name in projections(path, layer):
            parts = {leaf: merged.pop(f"{name}.{leaf}") for leaf, _ in layer.parts.values()}
            merged[f"{name}.weight"] = layer.dense(parts)
    return merged


def loaded_model(cfg: Config, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> Llama:
    """The model of ``cfg`` with ``tensors``, by their exported names, for forward passes."""
    model = build_model(cfg, len(tensors["model.embed_tokens.weight"]), device, dtype, initialize=False)
    load_(model, tensors)
    return model.requires_grad_(False)


def deployed_dense(cfg: Config) -> bool:
    """Whether a run of ``cfg`` ends with a plain LLaMA."""
    return cfg.backbone.name == DENSE.name or cfg.backbone.layer.deployed_dense


def exported_keys(cfg: Config) -> tuple[str, ...] | None:
    """The options that the exported layer of ``cfg.backbone`` takes; None if it has no exported layer.

    A subclass does not inherit the layer, because its formula differs.
    """
    return vars(type(cfg.backbone)).get("exported_keys")


def modeling(cfg: Config) -> str:
    """The source of the folder's modeling file: MODELING, with ``layers_source`` in place of its import."""
    before, after = re.split(r"(?m)^from dlr_pretrain\..*\n", MODELING.read_text("utf-8"))
    return f"{before}{layers_source(cfg)}{after}"


def layers_source(cfg: Config) -> str:
    """The source of the exported layers: EXPORTED_LAYERS, followed by that of a user's own backbone."""
    text = EXPORTED_LAYERS.read_text("utf-8")
    if not cfg.backbone.exported_layer:
        return text
    module, _, name = cfg.backbone.exported_layer.replace(":", ".").rpartition(".")
    layer = getattr(import_module(module), name)  # unlike pkgutil's, this error names what is missing
    return f"{text}\n\n{inspect.getsource(layer)}\n\nLAYERS[{cfg.backbone.name!r}] = {layer.__name__}\n"


def import_failure() -> str:
    """Why transformers cannot be imported; "" if it can."""
    try:
        with without_warnings():
            import transformers  # noqa: F401
    except Exception as error:  # its own imports may fail in many ways, such as a torchvision built for another torch
        return f"transformers cannot be imported ({first_line(error)})"
    return ""


def write_weights(folder: Path, tensors: dict[str, Tensor], shard_bytes: int = 5 * 10**9) -> None:
    """Write ``model.safetensors``, or an index and shards of at most ``shard_bytes`` (at least one tensor each).

    Raises UserError if a file cannot be written.
    """
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    # copies, because projections are views of fused tensors, which safetensors refuses
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        save_torch_state_dict(copies, folder, max_shard_size=shard_bytes, metadata={"format": "pt"})
    except SafetensorError as error:
        raise UserError(f"{folder}: its weights cannot be written: {error}") from error
    for file in folder.glob("model*.safetensors"):
        share_mode(file)


def model_config(cfg: Config, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json``, without the tokenizer's ids, of a plain LLaMA or of one with the layers of ``cfg.backbone``."""
    shape = settings_of(cfg.scale) | {
        "vocab_size": vocab_size,
        "max_position_embeddings": max(POSITIONS, cfg.train.seq_len),
        "hidden_act": "silu" if cfg.backbone.swiglu_silu else "linear",
        "bos_token_id": None,
        "dtype": str(dtype).removeprefix("torch."),
    }
    if cfg.backbone.name == DENSE.name:
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}
    return {
        "model_type": "lowrank_llama",
        "architectures": ["LowRankLlamaForCausalLM"],
        "auto_map": {auto: f"{MODELING.stem}.LowRankLlama{name}" for auto, name in AUTO_CLASSES.items()},
        "backbone": cfg.backbone.name,
        **{name: getattr(cfg.backbone, name) for name in exported_keys(cfg) or ()},
        **({LAYER: cfg.backbone.exported_layer} if cfg.backbone.exported_layer else {}),
        **shape,
    }


def card(cfg: Config, record: dict[str, object], trained: Config, loadable: bool) -> str:
    """The text of the README. ``cfg`` describes the model in the folder, ``trained`` the run; ``record`` has the run's
    final numbers by name; those that are None are omitted."""
    name = trained.backbone.name
    title = name + (f" + DLR ({trained.dlr.name}), folded" if trained.dlr.enabled else "")
    title += ", merged into dense weights" if name != cfg.backbone.name else ""
    root, hub = trained.data.root or "", "hf://datasets/"
    text = root.removeprefix(hub) if root.startswith(hub) else trained.data.source  # a local path may be private
    if mixed := trained.data.sources:
        whole = sum(one.weight for one in mixed.values())
        text = ", ".join(f"{name} {one.weight / whole:.1%}" for name, one in mixed.items())
    facts = {
        "trained on": f"{text}, {trained.data.packing}",
        "evaluation text": trained.eval.packing,
        "precision": trained.precision.name,
    }
    rows = {key: value for key, value in (facts | record).items() if value is not None}
    tree, trust = to_dict(trained), cfg.backbone.name != DENSE.name
    del tree["scale"]["source"], tree["eval"]["sets"]  # may be paths
    use = USE.format(loading(".", trust)) + PEFT * trust if loadable else NO_LAYER.format(cfg.backbone.name)
    template, citation = (Path(__file__).with_name(f"{part}.md").read_text("utf-8") for part in ("card", "citation"))
    return Template(template).substitute(
        tags=", ".join(["pre-training", "low-rank", name, *["dlr"] * trained.dlr.enabled]),
        scale=cfg.scale.name,
        title=title,
        use=use,
        numbers=markdown_table(["", ""], ([key, few_digits(value)] for key, value in rows.items())),
        configuration=OmegaConf.to_yaml(OmegaConf.create({section: tree[section] for section in CARD_SECTIONS})),
        citation=citation if trained.dlr.enabled else "",
    )


def origin(run_dir: Path) -> dict[str, object]:
    """Rows for the card of a run's model: the command of its last start, without paths, and the commit of the code."""
    start = read_record(run_dir).get("starts", [{}])[-1]
    words = [re.sub(r"(?<![\w.:/-])(/|~|\.\.?/)[^\s,\]}]*", "...", word) for word in start.get("command", ())[1:]]
    return {"command": f"`train.py {shlex.join(words)}`" if start else None, "commit of the code": start.get("git")}


def few_digits(value: object, digits: int = 4) -> str:
    """A float with ``digits`` digits, an integer with separators, anything else unchanged."""
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def open_folder(folder: Path, dtype: torch.dtype | str = "auto"):
    """The ``PreTrainedModel`` of an exported folder, on the CPU and in evaluation mode, and its tokenizer.

    The weights are cast to ``dtype``; "auto" keeps the dtype of the file. No code of the folder runs: the low-rank
    layers are this package's, or those of an installed package that the folder names. Raises UserError, which lists the
    tensors that do not fit, if ``folder`` is not a sound export; ``transformers`` itself would only warn of missing
    weights and initialise them at random.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    with without_warnings():
        from dlr_pretrain.deploy.modeling_lowrank_llama import LowRankLlamaConfig, LowRankLlamaForCausalLM

    AutoConfig.register(LowRankLlamaConfig.model_type, LowRankLlamaConfig, exist_ok=True)
    AutoModelForCausalLM.register(LowRankLlamaConfig, LowRankLlamaForCausalLM, exist_ok=True)
    folder = exported_folder(folder)
    _register_layer(folder)
    disable_progress_bar()
    lenient = {"ignore_mismatched_sizes": True, "output_loading_info": True, "trust_remote_code": False}
    try:
        with without_warnings():
            loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **lenient)
            model, report = loaded
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged configuration, tensor file or tokenizer raises errors of many types
        raise UserError(f"{folder}: is not what an export wrote: {first_line(error)}. Export it again") from error
    wrong = [f"{name}: missing" for name in sorted(report["missing_keys"])]
    wrong += [f"{name}: not a tensor of this model" for name in sorted(report["unexpected_keys"])]
    wrong += [f"another shape: {mismatch}" for mismatch in sorted(report["mismatched_keys"])]
    if wrong:
        raise UserError("\n  ".join([f"{folder}: its weights are not those of its config.json:", *shortened(wrong)]))
    return model.eval(), tokenizer


def _register_layer(folder: Path) -> None:
    """Register the exported layer of a user's own backbone, from the user's package, with our modeling file."""
    settings = {}
    with suppress(OSError, ValueError):  # the loader reports a damaged file
        settings = read_json(folder / "config.json", {"backbone": str, LAYER: str})
    if not (name := settings.get(LAYER)):
        return
    if came_with(folder, re.split("[.:]", name)[0]):
        origin = "is in a folder around it, from which it may have been downloaded"
        fix = "If you trust its code, install its package, or move the export out of that folder"
        raise UserError(f"{folder}: names the layer {name}, which {origin}. {fix}")
    try:
        layer = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            folder,
            f"needs {name}, which cannot be imported ({error})",
            "Install its package, or add the folder that holds it to PYTHONPATH",
        ) from error
    if not (isinstance(layer, type) and issubclass(layer, LowRankLinear)):
        kind = "which is not a subclass of LowRankLinear"
        raise UserError(f"{folder}: names the layer {name}, {kind}. Its config.json is not what an export wrote")
    LAYERS[settings["backbone"]] = layer


def came_with(folder: Path, package: str) -> bool:
    """Whether Python would find ``package`` in ``folder`` or around it, and it is neither imported nor installed."""
    spec = None
    with suppress(ImportError, ValueError):
        spec = find_spec(package)  # imports nothing, because the name has no dot
    if spec is None or package in sys.modules or package in packages_distributions():
        return False
    places = [Path(place).parent for place in spec.submodule_search_locations or [spec.origin or "/built-in"]]
    return any(folder.resolve().is_relative_to(place.resolve()) for place in places if place != Path("/"))


@torch.no_grad()
def agreement(
    folder: Path, cfg: Config, tokenizer: Tokenizer, tensors: dict[str, Tensor], rounded: torch.dtype, ids: Tensor
) -> str:
    """Compare ``folder`` with our model of ``cfg`` and ``tensors`` on token ``ids`` [B, T] in fp32; returns the result.

    ``rounded`` is the folder's dtype if its weights were rounded once more than ``tensors``, and fp32 if they are
    the same; it sets the bound. Raises UserError as ``open_folder`` does, if the logits differ by more than the bound,
    or if the folder's tokenizer does not return the ids of ``tokenizer``, the tokenizer of training.
    """
    if failure := import_failure():
        return f"not verified: {failure}"
    expected = loaded_model(cfg, tensors, torch.device("cpu"), torch.float32).logits(ids)
    exported, exported_tokenizer = open_folder(folder, torch.float32)
    difference = ((exported(input_ids=ids).logits - expected).abs().max() / expected.std()).item()
    if not difference <= LOGIT_BOUNDS[rounded]:  # NaN is beyond it too
        raise UserError(
            f"{folder}: the logits that transformers computes differ from the trained model's by {difference:.2g} of "
            f"their standard deviation, beyond the bound of {LOGIT_BOUNDS[rounded]:g}"
        )
    for text, as_text in probes(tokenizer):
        probed = exported_tokenizer(text, split_special_tokens=as_text).input_ids
        if isinstance(tokenizer, FastTokenizer) and as_text:  # training drops the end, which may be a word, from texts
            probed = [id for id in probed if id != tokenizer.eos_id]
        if probed != tokenizer.encode([text])[0].tolist():
            raise UserError(f"{folder}: its tokenizer.json does not give the ids of training, for {text!r}")
    write_sample(folder, exported, exported_tokenizer, ids[0, :PROMPT])
    return f"transformers loads it; its logits differ by at most {difference:.0e} of their standard deviation"


def probes(tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    """Yields texts that the export must read as training did, and whether with ``split_special_tokens``."""
    as_text = tokenizer.special_in_text == "text"
    used = tokenizer.settings.values() if as_text else ()  # these are tokens of the export anyway
    yield PROBE, as_text
    yield " and ".join(("Special", *(token for token in tokenizer.special if token not in used))), False


def write_sample(folder: Path, model, tokenizer, prompt: Tensor) -> None:
    """Write ``sample.json``: the text of the ids ``prompt`` and the ``model``'s continuation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        written = model.generate(prompt[None], max_new_tokens=CONTINUED, do_sample=True, temperature=0.8, top_p=0.95)[0]
    text = tokenizer.decode(prompt, skip_special_tokens=True)
    sample = {"prompt": text, "continuation": continuation(tokenizer, prompt, written)}
    write_text(folder / "sample.json", json.dumps(sample, ensure_ascii=False, indent=2) + "\n")


def continuation(tokenizer, prompt, written) -> str:
    """The text that the ids ``written`` add to those of ``prompt``, with which they begin.

    They are decoded together with the prompt, because a token decoded first loses its leading space.
    """
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, written))
    return whole.removeprefix(before)
