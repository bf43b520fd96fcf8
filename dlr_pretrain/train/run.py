"""A run, from a configuration to the folded model. It resumes from its newest checkpoint."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import indent

import torch
from torch import Tensor

from dlr_pretrain.config import Config, flatten, to_dict
from dlr_pretrain.config.run_folder import read_record, require_run_folder
from dlr_pretrain.data import TrainLoader
from dlr_pretrain.deploy.export import VERIFIED_SEQUENCES, deployed_dense, export, origin
from dlr_pretrain.deploy.hub import require_writable
from dlr_pretrain.models.flops import flops_per_token, parameter_counts
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.optim.optimizer import Optimizer, checkpoint_bytes
from dlr_pretrain.train.console import Console, describe_run, duration, evaluation
from dlr_pretrain.train.corpus import Corpus, open_corpus
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.guard import Guard, StopRequest
from dlr_pretrain.train.heartbeat import Heartbeat
from dlr_pretrain.train.loop import Loop
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.micro_batch import explain_out_of_memory, resolve_micro_batch
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.train.record import open_record, record_start, recorded_end, update_record
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.start import Start, find_start
from dlr_pretrain.train.state import folded, new_model, new_optimizer, saved_tensors
from dlr_pretrain.train.update import Update
from dlr_pretrain.train.views import open_view
from dlr_pretrain.util.errors import Diverged
from dlr_pretrain.util.files import last_record, require_durable
from dlr_pretrain.util.text import loading, plural


def run(cfg: Config) -> bool:
    """Train ``cfg`` to its last step in ``cfg.run.dir``, from the newest checkpoint there if any, and fold the result.

    Returns False if the run was complete already. Raises Stopped if the run was asked to stop and has saved, and
    another UserError if something prevents the run.
    """
    run_dir = Path(str(cfg.run.dir))  # never None: the configuration has chosen one
    with (
        Heartbeat(cfg) as heartbeat,
        recorded_end(run_dir, heartbeat),
        Ranks(cfg, heartbeat) as ranks,
        StopRequest(ranks) as stop,
    ):
        ranks.require_equal(flatten(to_dict(cfg)) | {"the device that was found": ranks.device.type})
        stop.raise_if_asked("before the first step")  # while torch was imported; later, the handler ends the process
        ranks.on_main(lambda: require_run_folder(run_dir, cfg.data.cache))
        ranks.on_main(lambda: require_durable(run_dir))
        ranks.on_main(lambda: require_writable(cfg.run.push) if cfg.run.push else None)
        console = Console(cfg, enabled=ranks.is_main)
        corpus = open_corpus(cfg, run_dir, ranks, console.say)
        ranks.require_equal(corpus.fingerprints)
        ranks.start_heartbeat(run_dir)
        return Run(cfg, run_dir, ranks, stop, console, corpus).complete()


@dataclass
class Run:
    """One rank's part of a run, from start to finish."""

    cfg: Config
    dir: Path
    ranks: Ranks
    stop: StopRequest
    console: Console
    corpus: Corpus
    started: float = field(default_factory=time.monotonic)
    metrics: MetricsFile | None = None  # on rank 0 only
    sinks: list[Callable[[dict], None]] = field(default_factory=list)  # metrics, W&B: take records; on rank 0 only
    update: Update | None = None  # once the run trains

    def complete(self) -> bool:
        """Find where to start, then build, train and fold. Checks that need no GPU come before its first use.

        Returns False if the run is complete already.
        """
        ranks = self.ranks
        ranks.on_main(self.open_record)
        start = find_start(self.cfg, self.dir, ranks, self.corpus.vocab_size, self.console.say)
        if start.saved == self.cfg.train.steps and ranks.on_main((self.dir / "folded" / "README.md").exists):
            self.console.say(f"{self.dir} is complete.")
            self.say_result()
            return False

        self.use_device()
        with explain_out_of_memory(self.cfg, ranks, building=True):
            model, optimizer = self.assemble(start)
        with explain_out_of_memory(self.cfg, ranks):
            self.train(model, optimizer, start)
        self.fold(model, optimizer)
        return True

    def open_record(self) -> None:
        """On rank 0, write down what this run is. Raises UserError if the directory holds another run."""
        self.ranks.heartbeat.require_held()  # two starts at the same time have both written their lease by now
        open_record(self.dir, self.cfg, self.corpus.fingerprints)
        update_record(self.dir, {"data.version": self.corpus.source.version})
        self.corpus.tokenizer.save(self.dir / "tokenizer")

    def use_device(self) -> None:
        """Use the device for the first time, record this start, and choose the micro-batch."""
        cfg, ranks, source = self.cfg, self.ranks, self.corpus.source
        ranks.use_device()
        if (ranks.device.type, cfg.device) == ("cpu", "auto") and cfg.scale.name != "tiny":
            self.console.say("warning: torch finds no GPU, so this trains on the CPU. Set device=cpu if intended")
        read = source.describe(), source.contents
        ranks.on_main(lambda: record_start(self.dir, ranks.world_size, ranks.device, *read))
        self.cfg = resolve_micro_batch(cfg, ranks, self.corpus.vocab_size, self.dir)

    def assemble(self, start: Start) -> tuple[Llama, Optimizer]:
        """Build the model and its optimizer, and describe the run."""
        cfg, ranks, vocab_size = self.cfg, self.ranks, self.corpus.vocab_size
        model = new_model(cfg, ranks, vocab_size, start.folder, initialize=start.checkpoint is None)
        optimizer = new_optimizer(cfg, model)
        trained = parameter_counts(cfg, model)["trainable"]
        flops = flops_per_token(cfg, vocab_size, cfg.micro_batch(ranks.world_size))
        evaluated = self.corpus.validation.real_tokens
        facts = {"parameters": trained, "flops_per_token": flops, "evaluated_tokens": evaluated}
        ranks.on_main(lambda: update_record(self.dir, facts))
        self.console.summary(describe_run(cfg, self.dir, ranks, self.corpus, model) | start.summary())
        return model, optimizer

    def train(self, model: Llama, optimizer: Optimizer, start: Start) -> None:
        """Train from ``start`` to the last step."""
        cfg, ranks, corpus, console, checkpoint = self.cfg, self.ranks, self.corpus, self.console, start.checkpoint
        with ExitStack() as stack:
            stack.callback(console.close_line)
            unevaluated = ranks.on_main(lambda: self.open_metrics(stack, start))
            saver = Saver(self.dir, ranks, cfg.checkpoint, self.metrics, console, start.saved)
            stack.enter_context(saver)
            tensors = saved_tensors(model, optimizer.values)
            saver.check_disk(checkpoint_bytes(cfg.optimizer, tensors, optimizer.trained, optimizer.split))
            self.update = update = Update(cfg, ranks, model, optimizer)
            stack.callback(update.close)
            evaluator = Evaluator(
                corpus.validation, update.micro_batch, ranks, bool(cfg.compile), lambda: self.stop.asked,
                console.evaluating, corpus.sets,
            )  # fmt: skip
            guard = Guard(cfg, ranks, self.stop, saver, console, corpus.tokenizer)
            loop = Loop(cfg, ranks, update, evaluator, self.sinks, saver, guard, console)
            stack.enter_context(loop.profiler or nullcontext())
            if checkpoint is not None:
                loop.resume(checkpoint)
                loop.unevaluated = unevaluated
            streams = loop.state.streams or None
            loader = TrainLoader(cfg, corpus.source, corpus.tokenizer, ranks.rank, ranks.world_size, streams)
            stack.enter_context(closing(loader))
            loop.fit(loader)

    def open_metrics(self, stack: ExitStack, start: Start) -> dict | None:
        """On rank 0, open ``metrics.jsonl`` and the view beside it, if any; ``stack`` closes both.

        Returns the record of the step from which the run resumes if an evaluation is due that it lacks.
        """
        began = (read_record(self.dir).get("started_from") or {"step": 0})["step"]
        self.metrics = stack.enter_context(MetricsFile(self.dir / "metrics.jsonl", start.step, began))
        if (lost := self.metrics.missing) > 0:
            steps = f"{plural(lost, 'step')} up to step {start.step:,}"
            self.console.say(
                f"warning: {self.metrics.path} lacks the records of {steps}: it was cut, damaged or deleted"
            )
        self.sinks.append(self.metrics.write)
        if view := open_view(self.cfg, self.dir, self.console, start.step):
            self.sinks.append(stack.enter_context(view).log)
        last, cfg = self.metrics.last, self.cfg
        evaluates = start.step == cfg.train.steps or start.step % cfg.eval.every == 0
        return last if evaluates and last.get("step") == start.step and "eval/loss" not in last else None

    def fold(self, model: Llama, optimizer: Optimizer) -> None:
        """Write the folded checkpoint."""
        self.stop.training_done()
        optimizer.release()
        tensors = folded(self.cfg, model, optimizer, keep=self.ranks.is_main)
        checked = self.ranks.on_main(lambda: finish(self.cfg, self.dir, tensors, self.corpus))
        self.console.summary({"folded": checked, "finished": f"in {duration(time.monotonic() - self.started)}"})
        self.say_result()

    def say_result(self) -> None:
        """Print how good the model is, where it is, and how to load it."""
        folded, record = self.dir / "folded", last_record(self.dir / "metrics.jsonl")
        if "eval/loss" in record:
            self.console.summary({"result": evaluation(record, " on the validation text")})
        code = indent(loading(str(folded), trust=not deployed_dense(self.cfg)), "    ")
        if not (folded / "config.json").exists():  # a user's own backbone
            code = "    transformers has no layer for this backbone: see docs/extending.md, and fold a checkpoint again"
        self.console.say(f"export      {folded}\n\n{code}")


def finish(cfg: Config, run_dir: Path, tensors: dict[str, Tensor], corpus: Corpus) -> str:
    """Write ``<run>/folded`` from the folded ``tensors``, by their exported names. Returns how the export was checked.

    Raises UserError if the export differs from what was trained, and leaves it in ``<run>/.folded.partial``. Raises
    Diverged, and writes nothing, if the last evaluation is not finite. The checkpoints stay as they are.
    """
    record = last_record(run_dir / "metrics.jsonl")
    if record.get("eval/perplexity", 0.0) is None:
        raise Diverged(
            f"step {cfg.train.steps}: the last evaluation is not finite, so nothing was folded. "
            f"The checkpoints remain. Lower train.lr={cfg.train.lr:g}"
        )
    ids = torch.from_numpy(corpus.validation.tokens[:VERIFIED_SEQUENCES, :-1].astype("int64"))
    record.pop("time", None)
    record["unknown tokens of the text"] = f"{corpus.unknown:.2%}"
    return export(run_dir / "folded", cfg, tensors, run_dir / "tokenizer", record | origin(run_dir), ids)
