from __future__ import annotations

import pytest

from engine.core.journal import Refusal
from engine.device.page_allocator import PageAllocator
from prefill_service.adder import Adder, Attempt, DecodeRow, Verdict, running_growth, shortest_first_limit
from prefill_service.policy import Policy, QueueOrder
from prefill_service.prefix_cache import PrefixCache
from prefill_service.request import PrefillRequest
from tests.helpers.golden import Json, cases, expand, fill_cache, make_request


def row_of(attempt: Attempt) -> Json:
    after = attempt.after
    accounts = {
        "rem_input": after.rem_input,
        "rem_chunk": after.rem_chunk,
        "total": after.total,
        "current": after.current,
    }
    return {
        "rid": attempt.request.task.request_id,
        "prefix_len": attempt.prefix,
        "extend_len": attempt.extend,
        "is_chunked": attempt.chunked,
        "result": attempt.verdict,
        "accounts": accounts,
    }


@pytest.mark.parametrize(("args", "want"), cases("admit"))
def test_golden_admit(args: Json, want: Json) -> None:
    page_size = args["page_size"]
    allocator = PageAllocator(args["capacity"] // page_size)
    cache = PrefixCache(allocator)
    fill_cache(cache, allocator, args.get("cached_prefixes", []), page_size)
    queue = [make_request(spec, cache, page_size) for spec in args["requests"]]
    rows = []
    for spec in args.get("running", []):
        generated = len(expand(spec["out"]))
        tokens = len(expand(spec["ids"])) + generated - 1  # the last one has no KV yet
        allocator.allocate(-(-tokens // page_size), spec["rid"])
        rows.append(DecodeRow(spec["max_new"], generated, spec["ignore_eos"]))
    QueueOrder(Policy(args["policy"]), cache, page_size).sort(queue)
    assert [request.task.request_id for request in queue] == want["order"]
    adder = Adder(
        cache,
        allocator,
        page_size,
        max_prefill_tokens=args["max_prefill_tokens"],
        chunk_size=args.get("chunked_prefill_size"),
        max_requests=args.get("prefill_max_requests"),
        decodes=True,
        mixed=len(rows) if args.get("mixed_chunk") else 0,
        growth=running_growth(rows, args["new_token_ratio"]),
    )
    attempts = []
    for request in queue:
        request.observe(cache.match(request.keys), page_size)
        attempts.append(adder.admit(request))
        if attempts[-1].verdict is not Verdict.CONTINUE:
            break
    assert [row_of(attempt) for attempt in attempts] == want["rows"]
    assert cache.check_integrity() == len(adder.admitted), "each admitted request holds one lock, no other does"


@pytest.fixture
def allocator() -> PageAllocator:
    return PageAllocator(64)  # 1024 tokens


@pytest.fixture
def cache(allocator: PageAllocator) -> PrefixCache:
    return PrefixCache(allocator)


def prompts(cache: PrefixCache, **lengths: int) -> list[PrefillRequest]:
    """Requests by name and length, in pages of 16, that share nothing."""
    specs = [{"rid": name, "ids": [(i * 10_000, n)], "max_new": 1} for i, (name, n) in enumerate(lengths.items())]
    return [make_request(spec, cache, 16) for spec in specs]


def run(adder: Adder, queue: list[PrefillRequest]) -> list[tuple[str, int, bool]]:
    """Admit until the first refusal; (name, tokens, chunked) of the admitted."""
    for request in queue:
        if adder.admit(request).verdict is not Verdict.CONTINUE:
            break
    return [(a.request.task.request_id, a.extend, a.chunked) for a in adder.admitted]


@pytest.mark.parametrize(
    ("policy", "want"),
    [
        (Policy.FCFS, [("a", 80, True)]),
        (Policy.SHORTEST, [("b", 16, False), ("d", 32, False), ("c", 32, True)]),
    ],
)
def test_worked_example(
    cache: PrefixCache, allocator: PageAllocator, policy: Policy, want: list[tuple[str, int, bool]]
) -> None:
    queue = prompts(cache, a=160, b=16, c=48, d=32)
    QueueOrder(policy, cache, 16).sort(queue)
    adder = Adder(cache, allocator, 16, max_prefill_tokens=128, chunk_size=96, mixed=8)
    assert run(adder, queue) == want


def test_a_refusal_changes_nothing(cache: PrefixCache, allocator: PageAllocator) -> None:
    fill_cache(cache, allocator, [[(0, 64)]], 16)
    (request,) = prompts(cache, a=1100)
    request.observe(cache.match(request.keys), 16)
    adder = Adder(cache, allocator, 16, max_prefill_tokens=4096)
    attempt = adder.admit(request)
    assert (attempt.prefix, attempt.wanted, attempt.extend, attempt.verdict) == (64, 1036, 0, Verdict.NO_TOKEN)
    assert attempt.before == attempt.after == adder.accounts()
    assert (request.computed, request.end, cache.protected, cache.check_integrity()) == (0, 0, 0, 0)


@pytest.mark.parametrize(("uncached", "fits"), [(526, True), (527, False)])
def test_what_a_request_locks_is_not_room_for_it(
    cache: PrefixCache, allocator: PageAllocator, uncached: int, fits: bool
) -> None:
    """Of 1024 tokens 480 are its own prefix, so 544 are left; it needs a page and a token more than it computes."""
    fill_cache(cache, allocator, [[(0, 480)], [(5000, 32)]], 16)
    (request,) = prompts(cache, a=480 + uncached)
    request.observe(cache.match(request.keys), 16)
    attempt = Adder(cache, allocator, 16, max_prefill_tokens=4096).admit(request)
    assert (attempt.prefix, attempt.wanted, attempt.extend) == (480, uncached, uncached if fits else 0)


def test_the_first_prompt_may_exceed_the_input_budget_when_prompts_are_not_cut(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    adder = Adder(cache, allocator, 16, max_prefill_tokens=64)
    assert run(adder, prompts(cache, a=200, b=16)) == [("a", 200, False)]


def test_a_continuation_goes_on_to_a_page_boundary(cache: PrefixCache, allocator: PageAllocator) -> None:
    long, short = prompts(cache, a=300, b=16)
    long.computed = long.end = 96
    adder = Adder(cache, allocator, 16, max_prefill_tokens=256, chunk_size=100)
    assert adder.proceed(long).extend == 96
    assert adder.continuation is long
    assert adder.admit(short).verdict is Verdict.OTHER, "4 tokens of the chunk are left, less than a page"
    long.computed = long.end
    adder = Adder(cache, allocator, 16, max_prefill_tokens=256, chunk_size=128)
    last = adder.proceed(long)
    assert (last.extend, last.chunked, adder.continuation) == (108, False, None)
    assert run(adder, [short]) == [("a", 108, False), ("b", 16, False)]


def test_a_continuation_takes_what_memory_there_is_and_else_stalls(
    cache: PrefixCache, allocator: PageAllocator
) -> None:
    (request,) = prompts(cache, a=300)
    request.computed = request.end = 96
    allocator.allocate(61, "others")
    adder = Adder(cache, allocator, 16, max_prefill_tokens=256, chunk_size=128)
    assert adder.proceed(request).extend == 48
    allocator.allocate(3, "others")
    adder = Adder(cache, allocator, 16, max_prefill_tokens=256, chunk_size=128)
    attempt = adder.proceed(request)
    assert (attempt.extend, attempt.verdict, adder.continuation) == (0, Verdict.NO_TOKEN, request)


def test_a_second_chunk_is_not_opened_while_one_is_pending(cache: PrefixCache, allocator: PageAllocator) -> None:
    long, other, small = prompts(cache, a=300, b=100, c=16)
    long.computed = long.end = 96
    adder = Adder(cache, allocator, 16, max_prefill_tokens=256, chunk_size=96)
    adder.proceed(long, limit=32)
    assert adder.admit(small).verdict is Verdict.CONTINUE
    refused = adder.admit(other)
    assert (refused.verdict, refused.refusal) == (Verdict.OTHER, Refusal.CUT)
    assert adder.continuation is long


@pytest.mark.parametrize(
    ("left", "budget", "limit"),
    [
        (500, 96, 48),  # b takes 16 and c 32; d would leave less than a page
        (500, 160, 64),  # d's 48 fit too
        (30, 96, 80),  # c has no less to do than the continuation
        (10, 96, None),  # nobody is shorter
        (500, 31, None),  # not two pages
        (500, 32, 16),
    ],
)
def test_a_continuation_leaves_room_for_shorter_prompts(
    cache: PrefixCache, left: int, budget: int, limit: int | None
) -> None:
    queue = prompts(cache, b=12, c=30, d=48, e=200)
    assert shortest_first_limit(queue, left, budget, 16) == limit


def test_growth_of_running_rows() -> None:
    rows = [DecodeRow(100, 20), DecodeRow(100, 20, ignore_eos=True), DecodeRow(9000, 0)]
    assert running_growth(rows, 0.5) == 40 + 80 + 2048
