"""Token ids to text, one token at a time, never showing half a character."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

__all__ = ["Decoder", "IncrementalDetokenizer"]

_REPLACEMENT = "\ufffd"  # how decoders show bytes that are no character, or not yet
_WINDOW = 16  # tokens decoded again and again while a text ends in what is no character
_TAIL = 4  # tokens: an unfinished UTF-8 character has at most 3 bytes, and a token at least one


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    @property
    def special_ids(self) -> Collection[int]:
        """Tokens left out of the text when so asked."""
        ...

    @property
    def byte_ids(self) -> Collection[int]:
        """Tokens of one byte each, whose decoding depends on all their neighbours of this kind."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of a whole sequence, special tokens included."""
        ...


class IncrementalDetokenizer:
    """All that `push` and `flush` return, joined, is what decoding all tokens adds to the text before them.

    `context` is the end of what comes before, the prompt: a decoder that drops the first space of a text must not
    drop the one between prompt and answer. Without context it equals decoding all tokens at once.

    A decoder looks at neighbours (it joins bytes into characters and drops the first space of a text), so tokens
    are decoded behind the last one already shown, and what was shown is cut off. The trailing replacement character
    may be a character still to be completed: it is held back. Tokens of a byte fallback are held until their run
    ends, as one bad byte turns the whole run into replacement characters. O(1) amortised a token.
    """

    def __init__(self, decoder: Decoder, skip_special_tokens: bool = True, context: Sequence[int] = ()):
        self._decoder = decoder
        self._skipped: Collection[int] = decoder.special_ids if skip_special_tokens else ()
        self._window: list[int] = []
        self._shown = 0  # characters of the decoded window that were returned, or stand for earlier text
        last = context[-1:]
        if last and last[0] not in decoder.special_ids and last[0] not in decoder.byte_ids:
            text = decoder.decode(list(last))
            if text and not text.endswith(_REPLACEMENT):
                self._window, self._shown = list(last), len(text)

    def push(self, token_id: int) -> str:
        """Take in a token; return the text that is certain by now and was not returned before."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        if token_id in self._decoder.byte_ids:
            return ""
        text = self._decoder.decode(self._window)
        complete = not text.endswith(_REPLACEMENT)
        certain = text if complete else text[:-1]
        fresh = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        self._shrink(complete and bool(fresh))
        return fresh

    def flush(self) -> str:
        """The answer has ended: what was held back, an unfinished character as its replacement."""
        text = self._decoder.decode(self._window)[self._shown :]
        self._window, self._shown = [], 0
        return text

    def held(self) -> int:
        """Characters that the tokens so far stand for and that were not returned; an unfinished one counts.

        Of an unfinished run of byte tokens its last few are left out: they would turn the whole run into replacement
        characters. Of a run that turns out to be none, its characters so far are counted as if it were one.
        """
        whole = self._decoder.decode(self._window)[self._shown :]
        if whole.endswith(_REPLACEMENT):
            for unfinished in range(1, _TAIL):
                if self._window[-unfinished] not in self._decoder.byte_ids:
                    break
                text = self._decoder.decode(self._window[:-unfinished])[self._shown :]
                if not text.endswith(_REPLACEMENT):
                    return len(text) + 1
        return len(whole)

    def _shrink(self, clean: bool) -> None:
        """Keep the last token as context after a clean end; keep a few when the end has been unclean for long."""
        if clean:
            context = self._decoder.decode(self._window[-1:])
            if context:
                self._window, self._shown = self._window[-1:], len(context)
        elif len(self._window) > _WINDOW:
            self._window = self._window[-_TAIL:]
            text = self._decoder.decode(self._window)
            self._shown = len(text) - text.endswith(_REPLACEMENT)
