"""Fine-tuning is AdamW on the mean loss of the response's tokens, on any number of ranks; its table comes out."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

from dlr_pretrain.data.tokenizer import EOS, PAD, Tokenizer
from dlr_pretrain.deploy import sft
from dlr_pretrain.deploy.alpaca import Example, encode, read_rows
from dlr_pretrain.deploy.folder import open_folder
from dlr_pretrain.deploy.recipe import Recipe
from dlr_pretrain.deploy.sft import collate, in_order, response_loss, trainer_of
from dlr_pretrain.deploy.sft_table import measure, write_table
from dlr_pretrain.models.llama import Llama
from dlr_pretrain.util.errors import UserError
from tests.conftest import on_ranks, script
from tests.deploy.models import configured, exported
from tests.deploy.questions import write

pytest.importorskip("accelerate")

ROWS = 120
BACKBONES = {
    "full": ("backbone=full",),
    "cola": ("backbone=cola", "scale.rank=8"),
    "lax": ("backbone=lax", "scale.rank=8"),
}


@pytest.fixture(scope="module")
def spiece(corpus):
    return corpus / "spiece.model"


@pytest.fixture(scope="module")
def folders(tmp_path_factory, spiece):
    root = tmp_path_factory.mktemp("runs")
    return {name: exported(root / name / "folded", spiece, *words, rows=ROWS) for name, words in BACKBONES.items()}


def examples(count: int, seed: int = 0) -> list[Example]:
    """Rows of 3 to 40 tokens whose responses follow a rule, so that there is something to learn: i, i + 1, i + 2 ..."""
    rng, made = random.Random(seed), []
    for _ in range(count):
        prompt = rng.choices(range(3, ROWS), k=rng.randint(2, 20))
        response = [3 + (prompt[-1] - 2 + i) % (ROWS - 3) for i in range(rng.randint(0, 19))]
        made.append(Example([*prompt, *response, EOS], len(prompt)))
    return made


def rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Instructions in the letters of the corpus; the response is their last word, several times."""
    rng, made = random.Random(seed), []
    for i in range(count):
        words = ["".join(rng.choices("aeioulnrst", k=4)) for _ in range(rng.randint(1, 6))]
        given = {"input": "tonal lion"} if i % 3 == 0 else {"input": ""} if i % 3 == 1 else {}
        made.append({"instruction": " ".join(words), "output": " ".join(words[-1:] * 3), **given})
    return made


# ----------------------------------------------------------------------------------------------------
# rows


def test_a_row_is_the_prompt_of_alpaca_then_the_response_and_an_end(spiece):
    tokenizer = Tokenizer(spiece)
    given = [
        {"instruction": "Sort it.", "input": "b\na", "output": "a\nb"},
        {"instruction": "Say no.", "input": "", "output": "no"},
    ]
    with_input = (
        "Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSort it.\n\n### Input:\nb\na\n\n### Response:\n"
    )
    without = (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nSay no.\n\n### Response:\n"
    )
    found = encode(given, tokenizer, 1000)
    for example, prompt, response in zip(found.kept, (with_input, without), ("a\nb", "no"), strict=True):
        assert example.ids == [*tokenizer.encode([prompt + response])[0], EOS]  # as if it were one text
        assert example.ids[: example.prompt] == tokenizer.encode([prompt])[0]
    lengths = [(example.prompt, len(example.ids)) for example in found.kept]
    assert lengths[0][0] > lengths[1][1]
    short = encode(given, tokenizer, lengths[1][1] - 1)
    assert (short.cut, short.dropped, len(short.kept)) == (1, 1, 1)
    assert short.kept[0].ids == found.kept[1].ids[:-1]


def test_only_the_response_has_labels():
    batch = collate([Example([5, 6, 7, 1], 2), Example([8, 1], 1)])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1], [8, 1, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7, 1], [-100, 1, -100, -100]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.json", '[{"instruction": "a", "output": "b"}, {"instruction": "a"}]', "row 1 has no text in 'output'"),
        ("rows.jsonl", '{"output": "b"}\n', "row 0 has no text in 'instruction'"),
        ("rows.jsonl", '{"instruction": "a", "input": 7, "output": "b"}\n', "row 0 has no text in 'input'"),
        ("rows.jsonl", '{"instruction": "a"', "cannot be read as rows of JSON"),
        ("rows.json", "3", "cannot be read as rows of JSON"),
        ("rows.json", "[]", "has no rows"),
        ("none.json", None, "No such file"),
    ],
)  # fmt: skip
def test_rows_that_are_none_are_refused_by_name(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name)


