"""The command line. Human text goes to stderr; the last line of stdout is one JSON object; bad input is status 2."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from pwjax.cli_common import EXIT_INTERRUPTED, ArgumentParser, print_json_last, run_command, versions
from pwjax.commands import process

# Command -> (module, what it does). Modules are imported only when their command runs.
COMMANDS = {
    "prepare": ("pwjax.commands.prepare", "quantize a Hugging Face MoE folder into a store of weight pages"),
    "inspect": ("pwjax.commands.inspect", "describe a prepared model"),
    "generate": ("pwjax.commands.generate", "generate text under a memory budget"),
    "eval": ("pwjax.commands.evaluate", "measure quality through the serving engine"),
    "bench": ("pwjax.commands.bench", "measure speed on this device, with random weights at real geometry"),
    "demo": (
        "pwjax.commands.demo",
        "prepare the embedded model, serve it under a tight budget, and show what happened",
    ),
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = ArgumentParser(prog="pwjax", description="Mixture-of-Experts serving under one memory budget")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        importlib.import_module(module).add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> None:
    args = build_parser().parse_args(argv)
    process.configure(getattr(args, "memory_budget", None))
    started_s = time.monotonic()
    figures: dict[str, Any] = importlib.import_module(COMMANDS[args.command][0]).run(args)
    common = {"command": args.command, "versions": versions(), "seconds": time.monotonic() - started_s}
    print_json_last({**common, **figures})


def entry() -> None:
    """The `pwjax` program. When interrupted it leaves at once: threads of an abandoned save have nothing to add."""
    status = main()
    if status == EXIT_INTERRUPTED:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    entry()
