"""Sizes, JSON, exit statuses and bars that all commands share."""

import argparse
import dataclasses
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from pwjax.cli_common import (
    ArgumentParser,
    bytes_argument,
    check_output_file,
    format_bytes,
    parse_bytes,
    print_json_last,
    progress,
    run_command,
    versions,
)
from pwjax.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 * 2**30),
        ("9.5GB", 9_500_000_000),
        ("1048576", 1048576),
        (1048576, 1048576),
        ("17 MiB", 17 * 2**20),
        (" 64kb ", 64_000),
        ("64KiB", 65536),
        ("0.1GiB", 107374182),
        ("3TB", 3 * 10**12),
        ("512B", 512),
        ("1", 1),
    ],
)
def test_sizes(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "GiB",
            "12G",
            "12 gigabytes",
            "-1GiB",
            "1e9",
            "nan",
            "inf",
            "1.5",
            "5iB",
            "1,5GB",
            "1_000",
            "0x10",
            "٣GiB",
        ),
        *("0", "0.4kiB0", "0.0001kB", "99999999PB", "9" * 5000, 0, -5, True, 1.5, None),
    ],
)
def test_nonsense_sizes_are_refused_by_name(text):
    with pytest.raises(UserError, match="--memory-budget"):
        parse_bytes(text, "--memory-budget")


def test_a_size_option_keeps_its_message_through_argparse():
    parser = ArgumentParser(prog="pwjax")
    parser.add_argument("--memory-budget", type=bytes_argument)
    assert parser.parse_args(["--memory-budget", "2KiB"]).memory_budget == 2048
    with pytest.raises(UserError, match=r"--memory-budget: '12G' is not a size; write 12GiB"):
        parser.parse_args(["--memory-budget", "12G"])


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (19 * 2**20, "19.00 MiB"), (2**40 * 5000, "5000.0 TiB")],
)
def test_format_bytes(size, text):
    assert format_bytes(size) == text


def test_versions_name_what_decides_a_runs_numbers():
    found = versions()
    assert {"pwjax", "jax", "flax", "orbax", "numpy", "python"} <= set(found)
    assert found["numpy"] == np.__version__


@dataclasses.dataclass
class Fields:
    size: int
    path: Path


def test_json_is_one_finite_line():
    stream = io.StringIO()
    fields = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "numpy": np.int64(3),
        "flag": np.bool_(True),
        "array": np.array([[1.0, np.nan]]),
        "text": "two\nlines \u2028 é",
        "nested": [Fields(1, Path("a/b"))],
        "bits": {3: 0.5},
        "none": None,
    }
    print_json_last(fields, stream)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().isascii()
    assert len(stream.getvalue().splitlines()) == 1
    assert json.loads(stream.getvalue()) == {
        "nan": None,
        "inf": None,
        "numpy": 3,
        "flag": True,
        "array": [[1.0, None]],
        "text": fields["text"],
        "nested": [{"size": 1, "path": "a/b"}],
        "bits": {"3": 0.5},
        "none": None,
    }


def test_json_is_the_last_line_of_stdout(capsys):
    print("before")
    print_json_last({"a": 1})
    assert capsys.readouterr().out == 'before\n{"a": 1}\n'


def test_json_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="object"):
        print_json_last({"a": object()}, io.StringIO())


def raising(error):
    def command():
        raise error

    return command


def test_bad_input_is_one_line_and_status_2(capsys):
    assert run_command(raising(UserError("--prompt is empty;\n  give some text"))) == 2
    captured = capsys.readouterr()
    assert captured.err == "pwjax: error: --prompt is empty; give some text\n"
    assert captured.out == ""


def test_exit_statuses(capsys):
    assert run_command(lambda: None) == 0
    assert run_command(lambda: 3) == 3
    assert run_command(raising(KeyboardInterrupt())) == 130
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError):  # a fault of the program keeps its traceback
        run_command(raising(ZeroDivisionError()))


@pytest.mark.parametrize("arguments", [["--unknown"], ["sub", "--count", "x"], ["nosuch"], ["sub", "--cou", "1"]])
def test_argparse_errors_are_one_line_too(arguments, capsys):
    parser = ArgumentParser(prog="pwjax")
    sub = parser.add_subparsers(required=True).add_parser("sub")
    sub.add_argument("--count", type=int)
    assert isinstance(sub, argparse.ArgumentParser)
    assert run_command(lambda: parser.parse_args(arguments) and None) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_no_bar_without_a_terminal(capsys):
    items = [1, 2, 3]
    assert progress(items, "work") is items
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal_only_after_two_seconds(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(progress([1, 2, 3], "work")) == [1, 2, 3]
    assert "work" not in terminal.getvalue()


def test_output_files_are_checked_before_a_run(tmp_path):
    good = tmp_path / "run.png"
    assert check_output_file(good, (".png",), "--timeline") == good
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "folder.png").mkdir()
    for bad in (tmp_path / "run.pdf", tmp_path / "run", tmp_path / "no" / "run.png", tmp_path / "folder.png"):
        with pytest.raises(UserError, match="--timeline"):
            check_output_file(bad, (".png",), "--timeline")


def test_a_closed_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere, so permissions can't show it
    with pytest.raises(UserError, match="can't be written"):
        check_output_file(tmp_path / "run.png", (".png",), "--timeline")