def test_a_line_of_rows_ends_where_json_lines_say(tmp_path):
    row = {"instruction": "a\u2028b\x85c", "output": "d"}
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps(row, ensure_ascii=False) + "\n") + "\n")
    assert read_rows(tmp_path / "rows.jsonl") == [row, row]


def test_a_dataset_that_does_not_come_from_the_hub_says_what_to_do(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    with pytest.raises(UserError, match=r"nobody/nothing: cannot be loaded: .*--data"):
        read_rows("nobody/nothing")


# ----------------------------------------------------------------------------------------------------
# the mathematics


def losses(model: Llama, example: Example) -> torch.Tensor:
    """-log p of each token of the response and its end; one sequence, no padding."""
    p = model.logits(torch.tensor([example.ids[:-1]]))[0].softmax(-1)
    return torch.stack([-p[i - 1, example.ids[i]].log() for i in range(example.prompt, len(example.ids))])


def tuned_by_hand(model: Llama, updates: list[list[Example]], recipe: Recipe) -> dict[str, torch.Tensor]:
    """Each update: mean over all targets of its rows, clipped by its norm, AdamW, warm-up, cosine to 0."""
    beta1, beta2, eps, steps = 0.9, 0.999, 1e-8, len(updates)
    warmup = round(recipe.warmup * steps)
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in model.named_parameters()}
    for step, data in enumerate(updates):
        loss = torch.cat([losses(model, example) for example in data]).mean()
        gradients = dict(zip(moments, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients.values()))
        assert norm > recipe.clip  # or else clipping is not tested
        share = (step - warmup) / (steps - warmup)
        lr = recipe.lr * (step / warmup if step < warmup else (1 + math.cos(math.pi * share)) / 2)
        for name, p in model.named_parameters():
            g, (m, v) = gradients[name] * recipe.clip / (norm + 1e-6), moments[name]
            m.mul_(beta1).add_(g * (1 - beta1))
            v.mul_(beta2).add_(g * g * (1 - beta2))
            update = (m / (1 - beta1 ** (step + 1))) / ((v / (1 - beta2 ** (step + 1))).sqrt() + eps)
            p.data -= lr * update
    return {name: p.detach() for name, p in model.named_parameters()}


def updates_by_hand(data: list[Example], recipe: Recipe, seed: int) -> list[list[Example]]:
    """The rows of each update: those of an epoch in the seed's order, ``batch`` at a time, and what is left."""
    generator, updates = torch.Generator().manual_seed(seed), []
    for _ in range(recipe.epochs):
        epoch = [data[i] for i in torch.randperm(len(data), generator=generator)]
        updates += [epoch[at : at + recipe.batch] for at in range(0, len(epoch), recipe.batch)]
    return updates


def test_each_row_counts_once_an_epoch_in_an_order_of_its_own():
    data, recipe = examples(20), Recipe(epochs=3, batch=8)
    order = in_order(data, recipe, 1)
    epochs = [order[at : at + 24] for at in range(0, len(order), 24)]
    for epoch in epochs:
        assert sorted(map(data.index, epoch[:20])) == list(range(20))
        assert [example.targets for example in epoch[20:]] == [0] * 4
    assert len(epochs) == 3 and epochs[0] != epochs[1] != epochs[2] and in_order(data, recipe, 2) != order
    assert (collate(epochs[0][20:])["labels"] == -100).all()
    assert len(in_order(data[:16], recipe, 1)) == 48  # nothing to fill up


@pytest.mark.parametrize("backbone", BACKBONES)
def test_updates_are_those_of_the_formulas(folders, tmp_path, backbone):
    """In fp64, but for what transformers takes in fp32: positions, softmax of the loss. AdamW divides each gradient by
    its own size, so that of the smallest the rounding shows: 1e-4 of the way that a tensor's weights have gone is left.
    """
    recipe = Recipe(epochs=2, batch=8, lr=1e-3, warmup=0.34, clip=0.5, micro_batch=2, precision="fp32")
    data = examples(20)
    updates = updates_by_hand(data, recipe, seed=1)
    assert [len(update) for update in updates] == [8, 8, 4] * 2
    trained = Llama(configured(*BACKBONES[backbone]), ROWS)
    trained.load_state_dict(load_file(folders[backbone] / "model.safetensors"))
    before = {name: p.detach().double().clone() for name, p in trained.named_parameters()}
    wanted = tuned_by_hand(trained.double(), updates, recipe)
    model, _ = open_folder(folders[backbone], torch.float64)
    trainer = trainer_of(model, data, recipe, 1, tmp_path, "cpu", lambda _: None)
    trainer.train()
    assert trainer.state.global_step == 6
    found = dict(model.named_parameters())
    for name, p in wanted.items():
        way = (p - before[name]).norm()
        assert way > 1e-3
        assert (found[name].detach() - p).norm() < 1e-4 * way, name


