"""Writes a folded checkpoint as a folder that ``transformers`` loads.

This module writes everything itself (safetensors, JSON, a copy of the modeling file), so that a run ends with a
complete folder even if transformers is not installed. It writes the folder under another name and renames it at the
end, so that the folder is either complete or absent.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path

import torch

from dlr_pretrain.config import Config
from dlr_pretrain.data.tokenizer import EOS, PAD, Tokenizer
from dlr_pretrain.deploy.card import card
from dlr_pretrain.deploy.cola_layout import cola_config, cola_tensors
from dlr_pretrain.deploy.tokenizer import export_tokenizer, read_spiece
from dlr_pretrain.models.llama import INIT_STD, NORM_EPS, ROPE_BASE, Llama
from dlr_pretrain.models.shapes import listed, misfits
from dlr_pretrain.util.errors import UserError, tell
from dlr_pretrain.util.files import sync, sync_all
from dlr_pretrain.util.text import loading

POSITIONS = 1024  # at least; a run with longer sequences has its own length
SHARD_BYTES = 5 * 10**9
MODELING = Path(__file__).with_name("modeling_lowrank_llama.py")
WRITTEN = re.compile(  # names in an export; fold.py adds fold.json
    r"README\.md|(config|generation_config|fold|tokenizer|tokenizer_config|special_tokens_map)\.json|spiece\.model|"
    rf"model(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index\.json|{re.escape(MODELING.name)}"
)
AUTO_CLASSES = {
    "AutoConfig": "Config",
    "AutoModel": "Model",
    "AutoModelForCausalLM": "ForCausalLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def export(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    cfg: Config,
    vocab_size: int,
    tokenizer_path: Path,
    record: dict[str, object],
    check: Callable[[Path], None] = lambda _: None,
    trained: Config | None = None,
    layout: str = "own",
) -> None:
    """Write ``folder`` from folded weights.

    ``tensors`` are the folded parameters and buffers of the model of ``cfg``, under its own names, all fp32 or all
    bf16. ``tokenizer_path`` is the sentencepiece model. ``record`` has the final numbers of the run, by name, for the
    folder's README. ``trained`` is the run's configuration if it is not ``cfg`` (see ``deployed``). ``layout`` "cola"
    writes a CoLA model for its authors' code.

    ``check`` inspects the finished folder before it is renamed; if ``check`` raises, the folder remains as
    ``.<folder>.partial``. An earlier export at ``folder`` is replaced; a folder with any other file in it is kept as
    ``<folder>_kept1`` (or 2, 3, ...).
    """
    dtype = check_tensors(tensors, cfg, vocab_size)
    pieces = len(read_spiece(tokenizer_path).pieces)
    if pieces > vocab_size:
        raise UserError(f"{tokenizer_path}: has {pieces:,} pieces, more than the model's vocabulary of {vocab_size:,}")
    settings = model_config(cfg, vocab_size, dtype) | {"spiece_sha256": Tokenizer(tokenizer_path).fingerprint}
    if layout == "cola":
        tensors, settings = cola_tensors(cfg, tensors), cola_config(cfg, settings)
    aside, old = (folder.with_name(f".{folder.name}.{suffix}") for suffix in ("partial", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_weights(aside, tensors)
    if loadable(cfg):
        _write_json(aside / "config.json", settings)
        _write_json(aside / "generation_config.json", {"pad_token_id": PAD, "eos_token_id": EOS})
    if layout == "own" and cfg.backbone.name in exported_layers()[0]:
        shutil.copyfile(MODELING, aside / MODELING.name)
    export_tokenizer(aside, tokenizer_path, positions(cfg))
    (aside / "README.md").write_text(card(cfg, record, trained or cfg, how_to_load(cfg, layout)), encoding="utf-8")
    check(aside)
    shutil.rmtree(old, ignore_errors=True)
    sync_all(aside)
    if folder.exists():
        _out_of_the_way(folder, old)
    aside.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def require_export(folder: Path) -> None:
    """Raise UserError unless ``folder`` is absent, empty or an earlier export, with or without files added since."""
    if (names := _names(folder)) and not _is_export(folder):
        rule = f"it is no earlier export ({', '.join(names[:3])})"
        raise UserError(f"{folder} is in the way: {rule}. Move it away, or name another folder")


def _is_export(folder: Path) -> bool:
    weights = (folder / "spiece.model").exists() and any(folder.glob("model*.safetensors"))
    settings = _settings(folder)  # None for a backbone that transformers cannot load yet
    return weights and (settings is None or '"spiece_sha256"' in settings)


def _names(folder: Path) -> list[str]:
    if folder.is_dir():
        return sorted(path.name for path in folder.iterdir())
    return [folder.name] if folder.exists() else []


def _settings(folder: Path) -> str | None:
    """The text of ``config.json``; None if there is none."""
    path = folder / "config.json"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else None


def _out_of_the_way(folder: Path, old: Path) -> None:
    """Rename a folder that is purely an export to ``old``, which will be deleted, and any other to a name that stays.

    A user's files therefore stay with the weights that they belong to, and never make the end of a run fail.
    """
    saved_anew = '"transformers_version"' in (_settings(folder) or "")  # save_pretrained writes this key
    ours = _is_export(folder) and not saved_anew
    if foreign := [name for name in _names(folder) if not (ours and WRITTEN.fullmatch(name))]:
        taken = (folder.with_name(f"{folder.name}_kept{n}") for n in count(1))
        old = next(path for path in taken if not path.exists())
        tell(f"note: {folder} held what no export writes ({', '.join(foreign[:3])}): it is {old} now")
    folder.rename(old)


def positions(cfg: Config) -> int:
    return max(POSITIONS, cfg.train.seq_len)


def loadable(cfg: Config) -> bool:
    """Whether transformers can load the folder. A new backbone can be exported before MODELING has a layer for it."""
    return cfg.backbone.name == "full" or cfg.backbone.name in exported_layers()[0]


@cache
def exported_layers() -> tuple[frozenset[str], frozenset[str]]:
    """The backbones that MODELING has a layer for, and the names of the configuration that these layers take.

    They are parsed from the text of the file, because importing it requires transformers.
    """
    tree = ast.parse(MODELING.read_text(encoding="utf-8"))
    tables = [node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"]
    config = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "LowRankLlamaConfig")
    start = next(node for node in config.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    return frozenset(map(ast.literal_eval, tables[0].value.keys)), frozenset(a.arg for a in start.args.args[1:])


def check_tensors(tensors: dict[str, torch.Tensor], cfg: Config, vocab_size: int) -> torch.dtype:
    """Raise UserError unless ``tensors`` fit the model of ``cfg`` and share one dtype; returns that dtype."""
    with torch.device("meta"):
        expected = Llama(cfg, vocab_size, grouped=False).state_dict()
    wrong = misfits(*({name: tensor.shape for name, tensor in of.items()} for of in (tensors, expected)))
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        wrong.append("dtypes: " + ", ".join(sorted(map(str, dtypes))) + " instead of all float32 or all bfloat16")
    if wrong:
        raise UserError("\n".join(["these weights are not exported:", *listed(wrong)]))
    return dtypes.pop()


def write_weights(folder: Path, tensors: dict[str, torch.Tensor], shard_bytes: int = SHARD_BYTES) -> None:
    """Write ``model.safetensors``, or shards of at most ``shard_bytes`` (at least one tensor each) with their index.

    Raises UserError if a file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[list[str]] = [[]]
    room = shard_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = ["model.safetensors"]
    for file, names in zip(files, shards, strict=True):
        # a copy of each: projections of a group are views of one storage, which safetensors refuses
        own = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in names}
        try:
            save_file(own, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise UserError(f"{folder / file}: cannot be written: {error}") from error
        (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors makes it readable by its owner alone
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": where})


def model_config(cfg: Config, vocab_size: int, dtype: torch.dtype) -> dict[str, object]:
    """The content of ``config.json``, for a plain LLaMA or for one with the layers of ``cfg.backbone``."""
    shape = {
        "vocab_size": vocab_size,
        "hidden_size": cfg.scale.hidden_size,
        "intermediate_size": cfg.scale.intermediate_size,
        "num_hidden_layers": cfg.scale.num_layers,
        "num_attention_heads": cfg.scale.num_heads,
        "num_key_value_heads": cfg.scale.num_heads,
        "max_position_embeddings": positions(cfg),
        "hidden_act": "silu" if cfg.backbone.knobs.get("swiglu_silu", True) else "linear",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": INIT_STD,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "dtype": DTYPES[dtype],
    }
    if cfg.backbone.name == "full":
        return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **shape}
    return {
        "model_type": "lowrank_llama",
        "architectures": ["LowRankLlamaForCausalLM"],
        "auto_map": {auto: f"{MODELING.stem}.LowRankLlama{own}" for auto, own in AUTO_CLASSES.items()},
        "backbone": cfg.backbone.name,
        **{name: value for name, value in cfg.backbone.knobs.items() if name in exported_layers()[1]},
        **shape,
    }


def how_to_load(cfg: Config, layout: str) -> str:
    if layout == "cola":
        return 'In the layout of the CoLA authors\' code: `ColaForCausalLM.from_pretrained(".")` of their repository.'
    if not loadable(cfg):
        return f"The folded weights of backbone={cfg.backbone.name}, for which {MODELING.name} has no layer yet."
    return f"""```python
{loading(".", trust=cfg.backbone.name != "full")}
prompt = tokenizer("The house stands", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))
```"""


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
