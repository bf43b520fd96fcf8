"""The tokenizer: raw sentencepiece, T5's layout, and no id outside the vocabulary whatever a text holds."""

import gzip
import hashlib
import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import small_tokenizer
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers
from data_corpus import NASTY, REAL, make_config, needs_real_data

from dlr_pretrain.data import embedding_rows, load_tokenizer, open_source, open_tokenizer
from dlr_pretrain.data.tokenizer import train_tokenizer
from dlr_pretrain.deploy.tokenizer import export_tokenizer
from dlr_pretrain.util.errors import UserError

PROSE = ["It is a truth universally acknowledged, that a single man in possession of a good fortune must want a wife."]


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "spiece.model"
    train_tokenizer(path, PROSE, pieces=60)
    return path


@pytest.fixture(params=["small", pytest.param("t5", marks=needs_real_data)])
def tokenizer(request, small_model):
    return load_tokenizer(small_model if request.param == "small" else REAL / "tokenizer" / "spiece.model")


def test_layout_and_fingerprint(small_model):
    tokenizer = load_tokenizer(small_model)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id) == (0, 1, 2)
    assert tokenizer.path == small_model
    assert tokenizer.fingerprint == hashlib.sha256(small_model.read_bytes()).hexdigest()
    assert 4 < tokenizer.vocab_size <= 60


def test_ids_are_in_the_vocabulary_and_no_text_reaches_a_control_symbol(tokenizer):
    for text, ids in zip(NASTY, tokenizer.encode(NASTY), strict=True):
        assert all(2 <= i < tokenizer.vocab_size for i in ids), text
    assert tokenizer.encode(["", " \n"]) == [[], []]


@needs_real_data
def test_t5_ids():
    tokenizer = load_tokenizer(REAL / "tokenizer" / "spiece.model")
    assert tokenizer.vocab_size == 32_000
    assert tokenizer.encode(["Hello world", "The"]) == [[8774, 296], [37]]


@needs_real_data
@pytest.mark.parametrize("word", ["x", "word "])
def test_a_document_of_ten_megabytes(word):
    tokenizer, begin = load_tokenizer(REAL / "tokenizer" / "spiece.model"), time.monotonic()
    (ids,) = tokenizer.encode([word * (10_000_000 // len(word))])
    assert len(ids) > 1_000_000 and min(ids) >= 2 and max(ids) < 32_000
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("gives_arrays", [True, False])
def test_documents_are_the_ids_and_eos_with_any_version_of_sentencepiece(tokenizer, gives_arrays, monkeypatch):
    monkeypatch.setattr(tokenizer, "_gives_arrays", tokenizer._gives_arrays and gives_arrays)
    texts = [*NASTY, *PROSE]
    found = tokenizer.encode_documents(texts)
    assert all(one.dtype == np.int32 for one in found)
    assert [one.tolist() for one in found] == [[*ids, 1] for ids in tokenizer.encode(texts)]
    assert tokenizer.encode_documents([]) == []


@pytest.mark.parametrize(
    ("options", "cuts"),
    [
        ({}, True),
        ({"model_type": "bpe"}, True),
        ({"byte_fallback": True, "vocab_size": 400}, True),
        ({"remove_extra_whitespaces": False}, True),
        ({"normalization_rule_name": "identity"}, True),
        ({"split_by_whitespace": False, "vocab_size": 190}, False),  # its pieces hold spaces
        ({"treat_whitespace_as_suffix": True}, False),
    ],
    ids=str,
)
def test_the_first_ids_of_a_text_are_those_of_its_beginning(options, cuts, tmp_path, monkeypatch):
    tokenizer, rng = load_tokenizer(small_tokenizer.train(tmp_path, **options)), random.Random(0)
    monkeypatch.setattr("dlr_pretrain.data.tokenizer.CHARACTERS", 3)  # too few, so that some are looked for again
    words = [word for text in (*NASTY, *PROSE, *small_tokenizer.SENTENCES) for word in text.split(" ")]
    gaps = [*" " * 8, "  ", "\n", " \n ", "\u3000", " \u0301", "\u00a8", ""]
    texts = ["".join(rng.choice(words) + rng.choice(gaps) for _ in range(rng.randint(0, 60))) for _ in range(300)]
    whole = [one.tolist() for one in tokenizer.encode_documents(texts)]
    for longest in (1, 2, 7, 30):
        found = [one.tolist() for one in tokenizer.encode_documents(texts, longest)]
        assert [ids[:longest] for ids in found] == [ids[:longest] for ids in whole]
        assert all(len(ids) > longest or ids == all_of_it for ids, all_of_it in zip(found, whole, strict=True))
        assert (found != whole) == cuts


@needs_real_data
def test_the_first_ids_of_documents_of_c4_are_those_of_their_beginnings():
    tokenizer = load_tokenizer(REAL / "tokenizer" / "spiece.model")
    with gzip.open(min((REAL / "c4" / "en").glob("*train*")), "rt") as lines:
        texts = [json.loads(line)["text"] for line, _ in zip(lines, range(2000), strict=False)]
    whole, found = tokenizer.encode_documents(texts), tokenizer.encode_documents(texts, 257)
    assert all(np.array_equal(a[:257], b[:257]) for a, b in zip(whole, found, strict=True))
    assert sum(map(len, found)) < 0.7 * sum(map(len, whole))


def test_a_forked_process_encodes_as_its_parent_does(tokenizer):
    expected, (reading, writing) = tokenizer.encode([*NASTY, *PROSE]), os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"same" if tokenizer.encode([*NASTY, *PROSE]) == expected else b"other")
        os._exit(0)
    assert os.read(reading, 8) == b"same" and os.waitpid(child, 0)[1] == 0
    os.close(reading), os.close(writing)


@pytest.mark.parametrize("content", [None, b"", b"not a model", bytes(1000)])
def test_an_unreadable_model_is_named(tmp_path, content):
    path = tmp_path / "broken.model"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"broken\.model: not a readable sentencepiece model .*tokenizer\.path"):
        load_tokenizer(path)


# ----------------------------------------------------------------------------------------------------
# Every kind


def byte_level(folder: Path) -> Path:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        small_tokenizer.SENTENCES, vocab_size=400, special_tokens=["<|endoftext|>", "<|pad|>"]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def word_level(folder: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "[EOS]"])
    tokenizer.train_from_iterator(small_tokenizer.SENTENCES, trainer)
    tokenizer.save(str(folder / "words.json"))
    return folder / "words.json"


