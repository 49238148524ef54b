"""Long random streams of requests: every strategy, with both compilers, equals the model run eagerly on each batch."""

import random

import pytest
import torch

import pcg_ref as pcg

BATCHES = {"cpu": 500, "cuda": 200}
BUCKETS = [4, 8, 12, 24, 32, 48]
SYSTEMS = [
    ("tc_piecewise", "eager", "flat"),
    ("tc_piecewise", "eager", "stitched"),
    ("breakable", "eager", "flat"),
    ("full", "eager", "flat"),
    pytest.param("tc_piecewise", "inductor", "flat", marks=pytest.mark.inductor),
    pytest.param("tc_piecewise", "inductor", "stitched", marks=pytest.mark.inductor),
    pytest.param("full", "inductor", "flat", marks=pytest.mark.inductor),
]


def difference(hidden, expected):
    return ((hidden - expected).float().norm() / expected.float().norm()).item()


@pytest.mark.parametrize("strategy, compiler, replay", SYSTEMS)
def test_a_stream_of_random_batches(strategy, compiler, replay, device):
    dtype, tolerance = (torch.bfloat16, 5e-2) if device == "cuda" else (torch.float32, 1e-5)
    model = pcg.TinyDecoder(layers=2).to(device, dtype)
    runner = pcg.PrefillRunner(model, strategy, BUCKETS, compiler, replay)
    runner.capture(progress=False)
    rng, kept = random.Random(0), []
    for i in range(BATCHES[device]):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(1, 5))]
        batch = pcg.PackedBatch(torch.randint(256, (sum(lengths),), device=device), lengths)
        hidden = runner.run(batch)
        with pcg.forward_context(batch), torch.no_grad():
            expected = model(batch.tokens, batch.positions)
        assert difference(hidden, expected) <= tolerance, (i, lengths)
        kept.append((hidden, expected))
    for hidden, expected in rng.sample(kept, 20):  # what was returned is the caller's: later batches have not changed it
        assert difference(hidden, expected) <= tolerance
    report = runner.report()
    assert sorted(report["buckets"]) == BUCKETS and all(row["replays"] for row in report["buckets"].values())
    assert sum(row["replays"] for row in report["buckets"].values()) + sum(report["eager"].values()) == BATCHES[device]
