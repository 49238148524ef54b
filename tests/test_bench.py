"""The benchmark compares before it times, and its numbers are those of the run."""

import json
import random

import pytest
import torch

import pcg_ref as pcg
from pcg_ref.__main__ import main
from pcg_ref.bench.measure import interleaved, random_batch, worst_error
from pcg_ref.bench.record import ratios
from pcg_ref.bench.systems import System, build

FAST = ["--only", "breakable,piecewise", "--tokens", "8,16", "--rounds", "2"]


def test_a_run_as_json(capsys):
    assert main(["bench", "--json", *FAST]) == 0
    run = json.loads(capsys.readouterr().out)
    assert list(run["systems"]) == ["eager", "breakable", "piecewise", "piecewise stitched"]
    assert {(row["system"], row["T"]) for row in run["results"]} == {(name, t) for name in run["systems"] for t in (8, 16)}
    assert all(system["worst_error"] < 1e-5 for system in run["systems"].values())
    assert {row["segments"] for row in run["results"] if row["system"] in ("breakable", "piecewise")} == {9}  # 4 layers
    assert all(row["total_ms"]["p10"] <= row["total_ms"]["median"] <= row["total_ms"]["p90"] for row in run["results"])
    assert run["systems"]["piecewise"]["setup_s"].keys() == {"trace", "compile", "capture"}


def test_tables_and_record(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["bench", "--record", str(tmp_path), *FAST]) == 0
    text = capsys.readouterr().out
    assert "simulated by a tape" in text if not torch.cuda.is_available() else "NVIDIA" in text
    assert json.loads((tmp_path / "bench-tiny.json").read_text())["model"] == "tiny"
    assert "<svg" in (tmp_path / "bench-tiny.svg").read_text()


def test_a_wrong_system_is_not_timed():
    model = pcg.TinyDecoder()
    eager, *_ = build(model, [8], ["eager"])
    stale = eager.run(random_batch(8, 2, 256, torch.device("cpu"), random.Random(1)))
    with pytest.raises(RuntimeError, match="stale differs from eager"):
        worst_error([eager, System("stale", lambda batch: stale)], [random_batch(8, 2, 256, torch.device("cpu"), random.Random(2))])


def test_every_function_runs_once_a_round_in_mixed_order():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "abc"}
    interleaved(functions, 20, lambda: calls.append("|"), torch.device("cpu"), random.Random(0))
    rounds = "".join(calls).split("|")[1:]
    assert len(rounds) == 23 and all(sorted(r) == list("abc") for r in rounds) and len(set(rounds)) > 1


def test_random_batches_are_uneven_and_whole():
    batches = [random_batch(16, 4, 256, torch.device("cpu"), random.Random(seed)) for seed in range(20)]
    assert all(sum(b.lengths) == 16 and len(b.lengths) == 4 for b in batches)
    assert len({tuple(b.lengths) for b in batches}) > 10
    assert random_batch(2, 4, 256, torch.device("cpu"), random.Random(0)).lengths == [1, 1]


def test_ratios_are_of_the_medians():
    rows = [("eager", 12.0), ("piecewise inductor", 2.0), ("piecewise inductor stitched", 4.0)]
    results = [{"system": name, "T": 64, "total_ms": {"median": ms}, "busy_ms": 1.6} for name, ms in rows]
    lines = ratios({"sizes": [64], "results": results, "loop": {}})
    assert [(line.split()[0], line.split()[-1]) for line in lines[1:3]] == [("flat", "0.50"), ("eager", "6.00")]
    assert next(line for line in lines if line.startswith("piecewise inductor: total")).endswith("1.25")


def test_an_unknown_system_is_a_line(capsys):
    assert main(["bench", "--only", "fastest"]) == 2
    assert "choose from" in capsys.readouterr().err
