"""Mixtures: which source a sequence comes from, what each epoch of a source reads, and runs on mixtures."""

import re
from collections import Counter

import numpy as np
import pytest

from dlr_pretrain.cli import load
from dlr_pretrain.config import ConfigError
from dlr_pretrain.data import open_source, open_tokenizer, streams, validation_set, validation_sets
from dlr_pretrain.data.mixture import Mixture
from dlr_pretrain.util.errors import Stopped, UserError
from dlr_pretrain.util.files import read_metrics
from tests.conftest import main_of
from tests.resume.test_resume import assert_same, final
from tests.unit.data.data_corpus import (
    PACKINGS,
    LetterTokenizer,
    MemorySource,
    corpus,
    global_batches,
    lines_of,
    make_config,
    same,
    tokens_of,
)

TOKENIZER = LetterTokenizer()
WEIGHTS = {"web": 0.7, "code": 0.3}


@pytest.fixture
def mixture(tmp_path, monkeypatch) -> Mixture:
    """Two sources of unequal size, each of whose documents begins with a character of its own."""
    monkeypatch.setattr(streams, "BLOCK_DOCUMENTS", 8)
    texts = corpus(8, 30)
    for name in WEIGHTS:
        (tmp_path / name).mkdir()
    sources = {"web": tokens_of(tmp_path / "web", texts[:6]), "code": tokens_of(tmp_path / "code", texts[6:])}
    return Mixture(sources, WEIGHTS)


def config(packing="packed", batch=16, **keys):
    return make_config("mix", train__global_batch=batch, train__seq_len=8, data__packing=packing, **keys)


def source_names(rows, mixture: Mixture) -> list[str]:
    """The source of each padded row, by the first character of its document."""
    firsts = {name: {int(source.shard(shard)[0][end]) for shard in source.train_shards
                     for end in source.shard(shard)[1][:-1]} for name, source in mixture.sources.items()}  # fmt: skip
    return [next(name for name in firsts if int(row[0]) in firsts[name]) for row in rows]


@PACKINGS
def test_a_mixture_is_the_same_on_any_ranks_and_resume(packing, mixture):
    cfg = config(packing)
    alone = global_batches(cfg, mixture, TOKENIZER, 1, 40)
    for ranks in (2, 4, 16):
        assert same(global_batches(cfg, mixture, TOKENIZER, ranks, 12), alone[:12])
    for step, ranks in ((1, 4), (7, 2), (13, 1), (24, 16), (33, 2)):
        resumed = global_batches(cfg, mixture, TOKENIZER, ranks, 4, alone[step - 1][3])
        assert same(resumed, alone[step : step + 4])


@pytest.mark.parametrize("streams_, batch", [(1, 1), (4, 8), (16, 16), (64, 128)])
@pytest.mark.parametrize(
    "weights", [(0.7, 0.3), (1 / 3, 1 / 3, 1 / 3), (0.001, 0.01, 0.989), (0.5, 0.25, 0.125, 0.125)]
)
def test_shares_are_within_a_batch_of_the_weights(weights, streams_, batch):
    mixture = Mixture({}, dict(enumerate(weights)))
    before = np.zeros((streams_, len(weights)), int)
    for number in range(1, 1500):
        drawn = mixture.drawn(number, 42, streams_)
        assert ((drawn - before).sum(1) == 1).all() and (drawn >= before).all()
        assert (np.abs(drawn - number * np.array(weights)) < len(weights)).all()
        assert (np.abs(drawn.sum(0) - number * streams_ * np.array(weights)) <= batch).all()
        before = drawn
    assert (mixture.drawn(10**9, 42, streams_).sum(1) == 10**9).all()


def test_every_document_is_read_once_in_each_epoch_of_its_source(mixture):
    cfg = config("pad")
    batches = global_batches(cfg, mixture, TOKENIZER, 2, 60)
    rows = [row for inputs, *_ in batches for row in inputs]
    names = source_names(rows, mixture)
    for name, source in mixture.sources.items():
        read = [int(row[0]) for row, own in zip(rows, names, strict=True) if own == name]
        assert abs(len(read) - WEIGHTS[name] * len(rows)) <= 16
        size = source.sizes(packed=False)
        epochs = len(read) / sum(size)
        assert epochs > 2
        counts = Counter(read).values()
        assert len(counts) == sum(size)
        # All streams end an epoch of a source within a sequence of each other.
        assert max(counts) - min(counts) <= 1 + (16 / sum(size) > epochs % 1 or epochs % 1 > 1 - 16 / sum(size))


