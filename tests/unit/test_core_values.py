"""Small values that everything else relies on: hand-off notes, layouts, identities, named errors, node options."""

from __future__ import annotations

import socket
from dataclasses import fields, replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import errors
from engine.core.config import load
from engine.core.errors import ConfigError, InvalidField, KVRelayError
from engine.core.handoff_note import HandoffNote
from engine.core.node_config import NodeConfig
from engine.core.types import DTYPE_BYTES, NODE_NAME, NodeIdentity, PageLayout, RoomKey, ceil_div

INT64 = st.integers(-(2**63), 2**63 - 1)
NOTES = st.builds(HandoffNote, INT64, INT64, st.floats(allow_nan=False, allow_infinity=False), INT64, INT64)


@given(NOTES)
def test_a_note_arrives_as_it_was_sent(note: HandoffNote) -> None:
    assert HandoffNote.decode(note.encode()) == note


@given(st.binary(max_size=30))
def test_other_bytes_are_no_note(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a hand-off note"):
        HandoffNote.decode(data)


@pytest.mark.parametrize(
    "note",
    [
        *(None, 7, "x", [], [1, 2, 3, 4, 5], {}, {"token_id": 1}),
        {"token_id": 1, "index": 0, "logprob": 0.0, "cached_tokens": 0, "forward_end_ns": 1, "more": 1},
    ],
)
def test_json_of_another_shape_is_no_note(note: object) -> None:
    with pytest.raises(ValueError, match="hand-off note"):
        HandoffNote.decode(orjson.dumps(note))


# ---- types ----


@given(st.integers(0, 2**40), st.integers(1, 2**20))
def test_ceil_div(a: int, b: int) -> None:
    assert (ceil_div(a, b) - 1) * b < a <= ceil_div(a, b) * b


LAYOUT = PageLayout(16, 30, 3, 64, "float32", "f" * 32)


def test_layouts_say_in_what_they_differ() -> None:
    assert LAYOUT.mismatch(replace(LAYOUT)) is None
    for field in fields(PageLayout):
        value = getattr(LAYOUT, field.name)
        other = replace(LAYOUT, **{field.name: value + (1 if isinstance(value, int) else "x")})
        assert LAYOUT.mismatch(other) == other.mismatch(LAYOUT) == field.name


@pytest.mark.parametrize(("dtype", "size"), DTYPE_BYTES.items())
def test_layout_sizes(dtype: str, size: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    assert layout.token_bytes == 30 * 2 * 3 * 64 * size
    assert layout.page_bytes == 16 * layout.token_bytes
    assert [layout.pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]


def test_each_life_of_a_node_has_a_name_of_its_own() -> None:
    first, second = NodeIdentity.new("p"), NodeIdentity.new("p")
    assert first.node_id == second.node_id == "p"
    assert str(first) == f"p:{first.incarnation}" != str(second)
    rooms = {RoomKey.new(3) for _ in range(50)}
    assert len(rooms) == 50
    assert all(0 <= key.room < 2**64 and key.epoch == 3 for key in rooms)
    assert str(RoomKey(255, 3)) == "00000000000000ff/3"


# ---- errors ----


def test_the_tree_is_what_its_docstring_says() -> None:
    """Each class exported stands in the drawn tree, with its code."""
    drawn = [line.split() for line in (errors.__doc__ or "").splitlines() if "──" in line]
    codes = {words[1 + words.index(next(w for w in words if "──" in w))]: words for words in drawn}
    for name in errors.__all__:
        cls = getattr(errors, name)
        assert issubclass(cls, KVRelayError)
        if name not in ("KVRelayError", "InvalidField", "ConfigError"):
            assert cls.code in codes[name]


def test_a_long_value_is_cut_in_the_message() -> None:
    error = InvalidField("text", "x" * 500, "less")
    assert len(error.metadata["value"]) == 80
    assert str(error) == f"text is {error.metadata['value']}; allowed: less"


def test_configuration_mistakes_are_listed_one_a_line() -> None:
    error = ConfigError(["a: wrong", "b: wrong"])
    assert (str(error), error.problems) == ("a: wrong\nb: wrong", ("a: wrong", "b: wrong"))


# ---- node options ----

NODE_ID_LIMIT = "allowed: 1 to 128 letters, digits, dots, dashes and underscores"


def test_a_node_is_named_after_its_host_and_role_unless_told() -> None:
    first, second = (NodeConfig().name("prefill") for _ in range(2))
    assert first.startswith(f"{socket.gethostname()}-prefill-")
    assert NODE_NAME.fullmatch(first)
    assert first != second, "two nodes of one host must not take each other's place"
    assert NodeConfig(node_id="p7").name("prefill") == "p7"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"bootstrap": ""}, "bootstrap: at least one host:port is needed"),
        ({"bootstrap": "a:7070,b"}, "bootstrap is 'b'; allowed: host:port, a port of 1 to 65535"),
        ({"bootstrap": "a:65536"}, "bootstrap is 'a:65536'; allowed: host:port, a port of 1 to 65535"),
        ({"node_id": "nœud"}, f"node_id is 'nœud'; {NODE_ID_LIMIT}"),
        ({"node_id": "a:b"}, f"node_id is 'a:b'; {NODE_ID_LIMIT}"),
        ({"node_id": "a b"}, f"node_id is 'a b'; {NODE_ID_LIMIT}"),
        ({"node_id": "a\n"}, f"node_id is 'a\\n'; {NODE_ID_LIMIT}"),
        ({"node_id": "x" * 129}, f"node_id is '{'x' * 129}'; {NODE_ID_LIMIT}"),
        ({"page_size": "0"}, "--page-size: '0' is out of range: 1 to 256"),
        ({"page_size": "257"}, "--page-size: '257' is out of range: 1 to 256"),
        ({"num_pages": "1"}, "--num-pages: '1' is out of range: at least 2"),
        ({"stall_timeout": "nan"}, "--stall-timeout: 'nan' is not a number"),
        ({"dtype": "int8"}, "--dtype: 'int8' is not one of float32, float16, bfloat16"),
    ],
)
def test_node_options_beyond_their_limits(flags: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(NodeConfig, file=None, env={}, flags=flags)
    assert caught.value.problems == (problem,)


def test_node_options_on_their_limits() -> None:
    flags = {"page_size": "256", "num_pages": "2", "drain_timeout": "0", "bootstrap": "a:1,b:2", "kv_dtype": "none"}
    config = load(NodeConfig, file=None, env={}, flags=flags)
    assert (config.page_size, config.num_pages, config.drain_timeout, config.kv_dtype) == (256, 2, 0, None)
    assert config.bootstrap == ("a:1", "b:2")
    assert isinstance(config.model_dir, Path)
    for node_id in ("", "Prefill_1.example-7", "x" * 128):
        assert not list(NodeConfig(node_id=node_id).problems())
