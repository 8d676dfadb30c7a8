"""Text of one model: prompt to token ids, token ids to text, chat messages to prompt.

Nodes see token ids only; whatever has to do with characters happens here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer

from bootstrap.chat import ChatMessage, ChatTemplate
from engine.core.errors import ConfigError, InvalidField

__all__ = ["LONG", "TextModel", "check_prompt_tokens"]

log = logging.getLogger("kvrelay.bootstrap")

LONG = 10_000  # characters or tokens: about 2 ms of work


class TextModel:
    """Tokenizer and chat template of a prepared model directory. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatTemplate | None = None, end_token: str | None = None):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat = chat
        self.special_ids = frozenset(id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
        end = None if end_token is None else tokenizer.token_to_id(end_token)
        self.end_ids = () if end is None else (end,)
        self.byte_ids = frozenset(_byte_fallback_ids(tokenizer))
        # Bytes, so never fewer than the characters it stands for (what normalizers swallow is not counted).
        self.longest_token = max(len(token.encode()) for token in tokenizer.get_vocab())

    @classmethod
    def load(cls, path: Path) -> TextModel:
        """Read tokenizer.json, tokenizer_config.json and the chat template. Raises ConfigError without a tokenizer."""
        try:
            tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
            raise ConfigError([f"{path / 'tokenizer.json'} is no tokenizer: {error}"]) from error
        end_token = _token_text(_read_json(path / "tokenizer_config.json").get("eos_token"))
        return cls(tokenizer, _load_chat(path), end_token)

    @property
    def has_chat(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a plain prompt, with whatever the tokenizer puts in front (a beginning-of-sequence token).

        Raises InvalidField when they are more than `most`.
        """
        return self._encode(text, True, most)

    def encode_chat(self, text: str, most: int | None = None) -> tuple[int, ...]:
        """Token ids of a rendered chat: the template has put the special tokens in already. Raises as `encode`."""
        return self._encode(text, False, most)

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """Raises InvalidField when the model has no chat template or the template refuses the messages."""
        if self._chat is None:
            raise InvalidField("chat", "a chat", "text or token_ids: this model has no chat template")
        return self._chat.render(messages)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        if len(token_ids) > LONG:  # as below
            return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool, most: int | None) -> tuple[int, ...]:
        # `encode` holds the interpreter's lock all the while; a batch does not, but waits for the library's threads.
        if len(text) > LONG:
            encoding = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if most is not None:
            check_prompt_tokens(len(encoding), most)
        return tuple(encoding.ids)


def check_prompt_tokens(count: int, most: int) -> None:
    """Raise InvalidField for a prompt that leaves no room for an answer."""
    if count > most:
        raise InvalidField("prompt tokens", count, f"at most {most} tokens, one less than the context")


def _byte_fallback_ids(tokenizer: Tokenizer) -> Iterator[int]:
    """Ids of `<0x00>` to `<0xFF>`, when the tokenizer's decoder joins them into characters."""
    if '"ByteFallback"' not in json.dumps(json.loads(tokenizer.to_str())["decoder"]):
        return
    for byte in range(256):
        token_id = tokenizer.token_to_id(f"<0x{byte:02X}>")
        if token_id is not None:
            yield token_id


def _load_chat(path: Path) -> ChatTemplate | None:
    """The chat template of a model directory, in any of the places where they are kept; None when it has none."""
    config = _read_json(path / "tokenizer_config.json")
    file = path / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {named["name"]: named["template"] for named in source}.get("default")
    if not source:
        return None
    tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    try:
        return ChatTemplate(source, {name: text for name, text in tokens.items() if text is not None})
    except jinja2.TemplateError as error:
        log.warning("chat template is not usable", extra={"path": str(path), "error": str(error)})
        return None


def _token_text(token: Any) -> str | None:
    """A token in tokenizer_config.json is its text, or an object that has it."""
    return token.get("content") if isinstance(token, dict) else token


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError([f"{path} is not JSON: {error}"]) from error
    return content if isinstance(content, dict) else {}
