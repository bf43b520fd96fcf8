"""Sends the whole history of a run directory to W&B as one run, from ``metrics.jsonl`` alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dlr_pretrain.config.written import read_config, read_record
from dlr_pretrain.train.lock import RunLock
from dlr_pretrain.train.metrics import missing_steps
from dlr_pretrain.train.wandb_sender import choose_mode, lacks_key, last_step, log, open_run, redacted
from dlr_pretrain.train.wandb_view import draw_id, keep_id, wandb_id
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.history import read_metrics


def replay(run_dir: Path, say: Callable[[str], None], partial: bool = False, new_id: bool = False, **logger) -> None:
    """Send the steps that W&B lacks of a run; ``say`` tells where they are.

    They are sent under the run's own W&B id or, with ``new_id``, under a new one. ``logger`` replaces the project and
    the entity of the run's configuration. WANDB_MODE=offline writes a file for ``wandb sync`` instead.
    Raises UserError if the run is in use, unfinished (unless ``partial``) or no run at all, and if W&B fails: the next
    call does not send again what W&B has taken by then.
    """
    if not (run_dir / "config.yaml").exists():
        raise UserError(f"{run_dir} is no run: it has no config.yaml")
    mode = choose_mode()
    if mode not in ("online", "offline"):
        raise UserError(f"WANDB_MODE={mode}: must be online, or offline for a file that `wandb sync` sends")
    with RunLock(run_dir) as lock:
        lock.acquire()
        config = read_config(run_dir)
        try:
            config["logger"] |= {name: value for name, value in logger.items() if value is not None}
            steps = config["train"]["steps"]
        except (KeyError, TypeError) as error:
            raise UserError(f"{run_dir / 'config.yaml'} is damaged ({error!r})") from error
        records = read_metrics(run_dir / "metrics.jsonl")
        step = records[-1]["step"] if records else 0
        if not partial and step < steps:
            raise UserError(f"{run_dir} is at step {step} of {steps}. Let it finish, or send what there is: --partial")
        first = read_record(run_dir).get("forked", {"step": 0})["step"] + 1
        if missing := missing_steps((record["step"] for record in records), first, step):
            say(f"warning: {run_dir}: metrics.jsonl lacks steps {missing}")
        again = "The same command"
        try:
            settings = {"x_disable_stats": True, "x_disable_meta": True}  # they would describe this machine
            chosen = draw_id() if new_id else wandb_id(run_dir)
            run = open_run(run_dir, chosen, config, mode, **settings)
            if new_id:  # only now: the history under the old id may be whole
                keep_id(run_dir, chosen)
                again = "The same command without --new-id"
            after = last_step(run)
            log(run, records, after)
            run.finish(exit_code=0)
        except Exception as error:
            if lacks_key(error):
                raise UserError("no API key found: set WANDB_API_KEY, or WANDB_MODE=offline for a file") from None
            raise UserError(f"{run_dir}: W&B: {redacted(error)}. {again} sends the rest") from error
    sent = sum(record["step"] > after for record in records)
    where = run.url if mode == "online" else f"wandb sync {os.path.dirname(run.dir)}"
    say(f"{run_dir}: {sent} of {len(records)} steps sent, {where}")
