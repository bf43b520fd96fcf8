"""Updates and a training loop without a run's data."""

from pathlib import Path

from benchmarks.variants import joined, random_batch
from dlr_pretrain.cli import load
from dlr_pretrain.config import Config
from dlr_pretrain.models import Llama
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.guard import Guard, StopRequest
from dlr_pretrain.train.loop import Loop
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import update_record
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.state import new_model, new_optimizer
from dlr_pretrain.train.update import Update
from tests.conftest import SMALL

__all__ = ["configured", "random_batch", "trial", "trial_loop"]


def configured(*words: str, ranks: int = 1) -> Config:
    """The smallest run without a text; ``words`` replace its own."""
    given = [word for word in SMALL if not (word.startswith("scale.rank=") and "backbone=full" in words)]
    return load(joined([*given, "data=sample"], words), ranks)


def trial(cfg: Config, ranks: Ranks, vocab_size: int, model: Llama | None = None) -> Update:
    """The updates of ``model``; by default of a new model."""
    model = model or new_model(cfg, ranks, vocab_size)
    return Update(cfg, ranks, model, new_optimizer(cfg, model))


def trial_loop(cfg: Config, ranks: Ranks, vocab_size: int, run_dir: Path) -> Loop:
    """The training loop of a new model, whose checkpoints go to ``run_dir``. Its evaluations return a loss of 0."""
    ranks.on_main(lambda: update_record(run_dir, {"identity": {"seed": cfg.seed}}))
    console = Console(cfg, enabled=False)
    saver = Saver(run_dir, ranks, cfg.checkpoint, None, console)
    guard, update = Guard(cfg, ranks, StopRequest(ranks), saver, console, None), trial(cfg, ranks, vocab_size)
    return Loop(cfg, ranks, update, lambda _: {"eval/loss": 0.0}, [], saver, guard, console)