def test_the_source_depends_on_the_seed_and_the_position_alone(mixture):
    rows = {seed: [row for batch in global_batches(config("pad", data__seed=seed), mixture, TOKENIZER, 2, 8)
                   for row in batch[0]] for seed in (1, 2)}  # fmt: skip
    other = Mixture({name: mixture.sources[name] for name in ("web", "code")}, WEIGHTS)
    again = [row for batch in global_batches(config("pad", data__seed=1), other, TOKENIZER, 4, 8) for row in batch[0]]
    names = {seed: source_names(rows[seed], mixture) for seed in rows}
    assert source_names(again, mixture) == names[1] != names[2]
    assert Counter(names[1]) == Counter(names[2])


def test_a_mixture_streams_text_beside_tokens(mixture):
    """Of text that is streamed, the number of epochs is not known."""
    some = Mixture({"web": mixture.sources["web"], "code": MemorySource(corpus(16, 5))}, WEIGHTS)
    cfg = config(train__steps=40)
    assert same(global_batches(cfg, some, TOKENIZER, 4, 6), global_batches(cfg, some, TOKENIZER, 1, 6))
    assert {*some.progress(cfg, 5)} == {"data/web/share", "data/web/epochs", "data/code/share"}
    assert some.forecast(cfg).startswith("web 70.0%, read ") and some.forecast(cfg).endswith("code 30.0%, streamed")


def test_the_shares_and_epochs_are_those_of_the_rows(mixture):
    cfg = config("pad")
    names = Counter(source_names([row for batch in global_batches(cfg, mixture, TOKENIZER, 1, 30) for row in batch[0]],
                                 mixture))  # fmt: skip
    progress = mixture.progress(cfg, 30)
    for name, source in mixture.sources.items():
        assert progress[f"data/{name}/share"] == names[name] / 480
        assert progress[f"data/{name}/epochs"] == names[name] / sum(source.sizes(packed=False))


# ----------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture
def mixed(tmp_path, corpus) -> list[str]:
    """Words of a run on a mixture of tokens and files, with a further validation set."""
    for name, count in (("web", 160), ("code", 60)):
        (tmp_path / f"{name}.jsonl").write_bytes(lines_of(f"{name} aeiou {i} " * (3 + i % 9) for i in range(count)))
    tokens = tmp_path / "tokens"
    made = main_of("prepare_data", "data=local", f"data.root={tmp_path}", "data.train_files=web.jsonl",
                   "data.held_out=0.2", f"tokenizer.path={corpus}/spiece.model", "--output", tokens)  # fmt: skip
    assert made == 0
    return [
        "data=mix", f"data.sources.web={{root: {tokens}, weight: 3}}", "data.held_out=0.2",
        f"data.sources.code={{root: {tmp_path}, source: local, train_files: code.jsonl, weight: 1}}",
        f"eval.sets.c4={{root: {corpus}, source: local, validation_files: c4-validation.*}}",
        f"data.cache={tmp_path}/cache",
    ]  # fmt: skip


def without_root(words: list[str]) -> list[str]:
    return [word for word in words if not word.startswith("data.root=")]


@pytest.fixture
def run_of(words, tmp_path, no_export):
    def run(name: str, mixed: list[str], *more: str):
        from dlr_pretrain.train.run import run as train

        train(load(without_root(words(f"run.dir={tmp_path}/runs/{name}", *mixed, *more))))
        return tmp_path / "runs" / name

    return run


@pytest.fixture
def run_mixed(run_of, mixed):
    return lambda name, *more: run_of(name, mixed, *more)


