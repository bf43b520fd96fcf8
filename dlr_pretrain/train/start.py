"""Where a run starts: at its own newest checkpoint, else from ``run.start_from`` (a run or a folder), or the seed."""

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dlr_pretrain.config import Config, to_dict
from dlr_pretrain.config.identity import describe_differences, differences, facts
from dlr_pretrain.config.run_folder import holds_weights, read_record
from dlr_pretrain.config.values import all_keys
from dlr_pretrain.models.pretrained import PretrainedFolder
from dlr_pretrain.optim.schedule import rate
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Checkpoint, directories, step_of
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import bind_identity, update_record
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import wait_for

CHECKPOINT_WAIT = 5.0  # seconds until a network file system shows a checkpoint that another machine has written
Say = Callable[[str], None]


@dataclass
class Start:
    """Where a run starts; without ``checkpoint`` or ``folder``, the seed determines the initial weights."""

    checkpoint: Checkpoint | None = None  # the state to restore, whole or in part
    folder: PretrainedFolder | None = None  # initial weights
    resumes: bool = False  # whether the checkpoint is this run's own

    @property
    def step(self) -> int:
        """Finished updates."""
        return self.checkpoint.step if self.checkpoint is not None else 0

    @property
    def saved(self) -> int:
        """Step of this run's own newest checkpoint."""
        return self.step if self.resumes else 0

    def summary(self) -> dict[str, str]:
        if self.checkpoint is not None:
            return {"resuming" if self.resumes else "start": f"after step {self.step:,}"}
        return {"start": f"the model in {self.folder.folder}"} if self.folder is not None else {}


def find_start(cfg: Config, run_dir: Path, ranks: Ranks, vocab_size: int, say: Say) -> Start:
    """The start of the run in ``run_dir``. What a new run starts from becomes part of its identity.

    All ranks must call this. Raises UserError if the newest checkpoint is of another run.
    """
    if (path := ranks.on_main(lambda: newest_checkpoint(run_dir, say))) is not None:
        saved = checkpoint.load(path, ranks)
        if changed := differences(saved.state["identity"], ranks.on_main(lambda: read_record(run_dir)["identity"])):
            fix = "Move it away, or start a new run from it with run.start_from"
            raise UserError(f"{path} belongs to another run ({describe_differences(changed)}). {fix}")
        return Start(saved, resumes=True)
    if cfg.run.start_from is not None:
        return start_from(cfg, run_dir, ranks, vocab_size, Path(cfg.run.start_from), say)
    return Start()


def newest_checkpoint(run_dir: Path, say: Say) -> Path | None:
    """The newest valid checkpoint of a run. Renames newer ones, which are damaged, and says so.

    Waits up to ``CHECKPOINT_WAIT`` seconds for the last checkpoint, which a network file system may show late. Raises
    UserError if something was saved and nothing is there.
    """
    root, saved = run_dir / "checkpoints", read_record(run_dir).get("saved", 0)
    wait_for(lambda: saved in (0, *map(step_of, directories(root))), CHECKPOINT_WAIT)
    newest, damaged = checkpoint.newest(root)
    for directory, damage in damaged.items():
        renamed = directory.rename(root / f"damaged_{directory.name}_{uuid.uuid4().hex[:8]}")
        say(f"warning: passed over {directory}: {damage}. It is now {renamed.name}; delete it if you do not need it")
    if newest is None and saved:
        raise UserError(
            root,
            f"no checkpoint, but step {saved:,} was saved",
            "Restore it, or move the run directory away to start over",
        )
    if newest is not None and step_of(newest) < saved:
        lost = f"the last saved checkpoint, of step {saved:,}, is missing"
        say(f"warning: {root}: {lost}. The steps after {newest.name} are trained again")
    return newest


# ----------------------------------------------------------------------------------------------------
# Another run


