import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from engine.core.model_store import ModelRefused, ensure_prepared, find_prepared, read_prepared, resolve
from engine.device.prepare import prepare
from tests.helpers.gguf_files import write_gguf
from tests.helpers.models import CHAT_TEMPLATE, build_model, demo_model
from tests.helpers.reference import greedy


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return build_model(tmp_path / "some-model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


# --- directories ---


def test_a_directory_is_used_in_place_and_hashed_once(model: Path, cache: Path) -> None:
    """Through the subprocess, as every process of the system does it."""
    said: list[str] = []
    first = ensure_prepared(str(model), cache, said.append)
    assert said
    assert first.path == model
    assert first.name == "some-model"
    assert (first.architecture, first.layers, first.heads, first.kv_heads) == ("LlamaForCausalLM", 3, 4, 2)
    assert (first.head_dim, first.vocab_size, first.max_context, first.eos_token_ids) == (16, 320, 4096, (2,))
    said.clear()
    assert ensure_prepared(str(model), cache, said.append) == first
    assert not said


def test_refusal_by_the_subprocess_carries_its_reason(model: Path, cache: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ModelRefused, match=r"some-model has no tokenizer\.json$"):
        ensure_prepared(str(model), cache, lambda _: None)


def test_fingerprint_is_of_content_not_of_place(model: Path, cache: Path) -> None:
    original = prepare(resolve(str(model)), cache)
    copy = Path(shutil.copytree(model, model.with_name("copy")))
    edit_config(copy, lambda config: config | {"transformers_version": "4.0", "_name_or_path": "elsewhere"})
    assert prepare(resolve(str(copy)), cache).fingerprint == original.fingerprint
    edit_config(copy, lambda config: config | {"rms_norm_eps": 1e-3})
    assert prepare(resolve(str(copy)), cache).fingerprint != original.fingerprint


def test_changed_weights_are_noticed(model: Path, cache: Path) -> None:
    before = prepare(resolve(str(model)), cache)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert find_prepared(resolve(str(model)), cache) is None
    assert prepare(resolve(str(model)), cache).fingerprint != before.fingerprint


def test_a_missing_or_broken_cache_entry_is_no_entry(model: Path, cache: Path) -> None:
    source = resolve(str(model))
    assert find_prepared(source, cache) is None
    prepare(source, cache)
    (cache / f"{source.key}.json").write_text("{")
    assert find_prepared(source, cache) is None


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
def test_end_tokens_come_from_the_generation_config(model: Path, eos: object, expected: tuple[int, ...]) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert read_prepared(model, "m", "f").eos_token_ids == expected


def test_head_counts_have_the_usual_defaults(model: Path) -> None:
    edit_config(model, lambda c: {k: v for k, v in c.items() if k not in ("num_key_value_heads", "head_dim")})
    found = read_prepared(model, "m", "f")
    assert (found.kv_heads, found.head_dim) == (4, 16)


def edit_config(model: Path, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    config = model / "config.json"
    config.write_text(json.dumps(change(json.loads(config.read_text()))))


# --- what is no model ---


@pytest.mark.parametrize("name", ["no-such-model", "", "/no/such/directory", "a b/c"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(ModelRefused, match="is none of: smollm2-135m, a model directory"):
        resolve(name)


def test_directories_that_hold_no_model_are_refused(model: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelRefused, match="does not describe a decoder-only model"):
        prepare(resolve(str(tmp_path / "empty")), cache)
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="has no"):
        prepare(resolve(str(model)), cache)
    (model / "config.json").write_text("not json")
    with pytest.raises(ModelRefused, match="is not JSON"):
        prepare(resolve(str(model)), cache)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; allowed: a whole number from 1 to "),
        ({"num_hidden_layers": "three"}, "num_hidden_layers is 'three'; allowed: a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; allowed: a whole number"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; allowed: 3, as the weights have"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647; allowed: 3, as the weights have"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; allowed"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0; allowed"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; allowed: a divisor of num_attention_heads, 4"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads \* head_dim is 64; allowed: .*k_proj.weight is \[32, 64\]"),
        ({"hidden_size": 66, "head_dim": None}, "hidden_size is 66; allowed: a multiple of num_attention_heads, 4"),
        ({"hidden_size": 128}, r"hidden_size is 128; allowed: .*embed_tokens.weight is \[320, 64\]"),
        ({"head_dim": 15}, "head_dim is 15; allowed"),
        ({"head_dim": 32}, r"num_attention_heads \* head_dim is 128; allowed: .*q_proj.weight is \[64, 64\]"),
        ({"intermediate_size": 97}, "intermediate_size is 97; allowed"),
        ({"vocab_size": 0}, "vocab_size is 0; allowed"),
        ({"vocab_size": 10}, r"vocab_size is 10; allowed: .*embed_tokens.weight is \[320, 64\]"),
        ({"max_position_embeddings": 1e4}, "max_position_embeddings is 10000.0; allowed"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 10{30}; allowed"),
        ({"eos_token_id": 99999}, "eos_token_id is 99999; allowed: token ids from 0 to 319"),
        ({"eos_token_id": [2, "x"]}, "eos_token_id is .*; allowed: token ids"),
        ({"architectures": None}, "architectures is None; allowed: a list"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; allowed: a list"),
    ],
)
def test_a_wrong_configuration_is_refused_by_field_and_limit(
    model: Path, cache: Path, changes: dict[str, object], refusal: str
) -> None:
    edit_config(model, lambda config: config | {"vocab_size": 320, "eos_token_id": 2} | changes)
    with pytest.raises(ModelRefused, match=f"config.json.*{refusal}"):
        prepare(resolve(str(model)), cache)


def test_a_missing_field_is_refused(model: Path, cache: Path) -> None:
    edit_config(model, lambda config: {k: v for k, v in config.items() if k != "num_hidden_layers"})
    with pytest.raises(ModelRefused, match="num_hidden_layers is missing; allowed: a whole number"):
        prepare(resolve(str(model)), cache)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(model: Path, cache: Path) -> None:
    build_model(model, vocab_size=200)
    with pytest.raises(ModelRefused, match="vocab_size is 200; allowed: at least 259, to hold tokenizer"):
        prepare(resolve(str(model)), cache)


def test_a_file_of_the_model_that_is_broken_is_refused(model: Path, cache: Path) -> None:
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelRefused, match=r"tokenizer\.json is no tokenizer"):
        prepare(resolve(str(model)), cache)
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    for broken in (b"", content[:1000], content[:-1], b"\xff" * 100):
        weights.write_bytes(broken)
        with pytest.raises(ModelRefused, match=r"model\.safetensors is no safetensors file, or cut off: "):
            prepare(resolve(str(model)), cache)
    index = {"weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelRefused, match=r"index\.json lists model-00002-of-00002\.safetensors, which is not there"):
        prepare(resolve(str(model)), cache)
    (model / "config.json").write_text("[]")
    with pytest.raises(ModelRefused, match=r"config\.json is a JSON list; allowed: an object"):
        prepare(resolve(str(model)), cache)
    (model / "config.json").unlink()
    (model / "config.json").mkdir()
    with pytest.raises(ModelRefused, match=r"config\.json cannot be read: Is a directory"):
        prepare(resolve(str(model)), cache)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/kvrelay", "/dev/full"])
def test_a_place_for_models_that_cannot_be_written_is_refused_in_one_line(
    model: Path, tmp_path: Path, place: str
) -> None:
    """Through the subprocess: its traceback would be no message."""
    (tmp_path / "file").touch()
    with pytest.raises(ModelRefused, match=f"^model_dir is '.*{place}'; allowed: a directory to write to [^\n]*$"):
        ensure_prepared(str(model), tmp_path / place, lambda _: None)


def test_a_name_that_the_file_system_refuses_is_no_model() -> None:
    with pytest.raises(ModelRefused, match="cannot be read"):
        resolve("x" * 5000)


# --- GGUF ---


def test_a_broken_gguf_is_refused(model: Path, cache: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", model).read_bytes()
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"no model", b"GGUF\x03\0\0\0" + b"\xff" * 64, whole[:200], whole[:-5000]):
        broken.write_bytes(content)
        with pytest.raises(ModelRefused, match=r"^[^\n]*broken\.gguf (is no GGUF file|cannot be converted): [^\n]+$"):
            prepare(resolve(str(broken)), cache)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


def test_gguf_becomes_the_same_model_once_even_when_two_ask(model: Path, cache: Path, tmp_path: Path) -> None:
    source = resolve(str(write_gguf(tmp_path / "tiny.gguf", model)))
    assert source.name == "tiny"
    leftover = cache / f".{source.key}.draft"
    leftover.mkdir(parents=True)
    (leftover / "junk").touch()

    results = []
    workers = [threading.Thread(target=lambda: results.append(prepare(source, cache))) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    assert results[0] == results[1] == find_prepared(source, cache)
    assert results[0].eos_token_ids == (2,)
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".json", ".lock"]
    original, converted = load_file(model / "model.safetensors"), load_file(results[0].path / "model.safetensors")
    assert original.keys() == converted.keys()
    assert all(torch.equal(original[name], converted[name]) for name in original)
    assert greedy(results[0].path, [5, 6, 7], 5) == greedy(model, [5, 6, 7], 5)


def test_conversion_keeps_tokenizer_and_template(model: Path, cache: Path, tmp_path: Path) -> None:
    prepared = prepare(resolve(str(write_gguf(tmp_path / "tiny.gguf", model))), cache)
    tokenizer = Tokenizer.from_file(str(prepared.path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>the  12").tokens == ["<|im_start|>", "th", "e", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("naïve 世界 👍").ids) == "naïve 世界 👍"
    assert (prepared.path / "chat_template.jinja").read_text() == CHAT_TEMPLATE


def test_gguf_that_would_be_misread_is_refused(model: Path, cache: Path, tmp_path: Path) -> None:
    strange = write_gguf(tmp_path / "strange.gguf", model, pre_tokenizer="of-the-future")
    with pytest.raises(ModelRefused, match="pre-tokenizer 'of-the-future'"):
        prepare(resolve(str(strange)), cache)
    other = write_gguf(tmp_path / "other.gguf", model, architecture="gpt2")
    with pytest.raises(ModelRefused, match="architecture gpt2 is not supported"):
        prepare(resolve(str(other)), cache)
    incomplete = write_gguf(tmp_path / "incomplete.gguf", model, without="model.layers.2.mlp.up_proj.weight")
    with pytest.raises(ModelRefused, match=r"missing_keys: model\.layers\.2\.mlp\.up_proj\.weight$"):
        prepare(resolve(str(incomplete)), cache)
    assert {path.suffix for path in cache.iterdir()} == {".lock"}


# --- the demo model ---


def test_demo_model_has_its_chat_format() -> None:
    model = demo_model()
    assert model.name == "smollm2-135m"
    assert (model.layers, model.heads, model.kv_heads, model.head_dim) == (30, 9, 3, 64)
    assert (model.vocab_size, model.max_context, model.eos_token_ids) == (49152, 8192, (2,))
    tokenizer = AutoTokenizer.from_pretrained(model.path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    chat = [{"role": "user", "content": "Hi"}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = Tokenizer.from_file(str(model.path / "tokenizer.json")).encode(text).ids
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_demo_tokenizer_splits_digits() -> None:
    """The GGUF's pre-tokenizer, "smollm", takes every digit on its own; GPT-2's would join the blanks otherwise."""
    tokenizer = Tokenizer.from_file(str(demo_model().path / "tokenizer.json"))
    assert tokenizer.encode("a  12 b").tokens == ["a", "ĠĠ", "1", "2", "Ġb"]
