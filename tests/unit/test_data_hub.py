"""The hub: its shards and its tokenizer through the real clients, and a hub that gives no answer."""

import glob
import pickle
import socket
import time

import pytest
from data_corpus import LetterTokenizer, global_batches, make_config, run_python, same, write_shards
from loopback_hub import Hub, serving

from dlr_pretrain.data import hub, open_source, sample
from dlr_pretrain.data.remote import read_with_datasets
from dlr_pretrain.util.errors import UserError

TEXTS = [f"document {i} " + "y" * (i % 50) for i in range(300)]


@pytest.fixture
def served():
    """A hub without files, and its address."""
    hub = Hub({})
    with serving(hub) as address:
        yield hub, address


FILES = ["a.gz", "b.gz", ".gz", ".hidden.gz", "en/a.gz", "en/b.json", "en/.c.gz", "en/more/a.gz", "en/more/d/a.gz",
         ".git/a.gz", "en/.git/a.gz", "en.gz/a.gz", "[x].gz", "en/a.gz.part", "EN2/A.gz"]  # fmt: skip
GLOBS = ["*.gz", "*", "**", "**/*.gz", "en/*.gz", "en/**", "en/**/*.gz", "en/**/a.gz", "**/a.gz", "*/*.gz", "*/a.gz",
         "en/*", "en/*/a.gz", "en/?.gz", "en/[ab].*", "en/[!a].*", "[[]x].gz", ".*", ".*.gz", "**/.*", ".*/*",
         "en/.*/*", "[.]git/*", "en/a.gz", "en/a.gz/**", "en", "en/", "en*", "en**", "e**/a.gz", "**/**/a.gz",
         "**/more/**", "*.GZ", "**/en/**/d/*", "EN2/*", "none/*", "none/**", ""]  # fmt: skip


@pytest.mark.parametrize("pattern", GLOBS)
def test_a_glob_matches_on_the_hub_what_it_matches_on_disk(pattern, tmp_path):
    for path in FILES:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    found = glob.glob(pattern, root_dir=tmp_path, recursive=True)
    on_disk = {path for path in found if path in FILES}
    assert {path for path in FILES if hub.matches(path, pattern)} == on_disk


OPEN = """
    from data_corpus import make_config
    from dlr_pretrain.data import open_source, open_tokenizer
    from dlr_pretrain.util.errors import UserError
    import time
    class NoTokenizer: tokenizer_path = None
    for opened in (lambda cfg: open_source(cfg), lambda cfg: open_tokenizer(cfg, NoTokenizer)):
        begin = time.monotonic()
        try:
            opened(make_config("c4"))
        except UserError as error:
            print(error, type(error.__cause__).__name__)
        print(time.monotonic() - begin)
"""


def check_refusals(output):
    source, source_seconds, tokenizer, tokenizer_seconds = output.strip().splitlines()
    assert source.startswith("allenai/c4: the Hugging Face hub denied access or did not answer: ")
    assert "data=sample" in source and "data=c4_local data.root=<folder" in source
    assert tokenizer.startswith("google-t5/t5-base: the Hugging Face hub denied access or did not answer: ")
    assert "tokenizer.path=<spiece.model>" in tokenizer and "data=sample" in tokenizer
    assert float(source_seconds) < 10 and float(tokenizer_seconds) < 10


def test_a_hub_that_cannot_be_reached(tmp_path):
    with socket.socket() as closed:  # a port at which nobody listens
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        check_refusals(run_python(OPEN, tmp_path, HF_ENDPOINT=address)[0])


def test_a_hub_that_is_switched_off(tmp_path):
    output, errors = run_python(OPEN, tmp_path, HF_HUB_OFFLINE="1")
    check_refusals(output)
    assert not errors


@pytest.mark.slow
def test_a_hub_that_never_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        check_refusals(run_python(OPEN, tmp_path, HF_ENDPOINT=address)[0])


def test_first_contact_does_not_wait_beyond_its_time():
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"a/b: .*no answer within 0\.2 s\. Go offline"):
        hub.first_contact("a/b", lambda: time.sleep(60), "Go offline", seconds=0.2)
    assert time.monotonic() - begin < 20


def test_a_run_that_resumes_waits_for_a_hub_that_is_away(monkeypatch):
    monkeypatch.setattr(hub, "FIRST_WAIT_SECONDS", 0.01)
    tries = []

    def ask() -> str:
        tries.append(1)
        if len(tries) < 4:
            raise ConnectionError("no route")
        return "there"

    assert hub.first_contact("a/b", ask, "Go offline", patient=True) == "there" and len(tries) == 4


def test_the_hub_gives_the_batches_of_the_same_shards_on_disk(tmp_path, served):
    loopback, address = served
    paths = write_shards(tmp_path / "en", [TEXTS[:100], TEXTS[100:]])
    paths += write_shards(tmp_path / "en", [["validation"]], split="validation")
    loopback.files |= {f"en/{path.name}": path.read_bytes() for path in paths} | {"en/other.txt": b"x"}
    program = """
        import pickle, sys
        from data_corpus import LetterTokenizer, global_batches, make_config
        from dlr_pretrain.data import open_source
        cfg = make_config("c4", train__global_batch=4, train__seq_len=16)
        source = open_source(cfg)
        print(source.describe(), "datasets" in sys.modules)
        first = global_batches(cfg, source, LetterTokenizer(), 1, 6)
        again = global_batches(cfg, source, LetterTokenizer(), 2, 3, first[2][3])
        with open(OUT, "wb") as file:
            pickle.dump((first, again), file)
    """.replace("OUT", repr(str(tmp_path / "out")))
    output, errors = run_python(program, tmp_path, HF_ENDPOINT=address)
    about = f"allenai/c4@{loopback.commit} on the hub: 2 train and 1 validation shards"
    assert output == f"{about} False\n" and not errors
    first, again = pickle.loads((tmp_path / "out").read_bytes())
    cfg = make_config(data__root=tmp_path / "en", train__global_batch=4, train__seq_len=16)
    assert same(first, global_batches(cfg, open_source(cfg), LetterTokenizer(), 1, 6)) and same(again, first[3:])


def test_the_tokenizer_is_fetched_from_the_hub_once(tmp_path, served):
    loopback, address = served
    loopback.redirects = False
    sample.train_tokenizer(tmp_path / "small.model", ["Some text for a small model of few pieces."], pieces=40)
    loopback.files["spiece.model"] = (tmp_path / "small.model").read_bytes()
    program = """
        from data_corpus import make_config
        from dlr_pretrain.data import open_tokenizer
        class NoTokenizer: tokenizer_path = None
        print(open_tokenizer(make_config("c4"), NoTokenizer).vocab_size)
    """
    output, _ = run_python(program, tmp_path, HF_ENDPOINT=address)
    assert output == run_python(program, tmp_path, HF_HUB_OFFLINE="1")[0]


def test_datasets_errors_name_the_file_and_the_document(tmp_path):
    (path,) = write_shards(tmp_path, [TEXTS])
    assert list(read_with_datasets(str(path), "text", start=250)) == TEXTS[250:]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=r"c4-train\.00000.*: reading failed after document \d+ "):
        list(read_with_datasets(str(path), "text"))
