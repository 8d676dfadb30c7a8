"""Prints docs/options.md: every option of services and clients, from the fields that declare them. By `make docs`."""

from __future__ import annotations

from pathlib import Path

from bootstrap.config import BootstrapConfig
from cli.client import ClientConfig
from decode_service.config import DecodeConfig
from engine.core.config import describe
from prefill_service.config import PrefillConfig
from unified_service.config import UnifiedConfig

__all__ = ["options_page"]

_HEAD = """\
# Options

Made by `make docs` from the code; do not edit.

An option `page_size` is the flag `--page-size`, the environment variable `KVRELAY_PAGE_SIZE`, and the key `page_size`
in the TOML file given with `--config`. A flag wins over the environment, the environment over the file. One file may
serve a whole cluster: each service takes what it knows. A name that no service knows is refused in a file, and warned
of in the environment. `kvrelay up` takes the options of all services, refuses flags
that only roles have which it does not start, and decides addresses and node ids itself: `--address` and
`--metrics-address` are those of the bootstrap. One that is true or false is switched off with `--no-`, as in
`--no-prefix-cache`. Secrets have no flag, which would show in the list of processes;
the tables name their variables.
"""


def options_page() -> str:
    services = (
        ("bootstrap", BootstrapConfig),
        ("prefill", PrefillConfig),
        ("decode", DecodeConfig),
        ("unified", UnifiedConfig),
        ("generate, chat, status, explain, drain", ClientConfig),
    )
    page = "\n".join([_HEAD, *(f"## kvrelay {name}\n\n{describe(config)}" for name, config in services)])
    return page.replace(str(Path.home()), "~")  # the same page whoever makes it


if __name__ == "__main__":
    print(options_page(), end="")
