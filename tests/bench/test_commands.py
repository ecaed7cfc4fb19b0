"""`pwjax bench` in process, at tiny shapes: one JSON object last, with rows that make sense."""

import json

import pytest

from pwjax.cli import main
from tests.commands import EVERY_COMMAND

pytestmark = pytest.mark.usefixtures("cli_environment")


@pytest.fixture
def bench(capsys):
    """Runs `pwjax bench ..` and returns its JSON."""

    def run(*argv: str) -> dict:
        assert main(["bench", *argv]) == 0
        fields = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert fields.keys() >= EVERY_COMMAND and fields["bench"] == argv[0]
        return fields

    return run


@pytest.mark.parametrize("method", ["random:4", "bf16"])
def test_decode(bench, method):
    arguments = "--geometry tiny --layers 1 --batch 1,2 --context 24 --steps 3".split()
    fields = bench("decode", *arguments, "--method", method)
    assert [row["batch"] for row in fields["rows"]] == [2, 1]
    for row in fields["rows"]:
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert 0 < row["floor_share"] < 1 and 0 < row["device_floor_share"] < 1
        assert row["bytes"]["total"] == pytest.approx(sum(row["bytes"][n] for n in ("dense", "kv", "experts")))
        assert row["launches"] > 20
        assert row["memory_bytes"] < fields["reserved_bytes"]
        assert (row["bits"] is None) if method == "bf16" else (3 <= row["bits"] <= 8)
    assert abs(fields["rows"][1]["context"] - 24) <= 2
    assert fields["compilations_after_warmup"] == 0 and fields["cold_start_seconds"] > 0
    # Two choices of eight experts a token: one to two tokens choose two to four.
    an_expert = 2 * (512 * 256 + 256 * 256)
    if method == "bf16":
        assert fields["rows"][1]["bytes"]["experts"] == 2 * an_expert
        assert 2 * an_expert <= fields["rows"][0]["bytes"]["experts"] <= 4 * an_expert


def test_prefill(bench):
    fields = bench("prefill", *"--geometry tiny --layers 1 --tokens 20,40 --prefill-chunk-tokens 32 --rounds 2".split())
    assert [row["tokens"] for row in fields["rows"]] == [20, 40]
    for row in fields["rows"]:
        assert row["tokens_per_second"] == pytest.approx(1e3 * row["tokens"] / row["first_token_ms"])
        assert 0 < row["floor_share"] < 1 and row["bits"] == 4


def test_moe_of_a_layer(bench):
    fields = bench("moe", *"--geometry tiny --bits 3,mixed --tokens 1,3 --lut-rows 32".split())
    assert [(row["bits"], row["tokens"]) for row in fields["rows"]] == [(3, 1), (3, 3), ("mixed", 1), ("mixed", 3)]
    for row in fields["rows"]:
        assert row["failure"] is None and row["microseconds"] > 0 and row["error"] < 2**-8
        assert row["gigabytes_per_second"] * row["microseconds"] > 0
    assert fields["rows"][0]["distinct_experts"] == 2


def test_moe_of_a_matrix(bench):
    fields = bench("moe", *"--rows 40 --cols 72 --bits 5 --tokens 1,4".split())
    assert [(row["n"], row["k"], row["bits"], row["tokens"]) for row in fields["rows"]] == [
        (40, 72, 5, n) for n in (1, 4)
    ]
    assert all(row["failure"] is None and row["error"] < 1e-5 for row in fields["rows"])


@pytest.mark.parametrize("queries", ["1", "7"])
def test_attention(bench, queries):
    fields = bench("attention", *"--geometry tiny --batch 2 --context 33 --queries".split(), queries)
    (row,) = fields["rows"]
    assert row["failure"] is None and row["microseconds"] > 0 and row["error"] < 2**-8


def test_quantize(bench):
    fields = bench("quantize", *"--geometry tiny --experts 1 --layers 2".split())
    first, last = fields["rows"]
    assert first["weights"] == last["weights"] == 512 * 256 + 256 * 256
    assert fields["model_weights"] == 2 * 8 * first["weights"]
    surplus = max(0, first["seconds"] - last["seconds"])
    assert fields["extrapolated_seconds"] == pytest.approx(surplus + 16 * last["seconds"])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("decode --geometry gpt", "--geometry gpt: unknown"),
        ("decode --batch 1,zero", "not a whole number"),
        ("decode --batch 0", "not a whole number"),
        ("decode --geometry tiny --layers 0", "--layers is 0"),
        ("decode --geometry tiny --method fast", "--method fast: unknown"),
        ("decode --geometry tiny --max-bits 9", "--max-bits is 9"),
        ("decode --geometry tiny --batch 4 --max-num-seqs 2", "less than a batch of 4"),
        ("decode --geometry tiny --context 200000", "--max-model-len"),
        ("prefill --tokens", "expected one argument"),
        ("moe --rows 64", "--rows and --cols go together"),
        ("moe --bits 9", "bits are 3 to 8"),
        ("moe --bits 34", "bits are 3 to 8"),
        ("moe --rows 8 --cols 8 --bits mixed", "goes with a whole layer"),
        ("moe --bits 3,mixed --max-bits 6", "--max-bits 6 is less than --bits 8"),
        ("moe --instructions=-1", "not a number of at least 0"),
        ("attention --context 8 --queries 9", "--queries 9 is more"),
        ("quantize --lut-rows 2", "invalid choice"),
        ("nothing", "invalid choice"),
    ],
)
def test_bad_input(capsys, argv, words):
    assert main(["bench", *argv.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1 and words in err
