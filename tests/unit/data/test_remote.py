"""Shards on the hub and on other servers, which answer late, in part, wrongly or not at all."""

import http.server
import os
import pickle
import socket
import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace

import fsspec
import pytest
from huggingface_hub import constants

from dlr_pretrain.data import files, load_tokenizer, open_source, open_tokenizer
from dlr_pretrain.util.errors import Stopped, UserError
from tests.conftest import listening
from tests.unit.data.data_corpus import (
    LetterTokenizer,
    global_batches,
    lines_of,
    make_config,
    same,
    tokens_of,
    write_shards,
    write_table,
)
from tests.unit.data.loopback_hub import KEYS, TEXTS, TROUBLE, Hub, open_hub, serving, serving_here

TOKENIZER = LetterTokenizer()
WHOLE = [TEXTS[:150], TEXTS[150:300], TEXTS[300:], ["validation", "text"]]


@pytest.fixture
def shards(tmp_path):
    """Writes C4-layout shards to tmp_path/en; returns the same as the files of a hub."""
    paths = write_shards(tmp_path / "en", WHOLE[:3]) + write_shards(tmp_path / "en", WHOLE[3:], split="validation")
    return {f"en/{path.name}": path.read_bytes() for path in paths}


@pytest.fixture
def hub(shards, monkeypatch):
    monkeypatch.setattr(files, "RANGE_BYTES", 500)  # so small that a shard has many ranges
    with ExitStack() as opened:
        yield opened.enter_context(serving_here(Hub(shards), monkeypatch))


class NoTokenizer:
    tokenizer_path = None


def read(source):
    return [list(source.read(shard)) for shard in (*source.train_shards, *source.validation_shards)]


def test_the_hub_gives_the_batches_of_a_copy_on_disk(hub, tmp_path):
    source = open_hub()
    copy = open_source(make_config(data__root=tmp_path / "en", **KEYS))
    assert source.fingerprint == copy.fingerprint and read(source) == read(copy) == WHOLE
    assert source.describe().startswith(f"hf://datasets/allenai/c4@{hub.commit}: 3 train and 1")
    cfg = make_config("c4", **KEYS)
    whole = global_batches(cfg, copy, TOKENIZER, 1, 8)
    head = global_batches(cfg, source, TOKENIZER, 2, 3)
    assert same(head + global_batches(cfg, pickle.loads(pickle.dumps(source)), TOKENIZER, 1, 5, head[-1][3]), whole)


def test_a_mixture_keeps_the_commit_of_each_source(hub, tmp_path):
    (tmp_path / "tokens").mkdir()
    tokens_of(tmp_path / "tokens", [TEXTS])
    c4 = {"source": "local", "root": "hf://datasets/allenai/c4", "train_files": "en/c4-train.*", "weight": 2}
    texts = {"c4": c4 | {"validation_files": "en/c4-val*"}, "own": {"root": str(tmp_path / "tokens"), "weight": 1}}
    cfg = make_config("mix", data__sources=texts, **KEYS)
    source = open_source(cfg)
    assert source.version == {"c4": hub.commit, "own": None} and source.weights == {"c4": 2 / 3, "own": 1 / 3}
    first, hub.commit = hub.commit, "f" * 40
    again = open_source(cfg, version=source.version)
    assert again.version["c4"] == first and again.fingerprint == source.fingerprint
    whole = global_batches(cfg, source, TOKENIZER, 1, 8)
    head = global_batches(cfg, source, TOKENIZER, 2, 3)
    assert same(head + global_batches(cfg, again, TOKENIZER, 4, 5, head[-1][3]), whole)


def test_no_row_is_lost_or_read_twice_whatever_goes_wrong(hub):
    source = open_hub()
    hub.random_trouble(0, share=0.3)
    assert read(source) == WHOLE and {*TROUBLE} == {*hub.told}


def test_a_permanent_failure_of_the_hub_is_reported(hub, monkeypatch):
    source = open_hub()
    hub.trouble = lambda path, first: "503" if first >= 1000 else None
    with (
        monkeypatch.context() as impatient,
        pytest.raises(UserError, match=r"c4-train\.00000.*: cannot be read: .*503.*The same command continues"),
    ):
        impatient.setattr(files, "RETRY_SECONDS", 0.2)
        read(source)
    hub.trouble = lambda path, first: None
    hub.files.pop("en/c4-train.00001-of-00003.json.gz")
    with pytest.raises(UserError, match=r"c4-train\.00001-of-00003\.json\.gz: (no such file|cannot be)"):
        read(source)
    hub.gated = True
    what_to_do = r"its owner asks for an agreement\. Accept its terms on .*, and set HF_TOKEN"
    with pytest.raises(UserError, match=rf"c4-train\.00000.*: {what_to_do}"):
        read(open_hub())
    hub.files["tokenizer.json"] = b"{}"
    cfg, source = (
        make_config("c4", tokenizer__path=None, tokenizer__hub="x/gated"),
        SimpleNamespace(tokenizer_path=None),
    )
    with pytest.raises(UserError, match=rf"^tokenizer\.hub=x/gated: {what_to_do}"):
        open_tokenizer(cfg, source)