def usual(folder: Path, **options) -> Path:
    """A sentencepiece model with the ids that its trainer gives by default: <unk> 0, <s> 1, </s> 2."""
    return small_tokenizer.train(folder, **{"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2} | options)


KINDS = {
    "t5": small_tokenizer.train,
    "sentencepiece unigram": usual,
    "sentencepiece bpe": lambda folder: usual(folder, model_type="bpe"),
    "sentencepiece bytes": lambda folder: usual(folder, model_type="bpe", byte_fallback=True, vocab_size=420),
    "byte-level bpe": byte_level,
    "word level": word_level,
}


def hostile(count: int) -> list[str]:
    rng = random.Random(1)
    words = [word for text in (*NASTY, *PROSE, *small_tokenizer.SENTENCES) for word in text.split(" ")]
    words += ["</s>", "[EOS]", "[UNK]", "<|endoftext|>", "<s>", "\u2581", "<0x0A>", "日本", "\ud83d"]
    return ["".join(rng.choice(words) + rng.choice(" \n\t  ") for _ in range(rng.randint(0, 40))) for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_ids_of_its_own_library_and_one_end(kind, tmp_path):
    path = KINDS[kind](tmp_path)
    tokenizer, texts = load_tokenizer(path), hostile(1000)
    clean = [text.encode("utf-8", "replace").decode() for text in texts]
    if path.suffix == ".json":
        own = tokenizers.Tokenizer.from_file(str(path))
        own.encode_special_tokens = True
        expected = [one.ids for one in own.encode_batch(clean, add_special_tokens=False)]
    else:
        expected = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(clean)
    found = tokenizer.encode_documents(texts)
    # A word-level tokenizer has the end as a word of its vocabulary, which no text may reach.
    same = [ids.tolist() == [*wanted, tokenizer.eos_id] for ids, wanted in zip(found, expected, strict=True)]
    assert all(ok or tokenizer.eos_id in wanted for ok, wanted in zip(same, expected, strict=True))
    assert all((ids == tokenizer.eos_id).sum() == 1 and ids[-1] == tokenizer.eos_id for ids in found)
    assert all(max(ids) < tokenizer.vocab_size for ids in found)
    assert kind == "word level" or all(same)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_saved_and_exported_and_loaded_by_transformers_without_remote_code(kind, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = load_tokenizer(KINDS[kind](tmp_path))
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert (again.fingerprint, again.eos_id, again.pad_id) == (
        tokenizer.fingerprint,
        tokenizer.eos_id,
        tokenizer.pad_id,
    )
    (tmp_path / "folded").mkdir()
    export_tokenizer(tmp_path / "folded", tmp_path / "saved", 512)
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "folded")
    assert (exported.eos_token_id, exported.model_max_length) == (tokenizer.eos_id, 512)
    assert load_tokenizer(tmp_path / "folded").fingerprint == tokenizer.fingerprint
    texts = [text.encode("utf-8", "replace").decode() for text in hostile(200)]
    ids = [exported(text, split_special_tokens=True).input_ids for text in texts]
    differ = [text for text, a, b in zip(texts, ids, tokenizer.encode(texts), strict=True)
              if a != b and not (kind == "word level" and "[EOS]" in text)]  # fmt: skip
    assert len(differ) <= 0.01 * len(texts), differ[:3]
    told = 0
    for text in small_tokenizer.SENTENCES:
        text = " ".join(text.split() if kind != "word level" else text.split()[:3])
        ids = exported(text).input_ids
        if tokenizer.unk_id not in ids:
            assert exported.decode(ids) == tokenizer.decode(tokenizer.encode([text])[0]) == text
            told += 1
    assert told


def test_the_end_of_documents_is_given_or_configured_or_refused(tmp_path):
    path = byte_level(tmp_path)
    plain = load_tokenizer(path)
    assert plain.token(plain.eos_id) == "<|endoftext|>" and plain.pad_id == plain.eos_id
    cfg = make_config(tokenizer__path=path, tokenizer__eos="<|pad|>")
    given = open_tokenizer(cfg, None)
    assert given.token(given.eos_id) == "<|pad|>" and given.fingerprint != plain.fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|pad|>"}}))
    assert load_tokenizer(tmp_path).eos_id == given.eos_id
    with pytest.raises(UserError, match=r"tokenizer\.eos=</s>: is no token of .*Perhaps <\|endoftext\|>"):
        load_tokenizer(path, "</s>")
    with pytest.raises(UserError, match=r"does not say which token ends a document\. Set tokenizer\.eos="):
        load_tokenizer(usual(tmp_path, eos_id=-1))
    with pytest.raises(UserError, match=r"holds none of spiece\.model, tokenizer\.json"):
        load_tokenizer(tmp_path.parent)
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"broken\.json: not a readable tokenizer\.json"):
        load_tokenizer(tmp_path / "broken.json")


def test_text_without_tokens_is_measured(small_model, tmp_path):
    chinese = ["人工智能是计算机科学的一个分支，它企图了解智能的实质。"]
    assert load_tokenizer(small_model).unknown_share(PROSE) < 0.01
    assert load_tokenizer(small_model).unknown_share(chinese) > 0.5
    assert load_tokenizer(byte_level(tmp_path)).unknown_share(chinese) == 0
    assert load_tokenizer(word_level(tmp_path)).unknown_share(["The quick", "xylophone yacht"]) >= 0.5


def test_a_vocabulary_of_some_size_is_padded_where_the_scale_leaves_it_open():
    class Sized:
        path, vocab_size = "some", 32_001

    assert embedding_rows(make_config(), Sized) == 32_064
    assert embedding_rows(make_config(scale__vocab_size=32_005), Sized) == 32_005
    with pytest.raises(UserError, match=r"Set scale\.vocab_size=32001"):
        embedding_rows(make_config(scale__vocab_size=32_000), Sized)
    Sized.vocab_size = 120
    assert embedding_rows(make_config(), Sized) == 120


def test_the_configured_model_goes_before_the_sources_own(small_model, tmp_path):
    class Source:
        tokenizer_path = small_model

    assert open_tokenizer(make_config(), Source).path == small_model
    other = tmp_path / "other.model"
    other.write_bytes(small_model.read_bytes())
    assert open_tokenizer(make_config(tokenizer__path=other), Source).path == other


@needs_real_data
def test_counts_of_real_c4_equal_those_of_sentencepiece():
    cfg = make_config(data__root=REAL / "c4" / "en", tokenizer__path=REAL / "tokenizer" / "spiece.model")
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    texts = [text for shard in source.validation_shards for text in source.read(shard)]
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.path))
    assert tokenizer.encode(texts) == [reference.encode(text) for text in texts]
    assert (len(texts), sum(map(len, tokenizer.encode(texts))) + len(texts)) == (200, 85_866)


