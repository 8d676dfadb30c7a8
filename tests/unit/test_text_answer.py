"""Prompts to ids, chats to prompts, tokens to deltas."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from bootstrap.answer import Answer, AnswerOptions
from bootstrap.chat import ChatMessage, ChatTemplate
from bootstrap.text import LONG, TextModel
from engine.core.errors import ConfigError, InvalidField
from engine.core.sampling import FinishReason
from engine.core.types import RoomKey, TokenOutput
from tests.helpers.tiny_tokenizer import EOS, byte_level_tokenizer, fallback_tokenizer, write_model

KEY = RoomKey(1, 0)
MODEL = TextModel(byte_level_tokenizer())
HELLO = [ChatMessage("user", "hello")]


def tokens(text: str, finish: FinishReason | None = None) -> list[TokenOutput]:
    ids = MODEL.encode(text)
    ends = [None] * (len(ids) - 1) + [finish]
    return [TokenOutput(KEY, i, id, -float(i), end) for i, (id, end) in enumerate(zip(ids, ends, strict=True))]


# ---- chat templates ----


def test_a_template_with_generation_blocks_and_tools() -> None:
    source = "{% if tools is not none %}T{% endif %}{% for m in messages %}{% generation %}{{ m['content'] }}"
    source += "{% endgeneration %}{% endfor %}"
    assert ChatTemplate(source, {}).render(HELLO) == "hello"


def test_a_model_directory(tmp_path: Path) -> None:
    text = TextModel.load(write_model(tmp_path))
    assert text.has_chat
    rendered = text.render_chat(HELLO)
    assert rendered == f"<|user|>hello{EOS}<|assistant|>"
    assert text.decode(text.encode_chat(rendered)) == rendered
    assert len(text.encode_chat(rendered)) == 4  # three special tokens, and `hello` is one by merges


def test_a_template_may_stand_in_the_tokenizer_configuration(tmp_path: Path) -> None:
    write_model(tmp_path, template=None)
    assert not TextModel.load(tmp_path).has_chat
    with pytest.raises(InvalidField):
        TextModel.load(tmp_path).render_chat(HELLO)
    for template in ('"{{ messages[0].content }}!"', '[{"name": "default", "template": "{{ messages[0].content }}!"}]'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {template}}}')
        assert TextModel.load(tmp_path).render_chat(HELLO) == "hello!"


def test_a_template_that_cannot_be_compiled_leaves_a_model_without_chat(tmp_path: Path) -> None:
    assert not TextModel.load(write_model(tmp_path, template="{% for %}")).has_chat


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        TextModel.load(tmp_path)


def test_what_templates_rely_on() -> None:
    source = (
        "{{ bos_token }}{{ messages | tojson }}{{ strftime_now('%Y') | length }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m['role'] }}{% endfor %}"
    )
    rendered = ChatTemplate(source, {"bos_token": "<s>"}).render([ChatMessage("user", "<é>"), ChatMessage("x", "y")])
    assert rendered == '<s>[{"role": "user", "content": "<é>"}, {"role": "x", "content": "y"}]4user'


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content }}", "{{ messages.append(1) }}"],
)
def test_a_template_that_refuses(source: str) -> None:
    with pytest.raises(InvalidField) as refused:
        ChatTemplate(source, {}).render(HELLO)
    assert refused.value.metadata["field"] == "chat.messages"


def test_templates_run_sandboxed() -> None:
    with pytest.raises(InvalidField):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}", {}).render(HELLO)


# ---- answers ----


def test_pieces_carry_what_was_asked_for() -> None:
    answer = Answer(MODEL, AnswerOptions(logprobs=True))
    hello = tokens("hello world")
    first, second = answer.extend(hello[:2]), answer.extend(hello[2:])
    assert (first.index, second.index) == (0, 2)
    assert first.token_ids + second.token_ids == MODEL.encode("hello world")
    assert first.text + second.text + answer.finish() == "hello world"
    assert first.logprobs == (0.0, -1.0)


def test_nothing_is_sent_that_was_not_asked_for() -> None:
    piece = Answer(MODEL, AnswerOptions(text=False, token_ids=False)).extend(tokens("hello"))
    assert (piece.token_ids, piece.text, piece.logprobs) == ((), "", ())


def test_a_stop_string_across_tokens_cuts_the_text_and_counts_its_tokens() -> None:
    answer = Answer(MODEL, AnswerOptions(stop=("lo w",)))
    pieces = [answer.extend([token]) for token in tokens("hello world")]
    assert "".join(piece.text for piece in pieces) + answer.finish() == "hel"
    assert answer.matched_stop == "lo w"
    assert answer.tokens == 2, "`hello` and ` w`: what comes after the match is no part of the answer"


def test_stop_strings_end_an_answer_whose_text_is_not_wanted() -> None:
    answer = Answer(MODEL, AnswerOptions(stop=("world",), text=False))
    assert answer.extend(tokens("hello world")).text == ""
    assert answer.matched_stop == "world"


def test_stop_strings_do_not_count_before_min_new_tokens() -> None:
    answer = Answer(MODEL, AnswerOptions(stop=("h",), min_new_tokens=1))
    assert answer.extend(tokens("hello hi")).text == "hello "
    assert answer.matched_stop == "h"


@pytest.mark.parametrize(("stop", "shown"), [("é", "é€"), ("€", "é€é"), ("é€", "é€"), ("€é", "é€é€")])
def test_a_character_begun_before_min_new_tokens_is_not_searched(stop: str, shown: str) -> None:
    """The first three tokens are `é` and a third of `€`, which comes out with later ones: at the end, of a fallback."""
    fallback = fallback_tokenizer()
    spelled = [fallback.token_to_id(f"<0x{byte:02X}>") for byte in "é€é€".encode()]
    for model, ids in ((MODEL, MODEL.encode("é€é€")), (TextModel(fallback), spelled)):
        answer = Answer(model, AnswerOptions(stop=(stop,), min_new_tokens=3))
        text = "".join(answer.extend([TokenOutput(KEY, i, id or 0, 0.0)]).text for i, id in enumerate(ids))
        assert text + answer.finish() == shown
        assert (answer.matched_stop is None) == (shown == "é€é€")


def test_an_answer_that_ends_before_min_new_tokens_is_not_searched() -> None:
    answer = Answer(MODEL, AnswerOptions(stop=("\ufffd",), min_new_tokens=3))
    assert answer.extend(tokens("é")[:1]).text + answer.finish() == "\ufffd"
    assert answer.matched_stop is None


def test_long_texts_are_read_as_short_ones_are() -> None:
    """They take another way through the library, which does not hold the interpreter's lock."""
    tokenizer = fallback_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    model, text = TextModel(tokenizer), "ab é😀 ba.<s>\n" * 1500
    assert len(text) > LONG
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1
    assert model.encode(text) == tuple(ids)
    assert model.encode_chat(text) == tuple(ids[1:])
    for skip in (False, True):
        assert model.decode(ids, skip) == tokenizer.decode(ids, skip_special_tokens=skip)
    for read in (model.encode, model.encode_chat):
        with pytest.raises(InvalidField, match="prompt tokens"):
            read(text, 100)
    assert model.encode("ab", len(model.encode("ab")))


