"""Records in ``shards.json`` which shards a run reads, so that a truncated one may be fetched again during the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.config.written import read_record
from dlr_pretrain.data.sources import Contents, LocalSource, Source, TextSource
from dlr_pretrain.data.streams import begun
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.record import update_record
from dlr_pretrain.util.files import is_there, write_durably

SHARDS = "shards.json"


def take_over_regrown(run_dir: Path, cfg: Config, source: Source, say: Callable[[str], None]) -> None:
    """Update the identity of the run if shards on disk that were truncated are whole now.

    ``LocalSource.regrown`` says which shards these are. Shards on the hub are never truncated: a longer file there is
    another text, from another commit.
    """
    path, record = run_dir / SHARDS, read_record(run_dir)
    identity = record.get("identity", {})
    if not isinstance(source, LocalSource) or identity.get("data.shards") == source.fingerprint or not is_there(path):
        return
    before = Contents(**json.loads(path.read_text()))
    if before.fingerprint != identity.get("data.shards") or not source.contents.longer(before):
        return
    newest, _ = checkpoint.newest(run_dir / "checkpoints")
    places = (checkpoint.load(newest).state["streams"] if newest else None) or {}
    if grown := source.regrown(before, begun(source, cfg.data.seed, places)):
        of_checkpoints = [*record.get("regrown", []), identity["data.shards"]]
        update_record(run_dir, {"identity": identity | {"data.shards": source.fingerprint}, "regrown": of_checkpoints})
        sizes = (f"{name} ({before.train[name]:,} bytes before, {source.contents.train[name]:,} now)" for name in grown)
        say(f"fetched again, and read on in: {', '.join(sizes)}")


def note_shards(run_dir: Path, source: Source) -> None:
    """Write the contents of ``source`` to ``shards.json``, if it is a source of texts."""
    if isinstance(source, TextSource):
        write_durably(run_dir / SHARDS, json.dumps(asdict(source.contents), indent=1))
