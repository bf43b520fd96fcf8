"""Where a run starts: its own newest checkpoint, else another run (``run.start_from``), a dense model, or the seed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dlr_pretrain.config import Config
from dlr_pretrain.config.identity import differences
from dlr_pretrain.config.problems import shown
from dlr_pretrain.config.written import read_record
from dlr_pretrain.models.start import WEIGHTS, FolderStart
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Checkpoint
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import bind_identity, update_record
from dlr_pretrain.util.errors import UserError

LATE = 5.0  # seconds within which a network file system shows a checkpoint that another machine has written
Say = Callable[[str], None]
# Keys of the identity. Weights mean nothing under another MODEL, moments under another OPTIMIZER, except its RATES, and
# a position in the data under other DATA.
MODEL = ("scale.", "backbone.", "dlr.", "tokenizer.")
OPTIMIZER = ("optimizer.", "precision.")
RATES = (
    *("optimizer.beta", "optimizer.eps", "optimizer.weight_decay", "optimizer.b_lr"),
    *("optimizer.schedule", "optimizer.shift", "optimizer.restart_warmup"),  # loro's
)
DATA = ("data.", "train.global_batch", "train.seq_len")
RECIPE = ("scale.lr", "scale.steps", "scale.warmup_steps", "scale.adam_eps", "scale.global_batch", "scale.eval_tokens")


@dataclass
class Start:
    """``checkpoint``: the state to restore, whole or in part; ``folder``: initial weights; neither: the seed's."""

    checkpoint: Checkpoint | None = None
    folder: FolderStart | None = None
    resumes: bool = False  # this run's own checkpoint


def find_start(cfg: Config, ranks: Ranks, vocab_size: int, say: Say) -> tuple[Start, list[Path]]:
    """The start of the run in ``cfg.run.dir``, and its damaged checkpoints, which were passed over (on rank 0).

    What a new run starts from becomes part of its identity. All ranks must call.
    """
    run_dir, passed_over = Path(cfg.run.dir), []

    def own() -> Path | None:
        found, skipped = newest(run_dir, say)
        passed_over.extend(skipped)
        saved = read_record(run_dir).get("saved")
        if found is None and saved is not None:
            fix = "Restore it, or move the run directory away to start over"
            raise UserError(f"{run_dir}/checkpoints: none, and step {saved:,} was saved. {fix}")
        return found

    if (path := ranks.on_main(own)) is not None:
        found = checkpoint.load(path)
        require_own(found, ranks.on_main(lambda: read_record(run_dir)["identity"]))
        return Start(found, resumes=True), passed_over
    if cfg.run.start_from is not None:
        return start_from(cfg, ranks, vocab_size, say), passed_over
    if cfg.train.init_from is not None:
        dense = _open_folder(cfg, ranks, vocab_size, "train.init_from", cfg.train.init_from, dense=True)
        return Start(folder=dense), passed_over
    return Start(), passed_over


# ----------------------------------------------------------------------------------------------------
# The run's own checkpoints


def newest(run_dir: Path, say: Say) -> tuple[Path | None, list[Path]]:
    """The newest valid checkpoint of a run, and the damaged ones that are newer.

    The checkpoint that was saved last may appear late on a network file system; it is waited for, up to ``LATE``
    seconds. ``say`` gets a warning for each checkpoint that is passed over, and one if the last one is not usable.
    """
    root, saved = run_dir / "checkpoints", read_record(run_dir).get("saved", 0)
    late = time.monotonic() + LATE
    while saved not in (0, *map(checkpoint.step_of, checkpoint.finished(root))) and time.monotonic() < late:
        time.sleep(0.1)
    there = checkpoint.finished(root)  # listed first: one that appears only later is not known to be damaged
    found, skipped = checkpoint.newest(root)
    for reason in skipped:
        say(f"warning: passed over {reason}")
    if found is not None and checkpoint.step_of(found) < saved:
        lost = f"the checkpoint of step {saved:,}, the last that was saved, is missing or incomplete"
        say(f"warning: {root}: {lost}. Continuing from {found.name}: the steps after it are trained again")
    return found, [d for d in there if found is not None and checkpoint.step_of(d) > checkpoint.step_of(found)]


def note_saved(run_dir: Path) -> None:
    """Note the newest finished checkpoint in ``manifest.json`` if a kill prevented that after the first save."""
    record, found = read_record(run_dir), checkpoint.finished(run_dir / "checkpoints")
    if record and found and "saved" not in record:
        update_record(run_dir, {"saved": checkpoint.step_of(found[0])})


def require_own(found: Checkpoint, identity: dict) -> None:
    """Raise UserError if the checkpoint is of another run than that of ``identity``."""
    if changed := differences(found.state["identity"], identity):
        name, (there, now) = next(iter(changed.items()))
        what = f"{len(changed)} keys differ: {name} was {shown(there)} there, and is {shown(now)} here"
        fix = "Move it away, or start a new run from it with run.start_from"
        raise UserError(f"{found.path}: it is of another run ({what}). {fix}")


