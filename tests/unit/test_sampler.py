import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.core.sampling import SamplingParams
from engine.device.sampler import TokenHistory, exponentials, sample

GREEDY = SamplingParams(temperature=0)


def draw(
    logits: Tensor,
    params: SamplingParams,
    index: int = 0,
    forbidden: Sequence[int] = (),
    history: TokenHistory | None = None,
) -> int:
    return sample(logits.unsqueeze(0), [params], [index], [forbidden], [history])[0].token_id


def random_logits(seed: int, size: int = 50, *, ties: bool = False) -> Tensor:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    return logits.round() if ties else logits


# --- the random numbers ---


def test_a_seed_stands_for_the_same_numbers_for_good() -> None:
    """Nodes of different builds go on with each other's answers."""
    four = [0.6580283337159085, 1.2878457391082423, 0.05156074013352511, 0.379982864468179]
    assert exponentials(7, 3, 4) == pytest.approx(four, rel=1e-12)  # logarithms differ in their last bit
    assert exponentials(2**64 - 1, 2**31, 1) == pytest.approx([0.4331032098233524], rel=1e-12)
    assert exponentials(7, 3, 100)[:4].tolist() == exponentials(7, 3, 4).tolist()


@pytest.mark.parametrize("along", ["index", "seed", "id"])
def test_numbers_are_exponential_and_uncorrelated(along: str) -> None:
    """Chi-square over 8 x 8 cells of neighbouring pairs. 63 degrees of freedom: above 120 has p < 2e-5."""
    if along == "id":
        numbers = exponentials(9, 5, 10_000)
    else:
        at = [(9, n) if along == "index" else (n, 5) for n in range(10_000)]
        numbers = np.concatenate([exponentials(*one, 1) for one in at])
    assert (numbers > 0).all()
    cells = (np.exp(-numbers) * 8).astype(int).reshape(-1, 2)
    counts = np.bincount(cells @ [8, 1], minlength=64)
    expected = 5_000 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 120


# --- greedy ---


def test_greedy_takes_the_first_of_the_highest() -> None:
    logits = torch.zeros(4, 49152)
    logits[0, [100, 7, 40000]] = 1.0
    logits[1, 49151] = 1.0
    logits[2, 0] = -1.0
    result = sample(logits, [GREEDY] * 4, [0] * 4, [()] * 4, [None] * 4)
    assert [s.token_id for s in result] == [7, 49151, 1, 0]


def test_logprob_is_that_of_the_raw_logits() -> None:
    logits = torch.stack([random_logits(i) for i in range(3)])
    filtered, penalized = SamplingParams(temperature=0.3, top_k=2), SamplingParams(temperature=0, repetition_penalty=2)
    history = TokenHistory([int(logits[2].argmax())])
    result = sample(logits, [GREEDY, filtered, penalized], [0, 5, 1], [()] * 3, [None, None, history])
    expected = logits.double().log_softmax(-1)
    for row, got in zip(expected, result, strict=True):
        assert got.logprob == pytest.approx(row[got.token_id].item(), abs=1e-5)


def test_nothing_to_sample_gives_nothing() -> None:
    assert sample(torch.zeros(0, 10), [], [], [], []) == []


def test_broken_logits_do_not_break_the_batch() -> None:
    logits = torch.stack([torch.full((5,), math.nan), random_logits(1, 5), torch.full((5,), -math.inf)])
    result = sample(logits, [SamplingParams(top_p=0.5)] * 3, [0] * 3, [()] * 3, [None] * 3)
    assert [math.isnan(s.logprob) for s in result] == [True, False, True]


# --- what a row draws depends on nothing else ---


def test_draws_do_not_depend_on_the_batch() -> None:
    rng = random.Random(0)
    rows = [random_logits(i) for i in range(12)]
    mixed = [(t, top_p, top_k) for t in (0, 0.7, 1.5) for top_p in (0.8, 1) for top_k in (0, 9)]
    params = [
        SamplingParams(temperature=t, top_p=top_p, top_k=top_k, seed=i) for i, (t, top_p, top_k) in enumerate(mixed)
    ]
    alone = [draw(row, param, index=i) for i, (row, param) in enumerate(zip(rows, params, strict=True))]
    order = rng.sample(range(12), 12)
    together = sample(torch.stack([rows[i] for i in order]), [params[i] for i in order], order, [()] * 12, [None] * 12)
    assert [s.token_id for s in together] == [alone[i] for i in order]


@pytest.mark.parametrize("params", [SamplingParams(seed=3), SamplingParams(seed=3, top_p=0.95)])
def test_last_bits_of_logits_rarely_matter(params: SamplingParams) -> None:
    """As they differ between batch sizes, chunks and machines, a hundred times coarser; over a large flat vocabulary.

    The two distributions are 6e-4 apart (total variation), so 0.25 of 200 draws are expected to differ, at the most.
    """
    logits = torch.randn(8_000, generator=torch.Generator().manual_seed(1))
    other = logits + torch.randn(8_000, generator=torch.Generator().manual_seed(2)) * 1.5e-3
    assert sum(draw(logits, params, index) != draw(other, params, index) for index in range(200)) <= 2


def test_seed_and_index_both_matter() -> None:
    logits = torch.zeros(1000)
    assert len({draw(logits, SamplingParams(seed=seed)) for seed in range(20)}) > 15
    assert len({draw(logits, SamplingParams(seed=1), index) for index in range(20)}) > 15


