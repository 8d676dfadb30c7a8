"""Tokenizers of a few hundred tokens, made on the spot: one of bytes, one of pieces with a byte fallback."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from engine.core.model_store import PreparedModel

__all__ = ["EOS", "TEMPLATE", "byte_id", "byte_level_tokenizer", "fallback_tokenizer", "prepared_model", "write_model"]

EOS = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_BYTE_LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}


def byte_id(byte: int) -> int:
    """Token id of one byte in `byte_level_tokenizer`."""
    return sorted(_BYTE_LETTERS.values()).index(_BYTE_LETTERS[byte])


def byte_level_tokenizer() -> Tokenizer:
    """Every byte a token (as GPT-2 spells them), some merges, three special tokens. Ids 0 to 263."""
    letters = sorted(_BYTE_LETTERS.values())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (EOS, "<|user|>", "<|assistant|>")])
    return tokenizer


def fallback_tokenizer() -> Tokenizer:
    """Pieces with ▁ for spaces, and `<0xNN>` for what has no piece: the decoder drops a first space. Ids 0 to 271."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁b", "ab", "é", "ba", "▁ba", ".", "\ufffd", "c", "▁c"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("a", "b"), ("b", "a"), ("▁", "a"), ("▁", "b"), ("▁", "ba"), ("▁", "c")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>")])
    return tokenizer


def write_model(directory: Path, *, template: str | None = TEMPLATE) -> Path:
    """What the front door reads of a prepared model directory."""
    byte_level_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": EOS}}))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def prepared_model(directory: Path) -> PreparedModel:
    """A model of that text and of no weights."""
    tokenizer = byte_level_tokenizer()
    eos = tokenizer.token_to_id(EOS)
    assert eos is not None
    return PreparedModel(
        path=directory,
        name="tiny",
        fingerprint="f" * 32,
        architecture="LlamaForCausalLM",
        layers=2,
        heads=2,
        kv_heads=1,
        head_dim=8,
        vocab_size=tokenizer.get_vocab_size(),
        max_context=512,
        eos_token_ids=(eos,),
    )
