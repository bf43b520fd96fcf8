"""A whole run, from a configuration to a folded checkpoint and a report; it resumes from the newest checkpoint."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import torch

from dlr_pretrain.config import Config, flatten, to_dict
from dlr_pretrain.config.written import read_record
from dlr_pretrain.data import (
    ORDER_VERSION,
    Source,
    Tokenizer,
    TrainLoader,
    ValidationSet,
    embedding_rows,
    list_files,
    open_source,
    open_tokenizer,
    uneven,
    validation_set,
)
from dlr_pretrain.deploy.tokenizer import tokenizer_json
from dlr_pretrain.models import build
from dlr_pretrain.models.dlr import residuals
from dlr_pretrain.models.flops import flops_per_token
from dlr_pretrain.models.llama import backbone
from dlr_pretrain.models.precision import STATE_DTYPE
from dlr_pretrain.models.start import DenseStart
from dlr_pretrain.optim.build import state_bytes
from dlr_pretrain.optim.schedule import restarts
from dlr_pretrain.train import checkpoint
from dlr_pretrain.train.checkpoint import Checkpoint, Keep
from dlr_pretrain.train.console import Console, duration
from dlr_pretrain.train.descent import Descent
from dlr_pretrain.train.evaluate import Evaluator
from dlr_pretrain.train.finish import Report, farewell, finish, write_report
from dlr_pretrain.train.fork import adapt, best_after, fork
from dlr_pretrain.train.health import Suspects
from dlr_pretrain.train.lock import HEARTBEAT, RunLock
from dlr_pretrain.train.memory import PlannedMemory, explained, resolve_micro_batch
from dlr_pretrain.train.metrics import MetricsFile
from dlr_pretrain.train.record import (
    describe_code,
    describe_device,
    hold,
    open_record,
    record_end,
    record_start,
    update_record,
)
from dlr_pretrain.train.runtime import Runtime, decided
from dlr_pretrain.train.saver import Saver
from dlr_pretrain.train.trainer import Trainer
from dlr_pretrain.train.views import View, open_view
from dlr_pretrain.train.weights import Weights, place
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import is_there
from dlr_pretrain.util.text import amount, plural

MUCH_UNKNOWN, TOO_MUCH_UNKNOWN = 0.01, 0.5  # shares of text without a token: told, and refused
LATE = 5.0  # seconds within which a network file system shows a checkpoint that another machine has written


def run(cfg: Config, report: Report | None = None, planned_memory: PlannedMemory | None = None) -> None:
    """Train ``cfg`` to its last step in ``cfg.run.dir``, from the newest checkpoint there if any, and fold the result.

    ``report`` writes the report of a run directory; a run that has trained does not fail with it. ``planned_memory`` is
    the plan's estimate: it is shown at the start, and ``train.micro_batch=auto`` needs it.
    Raises Stopped if the run was asked to stop and has saved, and other UserErrors if something prevents the run.
    """
    with Runtime(cfg) as runtime, RunLock(Path(cfg.run.dir)) as lock:
        runtime.require_equal(flatten(to_dict(cfg)) | {"the device that was found": runtime.device.type})
        runtime.stop_if_asked("before the first step")
        token = runtime.on_main(lock.acquire)
        decided(lambda: runtime.watch.start(Path(cfg.run.dir), token))
        ended: BaseException | None = None
        try:
            Run(cfg, runtime, lock, report, planned_memory).complete()
        except BaseException as error:
            ended = error
            raise
        finally:
            if runtime.is_main:
                record_end(Path(cfg.run.dir), ended)


def recall(run_dir: Path) -> None:
    """Note the newest finished checkpoint in ``manifest.json`` if a kill prevented that after the first save."""
    record, found = read_record(run_dir), checkpoint.finished(run_dir / "checkpoints")
    if record and found and "saved" not in record:
        update_record(run_dir, {"saved": checkpoint.step_of(found[0])})


def newest(run_dir: Path, say: Callable[[str], None]) -> tuple[Path | None, list[Path]]:
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


class Run:
    """A run from start to finish, as one of its ranks executes it."""

    def __init__(
        self,
        cfg: Config,
        runtime: Runtime,
        lock: RunLock,
        report: Report | None,
        planned_memory: PlannedMemory | None,
    ):
        self.cfg, self.runtime, self.lock, self.dir, self.report = cfg, runtime, lock, Path(cfg.run.dir), report
        self.planned_memory = planned_memory
        self.console = Console(cfg, enabled=runtime.is_main)
        self.started = time.time()
        self.source: Source
        self.tokenizer: Tokenizer
        self.validation: ValidationSet
        self.vocab_size: int
        self.metrics: MetricsFile | None = None  # on rank 0 only
        self.view: View | None = None  # W&B or TensorBoard, on rank 0 only
        self.passed_over: list[Path] = []  # damaged checkpoints; filled on rank 0 only

    def complete(self) -> None:
        """Open the data and the newest checkpoint, then build, train and fold the model.

        What can fail without a GPU fails before one is used.
        """
        self.open_data()
        self.runtime.stop_if_asked("before the first step")
        snapshot = self.open_run()
        trained = snapshot is not None and snapshot.step == self.cfg.train.steps
        if trained and self.runtime.on_main(lambda: is_there(self.dir / "folded" / "README.md")):
            # A kill between the export and the report leaves no report.
            missing = self.runtime.on_main(lambda: not (self.dir / "report.md").exists())
            if missing:
                self.runtime.on_main(lambda: write_report(self.report, self.dir, self.console.say))
            asked = [f"{name}=on" for name in ("probe", "profile") if getattr(self.cfg, name).enabled]
            late = f": no step is left for {' and '.join(asked)}" if asked else ""
            self.console.say(f"{self.dir} is complete{late}.")
            return self.console.say(farewell(self.cfg, self.dir))

        start = self.open_start() if snapshot is None else None
        self.runtime.use_device()
        if (self.runtime.device.type, self.cfg.device) == ("cpu", "auto") and self.cfg.scale.name != "tiny":
            self.console.say("warning: torch finds no GPU, so this trains on the CPU. Set device=cpu if that is meant")
        world, device, text = self.runtime.world_size, self.runtime.device, self.source.describe()
        self.runtime.on_main(lambda: record_start(self.dir, world, device, text))
        self.cfg = resolve_micro_batch(
            self.cfg, self.runtime, self.vocab_size, self.planned_memory, self.dir, resumed=snapshot is not None
        )
        with explained(self.cfg, self.runtime):
            weights = self.build_weights(snapshot, start)
            self.summarize(weights, snapshot)
            self.train(weights, snapshot)
        self.runtime.finishing()
        tensors = weights.folded(keep=self.runtime.is_main)
        folded = self.runtime.on_main(lambda: finish(self.cfg, self.dir, weights, tensors, self.validation))
        self.runtime.on_main(lambda: write_report(self.report, self.dir, self.console.say))
        self.console.summary({"folded": folded, "finished": f"in {duration(time.time() - self.started)}"})
        self.console.say(farewell(self.cfg, self.dir))

    # ------------------------------------------------------------------------------------------------
    # Before the training

    def open_data(self) -> None:
        """Open data, tokenizer and validation set. Raises UserError if model or export cannot hold the tokenizer."""
        cfg, main_first = self.cfg, self.runtime.main_first
        record = self.runtime.on_main(lambda: read_record(self.dir))
        version, resumes = record.get("data.version"), "saved" in record  # perhaps unattended: it waits for the hub
        listing = self.runtime.on_main(lambda: list_files(cfg, self.console.say, version, patient=resumes))
        self.version = listing.version if listing else None
        source = self.source = main_first(lambda: open_source(cfg, self.console.say, listing))
        tokenizer = self.tokenizer = main_first(lambda: open_tokenizer(cfg, source))
        self.vocab_size = embedding_rows(cfg, tokenizer)
        tokenizer_json(tokenizer)  # refuses a tokenizer that the export could not write
        self.unknown = self.runtime.on_main(lambda: source.unknown_share(tokenizer))
        if self.unknown > TOO_MUCH_UNKNOWN:
            rule = f"cannot express {self.unknown:.0%} of the text: it would be learnt as one unknown token"
            raise UserError(f"tokenizer {tokenizer.path}: {rule}. Set tokenizer.path to a tokenizer of this language")
        self.validation = self.runtime.on_main(lambda: validation_set(cfg, source, tokenizer))

    def open_run(self) -> Checkpoint | None:
        """The checkpoint to resume from, if any. Raises UserError if the directory holds another run."""
        fingerprints = {"data.shards": self.source.fingerprint, "tokenizer.pieces": self.tokenizer.fingerprint}
        fingerprints["data.order"] = ORDER_VERSION
        self.runtime.require_equal(fingerprints)

        def find() -> Path | None:
            self.lock.require_held()  # of two starts at the same time, both have written their lease by now
            recall(self.dir)
            open_record(self.dir, self.cfg, fingerprints)
            update_record(self.dir, {"data.version": self.version, "tokenizer.unknown_share": self.unknown})
            self.tokenizer.save(self.dir / "tokenizer")
            found, self.passed_over = newest(self.dir, self.console.say)
            record = read_record(self.dir)
            if found is None and "saved" in record:
                fix = "Restore it, or move the run directory away to start over"
                raise UserError(f"{self.dir}/checkpoints: none, and step {record['saved']:,} was saved. {fix}")
            if found is None and self.cfg.run.fork_from is not None:
                shapes = {name: tuple(value.shape) for name, value in self.empty_state().items()}
                origin = Path(self.cfg.run.fork_from)
                found = fork(origin, self.dir, record["identity"], shapes, self.console.say)
            return found

        path = self.runtime.on_main(find)
        if path is None:
            return None
        found, record = checkpoint.load(path), read_record(self.dir)
        adapt(found, record, self.console.say)
        return found

    def empty_state(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that a checkpoint of this run holds, on the meta device."""
        model = build(self.cfg, self.vocab_size, torch.device("meta"))
        return dict(model.named_parameters()) | dict(model.named_buffers())

    def open_start(self) -> DenseStart | None:
        """The dense model that a new run starts from, if any; its fingerprint becomes part of the run's identity."""
        if (folder := self.cfg.train.init_from) is None:
            return None
        start = self.runtime.main_first(lambda: DenseStart(Path(folder), self.cfg, self.vocab_size))
        self.runtime.on_main(lambda: hold(self.dir, {"train.init_from.weights": start.fingerprint()}))
        return start

    def build_weights(self, snapshot: Checkpoint | None, start: DenseStart | None) -> Weights:
        """The weights on this rank's device, compiled if ``cfg.compile``; ``Trainer.resume`` loads ``snapshot``."""
        dtype = STATE_DTYPE[self.cfg.precision.name]
        model = build(self.cfg, self.vocab_size, self.runtime.device, dtype, initialize=snapshot is None)
        if start:
            start.put_into_(model)
        self.runtime.broadcast(model.state_dict().values())
        weights = place(self.cfg, model)
        if self.cfg.compile:
            torch._dynamo.reset()  # in a multirun, the previous run compiled other shapes
            weights.compile_(self.cfg.train, self.runtime.world_size)
        return weights

    def summarize(self, weights: Weights, snapshot: Checkpoint | None) -> None:
        """Show on the console what will be trained."""
        if not self.runtime.is_main:
            return
        cfg, t, world = self.cfg, self.cfg.train, self.runtime.world_size
        knobs = ", ".join(f"{k} {v}" for k, v in cfg.backbone.knobs.items() if k != "factorized")
        total = sum(p.numel() for p in weights.model.parameters())
        trained = sum(p.numel() for p in weights.model.parameters() if p.requires_grad)
        after = "merged into dense weights at the end" if backbone(cfg).deployed_dense else "the same after folding"
        micro, positions = cfg.micro_batch(world), t.global_batch * t.seq_len
        vocabulary, rows = len(weights.state["model.embed_tokens.weight"]), len(self.validation.tokens)
        cost = {"parameters": trained, "flops_per_token": flops_per_token(cfg, vocabulary, micro)}
        update_record(self.dir, cost)
        table = {
            "run": str(self.dir),
            "model": f"{cfg.scale.name}, {cfg.backbone.name}{f' ({knobs})' if knobs else ''}, "
            f"{describe_dlr(cfg, len(residuals(weights.model)))}",
            "parameters": f"{total:,}{f' ({trained:,} of them trained)' if trained < total else ''}, {after}; "
            f"vocabulary {vocabulary:,}",
            "data": f"{self.source.describe()}{uneven(self.source, cfg.num_streams)}; "
            f"tokenizer of {self.tokenizer.vocab_size:,} pieces; {cfg.data.packing}",
            "validation": f"{rows:,} sequences, {self.validation.real_tokens:,} tokens, {cfg.eval.packing}",
            "batch": f"{plural(world, 'rank')} x {plural(t.global_batch // world // micro, 'micro-batch')} "
            f"x {plural(micro, 'sequence')} x {t.seq_len} = {positions:,} tokens a step",
            "schedule": f"{t.steps:,} steps, {amount(t.steps * positions)} tokens; lr {t.lr:g} after "
            f"{plural(cfg.warmup_steps, 'step')}{describe_decay(cfg)}",
            "precision": f"{cfg.precision.name}, "
            f"{describe_device(self.runtime.device)}{', compiled' if cfg.compile else ''}",
            "code": describe_code(read_record(self.dir)["starts"][-1]),
        }
        if self.unknown > MUCH_UNKNOWN:
            rule = f"the tokenizer cannot express {self.unknown:.1%} of the text, which is learnt as one unknown token"
            table["warning"] = rule
        if self.runtime.device.type == "cuda" and self.planned_memory:
            there = torch.cuda.mem_get_info(self.runtime.device)[1]
            table["memory"] = describe_memory(self.planned_memory(cfg, vocabulary, world), there)
        if cfg.train.init_from and not snapshot:
            table["start"] = f"the dense model in {cfg.train.init_from}"
        if snapshot:
            table["resuming"] = f"after step {snapshot.step:,}"
        self.console.summary(table)

    # ------------------------------------------------------------------------------------------------
    # The training

    def train(self, weights: Weights, snapshot: Checkpoint | None) -> None:
        """Train from ``snapshot``, or from the start, to the last step."""
        cfg, runtime = self.cfg, self.runtime
        forked = read_record(self.dir).get("forked")
        others = best_after(forked) if forked else 0
        kept = cfg.checkpoint
        keep = Keep(last=kept.keep_last, every=kept.keep_every, best=kept.keep_best, best_after=others)
        suspects = Suspects(cfg, self.dir, self.source, self.tokenizer, runtime.rank)
        evaluator = Evaluator(self.validation, cfg.micro_batch(runtime.world_size), runtime)

        def write(record: dict) -> None:
            if self.metrics is None:
                return
            with suppress(OSError):  # the disk may not answer; ``permit`` checks again
                self.lock.require_held(at_most=2 * HEARTBEAT)
            complete = not self.metrics.unwritten
            self.metrics.write(record)
            if self.view is not None:
                self.view.log(record)
            if complete and self.metrics.unwritten:
                self.console.say(f"warning: {self.metrics.refusal}. It is tried again, until a checkpoint needs it")

        def permit() -> None:
            """On rank 0, before a checkpoint becomes valid: raise if the lock is lost or metrics are not on disk."""
            self.lock.require_held()
            self.metrics.sync()

        def saved(step: int) -> None:
            update_record(self.dir, {"saved": step})

        with ExitStack() as opened:
            runtime.on_main(lambda: self.open_metrics(opened, snapshot))
            opened.callback(self.console.close_line)
            step = snapshot.step if snapshot else 0
            about = {"identity": runtime.on_main(lambda: read_record(self.dir)["identity"])}
            root = self.dir / "checkpoints"
            saver = Saver(
                root,
                runtime,
                keep,
                permit=permit,
                done=saved,
                about=about,
                saved_step=step,
                passed_over=self.passed_over,
            )
            opened.enter_context(saver)
            with runtime.patient():
                saver.rehearse()
            runtime.on_main(lambda: self.warn_of_space(root, weights))
            updates = Descent(cfg, runtime, weights)
            trainer = Trainer(cfg, runtime, updates, evaluator, self.console, write, saver, suspects)
            opened.enter_context(trainer.profiler)
            if snapshot:
                trainer.resume(snapshot)
            streams = snapshot.state["streams"] if snapshot else None
            loader = TrainLoader(cfg, self.source, self.tokenizer, runtime.rank, runtime.world_size, streams)
            opened.enter_context(closing(loader))
            trainer.train(loader)

    def warn_of_space(self, root: Path, weights: Weights) -> None:
        free, state = shutil.disk_usage(root).free, weights.state.values()
        size = sum(t.numel() * t.itemsize for t in state) + state_bytes(self.cfg.optimizer, weights.optimized)
        if free < size:
            sizes = f"{free / 1e9:.1f} GB are free on its disk, and a checkpoint takes {size / 1e9:.1f} GB"
            self.console.say(f"warning: {root}: {sizes}. Make room before the first is due")

    def open_metrics(self, opened: ExitStack, snapshot: Checkpoint | None) -> None:
        """Open ``metrics.jsonl``, and the view beside it if there is one; ``opened`` closes both."""
        step = snapshot.step - (snapshot.state["owed"] is not None) if snapshot else 0
        origin = read_record(self.dir).get("forked", {"step": 0})["step"]
        file = MetricsFile(self.dir / "metrics.jsonl", step, first_step=origin + 1)
        self.metrics = opened.enter_context(file)
        if file.missing:
            lost = f"metrics.jsonl has lost steps {file.missing} of the {step:,} that are trained"
            self.console.say(f"warning: {lost}. The weights have them, and the curves a gap")
        self.view = open_view(self.cfg, self.dir, self.console, step)
        if self.view is not None:
            opened.enter_context(self.view)


