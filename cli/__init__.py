"""The `kvrelay` command.

Owns what a person at a terminal meets: sub-commands, progress, tables, exit codes, and the child processes of a local
cluster. It must not know how a service works: it loads a service's configuration and calls its `main`, or talks to a
running cluster over gRPC like any client.

`main` finds the sub-command and imports its module, and no other: `services` (bootstrap, prefill, decode, prepare),
`cluster` (up), `generate`, `chat`, `operate` (status, drain, health), `explain` and `demo`. Those that speak to a
cluster do it through `client`; `show` lays out tables and progress; `plan` works out what a local cluster starts,
`children` starts processes and sees that none is left behind.
"""
