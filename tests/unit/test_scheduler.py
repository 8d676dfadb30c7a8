from __future__ import annotations

import pytest

from engine.core.errors import AlreadyExists, ConfigError, InvalidField
from engine.core.lifetime import LifetimeEvent
from engine.core.page_keys import page_keys
from prefill_service.adder import Verdict
from prefill_service.policy import Policy
from prefill_service.prefix_cache import Eviction
from prefill_service.request import RequestState
from prefill_service.scheduler import SendSpan
from tests.helpers.scheduling import PAGE, Node, state, task


def test_the_life_of_a_request() -> None:
    node = Node(chunk_size=8)
    request = node.submit(range(18), grant=False)
    assert state(request) is RequestState.BOOTSTRAP
    assert node.scheduler.next_batch() is None, "nothing is granted yet"
    node.clock.advance(1)
    assert node.scheduler.grant(request.key) is request
    node.clock.advance(1)

    batch, spans = node.forward()
    (row,) = batch.rows
    assert (row.request, row.start, row.end, row.is_last, row.admitted) == (request, 0, 8, False, True)
    assert len(row.pages) == 2
    assert spans == [SendSpan(request, 0, row.pages, False)]
    assert state(request) is RequestState.RUNNING

    node.forward()
    node.clock.advance(1)
    batch, spans = node.forward()
    (row,) = batch.rows
    assert (row.start, row.end, row.is_last, row.admitted) == (16, 18, True, False)
    assert spans == [SendSpan(request, 4, row.pages[4:], True)], "the last page is partly filled"
    assert state(request) is RequestState.IN_FLIGHT
    assert node.scheduler.next_batch() is None
    stats = node.scheduler.stats()
    assert (stats.protected, stats.held, stats.in_flight) == (4, 1, 1)

    node.clock.advance(1)
    assert node.scheduler.finish(request.key) is request
    assert state(request) is RequestState.ENDED
    assert node.scheduler.get(request.key) is None
    node.assert_idle()
    assert len(node.cache) == 4
    times = request.times
    assert (request.chunks, request.cached_tokens) == (3, 0)
    assert times.between(LifetimeEvent.ARRIVED, LifetimeEvent.GRANTED) == 1
    assert times.between(LifetimeEvent.GRANTED, LifetimeEvent.ADMITTED) == 1
    assert times.between(LifetimeEvent.ADMITTED, LifetimeEvent.CHUNK_DONE) == 1
    assert times.between(LifetimeEvent.CHUNK_DONE, LifetimeEvent.LAST_WRITE) == 2


def test_a_cached_prefix_is_named_at_admission_and_not_computed() -> None:
    node = Node()
    node.finish(node.submit(range(18)))
    request = node.submit(range(16), range(100, 106))
    batch, spans = node.forward()
    (row,) = batch.rows
    assert (row.start, row.end, row.admitted, request.cached_tokens) == (16, 22, True, 16)
    assert list(row.pages[:4]) == node.cache.pages(request.node)[:4]
    assert spans == [SendSpan(request, 4, tuple(request.pages[4:]), True)]


def test_a_prompt_that_is_cached_to_its_last_token_computes_one_page() -> None:
    node = Node()
    node.finish(node.submit(range(16)))
    request = node.submit(range(16))
    batch, spans = node.forward()
    assert (batch.rows[0].start, batch.rows[0].end, request.cached_tokens) == (12, 16, 12)
    assert spans[0].pages == tuple(node.cache.pages(request.node)[3:]), "the page computed again is the cached one"
    assert len(node.cache) == 4


def test_twins_in_one_batch_end_on_the_same_pages() -> None:
    node = Node()
    first, second = node.submit(range(17)), node.submit(range(17))
    _, spans = node.forward()
    assert spans[0].pages[:4] == spans[1].pages[:4]
    assert spans[0].pages[4] != spans[1].pages[4], "the partial page is each one's own"
    assert node.scheduler.stats().held == 2
    for request in (first, second):
        node.scheduler.finish(request.key)
    node.assert_idle()


