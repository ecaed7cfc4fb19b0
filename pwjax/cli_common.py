"""What every command shares: sizes, versions, the JSON on the last line, exit statuses, progress bars.

Human text goes to stderr. The last line of stdout is one JSON object. Bad input is one line on stderr and status 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import math
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import numpy as np

from pwjax.errors import UserError

T = TypeVar("T")

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
_PROGRESS_DELAY_S = 2.0
_PREFIXES = "kmgtp"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp]?)(i?)b)?", re.IGNORECASE | re.ASCII)
_PACKAGES = ("pwjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy")


def parse_bytes(value: str | int, name: str = "size") -> int:
    """Bytes of `12GiB` (2^30), `9.5GB` (10^9) or a plain number of bytes; units in any case.

    Raises:
        UserError: anything else, zero, negative, or 2^63 and more; the message starts with `name`.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size: Decimal | None = Decimal(value)
    else:
        size = _parse_size(value) if isinstance(value, str) else None
    if size is None:
        raise UserError(f"{name}: {value!r} is not a size; write 12GiB, 9.5GB or a whole number of bytes")
    if not 1 <= size < 2**63:
        raise UserError(f"{name}: {value!r} is out of range; it must be at least 1 byte and less than 2^63")
    return int(size)


def _parse_size(text: str) -> Decimal | None:
    match = _SIZE.fullmatch(text.strip())
    if match is None or len(text) > 64:
        return None
    number, prefix, binary = match.groups()
    if not prefix and (binary or "." in number):  # "5iB" and "1.5" bytes mean nothing
        return None
    power = _PREFIXES.index(prefix.lower()) + 1 if prefix else 0
    return Decimal(number) * (1024 if binary else 1000) ** power


def bytes_argument(text: str) -> int:
    """`parse_bytes` as the `type` of an argparse option, which keeps only `ArgumentTypeError`'s own message."""
    try:
        return parse_bytes(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("size: ")) from None


def format_bytes(size_bytes: float) -> str:
    """`1.50 GiB`, `512 B`: three or four digits in binary units."""
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if unit == "B" else 2 if abs(value) < 100 else 1
    return f"{value:.{digits}f} {unit}"


def versions() -> dict[str, str | None]:
    """Installed versions of what decides a run's numbers; None where a package is not installed as one."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        key = "orbax" if package == "orbax-checkpoint" else package
        try:
            found[key] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[key] = None
    return found


def json_value(value: Any) -> Any:
    """`value` in JSON's types: NumPy and dataclasses converted, numbers that are not finite as null."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, os.PathLike):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy and JAX arrays
        return json_value(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(entry) for key, entry in value.items()}
    if isinstance(value, Iterable):
        return [json_value(entry) for entry in value]
    raise TypeError(f"{type(value).__name__} has no place in the JSON output")


def say(text: str) -> None:
    """A line for people, on stderr at once."""
    print(text, file=sys.stderr, flush=True)


def print_json_last(fields: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Prints one JSON object as the last line of stdout. ASCII only, so that any terminal and pipe carries it."""
    line = json.dumps(json_value(fields), allow_nan=False)
    sys.stderr.flush()
    print(line, file=stream or sys.stdout, flush=True)


class ArgumentParser(argparse.ArgumentParser):
    """argparse whose errors are `UserError`s: one line, status 2, instead of the whole usage. No abbreviations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def run_command(command: Callable[[], int | None]) -> int:
    """Runs a command and returns the exit status: its own (None is 0), 2 after bad input, 130 when interrupted.

    Other exceptions are faults of this program and keep their traceback.
    """
    try:
        return command() or 0
    except UserError as error:
        print("pwjax: error: " + " ".join(str(error).split()), file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        # Saves under way are abandoned (what they leave does not load); their threads would say so at length.
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        print("pwjax: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def progress(items: Iterable[T], description: str, *, total: int | None = None, unit: str = "it") -> Iterable[T]:
    """`items` with a bar on stderr: only on a terminal, and only once two seconds have passed."""
    if not sys.stderr.isatty():
        return items
    from tqdm import tqdm

    return tqdm(items, desc=description, total=total, unit=unit, delay=_PROGRESS_DELAY_S, leave=False)


def check_output_file(path: str | Path, suffixes: tuple[str, ...], name: str) -> Path:
    """The path, if a file with one of `suffixes` can be written there; nothing is created.

    Raises:
        UserError: another suffix, no such folder, or no permission; the message starts with `name`.
    """
    path = Path(path)
    if path.suffix.lower() not in suffixes:
        raise UserError(f"{name}: {path} must end in {' or '.join(suffixes)}")
    if path.is_dir():
        raise UserError(f"{name}: {path} is a folder")
    if not path.parent.is_dir():
        raise UserError(f"{name}: {path.parent} is no folder; create it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{name}: {path} can't be written (permission denied)")
    return path
