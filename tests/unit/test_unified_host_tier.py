"""A host tier on a unified node: prompts evict each other's pages, and so do answers while they grow."""

from __future__ import annotations

from engine.core.messages import LinkUp, Submit
from engine.core.page_keys import page_keys
from engine.core.sampling import SamplingParams, StoppingParams
from engine.core.types import PrefillTask, RoomKey
from prefill_service.options import SchedulerConfig
from tests.helpers.engines import PAGE, unified_engine
from tests.helpers.models import prepared_tiny
from tests.helpers.reference import greedy
from tests.helpers.tiny_engine import RecordingLink
from unified_service.config import UnifiedOptions

ANSWER = 9


def test_answers_are_the_same_with_pages_that_were_away() -> None:
    """Five prompts of 30 tokens, two at a time, in 24 pages of 4. Admitted as if answers were short, so they evict."""
    prompts = [tuple(3 + (50 * i + 7 * j) % 250 for j in range(30)) for i in range(5)]
    options = UnifiedOptions(max_running=2, mixed_chunk=True, schedule_conservativeness=0.0)
    link = RecordingLink()
    with unified_engine(24, scheduler=SchedulerConfig(chunk_size=16), options=options, host_pages=64) as u:
        u.tell(link, LinkUp())
        for _ in range(2):
            asked = []
            for ids in prompts:
                stopping = StoppingParams(ANSWER, ignore_eos=True)
                key, keys, params = RoomKey.new(0), page_keys(ids, PAGE), SamplingParams(temperature=0)
                asked.append(PrefillTask(f"r{key}", key, ids, 0, keys, params, stopping))
            u.tell(link, *map(Submit, asked))
            u.until(lambda: u.stats.idle and not u.turn(), "the node is at rest")
            for task in asked:
                expected = greedy(prepared_tiny().path, task.token_ids, ANSWER)
                assert [token.token_id for token in link.tokens(task.key)] == expected
        assert not u.incidents
        assert u.stats.host_hit_tokens_total >= 3 * 28
        assert u.stats.pages_free + u.stats.pages_cached == u.stats.pages_total