def test_a_run_on_a_mixture_resumes_bit_for_bit(run_mixed, run_of, mixed, capsys):
    whole = run_mixed("whole")
    said = capsys.readouterr().out
    assert "mixture     web 75.0%, read " in said and "c4, 400 tokens" in said
    with pytest.raises(Stopped):
        run_mixed("resumed", "train.stop_after=7")
    assert_same(final(whole), final(run_mixed("resumed")))
    card = (whole / "folded" / "README.md").read_text()
    assert "web 75.0%, code 25.0%, packed" in card and str(whole.parents[1]) not in card
    last = read_metrics(whole / "metrics.jsonl")[-1]
    assert last["data/web/share"] == 0.75 and last["data/code/epochs"] > 0
    with pytest.raises(UserError, match=r"data\.sources\.web\.weight: 3\.0 there, 2\.0 here"):
        run_mixed("resumed", "data.sources.web.weight=2")
    renamed = [word.replace("sources.web", "sources.www") for word in mixed]
    for words, names in ((renamed, "www', 'code"), ([*mixed[2:], *mixed[:2]], "code', 'web")):
        with pytest.raises(
            UserError, match=rf"run:\n  data\.sources: \['web', 'code'\] there, \['{names}'\] here\nRest"
        ):
            run_of("resumed", words)


def test_the_loss_of_a_mixture_is_the_mean_over_its_sources(run_mixed, words, mixed):
    cfg = load(without_root(words("run.dir=x", *mixed)))
    source = open_source(cfg)
    tokenizer = open_tokenizer(cfg, source)
    whole, sets = validation_set(cfg, source, tokenizer), validation_sets(cfg, tokenizer)
    assert {name: part.real_tokens for name, part in whole.by_source.items()} == {"web": 300, "code": 100}
    assert sets["c4"].real_tokens == 400 == whole.real_tokens
    last = read_metrics(run_mixed("run") / "metrics.jsonl")[-1]
    targets = {name: part.lengths.sum() - len(part.lengths) for name, part in whole.by_source.items()}
    mean = sum(last[f"eval/{name}/loss"] * count for name, count in targets.items()) / sum(targets.values())
    assert last["eval/loss"] == pytest.approx(mean, rel=1e-6)
    assert last["eval/c4/perplexity"] == pytest.approx(np.exp(last["eval/c4/loss"]), rel=1e-6)


