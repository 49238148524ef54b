"""Random modules in random scenarios against plain PyTorch, and that this finds faults at all; the long campaign is ``make fuzz``."""

import dataclasses
import random
from contextlib import nullcontext

import fuzz
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from campaign import InvalidProgram, SilentFault, check
from scenarios import draw
from torch.fx.passes.split_module import split_module
from torch.utils._pytree import tree_map_only

import pcg_ref as pcg
from pcg_ref import pieces, runner, segments, splitting, watch
from pcg_ref.strategies import breakable


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Nothing of one test's traces, and nothing in the log of what torch says about programs that it refuses."""
    monkeypatch.setattr(fuzz.logging.getLogger("torch"), "disabled", True)
    fuzz.forget_compiled()


def test_random_programs(device):
    outcomes = []

    @hypothesis.settings(max_examples=100, suppress_health_check=list(hypothesis.HealthCheck), print_blob=False)
    @hypothesis.given(st.randoms(use_true_random=False))
    def one(rng):
        program, scenario = draw(rng)
        hypothesis.note(fuzz.reproduction(program, scenario, "the smallest program that hypothesis found", device))
        try:
            outcomes.append(check(program.build(device), scenario))
        except InvalidProgram:
            hypothesis.reject()
        if len(outcomes) % 20 == 0:
            fuzz.forget_compiled()

    one()
    assert sum(outcome.ran for outcome in outcomes) >= fuzz.LEAST_SHARE * len(outcomes)
    assert sum(outcome.batches for outcome in outcomes) > 300


@pytest.mark.inductor
@pytest.mark.parametrize("seed", range(2))
def test_random_programs_through_inductor(seed, device):
    program, scenario = draw(random.Random(seed), inductor=True, strategies=("tc_piecewise",), sizes=(8, 4))
    assert check(program.build(device), scenario).batches


# --- Planted faults. Each breaks one promise of pcg_ref; the campaign must find it in a few programs.


def bridge_is_skipped(patch):
    patch.setattr(segments.Bridge, "_keep", lambda self, i, result: result)


def memory_is_freed_too_early(patch):
    def capture(*args, pool):
        graph = pcg.capture(*args, pool=pool)
        graph.output = pcg.weak_ref(graph.output, pool)
        return graph

    patch.setattr(pieces, "capture", capture)


def order_is_not_kept(patch):
    patch.setattr(splitting, "split_module", lambda *args, keep_original_order: split_module(*args))


def state_is_not_restored(patch):
    patch.setattr(runner, "preserved_state", lambda model, writes: nullcontext())


def result_is_not_copied(patch):
    make = pcg.PrefillRunner.__init__
    patch.setattr(pcg.PrefillRunner, "__init__", lambda *args, copy_output, **options: make(*args, copy_output=False, **options))


def padding_counts_as_real(patch):
    patch.setattr(pcg.ForwardContext, "num_tokens", property(lambda self: self.padded_num_tokens))


def work_is_taken_for_views(patch):
    patch.setattr(pieces, "effects", lambda piece, find=pieces.effects: dataclasses.replace(find(piece), launches=()))


def half_captured_is_kept(patch):
    patch.setattr(pcg.PiecewiseModel, "_forget", lambda self, size: None)


def moved_weights_are_not_noticed(patch):
    patch.setattr(watch.ParameterWatch, "check", lambda self: None)


def attributes_are_not_noticed(patch):
    patch.setattr(watch.AttributeWatch, "change", lambda self: None)


def positions_are_not_filled(patch):
    def fill(self, batch, bucket):
        self._tokens[: batch.num_tokens].copy_(batch.tokens)

    patch.setattr(pcg.PrefillRunner, "_fill", fill)


def second_of_two_calls_is_lost(patch):
    patch.setattr(pieces, "_each", lambda calls: calls[0]())


def arguments_of_breaks_are_copied(patch):
    patch.setattr(breakable, "weak_ref", lambda value, pool: tree_map_only(torch.Tensor, torch.clone, value))


PLANTED = {  # in which strategy
    bridge_is_skipped: "tc_piecewise", memory_is_freed_too_early: "tc_piecewise", order_is_not_kept: "tc_piecewise",
    state_is_not_restored: "breakable", result_is_not_copied: "breakable", padding_counts_as_real: "breakable",
    work_is_taken_for_views: "tc_piecewise", half_captured_is_kept: "tc_piecewise", moved_weights_are_not_noticed: "breakable",
    attributes_are_not_noticed: "breakable", positions_are_not_filled: "breakable", second_of_two_calls_is_lost: "tc_piecewise",
    arguments_of_breaks_are_copied: "breakable",
}  # fmt: skip


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_the_campaign_finds_planted_faults(plant, monkeypatch):
    plant(monkeypatch)
    for number in range(100):
        program, scenario = draw(random.Random(number), strategies=(PLANTED[plant],))
        if plant is half_captured_is_kept:  # needs a capture that fails after its first graph, which few of them do
            scenario = dataclasses.replace(scenario, fail_at=3, replay="flat")
        try:
            check(program.build("cpu"), scenario)
        except InvalidProgram:
            continue
        except SilentFault as fault:
            print(f"found by program {number}: {fault}")
            return
    pytest.fail("not found in 100 programs")