def describe_dlr(cfg: Config, projections: int) -> str:
    """The settings of DLR as text, with those of an ablation that are not the usual ones."""
    dlr = cfg.dlr
    if not dlr.enabled:
        return "no DLR"
    usual = {"learn_alpha": False, "variance_correction": True, "scope": "all", "grouping": "contiguous",
             "train_b": True, "mode": "residual"}  # fmt: skip
    departs = [f"{knob} {getattr(dlr, knob)}" for knob, value in usual.items() if getattr(dlr, knob) != value]
    where = f" on {projections} projections" if projections else ""
    return f"DLR {dlr.name} ({', '.join([dlr.impl, f'alpha {dlr.alpha:g}', *departs])}){where}"


def describe_decay(cfg: Config) -> str:
    """How the learning rate falls after its warm-up."""
    t, steps = cfg.train, cfg.train.steps - cfg.warmup_steps if cfg.own_schedule else cfg.lr_decay_steps
    anew = f", anew every {plural(restarts(cfg)[0], 'step')}" if restarts(cfg) else ""
    if not steps:
        return f", then constant{anew}"
    when = "then" if steps == t.steps - cfg.warmup_steps else f"and in the last {plural(steps, 'step')}"
    shape = "a line" if t.lr_decay == "linear" else "a cosine"
    return f", {when} {shape} to {t.lr * t.min_lr_ratio:g}{anew}"


def describe_memory(planned: int, there: int) -> str:
    """The ``planned`` bytes and those of the GPU (``there``) as text."""
    more = ". That is more than there is: see scripts/plan.py, and train.micro_batch=auto" if planned > there else ""
    return f"{planned / 1e9:.1f} GB planned (eager; compiled code takes less) of {there / 1e9:.1f} GB{more}"