def test_a_prompt_of_whole_pages_ends_with_all_pages_cached() -> None:
    node = Node()
    request = node.submit(range(16))
    _, (span,) = node.forward()
    assert len(span.pages) == 4
    assert node.scheduler.stats().held == 0
    node.finish(request)
    node.assert_idle()


def test_a_single_token() -> None:
    node = Node()
    request = node.submit(range(1))
    batch, (span,) = node.forward()
    assert (batch.tokens, len(span.pages), span.is_last) == (1, 1, True)
    node.finish(request)
    node.assert_idle()
    assert len(node.cache) == 0


def test_without_a_prefix_cache_pages_stay_private_and_are_still_sent_early() -> None:
    node = Node(prefix_cache=False, chunk_size=8)
    request = node.submit(range(18))
    spans = [node.forward()[1][0] for _ in range(3)]
    assert [(span.first, len(span.pages)) for span in spans] == [(0, 2), (2, 2), (4, 1)]
    assert node.scheduler.stats().held == 5
    node.finish(request)
    node.assert_idle()
    assert node.allocator.available == 64


def test_several_requests_share_a_forward_up_to_the_chunk() -> None:
    node = Node(chunk_size=16)
    a, b, c = node.submit(range(6)), node.submit(range(100, 120)), node.submit(range(200, 203))
    batch, _ = node.forward()
    assert [(row.request, row.start, row.end) for row in batch.rows] == [(a, 0, 6), (b, 0, 8)]
    batch, _ = node.forward()
    assert [(row.request, row.start, row.end) for row in batch.rows] == [(b, 8, 20), (c, 0, 3)]


def test_memory_is_taken_from_the_cache_when_free_pages_run_out() -> None:
    node = Node(num_pages=16)
    node.finish(node.submit(range(40)))
    kept = node.submit(range(8), grant=False)  # waits for its grant, and needs the first two pages
    request = node.submit(range(1000, 1035))
    node.forward()
    assert node.cache.match(kept.keys).depth == 2, "eviction starts at the tail of the chain"
    node.finish(request)
    node.scheduler.abort(kept.key)
    node.assert_idle()


def test_prefixes_of_waiting_requests_outlive_others() -> None:
    node = Node(num_pages=16)
    old, new = range(0, 16), range(500, 516)
    node.finish(node.submit(old, range(90, 91)))
    node.finish(node.submit(new, range(91, 92)))
    waiting = node.submit(old, range(92, 93), grant=False)
    request = node.submit(range(1000, 1036))
    node.forward()
    assert node.cache.match(waiting.keys).depth == 4, "the older prefix is wanted, so the newer one went"
    assert node.cache.match(page_keys(new, PAGE)).depth == 3
    node.finish(request)


def test_the_head_of_the_queue_keeps_its_prefix_longest() -> None:
    node = Node(num_pages=16, max_batch_requests=1)
    first, second = range(0, 16), range(500, 516)
    node.finish(node.submit(first))
    node.finish(node.submit(second))
    running = node.submit(range(1000, 1036))
    waiting = [node.submit(prefix, range(90, 91)) for prefix in (first, second)]
    node.forward()
    assert [node.cache.match(request.keys).depth for request in waiting] == [4, 3]
    node.finish(running)


def test_reuse_counts_when_eviction_is_by_use() -> None:
    node = Node(num_pages=16, eviction=Eviction.LFU)
    node.finish(node.submit(range(16)))
    node.finish(node.submit(range(16), range(90, 91)))
    node.finish(node.submit(range(500, 516)))
    node.finish(node.submit(range(1000, 1036)))
    assert node.cache.match(page_keys(range(16), PAGE)).depth == 4, "used twice, if longer ago"


def test_requests_wait_while_memory_is_held_by_transfers() -> None:
    node = Node(num_pages=16)
    first = node.submit(range(40))
    node.forward()
    second = node.submit(range(100, 130))
    assert node.scheduler.next_batch() is None
    assert node.records[-1].attempts[0].verdict is Verdict.NO_TOKEN
    node.scheduler.check_integrity()
    node.scheduler.finish(first.key)
    node.finish(second)
    node.assert_idle()


