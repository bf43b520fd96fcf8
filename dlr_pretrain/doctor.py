"""The command behind ``scripts/doctor.py``: it finds in a minute what would fail after hours.

The checks of this machine come first, then those that all ranks make together. A check is a function that returns what
it found. It raises a UserWarning if the run works but may be slow or end early, and a UserError, with the fix, if
something is wrong. Each check has a time limit, and none stops another. Anything that may ignore signals (NCCL, a disk)
runs in a child process, which can be killed.
"""

import math
import multiprocessing
import os
import resource
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import torch
import torch.distributed as dist

from dlr_pretrain.analysis.plan import disk_bytes
from dlr_pretrain.cli import load, world_size
from dlr_pretrain.config import Config
from dlr_pretrain.data import TrainLoader
from dlr_pretrain.train.checkpoint import newest
from dlr_pretrain.train.console import Console
from dlr_pretrain.train.corpus import Corpus, open_corpus
from dlr_pretrain.train.device import slow_precision
from dlr_pretrain.train.guard import StopRequest
from dlr_pretrain.train.micro_batch import planned_memory, resolve_micro_batch
from dlr_pretrain.train.ranks import Ranks, require_files
from dlr_pretrain.train.run import Run
from dlr_pretrain.util.errors import UserError, first_line
from dlr_pretrain.util.files import SHARED_MEMORY, file_system, nearest_folder, new_pool, read_metrics, require_durable
from dlr_pretrain.util.process import cores
from dlr_pretrain.util.secrets import redact
from dlr_pretrain.util.text import fill, plural

OK, WARN, FAIL = LEVELS = ("ok", "warn", "FAIL")
CONNECT_SECONDS = 10.0  # that a proxy has to accept a connection
STEPS = 3  # the first compiles, the second records CUDA graphs, which the third replays
REDUCED = 64 << 20  # bytes of the all-reduce
LITTLE_SHARED_MEMORY = 1 << 30  # a container of Docker has 64 MB by default
SLOW_NETWORK = 10e9  # bytes/s of a ring; slower GPUs communicate over sockets


