"""Hostile servers, unreadable folders, planted and purged caches, endless lines, and silence."""

from __future__ import annotations

import errno
import gzip
import http.server
import io
import os
import threading

import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.data import files, formats, open_source, sample
from dlr_pretrain.train.ranks import Ranks
from dlr_pretrain.util import errors
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.files import user_cache
from tests.unit.data.data_corpus import make_config


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("link", ["../../evil.jsonl", "..%2f..%2fevil.jsonl", "a/%2e%2e/%2e%2e/evil.jsonl"])
def test_a_servers_link_cannot_leave_the_folder(tmp_path, link):
    class Index(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(f'<a href="/c4/{link}">a</a> <a href="/c4/b.jsonl">b</a>'.encode())

        do_HEAD = do_GET

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_port}/c4/"
        with pytest.raises(UserError, match="is outside its folder"):
            list(files.files_below(root))
        server.shutdown()


@pytest.mark.parametrize("pattern", [None, "*.jsonl", "**/*.jsonl"])
def test_a_folder_that_cannot_be_listed_ends_the_start(tmp_path, monkeypatch, pattern):
    """The error is patched in, because tests may run as root, whom permissions do not bind."""
    for name in ("a.jsonl", "sub/b.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    hidden = str(tmp_path / ("sub" if pattern != "*.jsonl" else ""))

    def refusing(real):
        def call(path="."):
            if os.path.realpath(path) == os.path.realpath(hidden):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)

        return call

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    with pytest.raises(UserError, match=r"cannot be listed, and may hold text: Permission denied"):
        list(files.find_files(str(tmp_path), pattern) if pattern else files.files_below(str(tmp_path)))


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


@pytest.mark.parametrize("lost", ["text-*.jsonl", sample.TOKENIZER_FILE])
def test_a_sample_whose_files_were_purged_is_made_again(tmp_path, monkeypatch, lost):
    texts = [f"The document of number {i} holds some words of a text, and it is one of many." for i in range(400)]
    monkeypatch.setattr(sample, "harvest", lambda: iter(texts))
    folder = sample.folder_of(tmp_path, None, print)
    whole = sorted(path.name for path in folder.iterdir())
    for path in folder.glob(lost):
        path.unlink()
    assert sample.folder_of(tmp_path, None, print) == folder
    assert sorted(path.name for path in folder.iterdir()) == whole


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_an_endless_line_is_refused_before_it_fills_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1 << 20)
    line = b'{"text": "' + b"a" * (3 << 20) + b'"}\n'
    if name.endswith(".zst"):
        zstandard = pytest.importorskip("zstandard")
        line = zstandard.compress(line)
    (tmp_path / name).write_bytes(gzip.compress(line) if name.endswith(".gz") else line)
    with pytest.raises(UserError, match="a line of more than"):
        source = open_source(make_config("local", data__root=tmp_path))
        for shard in source.train_shards:
            list(source.read(shard))


@pytest.mark.parametrize("key", ["data.root", "data.train_files"])
def test_an_unreachable_server_is_not_called_a_disk_error(words, monkeypatch, key):
    """Socket errors are OSErrors as well, but name no file."""
    monkeypatch.setattr(files, "RETRY_SECONDS", 0.0)
    address = "http://127.0.0.1:9/c4" + ("/a.jsonl" if key == "data.train_files" else "")
    given = [word for word in words() if not word.startswith("data")]
    cfg = load([*given, "data=local", f"{key}={address}"])
    with Ranks(cfg) as ranks, pytest.raises(UserError, match=rf"^{address}.*: cannot be read: .*answers$") as error:
        ranks.on_main(lambda: open_source(cfg))
    assert "disk" not in str(error.value) and "run.dir" not in str(error.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt"])
def test_a_disk_error_is_not_reported_as_damage(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(gzip.compress(b'{"text": "a"}\n') if name.endswith(".gz") else b'{"text": "a"}\n')
    source = open_source(make_config("local", data__root=tmp_path))

    class Failing(io.BytesIO):
        def read(self, *_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        readinto = read1 = readline = read

    monkeypatch.setattr("dlr_pretrain.data.rows.open_file", lambda *_: Failing())
    with pytest.raises(UserError, match=rf"{name}: cannot be read.*: Input/output error\. Its disk or file server"):
        list(source.read(source.train_shards[0]))


def test_a_silent_server_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(files, "FIRST_NOTE_SECONDS", 0.0)
    monkeypatch.setattr(files, "NOTE_SECONDS", 0.01)
    told = threading.Event()
    monkeypatch.setattr(errors, "write_to_stderr", lambda text: (print(text), told.set()))
    assert files.retry(told.wait, "https://host/a") is True
    assert capfd.readouterr().out.startswith("note: no answer from https://host/a for 0 s")
