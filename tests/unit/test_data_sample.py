"""The sample: what counts as prose, the harvest, its cache."""

import json
import subprocess
import sys
import textwrap

import pytest
from data_corpus import make_config

from dlr_pretrain.data import open_source, open_tokenizer, prose, sample
from dlr_pretrain.data.shards import read_lines
from dlr_pretrain.util.errors import UserError

DOCSTRING = """\
Return the roots of the polynomial, that is the places at which it is zero.

The method is that of :class:`~numpy.linalg.Solver` and of `the book <https://example.org>`_, see [1]_; it is *not*
meant for ``degree > 100``, where a **better** one should be used.

Parameters
----------
coefficients : array_like
    The coefficients of the polynomial, with the highest power first as in the other functions.

:param tolerance: The tolerance that is used for the comparison of the results with one another.
:returns: the roots of the polynomial as an array that is sorted by its values.

Args:
    degree (int): The degree of the polynomial that should be used for the comparison.

- The first point is about the order of the results, which is not that of the input and
  may change from one version to the other.

Some examples of the use of the function can be found here::

    >>> roots([1, 0, -1])

>>> roots([1, 2, 3])  # This is not a sentence, although it is written as if it was one.

==========  =====================================
a           The first of the columns of the table is this.
==========  =====================================

x = foo(a, b); y = bar(x.z[0], q=3); print(y, end="") and not a sentence of words.

and a fragment that begins in the middle of a sentence and is therefore left out.
"""


def test_prose_is_kept_without_markup_and_everything_else_is_left_out():
    assert prose.paragraphs(DOCSTRING) == [
        "Return the roots of the polynomial, that is the places at which it is zero.",
        "The method is that of Solver and of the book, see; it is not meant for degree > 100, where a better one "
        "should be used.",
        "The first point is about the order of the results, which is not that of the input and may change from one "
        "version to the other.",
    ]


def test_every_docstring_is_a_document():
    text = "This is a sentence that is long enough to be kept, because it has more than a few of the common words. "
    source = f'''
        """{text}It is in the module itself."""
        if True:
            class A:
                """{text}It is in a class."""
                async def f(self):
                    """{text}It is in a method."""
                    def g():
                        """{text}It is in a function of a method."""
        def h():
            """Too short to be a document."""
        def i():
            x = """{text}It is no docstring."""
    '''
    found = prose.documents(textwrap.dedent(source).encode())
    assert [d.removeprefix(text) for d in found] == [
        f"It is in {place}." for place in ("the module itself", "a class", "a method", "a function of a method")
    ]
    assert prose.documents(b"x = 1") == []


# ----------------------------------------------------------------------------------------------------
# The harvest of a small tree of packages


SUBJECTS = ["river", "mountain", "harbour", "garden", "village", "forest", "station", "market", "bridge", "castle"]
VERBS = ["follows", "crosses", "overlooks", "borders", "supplies", "protects"]