def test_a_continuation_short_of_memory_stalls_the_pass_for_itself() -> None:
    node = Node(num_pages=16, chunk_size=16, policy=Policy.SHORTEST)
    long = node.submit(range(50))
    node.forward()
    shorts = [node.submit(range(i * 100, i * 100 + 5)) for i in (1, 2)]
    while node.allocator.available:  # the short ones are done, but not yet sent
        node.forward()
    assert (long.computed, [short.state for short in shorts]) == (48, [RequestState.IN_FLIGHT] * 2)
    tiny = node.submit(range(900, 901))
    assert node.scheduler.next_batch() is None, "no page for the last two tokens, and none is given to another"
    assert [attempt.verdict for attempt in node.records[-1].attempts] == [Verdict.NO_TOKEN]
    node.scheduler.check_integrity()
    node.scheduler.finish(shorts[0].key)
    batch, _ = node.forward()
    assert batch.rows[0].request is long
    node.scheduler.finish(shorts[1].key)
    for request in (long, tiny):
        node.finish(request)
    node.assert_idle()


def test_shortest_first_lets_short_prompts_past_a_long_one() -> None:
    node = Node(policy=Policy.SHORTEST, chunk_size=16)
    long = node.submit(range(100))
    node.forward()
    short = node.submit(range(200, 205))
    batch, _ = node.forward()
    assert [(row.request, row.end - row.start) for row in batch.rows] == [(long, 8), (short, 5)]


def test_priorities_order_the_queue_when_on() -> None:
    node = Node(priority_scheduling=True, max_batch_requests=1)
    node.submit(range(5))
    urgent = node.submit(range(10, 15), priority=5)
    batch, _ = node.forward()
    assert batch.rows[0].request is urgent


def test_priorities_are_ignored_or_refused_when_off() -> None:
    node = Node(max_batch_requests=1)
    first = node.submit(range(5))
    node.submit(range(10, 15), priority=5)
    assert node.forward()[0].rows[0].request is first
    with pytest.raises(InvalidField, match="priority is 5"):
        Node(refuse_priority=True).submit(range(5), priority=5)


def test_routing_keys_follow_what_is_in_progress() -> None:
    node = Node(policy=Policy.ROUTING_KEY, max_batch_requests=1)
    for key in ("a", "b", "a"):
        request = node.scheduler.submit(task([*range(5)], routing_key=key))
        node.scheduler.grant(request.key)
    first = node.forward()[0].rows[0].request
    second = node.forward()[0].rows[0].request
    assert [first.task.routing_key, second.task.routing_key] == ["a", "a"]


def test_eviction_by_priority_keeps_what_important_requests_used() -> None:
    node = Node(num_pages=16, eviction=Eviction.PRIORITY)
    node.finish(node.submit(range(16), priority=3))
    node.finish(node.submit(range(100, 116), priority=1))
    node.finish(node.submit(range(1000, 1040)))
    assert node.cache.match(page_keys(range(16), PAGE)).depth == 4
    assert node.cache.match(page_keys(range(100, 116), PAGE)).depth < 4


def test_submit_refuses_what_can_never_run() -> None:
    node = Node(num_pages=16)
    most = 16 * PAGE - PAGE - 2
    with pytest.raises(InvalidField, match=rf"token_ids is {most + 1}; allowed: 1 to {most} tokens"):
        node.submit(range(most + 1))
    with pytest.raises(InvalidField, match="token_ids is 0"):
        node.submit(range(0))
    with pytest.raises(InvalidField, match="page_keys is 5; allowed: one for each whole page of 4 tokens: 2"):
        node.scheduler.submit(task([*range(10)], page_size=2))
    request = node.submit(range(most))
    with pytest.raises(AlreadyExists):
        node.scheduler.submit(request.task)
    node.finish(request)
    node.assert_idle()


def test_a_chunk_smaller_than_a_page_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="at least the page size, 4"):
        Node(chunk_size=3)


def test_a_pool_that_holds_no_prompt_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="1 pages of 4 tokens"):
        Node(num_pages=1)


