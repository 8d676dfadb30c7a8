"""Configuration: one frozen dataclass a service, filled from file < environment < flags, checked once at start.

A field is declared with `option`, which carries its help text and limits; everything else follows from that: the
flag (`--page-size`), the environment variable (`KVRELAY_PAGE_SIZE`), the key in the TOML file (`page_size`), the
checks and the table in the docs. A field whose type is another such dataclass is flattened into the same names, so
a service composes e.g. the scheduler's options:

    @dataclass(frozen=True, slots=True)
    class PrefillConfig:
        kv_memory: Bytes = option(Bytes("2GiB"), "size of the page pool", low=1)
        scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

A secret (`option(None, help, secret=True)`, of type `str | None`) has no flag, which would show in the list of
processes, and its value is in no text this module makes. Beside it stands an option of the same name and `_file`, of
type `Path | None`: the secret is read from that file when the configuration is loaded.

Types: int, float, bool, str, Path, Bytes, a StrEnum, `tuple[X, ...]` of these (comma-separated) and `X | None`
("none"). An empty environment variable counts as not set. A dataclass may have `problems() -> Iterable[str]` for rules
between fields. Nothing else in the project reads the environment.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import enum
import functools
import math
import re
import tomllib
import types
import typing
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.core.errors import ConfigError

__all__ = [
    "ENVIRONMENT_PREFIX",
    "MAX_PORT",
    "Bytes",
    "add_arguments",
    "address_problems",
    "describe",
    "load",
    "option",
    "option_names",
    "strays",
]

ENVIRONMENT_PREFIX = "KVRELAY_"
_METADATA = "kvrelay"
MAX_PORT = 65535
_ADDRESS = re.compile(r"[^/:]+:\d+")  # text whose default is one is an address
_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}

T = TypeVar("T")


class Bytes(int):
    """A number of bytes, from a number or from text such as "512MiB" or "1.5GB". ValueError for anything else."""

    def __new__(cls, size: int | str) -> Bytes:
        if isinstance(size, int):
            return super().__new__(cls, size)
        number = size.strip().rstrip("BKMGTbkmgti")
        unit = size.strip()[len(number) :].upper()
        try:
            value = float(number) * _UNITS[unit]
        except (ValueError, KeyError):
            raise ValueError(f"{size!r} is not a size such as 512MiB or 2GB") from None
        if not math.isfinite(value):
            raise ValueError(f"{size!r} is not a size such as 512MiB or 2GB")
        return super().__new__(cls, int(value))

    def __str__(self) -> str:
        unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if self and self % _UNITS[u.upper()] == 0), None)
        return f"{self // _UNITS[unit.upper()]}{unit}" if unit else int.__repr__(self)


@dataclass(frozen=True, slots=True)
class _Declared:
    help: str
    unit: str
    choices: tuple[object, ...]
    low: float | None
    high: float | None
    secret: bool


def option(
    default: T,
    help: str,
    *,
    unit: str = "",
    choices: Sequence[T] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
) -> T:
    """A configuration field. `low` and `high` are inclusive; for a tuple, limits and choices hold for each item."""
    declared = _Declared(help, unit, tuple(choices), low, high, secret)
    return dataclasses.field(default=default, repr=not secret, metadata={_METADATA: declared})


@dataclass(frozen=True, slots=True)
class _Option:
    """One field of a config dataclass, resolved: `kind` is the type of one value."""

    name: str
    group: type
    kind: type
    many: bool
    optional: bool
    default: object
    declared: _Declared

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        of = self.kind if issubclass(self.kind, enum.Enum) else self.declared.choices
        return tuple(str(choice) for choice in of)

    @property
    def type_name(self) -> str:
        text = "host:port" if _ADDRESS.fullmatch(self.default_text.partition(",")[0]) else "text"
        name = "|".join(self.choices) or {str: text, bool: "true|false"}.get(self.kind, self.kind.__name__.lower())
        return f"{name},..." if self.many else name

    @property
    def default_text(self) -> str:
        if isinstance(self.default, tuple):
            return ",".join(str(item) for item in self.default) or "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "none" if self.default is None or self.default == "" else str(self.default)

    @property
    def help_text(self) -> str:
        unit = f" {self.declared.unit}" if self.declared.unit and self.default is not None else ""
        return f"{self.declared.help} (default: {self.default_text}{unit})"

    def parse(self, value: object) -> object:
        """Value of the field's type from a flag's or variable's text or a TOML value; ValueError says what is wrong."""
        if self.optional and not self.declared.secret and isinstance(value, str) and value.lower() == "none":
            return None
        if not self.many:
            return self._item(value)
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, list | tuple):
            raise ValueError(f"{value!r} is not a list")
        return tuple(self._item(item) for item in value)

    def _item(self, value: object) -> object:
        item = _convert(self.kind, value)
        low, high = self.declared.low, self.declared.high
        if isinstance(item, int | float) and not (-math.inf if low is None else low) <= item <= (
            math.inf if high is None else high
        ):
            limit = f"at least {low}" if high is None else f"at most {high}" if low is None else f"{low} to {high}"
            raise ValueError(f"{value!r} is out of range: {limit}")
        if self.declared.choices and item not in self.declared.choices:
            raise ValueError(f"{value!r} is not one of {', '.join(self.choices)}")
        return item