def test_the_token_that_stopped_it_is_not_shown() -> None:
    answer = Answer(MODEL, AnswerOptions())
    piece = answer.extend(tokens("hello wx", FinishReason.STOP))
    assert piece.text + answer.finish() == "hello w"
    assert answer.tokens == 3


def test_text_held_back_comes_at_the_end() -> None:
    answer = Answer(MODEL, AnswerOptions(stop=("hello world!",)))
    assert answer.extend(tokens("hello world")).text == ""
    assert answer.finish() == "hello world"


def test_an_unfinished_character_at_the_end() -> None:
    answer = Answer(MODEL, AnswerOptions())
    assert answer.extend(tokens("é")[:1]).text == ""
    assert answer.finish() == "\ufffd"


def spaced_words() -> TextModel:
    """A tokenizer that, like SentencePiece ones, drops the first space of whatever it decodes."""
    words = Tokenizer(models.WordLevel({"▁The": 0, "▁sky": 1, "▁is": 2, "▁blue": 3, "</s>": 4}, unk_token="▁The"))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens([AddedToken("</s>", special=True)])
    return TextModel(words, end_token="</s>")


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    model = spaced_words()
    answer = Answer(model, AnswerOptions(), prompt=[0, 1, 2])
    piece = answer.extend([TokenOutput(KEY, 0, 3, 0.0), TokenOutput(KEY, 1, 2, 0.0)])
    assert piece.text + answer.finish() == " blue is"
    assert model.decode([0, 1, 2]) + " blue is" == model.decode([0, 1, 2, 3, 2])


def test_the_tokenizers_own_end_token_is_known() -> None:
    assert spaced_words().end_ids == (4,)
