"""`kvrelay key`: a new API key, and the line by which the bootstrap service knows it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from cli.show import say
from engine.core.access import new_key
from engine.core.errors import ConfigError

__all__ = ["key"]


def key(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `kvrelay key`."""
    parser.add_argument("name", metavar="NAME", help="of the client, for logs and limits")
    parser.add_argument("--admin", action="store_true", help="also for status, explain and drain")
    parser.set_defaults(run=_run)


def _run(flags: argparse.Namespace, env: Mapping[str, str]) -> int:
    """The key is the first line on standard output, the line for the keys file the second."""
    try:
        secret, made = new_key(flags.name, flags.admin)
    except ValueError as error:
        raise ConfigError([f"NAME: {error}"]) from None
    say("the key, for the client (KVRELAY_API_KEY, --api-key-file); it is kept nowhere else:")
    print(secret, flush=True)
    say("its line, for the bootstrap service (--api-keys-file, KVRELAY_API_KEYS):")
    print(made.line, flush=True)
    return 0