def _convert(kind: type, value: object) -> object:
    """`value` as `kind`. Text is parsed; a TOML value of another type is refused, save an integer for a float."""
    text = value.strip() if isinstance(value, str) else None
    if kind is bool:
        if isinstance(value, bool):
            return value
        if text is not None and text.lower() in _WORDS:
            return _WORDS[text.lower()]
        raise ValueError(f"{value!r} is not true or false")
    if isinstance(value, bool):
        raise ValueError(f"{value!r} is not {_article(kind)}")
    if kind is Bytes and isinstance(value, int | str):
        return Bytes(value)
    if issubclass(kind, enum.Enum):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{value!r} is not one of {', '.join(str(member) for member in kind)}") from None
    if (kind is str or kind is Path) and isinstance(value, str | Path):
        return Path(value).expanduser() if kind is Path else str(value)
    if (kind is int and isinstance(value, int)) or (kind is float and isinstance(value, int | float)):
        number = kind(value)
    elif kind in (int, float) and text is not None:
        try:
            number = kind(text)
        except ValueError:
            raise ValueError(f"{value!r} is not {_article(kind)}") from None
    else:
        raise ValueError(f"{value!r} is not {_article(kind)}")
    if math.isnan(number):
        raise ValueError(f"{value!r} is not {_article(kind)}")
    return number


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "text", Path: "a path"}.get(kind, f"a {kind.__name__}")


@functools.cache
def _options(cls: type) -> tuple[_Option, ...]:
    """Every option of `cls`, those of nested dataclasses in their place."""
    hints = typing.get_type_hints(cls)
    found: list[_Option] = []
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found += _options(typing.cast(type, hint))
            continue
        declared = field.metadata.get(_METADATA)
        assert isinstance(declared, _Declared), f"{cls.__name__}.{field.name} is not declared with option()"
        arms = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        (arm,) = [arm for arm in arms if arm is not type(None)]
        many = typing.get_origin(arm) is tuple
        kind = typing.get_args(arm)[0] if many else arm
        found.append(_Option(field.name, cls, kind, many, len(arms) > 1, field.default, declared))
    names = [one.name for one in found]
    assert len(names) == len(set(names)), f"{cls.__name__} has two options of one name: {sorted(names)}"
    return tuple(found)


def option_names(cls: type) -> tuple[str, ...]:
    """Names of all options of a config dataclass, nested ones included."""
    return tuple(one.name for one in _options(cls))


def load(
    cls: type[T],
    *,
    file: Path | None,
    env: Mapping[str, str],
    flags: Mapping[str, object],
    known: Collection[str] = (),
) -> T:
    """A checked `cls`. Keys of `flags` that are no option are ignored, since argparse's namespace holds others too.
    Of the keys in `file`, those in `known` may be there: options of others who read the same file.

    Raises ConfigError with every mistake of all three sources.
    """
    options = {one.name: one for one in _options(typing.cast(type, cls))}
    problems: list[str] = []
    given: dict[str, tuple[object, str]] = {}  # value, and where it was said
    for key, value in _read(file, problems).items():
        name = key.replace("-", "_")
        if name in options:
            given[name] = (value, f"{name} in {file}")
        elif name not in known:
            problems.append(f"{key} in {file}: no such option" + _near(name, {*options, *known}))
    given |= {one.name: (env[one.variable], one.variable) for one in options.values() if env.get(one.variable)}
    given |= {
        one.name: (flags[one.name], one.flag)
        for one in options.values()
        if one.name in flags and not one.declared.secret
    }
    values: dict[str, object] = {one.name: one.default for one in options.values()}
    for name, (value, source) in given.items():
        try:
            values[name] = options[name].parse(value)
        except ValueError as error:
            problems.append(f"{source}: {'not text' if options[name].declared.secret else error}")
    for name in (one.name for one in options.values() if one.declared.secret):
        path = values[f"{name}_file"]
        if path is not None and values[name] is not None:
            problems.append(f"{given[name][1]} and {given[f'{name}_file'][1]}: only one of the two can be meant")
        elif path is not None:
            values[name] = _read_secret(typing.cast(Path, path), problems)
    if not problems:
        config = _build(cls, values)
        problems += _rules(config)
        if not problems:
            return config
    raise ConfigError(problems)