# --- the distribution ---


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0, top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_follow_the_filtered_distribution(params: SamplingParams) -> None:
    """Chi-square of 2,000 draws with fixed seed; the bound has p < 1e-5 for the 7 degrees of freedom there can be."""
    logits = random_logits(3, 8) / 2
    expected = slow_distribution(logits.tolist(), params)
    count = 2000
    seen = Counter(draw(logits, params, index) for index in range(count))
    assert set(seen) <= {i for i, p in enumerate(expected) if p > 0}
    assert sum((seen[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected) if p > 0) < 36


@pytest.mark.parametrize("ties", [False, True])
def test_the_first_in_the_race_is_drawn(ties: bool) -> None:
    """Every filter and penalty, in random mixtures, against the definitions written out slowly."""
    rng = random.Random(1)
    for case in range(400):
        size = rng.choice([1, 2, 5, 50])
        logits = random_logits(case, size, ties=ties)
        params = SamplingParams(
            temperature=rng.choice([0.2, 1.0, 5.0]),
            top_p=rng.choice([1.0, 0.95, 0.5, 0.01]),
            top_k=rng.choice([0, 1, 3, 1000]),
            min_p=rng.choice([0.0, 0.05, 0.5, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.3]),
            presence_penalty=rng.choice([0.0, 0.5]),
            frequency_penalty=rng.choice([0.0, -0.25]),
            seed=case,
        )
        prompt = rng.choices(range(size), k=rng.randint(0, 10))
        output = rng.choices(range(size), k=rng.randint(0, 10))
        forbidden = rng.sample(range(size), rng.randint(0, size - 1))
        x = slow_penalties(logits.tolist(), params, prompt, output)
        for token_id in forbidden:
            x[token_id] = -math.inf
        distribution = slow_distribution(x, params)
        times = exponentials(case, 17, size)
        arrivals = {i: times[i] / p for i, p in enumerate(distribution) if p > 0}
        expected = min(arrivals, key=lambda i: arrivals[i])
        assert draw(logits, params, 17, forbidden, TokenHistory(prompt + output, len(output))) == expected


def slow_penalties(x: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    x = list(x)
    for i in set(prompt + output):
        x[i] = x[i] / params.repetition_penalty if x[i] > 0 else x[i] * params.repetition_penalty
    for i in set(output):
        x[i] -= output.count(i) * params.frequency_penalty + params.presence_penalty
    return x


def slow_distribution(x: list[float], params: SamplingParams) -> list[float]:
    """The filters as one would say them: rank, keep a head, renormalize, each after the other."""
    top = max(x)
    p = [math.exp((value - top) / params.temperature) for value in x]
    ranking = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if params.top_k:
        ranking = ranking[: params.top_k]
    total = sum(p[i] for i in ranking)
    kept, share = [], 0.0
    for i in ranking:
        if share >= params.top_p * total and params.top_p < 1:
            break
        kept.append(i)
        share += p[i]
    kept = [i for i in kept if p[i] >= params.min_p * p[kept[0]]]
    total = sum(p[i] for i in kept)
    return [p[i] / total if i in kept else 0.0 for i in range(len(p))]


def test_a_large_vocabulary_is_cut_at_the_same_place() -> None:
    """The short cut for top_p must not lose a token of the nucleus, whatever its shape."""
    for seed, top_p in ((0, 0.1), (1, 0.5), (2, 0.999), (3, 0.9999999)):
        logits = random_logits(seed, 20_000) / (seed + 1)
        weights = logits.double().softmax(0).sort(descending=True)
        nucleus = int((weights.values.cumsum(0) < top_p).sum()) + 1
        lightest = int(weights.indices[nucleus - 1])
        kept = sample_all(logits, SamplingParams(top_p=top_p))
        assert len(kept) == nucleus
        assert lightest in kept


def sample_all(logits: Tensor, params: SamplingParams) -> set[int]:
    from engine.device.sampler import _kept

    weights = (logits.double() - logits.double().max()).div(params.temperature).exp().numpy()
    kept = _kept(weights, params)
    assert kept is not None
    return set(kept.tolist())


# --- forbidden tokens and penalties ---


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.tensor([9.0, 8.0, 1.0, 0.0])
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_p=0.1)):
        assert {draw(logits, params, index, forbidden=(0, 1, 77)) for index in range(50)} <= {2, 3}
    assert draw(logits, GREEDY, forbidden=(0,)) == 1
    assert logits.tolist() == [9.0, 8.0, 1.0, 0.0]  # the caller's logits are as they were


def test_penalties_turn_greedy_elsewhere() -> None:
    logits = torch.tensor([3.0, 2.0, -1.0])
    assert draw(logits, SamplingParams(temperature=0, repetition_penalty=2.0), history=TokenHistory([0])) == 1
    assert draw(logits, SamplingParams(temperature=0, presence_penalty=1.5), history=TokenHistory([0])) == 0
    assert draw(logits, SamplingParams(temperature=0, presence_penalty=1.5), history=TokenHistory([0], 1)) == 1
    assert draw(logits, SamplingParams(temperature=0, frequency_penalty=0.4), history=TokenHistory([0] * 3, 3)) == 1


def test_history_grown_by_token_equals_one_made_at_once() -> None:
    tokens = random.Random(2).choices(range(20), k=60)
    grown = TokenHistory(tokens[:25])
    for token_id in tokens[25:]:
        grown.append(token_id)
    resumed = TokenHistory(tokens, outputs=35)
    params = SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.1, seed=5)
    logits = random_logits(8, 20)
    for index in range(100):
        assert draw(logits, params, index, history=grown) == draw(logits, params, index, history=resumed)


def test_vanishing_temperature_is_greedy() -> None:
    for seed in range(20):
        logits = random_logits(seed, ties=True)
        params = SamplingParams(temperature=1e-9, top_k=1, seed=seed)
        assert draw(logits, params) == draw(logits, GREEDY)