def test_retry_after_is_waited_for(hub, monkeypatch):
    waited = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    source = open_hub()
    answers = iter(["429"] * 8)
    hub.trouble, hub.retry_after = lambda path, first: next(answers, None), "7"
    assert list(source.read(source.train_shards[0])) == WHOLE[0] and max(waited) >= 7


def test_data_cache_keeps_fetched_shards(hub, tmp_path):
    cache = tmp_path / "cache"
    hub.random_trouble(1, share=0.2)
    assert read(open_hub(data__cache=cache)) == WHOLE
    asked = hub.ranges
    assert read(open_hub(data__cache=cache)) == WHOLE and hub.ranges == asked
    assert [path.suffix for path in cache.rglob("*") if path.is_file()] == [".gz"] * 4  # and no partial file


def test_any_dataset_on_the_hub_is_read(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "RANGE_BYTES", 5000)
    write_table(tmp_path / "a.parquet", {"text": TEXTS}, rows=50)
    hub.files |= {"data/train-0.parquet": (tmp_path / "a.parquet").read_bytes()}
    hub.files |= {"data/validation.jsonl": b'{"text": "one"}\n'}
    hub.random_trouble(0, share=0.2)
    globs = {"data__train_files": "data/train-*", "data__validation_files": "data/validation.jsonl"}
    source = open_source(make_config("local", data__root="hf://datasets/some/set", **globs))
    assert read(source) == [TEXTS, ["one"]]
    assert list(source.read(source.train_shards[0], 123)) == TEXTS[123:]
    found = open_source(make_config("local", data__root="hf://datasets/some/set/data"))
    assert (found.train_shards, found.validation_shards) == (("train-0.parquet",), ("validation.jsonl",))


@pytest.mark.filterwarnings("ignore")
def test_a_plain_web_server_is_read(shards, tmp_path):
    with web(tmp_path / "en") as server:
        address = f"{server}/c4-train.00000-of-00003.json.gz"
        source = open_source(make_config("local", data__train_files=address))
        assert sorted(t for shards in read(source) for t in shards if t is not None) == sorted(WHOLE[0])


def web(folder) -> AbstractContextManager[str]:
    """A web folder. Its answers name the version of a file by its time, to the second."""

    class Web(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given):
            super().__init__(*given, directory=str(folder))

    return listening(Web)


def put(path, texts: list[str], time: int) -> None:
    """Write a shard of ``texts`` whose time of change is ``time``."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(lines_of(texts))
    os.utime(path, (time, time))


def texts_of(source) -> list[str]:
    return sorted(text for shard in read(source) for text in shard if text is not None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [{}, {"data__train_files": "*.jsonl"}])
def test_a_changed_file_of_a_web_folder_is_read_anew(tmp_path, names, capfd):
    path, before, after = tmp_path / "web" / "a.jsonl", ["one", "two", "three"], ["one", "2 2", "three"]
    put(path, before, 1_000_000_000)
    with web(path.parent) as address:
        cfg = make_config("local", data__root=address, data__cache=tmp_path / "cache", **names)
        first = open_source(cfg)
        assert first.files["a.jsonl"].size == path.stat().st_size and texts_of(first) == sorted(before)
        assert open_source(cfg).state() == first.state() and open_source(cfg).versions == first.versions
        put(path, after, 1_000_000_100)  # of the same size
        second = open_source(cfg)
        assert texts_of(second) == sorted(after)
        said = capfd.readouterr().err
        assert f"{address}/a.jsonl: has changed on its server" in said and f"{tmp_path}/cache" in said
        assert texts_of(first) == sorted(before), "a run that has a copy keeps it"
    assert second.state() != first.state()
    assert first.versions.keys() == second.versions.keys() and first.versions != second.versions


@pytest.mark.filterwarnings("ignore")
def test_a_file_that_changes_under_a_run_ends_it(tmp_path):
    path = tmp_path / "web" / "a.jsonl"
    put(path, ["one"] * 100, 1_000_000_000)
    with web(path.parent) as address:
        source = open_source(make_config("local", data__root=address, data__held_out=0.01))
        put(path, ["two"] * 100, 1_000_000_100)
        with pytest.raises(UserError, match=r"a\.jsonl: has changed .*01:46:40.* for this run, .*01:48:20.* now"):
            read(source)


def test_a_server_without_versions_is_named(monkeypatch, caplog):
    monkeypatch.setattr(files, "_as_served", lambda file: file)
    files.with_versions([files.File("a.jsonl", "http://host/a.jsonl", None)])
    assert "http://host/a.jsonl: its server reports neither size nor version" in caplog.text


@pytest.mark.filterwarnings("ignore")
def test_a_run_does_not_resume_on_another_version(tmp_path, train, corpus):
    path = tmp_path / "web" / "a.jsonl"
    put(path, [f"{i} house" for i in range(300)], 1_000_000_000)
    with web(path.parent) as address:
        of = [
            "data=local",
            f"data.root={address}",
            f"data.cache={tmp_path}/cache",
            "train.stop_after=2",
            "train.steps=4",
        ]
        for _ in range(2):  # the second start resumes
            with pytest.raises(Stopped):
                train(tmp_path / "run", *of)
        os.utime(path, (1_000_000_100, 1_000_000_100))
        with pytest.raises(UserError, match=rf"holds another run:\n  data.versions at {address}: other contents than "):
            train(tmp_path / "run", *of)


def test_an_object_store_gives_the_texts_of_a_copy_on_disk(shards, tmp_path, monkeypatch):
    """memory:// represents s3:// and gs://: all are file systems of fsspec."""
    monkeypatch.setattr(files, "RANGE_BYTES", 500)
    fsspec.filesystem("memory").pipe({f"/bucket/{name}": content for name, content in shards.items()})
    copy = open_source(make_config(data__root=tmp_path / "en", **KEYS))
    globs = {"data__train_files": "c4-train.0000[0-9]-*", "data__validation_files": "c4-v?l*"}
    for keys in ({}, {"data__cache": tmp_path / "cache"}, globs):
        source = open_source(make_config("local", data__root="memory://bucket/en", **keys, **KEYS))
        assert source.fingerprint == copy.fingerprint and read(source) == WHOLE


