"""The shards that a run reads, in ``shards.json``: one that was cut off may be fetched again in the middle of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.data.sources import Contents, Source, TextSource
from dlr_pretrain.data.streams import read_through
from dlr_pretrain.durable import is_there, write_durably
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.record import read_record, update_record

SHARDS = "shards.json"


def take_over_regrown(run_dir: Path, cfg: Config, source: Source, say: Callable[[str], None]) -> None:
    """Make shards of ``source`` that are longer than before part of what the run is, where no stream has read them to
    their end: what it had read of them is what now stands at their beginning."""
    path, record = run_dir / SHARDS, read_record(run_dir)
    identity = record.get("identity", {})
    if not isinstance(source, TextSource) or identity.get("data.shards") == source.fingerprint or not is_there(path):
        return
    before = Contents(**json.loads(path.read_text()))
    grown = source.contents.regrown(before) if before.fingerprint == identity.get("data.shards") else []
    newest, _ = checkpoint.newest(run_dir / "checkpoints")
    places = (checkpoint.load(newest).state["streams"] if newest else None) or {}
    ended = {list(source.contents.train)[i] for i in read_through(source, cfg.data.seed, places)}
    if grown and not ended & set(grown):
        of_checkpoints = [*record.get("regrown", []), identity["data.shards"]]
        update_record(run_dir, {"identity": identity | {"data.shards": source.fingerprint}, "regrown": of_checkpoints})
        sizes = (f"{name} ({before.train[name]:,} bytes before, {source.contents.train[name]:,} now)" for name in grown)
        say(f"fetched again, and read on in: {', '.join(sizes)}")


def note_shards(run_dir: Path, source: Source) -> None:
    """Write down what ``source`` consists of."""
    if isinstance(source, TextSource):
        write_durably(run_dir / SHARDS, json.dumps(asdict(source.contents), indent=1))