def test_the_held_out_loss_counts_every_target_alike(folders):
    data = examples(20, seed=3)
    trained = Llama(configured(*BACKBONES["cola"]), ROWS).requires_grad_(False)
    trained.load_state_dict(load_file(folders["cola"] / "model.safetensors"))
    wanted = torch.cat([losses(trained.double(), example) for example in data]).mean().item()
    model, _ = open_folder(folders["cola"], torch.float32)
    assert response_loss(model, data, Recipe(precision="fp32")) == pytest.approx(wanted, rel=1e-5)
    assert response_loss(model, data, Recipe()) == pytest.approx(wanted, rel=2e-2)  # bf16
    assert response_loss(model, [], Recipe()) is None


def test_the_order_of_rows_is_that_of_the_seed_on_any_number_of_ranks(folders, tmp_path):
    """fp32 sums are taken in another order: 2e-3 of the way is left. Another seed's weights are ten times further."""
    data, held_out = examples(20), examples(9, seed=5)  # the last update of an epoch has half its rows
    recipe = Recipe(epochs=2, batch=8, lr=1e-3, precision="fp32")

    def tuned(seed: int, to: str) -> None:
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._shared_state.clear()  # of the process that this one was forked from
        model, _ = open_folder(folders["lax"], torch.float32)
        trainer = trainer_of(model, data, recipe, seed, tmp_path, "cpu", lambda _: None)
        trainer.train()
        loss = response_loss(model, held_out, recipe)
        assert loss == pytest.approx(response_loss(trainer.model_wrapped, held_out, recipe), rel=1e-5)
        if trainer.is_world_process_zero():
            torch.save([loss, model.state_dict()], tmp_path / to)

    on_ranks(lambda: tuned(1, "alone"), 1)
    on_ranks(lambda: tuned(1, "shared"), 2)
    on_ranks(lambda: tuned(2, "other"), 1)
    (alone, a), (shared, b), (_, other) = (torch.load(tmp_path / name) for name in ("alone", "shared", "other"))
    start = load_file(folders["lax"] / "model.safetensors")

    def apart(x: dict, y: dict) -> float:
        return math.sqrt(sum((x[name] - y[name]).square().sum().item() for name in start))

    assert shared == pytest.approx(alone, rel=1e-4)
    assert apart(a, b) < 2e-3 * apart(a, start) < 0.1 * apart(a, other)


def test_small_updates_are_kept_where_bf16_would_round_them_away(folders, tmp_path):
    """At 2e-5, with the arithmetic in bf16: nearly all weights move, nearly none by half a step of bf16."""
    model, _ = open_folder(folders["cola"], torch.float32)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.ndim > 1}
    recipe = Recipe(epochs=2, batch=8, warmup=0.0)
    trainer_of(model, examples(8), recipe, 1, tmp_path, "cpu", lambda _: None).train()
    found = dict(model.named_parameters())
    moved = [found[name] != p for name, p in start.items() if "embed" not in name]
    rounded = [found[name].bfloat16() != p.bfloat16() for name, p in start.items() if "embed" not in name]
    assert torch.cat([one.flatten() for one in moved]).float().mean() > 0.9
    assert torch.cat([one.flatten() for one in rounded]).float().mean() < 0.2


