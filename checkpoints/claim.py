"""Makes an OUT folder the property of one `prepare`, or refuses, so that nothing of a user's is ever overwritten.

`prepare.json` says which source and options an unfinished OUT belongs to; a lock keeps a second process out.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.manifest import MANIFEST_NAME, read_json, write_json_atomically
from pwjax.errors import UserError

PREPARE_NAME = "prepare.json"
LOCK_NAME = "prepare.lock"


def claim(out: Path, run: Mapping[str, Any]) -> tuple[int, bool]:
    """Creates or takes over OUT.

    Args:
        run: source and options of this run; anything that JSON can hold.

    Returns:
        The lock, a file descriptor to close when done, and whether an unfinished run is continued.

    Raises:
        UserError: OUT is a file, a finished store, a folder of something else, an unfinished prepare of another run, or
            in use. Then nothing has been written.
    """
    wanted = json.loads(json.dumps(run))  # as it will read back: tuples are lists
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: is a file; give a new folder for OUT")
    _check_not_finished(out)
    resumed = (out / PREPARE_NAME).is_file()
    if resumed:
        _check_same_run(out, wanted)
    elif out.exists() and any(path.name != f"{PREPARE_NAME}.tmp" for path in out.iterdir()):
        raise UserError(f"{out}: not empty, and not an unfinished prepare; give a new folder")
    else:
        out.mkdir(parents=True, exist_ok=True)
        write_json_atomically(out / PREPARE_NAME, wanted)
    return _lock(out), resumed


def _check_not_finished(out: Path) -> None:
    if (out / MANIFEST_NAME).exists():
        raise UserError(f"{out}: already holds a finished model; give a new folder, or delete this one first")


def _check_same_run(out: Path, wanted: dict[str, Any]) -> None:
    found = read_json(out / PREPARE_NAME)
    differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
    if differing:
        raise UserError(
            f"{out}: holds an unfinished prepare with other {', '.join(differing)}; "
            "give a new folder, or repeat that prepare"
        )


def _lock(out: Path) -> int:
    """One writer at a time; the system lets go of the lock when a process dies, however it dies."""
    descriptor = os.open(out / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _check_not_finished(out)  # the one who had the lock may just have
    except OSError:
        os.close(descriptor)
        raise UserError(f"{out}: another prepare is writing there now; wait for it, or stop it") from None
    except UserError:
        os.close(descriptor)
        raise
    return descriptor
