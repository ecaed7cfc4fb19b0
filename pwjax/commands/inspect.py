"""`pwjax inspect OUT`: what a prepared model holds."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("out", metavar="OUT", type=Path, help="folder that `pwjax prepare` made")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Prints a summary, and returns the command's figures."""
    from pwjax.inspect import describe, inspect_store

    figures = inspect_store(args.out)
    print(describe(figures), file=sys.stderr)
    return figures
