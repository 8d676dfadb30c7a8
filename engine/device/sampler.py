"""From logits to tokens. What a row draws depends on its logits, parameters, seed and token index alone.

Each id has a random number of its own, made from (seed, index, id) by a counter-based generator, and the ids race: the
one that comes first by its number and its weight is drawn. So a request draws the same tokens whatever it is batched
with, and goes on drawing them on another node, though the last bits of logits differ between batch sizes and machines:
when two distributions are d apart (total variation), they draw apart with a probability of 2d / (1 + d) at most, and
nothing that does not know both can do better (Daliri, Musco and Suresh 2024, arXiv:2408.07978; ADR-0009).

Order of work on a row, each step on the result of the one before:

1. repetition penalty r on every id of prompt and output: x / r when x > 0, else x * r
   (Keskar et al. 2019, arXiv:1909.05858, section 4.1, in its sign-aware form).
2. frequency f and presence p on every id put out c > 0 times: x - c * f - p (OpenAI API reference).
3. forbidden ids: -inf.
4. temperature t: the highest x when t is 0, else weights proportional to exp(x / t).
5. top_k: the k heaviest (Fan et al. 2018, arXiv:1805.04833).
6. top_p: the fewest heaviest whose share of what top_k left reaches top_p (Holtzman et al. 2019, arXiv:1904.09751).
7. min_p: those at least min_p times as heavy as the heaviest (Nguyen et al. 2024, arXiv:2407.01082).

Steps 5 to 7 each keep a head of the same ranking. Among equal weights, lower ids rank first.

8. the least E / w of the weights w that are left, each E from an exponential distribution of mean 1.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.core.sampling import SamplingParams

__all__ = ["Sample", "TokenHistory", "exponentials", "sample"]

Floats = npt.NDArray[np.float64]

_LEAST = 2.0**-54  # half a step of the uniform numbers: 0 becomes positive, and the order stays


@dataclass(frozen=True, slots=True)
class Sample:
    """A drawn token and its natural log probability under the raw logits, before penalties and filters."""

    token_id: int
    logprob: float


class TokenHistory:
    """The ids a sequence has shown so far and how often each was put out, for the penalties. O(1) a token."""

    __slots__ = ("_counts", "_ids", "_position")

    def __init__(self, token_ids: Sequence[int], outputs: int = 0):
        """Start from the prompt and, when resuming, its answer so far: the last `outputs` of `token_ids`."""
        self._ids = array("q")  # distinct, in order of first appearance
        self._counts = array("q")  # times put out, of each of them
        self._position: dict[int, int] = {}
        split = len(token_ids) - outputs
        assert 0 <= split <= len(token_ids)
        for token_id in token_ids[:split]:
            self._count(token_id, 0)
        for token_id in token_ids[split:]:
            self._count(token_id, 1)

    def append(self, token_id: int) -> None:
        """Count a token just put out."""
        self._count(token_id, 1)

    def _count(self, token_id: int, times: int) -> None:
        at = self._position.setdefault(token_id, len(self._ids))
        if at == len(self._ids):
            self._ids.append(token_id)
            self._counts.append(0)
        self._counts[at] += times

    def penalize(self, x: Floats, params: SamplingParams) -> None:
        """Apply steps 1 and 2 to the logits `x` ([V]) in place."""
        ids = np.array(self._ids, np.int64)
        counts = np.array(self._counts, np.int64)
        seen = x[ids]
        seen = np.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
        x[ids] = seen - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    indices: Sequence[int],
    forbidden: Sequence[Sequence[int]],
    histories: Sequence[TokenHistory | None],
) -> list[Sample]:
    """Draw one token for each row of `logits` ([L, V] float32); every other argument has L items.

    `indices` are the tokens' places in their answers. A history is needed where `params.needs_history`. A row
    without a finite logit yields its argmax and a log probability that is not a number.
    """
    if not params:
        return []
    token_ids = logits.argmax(-1).tolist()  # the first of equals
    rows = zip(params, indices, forbidden, histories, strict=True)
    for i, (row, index, banned, history) in enumerate(rows):
        if row.temperature > 0 or row.needs_history or banned:
            token_ids[i] = _choose(logits[i].cpu().numpy().astype(np.float64), row, index, banned, history)
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    logprobs = logits.gather(1, chosen).squeeze(1) - logits.logsumexp(-1)
    return [Sample(*pair) for pair in zip(token_ids, logprobs.tolist(), strict=True)]


def exponentials(seed: int, index: int, size: int) -> Floats:
    """The numbers above 0, exponentially distributed, that (seed, index) stands for: one for each of `size` ids.

    Made of the uniform numbers of Philox4x64-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
    """
    numbers = np.random.Generator(np.random.Philox(key=np.array([seed, index], np.uint64))).random(size)
    np.subtract(1, numbers, out=numbers)  # in place: new memory of this size costs as much as the computing
    np.log(numbers, out=numbers)
    return np.subtract(_LEAST, numbers, out=numbers)


def _choose(x: Floats, params: SamplingParams, index: int, banned: Sequence[int], history: TokenHistory | None) -> int:
    """All steps on logits `x` ([V]), which are overwritten."""
    if params.needs_history:
        assert history is not None
        history.penalize(x, params)
    x[[token_id for token_id in banned if token_id < len(x)]] = -np.inf
    best = int(x.argmax())
    if params.temperature == 0 or not np.isfinite(x[best]):
        return best
    # The maximum goes first, so that no temperature overflows and the heaviest weight is exactly 1.
    weights = np.exp((x - x[best]) / params.temperature)
    kept = _kept(weights, params)
    times = exponentials(params.seed, index, len(x))
    if kept is None:
        return int(np.divide(weights, times, out=times).argmax())
    return int(kept[(weights[kept] / times[kept]).argmax()])


def _kept(weights: Floats, params: SamplingParams) -> npt.NDArray[np.intp] | None:
    """Ascending ids that top_k, top_p and min_p leave, None for all."""
    size = len(weights)
    if 0 < params.top_k < size:
        head = torch.from_numpy(weights).topk(params.top_k).values.numpy()
        total = head.sum()
    elif params.top_p < 1 or params.min_p > 0:
        total = weights.sum()
        # Whatever lies below this could be dropped altogether and top_p would still be reached: no need to rank it.
        negligible = max((1 - params.top_p) * total / size, params.min_p)
        head = np.sort(weights[weights >= negligible])[::-1]
    else:
        return None
    count = len(head)
    if params.top_p < 1:
        count = min(count, int(np.searchsorted(np.cumsum(head), params.top_p * total)) + 1)
    count = min(count, int(np.count_nonzero(head >= params.min_p)))
    kept = np.flatnonzero(weights >= head[count - 1])
    if len(kept) > count:  # equals of the last one: the highest ids go
        equal = np.flatnonzero(weights[kept] == head[count - 1])
        kept = np.delete(kept, equal[count - len(kept) :])
    return kept