@pytest.mark.parametrize("kind", ["byte-level bpe", "sentencepiece bpe"])
def test_a_run_on_one_document_with_any_tokenizer_is_exported(kind, train, tmp_path):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_text("\n".join(small_tokenizer.SENTENCES * 20))
    given = [f"tokenizer.path={KINDS[kind](tmp_path)}", "data=local", f"data.root={tmp_path / 'text'}"]
    run = train(tmp_path / "run", *given, "data.streams=1", "train.steps=4", "eval.packing=packed", "backbone=cola")
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "folded")
    ids = tokenizer(small_tokenizer.SENTENCES[0]).input_ids
    assert ids == load_tokenizer(run / "tokenizer").encode(small_tokenizer.SENTENCES[:1])[0]
    assert tokenizer.decode(ids) == small_tokenizer.SENTENCES[0]
    config = json.loads((run / "folded" / "config.json").read_text())
    assert config["eos_token_id"] == tokenizer.eos_token_id == load_tokenizer(run / "folded").eos_id
    with pytest.raises(UserError, match="cannot express"):
        (tmp_path / "text" / "all.txt").write_text("人工智能是计算机科学的一个分支\n" * 200)
        other = f"tokenizer.path={small_tokenizer.train(tmp_path)}"
        train(tmp_path / "other", other, *given[1:], "data.streams=1", "train.steps=4", "eval.packing=packed")
