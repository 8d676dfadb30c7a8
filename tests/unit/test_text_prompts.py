"""Text work for clients: refused before it is begun when it cannot fit, and off the event loop when it is long."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from bootstrap import wire
from bootstrap.chat import ChatMessage, ChatTemplate
from bootstrap.prompts import LONG_AT_ONCE, LONG_CHAT, Prompts
from bootstrap.text import LONG, TextModel
from engine.core.errors import InvalidField
from kvrelay.v1 import generation_pb2, types_pb2
from tests.helpers.tiny_tokenizer import TEMPLATE, byte_level_tokenizer

VOCABULARY, LONGEST = 264, len("<|assistant|>")
HUGE = 1_000_000  # tokens of context


class WatchedText(TextModel):
    """Notes in which thread it is put to work, and works on when `go` is set."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer(), ChatTemplate(TEMPLATE, {}))
        self.worked_in: list[threading.Thread] = []
        self.go = threading.Event()
        self.go.set()

    def encode(self, text: str, most: int | None = None) -> tuple[int, ...]:
        self._note()
        return super().encode(text, most)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        self._note()
        return super().render_chat(messages)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        self._note()
        return super().decode(token_ids, skip_special_tokens)

    def _note(self) -> None:
        self.worked_in.append(threading.current_thread())
        assert self.go.wait(10)


class Unread(Sequence[int]):
    """Ids that nobody may look at."""

    def __len__(self) -> int:
        return 513

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("looked at")


@pytest.fixture
def text() -> WatchedText:
    return WatchedText()


@pytest.fixture
def prompts(text: WatchedText) -> Iterator[Prompts]:
    prompts = Prompts(text, VOCABULARY)
    yield prompts
    text.go.set()
    prompts.close()
    prompts.close()


Work = Callable[[Prompts], Coroutine[Any, Any, Any]]


@pytest.mark.parametrize(
    ("field", "work"),
    [
        ("text", lambda prompts: prompts.encode("x" * (512 * LONGEST + 1), 512)),
        ("chat.messages", lambda prompts: prompts.encode_chat([ChatMessage("user", "x" * 512 * LONGEST)], 512)),
        ("chat.messages", lambda prompts: prompts.encode_chat([ChatMessage("x" * 512 * LONGEST, "x")], 512)),
        ("token_ids", lambda prompts: prompts.decode(Unread(), False, 512)),
    ],
)
async def test_what_cannot_fit_is_refused_before_it_is_read(
    prompts: Prompts, text: WatchedText, field: str, work: Work
) -> None:
    with pytest.raises(InvalidField) as refused:
        await work(prompts)
    assert refused.value.metadata["field"] == field
    assert refused.value.metadata["value"].isdigit()
    assert "at most" in refused.value.metadata["limit"]
    assert not text.worked_in


async def test_a_chat_that_its_template_makes_too_long_is_not_tokenized(
    prompts: Prompts, text: WatchedText, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "encode_chat", lambda *_: pytest.fail("tokenized"))
    monkeypatch.setattr(text, "render_chat", lambda _: "x" * (512 * LONGEST + 1))
    with pytest.raises(InvalidField, match=r"chat\.messages"):
        await prompts.encode_chat([ChatMessage("user", "x")], 512)


async def test_the_longest_text_that_may_fit_is_read(prompts: Prompts) -> None:
    assert len(await prompts.encode("<|assistant|>" * 511, 512)) == 511
    with pytest.raises(InvalidField, match="prompt tokens is 512"):
        await prompts.encode("<|assistant|>" * 512, 512)
    assert await prompts.decode([5] * 512, False, 512)


def test_counts_are_checked_before_what_is_counted() -> None:
    messages = [generation_pb2.ChatMessage()] * (wire.MAX_CHAT_MESSAGES + 1)
    assert wire.chat_from_wire(generation_pb2.Chat(messages=messages[1:]))
    with pytest.raises(InvalidField, match=r"chat\.messages is 1025; allowed: at most 1024 messages"):
        wire.chat_from_wire(generation_pb2.Chat(messages=messages))
    stopping = types_pb2.Stopping(stop_token_ids=[VOCABULARY] * 1000)
    with pytest.raises(InvalidField, match="stop_token_ids is 1000"):
        wire.stopping_from_wire(stopping, default=1, room=9, eos_token_ids=(), vocab_size=VOCABULARY)


@pytest.mark.parametrize(
    ("long", "work"),
    [
        (False, lambda prompts: prompts.encode("x" * LONG, HUGE)),
        (True, lambda prompts: prompts.encode("x" * (LONG + 1), HUGE)),
        (False, lambda prompts: prompts.encode_chat([ChatMessage("user", "x")] * LONG_CHAT, HUGE)),
        (True, lambda prompts: prompts.encode_chat([ChatMessage("user", "x")] * (LONG_CHAT + 1), HUGE)),
        (True, lambda prompts: prompts.encode_chat([ChatMessage("user", "x" * LONG)], HUGE)),
        (False, lambda prompts: prompts.decode([5] * LONG, False, HUGE)),
        (True, lambda prompts: prompts.decode([5] * (LONG + 1), False, HUGE)),
    ],
)
async def test_only_what_is_long_leaves_the_event_loop(
    prompts: Prompts, text: WatchedText, long: bool, work: Work
) -> None:
    await work(prompts)
    assert (text.worked_in[0] is not threading.current_thread()) == long


async def test_a_few_long_texts_at_once_and_none_that_was_given_up(prompts: Prompts, text: WatchedText) -> None:
    """A client that has gone leaves its thread busy for a while, but cannot start more of them."""
    text.go.clear()
    tasks = [asyncio.create_task(prompts.encode("x" * (LONG + 1), HUGE)) for _ in range(5)]
    async with asyncio.timeout(10):
        while len(text.worked_in) < LONG_AT_ONCE:
            await asyncio.sleep(0.01)
    for task in tasks[:-1]:
        task.cancel()
    await asyncio.gather(*tasks[:-1], return_exceptions=True)
    assert len(text.worked_in) == LONG_AT_ONCE
    text.go.set()
    assert len(await tasks[-1]) == LONG + 1
    assert len(text.worked_in) == LONG_AT_ONCE + 1