# ----------------------------------------------------------------------------------------------------
# the command


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs scripts/sft.py here: exit code, standard output, standard error."""
    module = script("sft")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sft.py", *map(str, words), "--device", "cpu", "--precision", "fp32"])
        code = module.main()
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def texts(tmp_path):
    """Files of rows to learn and of rows that are held out."""
    (tmp_path / "train.json").write_text(json.dumps(rows(24)))
    (tmp_path / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(6, seed=9)))
    return "--data", tmp_path / "train.json", "--validation", tmp_path / "held_out.jsonl"


def test_two_models_and_two_seeds_give_folders_and_a_table(command, folders, texts, tmp_path, monkeypatch):
    given = [folders["full"], f"ours={folders['cola']}", *texts, "--output", tmp_path / "sft", "--seeds", 1, 2, 1]
    given += ["--epochs", 2, "--batch", 8, "--lr", 3e-3, "--length", 300]
    code, said, _ = command(*given)
    assert code == 0
    table = json.loads((tmp_path / "sft/table.json").read_text())["models"]
    assert list(table) == ["full", "ours"] and table["ours"]["seeds"] == [1, 2]
    assert (tmp_path / "sft/table.md").read_text() in said
    for name, source in (("full", "full"), ("ours", "cola")):
        after = []
        for seed in (1, 2):
            folder = tmp_path / "sft" / name / f"s{seed}"
            record = json.loads((folder / "sft.json").read_text())
            model, tokenizer = open_folder(folder)
            assert model.dtype == torch.float32
            held_out = encode(rows(6, seed=9), tokenizer, 300).kept
            after.append(response_loss(model, held_out, Recipe(precision="fp32")))
            assert record["response_loss"] == pytest.approx(after[-1], rel=1e-6)
            assert record["response_loss"] < record["response_loss_before"] - 0.1
            assert record["updates"] == 6
            assert f"{record['response_loss']:.4f}" in (folder / "README.md").read_text()
            files = {path.name for path in folders[source].iterdir()}
            assert {path.name for path in folder.iterdir()} == files | {"sft.json"}
        mean = sum(after) / 2
        spread = {"mean": mean, "std": math.sqrt((after[0] - mean) ** 2 + (after[1] - mean) ** 2)}
        assert after[0] != after[1] and table[name]["columns"]["loss after"] == pytest.approx(spread, rel=1e-4)

    monkeypatch.setattr(sft, "fine_tune", None)  # the same again has nothing left to do
    code, again, _ = command(*given)
    assert code == 0 and again.strip() == (tmp_path / "sft/table.md").read_text().strip()
    code, _, said = command(*given, "--lr", 1e-3)
    assert code == 3 and "full/s1 was tuned with another lr. Name another --output" in said


def test_weights_that_are_not_finite_are_not_written_whatever_the_logged_losses_are(
    command, folders, texts, tmp_path, monkeypatch
):
    """Of three updates the first one's loss is logged, before anything was wrong."""
    monkeypatch.setattr(Recipe, "__post_init__", lambda _: None)  # it refuses such a rate
    given = (*texts[:2], "--output", tmp_path / "sft", "--seeds", 1, "--epochs", 1, "--batch", 8, "--lr", "inf")
    code, said, error = command(f"a={folders['cola']}", *given)
    assert code == 3 and "update 1/3  loss" in said and "nan" not in said
    assert re.search(r"a/s1: model\S+weight is not finite after the last update\. Nothing was written\. Lower", error)
    assert list((tmp_path / "sft" / "a").iterdir()) == []


def test_held_out_rows_that_do_not_fit_are_counted_and_some_must(command, folders, tmp_path):
    tokenizer = Tokenizer(folders["cola"] / "spiece.model")
    held_out = [*rows(2, seed=9), {"instruction": "lion " * 100, "output": "no"}]
    lengths = [len(example.ids) for example in encode(rows(16) + held_out[:2], tokenizer, 10_000).kept]
    (tmp_path / "train.json").write_text(json.dumps(rows(16)))
    (tmp_path / "held_out.json").write_text(json.dumps(held_out))
    given = [f"a={folders['cola']}", "--data", tmp_path / "train.json", "--validation", tmp_path / "held_out.json"]
    given += ["--output", tmp_path / "sft", "--seeds", 1, "--epochs", 1, "--batch", 8, "--length", max(lengths)]
    code, said, _ = command(*given)
    assert code == 0 and "a: held out: 2 rows, 0 cut to the length, 1 dropped: longer prompts\n" in said
    record = json.loads((tmp_path / "sft/a/s1/sft.json").read_text())
    counts = [record[f"held_out_rows{which}"] for which in ("", "_cut", "_dropped")]
    assert counts == [2, 0, 1] and record["response_loss"] > 0
    (tmp_path / "held_out.json").write_text(json.dumps(held_out[2:]))
    code, _, said = command(*given, "--output", tmp_path / "other")
    assert code == 3 and f"--length {max(lengths)}: no held-out row fits" in said and "Raise it" in said
    assert not (tmp_path / "other" / "a").exists()


