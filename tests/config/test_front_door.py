"""train.py as a process: what it prints, what it leaves behind, and the code that it exits with."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUB = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from dlr_pretrain.util import errors
from dlr_pretrain.cli import main

def run(cfg):
    assert "torch" not in sys.modules
    print(cfg.run.dir, *sys.argv[1:])
    {{body}}

sys.exit(main(run))
"""


def python(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "TORCHELASTIC_ERROR_FILE")}
    return subprocess.run([sys.executable, *argv], cwd=cwd, env=clean | env, capture_output=True, text=True)


@pytest.fixture
def stub(tmp_path):
    """The front door with another room behind it: ``stub("raise ...")`` is a command that ends so."""

    def command(body: str, *argv: str, **env: str) -> subprocess.CompletedProcess:
        file = tmp_path / "stub.py"
        file.write_text(STUB.format(body=body))
        return python(str(file), *argv, cwd=tmp_path, **env)

    return command


def test_help_is_one_screen(tmp_path):
    done = python(str(ROOT / "train.py"), "--help", "+scale=1b", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert len(lines) < 40
    assert max(map(len, lines)) <= 80
    assert "scale: tiny, 60m*, 130m, 350m, 1b, 7b" in lines
    recipes = re.search(r"^experiment: (.*?)\nlogger", done.stdout, re.MULTILINE | re.DOTALL)[1]
    listed = [re.sub(r" \(\d+\)$", " (n)", recipe) for recipe in recipes.replace("\n ", "").split(", ")]
    assert listed == ["evidence_60m", "evidence_cpu", "paper", "table1/ (n)"]


def test_cfg_prints_the_composed_configuration(tmp_path):
    done = python(str(ROOT / "train.py"), "+scale=1b", "--cfg", "job", "train.lr=0.5", cwd=tmp_path)
    assert done.returncode == 0
    assert "  lr: 0.5\n" in done.stdout
    assert "  intermediate_size: 5461\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_answered_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch takes seconds to import')")
    done = python(str(ROOT / "train.py"), "+scal=1b", "train.lrr=1", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: 2 problems\n"
        "  scal=1b: no such key. Did you mean scale=1b?\n"
        "  train.lrr=1: no such key. Did you mean train.lr?\n"
    )


def test_only_rank_0_speaks(tmp_path):
    done = python(str(ROOT / "train.py"), "+scal=1b", cwd=tmp_path, RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_sweep_under_torchrun_is_refused(tmp_path):
    done = python(str(ROOT / "train.py"), "-m", "scale=1b,7b", cwd=tmp_path, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert done.stderr == (
        "error: -m: a sweep under torchrun would run all its jobs in the same ranks. "
        "Start one torchrun a job, or an array of jobs\n"
    )


@pytest.mark.parametrize(("ranks", "rank"), [("abc", "0"), ("2", "-1"), ("2", "two"), ("2", "2"), ("", "0")])
def test_a_rank_that_makes_no_sense_is_refused(tmp_path, ranks, rank):
    done = python(str(ROOT / "train.py"), "scale=tiny", cwd=tmp_path, RANK=rank, WORLD_SIZE=ranks)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    if rank == "0":
        assert done.stderr.startswith(
            f"error: WORLD_SIZE={ranks}: RANK={rank} is out of range for that many ranks. torchrun sets"
        )


def test_a_run_sees_the_typed_command_and_hydra_writes_nothing(stub, tmp_path):
    done = stub("", "+scale=tiny", "train.lr=1e-3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "runs/tiny-lowrank-dlr_off-s42-590ae857 +scale=tiny train.lr=1e-3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["stub.py"]


def test_a_sweep_runs_its_jobs_one_after_another(stub, tmp_path):
    done = stub("", "-m", "+scale=tiny", "dlr=off,on")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "runs/tiny-lowrank-dlr_off-s42",
        "runs/tiny-lowrank-dlr_on-s42",
    ]
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["multirun", "multirun.yaml", "runs", "stub.py"]


def test_a_job_of_a_sweep_that_diverges_is_said_and_the_others_run(stub):
    act = 'if cfg.seed == 2: raise errors.Diverged("step 3: not finite")'
    done = stub(act, "-m", "+scale=tiny", "seed=1,2,3")
    assert done.returncode == 3
    assert [line.split()[0].rpartition("-")[2] for line in done.stdout.splitlines()] == ["s1", "s2", "s3"]
    folder = "runs/tiny-lowrank-dlr_off-s2"
    said = f"error: step 3: not finite\nerror: of this sweep, these diverged: {folder}\n"
    assert done.stderr == said
    done = stub('if cfg.seed == 2: raise errors.UserError("no disk")', "-m", "+scale=tiny", "seed=1,2,3")
    assert (done.returncode, done.stderr, done.stdout.count("s3")) == (3, "error: no disk\n", 0)
    alone = stub('raise errors.Diverged("step 3: not finite")')
    assert (alone.returncode, alone.stderr) == (3, "error: step 3: not finite\n")


def test_errors_for_the_user_have_one_line_and_their_own_code(stub):
    failed = stub('raise errors.UserError("the shard is cut off")')
    assert (failed.returncode, failed.stderr) == (3, "error: the shard is cut off\n")
    stopped = stub('raise errors.Stopped("saved at step 7")')
    assert (stopped.returncode, stopped.stderr) == (75, "stopped: saved at step 7\n")
    interrupted = stub("raise KeyboardInterrupt")
    assert (interrupted.returncode, interrupted.stderr) == (130, "interrupted\n")


def test_other_errors_keep_their_traceback(stub):
    done = stub('raise RuntimeError("a bug")')
    assert done.returncode == 1
    assert "in run\n" in done.stderr
    assert "RuntimeError: a bug" in done.stderr


def test_torchrun_is_told_the_reason(stub, tmp_path):
    record = tmp_path / "error.json"
    done = stub('raise errors.UserError("no disk")', RANK="1", WORLD_SIZE="2", TORCHELASTIC_ERROR_FILE=str(record))
    assert (done.returncode, done.stderr) == (3, "")
    assert "UserError: no disk" in record.read_text()
    assert "Traceback" not in record.read_text()


def test_completion_still_works(tmp_path):
    line = {"COMP_LINE": "train.py backbone=", "COMP_POINT": "18"}
    done = python(str(ROOT / "train.py"), "-sc", "query=bash", cwd=tmp_path, **line)
    assert done.stdout.split() == [f"backbone={path.stem}" for path in sorted((ROOT / "configs/backbone").glob("*"))]
