"""What a command line means, and how mistakes are reported."""

import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dlr_pretrain.cli import LAUNCHERS, main, world_size
from dlr_pretrain.config import CONFIG_DIR, GROUPS, Config, ConfigError, identity, parse, to_dict
from dlr_pretrain.config.command_line import check, options, read
from dlr_pretrain.config.tree import KEYS
from dlr_pretrain.util.errors import Diverged, Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests.conftest import ROOT, commands

SMALL = ["scale=tiny", "data=sample", "logger=jsonl"]


def configs(*argv: str, ranks: int = 1) -> list[Config]:
    return check(read(list(argv)), ranks)


def config(*argv: str, ranks: int = 1) -> Config:
    (cfg,) = configs(*argv, ranks=ranks)
    return cfg


def problems(*argv: str, ranks: int = 1) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        configs(*argv, ranks=ranks)
    return list(dict.fromkeys(map(str, refused.value.problems)))


@pytest.mark.parametrize("argv", [
    ["+scale=1b", "+backbone=cola", "+dlr=on", "+train.lr=0.001"],
    ["++scale=1b", "++backbone=cola", "dlr=on", "++train.lr=1e-3"],
    ["train.lr=0.0010", "dlr=on", "backbone=cola", "scale=1b"],
    ["scale = 1b", "dlr=on", "+backbone=cola", "train={lr: 1e-3}", "profile=off"],
    ["scale=7b", "train.lr=1", "scale=1b", "backbone=cola", "dlr='off'", "+dlr=on", "train={lr: 1e-3}"],
])  # fmt: skip
def test_the_last_word_counts_in_any_spelling_and_order(argv):
    assert config(*argv) == config("scale=1b", "backbone=cola", "dlr=on", "train.lr=1e-3")


def test_idle_overrides_keep_the_run_directory():
    name = config(*SMALL).run.dir
    idle = ["run.root=runs", "log.every=1", "train.micro_batch=2", "compile=false", "device=cpu", "train.stop_after=5"]
    assert config(*SMALL, *idle).run.dir == name
    assert config(*SMALL, "train.steps=301").run.dir.startswith(f"{name}-")
    assert config(*SMALL, "run.dir=mine").run.dir == "mine"
    # a later version must find the directory of a run
    assert config("scale=1b", "train.lr=1e-3", "seed=7").run.dir == "runs/1b-lowrank-dlr_off-s7-lr0.001-590ae857"
    assert config().run.dir == "runs/60m-lowrank-dlr_off-s42"


def test_a_runs_name_follows_from_its_values(tmp_path, monkeypatch, own):
    monkeypatch.chdir(tmp_path)
    same = [
        (["scale=tiny"], ["scale=tiny", "train.lr=5e-3", "data.streams=8"]),
        (["scale=1b", "scale.rank=64"], ["scale=1b", "scale.rank=64", "train.lr=0.002"]),
        ([own, "experiment=mine/grid"], [own, "experiment=mine/grid", "train.lr=0.5"]),
    ]
    folders = [[config(*words).run.dir for words in pair] for pair in same]
    assert all(one == other for one, other in folders) and len({one for one, _ in folders}) == 3
    before = Path("runs/tiny-lowrank-dlr_off-s42-lr0.005-5f8012bc")  # what was typed named it
    before.mkdir(parents=True)
    assert config("scale=tiny", "train.lr=0.005").run.dir == str(before) != config("scale=tiny").run.dir


def test_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert config(*SMALL, "run.root=~/runs").run.root == config(*SMALL, "run.root='~/runs'").run.root == "/home/me/runs"