def address_problems(name: str, addresses: Iterable[str]) -> Iterator[str]:
    """Why these are no places to dial, each "host:port"."""
    if not addresses:
        yield f"{name}: at least one host:port is needed"
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:  # gRPC would dial port 443
            yield f"{name} is {address!r}; allowed: host:port, a port of 1 to {MAX_PORT}"


def strays(env: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Variables that look like options and are none of the `known` ones, and a sentence about each."""
    names = {name.upper() for name in known}
    given = [name for name in env if name.startswith(ENVIRONMENT_PREFIX) and env[name]]
    found = {name: name.removeprefix(ENVIRONMENT_PREFIX) for name in given}
    return {
        variable: f"{variable}: no such option" + _near(name, names, ENVIRONMENT_PREFIX)
        for variable, name in sorted(found.items())
        if name not in names
    }


def _near(name: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {prefix}{near[0]}?" if near else ""


def _read(file: Path | None, problems: list[str]) -> dict[str, object]:
    if file is None:
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{file}: not a TOML file: {error}")
    return {}


def _read_secret(file: Path, problems: list[str]) -> str | None:
    """What the file holds, without white space around it."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError as error:
        problems.append(f"{file}: {error.strerror}")
    except UnicodeDecodeError:
        problems.append(f"{file}: not text")
    return None


def _build(cls: type[T], values: Mapping[str, object]) -> T:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, cls)):
        hint = hints[field.name]
        arguments[field.name] = (
            _build(hint, values) if isinstance(hint, type) and dataclasses.is_dataclass(hint) else values[field.name]
        )
    return cls(**arguments)


def _rules(config: object) -> Iterator[str]:
    """What the `problems` methods of a config and its nested configs say."""
    for field in dataclasses.fields(typing.cast(Any, config)):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            yield from _rules(value)
    check = getattr(config, "problems", None)
    if check is not None:
        said: Iterable[str] = check()
        yield from said


def add_arguments(parser: argparse.ArgumentParser, cls: type, *, skip: Container[str] = ()) -> None:
    """A flag for every option of `cls` but secrets and those in `skip`, grouped by the dataclass that declares it.

    Values stay text, and what is not given is absent from the namespace: `load` checks all sources alike.
    """
    groups: dict[type, argparse._ArgumentGroup] = {}
    for one in (one for one in _options(cls) if one.name not in skip and not one.declared.secret):
        if one.group not in groups:
            groups[one.group] = parser.add_argument_group((one.group.__doc__ or "options").splitlines()[0].rstrip("."))
        help_text = one.help_text.replace("%", "%%")
        if one.kind is bool and not one.many and not one.optional:
            action = argparse.BooleanOptionalAction
            groups[one.group].add_argument(one.flag, action=action, default=argparse.SUPPRESS, help=help_text)
        else:
            metavar = f"{{{','.join(one.choices)}}}" if one.choices else (one.declared.unit or one.type_name).upper()
            groups[one.group].add_argument(one.flag, default=argparse.SUPPRESS, metavar=metavar, help=help_text)


def describe(cls: type) -> str:
    """The options of `cls` as a Markdown table."""
    rows = ["| option | default | type | meaning |", "|---|---|---|---|"]
    for one in _options(cls):
        unit = f", {one.declared.unit}" if one.declared.unit else ""
        kind = f"{one.type_name}{unit}".replace("|", " \\| ")
        name = one.variable if one.declared.secret else one.flag
        rows.append(f"| `{name}` | {one.default_text} | {kind} | {one.declared.help} |")
    return "\n".join(rows) + "\n"
