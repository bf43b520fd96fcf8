"""The console output of rank 0: a summary, progress, evaluations, and where the result is."""

import re
import shutil
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from dlr_pretrain.config import Config
from dlr_pretrain.config.key import keys_of
from dlr_pretrain.data.mixture import Mixture
from dlr_pretrain.models.flops import parameter_counts
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.train.corpus import Corpus
from dlr_pretrain.train.device import describe_device, slow_precision
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util.errors import say
from dlr_pretrain.util.text import amount, plural

LABEL_WIDTH = 12  # characters in the summary's first column
NOTE_SECONDS = 30.0  # of an evaluation between two lines about its progress


class Console:
    """Shows progress: on one live line in a terminal, otherwise on a new line every ``log.every`` steps."""

    def __init__(self, cfg: Config, enabled: bool, stream: TextIO | None = None):
        self.cfg, self.enabled = cfg, enabled
        self.stream = stream or sys.stdout
        self.live = enabled and self.stream.isatty()
        self.width = shutil.get_terminal_size((100, 24)).columns
        self._line_open = False
        self._noted = time.monotonic()  # when this evaluation began, or its progress was last shown

    def say(self, text: str = "") -> None:
        """Write ``text`` on a line of its own."""
        if self.enabled:
            self.close_line()
            say(text, self.stream)

    def summary(self, rows: dict[str, str]) -> None:
        """Write each label with its text, wrapped to the terminal's width."""
        for label, text in rows.items():
            wrapped = textwrap.wrap(
                text, max(28, self.width - 1 - LABEL_WIDTH), break_long_words=False, break_on_hyphens=False
            )
            self.say(label.ljust(LABEL_WIDTH) + ("\n" + " " * LABEL_WIDTH).join(wrapped))

    def step(self, record: dict) -> None:
        """Show the progress after one update, and the evaluation if there was one."""
        if not self.enabled:
            return
        line, evaluated = self._progress(record), "eval/loss" in record
        if self.live and not evaluated:
            while len(line) >= self.width and "  " in line:  # leave out figures that do not fit
                line = line.rpartition("  ")[0]
            say("\r\x1b[K" + line[: self.width - 1], self.stream, end="")
            self._line_open = True
        elif evaluated or record["step"] == 1 or record["step"] % self.cfg.log.every == 0:
            self.say(line)
        if evaluated:
            self.say(f"  eval  {evaluation(record)}")

    def evaluating(self, share: float) -> None:
        """Show the progress of a long evaluation, of which this share is done."""
        now = time.monotonic()
        if share == 0:
            self._noted = now
        elif now - self._noted >= NOTE_SECONDS:
            self._noted = now
            self.say(f"  eval  {share:.0%} done")

    def _progress(self, record: dict) -> str:
        t, step, speed = self.cfg.train, record["step"], record["perf/tokens_per_second"]
        parts = [f"step {step:>{len(str(t.steps))}}/{t.steps}", f"loss {decimal(record['train/loss'], 4)}"]
        if speed and step < t.steps:
            parts.append(f"eta {duration((t.steps - step) * t.global_batch * t.seq_len / speed)}")
        if speed:
            parts.append(f"{amount(speed)} tok/s")
        if record["perf/mfu"]:
            parts.append(f"MFU {record['perf/mfu']:.1%}")
        parts.append(f"{record['perf/max_memory_gb']:.1f} GB")
        parts += [f"lr {record['train/lr']:.2e}", f"grad {decimal(record['train/grad_norm'], 3)}"]
        return "  ".join(parts)

    def close_line(self) -> None:
        """Remove the live line before other output."""
        if self._line_open:
            say("\r\x1b[K", self.stream, end="")
            self._line_open = False