def start_from(cfg: Config, run_dir: Path, ranks: Ranks, vocab_size: int, given: Path, say: Say) -> Start:
    """The start from ``given``: a run, one of its checkpoints, or a folder of weights.

    A new run takes over the weights. With ``run.start_optimizer`` it also takes over the moments and the step, and the
    position in the data if no key of the data differs. Raises UserError if the model or the tokenizer differs.
    """
    if ranks.on_main(lambda: holds_weights(given)):
        if cfg.run.start_optimizer:
            raise UserError(
                f"run.start_from={given}",
                "is a folder of weights, without optimizer state",
                "Name a checkpoint, or leave out run.start_optimizer",
            )
        tokenizer = ranks.on_main(lambda: read_record(run_dir)["identity"]["tokenizer.pieces"])
        folder = ranks.main_first(lambda: PretrainedFolder(given, cfg, vocab_size, tokenizer))
        ranks.on_main(lambda: bind_identity(run_dir, {"run.start_from.weights": folder.fingerprint()}))
        return Start(folder=folder)
    saved = checkpoint.load(ranks.on_main(lambda: _named(given, say)), ranks)

    def bind() -> dict:
        bind_identity(run_dir, {"run.start_from.weights": saved.sha256})
        step = saved.step if cfg.run.start_optimizer else 0
        update_record(run_dir, {"started_from": {"checkpoint": str(saved.path), "step": step}})
        return read_record(run_dir)["identity"]

    return Start(_part_of(saved, cfg, ranks.on_main(bind), say))


def _named(given: Path, say: Say) -> Path:
    """The checkpoint ``given``, or the newest valid one of the run ``given``."""
    if re.fullmatch(r"step_\d+", given.name):
        if damage := checkpoint.fault(given):
            raise UserError(f"run.start_from={given}: {damage}. Name another checkpoint")
        return given
    newest, damaged = checkpoint.newest(given / "checkpoints")
    for directory, damage in damaged.items():
        say(f"warning: passed over {directory}: {damage}")
    if newest is None:
        raise UserError(
            f"run.start_from={given}",
            "no checkpoint there. Name a run, <run>/checkpoints/step_*, or a folder with model.safetensors",
        )
    return newest


def _part_of(saved: Checkpoint, cfg: Config, identity: dict, say: Say) -> Checkpoint:
    """What the run of ``identity`` takes over from a checkpoint of another run."""
    keys = all_keys(to_dict(cfg))
    changed = differences(saved.state["identity"], identity)
    changed = {name: both for name, both in changed.items() if not name.startswith("run.")}

    def differing(part: str) -> dict[str, tuple[object, object]]:
        return {name: both for name, both in changed.items() if facts(name, keys).binds == part}

    def refuse(part: str, what: str, fix: str) -> None:
        if differ := differing(part):
            rule = f"another {what} ({describe_differences(differ)})"
            raise UserError(f"run.start_from={cfg.run.start_from}", rule, f"Set the same keys{fix}")

    refuse("weights", "model", "; with another dlr, start from the weights in its folded folder")
    state = saved.state | {"skipped": [0, 0, 0]}
    if not cfg.run.start_optimizer:
        say(f"starting from the weights of {saved.path}")
        return replace(saved, optimizer={}, state=state | {"step": 0, "tokens": 0, "real_tokens": 0, "streams": {}})
    refuse("moments", "optimizer", ", or leave out run.start_optimizer")
    if saved.step >= cfg.train.steps:
        raise UserError(
            f"train.steps={cfg.train.steps}",
            f"run.start_from={cfg.run.start_from} has already trained {saved.step:,} steps",
            "Set a larger number",
        )
    if differing("position"):
        state["streams"] = {}
        say("the data start from the beginning, because their keys differ")
    say(f"continuing {saved.path} after step {saved.step:,}: the learning rate there is {rate(cfg, saved.step):.3g}")
    if changed:
        say(f"keys that differ: {describe_differences(changed)}")
    return replace(saved, state=state)