# ----------------------------------------------------------------------------------------------------
# Another run


def start_from(cfg: Config, ranks: Ranks, vocab_size: int, say: Say) -> Start:
    """The start that ``run.start_from`` names: a run, one of its checkpoints, or an exported folder.

    A new run takes the weights, and with ``run.start_optimizer`` the moments, the step, and the position in the data if
    no key of the data has changed. Raises UserError if the model or the tokenizer is another one.
    """
    given = Path(cfg.run.start_from)
    if ranks.on_main(lambda: (given / WEIGHTS).is_file() or (given / f"{WEIGHTS}.index.json").is_file()):
        if cfg.run.start_optimizer:
            rule = "is an exported folder, which holds no optimizer state"
            raise UserError(f"run.start_from={given}: {rule}. Name a checkpoint, or leave out run.start_optimizer")
        return Start(folder=_open_folder(cfg, ranks, vocab_size, "run.start_from", str(given), dense=False))
    found = checkpoint.load(ranks.on_main(lambda: _named(given, say)))
    run_dir = Path(cfg.run.dir)

    def bind() -> dict:
        manifest = json.loads((found.path / checkpoint.MANIFEST).read_text())
        bind_identity(run_dir, {"run.start_from.weights": manifest["sha256"]})
        step = found.step if cfg.run.start_optimizer else 0
        update_record(run_dir, {"started_from": {"checkpoint": str(found.path), "step": step}})
        return read_record(run_dir)["identity"]

    _take_over(cfg, found, ranks.on_main(bind), say)
    return Start(found)


def _take_over(cfg: Config, found: Checkpoint, identity: dict, say: Say) -> None:
    """Cut ``found`` down to what the run of ``identity`` takes over from it."""
    given, changed = cfg.run.start_from, differences(found.state["identity"], identity)
    changed = {name: both for name, both in changed.items() if not name.startswith("run.") and name not in RECIPE}

    def among(keys: tuple[str, ...], but: tuple[str, ...] = ()) -> list[str]:
        return [name for name in changed if name.startswith(keys) and not name.startswith(but)]

    for name in among(MODEL):
        there, now = map(shown, changed[name])
        fix = "Set it as there; from the other run's folded folder weights start under another dlr, too"
        raise UserError(f"run.start_from={given}: another model: {name} is {there} there, and {now} here. {fix}")
    fresh = {"losses": [], "best": None, "unevaluated": None, "skipped": [0, 0, 0]}
    found.random.clear()
    if not cfg.run.start_optimizer:
        found.optimizer.clear(), found.optimizer_layout.clear()
        found.state |= fresh | {"step": 0, "tokens": 0, "real_tokens": 0, "streams": None}
        say(f"starting from the weights of {found.path}")
        return
    for name in among(OPTIMIZER, but=RATES):
        there, now = map(shown, changed[name])
        fix = "Set it as there, or leave out run.start_optimizer"
        raise UserError(f"run.start_from={given}: other moments: {name} is {there} there, and {now} here. {fix}")
    if found.step >= cfg.train.steps:
        rule = f"run.start_from={given} has trained {found.step:,} steps already"
        raise UserError(f"train.steps={cfg.train.steps}: {rule}. Set it above that")
    found.state |= fresh
    if among(DATA):
        found.state["streams"] = None
        say("the data start anew: " + ", ".join(f"{name} was {shown(changed[name][0])}" for name in among(DATA)))
    for name, (there, now) in changed.items():
        say(f"from step {found.step:,} on, {name} is {shown(now)}; it was {shown(there)}")


def _named(given: Path, say: Say) -> Path:
    """The checkpoint that ``given`` is, or the newest valid one of the run ``given``."""
    if re.fullmatch(r"step_\d+", given.name):
        if damage := checkpoint.fault(given):
            raise UserError(f"run.start_from={given}: {damage}. Name another checkpoint")
        return given
    found, skipped = checkpoint.newest(given / "checkpoints")
    for reason in skipped:
        say(f"warning: run.start_from: passed over {reason}")
    if found is None:
        raise UserError(
            f"run.start_from={given}: no checkpoint there. Name a run, <run>/checkpoints/step_*, or a folder"
        )
    return found


def _open_folder(cfg: Config, ranks: Ranks, vocab_size: int, key: str, folder: str, dense: bool) -> FolderStart:
    start = ranks.main_first(lambda: FolderStart(Path(folder), cfg, vocab_size, key, dense))
    ranks.on_main(lambda: bind_identity(Path(cfg.run.dir), {f"{key}.weights": start.fingerprint()}))
    return start