def sound(cfg: Config, words: list[str]) -> bool:
    """Make all checks of ``cfg``, the configuration of ``words``, and print a line for each; whether none has failed.

    If only this machine lacks something, such as a file, that is a failed check, and the other checks still run.
    """
    is_main, of_machine = (os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    levels = []

    def say(name: str, level: str, text: str) -> None:
        levels.append(level)
        if is_main or (of_machine and level != OK):
            where = "" if is_main else f"{socket.gethostname()}: "
            print(fill(f"{level:<6}{name:<12}{where}{text}", indent=18), flush=True)

    say("config", *perform(60, partial(configuration, words)))
    if of_machine:
        say("gpus", *perform(60, partial(gpus, cfg)))
        say("limits", *perform(60, limits))
        say("network", *perform(60, partial(network, cfg)))
        say("disk", *perform(60, lambda: in_child(partial(disk, cfg, disk_bytes(cfg, cfg.planned_vocab_size)), 30)))
    try:
        with Ranks(cfg) as ranks, StopRequest(ranks) as stop:
            checks = RankChecks(cfg, ranks, stop)
            for name, minutes in (("collectives", 2), ("data", 5), ("step", 15)):  # a step may compile
                answers = ranks.gather(perform(60 * minutes, getattr(checks, name)))
                worst = max(range(len(answers)), key=lambda rank: LEVELS.index(answers[rank][0]))
                level, text = answers[worst]
                say(name, level, f"rank {worst}: {text}" if worst else text)
                if name == "collectives" and level == FAIL:
                    break  # in the next checks the ranks would wait for each other
            ranks.gather(None)  # wait for all, because torchrun ends the others when one ends with code 1
    except UserError as error:
        say("ranks", FAIL, str(error))
    return FAIL not in levels


def perform(seconds: float, check: Callable[[], str]) -> tuple[str, str]:
    """The level and text of a check, whatever it raises. It fails after ``seconds``."""

    def late(_number: int, _frame: object) -> None:
        raise UserError(f"no answer within {seconds:g} s. Look at what it waits for")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return OK, check()
    except UserWarning as warning:
        return WARN, str(warning)
    except Exception as error:
        return FAIL, str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def in_child(act: Callable[[], str], seconds: float, start: str = "fork") -> str:
    """The result of ``act``, which must be picklable, from a process that is killed after ``seconds``.

    ``start`` is "spawn" if ``act`` uses CUDA, which fails in a fork. Raises what ``act`` raises, or UserError.
    """
    pool = new_pool(ProcessPoolExecutor, 1, multiprocessing.get_context(start))
    try:
        return pool.submit(act).result(seconds)
    except TimeoutError:
        raise UserError(f"no answer within {seconds:g} s: its process was killed") from None
    finally:
        for child in multiprocessing.active_children():
            child.kill()
        pool.shutdown(wait=False)


# ----------------------------------------------------------------------------------------------------
# Checks of this machine


def configuration(words: list[str]) -> str:
    cfg = load(words, world_size())
    names = f"{cfg.scale.name}, {cfg.backbone.name}, dlr {cfg.dlr.name}, {cfg.optimizer.name}, {cfg.precision.name}"
    return f"{names} on {plural(world_size(), 'rank')}; {cfg.run.dir}"


def gpus(cfg: Config) -> str:
    """The GPUs that torch sees, their free memory, and the CPU cores for the ranks of this machine."""
    if not torch.cuda.is_available():
        text = f"none: the run trains on {cores()} CPU cores"
        fixes = [] if cfg.device == "cpu" else ["Set device=cpu if that is intended"]
        fixes += filter(None, [slow_precision(cfg, torch.device("cpu"))])
        if fixes:
            raise UserWarning(f"{text}. {'; '.join(fixes)}")
        return text
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    free, total = torch.cuda.mem_get_info(0)
    text = f"{torch.cuda.device_count()} x {', '.join(names)}, {free / 1e9:.3g} of {total / 1e9:.3g} GB free; "
    text += f"{cores()} CPU cores, torch {torch.__version__}"
    if free < 0.9 * total:
        raise UserWarning(f"{text}. Another process holds GPU memory: look at nvidia-smi")
    if cores() < 2 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        raise UserWarning(f"{text}. Each rank tokenises its own text: ask for more cores (--cpus-per-gpu=8)")
    return text


def limits() -> str:
    """What this machine allows that only many ranks need: open files, shared memory, and a name that others reach."""
    world, here = world_size() or 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    require_files(world)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft:,} of {hard:,} open files"
    new_pool(ThreadPool, 1).terminate()  # raises UserError without shared memory that can be written
    if world > here and "GLOO_SOCKET_IFNAME" not in os.environ:
        name = socket.gethostname()
        address = socket.gethostbyname(name)
        text += f"; {name} is {address}"
        if address.startswith("127."):
            raise UserError(
                f"{text}: the ranks of other nodes would look for it on their own machine. Set GLOO_SOCKET_IFNAME to "
                "the network's interface, or correct /etc/hosts"
            )
    if here > 1 and SHARED_MEMORY.is_dir():
        size = shutil.disk_usage(SHARED_MEMORY).total
        text += f"; {SHARED_MEMORY} of {size / 1e9:.2g} GB"
        if size < LITTLE_SHARED_MEMORY:
            raise UserWarning(f"{text}. NCCL needs more: start the container with --ipc=host, or --shm-size=8g")
    return text