def sentences(i):
    a, b = SUBJECTS[i % 10], SUBJECTS[(i // 10) % 10]
    return (
        f"The {a} of number {i} {VERBS[i % 6]} the {b}, and there is a path that can be used for the way from the one "
        f"to the other. It was made in the year {1500 + i} by those who have lived there."
    )


@pytest.fixture
def packages(tmp_path):
    """Forty modules; the odd ones repeat a paragraph, and some files are not to be read."""
    folder = tmp_path / "packages"
    for i in range(40):
        path = folder / f"package{i % 4}" / f"module{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        repeated = f"\n\n{sentences(999)}" if i % 2 else ""
        path.write_text(f'"""{sentences(i)}{repeated}"""\n')
    (folder / "package0" / "broken.py").write_text(f'"""{sentences(100)}"""\ndef :\n')
    (folder / "package0" / "gone.py").symlink_to("nowhere")
    (folder / "package0" / "latin.py").write_bytes(b'"""caf\xe9"""')
    (folder / "package0" / "tests").mkdir()
    (folder / "package0" / "tests" / "test_x.py").write_text(f'"""{sentences(101)}"""\n')
    return folder


def test_harvest_is_seeded_and_no_paragraph_comes_twice(packages):
    found = list(sample.harvest([packages]))
    assert found == list(sample.harvest([packages]))
    texts = [text for document in found for text in document.split("\n")]
    assert sorted(texts) == sorted([sentences(i) for i in (*range(40), 999)])
    assert texts != sorted(texts)


def test_harvest_ends_with_as_much_python_as_it_may_read_whatever_time_that_takes(packages, monkeypatch):
    whole = list(sample.harvest([packages]))
    assert list(sample.harvest([packages], source_bytes=0)) == []
    monkeypatch.setattr(sample, "MAX_WORKERS", 1)
    assert list(sample.harvest([packages])) == whole
    some = list(sample.harvest([packages], source_bytes=4000))
    assert 5 < len(some) < 30 and some == whole[: len(some)]


@pytest.fixture
def small(packages, monkeypatch):
    monkeypatch.setattr(sample, "MIN_BYTES", 1000)
    monkeypatch.setattr(sample, "PIECES", 120)
    monkeypatch.setattr(sample, "package_folders", lambda: [packages])


def test_sample_is_a_source_with_its_tokenizer_and_is_made_once(small, tmp_path, monkeypatch):
    cfg, told = make_config("sample", data__root=tmp_path / "cache"), []
    source = open_source(cfg, told.append)
    tokenizer = open_tokenizer(cfg, source)
    assert (len(source.train_shards), len(source.validation_shards)) == (4, 1)
    assert source.train_shards[0] == "sample-train.00000-of-00004.json.gz"
    texts = [t for shard in (*source.train_shards, *source.validation_shards) for t in source.read(shard)]
    assert sorted(text for t in texts for text in t.split("\n")) == sorted(sentences(i) for i in (*range(40), 999))
    assert 50 < tokenizer.vocab_size <= 120
    assert len(told) == 2 and "(once, about a minute)" in told[0] and "training their tokenizer" in told[1]

    def build(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(sample, "build", build)
    assert open_source(cfg, told.append).train_shards == source.train_shards and len(told) == 2


def test_the_cache_is_the_users(small, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    folder = sample.prepare(None, lambda _: None)
    assert folder == tmp_path / "xdg" / "dlr_pretrain" / "sample" / sample.fingerprint()
    assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]  # and no draft


def test_a_harvest_that_fails_leaves_nothing(small, tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "MIN_BYTES", 10**9)
    with pytest.raises(UserError, match=r"Only \d+ bytes of prose in the docstrings below .*data=c4_local"):
        sample.prepare(tmp_path / "cache", lambda _: None)
    assert not list((tmp_path / "cache").iterdir())


def test_two_processes_at_once_do_no_harm(small, tmp_path, monkeypatch):
    build, cache = sample.build, tmp_path / "cache"

    def overtaken(draft, *rest):
        monkeypatch.setattr(sample, "build", build)
        assert sample.prepare(cache, lambda _: None).is_dir()  # the other one, from beginning to end
        build(draft, *rest)

    monkeypatch.setattr(sample, "build", overtaken)
    folder = sample.prepare(cache, lambda _: None)
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert len(list(folder.iterdir())) == 6


def test_a_harvest_that_is_killed_leaves_no_half_cache(small, tmp_path):
    program = """
        import os, signal, sys
        sys.path[:0] = sys.argv[2:]
        from pathlib import Path
        from dlr_pretrain.data import sample
        sample.train_tokenizer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        sample.MIN_BYTES = 1000
        sample.package_folders = lambda: [Path(sys.argv[1]) / "packages"]
        sample.prepare(Path(sys.argv[1]) / "cache", print)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), *sys.path]
    assert subprocess.run(command, timeout=60, capture_output=True).returncode == -9
    folder = sample.prepare(tmp_path / "cache", lambda _: None)
    assert len(list(folder.iterdir())) == 6


def test_a_cache_that_cannot_be_written(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"the sample cannot be kept there .*data\.root"):
        sample.prepare(tmp_path / "file" / "cache", lambda _: None)


def test_the_fingerprint_names_the_installed_packages(monkeypatch):
    before = sample.fingerprint()
    assert before == sample.fingerprint()
    monkeypatch.syspath_prepend("elsewhere")  # as compilers do in a sweep's first job: its second reads the same sample
    assert sample.fingerprint() == before
    monkeypatch.setattr(sample, "distributions", lambda path: [])
    assert sample.fingerprint() != before


@pytest.mark.slow
def test_the_real_harvest_is_english(tmp_path, capfd):
    folder = sample.prepare(tmp_path, lambda _: None)
    assert capfd.readouterr() == ("", "")
    shards = sorted(folder.glob("*.json.gz"))
    texts = [json.loads(line)["text"] for shard in shards for line in read_lines(shard)]
    assert 1_000_000 < sum(map(len, texts)) < 1.1 * sample.MAX_BYTES
    words = " ".join(texts).lower().split()
    assert 0.04 < words.count("the") / len(words) < 0.12
    cfg = make_config("sample", data__root=tmp_path)
    tokenizer = open_tokenizer(cfg, open_source(cfg))
    assert tokenizer.vocab_size == sample.PIECES
    ids = [i for one in tokenizer.encode(texts[:2000]) for i in one]
    assert ids.count(tokenizer.unk_id) < 1e-3 * len(ids)
