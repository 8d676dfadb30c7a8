"""The negotiation of data-parallel ranks: the test plays their threads, then they have threads, then real engines."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from engine.core.clock import ManualClock
from engine.core.messages import Abort, Granted, LinkUp, PeerJoined, Submit
from engine.core.types import NodeIdentity, PeerInfo, Role
from prefill_service.config import RankConfig
from prefill_service.delayer import Decision, Delayer, Row, Status
from prefill_service.loop import PrefillEngine
from prefill_service.ranks import DELAY_PAUSE_S, PATIENCE_S, Ranks, Seat, describe
from tests.helpers.engines import PAGE, Driven, prefill_engine
from tests.helpers.scheduling import Node, task
from tests.helpers.tiny_engine import RecordingLink
from tests.helpers.transfer_node import FilePool, LocalNode

READY = Row(prefillable=True, queue=1)
PASSES = 3


def make_ranks(max_delay_passes: int = PASSES) -> Ranks:
    return Ranks(Delayer(RankConfig(max_delay_passes=max_delay_passes), 2.0), None)


class Table:
    """Seats, and which of them was woken how often."""

    def __init__(self, count: int):
        self.ranks = make_ranks()
        self.woken = Counter[int]()
        self.seats = [self.ranks.join(self._waker(rank)) for rank in range(count)]

    def _waker(self, rank: int) -> Callable[[], None]:
        return lambda: self.woken.update([rank])

    def work(self) -> None:
        """Let every rank have work from now on: each has a decision to act on."""
        for seat in self.seats:
            seat.negotiate(READY)
        for seat in self.seats:
            seat.negotiate(READY)
        self.woken.clear()


def decided(answer: Decision | None) -> Decision:
    assert answer is not None
    return answer


def test_nobody_waits_for_ever_for_a_rank_that_hangs() -> None:
    clock = ManualClock()
    ranks = Ranks(Delayer(RankConfig(max_delay_passes=1), 2.0), None, clock)
    hanging, waiting = ranks.join(lambda: None), ranks.join(lambda: None)
    assert decided(hanging.negotiate(READY)).allow
    assert waiting.negotiate(READY) is None, "the other is at work"
    clock.advance(PATIENCE_S - 0.1)
    assert waiting.negotiate(READY) is None
    clock.advance(0.2)
    assert decided(waiting.negotiate(READY)).allow
    assert decided(waiting.negotiate(READY)).allow, "and from then on it is not waited for"
    assert hanging.negotiate(READY) is None, "until it is back: then they are together again"
    assert decided(waiting.negotiate(READY)) == decided(hanging.negotiate(READY))


def test_a_round_is_decided_once_all_that_have_work_have_come() -> None:
    table = Table(3)
    table.work()
    a, b, c = table.seats
    for seat in (a, b):
        assert seat.negotiate(READY) is None
    assert not table.woken
    last = decided(c.negotiate(READY))
    assert last.status is Status.ALL
    assert table.woken == Counter([0, 1]), "the last one need not be woken"
    assert a.negotiate(READY) is b.negotiate(READY) is last


def test_a_rank_without_work_is_not_waited_for_and_counts_as_that() -> None:
    table = Table(2)
    table.work()
    a, b = table.seats
    assert a.negotiate(READY) is None
    b.rest()
    assert table.woken == Counter([0])
    assert decided(a.negotiate(READY)).status is Status.MIXED
    assert decided(a.negotiate(READY)).delayed == 2
    assert not table.woken[1], "one that rests is not disturbed"


def test_a_round_begins_only_when_the_last_one_has_been_acted_on() -> None:
    table = Table(2)
    table.work()
    a, b = table.seats
    a.negotiate(READY)
    b.negotiate(READY)
    assert b.negotiate(READY) is None, "a does not yet know what the round before it has decided"
    assert a.negotiate(READY) is not None
    assert a.negotiate(READY) is not None, "now both are in the next one"
    assert b.negotiate(READY) is not None


def test_a_rank_that_waits_may_hand_in_a_newer_row() -> None:
    table = Table(2)
    table.work()
    a, b = table.seats
    a.negotiate(READY)
    a.negotiate(Row(prefillable=True, watermark_force=True))
    b.rest()
    assert decided(a.negotiate(READY)).allow, "by the row with the watermark"


def test_what_was_decided_before_a_rest_is_forgotten() -> None:
    table = Table(2)
    table.work()
    a, b = table.seats
    a.negotiate(READY)
    b.negotiate(READY)
    a.rest()
    assert a.negotiate(READY) is None, "this is another round, and b has not yet come"


@pytest.mark.parametrize("end", [Seat.leave, Seat.rest])
def test_nobody_waits_for_one_that_has_gone(end: Callable[[Seat], None]) -> None:
    table = Table(3)
    table.work()
    a, b, c = table.seats
    a.negotiate(READY)
    b.negotiate(READY)
    end(c)
    end(c)
    assert table.woken[0] + table.woken[1] == 2
    assert a.negotiate(READY) is b.negotiate(READY) is not None


def test_one_that_has_left_takes_no_part() -> None:
    table = Table(2)
    a, b = table.seats
    b.leave()
    assert b.negotiate(READY) is None
    assert decided(a.negotiate(READY)).status is Status.ALL, "a is alone"


def test_threads_all_get_through_and_agree() -> None:
    """Ranks work, rest and leave at random times. None may hang, and a round has one decision."""
    count, rounds = 4, 300
    ranks = make_ranks()
    alarms = [threading.Event() for _ in range(count)]
    seats = [ranks.join(alarm.set) for alarm in alarms]
    decisions: dict[int, list[Decision]] = defaultdict(list)
    all_there = threading.Barrier(count)

    def run(rank: int) -> None:
        numbers, seat, alarm = random.Random(rank), seats[rank], alarms[rank]
        seat.negotiate(READY)
        all_there.wait(10)
        for _ in range(numbers.randrange(rounds // 2, rounds)):
            if numbers.random() < 0.2:
                seat.rest()
                continue
            while (decision := seat.negotiate(READY)) is None:
                assert alarm.wait(10), "a rank hangs"
                alarm.clear()
            decisions[rank].append(decision)
        seat.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all(len(decisions[rank]) > rounds // 4 for rank in range(count))
    shared = Counter(id(decision) for made in decisions.values() for decision in made)
    assert max(shared.values()) == count, "one decision for all of them"


# ---- what a rank says of itself ----


def test_a_row_is_what_the_scheduler_has() -> None:
    node = Node(num_pages=10)
    assert describe(node.scheduler, None, 0, 0.0) == Row()
    node.submit(range(8), grant=False)
    first = node.submit(range(100, 112))
    node.clock.advance(3.0)
    node.submit(range(200, 208))
    assert describe(node.scheduler, 0.5, 7, node.clock() + 1.0) == Row(
        prefillable=True, watermark_force=True, running=0, max_prefill_batch=7, queue=2, waited=4.0, arrived=3
    )
    node.forward()
    row = describe(node.scheduler, 0.5, 2, node.clock())
    assert (row.prefillable, row.watermark_force, row.running, row.queue) == (False, False, 2, 0)
    node.submit(range(300, 304))
    row = describe(node.scheduler, 0.5, 2, node.clock())
    assert (row.prefillable, row.watermark_force) == (True, False), "5 of 10 pages are in use"
    assert describe(node.scheduler, 0.51, 2, node.clock()).watermark_force
    node.scheduler.finish(first.key)
    assert describe(node.scheduler, 0.3, 2, node.clock()).watermark_force, "cached pages are not in use"


def test_a_rank_without_memory_has_nothing_to_prefill() -> None:
    node = Node(num_pages=4)
    node.submit(range(10))
    node.forward()
    node.submit(range(100, 104))
    assert describe(node.scheduler, 1.0, 1, 0.0).prefillable
    assert node.scheduler.next_batch() is None, "a page is left, but the promise would be too large"
    node.allocator.allocate(node.allocator.available, "somebody")
    row = describe(node.scheduler, 1.0, 1, 0.0)
    assert (row.prefillable, row.watermark_force, row.queue) == (False, False, 1)


# ---- engines ----

CHUNK = 8


class Pair:
    """Two ranks of a node, the first with a link and a decode node to write to."""

    def __init__(self, first: Driven[PrefillEngine], second: Driven[PrefillEngine], d: LocalNode):
        self.first, self.second, self.d = first, second, d
        self.stopped: Driven[PrefillEngine] | None = None
        self.link = RecordingLink()
        peer = PeerInfo(d.identity, Role.DECODE, d.agent.memory, d.agent.metadata)
        for one in (first, second):
            one.tell(self.link, LinkUp(), PeerJoined(peer))

    def ask(self, rank: Driven[PrefillEngine], tokens: range, first_page: int) -> Submit:
        asked = Submit(task(list(tokens), page_size=PAGE))
        count = -(-len(tokens) // PAGE)
        pages = tuple(range(first_page, first_page + count))
        self.d.receiver.expect(asked.task.key, pages)
        rank.tell(self.link, asked, Granted(asked.task.key, self.d.identity, pages))
        return asked

    def at_rest(self) -> bool:
        """After another round of each that runs."""
        running = [rank for rank in (self.first, self.second) if rank is not self.stopped]
        busy = [rank.turn() for rank in running]
        return not any(busy) and all(rank.stats.idle for rank in running)

    def computed(self, asked: Submit) -> bool:
        return bool(self.link.tokens(asked.task.key))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    ranks = make_ranks()
    with ExitStack() as stack:
        first, second = (stack.enter_context(prefill_engine(24, ranks=ranks, chunk_size=CHUNK)) for _ in range(2))
        d = LocalNode(NodeIdentity.new("d"), FilePool(tmp_path / "pool", 24, first.device.pool.page_bytes))
        d.start_receiver()
        stack.callback(d.close)
        made = Pair(first, second, d)
        yield made
        first.until(made.at_rest, "both are at rest")


def test_a_lone_prompt_is_held_back_for_some_short_passes(pair: Pair) -> None:
    asked = pair.ask(pair.first, range(5, 11), 0)
    for _ in range(PASSES - 1):
        assert not pair.first.turn()
        assert pair.first.engine._pause_s == DELAY_PAUSE_S
        assert not pair.computed(asked)
    assert pair.first.turn()
    assert pair.computed(asked)


def test_prompts_on_both_ranks_are_computed_at_once(pair: Pair) -> None:
    here, there = pair.ask(pair.first, range(5, 11), 0), pair.ask(pair.second, range(50, 56), 4)
    pair.first.turn()
    pair.second.turn()
    assert not pair.computed(there), "the first did not know of it in time, and all do the same"
    pair.first.turn()
    pair.second.turn()
    pair.first.turn()
    assert pair.computed(here)
    assert pair.computed(there)


def test_a_continuation_is_not_held_back(pair: Pair) -> None:
    asked = pair.ask(pair.first, range(5, 5 + 3 * CHUNK), 0)
    for _ in range(PASSES - 1):
        assert not pair.first.turn()
    for _ in range(3):
        assert not pair.computed(asked)
        assert pair.first.turn()
    assert pair.computed(asked)


def test_one_that_waits_for_another_still_does_what_it_is_told(pair: Pair) -> None:
    asked, other = pair.ask(pair.first, range(5, 11), 0), pair.ask(pair.second, range(50, 56), 4)
    pair.second.turn()
    assert not pair.first.turn()
    assert not pair.first.turn()
    assert not pair.first.turn(), "the second rank is in the middle of a pass"
    assert pair.first.stats.waiting == 1
    pair.first.tell(pair.link, Abort(asked.task.key, "x"))
    assert not pair.first.turn()
    pair.second.until(lambda: pair.computed(other), "the second rank goes on alone")


def test_a_rank_that_has_stopped_holds_up_nobody(pair: Pair) -> None:
    asked = pair.ask(pair.first, range(5, 11), 0)
    pair.ask(pair.second, range(50, 56), 4)
    pair.second.turn()
    pair.first.turn()
    assert not pair.computed(asked)
    pair.stopped = pair.second
    pair.stopped.engine.stop()
    pair.first.until(lambda: pair.computed(asked), "the first rank is alone")