def network(cfg: Config) -> str:
    """How this machine reaches the servers of the run's text and tokenizer, and whether their proxies answer."""
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    texts = (cfg.data.root, cfg.data.train_files, cfg.data.validation_files)
    addresses = [urlsplit(address) for address in texts if address and "://" in address]
    servers = [hub if address.scheme == "hf" else address for address in addresses if address.scheme != "file"]
    servers += [hub] if cfg.data.source == "local" and cfg.tokenizer.path is None else []
    routes = {}
    for server in servers:
        bypassed = not server.hostname or proxy_bypass(server.hostname)
        proxy = None if bypassed else getproxies().get(server.scheme if server.scheme == "http" else "https")
        routes[server.hostname or server.netloc] = f"through {redact(proxy)}" if proxy else "without a proxy"
        if proxy:
            to = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
            try:
                socket.create_connection((to.hostname, to.port or 80), CONNECT_SECONDS).close()
            except (OSError, ValueError) as error:
                route = f"{server.hostname} through {redact(proxy)}: {first_line(error)}"
                raise UserError(
                    f"{route}. Correct HTTP_PROXY and HTTPS_PROXY, or name hosts without a proxy in NO_PROXY"
                ) from error
    return ", ".join(f"{host} {route}" for host, route in routes.items()) or "text and tokenizer are on this machine"


def disk(cfg: Config, planned: dict[str, int]) -> str:
    """The free space of the run's disk, compared with what the run keeps. Its file system must keep what is saved."""
    place = nearest_folder(Path(str(cfg.run.dir)))
    require_durable(place)
    held = sum(file.stat().st_size for file in Path(str(cfg.run.dir), "checkpoints").rglob("part_*"))
    free = shutil.disk_usage(place).free
    text = f"{place} ({file_system(place)}): {free / 1e9:.2g} GB free, and the run keeps {planned['run'] / 1e9:.2g} GB"
    if free + held < planned["run"]:
        raise UserError(f"{text}. Set run.root to another disk, or keep less (checkpoint.keep_last, keep_every)")
    return f"{text}, each checkpoint {planned['checkpoint'] / 1e9:.2g} GB"


# ----------------------------------------------------------------------------------------------------
# Checks of all ranks together


