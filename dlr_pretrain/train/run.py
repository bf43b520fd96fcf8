"""A whole run, from a configuration to a folded checkpoint and a report; it resumes from the newest checkpoint."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from dlr_pretrain.config import Config, flatten, to_dict
from dlr_pretrain.config.written import read_record
from dlr_pretrain.data import TrainLoader
from dlr_pretrain.models.flops import flops_per_token
from dlr_pretrain.optim.build import checkpoint_bytes
from dlr_pretrain.train.console import Console, duration
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.finish import Report, finish, how_to_load, write_report
from dlr_pretrain.train.guard import Guard
from dlr_pretrain.train.heartbeat import Heartbeat
from dlr_pretrain.train.loop import Loop
from dlr_pretrain.train.memory import PlannedMemory, explained, resolve_micro_batch
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import open_record, record_start, recorded_end, update_record
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.start import Start, find_start, note_saved
from dlr_pretrain.train.summary import summary
from dlr_pretrain.train.text import Text, open_text
from dlr_pretrain.train.update import Update
from dlr_pretrain.train.views import View, open_view
from dlr_pretrain.train.weights import Weights, build_weights


def run(cfg: Config, report: Report | None = None, planned_memory: PlannedMemory | None = None) -> None:
    """Train ``cfg`` to its last step in ``cfg.run.dir``, from the newest checkpoint there if any, and fold the result.

    ``report`` writes the report of a run directory; a run that has trained does not fail with it. ``planned_memory`` is
    the plan's estimate: it is shown at the start, and ``train.micro_batch=auto`` needs it.
    Raises Stopped if the run was asked to stop and has saved, and other UserErrors if something prevents the run.
    """
    run_dir = Path(str(cfg.run.dir))  # never None: the configuration has chosen one
    with Heartbeat(cfg) as heartbeat, recorded_end(run_dir, heartbeat), Ranks(cfg, heartbeat) as ranks:
        ranks.require_equal(flatten(to_dict(cfg)) | {"the device that was found": ranks.device.type})
        console = Console(cfg, enabled=ranks.is_main)
        text = open_text(cfg, run_dir, ranks, console)
        ranks.require_equal(text.fingerprints)
        ranks.stop_if_asked("before the first step")
        ranks.start_heartbeat(run_dir)
        Run(cfg, run_dir, ranks, console, text, report, planned_memory).complete()


@dataclass
class Run:
    """A run from start to finish, as one of its ranks executes it."""

    cfg: Config
    dir: Path
    ranks: Ranks
    console: Console
    text: Text
    report: Report | None
    planned_memory: PlannedMemory | None
    started: float = field(default_factory=time.time)
    metrics: MetricsFile | None = None  # on rank 0 only, as is
    view: View | None = None  # W&B or TensorBoard

    def complete(self) -> None:
        """Find where to start, then build, train and fold. What can fail without a GPU fails before one is used."""
        self.open_record()
        start = find_start(self.cfg, self.dir, self.ranks, self.text.vocab_size, self.console.say)
        if self.is_complete(start):
            return self.say_complete()
        self.use_device(start)
        with explained(self.cfg, self.ranks):
            fresh, vocab_size = start.checkpoint is None, self.text.vocab_size
            weights = build_weights(self.cfg, self.ranks, vocab_size, start.folder, initialize=fresh)
            self.summarize(weights, start)
            self.train(weights, start)
        self.fold(weights)

    def open_record(self) -> None:
        """Write down what this run is. Raises UserError if the directory holds another run."""
        text = self.text

        def write() -> None:
            self.ranks.heartbeat.require_held()  # of two starts at the same time, both have written their lease by now
            note_saved(self.dir)
            open_record(self.dir, self.cfg, text.fingerprints)
            update_record(self.dir, {"data.version": text.source.version, "tokenizer.unknown_share": text.unknown})
            text.tokenizer.save(self.dir / "tokenizer")

        self.ranks.on_main(write)

    def is_complete(self, start: Start) -> bool:
        readme = self.dir / "folded" / "README.md"
        return start.saved == self.cfg.train.steps and self.ranks.on_main(lambda: readme.exists())

    def say_complete(self) -> None:
        if self.ranks.on_main(lambda: not (self.dir / "report.md").exists()):  # killed between export and report
            self.ranks.on_main(lambda: write_report(self.report, self.dir, self.console.say))
        self.console.say(f"{self.dir} is complete.")
        self.console.say(how_to_load(self.cfg, self.dir))

    def use_device(self, start: Start) -> None:
        """Use the device for the first time, and note this start."""
        ranks = self.ranks
        ranks.use_device()
        if (ranks.device.type, self.cfg.device) == ("cpu", "auto") and self.cfg.scale.name != "tiny":
            self.console.say("warning: torch finds no GPU, so this trains on the CPU. Set device=cpu if that is meant")
        text = self.text.source.describe()
        ranks.on_main(lambda: record_start(self.dir, ranks.world_size, ranks.device, text))
        vocab_size, planned, resumed = self.text.vocab_size, self.planned_memory, start.resumes
        self.cfg = resolve_micro_batch(self.cfg, ranks, vocab_size, planned, self.dir, resumed)

    def summarize(self, weights: Weights, start: Start) -> None:
        """Show on the console what will be trained."""
        if not self.ranks.is_main:
            return
        flops = flops_per_token(self.cfg, self.text.vocab_size, self.cfg.micro_batch(self.ranks.world_size))
        trained = sum(p.numel() for p in weights.model.parameters() if p.requires_grad)
        update_record(self.dir, {"parameters": trained, "flops_per_token": flops})
        rows = summary(self.cfg, self.dir, self.ranks, self.text, weights, self.planned_memory)
        self.console.summary(rows | start.summary())

    def train(self, weights: Weights, start: Start) -> None:
        """Train from ``start`` to the last step."""
        cfg, ranks, text, console, found = self.cfg, self.ranks, self.text, self.console, start.checkpoint
        with ExitStack() as opened:
            opened.callback(console.close_line)
            ranks.on_main(lambda: self.open_metrics(opened, start))
            metrics = self.metrics
            saver = Saver(self.dir, ranks, cfg.checkpoint, metrics, console, start.saved)
            opened.enter_context(saver)
            saver.rehearse(checkpoint_bytes(cfg.optimizer, weights.state, weights.trained))
            update = Update(cfg, ranks, weights)
            evaluator = Evaluator(text.validation, update.micro_batch, ranks)
            guard = Guard(cfg, ranks, saver, console, text.tokenizer)
            loop = Loop(cfg, ranks, update, evaluator, metrics, saver, guard, console, self.view)
            opened.enter_context(loop.profiler)
            if found is not None:
                if not weights.sharded:
                    found.read_on_main(ranks)
                loop.resume(found)
            streams = found.state["streams"] if found is not None else None
            loader = TrainLoader(cfg, text.source, text.tokenizer, ranks.rank, ranks.world_size, streams)
            opened.enter_context(closing(loader))
            loop.fit(loader)

    def open_metrics(self, opened: ExitStack, start: Start) -> None:
        """Open ``metrics.jsonl``, and the view beside it if there is one; ``opened`` closes both. On rank 0 only."""
        step, first = 0, read_record(self.dir).get("started_from", {"step": 0})["step"] + 1
        if start.checkpoint is not None:
            step = start.checkpoint.step - (start.checkpoint.state["unevaluated"] is not None)
        metrics = self.metrics = MetricsFile(self.dir / "metrics.jsonl", step, first)
        opened.enter_context(metrics)
        if metrics.missing:
            lost = f"metrics.jsonl has lost {metrics.missing:,} of the {step:,} steps that are trained"
            self.console.say(f"warning: {lost}. The weights have them, and the curves a gap")
        self.view = open_view(self.cfg, self.dir, self.console, step)
        if self.view is not None:
            opened.enter_context(self.view)

    def fold(self, weights: Weights) -> None:
        """Write the folded checkpoint and the report."""
        self.ranks.finishing()
        tensors = weights.folded(keep=self.ranks.is_main)
        folded = self.ranks.on_main(lambda: finish(self.cfg, self.dir, weights, tensors, self.text.validation))
        self.ranks.on_main(lambda: write_report(self.report, self.dir, self.console.say))
        self.console.summary({"folded": folded, "finished": f"in {duration(time.time() - self.started)}"})
        self.console.say(how_to_load(self.cfg, self.dir))
