"""`kvrelay bootstrap`, `prepare` and every kind of node: load a configuration, hand over to what it configures."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from bootstrap.config import BootstrapConfig
from cli.show import say
from decode_service.config import DecodeConfig
from engine.core.access import ClientAccess
from engine.core.config import ENVIRONMENT_PREFIX, add_arguments, load, option, option_names, strays
from engine.core.errors import KVRelayError
from engine.core.logs import setup_logging
from engine.core.model_store import DEMO_MODEL, PreparedModel, default_cache_dir, ensure_prepared
from engine.core.node_config import NodeConfig
from engine.core.types import Role
from prefill_service.config import PrefillConfig
from unified_service.config import UnifiedConfig

__all__ = [
    "CONFIGS",
    "add_config_file",
    "bootstrap",
    "config_file",
    "decode",
    "load_service",
    "prefill",
    "prepare",
    "prepare_model",
    "ranks_of",
    "unified",
    "without_strays",
]

CONFIGS: dict[str, type] = {
    "bootstrap": BootstrapConfig,
    Role.PREFILL: PrefillConfig,
    Role.DECODE: DecodeConfig,
    Role.UNIFIED: UnifiedConfig,
}

log = logging.getLogger("kvrelay")

_FILE_VARIABLE = f"{ENVIRONMENT_PREFIX}CONFIG"

C = TypeVar("C")
N = TypeVar("N", PrefillConfig, DecodeConfig, UnifiedConfig)


def bootstrap(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay bootstrap`."""

    def run(config: BootstrapConfig) -> int:
        from bootstrap.server import main

        return main(config)

    _service(parser, BootstrapConfig, run)


def prefill(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay prefill`."""

    def run(config: PrefillConfig) -> int:
        from prefill_service.server import main

        return main(config)

    _node(parser, Role.PREFILL, PrefillConfig, run)


def decode(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay decode`."""

    def run(config: DecodeConfig) -> int:
        from decode_service.server import main

        return main(config)

    _node(parser, Role.DECODE, DecodeConfig, run)


def unified(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay unified`."""

    def run(config: UnifiedConfig) -> int:
        from unified_service.server import main

        return main(config)

    _node(parser, Role.UNIFIED, UnifiedConfig, run)


def _node(parser: argparse.ArgumentParser, role: Role, cls: type[N], run: Callable[[N], int]) -> None:
    """`run` imports torch, which takes seconds: it comes when it is known that nothing speaks against the node."""

    def announce_and_run(config: N) -> int:
        from rpc.precheck import may_attach

        node = _announced(role, config.node)
        return run(dataclasses.replace(config, node=node)) if may_attach(role, node, ranks_of(config)) else 1

    _service(parser, cls, announce_and_run)


def ranks_of(config: object) -> int:
    """How many nodes a process of this configuration is."""
    return config.ranks.dp_size if isinstance(config, PrefillConfig) else 1


def _announced(role: Role, config: NodeConfig) -> NodeConfig:
    """`config` with the node's name settled, after a log line: what comes next takes seconds."""
    named = dataclasses.replace(config, node_id=config.name(role))
    setup_logging(named.logs, role=role, node=named.node_id)
    log.info("starting", extra={"bootstrap": ",".join(named.bootstrap)})
    return named


def add_config_file(parser: argparse.ArgumentParser, text: str) -> None:
    """The flag that `config_file` reads."""
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"{text} (or {_FILE_VARIABLE})")


def config_file(flags: argparse.Namespace, env: Mapping[str, str]) -> Path | None:
    """The file that the flag or the environment names."""
    return flags.config or (Path(env[_FILE_VARIABLE]) if env.get(_FILE_VARIABLE) else None)


def load_service(cls: type[C], file: Path | None, env: Mapping[str, str], flags: Mapping[str, object]) -> C:
    """`load`, from a file that may hold options of the other services too: one file serves a cluster."""
    return load(cls, file=file, env=env, flags=flags, known=_known())


def _known() -> set[str]:
    """Names of the options of all services and clients."""
    return {name for config in (*CONFIGS.values(), ClientAccess) for name in option_names(config)}


def without_strays(env: Mapping[str, str]) -> Mapping[str, str]:
    """`env` without variables that look like options and are none, after a warning about each.

    They are not refused, as those in a file are: the environment is not ours alone. Kubernetes, for one, sets such
    variables for a service of the name kvrelay. Child processes need not warn once more.
    """
    found = strays(env, {*_known(), _FILE_VARIABLE.removeprefix(ENVIRONMENT_PREFIX)})
    for sentence in found.values():
        say(f"kvrelay: warning: {sentence}")
    return {name: value for name, value in env.items() if name not in found}


def _service(parser: argparse.ArgumentParser, cls: type[C], run: Callable[[C], int]) -> None:
    add_config_file(parser, "TOML file of these options; those of other services in it are not used")
    add_arguments(parser, cls)

    def load_and_run(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
        config = load_service(cls, config_file(flags, env), env, vars(flags))
        try:
            code = run(config)
        except KVRelayError:
            raise
        except Exception:
            log.critical("ended by an error", exc_info=True)
            code = 1
        # The service has closed what it opened. Left to itself the interpreter would look through all of torch for
        # garbage once more, which takes seconds.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)

    parser.set_defaults(run=load_and_run)


@dataclass(frozen=True, slots=True)
class _PrepareConfig:
    """Model."""

    model: str = option(DEMO_MODEL, f"{DEMO_MODEL}, a Hugging Face directory or id, or a GGUF file")
    model_dir: Path = option(default_cache_dir(), "where prepared models are kept")


def prepare(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay prepare`."""
    text = f"{DEMO_MODEL}, a Hugging Face directory or id, or a GGUF file (default: {ENVIRONMENT_PREFIX}MODEL, or this)"
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, metavar="MODEL", help=text)
    add_arguments(parser, _PrepareConfig, skip=("model",))
    parser.set_defaults(run=_prepare)


def _prepare(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    config = load(_PrepareConfig, file=None, env=env, flags=vars(flags))
    model = prepare_model(config.model, config.model_dir)
    print(f"{model.name} is prepared at {model.path} ({model.architecture}, {model.max_context} tokens of context)")
    return 0


def prepare_model(name: str, model_dir: Path) -> PreparedModel:
    """`ensure_prepared` with its progress on the terminal."""
    return ensure_prepared(name, model_dir, lambda line: say(f"  {line}"))