def all_reduce(address: str, rank: int, world: int, device: torch.device) -> str:
    """The bandwidth of an all-reduce over all ranks, in a process group of its own."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    backend, wait = "nccl" if on_gpu else "gloo", timedelta(seconds=60)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=wait)
    tensor, times = torch.empty(REDUCED // 4, device=device), []
    for _ in range(6):
        tensor.fill_(1.0)
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    if not bool((tensor == world).all()):
        raise UserError(f"an all-reduce of ones over {world} ranks is not {world} everywhere. Look at the driver")
    rate = 2 * (world - 1) / world * REDUCED / median(times[1:])
    text = f"all-reduce of {REDUCED / 1e6:.0f} MB over {world} ranks by {backend}: {rate / 1e9:.2f} GB/s of a ring"
    if on_gpu and rate < SLOW_NETWORK:
        raise UserWarning(f"{text}. NCCL_DEBUG=INFO shows which links it uses: NVLink and InfiniBand, or sockets")
    return text


class RankChecks:
    """What a run does first: all-reduce, text, step. All ranks must make all checks, in this order."""

    def __init__(self, cfg: Config, ranks: Ranks, stop: StopRequest):
        self.cfg, self.ranks, self.stop = cfg, ranks, stop
        self.corpus: Corpus | None = None  # until ``data`` has opened it

    def collectives(self) -> str:
        """An all-reduce, in a child process of each rank because NCCL may hang."""
        ranks = self.ranks
        if ranks.world_size == 1:
            return "one rank, nothing to reduce; start this with torchrun to check more"
        with socket.socket() as free:
            free.bind(("", 0))
            port = ranks.on_main(lambda: free.getsockname()[1])
        address = f"tcp://{os.environ['MASTER_ADDR']}:{port}"
        return in_child(partial(all_reduce, address, ranks.rank, ranks.world_size, ranks.device), 90, "spawn")

    def data(self) -> str:
        """The text of the run, and the beginning of this rank's first batch."""
        cfg, ranks = self.cfg, self.ranks
        self.corpus = corpus = open_corpus(cfg, Path(str(cfg.run.dir)), ranks, print)
        with closing(TrainLoader(cfg, corpus.source, corpus.tokenizer, ranks.rank, ranks.world_size)) as batches:
            batch = batches.take()
        sample = " ".join(corpus.tokenizer.decode(batch.tokens[0, : int(batch.lengths[0])].tolist()).split())[:48]
        text = f'{corpus.source.describe()}, vocabulary {corpus.tokenizer.vocab_size:,}; first batch: "{sample}..."'
        text += "".join(f"; {label}: {files}" for label, files in corpus.source.contents.items())
        if found := corpus.warnings(cfg):
            raise UserWarning(f"{text}. {'; '.join(found)}")
        return text

    def step(self) -> str:
        """A run of ``STEPS`` updates in a folder beside the run's, to its folded model, which is deleted."""
        ranks, corpus = self.ranks, self.corpus
        if not all(ranks.gather(corpus is not None)) or corpus is None:
            raise UserWarning("not checked: it needs the text of the run")
        ranks.use_device()
        parent = nearest_folder(Path(str(self.cfg.run.dir)).absolute().parent)
        temporary = partial(tempfile.TemporaryDirectory, prefix=".doctor_", dir=parent, ignore_cleanup_errors=True)
        with ExitStack() as opened:
            scratch = Path(ranks.on_main(lambda: opened.enter_context(temporary())))
            cfg = short(resolve_micro_batch(self.cfg, ranks, corpus.vocab_size, scratch), ranks.world_size, scratch)
            validation, few = corpus.validation, 2 * ranks.world_size  # sequences
            head = replace(validation, tokens=validation.tokens[:few], lengths=validation.lengths[:few], by_source={})
            corpus = replace(corpus, validation=head, sets={})
            run = Run(cfg, scratch, ranks, self.stop, Console(cfg, enabled=False), corpus)
            run.complete()
            ended = time.time()
            *_, before, last = first, *_ = ranks.on_main(lambda: read_metrics(scratch / "metrics.jsonl"))
            ranks.on_main(lambda: newest(scratch / "checkpoints"))  # verifies it
        rows, planned = cfg.micro_batch(ranks.world_size), planned_memory(cfg, corpus.vocab_size, ranks.world_size)
        loss, seconds = first["train/loss"], last["time"] - before["time"]
        text = f"{cfg.train.global_batch // ranks.world_size // rows} x {rows} x {cfg.train.seq_len} tokens in "
        text += f"{seconds:.2f} s, loss {loss:.2f}, planned {planned / 1e9:.2g} GB; a checkpoint and the folded model "
        text += f"written in {ended - last['time']:.1f} s, and sound"
        if not abs(loss - math.log(corpus.vocab_size)) < 2:  # a new model's may exceed it by 0.9
            raise UserError(f"{text}. A new model's loss is ln(vocabulary): look at the precision and the kernels")
        if run.update is not None and run.update.graph_failure is not None:
            raise UserWarning(f"{text}. Without CUDA graphs: {run.update.graph_failure}")
        if ranks.device.type == "cuda":
            peak, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
            text += f"; peak {peak / 1e9:.2g} GB"
            if peak > min(0.95 * total, 1.1 * planned):
                raise UserWarning(f"{text}. Use a smaller train.micro_batch")
        return text


def short(cfg: Config, world_size: int, folder: Path) -> Config:
    """The run ``cfg`` with ``STEPS`` updates in ``folder``, from the seed, with a smaller batch of the same streams."""
    each, whole = world_size * cfg.micro_batch(world_size), cfg.train.global_batch
    batch = math.lcm(cfg.num_streams, each)
    batch = 2 * batch if batch == each < whole else batch  # several micro-batches if the run has several
    train: dict[str, Any] = {"steps": STEPS, "warmup_steps": 0, "stop_after": None, "global_batch": batch}
    return replace(
        cfg,
        train=replace(cfg.train, **train, micro_batch=cfg.micro_batch(world_size)),
        data=replace(cfg.data, streams=cfg.num_streams),
        run=replace(cfg.run, dir=str(folder), start_from=None),
        logger=replace(cfg.logger, view="jsonl"),
        profile=replace(cfg.profile, enabled=False),
    )