@pytest.mark.parametrize("listens", [True, False])
def test_a_hub_that_does_not_answer_is_reported(listens, tmp_path, monkeypatch):
    """The errors of source and tokenizer name what to use offline, and come without the retries of later requests."""
    monkeypatch.setattr(files, "FIRST_CONTACT_SECONDS", 0.5)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        if listens:
            deaf.listen(0)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        for ask in (lambda: open_source(make_config("c4")), lambda: open_tokenizer(make_config("c4"), NoTokenizer)):
            with pytest.raises(UserError, match=r"did not answer: .*data=sample"):
                ask()


def test_a_process_ends_though_a_hub_never_answers():
    """A DNS look-up can hang, and a thread that waits for it is not joined."""
    program = "from dlr_pretrain.data import files; from threading import Event; files.FIRST_CONTACT_SECONDS = 0.1"
    program += "; files.first_contact('me/x', Event().wait, 'Fix')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1 and "did not answer" in done.stderr


def test_files_and_tokenizer_through_the_clients_own_endpoint(shards, tmp_path, model):
    """Nothing is patched: HF_ENDPOINT names the hub, as for a mirror."""
    program = """
from tests.unit.data.data_corpus import make_config
from dlr_pretrain.data import open_source, open_tokenizer
source = open_source(make_config("c4"))
print(sum(len(list(source.read(shard))) for shard in source.train_shards))
print(open_tokenizer(make_config("c4"), source).encode(["more words"])[0].tolist())
"""
    with serving(Hub(shards | {"spiece.model": model.read_bytes()})) as address:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
        own = {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": address, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=kept | own)
    assert done.stdout.splitlines() == ["400", str(load_tokenizer(model).encode(["more words"])[0].tolist())]


PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


@contextmanager
def web_server(content: bytes):
    """A server on this machine, which answers every request with ``content``; yields its address and what was asked."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET

    with listening(Handler) as address:
        yield address, asked


@pytest.mark.parametrize("proxied", [True, False], ids=["by the proxy", "in no_proxy"])
def test_a_proxy_is_used_unless_no_proxy_names_the_host(monkeypatch, proxied):
    """The first host exists for the proxy alone, as on a cluster whose nodes have no network of their own."""
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(files, "RETRY_SECONDS", 0.0)
    fsspec.filesystem("http").clear_instance_cache()
    with web_server(b"some text") as (address, asked), web_server(b"some text") as (proxy, of_proxy):
        monkeypatch.setenv("http_proxy", proxy)
        if not proxied:
            monkeypatch.setenv("no_proxy", "127.0.0.1")
        host = "http://text.invalid" if proxied else address
        (file,) = files.with_versions(files.find_files("", f"{host}/a.txt"))
        assert files.open_file(file).read() == b"some text"
        assert ({*asked}, {*of_proxy}) == ((set(), {f"{host}/a.txt"}) if proxied else ({"/a.txt"}, set()))


SETTINGS = {  # a user's settings before the import; a protocol, and its settings after it
    "none": ({}, "http", {"client_kwargs": {"trust_env": True}}),
    "headers": ({"http": {"client_kwargs": {"headers": {"a": "b"}}}}, "http",
                {"client_kwargs": {"headers": {"a": "b"}, "trust_env": True}}),
    "trust_env": ({"https": {"client_kwargs": {"trust_env": False}}}, "https", {"client_kwargs": {"trust_env": False}}),
    "a store": ({}, "gs", {"session_kwargs": {"trust_env": True}}),
}  # fmt: skip


def test_a_users_own_settings_of_fsspec_are_kept():
    code = "import fsspec, importlib; from dlr_pretrain.data import files\n"
    code += f"for conf, protocol, _ in {[*SETTINGS.values()]}:\n    fsspec.config.conf.clear()\n"
    code += "    fsspec.config.conf.update(conf), importlib.reload(files)\n    print(fsspec.config.conf[protocol])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(options) for *_, options in SETTINGS.values()]
