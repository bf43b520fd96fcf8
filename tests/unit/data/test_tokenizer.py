"""Every kind of tokenizer has the ids of its own library, in training and as exported, and one end per document."""

import gzip
import hashlib
import json
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sentencepiece
import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from dlr_pretrain.data import embedding_rows, load_tokenizer, open_source, open_tokenizer
from dlr_pretrain.deploy.tokenizer import fast_tokenizer
from dlr_pretrain.train.corpus import Corpus
from dlr_pretrain.util.errors import Stopped, UserError
from tests.conftest import main_of
from tests.unit.data.data_corpus import NASTY, SENTENCES, make_config, small_model


def byte_level(folder: Path) -> Path:
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|pad|>"]
    tokenizer.train_from_iterator(SENTENCES, vocab_size=400, special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def word_level(folder: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]", "[EOS]"])
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "words.json"))
    return folder / "words.json"


def unigram(folder: Path) -> Path:
    """A tokenizer whose vocabulary has the end of documents as a word, which training removes from texts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = tokenizers.pre_tokenizers.Metaspace(), tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def usual(folder: Path, **options) -> Path:
    """A sentencepiece model with the default ids of its trainer: <unk> 0, <s> 1, </s> 2."""
    return small_model(folder, **{"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2} | options)


KINDS = {
    "t5": small_model,
    "sentencepiece unigram": usual,
    "sentencepiece bpe": lambda folder: usual(folder, model_type="bpe"),
    "sentencepiece bytes": lambda folder: usual(folder, model_type="bpe", byte_fallback=True, vocab_size=420),
    "byte-level bpe": byte_level,
    "word level": word_level,
    "unigram": unigram,
}
NORMALISED = {
    "no prefix": lambda folder: small_model(folder, add_dummy_prefix=False),
    "as it is": lambda folder: small_model(folder, normalization_rule_name="identity", remove_extra_whitespaces=False),
}


def hostile(count: int, most: int = 40) -> list[str]:
    rng = random.Random(1)
    words = [word for text in (*NASTY, *SENTENCES) for word in text.split(" ")]
    words += ["</s>", "[EOS]", "[UNK]", "<|endoftext|>", "<s>", "\u2581", "<0x0A>", "日本", "\ud83d"]
    gaps = [*" " * 8, "  ", "\n", "\t", " \n ", "\u3000", " \u0301", "\u00a8", ""]
    return ["".join(rng.choice(words) + rng.choice(gaps) for _ in range(rng.randint(0, most))) for _ in range(count)]


@pytest.mark.parametrize("kind", [*KINDS, *NORMALISED])
def test_every_tokenizer_has_its_librarys_ids_and_one_end(kind, tmp_path):
    path = (KINDS | NORMALISED)[kind](tmp_path)
    tokenizer, texts = load_tokenizer(path), [*NASTY, *SENTENCES, *hostile(1000)]
    clean = [text.encode("utf-8", "replace").decode() for text in texts]
    if path.suffix == ".json":
        own = tokenizers.Tokenizer.from_file(str(path))
        own.encode_special_tokens = True
        expected = [one.ids for one in own.encode_batch(clean, add_special_tokens=False)]
        # A word-level tokenizer has the end as a word of its vocabulary, which text must not produce.
        expected = [[id for id in ids if id != tokenizer.eos_id] for ids in expected]
    else:
        expected = sentencepiece.SentencePieceProcessor(model_file=str(path)).encode(clean)
        exported = fast_tokenizer(tokenizer)
        exported.encode_special_tokens = True  # what transformers sets for split_special_tokens
        differ = [text for text, ids in zip(clean, expected, strict=True) if exported.encode(text).ids != ids]
        assert len(differ) <= 0.01 * len(texts) and not {*differ} & {*SENTENCES}, differ[:3]
    found = tokenizer.encode(texts)
    assert [ids.tolist() for ids in found] == expected and tokenizer.encode([]) == []
    assert all(ids.dtype == np.int32 and max(ids, default=0) < tokenizer.vocab_size for ids in found)
    assert all(tokenizer.eos_id not in ids for ids in found)


def chat(folder: Path) -> Path:
    """A byte-level tokenizer with the special tokens of chats, and texts of chats beside it."""
    tokenizer = tokenizers.Tokenizer.from_file(str(byte_level(folder)))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "chat.json"))
    turns = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in SENTENCES]
    (folder / "text").mkdir()
    (folder / "text" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in [*turns, "x"] * 4))
    return folder / "chat.json"


@pytest.mark.parametrize("special", ["text", "tokens"])
def test_special_tokens_in_text_count_as_chosen(tmp_path, train, special, capsys):
    """Training, its tokens on disk, the export and the summary agree; the tokens resume as the text they are from."""
    transformers = pytest.importorskip("transformers")
    path, turn = chat(tmp_path), "<|im_start|>user\nhello<|im_end|>\n"
    choice = [f"data.special_tokens={special}", f"tokenizer.path={path}"]
    text = ["data=local", f"data.root={tmp_path / 'text'}", *choice]
    assert main_of("prepare_data", *text, "--output", tmp_path / "tokens", "--workers", "1") == 0
    read = "ordinary characters" if special == "text" else "tokens"
    said = f"48 texts with special tokens (<|endoftext|>, <|im_end|>, <|im_start|>, ...), read as {read} (data.s"
    assert said in capsys.readouterr().out
    end = {"train.steps": 4, "eval.every": 4, "checkpoint.every": 4}
    keys = ["data.streams=1", "eval.packing=packed", *(f"{name}={value}" for name, value in end.items())]
    with pytest.raises(Stopped):
        train(tmp_path / "run", *text, *keys, "train.stop_after=2")
    run = train(tmp_path / "run", "data=tokens", f"data.root={tmp_path / 'tokens'}", "tokenizer.path=null", *keys)
    trained = load_tokenizer(run / "tokenizer")
    ids = trained.encode([turn])[0].tolist()
    assert (trained.encode(["<|im_start|>"])[0].size == 1) is (special == "tokens")
    exported = transformers.AutoTokenizer.from_pretrained(run / "folded", trust_remote_code=False)
    assert exported(turn).input_ids == ids and exported.decode(ids) == turn
    assert load_tokenizer(run / "folded").fingerprint == trained.fingerprint
    assert capsys.readouterr().out.count("\nspecial     48 texts with special tokens") == 2
    with pytest.raises(UserError, match="not the tokenizer"):  # the other reading is another tokenizer
        other = load_tokenizer(path, None, "text" if special == "tokens" else "tokens")
        next(open_source(make_config("tokens", data__root=tmp_path / "tokens")).validation(other))


def test_special_tokens_that_could_not_count_are_refused(tmp_path):
    path, source = small_model(tmp_path), object()
    cfg = make_config("local", data__special_tokens="tokens", tokenizer__path=path)
    with pytest.raises(
        UserError, match=r"data.special_tokens=tokens: a SentencePiece model reads .* or use a tokenizer"
    ):
        open_tokenizer(cfg, source)
    cfg = make_config("local", data__special_tokens="tokens", tokenizer__path=chat(tmp_path), data__mask_documents=True)
    with pytest.raises(UserError, match=r"data.mask_documents=true with data.special_tokens=tokens: .*<.endoftext.>"):
        open_tokenizer(cfg, source)


@pytest.mark.parametrize("kind", ["t5", *(pytest.param(kind, marks=pytest.mark.full) for kind in list(KINDS)[1:])])
def test_a_run_with_any_tokenizer_is_exported_for_transformers(kind, train, tmp_path):
    """After training on one document, the exported tokenizer has the ids of its library and decodes them."""
    transformers = pytest.importorskip("transformers")
    path = KINDS[kind](tmp_path)
    tokenizer, sentences = load_tokenizer(path), SENTENCES
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_text("\n".join(sentences * 20))
    given = ["data=local", f"data.root={tmp_path / 'text'}", "data.streams=1", f"tokenizer.path={path}"]
    run = train(tmp_path / "run", *given, "train.steps=20", "train.lr=1e-3", "eval.packing=packed", "backbone=cola")
    for folder in ("tokenizer", "folded"):
        again = load_tokenizer(run / folder)
        assert all(getattr(again, name) == getattr(tokenizer, name) for name in ("fingerprint", "eos_id", "pad_id"))
    exported = transformers.AutoTokenizer.from_pretrained(run / "folded", trust_remote_code=False)
    config = json.loads((run / "folded" / "config.json").read_text())
    assert config["eos_token_id"] == exported.eos_token_id == tokenizer.eos_id
    texts = [text.encode("utf-8", "replace").decode() for text in hostile(200)]
    ids = [exported(text, split_special_tokens=True).input_ids for text in texts]
    word = tokenizer.eos_id if kind in ("word level", "unigram") else None  # training removes it from a text
    pairs = zip(texts, ids, tokenizer.encode(texts), strict=True)
    differ = [text for text, a, b in pairs if [id for id in a if id != word] != b.tolist()]
    assert len(differ) <= 0.01 * len(texts), differ[:3]
    texts = [" ".join(text.split()[: 3 if kind == "word level" else None]) for text in sentences]
    texts = [text for text in texts if tokenizer.unk_id not in exported(text).input_ids]
    assert texts
    for text in texts:
        assert exported.decode(exported(text).input_ids) == tokenizer.decode(tokenizer.encode([text])[0]) == text


@pytest.mark.parametrize(("options", "cuts"), [
    ({}, True),
    ({"model_type": "bpe"}, True),
    ({"byte_fallback": True, "vocab_size": 400}, True),
    ({"split_by_whitespace": False, "vocab_size": 190}, False),  # its tokens contain spaces
    ({"treat_whitespace_as_suffix": True}, False),
], ids=str)  # fmt: skip
def test_the_first_ids_of_a_text_are_those_of_its_beginning(options, cuts, tmp_path, monkeypatch):
    tokenizer, texts = load_tokenizer(small_model(tmp_path, **options)), hostile(300, most=60)
    monkeypatch.setattr("dlr_pretrain.data.tokenizer.CHARACTERS_PER_TOKEN", 3)  # too few: some are encoded again
    whole = list(map(list, tokenizer.encode(texts)))
    for longest in (1, 2, 7, 30):
        found = list(map(list, tokenizer.beginnings(longest).encode(texts)))
        assert [ids[:longest] for ids in found] == [ids[:longest] for ids in whole]
        assert all(len(ids) >= longest or ids == all_of_it for ids, all_of_it in zip(found, whole, strict=True))
        assert (found != whole) == cuts


def test_t5_has_the_ids_of_sentencepiece_also_as_exported(test_data):
    path = test_data / "tokenizer" / "spiece.model"
    tokenizer, own = load_tokenizer(path), sentencepiece.SentencePieceProcessor(model_file=str(path))
    assert tokenizer.vocab_size == 32_000 and tokenizer.encode(["Hello world"])[0].tolist() == [8774, 296]
    assert tokenizer.fingerprint == hashlib.sha256(path.read_bytes()).hexdigest()
    texts = []
    for shard in (
        *test_data.glob("c4/en/c4-validation*.json.gz"),
        *test_data.glob("webmix/webmix-validation*.json.gz"),
    ):
        texts += [json.loads(line)["text"] for line in gzip.decompress(shard.read_bytes()).splitlines()]
    expected, exported = own.encode(texts), fast_tokenizer(tokenizer)
    assert len(texts) > 500 and [ids.tolist() for ids in tokenizer.encode(texts)] == expected
    assert [text[:80] for text, ids in zip(texts, expected, strict=True) if exported.encode(text).ids != ids] == []
    (ids,) = tokenizer.encode(["word " * 200_000])
    assert len(ids) == 200_000 and (ids == ids[0]).all()


def test_the_end_of_documents_is_given_or_configured_or_refused(tmp_path):
    path = byte_level(tmp_path)
    plain = load_tokenizer(path)
    assert plain.token(plain.eos_id) == "<|endoftext|>" and plain.pad_id == plain.eos_id
    given = open_tokenizer(make_config(tokenizer__path=path, tokenizer__eos="<|pad|>"), None)
    assert given.token(given.eos_id) == "<|pad|>" and given.fingerprint != plain.fingerprint
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|pad|>"}}))
    assert load_tokenizer(tmp_path).eos_id == given.eos_id
    with pytest.raises(UserError, match=r"tokenizer\.eos=</s>: is not a token of .*Perhaps <\|endoftext\|>"):
        load_tokenizer(path, "</s>")
    with pytest.raises(UserError, match=r"does not say which token ends a document\. Set tokenizer\.eos="):
        load_tokenizer(usual(tmp_path, eos_id=-1))


@pytest.mark.parametrize(("name", "content", "rule"), [
    ("", None, r"holds none of spiece\.model, tokenizer\.json"),
    ("broken.json", b"{}", r"broken\.json: not a readable tokenizer\.json"),
    ("broken.model", b"", r"broken\.model: not a readable sentencepiece model .*tokenizer\.path"),
    ("broken.model", bytes(1000), r"broken\.model: not a readable sentencepiece model .*tokenizer\.path"),
    ("small.model", {"model_type": "char"}, r"small\.model: .*neither a unigram nor a BPE model"),
    ("small.model", {"user_defined_symbols": ["<x>"]}, r"small\.model: .*user-defined"),
    ("small.model", {"treat_whitespace_as_suffix": True}, r"small\.model: .*suffixes"),
])  # fmt: skip
def test_an_unusable_tokenizer_is_named(tmp_path, name, content, rule):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content:
        small_model(tmp_path, **content)
    with pytest.raises(UserError, match=rule):
        fast_tokenizer(load_tokenizer(tmp_path / name))


def test_a_random_or_failing_tokenizer_is_named(tmp_path):
    path = word_level(tmp_path)
    spec = json.loads(path.read_text())
    del spec["model"]["vocab"]["[UNK]"]
    spec["added_tokens"] = [token for token in spec["added_tokens"] if token["content"] != "[UNK]"]
    path.write_text(json.dumps(spec))
    with pytest.raises(UserError, match=r"words\.json: cannot encode the text .*Give the tokenizer an unknown token"):
        load_tokenizer(path, "[EOS]").encode(["the xylophone"])
    path = byte_level(tmp_path)
    spec = json.loads(path.read_text())
    path.write_text(json.dumps(spec | {"model": spec["model"] | {"dropout": 0.5}}))
    with pytest.raises(UserError, match="drops merges at random"):
        load_tokenizer(path)


def test_text_without_tokens_is_measured_and_refused(tmp_path, train):
    chinese = "人工智能是计算机科学的一个分支，它企图了解智能的实质。"
    small = small_model(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "all.txt").write_text(chinese * 200)
    with pytest.raises(UserError, match="cannot express"):
        train(tmp_path / "run", "data=local", f"data.root={tmp_path / 'text'}", f"tokenizer.path={small}")


def test_an_end_token_does_not_count_as_unknown_text():
    validation = SimpleNamespace(tokens=np.array([[7, 2, 2], [7, 7, 2]]), real_tokens=4)
    ids = {"unk_id": 2, "eos_id": 3, "pad_id": 0}
    for other, share in (({}, 0.75), ({"eos_id": 2}, 0.0), ({"pad_id": 2}, 0.0), ({"unk_id": None}, 0.0)):
        assert Corpus(None, SimpleNamespace(**(ids | other)), validation, 8).unknown == share


def test_a_vocabulary_is_padded_where_the_scale_has_no_size():
    class Sized:
        path, vocab_size = "some", 32_001

    assert embedding_rows(make_config(), Sized) == 32_064
    assert embedding_rows(make_config(scale__vocab_size=32_005), Sized) == 32_005
    with pytest.raises(UserError, match=r"Set scale\.vocab_size=32001"):
        embedding_rows(make_config(scale__vocab_size=32_000), Sized)
    Sized.vocab_size = 120
    assert embedding_rows(make_config(), Sized) == 120
