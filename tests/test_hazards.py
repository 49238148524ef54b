"""Every hazard strikes the naive program, spares the protected one, and strikes that too once its protection is taken out."""

from __future__ import annotations

import contextlib
import inspect
import json
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch

import pcg_ref as pcg
from pcg_ref import hazards, pieces, runner, segments, splitting, tracing, watch
from pcg_ref.effects import Effects
from pcg_ref.hazards import HAZARDS, Verdict, __main__, judge
from pcg_ref.strategies import breakable, full, tc_piecewise

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "figures" / "h200" / "hazards.json"

# What the naive and the protected program must come to.
EXPECTED = {
    "H1": ("stale numbers", "equal to eager"),
    "H2": ("overwritten numbers", "equal to eager"),
    "H3": ("side effect lost", "equal to eager"),
    "H4": ("error", "equal to eager"),
    "H5": ("error", "equal to eager"),
    "H6": ("empty graph", "equal to eager"),
    "H7": ("cut missed", "equal to eager"),
    "H8": ("wrong numbers", "equal to eager"),
    "H9": ("state changed", "equal to eager"),
    "H10": ("recompiled", "refused"),
    "H11": ("over-padded", "runs eagerly"),
    "H12": ("state changed", "equal to eager"),
    "H13": ("wrong numbers", "equal to eager"),
    "H14": ("collected during capture", "no collection"),
    "H15": ("pool grew", "no growth"),
    "H16": ("stale numbers", "refused"),
}
BY_NUMBER = {hazard.number: hazard for hazard in HAZARDS}


def test_every_case_is_there_once():
    assert list(BY_NUMBER) == list(EXPECTED) == [f"H{i}" for i in range(1, 17)]


@pytest.mark.parametrize("number", EXPECTED)
def test_the_naive_program_falls_into_it(number, device):
    verdict = judge(BY_NUMBER[number].naive, device)
    assert verdict.what == EXPECTED[number][0] and not verdict.holds, verdict


@pytest.mark.parametrize("number", EXPECTED)
def test_the_protected_program_does_not(number, device):
    verdict = judge(BY_NUMBER[number].protected, device)
    assert verdict.what == EXPECTED[number][1] and verdict.holds, verdict


@pytest.mark.inductor
def test_sizes_cross_for_inductor_too(device):
    assert judge(partial(BY_NUMBER["H5"].protected, compiler="inductor"), device).what == "equal to eager"


# The same protected programs without what protects them.


def choose(name, **choices):
    """Give the programs a class of the package with other choices."""
    return lambda patch: patch.setattr(pcg, name, partial(getattr(pcg, name), **choices))


def without_gc_held_off(patch):
    for module in (runner, breakable):
        patch.setattr(module, "gc_held_off", contextlib.nullcontext)


def without_preserved_state(patch):
    # Two layers: what the model keeps, and what the trace writes to.
    patch.setattr(runner, "preserved_state", lambda *args: contextlib.nullcontext())
    patch.setattr(tc_piecewise, "preserved", lambda tensors: contextlib.nullcontext())


@contextlib.contextmanager
def without_sentinels(self, batch, bucket):
    ends = torch.tensor([0, *torch.tensor(batch.lengths).cumsum(0)], dtype=torch.int32)
    self.cu_seqlens[: len(ends)] = ends.to(self.cu_seqlens.device)
    with pcg.forward_context(batch, bucket, static_cu_seqlens=self.cu_seqlens) as context:
        yield context


TAKEN_OUT = {
    "H1 the bridge": (lambda patch: patch.setattr(segments.Bridge, "_keep", lambda self, i, result: result), "stale numbers"),
    "H2 the copy": (choose("PrefillRunner", copy_output=False), "overwritten numbers"),
    "H3 the eager segment": (lambda patch: patch.setattr(pcg, "eager_on_graph", lambda function: function), "side effect lost"),
    "H4 getitem with its producer": (lambda patch: patch.setattr(splitting, "_unpacks_a_tuple", lambda node: False), "crosses a cut"),
    "H5 integers for sizes": (lambda patch: patch.setattr(splitting, "_sizes_to_integers", lambda graph: None), "crosses a cut"),
    "H6 the look for launches": (
        lambda patch: patch.setattr(pieces, "effects", lambda graph: Effects(("assumed",), frozenset(), ())), "empty graph",
    ),
    "H7 matching as an object": (lambda patch: patch.setattr(splitting, "_packet_overloads", lambda target: set()), "wrong numbers"),
    "H8 the original order": (
        lambda patch: patch.setattr(
            splitting, "split_module", lambda *args, keep_original_order: splitting_module(*args, keep_original_order=False)
        ),
        "wrong numbers",
    ),
    "H9 state put back": (without_preserved_state, "state changed"),
    "H10 the frozen trace": (lambda patch: patch.setattr(tracing.Trace, "freeze", lambda self: None), "recompiled"),
    "H10 the look at attributes": (lambda patch: patch.setattr(watch.AttributeWatch, "change", lambda self: None), "wrong numbers"),
    "H11 the padding factor": (choose("PrefillRunner", max_padding_factor=100), "over-padded"),
    "H12 real rows alone": (
        lambda patch: patch.setattr(pcg.ForwardContext, "num_tokens", property(lambda self: self.padded_num_tokens)), "wrong numbers",
    ),
    "H13 padding as a request, for eager segments": (
        lambda patch: patch.setattr(pcg.ForwardContext, "lengths", property(lambda self: list(self.batch.lengths))), "wrong numbers",
    ),
    "H13 padding as a request, in the graph": (
        lambda patch: patch.setattr(full.FullStrategy, "context", without_sentinels), "wrong numbers",
    ),
    "H14 the collector held off": (without_gc_held_off, "collected during capture"),
    "H15 weak references": (lambda patch: patch.setattr(full, "weak_ref", lambda value, pool: value), "pool grew"),
    "H15 the largest first": (lambda patch: patch.setattr(runner, "_bar", lambda items, progress: items[::-1]), "pool grew"),
    "H16 the watch": (lambda patch: patch.setattr(watch.ParameterWatch, "check", lambda self: None), "stale numbers"),
}
splitting_module = splitting.split_module


