"""Files that several processes write, folders that belong to someone else, and damaged files of ours."""

import errno
import json
import os
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
from safetensors.torch import save_file

from dlr_pretrain.cli import load
from dlr_pretrain.config.run_folder import read_config, read_record
from dlr_pretrain.data import open_source, open_tokenizer, prepare
from dlr_pretrain.data.tokens import read_manifest
from dlr_pretrain.launch.status import last_job
from dlr_pretrain.models.pretrained import PretrainedFolder
from dlr_pretrain.train import checkpoint
from dlr_pretrain.util import files
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import claim, locked, read_beat, read_metrics, user_cache, write_durably
from scripts.paper import extract
from tests.conftest import main_of


def test_several_writers_of_a_file_leave_one_of_their_texts(tmp_path):
    path, texts = tmp_path / "index", [letter * 100_000 for letter in "abcd"]
    write_durably(path, texts[0])
    done = threading.Event()

    def read() -> int:
        torn = 0
        while not done.is_set():
            torn += path.read_text() not in texts
        return torn

    with ThreadPoolExecutor(5) as pool:
        reader = pool.submit(read)
        try:
            for writes in [pool.submit(lambda text: [write_durably(path, text) for _ in range(40)], t) for t in texts]:
                writes.result()
        finally:
            done.set()
        assert reader.result() == 0
    assert [path] == [*tmp_path.iterdir()]


def test_a_lock_that_its_holder_deletes_is_taken_anew(tmp_path, monkeypatch):
    """Between opening and locking the file, its holder ends and a third process takes the folder."""
    lock, others = files.lock, []

    def meanwhile(descriptor: int) -> bool | None:
        if not others:
            (tmp_path / ".lock").unlink()
            others.append((tmp_path / ".lock").open("w"))
            lock(others[0].fileno())
        return lock(descriptor)

    monkeypatch.setattr(files, "lock", meanwhile)
    with pytest.raises(UserError, match="is being written by"), locked(tmp_path):
        pytest.fail("two processes hold the folder")
    others[0].close()
    with locked(tmp_path) as alone:
        assert (tmp_path / ".lock").exists() and alone
    assert not (tmp_path / ".lock").exists()


def test_results_go_into_a_new_folder_or_their_own(tmp_path):
    claim(tmp_path / "out", "report.py")
    (tmp_path / "out" / "report.md").write_text("written")
    claim(tmp_path / "out", "report.py")
    with pytest.raises(UserError, match=r"--output=.*out: is not empty .*report.md.*, and holds no results of fold"):
        claim(tmp_path / "out", "fold.py")