def describe_run(cfg: Config, run_dir: Path, ranks: Ranks, corpus: Corpus, model: Llama) -> dict[str, str]:
    """What a run will train: rows of a summary, each a label and its text."""
    t, world, micro = cfg.train, ranks.world_size, cfg.micro_batch(ranks.world_size)
    keys = keys_of(type(cfg.backbone))
    options = ", ".join(f"{name} {getattr(cfg.backbone, name)}" for name, key in keys if not key.fixed)
    dlr, projections = "no DLR", 7 * cfg.scale.num_layers
    if cfg.dlr.enabled:
        dlr = f"DLR {cfg.dlr.name} (alpha {cfg.dlr.alpha:g}) on all {projections} projections"
    total, trained, _ = parameter_counts(cfg, model).values()
    tokens, shape = t.global_batch * t.seq_len, {"cosine": "a cosine", "linear": "a line"}[t.lr_decay]
    falls = f"{shape} to {t.lr * t.min_lr_ratio:g} over {cfg.lr_decay_steps:,}" if cfg.lr_decay_steps else "constant"
    warm_up = f"from 0 to {t.lr:g} over {plural(cfg.warmup_steps, 'step')}" if cfg.warmup_steps else f"{t.lr:g}"
    every = cfg.optimizer.restart_every or cfg.backbone.merge_every
    restarts = f", restarting every {plural(every, 'step')}" if every else ""
    vocabulary, validation = model.model.embed_tokens.num_embeddings, corpus.validation
    how = [cfg.precision.name, describe_device(ranks.device), *(["compiled"] if cfg.compile else [])]
    if ranks.device.type == "cuda":
        reason = cfg.why_no_graphs(world)
        how.append(f"no CUDA graphs: {reason}" if reason else "micro-batches as CUDA graphs")
    table = {
        "run": str(run_dir),
        "model": f"{cfg.scale.name}, {cfg.backbone.name}{f' ({options})' if options else ''}, {dlr}",
        "parameters": f"{total:,}{f' ({trained:,} of them trained)' if trained < total else ''}; "
        f"embeddings for {vocabulary:,} tokens",
        "data": f"{corpus.source.describe()}; "
        f"tokenizer with a vocabulary of {corpus.tokenizer.vocab_size:,}; {cfg.data.packing}",
        "mixture": corpus.source.forecast(cfg) if isinstance(corpus.source, Mixture) else "",
        "training": corpus.source.contents.get("training", ""),
        "validation": f"{plural(len(validation.tokens), 'sequence')}, {validation.real_tokens:,} tokens, "
        f"{cfg.eval.packing}, from {corpus.source.contents.get('validation', 'the validation shards')}",
        "more sets": ", ".join(f"{name}, {one.real_tokens:,} tokens" for name, one in corpus.sets.items()),
        **{name: corpus.source.contents.get(name, "") for name in ("left out", "bad rows", "special")},
        "batch": f"{plural(world, 'rank')} x {plural(t.global_batch // world // micro, 'micro-batch')} "
        f"x {plural(micro, 'sequence')} x {t.seq_len} = {tokens:,} tokens per step",
        "schedule": f"{t.steps:,} steps, {amount(t.steps * tokens)} tokens; lr {warm_up}, then {falls}{restarts}",
        "precision": ", ".join(how),
    }
    table["warning"] = "; ".join(filter(None, [*corpus.warnings(cfg), slow_precision(cfg, ranks.device)]))
    return {label: text for label, text in table.items() if text}


def evaluation(record: dict, where: str = "") -> str:
    """The results of an evaluation on the validation text (``where``, as text), and on each named set."""
    galore = record.get("eval/perplexity_galore")
    of_galore = f" (GaLore-style {decimal(galore, 2)})" if galore is not None else ""
    sets = re.findall(r"^eval/(.+)/loss$", "\n".join(record), re.MULTILINE)
    losses = "".join(f"; {name} {decimal(record[f'eval/{name}/loss'], 4)}" for name in sets)
    whole = f"loss {decimal(record['eval/loss'], 4)}, perplexity {decimal(record['eval/perplexity'], 2)}{of_galore}"
    return whole + where + losses


def duration(seconds: float) -> timedelta:
    """A duration that prints as whole seconds: 0:12:05, or 1 day, 3:04:05."""
    return timedelta(seconds=round(seconds))


def decimal(number: float | None, places: int) -> str:
    """A number as text: 3.1416, or 1.2e+30 for a large number, which would fill the line; "-" for None."""
    if number is None:
        return "-"
    return f"{number:.{places}f}" if abs(number) < 1e5 else f"{number:.1e}"
