"""Generates text with a deployed folder: prompts of any lengths in one batch, with the cache, as a stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from dlr_pretrain.data.tokenizer import EOS, PAD, Tokenizer
from dlr_pretrain.util.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How to choose new tokens, at most ``tokens`` for each prompt.

    ``temperature`` 0 takes the likeliest token. Otherwise each token is drawn, by ``seed``, from the likeliest tokens
    that hold ``top_p`` of the probability.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


@dataclass
class Generated:
    """Token ids of each row: its prompt in ``prompts``, and in ``new`` what was generated, with </s> if the row ended.

    ``first`` is the seconds until the first new tokens, ``seconds`` is the total.
    """

    prompts: list[list[int]]
    new: list[list[int]]
    first: float
    seconds: float

    def describe(self) -> str:
        """The speed of reading the prompts and of writing, over all rows."""
        read, written = sum(map(len, self.prompts)), sum(map(len, self.new))
        steps, rest = max(map(len, self.new)) - 1, self.seconds - self.first
        speed = (
            f", then {(written - len(self.new)) / rest:,.1f} tokens/s, {1e3 * rest / steps:.1f} ms each step"
            if steps
            else ""
        )
        return f"{read:,} prompt tokens, {written:,} new ones; the first after {self.first:.3f} s{speed}"


@dataclass
class _Clock:
    """A streamer for transformers, which puts the prompts first, then the ids of each step. It records the times."""

    tell: Callable[[list[int]], None]
    times: list[float] = field(default_factory=list)

    def put(self, ids: torch.Tensor) -> None:
        if self.times:
            self.tell(ids.tolist())
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate(
    model,
    tokenizer: Tokenizer,
    prompts: list[str],
    sampling: Sampling,
    tell: Callable[[list[int]], None] = lambda ids: None,
    use_cache: bool = True,
) -> Generated:
    """Continue each of ``prompts``, padded on the left into one batch.

    Each step calls ``tell`` with one new id of every row, which is PAD for a row that has ended. Raises UserError if a
    prompt has no token.
    """
    read = tokenizer.encode(prompts)
    for prompt, ids in zip(prompts, read, strict=True):
        if not ids:
            raise UserError(f"the prompt {prompt!r} has no tokens. Give it a word")
    longest = max(map(len, read))
    ids = torch.tensor([[PAD] * (longest - len(row)) + row for row in read])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in read])
    how = {"do_sample": False, "temperature": None, "top_p": None}
    if sampling.temperature > 0:
        how = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p}
    torch.manual_seed(sampling.seed)
    clock, start = _Clock(tell), time.perf_counter()
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=sampling.tokens,
            pad_token_id=PAD,
            eos_token_id=EOS,
            top_k=None,
            suppress_tokens=list(range(tokenizer.vocab_size, model.config.vocab_size)) or None,  # ids without a text
            use_cache=use_cache,
            streamer=clock,
            **how,
        )
    new = [_until_end(row) for row in found[:, longest:].tolist()]
    return Generated(read, new, clock.times[1] - start, clock.times[-1] - start)


def _until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(EOS) + 1] if EOS in ids else ids


def continuation(tokenizer: Tokenizer, prompt: list[int], new: list[int]) -> str:
    """The text that ``new`` adds to that of ``prompt``, with its leading space if it has one."""
    return tokenizer.decode(prompt + new)[len(tokenizer.decode(prompt)) :]


class Stream:
    """Writes the text of a single row as it grows: ``Stream(tokenizer, prompt, write)`` is a ``tell`` for ``generate``.

    Ids that are decoded one by one give another text (spaces belong to the next word), so each step decodes all ids.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: str, write: Callable[[str], None]):
        self.tokenizer, self.write = tokenizer, write
        self.prompt, self.new, self.shown = tokenizer.encode([prompt])[0], [], 0

    def __call__(self, ids: list[int]) -> None:
        self.new += ids
        text = continuation(self.tokenizer, self.prompt, self.new)
        self.write(text[self.shown :])
        self.shown = len(text)
