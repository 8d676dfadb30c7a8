"""Configuration: three sources, one list of mistakes, flags and docs from the same declaration."""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from engine.core.config import Bytes, add_arguments, describe, load, option, option_names, strays
from engine.core.errors import ConfigError


class Policy(enum.StrEnum):
    FCFS = "fcfs"
    LPM = "lpm"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Scheduling.

    More text that is no title.
    """

    policy: Policy = option(Policy.FCFS, "order of the waiting queue")
    chunk_size: int | None = option(512, "tokens of one prompt in one forward; 100 % of it", unit="tokens", low=1)


@dataclass(frozen=True, slots=True)
class Config:
    """A node."""

    bootstrap: tuple[str, ...] = option(("127.0.0.1:7070",), "bootstrap addresses")
    kv_memory: Bytes = option(Bytes("2GiB"), "size of the page pool", low=1)
    page_size: int = option(16, "tokens a page", low=1, high=1024)
    ratio: float = option(0.5, "a share", low=0, high=1)
    dtype: str = option("float32", "weights", choices=("float32", "bfloat16"))
    model_dir: Path = option(Path("models"), "where models lie")
    checksum: bool = option(False, "verify pages")
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def problems(self) -> Iterator[str]:
        if self.page_size == 13:
            yield "page_size may not be 13"


def test_defaults_are_the_declared_ones() -> None:
    assert load(Config, file=None, env={}, flags={}) == Config()


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('page-size = 1\nratio = 1\nkv_memory = "1KiB"\nchunk_size = 2\nbootstrap = ["a:1", "b:2"]\n')
    env = {"KVRELAY_PAGE_SIZE": "2", "KVRELAY_KV_MEMORY": "2KiB", "KVRELAY_CHECKSUM": "yes", "KVRELAY_OTHER": "x"}
    config = load(Config, file=file, env=env, flags={"page_size": "3", "command": "prefill"})
    assert config.page_size == 3
    assert config.kv_memory == 2048
    assert config.checksum is True
    assert config.ratio == 1.0
    assert type(config.ratio) is float
    assert config.bootstrap == ("a:1", "b:2")
    assert config.scheduler.chunk_size == 2


def test_every_mistake_is_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('pagesize = 16\nmodel_dir = 5\nchecksum = "maybe"\nscheduler = {policy = "lpm"}\nbootstrap = 7\n')
    env = {"KVRELAY_RATIO": "nan", "KVRELAY_POLICY": "lifo", "KVRELAY_KV_MEMORY": "2 parsecs"}
    flags = {"page_size": "0", "chunk_size": "many", "dtype": "int8"}
    with pytest.raises(ConfigError) as caught:
        load(Config, file=file, env=env, flags=flags)
    problems = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 11
    for expected in (
        f"pagesize in {file}: no such option, did you mean page_size?",
        f"model_dir in {file}: 5 is not a path",
        f"checksum in {file}: 'maybe' is not true or false",
        f"scheduler in {file}: no such option",
        f"bootstrap in {file}: 7 is not a list",
        "KVRELAY_RATIO: 'nan' is not a number",
        "KVRELAY_POLICY: 'lifo' is not one of fcfs, lpm",
        "KVRELAY_KV_MEMORY: '2 parsecs' is not a size such as 512MiB or 2GB",
        "--page-size: '0' is out of range: 1 to 1024",
        "--chunk-size: 'many' is not a whole number",
        "--dtype: 'int8' is not one of float32, bfloat16",
    ):
        assert expected in problems


@pytest.mark.parametrize("content", [b"page_size = ", b"\xff"])
def test_unreadable_file_is_a_problem(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    for file in (tmp_path / "bad.toml", tmp_path / "none.toml"):
        with pytest.raises(ConfigError, match=file.name):
            load(Config, file=file, env={}, flags={})


def test_file_may_hold_options_of_others_that_are_known(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text("page_size = 8\nmax_queue = 9\nmax-running = 3\n")
    known = {"max_queue", "max_running"}
    assert load(Config, file=file, env={}, flags={}, known=known).page_size == 8
    file.write_text("max_queu = 9\n")
    with pytest.raises(ConfigError, match=r"max_queu in .*: no such option, did you mean max_queue\?"):
        load(Config, file=file, env={}, flags={}, known=known)


def test_rules_between_fields() -> None:
    with pytest.raises(ConfigError, match="may not be 13"):
        load(Config, file=None, env={}, flags={"page_size": "13"})


def test_none_switches_an_optional_value_off() -> None:
    config = load(Config, file=None, env={"KVRELAY_CHUNK_SIZE": "none", "KVRELAY_RATIO": ""}, flags={})
    assert config.scheduler.chunk_size is None
    assert config.ratio == 0.5


@pytest.mark.parametrize(
    ("text", "count"), [("17", 17), ("2GiB", 2 << 30), ("1.5kb", 1500), (" 3 MiB ", 3 << 20), ("4g", 4 << 30)]
)
def test_sizes(text: str, count: int) -> None:
    assert Bytes(text) == count


def test_sizes_print_as_they_are_written() -> None:
    assert [str(Bytes(n)) for n in (0, 17, 2048, 3 << 30)] == ["0", "17", "2KiB", "3GiB"]
    for text in ("", "GiB", "-", "1.2.3", "infKB"):
        with pytest.raises(ValueError, match="is not a size"):
            Bytes(text)


def test_flags_come_from_the_declaration(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, Config)
    assert vars(parser.parse_args([])) == {}
    flags = vars(parser.parse_args(["--checksum", "--policy", "lpm", "--kv-memory", "1MiB", "--bootstrap", "a:1, b:2"]))
    config = load(Config, file=None, env={"KVRELAY_CHECKSUM": "0"}, flags=flags)
    assert config.checksum
    assert config.scheduler.policy is Policy.LPM
    assert config.kv_memory == 1 << 20
    assert config.bootstrap == ("a:1", "b:2")
    assert vars(parser.parse_args(["--no-checksum"])) == {"checksum": False}
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "--policy {fcfs,lpm} order of the waiting queue (default: fcfs)" in shown
    assert "--chunk-size TOKENS tokens of one prompt in one forward; 100 % of it (default: 512 tokens)" in shown
    assert "Scheduling:" in shown
    assert "default: 2GiB" in shown
    assert "--bootstrap HOST:PORT,..." in shown


def test_variables_that_are_no_option_are_found_and_the_nearest_one_is_named() -> None:
    env = {"KVRELAY_PAGESIZE": "8", "KVRELAY_PAGE_SIZE": "16", "KVRELAY_X": "9", "KVRELAY_Y": "", "HOME": "/root"}
    assert strays(env, ("page_size", "policy")) == {
        "KVRELAY_X": "KVRELAY_X: no such option",
        "KVRELAY_PAGESIZE": "KVRELAY_PAGESIZE: no such option, did you mean KVRELAY_PAGE_SIZE?",
    }


# ---- secrets ----


@dataclass(frozen=True, slots=True)
class AccessConfig:
    """Access."""

    token: str | None = option(None, "what one must know", secret=True)
    token_file: Path | None = option(None, "file that holds it")


@dataclass(frozen=True, slots=True)
class GuardedConfig:
    port: int = option(1, "where")
    access: AccessConfig = field(default_factory=AccessConfig)


def guarded(env: dict[str, str] | None = None, file: Path | None = None, **flags: str) -> AccessConfig:
    return load(GuardedConfig, file=file, env=env or {}, flags=flags).access


def test_a_secret_comes_from_the_environment_a_toml_file_or_a_file_of_its_own(tmp_path: Path) -> None:
    assert guarded().token is None
    assert guarded({"KVRELAY_TOKEN": "sesame"}).token == "sesame"
    assert guarded({"KVRELAY_TOKEN": "none"}).token == "none", "a bad secret, but not no secret"
    toml, own = tmp_path / "node.toml", tmp_path / "token"
    toml.write_text('token = "sesame"\n')
    assert guarded(file=toml).token == "sesame"
    own.write_text("\n open sesame\r\n")
    assert guarded(token_file=str(own)).token == "open sesame"
    assert guarded({"KVRELAY_TOKEN_FILE": str(own)}).token == "open sesame"
    toml.write_text(f'token_file = "{own}"\n')
    assert guarded(file=toml).token == "open sesame"
    assert guarded(file=toml, token_file="none").token is None


def test_a_secret_has_no_flag() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_arguments(parser, GuardedConfig)
    assert "--token " not in parser.format_help()
    assert vars(parser.parse_args(["--token-file", "x"])) == {"token_file": "x"}
    _, unknown = parser.parse_known_args(["--token", "sesame"])
    assert unknown == ["--token", "sesame"]
    assert guarded(token="sesame").token is None
    assert "--token`" not in describe(GuardedConfig)
    assert "| `KVRELAY_TOKEN` | none | text | what one must know |" in describe(GuardedConfig)


def test_a_secret_is_in_no_text(tmp_path: Path) -> None:
    toml, own = tmp_path / "node.toml", tmp_path / "token"
    toml.write_text("token = 77777777\n")
    own.write_bytes(b"sesame \xff")
    for env, file in (({}, toml), ({"KVRELAY_TOKEN_FILE": str(own)}, None)):
        with pytest.raises(ConfigError, match="not text") as caught:
            guarded(env, file)
        assert "77777777" not in str(caught.value)
        assert "sesame" not in str(caught.value)
    assert "sesame" not in repr(guarded({"KVRELAY_TOKEN": "sesame"}))


def test_a_secret_given_twice_or_in_a_file_that_is_not_there(tmp_path: Path) -> None:
    own = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"token: No such file or directory$"):
        guarded(token_file=str(own))
    own.write_text("sesame")
    with pytest.raises(ConfigError, match=r"^KVRELAY_TOKEN and --token-file: only one of the two can be meant$"):
        guarded({"KVRELAY_TOKEN": "sesame"}, token_file=str(own))


# ---- docs ----


def test_docs_table_names_every_option() -> None:
    table = describe(Config)
    assert all(f"`--{name.replace('_', '-')}`" in table for name in option_names(Config))
    assert "| `--policy` | fcfs | fcfs \\| lpm | order of the waiting queue |" in table
