"""Text work on behalf of clients, bounded: one client's prompt must not hold up other clients' tokens.

What cannot fit the context is refused before anything is made of it. What takes long goes to threads of its own, a
few at once: the rest waits, and what its client has given up by then is never begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from bootstrap.answer import Answer
from bootstrap.chat import ChatMessage
from bootstrap.text import LONG, TextModel
from bootstrap.wire import check_token_ids
from engine.core.errors import InvalidField
from engine.core.sampling import FinishReason, StoppingParams

__all__ = ["Prompts"]

LONG_AT_ONCE = 2  # a long text takes a core and a hundred bytes a character while it is tokenized
LONG_CHAT = 64  # messages
LONG_ANSWER = 200  # tokens, which are decoded one by one

T = TypeVar("T")


class Prompts:
    """`context` below: tokens of prompt and answer together that the cluster takes. Errors are InvalidField."""

    def __init__(self, text: TextModel, vocab_size: int):
        self._text = text
        self._vocab_size = vocab_size
        self._threads = ThreadPoolExecutor(LONG_AT_ONCE, "text")

    async def encode(self, text: str, context: int) -> tuple[int, ...]:
        """Token ids of a plain prompt."""
        self._check_length("text", len(text), context)
        return await self._run(len(text) > LONG, lambda: self._text.encode(text, context - 1))

    async def encode_chat(self, messages: Sequence[ChatMessage], context: int) -> tuple[str, tuple[int, ...]]:
        """The rendered chat and its token ids."""
        length = sum(len(message.role) + len(message.content) for message in messages)
        self._check_length("chat.messages", length, context)

        def render_and_encode() -> tuple[str, tuple[int, ...]]:
            rendered = self._text.render_chat(messages)
            self._check_length("chat.messages", len(rendered), context)
            return rendered, self._text.encode_chat(rendered, context - 1)

        return await self._run(length > LONG or len(messages) > LONG_CHAT, render_and_encode)

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, context: int) -> str:
        """Text of a whole sequence."""
        if len(token_ids) > context:
            raise InvalidField("token_ids", len(token_ids), f"at most {context} tokens, the context")
        check_token_ids("token_ids", token_ids, self._vocab_size)
        ids = list(token_ids)
        return await self._run(len(ids) > LONG, lambda: self._text.decode(ids, skip_special_tokens))

    async def resume(self, answer: Answer, token_ids: Sequence[int], stopping: StoppingParams) -> FinishReason | None:
        """`answer.resume`."""
        return await self._run(len(token_ids) > LONG_ANSWER, lambda: answer.resume(token_ids, stopping))

    def close(self) -> None:
        """Begin nothing more. May be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_length(self, field: str, length: int, context: int) -> None:
        """Refuse what would be too many tokens even if every one were as long as the longest there is."""
        most = context * self._text.longest_token
        if length > most:
            raise InvalidField(field, length, f"at most {most} characters, as {context} tokens cannot hold more")

    async def _run(self, long: bool, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work) if long else work()
