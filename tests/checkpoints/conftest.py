"""Prepared stores to read and to damage."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoints.hf_folders import standard_folder
from tests.checkpoints.small_store import prepare


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    standard_folder(folder / "hf")
    prepare(folder / "out", folder / "hf")
    return folder / "out"


@pytest.fixture
def damaged(finished, tmp_path):
    """A copy to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "out"))
