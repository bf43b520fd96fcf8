"""A damaged JSON file of ours is named in an error, or treated as absent."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import save_file

from dlr_pretrain.cli import load
from dlr_pretrain.config.run_folder import read_config, read_record
from dlr_pretrain.data.tokens import read_manifest
from dlr_pretrain.launch.status import last_job
from dlr_pretrain.models.pretrained import PretrainedFolder
from dlr_pretrain.train import checkpoint
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import read_beat, read_metrics
from scripts.paper import extract

START = {"time": "2026-11-27T10:00:00Z", "command": ["train.py"], "world_size": 1, "device": "CPU"}
STATE = {"name": "running", "step": 3, "reason": "", "time": 1.0}
MANIFEST = {"identity": {}, "starts": [START], "state": STATE, "saved": 3, "micro_batch": {"8": 4}, "parameters": 5}
TOKENS = {
    "format": 5, "source": "a", "made_from": "b", "contents": {}, "tokenizer": {"sha256": "c", "vocab_size": 5},
    "shards": {"train": 1, "validation": 1},
}  # fmt: skip
BEATS = {"host": "h", "pid": 7, "machine": "m", "token": "t", "time": 1.0}


def damaged_checkpoint(folder) -> str | None:
    return checkpoint.fault(folder / "step_00000001")


def pretrained(folder) -> None:
    save_file({}, folder / "model.safetensors")
    PretrainedFolder(folder, load(["scale=tiny", "data=sample", "logger=jsonl"]), 64, "")


READERS = {  # file: (a sound content, or None for any; its reader; the reader's result for a damaged file)
    "manifest.json": (MANIFEST, read_record, UserError),
    "config.yaml": (None, read_config, UserError),
    "tokens/manifest.json": (TOKENS, lambda folder: read_manifest(folder / "tokens"), UserError),
    "config.json": (None, pretrained, UserError),
    "model.safetensors.index.json": ({"weight_map": {}}, pretrained, UserError),
    "result.json": (
        {"variants": [{"name": "a", "tokens_per_second": 1.0}]},
        lambda folder: extract.read_result(folder / "result.json", {"variants": [extract.SPEED]}),
        UserError,
    ),
    "step_00000001/checkpoint.json": ({"format": 4}, damaged_checkpoint, "checkpoint.json is damaged"),
    ".beats/0": (BEATS, lambda folder: read_beat(folder, 0), {}),
    "job.json": ({"time": 1.0, "job": "1_2", "log": "a.log"}, last_job, {}),
    "metrics.jsonl": ({"step": 1}, lambda folder: read_metrics(folder / "metrics.jsonl"), []),
}


def wrong_types(sound: dict):
    """Yields ``sound`` with one entry of another type, for every entry, also within nested entries."""
    for key, value in sound.items():
        yield sound | {key: [] if isinstance(value, dict) else {}}
        if isinstance(value, dict):
            yield from (sound | {key: inside} for inside in wrong_types(value))
        if isinstance(value, list) and isinstance(value[0], dict):
            yield from (sound | {key: [inside]} for inside in wrong_types(value[0]))


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named_or_treated_as_absent(tmp_path, name):
    sound, read, found = READERS[name]
    wrong = [json.dumps(content) for content in wrong_types(sound or {})]
    if name == "config.yaml":
        wrong += ["a: [", "text"]
    else:
        wrong += ["", "[]", "7", '{"a": ', '"\\', "9" * 5000]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for content in [*wrong, "[" * 100_000, '{"a":' * 100_000, "\0", b"\xff\xfe\xff"]:
        (tmp_path / name).write_bytes((content if isinstance(content, bytes) else content.encode()) + b"\n")
        if found is UserError:
            with pytest.raises(UserError, match=r"damaged|cannot be read") as caught:
                read(tmp_path)
            assert str(tmp_path) in str(caught.value)
        else:
            assert read(tmp_path) == found, content[:60]


def test_sound_contents_are_read(tmp_path):
    """The test above would also pass if every content were refused."""
    for name, (sound, read, _) in READERS.items():
        if sound and name not in ("model.safetensors.index.json", "step_00000001/checkpoint.json"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(sound) + "\n")
            assert read(tmp_path) == ([sound] if name == "metrics.jsonl" else sound)
