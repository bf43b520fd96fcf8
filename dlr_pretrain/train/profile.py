"""``profile=on``: each rank writes a trace of a few steps to ``<run>/profile``, and rank 0 torch's table of it."""

from __future__ import annotations

from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from dlr_pretrain.config import Config
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.ranks import Ranks

UNTIMED = "not training"  # the range in traces of what stands between two steps: evaluations and saves
ROWS = 60  # of the table


class Profiler:
    """Traces those steps of this start that ``cfg.profile`` names. A full disk causes a warning only."""

    def __init__(self, cfg: Config, run_dir: Path, ranks: Ranks, console: Console):
        self.cfg, self.ranks, self.console = cfg, ranks, console
        self.folder = run_dir / "profile"
        self.profile: profile | None = None
        self.written = False

    def __enter__(self) -> Profiler:
        choice = self.cfg.profile
        if choice.enabled:
            activities = [ProfilerActivity.CPU]
            if self.ranks.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            due = schedule(wait=choice.start - 1, warmup=1, active=choice.steps, repeat=1)
            self.profile = profile(activities=activities, schedule=due, on_trace_ready=self._write)
            self.profile.start()
        return self

    def step(self) -> None:
        """Count a training step that has ended."""
        if self.profile is not None:
            self.profile.step()

    def __exit__(self, *_) -> None:
        """End the profile, complete or not."""
        if self.profile is not None:
            self.profile.stop()
        if self.profile is not None and not self.written:
            self.console.say(f"warning: no profile: profile.start={self.cfg.profile.start} was not reached")

    def _write(self, ended: profile) -> None:
        if ended.step_num <= self.cfg.profile.start:  # the run ended before the first traced step was complete
            return
        try:
            self.folder.mkdir(exist_ok=True)
            ended.export_chrome_trace(str(self.folder / f"trace_rank{self.ranks.rank}.json.gz"))
            if self.ranks.is_main:
                order = "device_time_total" if self.ranks.device.type == "cuda" else "cpu_time_total"
                text = ended.key_averages().table(sort_by=order, row_limit=ROWS)
                (self.folder / "profile.txt").write_text(text, encoding="utf-8")
                self.console.say(f"profile     {self.folder / 'profile.txt'}, and traces for https://ui.perfetto.dev")
        except OSError as error:
            self.console.say(f"warning: no profile: {error}")
        self.written = True
