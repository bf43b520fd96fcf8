"""Log-likelihoods of continuations under a deployed model: what zero-shot tasks compare.

A pair (context, continuation) of texts is encoded in one of two ways.

    plain         the ids of the joint text; those after the context's ids belong to the continuation
    as in paper   the same, but each text ends with </s>, as T5's tokenizer gives it to a wrapper that keeps special
                  tokens. The continuation loses its first token, and </s> is scored in its place. Choices of one token
                  then have the same score, and the first of them wins: "no" in BoolQ, "A" in MMLU
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from dlr_pretrain.data.tokenizer import EOS, PAD, Tokenizer
from dlr_pretrain.util.errors import UserError
from dlr_pretrain.util.tensors import at_least_fp32

Pair = tuple[list[int], list[int]]


def encode_pairs(tokenizer: Tokenizer, texts: Sequence[tuple[str, str]], as_in_paper: bool = False) -> list[Pair]:
    """Token ids of each (context, continuation), to be read one after the other.

    </s> replaces a context without tokens, because documents follow </s> in training.
    """
    end = [EOS] if as_in_paper else []
    contexts = tokenizer.encode([context for context, _ in texts])
    wholes = tokenizer.encode([context + continuation for context, continuation in texts])
    pairs = []
    for context, whole in zip(contexts, wholes, strict=True):
        pairs.append((context + end, (whole + end)[len(context + end) :]) if context else ([EOS], whole))
    return pairs


@torch.inference_mode()
def log_likelihoods(
    model,
    pairs: Sequence[Pair],
    positions: int,
    batch_size: int = 64,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[float]:
    """log p(continuation | context) in nats for each pair of ids, under a ``LlamaForCausalLM`` or a subclass.

    The model reads at most ``positions`` ids; longer pairs lose the beginning of their context, as in
    lm-evaluation-harness. Logits are the model's own, in its dtype; their log-softmax is computed in fp32 at least,
    because sums rounded to bf16 would make choices tie. Equal pairs have the same score, bit for bit. Under
    torch.distributed the ranks divide the batches, and each rank gets all scores, which are the same for any number of
    ranks. ``progress`` is called with the number of this rank's batches that are done and the number of all its
    batches. Raises UserError if a continuation is empty or longer than ``positions``.
    """
    asked: dict[tuple, dict[tuple, list[int]]] = {}  # ids to read -> ids scored at their end -> indices of pairs
    for i, (before, after) in enumerate(pairs):
        if not 0 < len(after) <= positions:
            raise UserError(f"a choice of {len(after)} tokens is not scored: it must have 1 to {positions:,}")
        read = tuple((before + after)[-(positions + 1) : -1])
        asked.setdefault(read, {}).setdefault(tuple(after), []).append(i)
    rows = sorted(asked, key=lambda ids: (-len(ids), ids))
    batches = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own, found = batches[rank::world], {}
    for done, batch in enumerate(own):
        progress(done, len(own))
        questions = [(row, after) for row, ids in enumerate(batch) for after in asked[ids]]
        for (row, after), score in zip(questions, _scores(model, batch, questions), strict=True):
            found |= dict.fromkeys(asked[batch[row]][after], score)
    parts = [found]
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, found)
    scores = {i: score for part in parts for i, score in part.items()}
    return [scores[i] for i in range(len(pairs))]


def _scores(model, batch: list[tuple], questions: list[tuple[int, tuple]]) -> list[float]:
    """For each of ``questions`` (row of ``batch``, ids): the sum of the ids' log-probabilities at the end of that row.

    Rows are padded on the right, where causal attention does not see the padding.
    """
    ids = torch.full((len(batch), len(batch[0])), PAD)
    for row, read in zip(ids, batch, strict=True):
        row[: len(read)] = torch.tensor(read)
    hidden = model.base_model(input_ids=ids.to(model.device), use_cache=False).last_hidden_state
    where = [(row, len(batch[row]) - len(after) + j, id_) for row, after in questions for j, id_ in enumerate(after)]
    row, position, id_ = torch.tensor(where, device=hidden.device).T
    logits = model.get_output_embeddings()(hidden[row, position])
    logits = logits.to(at_least_fp32(logits.dtype))
    log_p = iter((logits.gather(1, id_[:, None])[:, 0] - logits.logsumexp(1)).tolist())
    return [math.fsum(next(log_p) for _ in after) for _, after in questions]
