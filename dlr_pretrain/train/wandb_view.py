"""W&B as a view of ``metrics.jsonl``."""

from __future__ import annotations

import netrc
import os
import sys
import uuid
from pathlib import Path

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.errors import Stopped, UserError
from dlr_pretrain.train.checkpoint import write_durably


class WandbView:
    """W&B as a view of ``metrics.jsonl``: it never stops the run, and never asks for anything."""

    def __init__(self, cfg: Config, run_dir: Path):
        try:
            import wandb
        except ImportError:
            raise UserError("logger=wandb: wandb is not installed. Install it, or use logger=jsonl") from None
        settings = wandb.Settings(silent=True, console="off")

        def start(mode: str):
            return wandb.init(
                project=cfg.logger.project,
                entity=cfg.logger.entity,
                name=run_dir.name,
                id=_run_id(run_dir),
                resume="allow",
                dir=run_dir,
                mode=mode,
                config=to_dict(cfg),
                settings=settings,
            )

        self.mode, self.why = os.environ.get("WANDB_MODE") or "online", "WANDB_MODE"
        if self.mode == "online" and not _has_wandb_key(settings.base_url):  # wandb would ask for one
            self.mode, self.why = "offline", "no API key found: set WANDB_API_KEY for online"
        try:
            self.run = start(self.mode)
        except Exception as error:  # no network, a wrong key, a server that is away
            if self.mode == "offline":
                raise UserError(f"logger=wandb: {error}. Use logger=jsonl") from error
            self.mode, self.why = "offline", f"{self.mode} failed: {str(error).splitlines()[0]}"
            self.run = start(self.mode)
        self.run.define_metric("*", step_metric="step")

    def describe(self) -> str:
        """Where the curves are."""
        if self.mode == "online":
            return f"online, {self.run.url}"
        return f"{self.mode} ({self.why}), under {self.run.dir}"

    def write(self, record: dict) -> None:
        if self.run is None:
            return
        try:
            self.run.log({name: value for name, value in record.items() if value is not None})
        except Exception as error:
            print(f"warning: W&B was left, metrics.jsonl goes on: {error}", file=sys.stderr, flush=True)
            self.run = None

    def __enter__(self) -> WandbView:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_) -> None:
        if self.run is not None:
            self.run.finish(exit_code=0 if kind in (None, Stopped) else 1)


def _has_wandb_key(url: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = url.split("//")[-1].split("/")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _run_id(run_dir: Path) -> str:
    """The W&B id of this run, drawn once in its life."""
    path = run_dir / "wandb_id"
    if not path.exists():
        write_durably(path, uuid.uuid4().hex[:12])
    return path.read_text().strip()