@pytest.mark.parametrize("protection", TAKEN_OUT)
def test_without_its_protection_it_strikes(protection, device, monkeypatch):
    take_out, expected = TAKEN_OUT[protection]
    take_out(monkeypatch)
    verdict = judge(BY_NUMBER[protection.split()[0]].protected, device)
    assert verdict.what == expected and not verdict.holds, verdict


def test_every_hazard_loses_its_protection_once():
    assert {protection.split()[0] for protection in TAKEN_OUT} == set(EXPECTED)


# The notebook.


def test_the_notebook_holds_the_programs_as_they_are_tested():
    cells = nbformat.read(ROOT / "notebooks" / "06_hazard_lab.ipynb", as_version=4).cells
    code, text = ("\n".join(cell.source for cell in cells if cell.cell_type == kind) for kind in ("code", "markdown"))
    for hazard in HAZARDS:
        for program in (hazard.naive, hazard.protected):
            assert inspect.getsource(program).rstrip() in code
            assert f"print(judge({program.__name__}, device))" in code
        assert f"## {hazard.number}. " in text
        assert all(report in text for report in hazard.seen_in)


# The verdict itself.


def test_a_verdict_is_measured():
    one, two = torch.ones(3, 2), torch.full((3, 2), 2.0)
    assert hazards.common.compare(one, one).holds
    assert hazards.common.compare(one, two, stale=one).what == "stale numbers"
    assert str(hazards.common.compare(one, two)) == "wrong numbers: 3 of 3 rows, the first 1 where eager gives 2"
    assert hazards.common.compare(one * float("nan"), one).what == "wrong numbers"
    assert hazards.common.compare(one[:2], one).what == "wrong numbers"
    assert hazards.common.refused(ValueError("weight moved"), names="weight").holds
    assert not hazards.common.refused(ValueError("something"), names="weight").holds
    assert judge(lambda device: 1 / 0, "cpu") == Verdict("error", "ZeroDivisionError, division by zero")


# The table, here and on CUDA.


def differences(one, other):
    return [
        f"{number}: {a.what} / {b.what}, {c.what} / {d.what}"
        for (number, a, c), (_, b, d) in zip(one, other, strict=True)
        if (a.what, c.what) != (b.what, d.what) and BY_NUMBER[number].differs is None
    ]


@pytest.mark.gpu
def test_the_tape_and_cuda_give_the_same_verdicts():
    assert differences(hazards.table("cpu"), hazards.table("cuda")) == []


@pytest.mark.skipif(not RECORD.exists(), reason="no record of CUDA's verdicts in figures/h200")
def test_the_tape_gives_the_verdicts_that_cuda_gave():
    facts, rows = hazards.load(RECORD)
    assert "simulation" not in facts["device"]
    assert differences(hazards.table("cpu"), rows) == []


def test_a_table_is_kept_and_read_back(tmp_path, monkeypatch):
    rows = [("H1", Verdict("stale numbers", "3 of 3 rows"), Verdict("equal to eager"))]
    monkeypatch.setattr(hazards, "table", lambda device: rows)
    facts, read = hazards.load(hazards.save(tmp_path / "new", "cpu"))
    assert read == rows and "simulation" in facts["device"] and facts["torch"] == torch.__version__
    assert json.loads((tmp_path / "new" / "hazards.json").read_text())["hazards"][0]["number"] == "H1"
    assert hazards.render(rows).split() == "H1 a split operator returns fresh memory stale numbers equal to eager".split()
    lines = hazards.render(rows, details=True).splitlines()
    assert lines[1].strip() == HAZARDS[0].why and lines[2].split() == "naive stale numbers: 3 of 3 rows".split()


def test_the_command_records_cuda_only(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(__main__, "table", lambda device: [("H2", Verdict("a"), Verdict(device))])
    assert __main__.main([]) == 0 and capsys.readouterr().out.split()[-1] == "cpu"
    assert __main__.main([str(tmp_path)]) == 1 and "GPU" in capsys.readouterr().err
