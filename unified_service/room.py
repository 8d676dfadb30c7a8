"""One attempt at a request as a unified node keeps it. The engine loop is its only writer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.core.loop import Link
from engine.core.page_keys import page_keys
from engine.core.types import PrefillTask, RoomKey
from engine.device.batch import Row
from engine.device.next_token import Wanted
from engine.device.sampler import TokenHistory
from prefill_service.adder import DecodeRow
from prefill_service.request import PrefillRequest, RequestState

__all__ = ["UnifiedRoom"]


@dataclass(slots=True, eq=False)
class UnifiedRoom:
    """`request` is the scheduler's, and in flight while it decodes."""

    request: PrefillRequest
    link: Link
    first_index: int = field(init=False)  # of the first token that this attempt makes
    prompt: int = field(init=False)  # tokens, without those that earlier attempts generated
    token_ids: list[int] = field(init=False)  # prompt and answer so far; the KV of the last one is not yet computed
    history: TokenHistory | None = field(init=False)
    admitted: bool = False  # has been in a forward, which the front door knows

    def __post_init__(self) -> None:
        task = self.request.task
        self.first_index = task.first_index
        self.prompt = len(task.token_ids) - task.first_index
        self.token_ids = list(task.token_ids)
        self.history = TokenHistory(task.token_ids, task.first_index) if task.sampling.needs_history else None

    @property
    def key(self) -> RoomKey:
        return self.request.key

    @property
    def decoding(self) -> bool:
        return self.request.state is RequestState.IN_FLIGHT

    @property
    def generated(self) -> int:
        """Tokens of the answer so far, those of earlier attempts included."""
        return len(self.token_ids) - self.prompt

    @property
    def growth(self) -> DecodeRow:
        stopping = self.request.task.stopping
        return DecodeRow(stopping.max_new_tokens, self.generated, stopping.ignore_eos)

    @property
    def row(self) -> Row:
        """The forward of the newest token, whose page is there."""
        return Row(self.token_ids[-1:], len(self.token_ids) - 1, self.request.pages, True)

    @property
    def wanted(self) -> Wanted:
        """The next token."""
        task = self.request.task
        return Wanted(self.key, self.generated, task.sampling, task.stopping, self.history)

    def advance(self, token_id: int) -> None:
        """That was it."""
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)

    def task(self, page_size: int) -> PrefillTask:
        """What takes it up again: prompt and answer so far, from which the next token follows."""
        task, token_ids = self.request.task, tuple(self.token_ids)
        keys = page_keys(token_ids, page_size, task.extra_key)
        return replace(task, token_ids=token_ids, first_index=self.generated, page_keys=keys)
