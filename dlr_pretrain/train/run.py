"""A whole run: from a configuration to a folded checkpoint and a report, resuming whatever is there."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor

from dlr_pretrain.analysis.report import write_report
from dlr_pretrain.config import Config
from dlr_pretrain.data import Source, Tokenizer, TrainLoader, ValidationSet, open_source, open_tokenizer, validation_set
from dlr_pretrain.deploy.export import export, loadable
from dlr_pretrain.deploy.tokenizer import read_spiece
from dlr_pretrain.deploy.verify import verify
from dlr_pretrain.errors import UserError
from dlr_pretrain.models import Llama, build
from dlr_pretrain.models.dlr import residuals
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Snapshot
from dlr_pretrain.train.console import Console, count, duration, plural
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.lock import RunLock
from dlr_pretrain.train.metrics import MetricsFile, WandbView, read_metrics
from dlr_pretrain.train.record import describe_device, open_record
from dlr_pretrain.train.runtime import Runtime
from dlr_pretrain.train.trainer import Trainer
from dlr_pretrain.train.weights import STATE_DTYPE, Weights


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

    def complete(self) -> None:
        """Data, then the newest checkpoint, then the model: what can fail without a GPU fails before one is used."""
        source, tokenizer, validation = self.open_data()
        self.runtime.stop_if_asked("before the first step")
        snapshot = self.open_run(source, tokenizer)
        if snapshot and snapshot.state["step"] == self.cfg.train.steps and (self.dir / "folded").exists():
            self.runtime.on_main(lambda: (self.dir / "report.md").exists() or write_report(self.dir))  # killed between
            self.console.say(f"{self.dir} is complete.")
            return self.console.say(self.farewell())

        vocab_size = self.cfg.scale.vocab_size or tokenizer.vocab_size
        dtype = STATE_DTYPE[self.cfg.precision.name]
        weights = Weights(build(self.cfg, vocab_size, self.runtime.device, dtype), self.cfg.precision.name)
        self.summarize(weights, source, tokenizer, validation, snapshot)
        if self.cfg.compile:
            torch._dynamo.reset()  # the run before this one in a multirun has compiled other shapes
            weights.model.compile_()
        self.train(weights, source, tokenizer, validation, snapshot)
        self.runtime.on_main(lambda: self.finish(weights, vocab_size, tokenizer, validation))

    # ------------------------------------------------------------------------------------------------
    # Before

    def open_data(self) -> tuple[Source, Tokenizer, ValidationSet]:
        cfg = self.cfg
        source = self.runtime.main_first(lambda: open_source(cfg, self.console.say))
        tokenizer = self.runtime.main_first(lambda: open_tokenizer(cfg, source))
        if cfg.scale.vocab_size is not None and tokenizer.vocab_size > cfg.scale.vocab_size:
            raise UserError(
                f"tokenizer {tokenizer.path}: {tokenizer.vocab_size} pieces, but the model has "
                f"scale.vocab_size={cfg.scale.vocab_size}. Set scale.vocab_size={tokenizer.vocab_size} or more"
            )
        read_spiece(tokenizer.path)  # refuses what could not be exported when the run ends
        return source, tokenizer, self.runtime.main_first(lambda: validation_set(cfg, source, tokenizer))

    def open_run(self, source: Source, tokenizer: Tokenizer) -> Snapshot | None:
        """The state to go on from, after a look that the directory holds this very run."""

        def find() -> Path | None:
            device = describe_device(self.runtime.device)
            fingerprints = {"data.shards": source.fingerprint, "tokenizer.pieces": tokenizer.fingerprint}
            open_record(self.dir, self.cfg, fingerprints, self.runtime.world_size, device)
            shutil.copyfile(tokenizer.path, self.dir / "spiece.model")
            found, skipped = checkpoint.newest(self.dir / "checkpoints")
            for reason in skipped:
                self.console.say(f"warning: passed over {reason}")
            return found

        found = self.runtime.on_main(find)
        return checkpoint.load(found) if found else None

    def summarize(
        self,
        weights: Weights,
        source: Source,
        tokenizer: Tokenizer,
        validation: ValidationSet,
        snapshot: Snapshot | None,
    ) -> None:
        cfg, t, world = self.cfg, self.cfg.train, self.runtime.world_size
        knobs = ", ".join(f"{k} {v}" for k, v in cfg.backbone.knobs.items() if k != "supports_dlr")
        total = sum(value.numel() for value in weights.state.values())
        micro, positions = cfg.micro_batch(world), t.global_batch * t.seq_len
        layers = len(residuals(weights.model))
        dlr = f"DLR ({cfg.dlr.impl}, alpha {cfg.dlr.alpha:g}) on {layers} projections" if layers else "no DLR"
        vocabulary, rows = len(weights.state["model.embed_tokens.weight"]), len(validation.inputs)
        table = {
            "run": str(self.dir),
            "model": f"{cfg.scale.name}, {cfg.backbone.name}{f' ({knobs})' if knobs else ''}, {dlr}",
            "parameters": f"{total:,}, the same after folding; vocabulary {vocabulary:,}",
            "data": f"{source.describe()}; tokenizer of {tokenizer.vocab_size:,} pieces; {cfg.data.packing}",
            "validation": f"{rows:,} sequences, {validation.real_tokens:,} tokens, {cfg.eval.packing}",
            "batch": f"{plural(world, 'rank')} x {plural(t.global_batch // world // micro, 'micro-batch')} "
            f"x {plural(micro, 'sequence')} x {t.seq_len} = {positions:,} tokens a step",
            "schedule": f"{t.steps:,} steps, {count(t.steps * positions)} tokens; lr {t.lr:g} after "
            f"{cfg.warmup_steps:,} steps, then a cosine to {t.lr * t.min_lr_ratio:g}",
            "precision": f"{cfg.precision.name}, {describe_device(self.runtime.device)}, torch {torch.__version__}"
            f"{', compiled' if cfg.compile else ''}",
        }
        if snapshot:
            table["resuming"] = f"after step {snapshot.state['step']:,}"
        self.console.summary(table)

    # ------------------------------------------------------------------------------------------------
    # During

    def train(
        self,
        weights: Weights,
        source: Source,
        tokenizer: Tokenizer,
        validation: ValidationSet,
        snapshot: Snapshot | None,
    ) -> None:
        cfg, runtime, views = self.cfg, self.runtime, []
        evaluator = Evaluator(validation, cfg.micro_batch(runtime.world_size), runtime)

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
            loader = TrainLoader(cfg, source, tokenizer, runtime.rank, runtime.world_size, streams)
            trainer.train(opened.enter_context(closing(loader)))

    def open_views(self, views: list, opened: ExitStack, snapshot: Snapshot | None) -> None:
        """metrics.jsonl, and what shows it, into ``views``; ``opened`` closes them."""
        step = snapshot.state["step"] if snapshot else 0
        views.append(opened.enter_context(MetricsFile(self.dir / "metrics.jsonl", step)))
        if self.cfg.logger.name == "wandb":
            views.append(opened.enter_context(WandbView(self.cfg, self.dir)))
            self.console.summary({"wandb": views[-1].describe()})

    # ------------------------------------------------------------------------------------------------
    # After

    def finish(self, weights: Weights, vocab_size: int, tokenizer: Tokenizer, validation: ValidationSet) -> None:
        """Fold, export, hold the export against the trained weights, and report."""
        tensors = {name: value.cpu() for name, value in weights.folded().items()}
        self.require_identical(weights, tensors)
        final = read_metrics(self.dir / "metrics.jsonl")[-1]
        aside = self.dir / ".folded_unverified"
        export(aside, tensors, self.cfg, vocab_size, tokenizer.path, final)
        checked = self.check(aside, tensors, vocab_size, validation)
        folded = self.dir / "folded"
        if folded.exists():
            shutil.rmtree(folded)
        os.rename(aside, folded)
        write_report(self.dir)
        self.console.summary({
            "folded": f"{len(residuals(weights.model))} layers; {checked}",
            "finished": f"in {duration(time.time() - self.started)}",
        })  # fmt: skip
        self.console.say(self.farewell())

    def require_identical(self, weights: Weights, tensors: dict[str, Tensor]) -> None:
        """The folded tensors must be what the training forward multiplies by, bit for bit."""
        if self.cfg.dlr.enabled and self.cfg.dlr.impl == "branch":
            return
        with weights.published():
            for name, p in weights.model.named_parameters():
                if not torch.equal(tensors[name].to(p.dtype), p.detach().cpu()):
                    raise RuntimeError(f"{name}: the folded tensor is not the working weight")

    def check(self, folder: Path, tensors: dict[str, Tensor], vocab_size: int, validation: ValidationSet) -> str:
        """Hold the exported folder against our own model with the same weights, both in fp32; says what was found."""
        if not loadable(self.cfg):
            return f"transformers cannot load backbone={self.cfg.backbone.name} yet: deploy/ has no layer for it"
        ids = torch.from_numpy(validation.inputs[:2].astype("int64"))
        difference = verify(folder, self.plain_logits(tensors, vocab_size), ids, torch.float32)
        if difference is None:
            return "not verified: transformers 4.57 or newer is not installed"
        return f"loaded by transformers, its logits agree to {difference:.0e} of their standard deviation"

    def plain_logits(self, tensors: dict[str, Tensor], vocab_size: int):
        """The fp32 logits of our own model that holds ``tensors`` and no residual."""
        with torch.device("meta"):
            model = Llama(self.cfg, vocab_size)
        model.to_empty(device=self.runtime.device)
        model.load_state_dict(tensors)

        @torch.no_grad()
        def logits(ids: Tensor) -> Tensor:
            return model.logits(ids.to(self.runtime.device)).cpu()

        return logits

    def farewell(self) -> str:
        """Where the result is, and how to load it."""
        folded = self.dir / "folded"
        remote = "" if self.cfg.backbone.name == "full" else ", trust_remote_code=True"
        return (
            f"report     {self.dir / 'report.md'}\n"
            f"checkpoint {folded}\n\n"
            "    from transformers import AutoModelForCausalLM, AutoTokenizer\n"
            f'    model = AutoModelForCausalLM.from_pretrained("{folded}"{remote})\n'
            f'    tokenizer = AutoTokenizer.from_pretrained("{folded}")'
        )
