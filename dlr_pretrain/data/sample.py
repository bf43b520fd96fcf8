"""The sample: real English prose that needs no download, from the docstrings of the installed Python packages.

It is harvested once into C4-layout shards, together with a SentencePiece model in T5's layout trained on them, and kept
in the user cache. Its folder is named after a hash of the installed packages, so another environment makes another
sample.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import distributions
from itertools import accumulate
from pathlib import Path

from dlr_pretrain.data import prose
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.process import cores

SEARCH_PATH = list(sys.path)  # as at the start: torch's compilers later add the folder of setuptools' own packages
VERSION = 2  # of the harvest, which depends on this number, SEED and the installed packages alone
SEED = 20260
MAX_BYTES = 10_000_000  # of text
MAX_SOURCE_BYTES = 250_000_000  # of Python files to parse: about 30 s on one core
MIN_BYTES = 200_000  # below this there is nothing to learn from
TRAIN_SHARDS = 4
VALIDATION_SHARE = 0.03
TOKENIZER_FILE = "spiece.model"
PIECES = 8192
TOKENIZER_TEXT = 4_000_000  # characters to train the tokenizer on; more text takes longer and changes little
MAX_WORKERS = 8
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def prepare(root: Path | None, progress: Callable[[str], None]) -> Path:
    """The folder of the sample below ``root`` (default: the user cache); harvests it first if it does not exist."""
    cache = root or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dlr_pretrain", "sample")
    folder = cache / fingerprint()
    if folder.is_dir():
        return folder
    progress(f"harvesting sample text from the installed packages into {folder} (once, about a minute)")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=cache))
    except OSError as error:
        raise UserError(f"{cache}: the sample cannot be kept there ({error}). Set data.root=<folder>") from error
    try:
        build(draft, package_folders(), progress)
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def fingerprint() -> str:
    """A hash that names the sample: of the versions of the harvest, of Python and of every installed package."""
    packages = sorted({(d.metadata["Name"] or "", d.version or "") for d in distributions(path=SEARCH_PATH)})
    parts = [VERSION, SEED, PIECES, MAX_BYTES, MAX_SOURCE_BYTES, list(sys.version_info[:3]), packages]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _publish(draft: Path, folder: Path) -> None:
    """Rename the finished draft to ``folder``. If another process was faster, its sample is kept: it is as good."""
    try:
        draft.chmod(0o755)  # mkdtemp denies access to other users
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def package_folders() -> list[Path]:
    """The standard library and the installed packages."""
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")))


def build(folder: Path, packages: list[Path], progress: Callable[[str], None]) -> None:
    """Harvest ``packages`` into shards in ``folder`` and train their tokenizer."""
    documents, size = [], 0
    for document in harvest(packages):
        documents.append(document)
        size += len(document.encode("utf-8", "replace"))
        if size >= MAX_BYTES:
            break
    if size < MIN_BYTES:
        where = ", ".join(map(str, packages))
        raise UserError(f"Only {size} bytes of prose in the docstrings below {where}. Use data=c4_local instead")
    progress(f"{size / 1e6:.1f} MB of text in {len(documents):,} documents; training their tokenizer")
    random.Random(SEED).shuffle(documents)
    held_out = max(1, round(VALIDATION_SHARE * len(documents)))
    _write_shard(folder / "sample-validation.00000-of-00001.json.gz", documents[:held_out])
    for i in range(TRAIN_SHARDS):
        name = f"sample-train.{i:05d}-of-{TRAIN_SHARDS:05d}.json.gz"
        _write_shard(folder / name, documents[held_out + i :: TRAIN_SHARDS])
    train_tokenizer(folder / TOKENIZER_FILE, documents[held_out:], PIECES)


def harvest(packages: list[Path], source_bytes: int = MAX_SOURCE_BYTES) -> Iterator[str]:
    """The documents of the packages' Python files, in a seeded order of the files, without repeated paragraphs.

    The harvest ends with the file that brings the total size to ``source_bytes``; with a time limit, a slow machine
    would get another sample. Separate interpreters, one per core, parse the files: a process that will train should not
    parse other people's code, and these interpreters import only the standard library.
    """
    files = _python_files(packages)
    random.Random(SEED).shuffle(files)
    sizes = accumulate(map(_size, files), initial=0)
    files, seen = [file for file, before in zip(files, sizes, strict=False) if before < source_bytes], set()
    with ExitStack() as stack:
        count = min(cores(), MAX_WORKERS)
        workers = [stack.enter_context(_worker(files[i::count])) for i in range(count)]
        for i in range(len(files)):
            line = workers[i % count].stdout.readline()
            if not line:
                raise UserError(f"The harvest of sample text failed at {os.fsdecode(files[i])}. Use data=c4_local")
            for document in json.loads(line):
                fresh = [text for text in document.split("\n") if text not in seen]
                seen.update(fresh)
                if len(text := "\n".join(fresh)) >= prose.MIN_CHARACTERS:
                    yield text


def _python_files(packages: list[Path]) -> list[bytes]:
    """Every Python file below the packages in the order of its relative path, tests left out."""
    found = {}
    for package in packages:
        for folder, folders, names in os.walk(package):
            folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]
            for name in names:
                if name.endswith(".py") and "\n" not in folder + name:
                    path = os.path.join(folder, name)
                    found[os.path.relpath(path, package)] = os.fsencode(path)
    return [found[relative] for relative in sorted(found)]


def _size(file: bytes) -> int:
    """The size in bytes; 0 for a broken link, from which nothing is read."""
    try:
        return os.path.getsize(file)
    except OSError:
        return 0


@contextmanager
def _worker(files: list[bytes]) -> Iterator[subprocess.Popen]:
    """A process that writes a line of documents for each of the files, in their order."""
    with tempfile.TemporaryFile() as names:
        names.write(b"".join(name + b"\n" for name in files))
        names.seek(0)
        command = [sys.executable, "-I", "-S", str(Path(prose.__file__).resolve())]
        process = subprocess.Popen(command, stdin=names, stdout=subprocess.PIPE, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def _write_shard(path: Path, documents: list[str]) -> None:
    with open(path, "wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=0) as shard:
        for document in documents:
            shard.write(json.dumps({"text": document}).encode() + b"\n")


def train_tokenizer(path: Path, documents: list[str], pieces: int) -> None:
    """Train a SentencePiece unigram model in T5's layout: <pad> 0, </s> 1, <unk> 2, no beginning-of-text."""
    from sentencepiece import SentencePieceTrainer

    sentences = [text for document in documents for text in document.split("\n")]
    sizes = accumulate(len(text) for text in sentences)
    with path.open("wb") as model:
        SentencePieceTrainer.train(
            sentence_iterator=(text for text, size in zip(sentences, sizes, strict=True) if size <= TOKENIZER_TEXT),
            model_writer=model,
            model_type="unigram",
            vocab_size=pieces,
            hard_vocab_limit=False,  # the text of a small environment may yield fewer pieces
            character_coverage=0.9999,
            pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>",
            num_threads=min(cores(), MAX_WORKERS),
            minloglevel=2,
        )  # fmt: skip