COMMANDS = {  # that take an --output
    "report": ("runs", "--output", "{}"),
    "geometry.__main__": ("runs", "--output", "{}"),
    "paper.__main__": ("fold", "--render", "--output", "{}"),
    "sft": ("folded", "--data", "rows.json", "--seeds", "1", "--output", "{}/.."),
    "prepare_data": ("data=local", "data.root=text", "tokenizer.path=spiece.model", "--output", "{}"),
    "fold": ("run/checkpoints/step_00000001", "--output", "{}"),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_writes_into_a_folder_of_others(name, tmp_path, monkeypatch, capsys, corpus):
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs" / "s1"
    theirs.mkdir(parents=True)
    for file in ("README.md", "config.json", "model.safetensors", "report.md", "notes.json"):
        (theirs / file).write_text("mine")
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": "a", "output": "b"}]))
    for folder in ("text", "folded"):
        (tmp_path / folder).mkdir()
    (tmp_path / "folded" / "config.json").write_text("{}")
    (tmp_path / "text" / "a.txt").write_text("some text\n" * 50)
    (tmp_path / "spiece.model").write_bytes((corpus / "spiece.model").read_bytes())
    (tmp_path / "run" / "checkpoints" / "step_00000001").mkdir(parents=True)
    assert main_of(name, *(word.format(theirs) for word in COMMANDS[name])) == 3
    assert str(theirs) in capsys.readouterr().err
    assert {path.name: path.read_text() for path in theirs.iterdir()} == dict.fromkeys(
        ("README.md", "config.json", "model.safetensors", "report.md", "notes.json"), "mine"
    )


def test_a_queue_writes_nothing_into_a_folder_of_others(tmp_path, monkeypatch, capsys):
    from dlr_pretrain.launch import submit
    from slurm.submit import main

    monkeypatch.setattr(submit, "queue", dict)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("mine")
    for how in ((), ("--local",)):
        assert main(["scale=tiny", "logger=jsonl", "data=sample", f"run.dir={theirs}", *how]) == 3
        assert "is not empty (it has thesis.tex), and holds no run" in capsys.readouterr().err
    assert [*theirs.iterdir()] == [theirs / "thesis.tex"]


def test_evaluate_does_not_replace_a_file_of_others(tmp_path, capsys):
    path = Path(tmp_path, "notes.json")
    path.write_text('{"mine": 1}')
    assert main_of("evaluate", tmp_path, "--output", path) == 3
    assert f"--output={path}: exists, and is not what this command wrote" in capsys.readouterr().err
    assert path.read_text() == '{"mine": 1}'


def test_the_file_system_of_a_folder_is_named(tmp_path, monkeypatch):
    mounts = "/dev/a / ext4 rw 0 0\ncloud /data fuse.gcsfuse rw 0 0\n//pc/x /data/my\\040files cifs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path: mounts)
    assert files.file_system(Path("/data/runs/a")) == "fuse.gcsfuse, mounted at /data"
    assert files.file_system(Path("/data/my files/runs")) == "cifs, mounted at /data/my files"
    assert files.file_system(Path("/database")) == "ext4, mounted at /"


@pytest.mark.parametrize(("refuses", "error", "said"), [
    ("fsync", errno.EINVAL, "flushing a file to the disk (fsync) fails on this file system ({}): Invalid argument. "
                               "Saved work would not be safe there. Name a place on another disk"),
    ("rename", errno.EMFILE, "renaming a folder that holds a file fails on this file system ({}): Too many open files"),
    ("replace", errno.ENOSPC, "replacing a file by another (rename) fails on this file system ({}): No space left on "
                              "device. Free space there"),
    ("pwrite", errno.ENOTSUP, "mapping a file into memory and overwriting it fails on this file system ({}): "),
])  # fmt: skip
def test_a_file_system_that_would_not_keep_saved_work_is_refused(tmp_path, monkeypatch, refuses, error, said):
    def fails(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    files.require_durable(tmp_path / "not" / "yet")
    assert not [*tmp_path.iterdir()]
    monkeypatch.setattr(os if refuses in ("fsync", "pwrite") else Path, refuses, fails)
    with pytest.raises(UserError) as refused:
        files.require_durable(tmp_path / "not" / "yet")
    assert str(refused.value).startswith(f"{tmp_path}: {said.format(files.file_system(tmp_path))}")
    with pytest.raises(UserError), files.locked(tmp_path):
        pytest.fail("a command writes there")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("kind", [ThreadPool, ProcessPoolExecutor])
def test_a_pool_without_shared_memory_names_it(monkeypatch, kind):
    """The semaphores of a pool are files, and their error names none. It was taken for that of another file."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refused)
    with pytest.raises(UserError, match=r"^/dev/shm: Read-only file system\. Pools of workers .*--shm-size=8g$"):
        files.new_pool(kind, 2)


def test_missing_shared_memory_does_not_blame_the_cache(words, tmp_path, monkeypatch):
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    cfg = load(words(f"data.cache={tmp_path}", f"run.dir={tmp_path}/run"))
    source = open_source(cfg, print)
    tokenizer = open_tokenizer(cfg, source)
    monkeypatch.setattr(prepare, "JOB_BYTES", 10_000)  # so that there are several jobs
    monkeypatch.setattr(prepare, "cores", lambda: 2)
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", refused)
    with pytest.raises(UserError, match=r"^/dev/shm: Read-only file system\. Pools"):
        prepare.tokenised_once(source, tokenizer, cfg.num_streams, print)


# ----------------------------------------------------------------------------------------------------
# Damaged files of ours


START = {"time": "2026-11-27T10:00:00Z", "command": ["train.py"], "world_size": 1, "device": "CPU"}
STATE = {"name": "running", "step": 3, "reason": "", "time": 1.0}
MANIFEST = {"identity": {}, "starts": [START], "state": STATE, "saved": 3, "micro_batch": {"8": 4}, "parameters": 5}
TOKENS = {
    "format": 5, "source": "a", "made_from": "b", "contents": {}, "tokenizer": {"sha256": "c", "vocab_size": 5},
    "shards": {"train": 1, "validation": 1},
}  # fmt: skip
BEATS = {"host": "h", "pid": 7, "machine": "m", "token": "t", "time": 1.0}


def damaged_checkpoint(folder) -> str | None:
    return checkpoint.fault(folder / "step_00000001")


def pretrained(folder) -> None:
    save_file({}, folder / "model.safetensors")
    PretrainedFolder(folder, load(["scale=tiny", "data=sample", "logger=jsonl"]), 64, "")


READERS = {  # file: (a sound content, or None for any; its reader; the reader's result for a damaged file)
    "manifest.json": (MANIFEST, read_record, UserError),
    "config.yaml": (None, read_config, UserError),
    "tokens/manifest.json": (TOKENS, lambda folder: read_manifest(folder / "tokens"), UserError),
    "config.json": (None, pretrained, UserError),
    "model.safetensors.index.json": ({"weight_map": {}}, pretrained, UserError),
    "result.json": (
        {"variants": [{"name": "a", "tokens_per_second": 1.0}]},
        lambda folder: extract.read_result(folder / "result.json", {"variants": [extract.SPEED]}),
        UserError,
    ),
    "step_00000001/checkpoint.json": ({"format": 4}, damaged_checkpoint, "checkpoint.json is damaged"),
    ".beats/0": (BEATS, lambda folder: read_beat(folder, 0), {}),
    "job.json": ({"time": 1.0, "job": "1_2", "log": "a.log"}, last_job, {}),
    "metrics.jsonl": ({"step": 1}, lambda folder: read_metrics(folder / "metrics.jsonl"), []),
}


def wrong_types(sound: dict):
    """Yields ``sound`` with one entry of another type, for every entry, also within nested entries."""
    for key, value in sound.items():
        yield sound | {key: [] if isinstance(value, dict) else {}}
        if isinstance(value, dict):
            yield from (sound | {key: inside} for inside in wrong_types(value))
        if isinstance(value, list) and isinstance(value[0], dict):
            yield from (sound | {key: [inside]} for inside in wrong_types(value[0]))


@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_named_or_treated_as_absent(tmp_path, name):
    sound, read, found = READERS[name]
    wrong = [json.dumps(content) for content in wrong_types(sound or {})]
    if name == "config.yaml":
        wrong += ["a: [", "text"]
    else:
        wrong += ["", "[]", "7", '{"a": ', '"\\', "9" * 5000]
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for content in [*wrong, "[" * 100_000, '{"a":' * 100_000, "\0", b"\xff\xfe\xff"]:
        (tmp_path / name).write_bytes((content if isinstance(content, bytes) else content.encode()) + b"\n")
        if found is UserError:
            with pytest.raises(UserError, match=r"damaged|cannot be read") as caught:
                read(tmp_path)
            assert str(tmp_path) in str(caught.value)
        else:
            assert read(tmp_path) == found, content[:60]


def test_sound_contents_are_read(tmp_path):
    """The test above would also pass if every content were refused."""
    for name, (sound, read, _) in READERS.items():
        if sound and name not in ("model.safetensors.index.json", "step_00000001/checkpoint.json"):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(json.dumps(sound) + "\n")
            assert read(tmp_path) == ([sound] if name == "metrics.jsonl" else sound)


@pytest.mark.parametrize("planted", ["link", "open"])
def test_a_planted_cache_is_not_used(tmp_path, monkeypatch, planted):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = user_cache()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    if planted == "link":
        folder.rename(tmp_path / "theirs")
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.chmod(0o777)
    with pytest.raises(UserError, match=r"content may have been planted.*XDG_CACHE_HOME"):
        user_cache()
