"""The command line in process: bad input is status 2 and one line, results are one JSON object on the last line."""

import json
import shutil

import jax
import pytest

from pwjax.cli import main
from tests.commands import EVERY_COMMAND

ENGINE = ["--max-num-seqs", "2", "--max-model-len", "96", "--prefill-chunk-tokens", "16"]
pytestmark = pytest.mark.usefixtures("cli_environment")


@pytest.fixture
def store(prepared) -> str:
    return str(prepared("qwen2_moe").path)


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs a command that must be refused: status 2, one line on stderr, empty stdout, no file written."""

    def run(*argv: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()  # what fixtures printed
        assert main([str(a) for a in argv]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("pwjax: error: "), err
        assert sorted(tmp_path.rglob("*")) == before
        return lines[0]

    return run


def run_json(capsys, *argv: str) -> dict:
    assert main([str(a) for a in argv]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    fields = json.loads(last)
    assert fields.keys() >= EVERY_COMMAND
    assert fields["command"] == argv[0] and fields["seconds"] > 0 and fields["versions"]["jax"]
    return fields


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: COMMAND"),
        (["serve"], "invalid choice: 'serve'"),
        (["generate"], "required: OUT"),
        (["generate", "STORE"], "--prompt"),
        (["generate", "STORE", "--promt", "a"], "unrecognized arguments: --promt"),
        (["generate", "nowhere", "--prompt", "a"], "nowhere: no such folder"),
        (["generate", ".", "--prompt", "a"], "not a prepared model"),
        (["generate", "STORE", "--prompt", ""], "empty"),
        (["generate", "STORE", "--prompt-file", "nofile"], "--prompt-file nofile"),
        (["generate", "STORE", "--prompt", "a" * 96], "96 tokens and the limit is 96"),
        (["generate", "STORE", "--prompt", "a", "--memory-budget", "1.5"], "--memory-budget: '1.5' is not a size"),
        (["generate", "STORE", "--prompt", "a", "--memory-budget", "0"], "out of range"),
        (["generate", "STORE", "--prompt", "a", "--memory-budget", "1kB"], "--memory-budget 1000 is too small"),
        (["generate", "STORE", "--prompt", "a", "--arena", "1kB"], "--arena 1000 is too small"),
        (["generate", "STORE", "--prompt", "a", "--method", "awq"], "--method awq"),
        (["generate", "STORE", "--prompt", "a", "--method", "uniform:2"], "between 3 and 8"),
        (["generate", "STORE", "--prompt", "a", "--mean-bits", "9"], "--mean-bits"),
        (["generate", "STORE", "--prompt", "a", "--max-bits", "2"], "--max-bits"),
        (["generate", "STORE", "--prompt", "a", "--max-model-len", "100000"], "positions end at 512"),
        (["generate", "STORE", "--prompt", "a", "--max-num-seqs", "x"], "invalid int value"),
        (["generate", "STORE", "--prompt", "a", "--max-tokens", "-1"], "max_tokens"),
        (["generate", "STORE", "--prompt", "a", "--temperature", "nan"], "temperature"),
        (["generate", "STORE", "--prompt", "a", "--top-p", "0"], "top_p"),
        (["generate", "STORE", "--prompt", "a", "--seed", "-1"], "seed"),
        (["generate", "STORE", "--prompt", "a", "--stop", ""], "stop"),
        (["generate", "STORE", "--prompt", "a", "--timeline", "a.gif"], "must end in .png or .jsonl"),
        (["generate", "STORE", "--prompt", "a", "--timeline", "no/a.png"], "--timeline"),
        (["generate", "STORE", "--prompt", "a", "--replay", "no.jsonl"], "no.jsonl"),
        pytest.param(
            ["generate", "STORE", "--prompt", "a", "--implementation", "triton"],
            "triton",
            marks=pytest.mark.skipif(jax.default_backend() == "gpu", reason="Triton is there"),
        ),
        (["generate", "STORE", "--prompt", "a", "--low-watermark-blocks", "-1"], "at least 0"),
        (["generate", "STORE", "--prompt", "a", "--method", "bf16", "--mean-bits", "4"], "--mean-bits goes with"),
        (["generate", "STORE", "--prompt", "a", "--method", "uniform:6", "--mean-bits", "4"], "--mean-bits goes with"),
        (["generate", "STORE", "--prompt", "a", "--method", "bf16", "--replay", "r.jsonl"], "--replay goes with"),
        (["eval", "arithmetic", "STORE", "--items", "0"], "--items is 0"),
        (["eval", "retrieval", "STORE", "--keys", "4000"], "--keys is 4000"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--context", "8", "--stride", "9"], "--stride 9 is more than"),
        (["demo", "--model", "nowhere", "--out", "out"], "nowhere"),
        (["demo", "--max-tokens", "900", "--out", "out"], "--max-tokens is 900"),
        (["demo", "--max-tokens", "0", "--out", "out"], "--max-tokens is 0"),
        (["eval", "mmlu", "STORE"], "invalid choice: 'mmlu'"),
        (["eval", "ppl", "STORE"], "--data"),
        (["eval", "ppl", "STORE", "--data", "no.txt"], "no.txt"),
        (["eval", "ppl", "STORE", "--data", "no.csv"], "must end in .txt or .jsonl"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--context", "0"], "--context is 0"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--context", "99999"], "99999"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--stride", "0"], "--stride is 0"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--stride", "97"], "--stride is 97"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--limit-tokens", "0"], "--limit-tokens is 0"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--batch", "0"], "--max-num-seqs is 0"),
        (["eval", "ppl", "STORE", "--data", "TEXT", "--method", "static", "--no-movement"], "--no-movement: parts of"),
        (["inspect"], "required: OUT"),
        (["inspect", "nowhere"], "nowhere: no such folder"),
        (["inspect", "."], "not a prepared model"),
        (["prepare", "HF"], "required: OUT"),
        (["prepare", "nowhere", "out"], "nowhere"),
        (["prepare", ".", "out"], "config.json"),
        (["prepare", "HF", "STORE"], "already holds a finished model"),
        (["prepare", "HF", "out", "--calibration", "no.txt"], "no.txt"),
        (["prepare", "HF", "out", "--lut-rows", "2"], "invalid choice: '2'"),
        (["prepare", "HF", "out", "--max-bits", "9"], "--max-bits 9"),
        (["prepare", "HF", "out", "--calibration-tokens", "1"], "calibration"),
    ],
)
def test_bad_input(refused, prepared, store, tmp_path_factory, argv, words):
    text = tmp_path_factory.mktemp("text") / "text.txt"
    text.write_text("Some text that is long enough to be scored. " * 4)
    names = {"STORE": store, "HF": str(prepared("qwen2_moe").source), "TEXT": str(text)}
    engine = ENGINE if argv[:1] in (["generate"], ["eval"]) and "STORE" in argv else []
    given = {a for a in argv if a.startswith("--")}
    engine = [a for i in range(0, len(engine), 2) if engine[i] not in given for a in engine[i : i + 2]]
    if "99999" in argv:
        engine = engine[:2] + engine[4:]  # without --max-model-len, --context sets it
    assert words in refused(*(names.get(a, a) for a in argv), *engine)


def test_a_damaged_store_is_refused(refused, store, tmp_path):
    damaged = tmp_path / "store"
    shutil.copytree(store, damaged)
    page_file = max((damaged / "layers").rglob("*"), key=lambda f: f.stat().st_size if f.is_file() else 0)
    page_file.unlink()
    assert "missing; the store is damaged" in refused("generate", damaged, "--prompt", "a", *ENGINE)


def test_generate(capsys, store, tmp_path):
    argv = [
        "generate",
        store,
        "--prompt",
        "Hello",
        "--prompt",
        "The code",
        "--max-tokens",
        "12",
        "--ignore-eos",
        *ENGINE,
    ]
    fields = run_json(capsys, *argv, "--timeline", "run.jsonl", "--timeline", "run.png", "--quiet")
    names = (
        "results memory_bytes_peak measured_bytes_peak mean_bits_first mean_bits_last mean_bits_min offloads reloads "
        "bytes_moved preemptions compilations_after_warmup tokens_per_second"
    ).split()
    assert set(names) <= fields.keys()
    assert fields["method"] == "pagedweight" and fields["compilations_after_warmup"] == 0
    assert fields["memory_bytes_peak"] <= fields["memory_budget_bytes"]
    for result, prompt in zip(fields["results"], ("Hello", "The code"), strict=True):
        assert {"text", "token_ids", "finish_reason", "prompt_tokens"} <= result.keys()
        assert (result["prompt_tokens"], len(result["token_ids"])) == (len(prompt), 12)
    records = (tmp_path / "run.jsonl").read_text().splitlines()
    assert len(records) > 12 and json.loads(records[0])["budget_bytes"] == fields["memory_budget_bytes"]
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def test_eval_ppl(capsys, store, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Some text that is long enough to be scored, in two windows. " * 3)
    fields = run_json(capsys, "eval", "ppl", store, "--data", text, "--context", "64", "--method", "uniform:4", *ENGINE)
    assert (fields["tokens"], fields["context"], fields["stride"], fields["bos"]) == (179, 64, 64, None)
    assert fields["mean_bits"] == fields["mean_bits_last"] == 4.0
    assert fields["perplexity"] == pytest.approx(2.718281828 ** fields["nats_per_token"])
    assert fields["memory_bytes_peak"] <= fields["memory_budget_bytes"] and fields["method"] == "uniform:4"


def test_inspect(capsys, store):
    fields = run_json(capsys, "inspect", store)
    assert fields["max_bits"] == 6 and fields["slot_bytes"] == 256


def test_prepare_and_serve(capsys, prepared, tmp_path):
    text = tmp_path / "calibration.txt"
    text.write_text("A little text to calibrate with. " * 20)
    out = tmp_path / "out"
    argv = ["--calibration", text, "--calibration-sequences", "2", "--calibration-tokens", "32", "--lut-rows", "32"]
    fields = run_json(capsys, "prepare", prepared("qwen2_moe").source, out, *argv)
    names = (
        "weights weights_per_second host_peak_bytes experts_without_data relative_error_by_bits slot_bytes slot_waste"
    )
    assert set(names.split()) <= fields.keys()
    assert list(fields["relative_error_by_bits"]) == ["3", "4", "5", "6", "7", "8"]
    assert fields["host_peak_bytes"] > 0 and fields["slot_waste"] < 0.5
    served = run_json(capsys, "generate", out, "--prompt", "Hello", "--max-tokens", "4", "--quiet", *ENGINE)
    assert len(served["results"]) == 1


def test_help_is_no_error(capsys):
    for argv in (["--help"], ["generate", "--help"], ["eval", "--help"]):
        with pytest.raises(SystemExit) as done:
            main(argv)
        assert done.value.code == 0
    assert "--memory-budget" in capsys.readouterr().out
