"""What a run directory says of its run: the configuration, the manifest, and the queued job."""

from pathlib import Path

import yaml

from dlr_pretrain.util.errors import UserError, file_error, first_line
from dlr_pretrain.util.files import NUMBER, Shape, fits, read_json, refuse_foreign

JOB = "job.json"  # in a run directory: the job that was queued last
JOB_SHAPE: Shape = {"time": NUMBER, "job": str, "log": str}
CHECKPOINT: Shape = {"format": int, "state": {"step": int}, "files": dict}  # of a checkpoint's JSON file
MANIFEST = "manifest.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # of a model for transformers
RECORD: Shape = {
    "identity": dict, "saved?": int, "started_from?": {"step": int}, "micro_batch?": {"*": int},
    "starts": [{"time": str, "command": [str], "world_size": int, "device": str, "files?": {"*": str}}],
    "state?": {"name": str, "step": int, "reason": str, "time": NUMBER},
    "parameters?": NUMBER, "flops_per_token?": NUMBER, "evaluated_tokens?": NUMBER,
}  # fmt: skip


def require_run_folder(run_dir: Path, cache: str | None = None) -> None:
    """Before anything is written into ``run_dir``: raise UserError if it holds files but no run.

    A run without its manifest is known by its checkpoints. Logs, the job's file and the cache may precede the run.
    """
    expected = {"profile"} | ({Path(cache).name} if cache and Path(cache).parent == run_dir else set())
    if not (job := run_dir / JOB).exists() or not job.stat().st_size or fits(job, JOB_SHAPE):
        expected.add(JOB)
    checkpoints = run_dir.glob("checkpoints/step_*/checkpoint.json")  # other trainers name their folders so, too
    ours = bool(read_record(run_dir)) or any(fits(path, CHECKPOINT) for path in checkpoints)
    refuse_foreign(run_dir, "run.dir", "run", ours, expected)


def holds_weights(folder: Path) -> bool:
    return (folder / WEIGHTS).is_file() or (folder / INDEX).is_file()


def exported_folder(folder: Path) -> Path:
    """The exported ``folder``, or that of the run in ``folder``. Raises UserError if there is none."""
    if export := next((each for each in (folder, folder / "folded") if (each / "config.json").is_file()), None):
        return export
    saved = [folder] if folder.name.startswith("step_") else sorted(folder.glob("checkpoints/step_*"))
    fix = f"Fold a checkpoint: python scripts/fold.py {saved[-1]}" if saved else "Name runs/<name>/folded"
    rule = "has no config.json, which an export has" if folder.is_dir() else "no such folder"
    raise UserError(folder, rule, fix)


def read_config(run_dir: Path) -> dict:
    """The mapping in ``run_dir/config.yaml``. Raises UserError if the file is missing or damaged."""
    path = run_dir / "config.yaml"
    if not path.exists():
        raise UserError(f"{path} is missing: {run_dir} is not a run directory")
    try:
        return dict(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}). Restore it from a backup") from error


def read_record(run_dir: Path) -> dict:
    """The content of ``run_dir/manifest.json``, see RECORD; empty if the file is missing.

    Raises UserError if the file is damaged.
    """
    path = run_dir / MANIFEST
    try:
        return read_json(path, RECORD)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except ValueError as error:
        rule = "Move it away to resume; settings are then not checked against those of the run"
        raise UserError(f"{path} is damaged ({first_line(error)}). {rule}") from error
    except OSError as error:
        raise file_error(error) from error