def test_a_named_set_decides_in_the_report(run_mixed, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dlr_pretrain.analysis.report.draw", lambda *_: [])
    run_mixed("one"), run_mixed("two", "dlr=on")
    run_mixed("three", "data.sources.web.weight=1")
    for of_set, decides in ((None, False), ("c4", True)):
        chosen = ["--set", of_set] if of_set else []
        assert main_of("report", tmp_path / "runs", "--output", tmp_path / f"report-{of_set}", *chosen) == 0
        page = (tmp_path / f"report-{of_set}" / "report.md").read_text()
        # With another mixture the validation text is another one; the further set is the same.
        assert ("not all of the same text" in page) != decides and ("## Differences in loss" in page) == decides
        assert "PPL web" in page and "PPL code" in page and ("PPL c4" in page) != decides
    capsys.readouterr()
    assert main_of("report", tmp_path / "runs", "--output", tmp_path / "other", "--set", "c5") == 3
    assert "has no validation set c5" in capsys.readouterr().err


def test_a_recipe_can_hold_a_mixture(tmp_path):
    (tmp_path / "experiment").mkdir()
    recipe = "data: {sources: {web: {root: a, weight: 3}, code: {root: b, weight: 1}}}"
    text = f"# @package _global_\ndefaults: [override /data: mix]\n{recipe}\neval: {{sets: {{wiki: {{root: c}}}}}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    words = ["--config-dir", str(tmp_path), "scale=tiny", "logger=jsonl", "experiment=mine"]
    plain, typed = load(words), load([*words, "data.sources.web.weight=3.0", "data.sources.web.source=tokens"])
    other = load([*words, "data.sources.web.weight=2"])
    assert plain.data.sources["web"].root == "a" and plain.eval.sets["wiki"].source == "tokens"
    assert typed == plain and re.fullmatch(rf"{plain.run.dir}-weight2\.0-\w{{8}}", other.run.dir)


@pytest.mark.parametrize(("given", "expected"), [
    (["data=mix"], r"data\.sources: data=mix needs the texts that it mixes\. Set data\.sources\.<name>="),
    (["data=mix", "data.sources.a={root: x}"], r"data\.sources\.a\.weight: needs a value"),
    (["data=mix", "data.sources.a={root: x, weight: 0}"], r"weight=0: must be a number of at least 1e-06"),
    (["data=mix", "data.sources.a={root: x, wieght: 1}"], r"wieght=1: no such key\. Did you mean data\.sources"),
    (["data=mix", "data.sources=5"], r"data\.sources=5: must be named entries"),
    (["data=mix", "data.sources.a=5"], r"data\.sources\.a=5: a section, not a value"),
    (["data=mix", "data.sources={a b: {root: x, weight: 1}}"], r"data\.sources\.a b: a name has only letters"),
    (["data=mix", "data.sources={v1.5: {root: x, weight: 1}}"], r"data\.sources\.v1\.5: a name has only letters"),
    (["data=mix", "data.sources.a={root: x, weight: 1, text_key: y}"],
     r"a\.text_key=y: would be ignored: data\.sources\.a\.source=tokens\. Leave it out"),
    (["data=mix", "data.root=x", "data.sources.a={root: x, weight: 1}"], r"data\.root=x: would be ignored"),
    (["data=sample", "data.sources.a={root: x, weight: 1}"], r"\.a\.root=x: would be ignored: data=sample"),
    (["data=mix", "data.sources.a={root: x, weight: 1}", "eval.sets.a={root: y}"], r"data\.sources\.a is ev"),
])  # fmt: skip
def test_a_mistake_in_a_mixture_is_named(given, expected):
    with pytest.raises(ConfigError, match=expected):
        load(["scale=tiny", "logger=jsonl", *given])


@pytest.mark.parametrize(("given", "said"), [
    ("data.sources.web={root: ROOT, source: local, weight: 1, train_files: no*}",
     r"data\.sources\.web\.train_files=no\* .* Set data\.sources\.web\.root to"),
    ("data.sources.web={root: ROOT/none, source: local, weight: 1}",
     r"^data\.sources\.web\.root=.*/none: no such folder\. .* or data\.sources\.web\.train_files"),
    ("data.sources.web={root: ROOT, source: local, weight: 1, train_files: a.jsonl, text_key: txt}",
     r"a\.jsonl: document 0 \(line 1\) has no text 'txt': .* Set data\.sources\.web\.text_key to"),
    ("eval.sets.web={root: ROOT/none, source: local}",
     r"^eval\.sets\.web\.root=.*/none: no such folder\. .*, or eval\.sets\.web\.validation_files"),
    ("eval.sets.web={root: ROOT, source: local, validation_files: a.jsonl, text_key: txt}",
     r"Set eval\.sets\.web\.text_key to"),
    ("eval.sets.web={root: ROOT, source: local, validation_files: blank.jsonl}",
     r"hold no text: blank\.jsonl\. Set eval\.sets\.web\.validation_files to files with text$"),
    ("data.sources.web={root: ROOT, source: tokens, weight: 1}", r"^data\.sources\.web: .* has no manifest\.json"),
    ("eval.sets.web={root: ROOT, source: tokens}", r"^eval\.sets\.web: .* has no manifest\.json"),
])  # fmt: skip
def test_an_error_of_a_text_names_its_own_keys(given, said, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines_of(f"text {i}" for i in range(20)))
    (tmp_path / "blank.jsonl").write_bytes(lines_of([""] * 20))
    mix = ["data=mix"] if given.startswith("data") else ["data=sample"]
    with pytest.raises(UserError, match=said):
        cfg = load(["scale=tiny", "logger=jsonl", *mix, given.replace("ROOT", str(tmp_path))])
        validation_sets(cfg, TOKENIZER)
        list(open_source(cfg).sources["web"].read("a.jsonl"))


def test_a_source_of_another_tokenizer_is_refused(run_mixed, tmp_path, corpus, capsys):
    made = main_of("prepare_data", "data=local", f"data.root={tmp_path}", "data.train_files=code.jsonl",
                   "--train-tokenizer", "60", "--output", tmp_path / "other")  # fmt: skip
    assert made == 0
    with pytest.raises(UserError, match="not the tokenizer"):
        run_mixed("run", f"data.sources.other={{root: {tmp_path}/other, weight: 1}}")