@pytest.mark.parametrize("key", [name for name, key in KEYS.items() if key.path])
def test_a_path_in_another_spelling_is_the_same_run(key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    words = ["scale=tiny", "data=local", "data.root=.", "logger=jsonl"]
    assert config(*words, f"{key}=./x//.") == config(*words, f"{key}=x")  # including name and identity


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of a user's own options and recipes, for --config-dir."""
    files = {
        "backbone/gated.yaml": "defaults: [lowrank, _self_]\n_target_: gated.Options\nname: gated\ngate: 0.5\n",
        "backbone/strange.yaml": "_target_: json.JSONDecoder\nname: strange\n",
        "backbone/gone.yaml": "_target_: no_such_package.Options\nname: gone\n",
        "gated.py": "from dataclasses import dataclass\nfrom dlr_pretrain.config.key import key\n"
        "from dlr_pretrain.models import lowrank\n\n@dataclass\nclass Options(lowrank.Options):\n"
        "    gate: float = key('of the latent', ge=0)\n    layer = lowrank.LowRank\n",
        "backbone/nameless.yaml": "defaults: [lowrank, _self_]\n_target_: nameless.Options\nname: nameless\n",
        "backbone/namesake.yaml": "defaults: [lowrank, _self_]\n_target_: gated.Options\ngate: 0.5\n",
        "nameless.py": "from dlr_pretrain.models import lowrank\n\nclass Options(lowrank.Options):\n    pass\n",
        "backbone/other/gated.yaml": "defaults: [/backbone/gated@_here_, _self_]\n",
        "scale/3b.yaml": "defaults: [1b, _self_]\nname: 3b\nnum_layers: 36\n",
        "experiment/mine/grid.yaml": "# @package _global_\n"
        "defaults:\n  - override /scale: 1b\n  - override /backbone: cola\n"
        '  - override /dlr: "on"\n  - override /logger: jsonl\ntrain: {lr: 0.5}\n',
        "experiment/unquoted.yaml": "# @package _global_\ndefaults:\n  - override /dlr: on\n",
        "experiment/typo.yaml": "# @package _global_\ntrain: {lrr: 0.5}\nbackbone: {rnk: 3}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return f"--config-dir={tmp_path}"


def test_a_users_own_options_and_recipes_work(own):
    cfg = config(own, *SMALL, "backbone=gated", "backbone.gate=1")
    written, plain = to_dict(cfg), to_dict(config(*SMALL))
    assert written["backbone"] == plain["backbone"] | {"_target_": "gated.Options", "name": "gated", "gate": 1.0}
    assert parse(written) == cfg
    assert problems(own, *SMALL, "backbone=gated", "backbone.gtae=1", "backbone.gate=-1") == [
        "backbone.gtae=1: no such key of backbone=gated. Did you mean backbone.gate?",
        "backbone.gate=-1: must be a number of at least 0 (of the latent)",
    ]
    (said,) = problems(own, *SMALL, "backbone=strange")
    assert said.startswith("backbone._target_=json.JSONDecoder: is not a subclass of BackboneOptions")
    (said,) = problems(own, *SMALL, "backbone=nameless")
    assert said == "backbone=nameless: its class nameless.Options names no layer. Set its attribute layer"
    (said,) = problems(own, *SMALL, "backbone=namesake")
    assert said.startswith(
        "backbone.name=lowrank: is the name of a backbone of this package, but the class gated.Options"
    )
    (said,) = problems(own, *SMALL, "backbone=gone")
    assert said.startswith("backbone._target_=no_such_package.Options: cannot be imported") and "PYTHONPATH" in said
    folder = Path(own.removeprefix("--config-dir="))
    (linked := folder / "linked").mkdir()
    (linked / "scale").symlink_to(folder / "scale")
    ways = ([own], [f"--config-dir={linked}"], [f"hydra.searchpath=[{folder}]"])
    for words in ways:
        cfg = config(*words, "scale=3b")
        assert (cfg.scale.num_layers, cfg.scale.hidden_size, cfg.train.steps) == (36, 2048, 140_000)
    scale = folder / "scale" / "3b.yaml"
    scale.write_text(scale.read_text().replace("36", "40"))
    os.utime(scale, ns=(0, 0))  # a file system may date both writes alike
    assert [config(*words, "scale=3b").scale.num_layers for words in ways] == [40, 40, 40]
    cfg = config(own, "+experiment=mine/grid")
    assert (cfg.scale.name, cfg.backbone.name, cfg.dlr.enabled, cfg.train.lr) == ("1b", "cola", True, 0.5)
    assert cfg.run.dir == "runs/1b-cola-dlr_on-grid-s42"
    cfg = config(own, "scale=1b", "backbone=other/gated")
    assert cfg.run.dir == "runs/1b-gated-dlr_off-s42"
    cfg = config(own, "+scale=350m", "experiment=mine/grid", "train.lr=0.25")
    assert (cfg.scale.name, cfg.backbone.name, cfg.train.lr) == ("350m", "cola", 0.25)
    assert config("~experiment") == config()
    typo = ["train.lrr=0.5: no such key. Did you mean train.lr?"]
    typo += ["backbone.rnk=3: no such key of backbone=lowrank. Did you mean backbone.rank?"]
    assert problems(own, "experiment=typo") == typo
    assert "YAML reads them as booleans" in problems(own, "experiment=unquoted")[0]
    assert "mine/grid" in problems(own, "experiment=grid")[0]
    assert problems("--config-dir=/nowhere") == ["--config-dir=/nowhere: no such folder"]


def test_a_mapping_adds_to_an_option_and_to_another_mapping():
    cfg = config("scale=tiny", "scale={rank: 16}", "scale={num_layers: 3}", "dlr=on", "dlr={alpha: 0.5}", *SMALL[1:])
    assert (cfg.scale.name, cfg.scale.rank, cfg.scale.num_layers) == ("tiny", 16, 3)
    assert (cfg.dlr.enabled, cfg.dlr.alpha) == (True, 0.5)
    assert config("train={clip: 2}", *SMALL) != config(*SMALL) == config("train={clip: 2}", "~train.clip", *SMALL)
    assert problems("scale=[1,2]")[0].startswith("scale=[1: must be one of 130m, ")


def test_every_job_of_a_sweep_is_checked_before_the_first_runs():
    jobs = configs("-m", *SMALL, "+dlr=on,off", "train.lr=range(1,3)")
    assert [(cfg.dlr.name, cfg.train.lr) for cfg in jobs] == [("on", 1), ("on", 2), ("off", 1), ("off", 2)]
    assert [cfg.scale.name for cfg in configs("-m", "scale=glob(1*)")] == ["130m", "1b"]
    jobs = configs("-m", *SMALL, "backbone=choice(cola,lost)", "train.lr=tag(log,interval(1e-4,1e-2))")
    ends = [(cfg.backbone.name, cfg.train.lr) for cfg in jobs]
    assert ends == [("cola", 1e-4), ("cola", 1e-2), ("lost", 1e-4), ("lost", 1e-2)]
    assert problems("-m", *SMALL, "train.lr=interval(0,1)")[0].startswith("train.lr=0.0: must be a number above 0")
    assert problems("-m", *SMALL, "train.lr=glob(*)") == ["-m: no job: a value is a glob that matches no option"]
    assert problems("-m", *SMALL, "seed=1,-1")[0].startswith("seed=-1: must be")
    assert "several jobs of this sweep would share" in problems("-m", *SMALL, "log.every=1,2")[0]


def train_py(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    line = [sys.executable, str(ROOT / "train.py"), *argv]
    return subprocess.run(line, cwd=cwd, env=os.environ | env, capture_output=True, text=True)


@pytest.fixture
def stub(tmp_path):
    """``stub(act, *words)`` is a command whose run is ``act(cfg)``, in a fork of this process, without imports."""

    def command(act: Callable[[Config], object], *argv: str, **env: str) -> subprocess.CompletedProcess:
        def start() -> None:
            os.chdir(tmp_path)
            os.environ |= env
            sys.path.insert(0, str(tmp_path))
            sys.stdout, sys.stderr, sys.argv = out, err, ["stub.py", *argv]
            sys.exit(main(lambda cfg: print(cfg.run.dir, *sys.argv[1:]) or act(cfg)))

        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = multiprocessing.get_context("fork").Process(target=start)
            child.start()
            child.join()
            out.seek(0), err.seek(0)
            return subprocess.CompletedProcess(argv, child.exitcode, out.read(), err.read())

    return command


def ends(error: BaseException, seed: int | None = None) -> Callable[[Config], float]:
    """A run that raises ``error``, for ``seed`` only if given, or else returns half of its seed."""

    def act(cfg: Config) -> float:
        if seed in (None, cfg.seed):
            raise error
        return cfg.seed / 2

    return act


def well(_: Config) -> None:
    """A run that succeeds."""


WRONG = {  # a word of each command that it refuses, and what it says instead
    "train.py": ("train.lrr=1", "Did you mean train.lr?"),
    "scripts/doctor.py": ("--scale tiny", "Did you mean scale=tiny?"),
    "scripts/evaluate.py": ("nowhere --taks piqa boolq", "Did you mean --tasks piqa?"),
    "scripts/fold.py": ("nowhere", "nowhere: not a checkpoint"),
    "scripts/generate.py": ("nowhere --prompt x", "nowhere: no such folder"),
    "scripts/gradient_paths.py": ("nowhere", "config.yaml is missing"),
    "scripts/launch.py": ("", "usage: launch.py"),  # torchrun judges its options
    "scripts/plan.py": ("--gpu 8", "Did you mean --gpus 8?"),
    "scripts/prepare_data.py": ("train.lr=1 --output x", "train.lr=1: does not affect texts or tokens"),
    "scripts/report.py": ("nowhere --ouput x --output x", "Did you mean --output x?"),
    "scripts/sft.py": ("nowhere --seeds 41,x", "invalid integers value: '41,x'"),
    "slurm/submit.py": ("--scale tiny seed=1", "Did you mean scale=tiny?"),
    "-m scripts.geometry": ("nowhere --output x --parts spectre", "Did you mean spectra?"),
    "-m scripts.paper": ("tabel1", "Did you mean table1?"),
}


@pytest.mark.parametrize("program", [*WRONG])
def test_help_is_one_screen_and_a_wrong_word_waits_for_no_torch(program, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch takes seconds to import')")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").glob("[!_]*.py")}
    assert files | {"train.py", "slurm/submit.py", "-m scripts.geometry", "-m scripts.paper"} == WRONG.keys()
    python = [sys.executable, *program.split()]
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "COLUMNS": "80"}
    words, said = WRONG[program]
    helped, refused = (
        subprocess.run([*python, *rest], capture_output=True, text=True, cwd=ROOT, env=own)
        for rest in (["--help"], words.split())
    )
    assert helped.returncode == 0 and helped.stdout.count("\n") < 60 and "example" in helped.stdout.lower()
    assert refused.returncode in (2, 3) and said in refused.stderr, refused.stderr


def test_help_lists_the_options_of_every_group(tmp_path):
    done = train_py("--help", "+scale=1b", cwd=tmp_path)
    listed = set(re.findall(r"[\w/]+", done.stdout))
    assert [(group, o) for group in GROUPS for o in options(group) if not {group, o} <= listed] == []


def test_cfg_prints_the_composed_configuration(stub, tmp_path):
    done = stub(well, "+scale=1b", "--cfg", "job", "train.lr=0.5")
    assert done.returncode == 0
    for line in ("  lr: 0.5\n", "  intermediate_size: 5461\n", "  seq_len: 256\n", "  latent_scale: 1.0\n"):
        assert line in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_answered_by_rank_0_alone(stub):
    for rank, said in (("0", "error: train.lrr=1: no such key. Did you mean train.lr?\n"), ("1", "")):
        done = stub(well, "train.lrr=1", RANK=rank, WORLD_SIZE="2")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize("variables", [
    {"RANK": "1", "WORLD_SIZE": "1"},
    {"WORLD_SIZE": "2"},
    {"RANK": "0", "WORLD_SIZE": "abc"},
    {"RANK": "0"},
])  # fmt: skip
def test_ranks_that_torchrun_did_not_start_are_refused(launched, variables):
    launched(variables)
    with pytest.raises(UserError, match="Start ranks with torchrun --nproc-per-node"):
        world_size()


@pytest.fixture
def launched(monkeypatch):
    """Sets the variables of a launcher, without those of the launcher of these tests."""

    def set_variables(variables: dict[str, str]) -> None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", *LAUNCHERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(("variables", "launcher", "command"), [
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun of Open MPI has started 2", "mpirun -np <nodes> --map-by ppr:1:node"),
    ({"OMPI_COMM_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "2"}, "mpirun of Open MPI has started 8", "ppr:1:node"),
    ({"MV2_COMM_WORLD_SIZE": "2"}, "mpirun of MVAPICH has started 2", "mpirun_rsh -np <nodes> -ppn 1"),
    ({"PMI_SIZE": "4"}, "mpiexec of MPICH or Intel MPI has started 4", "mpiexec -n <nodes> -ppn 1"),
    ({"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"}, "srun has started 4", "srun --ntasks-per-node=1"),
])  # fmt: skip
@pytest.mark.parametrize("alone", [{}, {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1"}],
                         ids=["no torchrun", "a torchrun of one node each"])  # fmt: skip
def test_processes_of_another_launcher_are_not_taken_for_ranks(launched, variables, launcher, command, alone):
    """One of them would train alone, and the others would wait for its end. The error says how to start them."""
    launched(variables | alone)
    with pytest.raises(UserError) as refused:
        world_size()
    assert launcher in str(refused.value) and f"{command} torchrun --nnodes <nodes>" in str(refused.value)


@pytest.mark.parametrize(("variables", "ranks"), [
    ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "1"}, 1),
    ({"SLURM_STEP_NUM_TASKS": "2", "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2"}, 16),
    ({"OMPI_COMM_WORLD_SIZE": "2", "RANK": "1", "WORLD_SIZE": "2"}, 2),  # set by hand from those of mpirun
])  # fmt: skip
def test_ranks_that_a_launcher_starts_rightly_are_counted(launched, variables, ranks):
    launched(variables)
    assert world_size() == ranks


def test_a_run_that_mpirun_starts_ends_with_one_sentence(stub):
    done = stub(well, "+scale=tiny", OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: mpirun of Open MPI has started 2 processes (OMPI_COMM_WORLD_SIZE=2): ")


def test_a_run_sees_the_typed_command_and_hydra_writes_nothing(stub, tmp_path):
    done = stub(well, "+scale=tiny", "train.lr=1e-3", "hydra.job.name=mine")
    assert (done.returncode, done.stderr) == (0, "")
    name = "runs/tiny-lowrank-dlr_off-s42-lr0.001-590ae857"
    assert done.stdout == f"{name} +scale=tiny train.lr=1e-3 hydra.job.name=mine\n"
    assert list(tmp_path.iterdir()) == []


def test_a_longer_run_is_told_how_to_continue(stub, tmp_path):
    short = config("scale=tiny", "seed=5")
    (folder := tmp_path / short.run.dir).mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"identity": identity(short), "starts": []}))
    said = stub(well, "scale=tiny", "seed=5", "train.steps=400").stderr
    assert f"{short.run.dir} has train.steps=300" in said and f"run.start_from={short.run.dir}" in said
    same = ["scale=tiny", "seed=5"], ["scale=tiny", "seed=5", "train.steps=400", "train.lr=1"], ["scale=tiny", "seed=6"]
    assert [stub(well, *words).stderr for words in same] == ["", "", ""]


def test_a_sweep_goes_on_after_a_job_that_diverges(stub, tmp_path):
    done = stub(ends(Diverged("step 3: not finite"), seed=2), "-m", "+scale=tiny", "seed=1,2,3")
    assert done.returncode == 3
    assert [line.split()[0].rpartition("-")[2] for line in done.stdout.splitlines()] == ["s1", "s2", "s3"]
    folder = "runs/tiny-lowrank-dlr_off-s2"
    error, diverged, compare = done.stderr.splitlines()
    assert (error, diverged) == ("error: step 3: not finite", f"error: these jobs of the sweep diverged: {folder}")
    assert compare.split()[:3] == ["compare", "python", "scripts/report.py"] and folder in compare
    done = stub(ends(UserError("no disk"), seed=2), "-m", "+scale=tiny", "seed=1,2,3")
    assert (done.returncode, done.stderr, done.stdout.count("s3")) == (3, "error: no disk\n", 0)
    done = stub(well, "-m", "scale=1b,7b", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2 and done.stderr.startswith("error: -m: a sweep under torchrun would run all its jobs")


def test_an_unencodable_letter_is_printed_as_a_number(tmp_path):
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dlr_pretrain.cli import main; "
    code += "sys.exit(main(lambda cfg: print(cfg.run.dir)))"
    for word, said in (("run.dir='a\u2014'", "a\\u2014\n"), ("backbone='\u2014'", "error: backbone=\\u2014: must be")):
        command = [sys.executable, "-c", code, "+scale=tiny", word]
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        assert (done.stdout + done.stderr).startswith(said)


def test_a_sweeper_receives_each_jobs_result(stub, tmp_path):
    """As Optuna does: a callback of Hydra sees the same results as a sweeper."""
    (tmp_path / "said.py").write_text(
        "from hydra.experimental.callback import Callback\n"
        "class Said(Callback):\n"
        "    def on_job_end(self, config, job_return, **_): print('result', job_return.return_value)\n"
    )
    act = ends(Diverged("step 3: not finite"), seed=2)
    done = stub(act, "-m", "+scale=tiny", "seed=1,2,3", "+hydra.callbacks.said._target_=said.Said")
    assert [line for line in done.stdout.splitlines() if "result" in line] == ["result 0.5", "result inf", "result 1.5"]


def test_an_error_is_a_line_and_a_bug_a_traceback(stub, tmp_path):
    done = stub(ends(Stopped("stopped after step 7")))
    assert (done.returncode, done.stderr) == (75, "stopped after step 7\n")
    done = stub(ends(RuntimeError("a bug")))
    assert done.returncode == 1 and "RuntimeError: a bug" in done.stderr
    record = tmp_path / "error.json"
    done = stub(ends(UserError("no disk")), RANK="1", WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE=str(record))
    assert (done.returncode, done.stderr) == (3, "") and "UserError: no disk" in record.read_text()


def test_completion_works(tmp_path):
    done = train_py("-sc", "query=bash", cwd=tmp_path, COMP_LINE="train.py backbone=", COMP_POINT="18")
    assert {f"backbone={path.stem}" for path in (CONFIG_DIR / "backbone").glob("*")} <= set(done.stdout.split())


RUN = "scale=tiny data=sample compile=false precision=fp32 train.steps=2 train.warmup_steps=1 eval.tokens=300"


@pytest.mark.full
@pytest.mark.parametrize(("redirect", "variables"), [
    (">&-", {}),
    ("2>&-", {}),
    ("<&- >&- 2>&-", {}),
    ("| head -1", {}),
    ("", {"HOME": "/dev/null"}),
    ("", {"TERM": "dumb", "COLUMNS": "1"}),
    ("logger=wandb", {"WANDB_DISABLED": "true"}),
    ("logger=wandb", {"WANDB_MODE": "disabled"}),
    ("logger=wandb", {"WANDB_MODE": "offline", "HOME": "/dev/null", "WANDB_TAGS": "a,b", "WANDB_RUN_GROUP": "g"}),
])  # fmt: skip
def test_a_run_trains_in_any_environment(redirect, variables, tmp_path):
    logger = "" if "logger" in redirect else "logger=jsonl"
    command = f"{sys.executable} {ROOT}/train.py {RUN} train.seq_len=32 {logger} run.dir={tmp_path}/run {redirect}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], env=os.environ | variables, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


SHORT = ["train.steps=2", "train.global_batch=2", "train.seq_len=32", "eval.tokens=500", "compile=false"]
LOCAL = {"joblib": ["seed=1,2"], "submitit": ["hydra/launcher=submitit_local"], "optuna": ["hydra.sweeper.n_trials=2"]}


@pytest.mark.full
@pytest.mark.parametrize("plugin", LOCAL)
def test_the_pages_sweep_with_a_plugin_of_hydra_runs(plugin, tmp_path):
    """On this machine and with fewer steps; each of its two jobs ends with an export."""
    kind = "sweeper" if plugin == "optuna" else "launcher"
    pytest.importorskip(f"hydra_plugins.hydra_{plugin}_{kind}", reason='pip install -e ".[sweeps]"')
    (line,) = (line for line in commands("docs/runs.md") if plugin in line)
    words = ["precision=fp32", *SMALL, *SHORT, *LOCAL[plugin], f"run.root={tmp_path}"]
    sweep = [sys.executable, *shlex.split(line)[1:], *words]
    done = subprocess.run(sweep, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*/folded/config.json"))) == 2
    if plugin == "optuna":
        assert "best_value" in (tmp_path / "multirun" / "optimization_results.yaml").read_text()


@pytest.mark.full
def test_the_same_command_continues_a_study_in_a_file(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason='pip install -e ".[sweeps]"')
    (line,) = (line for line in commands("docs/runs.md") if "optuna" in line)
    study = [f"hydra.sweeper.storage=sqlite:///{tmp_path}/study.db", "hydra.sweeper.study_name=lr"]
    words = ["precision=fp32", *SMALL, *SHORT, "hydra.sweeper.n_trials=1", f"run.root={tmp_path}", *study]
    for trials in (1, 2):
        done = subprocess.run(
            [sys.executable, *shlex.split(line)[1:], *words], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert len(list(tmp_path.glob("*/folded/config.json"))) == trials