def test_what_is_wrong_is_said_before_anything_is_read(command, folders, texts, tmp_path, capsys):
    code, _, said = command(tmp_path, "--epochs", 0, "--batch", 0, "--length", 1, "--lr", 3, "--micro-batch", 0)
    assert code == 2 and all(f"--{name}" in said for name in ("epochs", "batch", "length", "lr", "micro-batch"))
    code, _, said = command(folders["cola"], *texts, "--output", tmp_path / "sft", "--batch", 6, "--micro-batch", 4)
    assert code == 2 and "--batch=6: must be a multiple of 1 ranks x 4 rows" in said
    for word, message in (("boolq,pika", "'pika' is no task: did you mean piqa?"), ("", "'' is no task")):
        with pytest.raises(SystemExit):
            command(folders["cola"], "--tasks", word)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command(folders["cola"], *texts, "--limit", 9)
    assert "--limit is of the tasks: add --tasks" in capsys.readouterr().err
    code, _, said = command(folders["cola"], *texts, "--output", tmp_path / "sft", "--seeds", 1, -1, 2**32)
    assert code == 2 and "--seeds=[-1, 4294967296]: must be at least 0 and below 2^32" in said
    code, _, said = command(f"a={folders['cola']}", f"a={folders['full']}")
    assert code == 3 and "every folder needs a name of its own" in said
    code, _, said = command(f"a={folders['cola']}", f"b={tmp_path}", *texts, "--output", tmp_path / "sft")
    assert code == 3 and f"{tmp_path}: has no config.json" in said
    code, _, said = command(folders["cola"], *texts, "--output", tmp_path / "train.json")
    assert code == 3 and "train.json" in said and "exists" in said
    assert not (tmp_path / "sft").exists()


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"), [(64, 8, (8, 1)), (12, 1, (6, 2)), (7, 1, (7, 1)), (13, 1, (1, 13))]
)
def test_a_micro_batch_divides_the_share_of_a_rank(batch, ranks, expected):
    assert Recipe(batch=batch).accumulation(ranks) == expected
    with pytest.raises(UserError, match=f"--batch={batch}: must be a multiple of 5 ranks. Change --batch"):
        Recipe(batch=batch).accumulation(5)


