"""Entry point: finds the sub-command, imports only its module, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cli.show import describe_error, say
from engine.core.config import ENVIRONMENT_PREFIX
from engine.core.errors import ConfigError, KVRelayError

__all__ = ["EXIT_FAILURE", "EXIT_INTERRUPTED", "EXIT_OK", "EXIT_USAGE", "main"]

EXIT_OK, EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted

Options of services may also come from a file (--config FILE, TOML) and from the environment
(KVRELAY_PAGE_SIZE for --page-size); a flag wins over the environment, the environment over the file.
Secrets have no flag: KVRELAY_API_KEY, KVRELAY_JOIN_TOKEN and KVRELAY_API_KEYS, or a file (--api-key-file and so on).
"""


@dataclass(frozen=True, slots=True)
class _Command:
    """A sub-command. `place` is module:function; the function fills a parser and sets its `run` default, which is
    called with the parsed arguments and the environment and returns the exit code.
    """

    name: str
    place: str
    summary: str


_COMMANDS = (
    _Command("up", "cli.cluster:up", "start a cluster on this machine"),
    _Command("generate", "cli.generate:generate", "continue a prompt, streaming the text"),
    _Command("chat", "cli.chat:chat", "talk with the model"),
    _Command("status", "cli.operate:status", "show nodes, queues, pages and cache"),
    _Command("explain", "cli.explain:explain", "tell what became of a request, and why it had to wait"),
    _Command("drain", "cli.operate:drain", "let a node finish its work and leave"),
    _Command("health", "cli.operate:health", "ask a process whether it serves"),
    _Command("key", "cli.key:key", "make an API key"),
    _Command("bootstrap", "cli.services:bootstrap", "run the bootstrap service: front door and node registry"),
    _Command("prefill", "cli.services:prefill", "run a prefill node"),
    _Command("decode", "cli.services:decode", "run a decode node"),
    _Command("unified", "cli.services:unified", "run a unified node: prefill and decode in one"),
    _Command("prepare", "cli.services:prepare", "fetch and convert a model, so that later starts are quick"),
    _Command("demo", "cli.demo:demo", "start a small cluster, answer two prompts, stop"),
)


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay",
        description="Prefill/decode disaggregated LLM serving.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvrelay {importlib.metadata.version('kvrelay')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in _COMMANDS:
        description = f"{command.summary[0].upper()}{command.summary[1:]}."
        sub = commands.add_parser(command.name, help=command.summary, description=description, allow_abbrev=False)
        if command.name == chosen:
            module, function = command.place.split(":")
            getattr(importlib.import_module(module), function)(sub)
    return parser


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Run one command; returns its exit code. The only place where the environment is read."""
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # what a model says must not end the command
    try:
        arguments = _parser(next((word for word in argv if not word.startswith("-")), None)).parse_args(argv)
        if any(name.startswith(ENVIRONMENT_PREFIX) for name in env):
            from cli.services import without_strays  # it knows the options of all services

            env = without_strays(env)
        code: int = arguments.run(arguments, env)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader, e.g. `head`, has left; keep the interpreter from complaining at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except UnicodeError as error:  # from standard input, or an argument that no message can carry
        say(f"kvrelay: input is not valid UTF-8: {error}")
        return EXIT_USAGE
    except ConfigError as error:
        say("\n".join(f"kvrelay: {problem}" for problem in error.problems))
        return EXIT_USAGE
    except KVRelayError as error:
        say(f"kvrelay: {describe_error(error)}")
        return EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