@pytest.mark.parametrize("granted", [False, True])
def test_abort_before_admission_ends_at_once(granted: bool) -> None:
    node = Node()
    request = node.submit(range(10), grant=granted)
    assert node.scheduler.abort(request.key) is request
    assert state(request) is RequestState.ENDED
    assert node.scheduler.abort(request.key) is None
    assert node.scheduler.grant(request.key) is None
    assert node.scheduler.finish(request.key) is None
    assert node.scheduler.next_batch() is None
    node.assert_idle()


@pytest.mark.parametrize("writes_end_first", [False, True])
def test_abort_during_a_forward_keeps_the_pages_until_it_ends(writes_end_first: bool) -> None:
    node = Node(chunk_size=8)
    request = node.submit(range(30))
    node.forward()
    batch = node.batch()
    node.scheduler.abort(request.key)
    assert state(request) is RequestState.RUNNING
    if writes_end_first:
        node.scheduler.finish(request.key)
        assert node.allocator.owned(request.key) == 2, "the forward is still writing them"
    assert node.scheduler.complete_forward(batch) == []
    if not writes_end_first:
        assert state(request) is RequestState.IN_FLIGHT
        node.scheduler.finish(request.key)
    assert state(request) is RequestState.ENDED
    node.assert_idle()
    assert node.cache.match(request.keys).depth == 4, "what was computed is good for others"


def test_abort_between_chunks_ends_the_continuation() -> None:
    node = Node(chunk_size=8)
    request, other = node.submit(range(30)), node.submit(range(100, 105))
    node.forward()
    node.scheduler.abort(request.key)
    assert state(request) is RequestState.IN_FLIGHT
    assert [row.request for row in node.forward()[0].rows] == [other]
    for ended in (request, other):
        node.scheduler.finish(ended.key)
    node.assert_idle()


def test_abort_in_flight_keeps_the_pages_until_the_writes_are_terminal() -> None:
    node = Node()
    request = node.submit(range(30))
    node.forward()
    assert node.scheduler.abort(request.key) is request
    assert (request.state, request.aborted) == (RequestState.IN_FLIGHT, True)
    assert node.scheduler.stats().protected == 7
    node.scheduler.finish(request.key)
    node.assert_idle()


def test_a_failed_forward_caches_nothing_and_costs_only_its_requests() -> None:
    node = Node(chunk_size=8)
    failing, waiting = node.submit(range(30)), node.submit(range(100, 105))
    node.forward()
    batch = node.batch()
    assert node.scheduler.abandon_forward(batch) == [failing]
    assert failing.aborted
    assert node.cache.match(failing.keys).depth == 2, "only the chunk that succeeded"
    node.scheduler.check_integrity()
    node.scheduler.finish(failing.key)
    node.finish(waiting)
    node.assert_idle()


def test_records_say_what_each_pass_saw_and_decided() -> None:
    node = Node(policy=Policy.LPM, prefix_match_queue_limit=2, chunk_size=8)
    assert node.scheduler.next_batch() is None
    assert node.records == [], "a pass with nothing to decide leaves none"
    node.clock.advance(5)
    requests = [node.submit(range(i * 100, i * 100 + 6)) for i in range(3)]
    node.batch()
    (record,) = node.records
    assert (record.number, record.time, record.waiting, record.bootstrap, record.in_flight) == (1, 5, 3, 0, 0)
    assert (record.policy, record.in_effect) == (Policy.LPM, Policy.FCFS)
    assert (record.batch_tokens, record.cached_tokens) == (6, 0)
    (attempt,) = record.attempts
    assert (attempt.request, attempt.wanted, attempt.extend) == (requests[0], 6, 6)
    assert (attempt.before.rem_chunk, attempt.after.rem_chunk, attempt.verdict) == (8, 0, Verdict.OTHER)


def test_stats_count_what_is_queued_and_done() -> None:
    node = Node(chunk_size=8)
    node.finish(node.submit(range(8)))
    node.submit(range(8), range(50, 60))
    node.submit(range(7), grant=False)
    node.forward()
    stats = node.scheduler.stats()
    assert (stats.requests_total, stats.computed_tokens_total, stats.cached_tokens_total) == (3, 16, 8)
    assert (stats.bootstrap, stats.waiting, stats.running) == (1, 0, 1)
    assert stats.queued_tokens == 2 + 3, "two of the continuation, and of the other what the cache lacks"