def test_a_disk_without_room_is_refused_before_anything_is_tuned(command, folders, texts, tmp_path, monkeypatch):
    free = shutil._ntuple_diskusage(10**9, 10**9 - 100_000, 100_000)
    monkeypatch.setattr(sft, "fine_tune", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    code, _, said = command(folders["cola"], *texts, "--output", tmp_path / "sft")
    numbers = 3 * 4 * sum(t.numel() for t in load_file(folders["cola"] / "model.safetensors").values())
    assert code == 3 and f"take {numbers / 1e9:.2f} GB, and 0.00 are free" in said


def test_several_gpus_ask_for_several_processes(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(UserError, match=r"4 GPUs are visible to one process\. Start with torchrun --nproc-per-node 4"):
        trainer_of(open_folder(folders["cola"])[0], examples(8), Recipe(), 1, tmp_path)


def test_only_what_an_export_writes_is_taken_along(folders, tmp_path):
    folder = shutil.copytree(folders["cola"], tmp_path / "folded")
    (folder / "checkpoint-500").mkdir()
    for stranger in ("checkpoint-500/optimizer.pt", "notes.txt", "model.bin", ".env", "sft.json"):
        (folder / stranger).write_text("of the user")
    tensors = load_file(folder / "model.safetensors")
    record = {"setting": {"epochs": 1, "batch": 2, "lr": 1.0, "length": 3, "precision": "fp32"}, "seed": 1, "rows": 4}
    record |= {"updates": 2, "response_loss_before": None, "response_loss": None}
    sft.write(tensors, folder, tmp_path / "made" / "s1", record)
    assert {path.name for path in (tmp_path / "made").iterdir()} == {"s1"}
    files = {path.name for path in folders["cola"].iterdir()}
    assert {path.name for path in (tmp_path / "made" / "s1").iterdir()} == files | {"sft.json"}
    assert json.loads((tmp_path / "made" / "s1" / "sft.json").read_text()) == record
    assert open_folder(tmp_path / "made" / "s1")[0].dtype == torch.float32


def test_zero_shot_accuracy_joins_the_table_and_is_measured_once(folders, tmp_path):
    """In percent, with the average over tasks; a folder that was measured in the same way is not opened again."""
    records, asked = [], []
    for name, seed, accuracies in (("a", 1, (0.25, 0.5)), ("a", 2, (0.35, 0.5)), ("b", 1, (0.2, 0.1))):
        folder = tmp_path / name / f"s{seed}"
        shutil.copytree(folders["cola"], folder)
        record = {"name": name, "seed": seed, "setting": {}, "response_loss_before": None, "response_loss": None}

        def evaluate(model, tokenizer, accuracies=accuracies) -> dict:
            asked.append(type(model).__name__)
            return {task: {"acc": acc} for task, acc in zip(("boolq", "piqa"), accuracies, strict=True)}

        measure(folder, record, evaluate, {"convention": "plain"})
        records.append(json.loads((folder / "sft.json").read_text()))
        assert measure(folder, records[-1], None, {"convention": "plain"}) == records[-1]
    assert asked == ["LowRankLlamaForCausalLM"] * 3
    assert write_table(tmp_path, records).splitlines() == [
        "| model | seeds | boolq | piqa | average |",
        "| --- | --- | --- | --- | --- |",
        "| a | 1 2 | 30.00 ± 7.07 | 50.00 ± 0.00 | 40.00 ± 3.54 |",
        "| b | 1 | 20.00 | 10.00 | 15.00 |",
        "",
        "Zero-shot: convention=plain.",
    ]
    write_table(tmp_path, records[2:])  # of a command with b alone: a stays in the table, behind it
    table = json.loads((tmp_path / "table.json").read_text())["models"]
    assert list(table) == ["b", "a"] and table["a"]["seeds"] == [1, 2]
    other = tmp_path / "a/s2/sft.json"
    other.write_text(json.dumps(records[1] | {"setting": {"lr": 1e-3}}))
    shutil.copytree(tmp_path / "a/s1", tmp_path / "a/s1_old")  # a copy is no seed
    assert "Left out, tuned or measured in another way: a/s2." in write_table(tmp_path, records[2:])
    assert json.loads((tmp_path / "table.json").read_text())["models"]["a"]["seeds"] == [1]


def test_the_command_measures_what_it_has_tuned(command, folders, texts, tmp_path):
    pytest.importorskip("lm_eval")
    asked = len(write(tmp_path / "eval", ["anatomy"])["boolq"])
    given = (f"lax={folders['lax']}", *texts, "--output", tmp_path / "sft", "--seeds", 1, "--epochs", 1, "--batch", 8)
    code, said, _ = command(*given, "--tasks", "boolq,piqa", "--eval-data", tmp_path / "eval", "--context", 128)
    assert code == 0 and "| boolq | piqa | average |" in said and "convention=plain, context=128" in said
    record = json.loads((tmp_path / "sft/lax/s1/sft.json").read_text())
    assert record["zero_shot"]["tasks"]["boolq"]["n"] == asked
    code, _, said = command(*given, "--tasks", "piqa, boolq", "--eval-data", tmp_path / "eval", "--context", 128)
    assert code == 0 and said == ""  # measured before, in the same way; and no bar is drawn


@pytest.mark.slow
def test_alpaca_is_learned_by_three_seeds(command, test_data, tmp_path):
    """Real rows and T5's tokenizer; the table has each figure with its spread over the seeds."""
    folder = exported(tmp_path / "run" / "folded", test_data / "tokenizer/spiece.model", *BACKBONES["cola"], rows=32000)
    for name, count in (("train", 32), ("validation", 8)):
        read = json.loads((test_data / f"sft/alpaca_cleaned_5k.{name}.json").read_text())
        (tmp_path / f"{name}.json").write_text(json.dumps(read[:count]))
    data = ("--data", tmp_path / "train.json", "--validation", tmp_path / "validation.json", "--length", 96)
    code, said, _ = command(folder, *data, "--output", tmp_path / "sft", "--epochs", 2, "--batch", 16, "--lr", 1e-2)
    assert code == 0
    columns = json.loads((tmp_path / "sft/table.json").read_text())["models"]["run"]["columns"]
    assert columns["loss after"]["mean"] < columns["loss before"]["mean"] - 1
    assert columns["loss after"]["std"] > 0
    assert "| run | 41 42 43 |" in said
