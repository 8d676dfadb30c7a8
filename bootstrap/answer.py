"""Tokens of one answer to what the client is shown of them: text, ids, log probabilities, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bootstrap.detokenize import Decoder, IncrementalDetokenizer
from bootstrap.stop_strings import StopStrings
from engine.core.errors import InvalidField
from engine.core.sampling import FinishReason, StoppingParams, finish_reason
from engine.core.types import RoomKey, TokenOutput

__all__ = ["Answer", "AnswerOptions", "Piece"]

_ELSEWHERE = RoomKey(0, 0)  # of tokens that came through another front door, or an earlier stream of this one


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What a client wants to see."""

    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0  # text of the first so many tokens is not searched for stop strings
    text: bool = True
    token_ids: bool = True
    logprobs: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens, and the text that became certain with them."""

    index: int  # of the first token
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


class Answer:
    """Grows by tokens in order of index. After a stop string everything is swallowed."""

    def __init__(self, decoder: Decoder, options: AnswerOptions, prompt: Sequence[int] = ()):
        self._options = options
        self._detokenizer = IncrementalDetokenizer(decoder, options.skip_special_tokens, prompt)
        self._stops = StopStrings(options.stop)
        self._unsearched = 0  # characters of the next text that belong to the first min_new_tokens tokens
        self._reads_text = options.text or bool(options.stop)
        self.tokens = 0  # that belong to the answer
        self.last: TokenOutput | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.matched

    def extend(self, tokens: Sequence[TokenOutput]) -> Piece:
        """Take tokens in, up to the one that completes a stop string."""
        index, text, taken = self.tokens, "", 0
        for token in tokens:
            if self.matched_stop is not None:
                break
            text += self._read(token)
            taken += 1
            self.tokens += 1
            self.last = token
        used = tokens[:taken] if self._options.token_ids else ()
        logprobs = tuple(token.logprob for token in tokens[:taken]) if self._options.logprobs else ()
        return Piece(index, tuple(token.token_id for token in used), logprobs, text if self._options.text else "")

    def resume(self, token_ids: Sequence[int], stopping: StoppingParams) -> FinishReason | None:
        """Begin behind tokens that were delivered already, with the text that `extend` gave for them.

        Returns why they end the answer, None when it goes on. Raises InvalidField when some come after its end.
        """
        for index, token_id in enumerate(token_ids):
            finish = finish_reason(stopping, index, token_id)
            matched = token_id if finish is FinishReason.STOP else None
            self.extend([TokenOutput(_ELSEWHERE, index, token_id, 0.0, finish, matched)])
            if self.matched_stop is not None:
                finish = FinishReason.STOP
            if finish is not None:
                if index + 1 < len(token_ids):
                    limit = f"{index + 1} tokens, which end the answer"
                    raise InvalidField("resumed_token_ids", len(token_ids), limit)
                return finish
        return None

    def finish(self) -> str:
        """No more tokens come: the text that was held back."""
        text = self._detokenizer.flush()
        if self.tokens > self._options.min_new_tokens:
            text = self._search(text)
        if self.matched_stop is None:
            text += self._stops.flush()
        return text if self._options.text else ""

    def _read(self, token: TokenOutput) -> str:
        if not self._reads_text or token.finish is FinishReason.STOP:
            return ""  # the token that stopped the answer is no part of its text
        text = self._detokenizer.push(token.token_id)
        if token.index >= self._options.min_new_tokens:
            return self._search(text)
        if token.index == self._options.min_new_tokens - 1:
            self._unsearched = self._detokenizer.held()
        return text

    def _search(self, text: str) -> str:
        """What may be shown of more text, past what must not be searched."""
        passed = text[: self._unsearched]
        self._unsearched -= len(passed)
        return passed + self._stops.push(text[len(passed) :])
