"""The command line of train.py: check it, hand it to Hydra, build the ``Config``, run, and print an error in one line.

Nothing here imports torch before the configuration is valid, so help and errors appear at once. Rank 0 prints the
messages. Under torchrun every failure is also recorded for torchrun's own summary.
"""

import math
import os
import shlex
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dlr_pretrain.config import MISSING, Config, ConfigError, Problem
from dlr_pretrain.config.command_line import VERSION_BASE, CommandLine, check, configure, key_of, read
from dlr_pretrain.config.identity import shorter_run
from dlr_pretrain.config.tree import CONFIG_DIR
from dlr_pretrain.util import process
from dlr_pretrain.util.errors import Diverged, Stopped, UserError, command, record_for_torchrun, report_error, say_once
from dlr_pretrain.util.text import MAX_LINES

# By the variable in which a launcher counts the processes that it starts: its name, and its command for one on each
# node. The launchers of MPI start their own processes through srun, and srun may set the variable of PMI.
LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": ("mpirun of Open MPI", "mpirun -np <nodes> --map-by ppr:1:node"),
    "MV2_COMM_WORLD_SIZE": ("mpirun of MVAPICH", "mpirun_rsh -np <nodes> -ppn 1"),
    "SLURM_STEP_NUM_TASKS": ("srun", "srun --ntasks-per-node=1"),
    "PMI_SIZE": ("mpiexec of MPICH or Intel MPI", "mpiexec -n <nodes> -ppn 1"),
}


def main(run: Callable[[Config], float | None]) -> int:
    """Read ``sys.argv``, check it, and call ``run`` with the configuration of each job; returns the exit code."""
    return command(lambda: _main(run))


def _main(run: Callable[[Config], float | None]) -> int:
    line = read(sys.argv[1:])
    if {"--help", "-h"} & {*line.flags}:
        print(OmegaConf.load(CONFIG_DIR / "help.yaml").template, end="")
        return 0
    if line.multirun and world_size() > 1:
        rule = "a sweep under torchrun would run all its jobs in the same ranks"
        raise ConfigError([Problem("-m", MISSING, rule, "Start one torchrun per job, or an array of jobs")])
    # All problems are reported, those of a sweep's last job too, before its first one runs.
    configs = [] if line.helps else check(line, world_size())
    return _start(line, configs, run)


def load(words: list[str], ranks: int | None = 1, machine: bool = True, flags: Collection[str] = ()) -> Config:
    """The checked configuration for overrides such as ``["scale=1b", "train.lr=1e-3"]``, for scripts.

    ``ranks`` is None if their number is unknown. Without ``machine``, the configuration need not run on this machine:
    see ``validate``. ``flags`` are those of the calling command: see ``read``.
    """
    line = read(words, flags)
    if line.multirun:
        raise ConfigError([Problem("-m", MISSING, "asks for several runs, where one is expected", "Leave it out")])
    (cfg,) = check(line, ranks, machine)
    return cfg


def world_size() -> int:
    """The number of ranks that torchrun has started. Raises UserError if its variables are incomplete or invalid, or if
    another launcher has started processes that do not know each other as ranks."""
    given = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    counts = {name: count for name in LAUNCHERS if (count := os.environ.get(name, "1")) != "1"}
    if not given and not counts:
        return 1
    variable = next(iter(counts), "SLURM_STEP_NUM_TASKS")
    launcher, once_a_node = LAUNCHERS[variable]
    started = f"{launcher} has started {counts.get(variable)} processes ({variable}={counts.get(variable)})"
    across = f"{once_a_node} torchrun --nnodes <nodes> --rdzv-backend c10d --rdzv-endpoint <first node>:29500"
    rank, world = given.get("RANK", ""), given.get("WORLD_SIZE", "")
    if rank.isdigit() and world.isdigit() and int(rank) < int(world) and given.get("LOCAL_RANK", "0").isdigit():
        if not counts or os.environ.get("GROUP_WORLD_SIZE") != "1":
            return int(world)
        said, rule = started, "each is a torchrun of its own, and all would write the same run"
    elif given:
        said = ", ".join(f"{name}={value}" for name, value in given.items())
        rule = "torchrun sets RANK, WORLD_SIZE and LOCAL_RANK together"
    else:
        said, rule = started, "they do not know each other as ranks, and all would write the same run"
    fix = "Start ranks with torchrun --nproc-per-node <GPUs> train.py ..., under SLURM with slurm/train.sbatch"
    fix += f", on several nodes with {across} --nproc-per-node <GPUs> train.py ..."
    raise UserError(f"{said}: {rule}. {fix}; else unset {', '.join(counts or given)}")


def _start(line: CommandLine, configs: list[Config], run: Callable[[Config], float | None]) -> int:
    """Run the configuration, or let Hydra sweep, show the configuration or print its help; returns the exit code.

    A sweeper receives what ``run`` returns as a job's result. A sweep continues after a job that diverges, because that
    is a result, too, for example of a high learning rate.
    """
    typed, diverged, main_process = sys.argv, [], os.getpid()

    def job(configured: Callable[[], Config]) -> float | None:
        sys.argv = typed  # the run records the command line as typed
        if os.getpid() != main_process:
            process.prepare_worker()
        # An error that a user can fix ends the process here, because Hydra would print a traceback and exit with 1.
        try:
            cfg = configured()
            if note := shorter_run(cfg):
                say_once(note)
            return run(cfg)
        except Diverged as error:
            code = report_error(error)
            if not line.multirun:
                sys.exit(code)
            diverged.append(str(cfg.run.dir))
            return math.inf
        except UserError as error:
            if process.is_worker and process.stop_requests:  # its end would end the other workers, unsaved
                report_error(error)
                return math.inf
            sys.exit(report_error(error))
        except Exception as error:
            if isinstance(error, OSError) and error.filename:  # a disk that is full or gone
                sys.exit(report_error(error))
            record_for_torchrun(error)
            raise

    def task(composed: DictConfig) -> float | None:
        node = HydraConfig.get()
        return job(lambda: configure(composed, node, node.overrides.task, line, world_size()))

    if configs and line.is_plain:
        job(lambda: configs[0])
        return 0
    sys.argv = [typed[0], *line.flags, *line.words]  # Hydra's parser refuses words on both sides of a flag
    launcher = next((word for word in line.words if line.multirun and key_of(word) == "hydra/launcher"), "")
    waiting: AbstractContextManager[list[int]] = nullcontext([])
    if launcher:
        waiting = process.passing_on_stops(queued="slurm" in launcher)
    with waiting as asked:
        try:
            hydra.main(version_base=VERSION_BASE, config_path=str(CONFIG_DIR), config_name="train")(task)()
        except SystemExit:
            if not asked:
                raise
    if asked:
        raise Stopped("stopped (asked to stop); what had begun is saved. The same command continues")
    if diverged:
        say_once(f"error: these jobs of the sweep diverged: {', '.join(diverged)}")
    if configs and line.multirun and "slurm" not in launcher:
        folders = shlex.join(str(cfg.run.dir) for cfg in configs[:MAX_LINES])
        places = folders if len(configs) <= MAX_LINES else shlex.quote(configs[0].run.root)
        say_once(f"compare     python scripts/report.py {places} --output report")
    return Diverged.exit_code if diverged else 0
