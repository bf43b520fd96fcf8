"""A whole run: from a configuration to a folded checkpoint and a report, resuming whatever is there."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch

from dlr_pretrain.analysis.report import write_report
from dlr_pretrain.config import Config, identity
from dlr_pretrain.data import (
    Source,
    Tokenizer,
    TrainLoader,
    ValidationSet,
    ask_hub,
    open_source,
    open_tokenizer,
    validation_set,
)
from dlr_pretrain.deploy.tokenizer import read_spiece
from dlr_pretrain.errors import UserError
from dlr_pretrain.models import build
from dlr_pretrain.models.dlr import residuals
from dlr_pretrain.models.llama import backbone
from dlr_pretrain.models.precision import STATE_DTYPE
from dlr_pretrain.models.start import DenseStart
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Snapshot
from dlr_pretrain.train.console import Console, count, duration, plural
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.finish import farewell, finish
from dlr_pretrain.train.lock import RunLock
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.record import describe_device, open_record, record_start
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.trainer import Trainer
from dlr_pretrain.train.wandb_view import WandbView
from dlr_pretrain.train.weights import Weights


def run(cfg: Config) -> None:
    """Train ``cfg`` to its last step in ``cfg.run.dir``, from its newest checkpoint if it has one, and fold it.

    Raises UserError where something is in the way, and Stopped where the run was asked to stop and has saved.
    """
    with Runtime(cfg) as runtime, RunLock(Path(cfg.run.dir)) as lock:
        runtime.on_main(lock.acquire)
        Run(cfg, runtime).complete()


class Run:
    """One run directory from start to finish, on one of its ranks."""

    def __init__(self, cfg: Config, runtime: Runtime):
        self.cfg, self.runtime, self.dir = cfg, runtime, Path(cfg.run.dir)
        self.console = Console(cfg, enabled=runtime.is_main)
        self.started = time.time()
        self.source: Source
        self.tokenizer: Tokenizer
        self.validation: ValidationSet

    def complete(self) -> None:
        """Data, then the newest checkpoint, then the model: what can fail without a GPU fails before one is used."""
        self.open_data()
        self.runtime.stop_if_asked("before the first step")
        snapshot = self.open_run()
        if snapshot and snapshot.state["step"] == self.cfg.train.steps and (self.dir / "folded").exists():
            self.runtime.on_main(lambda: (self.dir / "report.md").exists() or write_report(self.dir))  # killed between
            self.console.say(f"{self.dir} is complete.")
            return self.console.say(farewell(self.cfg, self.dir))

        vocab_size = self.cfg.scale.vocab_size or self.tokenizer.vocab_size
        start = self.open_start(vocab_size) if snapshot is None else None
        self.runtime.use_device()
        self.runtime.on_main(lambda: record_start(self.dir, self.runtime.world_size, self.runtime.device))
        dtype = STATE_DTYPE[self.cfg.precision.name]
        model = build(self.cfg, vocab_size, self.runtime.device, dtype, initialize=snapshot is None)
        if start:
            start.put_into_(model)
        self.runtime.broadcast(model.state_dict().values())
        weights = Weights(model, self.cfg.precision.name)
        self.summarize(weights, snapshot)
        if self.cfg.compile:
            torch._dynamo.reset()  # the run before this one in a multirun has compiled other shapes
            weights.model.compile_()
        self.train(weights, snapshot)
        folded = self.runtime.on_main(lambda: finish(self.cfg, self.dir, weights, self.tokenizer, self.validation))
        self.console.summary({"folded": folded, "finished": f"in {duration(time.time() - self.started)}"})
        self.console.say(farewell(self.cfg, self.dir))

    # ------------------------------------------------------------------------------------------------
    # Before

    def open_data(self) -> None:
        """Source, tokenizer and validation set; refuses a tokenizer that the model or the export cannot hold."""
        cfg, main_first = self.cfg, self.runtime.main_first
        listing = self.runtime.on_main(lambda: ask_hub(cfg, self.console.say))
        source = self.source = main_first(lambda: open_source(cfg, self.console.say, listing))
        tokenizer = self.tokenizer = main_first(lambda: open_tokenizer(cfg, source))
        if cfg.scale.vocab_size is not None and tokenizer.vocab_size > cfg.scale.vocab_size:
            raise UserError(
                f"tokenizer {tokenizer.path}: {tokenizer.vocab_size} pieces, but the model has "
                f"scale.vocab_size={cfg.scale.vocab_size}. Set scale.vocab_size={tokenizer.vocab_size} or more"
            )
        read_spiece(tokenizer.path)
        self.validation = main_first(lambda: validation_set(cfg, source, tokenizer))

    def open_run(self) -> Snapshot | None:
        """The state to go on from, after a look that the directory holds this very run."""
        fingerprints = {"data.shards": self.source.fingerprint, "tokenizer.pieces": self.tokenizer.fingerprint}
        self.runtime.require_equal(identity(self.cfg) | fingerprints)

        def find() -> Path | None:
            open_record(self.dir, self.cfg, fingerprints)
            pieces = self.tokenizer.path.read_bytes()  # perhaps of this very copy
            checkpoint.write_durably(self.dir / "spiece.model", pieces)
            found, skipped = checkpoint.newest(self.dir / "checkpoints")
            for reason in skipped:
                self.console.say(f"warning: passed over {reason}")
            return found

        found = self.runtime.on_main(find)
        return checkpoint.load(found) if found else None

    def open_start(self, vocab_size: int) -> DenseStart | None:
        """The dense model that a new run starts from, if any."""
        folder = self.cfg.train.init_from
        return self.runtime.main_first(lambda: DenseStart(Path(folder), self.cfg, vocab_size)) if folder else None

    def summarize(self, weights: Weights, snapshot: Snapshot | None) -> None:
        """What will be trained, on the console."""
        cfg, t, world = self.cfg, self.cfg.train, self.runtime.world_size
        knobs = ", ".join(f"{k} {v}" for k, v in cfg.backbone.knobs.items() if k != "factorized")
        total = sum(p.numel() for p in weights.model.parameters())
        trained = sum(p.numel() for p in weights.model.parameters() if p.requires_grad)
        after = "merged into dense weights at the end" if backbone(cfg).deployed_dense else "the same after folding"
        micro, positions = cfg.micro_batch(world), t.global_batch * t.seq_len
        layers = len(residuals(weights.model))
        dlr = f"DLR ({cfg.dlr.impl}, alpha {cfg.dlr.alpha:g}) on {layers} projections" if layers else "no DLR"
        vocabulary, rows = len(weights.state["model.embed_tokens.weight"]), len(self.validation.tokens)
        table = {
            "run": str(self.dir),
            "model": f"{cfg.scale.name}, {cfg.backbone.name}{f' ({knobs})' if knobs else ''}, {dlr}",
            "parameters": f"{total:,}{f' ({trained:,} of them trained)' if trained < total else ''}, {after}; "
            f"vocabulary {vocabulary:,}",
            "data": f"{self.source.describe()}; tokenizer of {self.tokenizer.vocab_size:,} pieces; {cfg.data.packing}",
            "validation": f"{rows:,} sequences, {self.validation.real_tokens:,} tokens, {cfg.eval.packing}",
            "batch": f"{plural(world, 'rank')} x {plural(t.global_batch // world // micro, 'micro-batch')} "
            f"x {plural(micro, 'sequence')} x {t.seq_len} = {positions:,} tokens a step",
            "schedule": f"{t.steps:,} steps, {count(t.steps * positions)} tokens; lr {t.lr:g} after "
            f"{plural(cfg.warmup_steps, 'step')}, then a cosine to {t.lr * t.min_lr_ratio:g}",
            "precision": f"{cfg.precision.name}, {describe_device(self.runtime.device)}, torch {torch.__version__}"
            f"{', compiled' if cfg.compile else ''}",
        }
        if cfg.train.init_from and not snapshot:
            table["start"] = f"the dense model in {cfg.train.init_from}"
        if snapshot:
            table["resuming"] = f"after step {snapshot.state['step']:,}"
        self.console.summary(table)

    # ------------------------------------------------------------------------------------------------
    # During

    def train(self, weights: Weights, snapshot: Snapshot | None) -> None:
        """From ``snapshot``, or the start, to the last step."""
        cfg, runtime, views = self.cfg, self.runtime, []
        evaluator = Evaluator(self.validation, cfg.micro_batch(runtime.world_size), runtime)

        def write(record: dict) -> None:
            for view in views:
                view.write(record)

        def save(step: int, state: Snapshot) -> None:
            try:
                views[0].sync()
                checkpoint.save(self.dir / "checkpoints", step, state, cfg.checkpoint.keep_last)
            except OSError as error:
                raise UserError(f"checkpoint of step {step} could not be written: {error}") from error

        with ExitStack() as opened:
            runtime.on_main(lambda: self.open_views(views, opened, snapshot))
            opened.callback(self.console.close_line)
            trainer = Trainer(cfg, runtime, weights, evaluator, self.console, write, save)
            if snapshot:
                trainer.resume(snapshot)
            streams = snapshot.state["streams"] if snapshot else None
            loader = TrainLoader(cfg, self.source, self.tokenizer, runtime.rank, runtime.world_size, streams)
            opened.enter_context(closing(loader))
            try:
                trainer.train(loader)
            except torch.OutOfMemoryError as error:
                used = f"train.micro_batch={trainer.micro_batch}: out of GPU memory on rank {runtime.rank}"
                raise UserError(f"{used}. Halve it (the global batch stays), or use more GPUs. {error}") from error

    def open_views(self, views: list, opened: ExitStack, snapshot: Snapshot | None) -> None:
        """metrics.jsonl, and what shows it, into ``views``; ``opened`` closes them."""
        step = snapshot.state["step"] if snapshot else 0
        views.append(opened.enter_context(MetricsFile(self.dir / "metrics.jsonl", step)))
        if self.cfg.logger.name == "wandb":
            views.append(opened.enter_context(WandbView(self.cfg, self.dir)))
            self.console.summary({"wandb": views[-1].describe()})
