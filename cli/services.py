"""`kvrelay bootstrap`, `prefill`, `decode` and `prepare`: load a configuration, hand over to what it configures."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cli.show import say
from engine.core.config import ENVIRONMENT_PREFIX, add_arguments, load, option
from engine.core.errors import KVRelayError
from engine.core.model_store import DEMO_MODEL, PreparedModel, default_cache_dir, ensure_prepared

__all__ = ["bootstrap", "decode", "prefill", "prepare", "prepare_model"]

log = logging.getLogger("kvrelay")

C = TypeVar("C")


def bootstrap(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay bootstrap`."""
    from bootstrap.config import BootstrapConfig

    def run(config: BootstrapConfig) -> int:
        from bootstrap.server import main

        return main(config)

    _service(parser, BootstrapConfig, run)


def prefill(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay prefill`."""
    from prefill_service.config import PrefillConfig

    def run(config: PrefillConfig) -> int:
        from prefill_service.server import main  # torch: only now that the configuration is known to be right

        return main(config)

    _service(parser, PrefillConfig, run)


def decode(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay decode`."""
    from decode_service.config import DecodeConfig

    def run(config: DecodeConfig) -> int:
        from decode_service.server import main

        return main(config)

    _service(parser, DecodeConfig, run)


def _service(parser: argparse.ArgumentParser, cls: type[C], run: Callable[[C], int]) -> None:
    variable = f"{ENVIRONMENT_PREFIX}CONFIG"
    parser.add_argument("--config", type=Path, metavar="FILE", help=f"TOML file of these options (or {variable})")
    add_arguments(parser, cls)

    def load_and_run(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
        file = flags.config or (Path(env[variable]) if env.get(variable) else None)
        config = load(cls, file=file, env=env, flags=vars(flags))
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
