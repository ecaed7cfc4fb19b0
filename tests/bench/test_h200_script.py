"""scripts/bench_h200.py: which jobs it runs, and the arithmetic of its files."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_h200.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_h200", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_h200"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_h200"]


def decode_row(method: str, batch: int, rate: float, bits: float | None) -> dict:
    names = "context memory_bytes step_ms device_step_ms floor_share launches".split()
    return {"method": method, "batch": batch, "tokens_per_second": rate, "bits": bits, **dict.fromkeys(names, 1)}


def results() -> dict:
    peer = [
        {"what": "decode", "batch": 1, "compiled": True, "tokens_per_second": 250.0},
        {"what": "prefill", "tokens": 2048, "compiled": False, "tokens_per_second": 40_000.0, "milliseconds": 51.2},
    ]
    return {
        "peers": {"peer": "transformers", "rows": peer},
        "decode-uniform-4": {"rows": [decode_row("uniform:4", b, 500.0 * b, 4.0) for b in (64, 4, 1)]},
        "decode-bf16": {"rows": [decode_row("bf16", b, 400.0 * b, None) for b in (4, 1)]},
        "table3-uniform-4": {"rows": [decode_row("uniform:4", b, 490.0 * b, 4.0) for b in (4, 1)]},
        "table3-random-4": {"rows": [decode_row("random:4", 1, 480.2, 4.02)]},
        "prefill": {"rows": [{"tokens": 2048, "tokens_per_second": 80_000.0, "first_token_ms": 25.6}]},
        "moe-matrix-0": {
            "rows": [
                {"n": 28672, "k": 4096, "bits": 4, "tokens": 1, "microseconds": 19.65},
                {"n": 28672, "k": 4096, "bits": 3, "tokens": 1, "microseconds": None},
                {"n": 64, "k": 64, "bits": 4, "tokens": 1, "microseconds": 1.0},
            ]
        },
        "attention-0": {"rows": [{"batch": 1, "context": 32768, "floor_share": 0.7}]},
        "quantize": {"rows": [{"layer": 0}], "extrapolated_seconds": 600.0, "model_weights": 12},
    }


def compared(rows):
    return {(row["peer"], row.get("batch"), row.get("method")): row["ratio"] for row in rows if "ratio" in row}


def test_decode_ratios(script):
    assert compared(script.decode_file(results())) == pytest.approx(
        {
            (script.PEER_DECODE, 1, "uniform:4"): 2.0,
            (script.OWN_BF16, 1, "uniform:4"): 1.25,
            (script.OWN_BF16, 4, "uniform:4"): 1.25,
            (script.OWN_UNIFORM, 1, "random:4"): 0.98,
            (script.PEER_DECODE, 1, "bf16"): 1.6,
        }
    )


def test_shorter_times_are_faster(script):
    rows = [row for row in script.moe_file(results()) if "ratio" in row]
    assert [(row["peer_figure"], row["must"], row["ratio"]) for row in rows] == [(39.3, 1.0, pytest.approx(2.0))]
    rows = [row for row in script.prefill_file(results()) if "ratio" in row]
    assert [row["ratio"] for row in rows] == pytest.approx([2.0, 2.0])


def test_table3_and_the_rest(script):
    rows = script.table3_file(results())
    order = [("bf16", 1), ("bf16", 4), ("uniform:4", 1), ("uniform:4", 4), ("random:4", 1)]
    assert [(row["method"], row["batch"]) for row in rows] == order
    assert script.attention_file(results())[0]["must"] == 0.6
    assert script.quantize_file(results())[-1]["minutes"] == 10


def test_files_of_nothing_are_empty(script):
    for rows_of_file in script.FILES.values():
        assert rows_of_file({}) == []


def test_jobs(script):
    names = [job.name for job in script.jobs(script.FULL, "python")]
    assert len(set(names)) == len(names)
    assert names[:3] == ["peers", "decode-uniform-4", "decode-bf16"]
    table3 = {f"table3-{kind}-{width}" for kind in ("uniform", "random") for width in (3, 4, 5, 6)}
    assert table3 < set(names)
    for job in script.jobs(script.TINY, "python"):
        assert set(job.parts) <= set(script.PARTS)


def test_a_job_that_fails_is_told(script):
    failing = script.Job("x", ("moe",), (sys.executable, "-c", "raise SystemExit(3)"))
    assert "exit status 3" in script.run_job(failing, None)["failure"]
    slow = script.Job("x", ("moe",), (sys.executable, "-c", "import time; time.sleep(60)"))
    assert "out of time" in script.run_job(slow, 0.5)["failure"]
    good = script.Job("x", ("moe",), (sys.executable, "-c", "print('text'); print('{\"rows\": [1]}')"))
    assert script.run_job(good, None)["rows"] == [1]
