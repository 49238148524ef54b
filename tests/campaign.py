"""One program in one scenario, against the oracle: plain PyTorch, on a deep copy of the module, on the batches as they are, unpadded.

Either every result and all state are the oracle's bit by bit, or an exception says clearly what was refused. Anything else is a
``SilentFault``. After an exception everything must go on working.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager, nullcontext

import torch
from program_ops import SPLIT_OPS, Calls, InjectedFault, ints
from scenarios import Change, Run, Scenario, Switch
from torch import nn
from torch.utils._pytree import tree_map_only
from verdicts import InvalidProgram, Outcome, SilentFault, difference, is_unclear, kind, state, tensors

import pcg_ref as pcg
from pcg_ref.arena import Arena
from pcg_ref.strategies.breakable import capture_breakable

EXAMPLE = 67  # rows of the trace's example, and of no captured size


def check(model: nn.Module, scenario: Scenario) -> Outcome:
    """Run the scenario. Raises ``SilentFault``, or ``InvalidProgram``."""
    Calls.reset()
    return (Direct if scenario.direct else Served)(model, scenario).outcome


class Campaign:
    """What both layers share."""

    def __init__(self, model: nn.Module, scenario: Scenario) -> None:
        self.model, self.scenario, self.oracle = model, scenario, copy.deepcopy(model)
        self.device = next(model.parameters()).device
        self.outcome, self.switched = Outcome(), False
        self.held: list[tuple] = []  # results, and what they must go on to equal
        self.validate()
        try:
            self.capture()
            self.outcome.captured = True
        except Exception as error:
            self.refuse("capture", error)
        for number, event in enumerate(scenario.events):
            self.where = f"event {number}, {event}"
            getattr(self, type(event).__name__.lower())(event)
        self.where = "at the end"
        self.compare_held()

    def validate(self) -> None:
        """The program itself must run at every size: whatever raises later is ours."""
        trial = copy.deepcopy(self.model)
        for size in [EXAMPLE, *self.scenario.sizes, *(sum(e.lengths) for e in self.scenario.events if isinstance(e, Run))]:
            batch = pcg.PackedBatch(torch.zeros(size, dtype=torch.int64, device=self.device), [size])
            try:
                with pcg.forward_context(batch), torch.no_grad():
                    trial(batch.tokens, batch.positions)
            except Exception as error:
                raise InvalidProgram(kind(error)) from error

    def capture(self) -> None:
        """Capture, first with the fault that is asked for; either way the state must be what it was."""
        self.where = "capture"
        before = state(self.model)
        for faults in [self.faults(), nullcontext()]:
            try:
                with faults:
                    self.capture_once()
                return
            except (InjectedFault, torch.OutOfMemoryError) as error:
                if isinstance(faults, nullcontext):
                    raise SilentFault(f"a second capture raises what only the first was asked for: {error!r}") from error
            finally:
                Calls.reset()
                self.equal(state(self.model), before, "state after capture")

    @contextmanager
    def faults(self):
        Calls.reset(self.scenario.fail_at)
        allocate, count = Arena._allocate, [0]

        def failing(arena, nbytes):
            count[0] += 1
            if count[0] == self.scenario.out_of_memory_at:
                raise torch.OutOfMemoryError("out of memory, because a test asked for it")
            return allocate(arena, nbytes)

        Arena._allocate = failing
        try:
            yield
        finally:
            Arena._allocate = allocate

    def run(self, event: Run) -> None:
        """One batch on both."""
        rows = sum(event.lengths)
        fail_at = None if self.scenario.strategy == "full" else event.fail_at
        tokens = ints(rows, seed=event.seed, device=self.device, dtype=torch.int64, low=0, high=50)
        oracles = pcg.PackedBatch(tokens.clone(), event.lengths)
        expected = self.outcome_of(lambda: self.eager(oracles), fail_at, InvalidProgram)
        batch = pcg.PackedBatch(tokens, event.lengths)
        try:
            actual = self.outcome_of(lambda: self.replay(batch), fail_at)
        except Exception as error:
            self.refuse("run", error)
            with torch.no_grad():  # go on from the oracle's state
                for mine, right in zip(tensors(self.model), tensors(self.oracle)):
                    mine.copy_(right)
            return
        self.equal(actual, expected, "result")
        self.equal(state(self.model), state(self.oracle), "state")
        self.compare_held()
        self.outcome.batches += 1
        if expected is not None:
            self.hold(actual, expected)

    def outcome_of(self, call, fail_at, otherwise=None):
        Calls.reset(fail_at)
        try:
            return call()
        except InjectedFault:
            return None
        except Exception as error:
            if otherwise is None:
                raise
            raise otherwise(repr(error)) from error
        finally:
            Calls.reset()

    def eager(self, batch) -> object:
        with pcg.forward_context(batch), torch.no_grad():
            return self.oracle(batch.tokens, batch.positions)

    def change(self, event: Change) -> None:
        for model in (self.model, self.oracle):
            with torch.no_grad():
                model.weight.copy_(ints(4, 4, seed=event.seed, device=self.device))

    def hold(self, actual, expected) -> None:
        pass

    def compare_held(self) -> None:
        for actual, expected, when in self.held:
            self.equal(actual, expected, f"the result of {when}, held until now,")

    def equal(self, actual, expected, what: str) -> None:
        if (message := difference(actual, expected)) is not None:
            raise SilentFault(f"{what} {message} ({self.where})")

    def refuse(self, what: str, error: Exception) -> None:
        if isinstance(error, (SilentFault, InvalidProgram)):
            raise error
        if is_unclear(error):
            raise SilentFault(f"an error that says nothing to the user: {error!r} ({self.where})") from error
        expected = isinstance(error, pcg.RecompileError) and self.switched
        (self.outcome.noticed if expected else self.outcome.refused)[f"{what}: {kind(error)}"] += 1


class Served(Campaign):
    """Through a ``PrefillRunner``."""

    def capture_once(self) -> None:
        s = self.scenario
        if not hasattr(self, "runner"):
            self.runner = pcg.PrefillRunner(
                self.model, s.strategy, s.sizes, s.compiler, s.replay, self.device, copy_output=s.copy_output,
                max_requests=64, debug=s.debug,
            )  # fmt: skip
        self.runner.capture(progress=False)

    def replay(self, batch) -> torch.Tensor:
        if not self.scenario.copy_output:
            self.held.clear()
        return self.runner.run(batch)

    def hold(self, actual, expected) -> None:
        self.held.append((actual, expected.clone(), self.where))

    def change(self, event: Change) -> None:
        if not event.moved:
            return super().change(event)
        old, before = self.model.weight, state(self.model)
        self.model.weight = nn.Parameter(old.clone(), requires_grad=False)
        batch = pcg.PackedBatch(torch.zeros(max(self.scenario.sizes), dtype=torch.int64, device=self.device), [max(self.scenario.sizes)])
        try:
            self.runner.run(batch)
            if self.outcome.captured:
                raise SilentFault(f"a parameter that has moved was not noticed ({self.where})")
            self.eager(pcg.PackedBatch(batch.tokens.clone(), batch.lengths))
        except SilentFault:
            raise
        except RuntimeError as error:
            if "weight is at" not in str(error):
                raise
            self.equal(state(self.model), before, "state after a refused batch")
        finally:
            self.model.weight = old

    def switch(self, event: Switch) -> None:
        """The next batches with the other value would be compared as any; one is enough, refused or equal."""
        value = not self.model.wide if event.value is None else event.value
        old = getattr(self.model, event.name)
        for model in (self.model, self.oracle):
            setattr(model, event.name, value)
        self.switched = True
        self.run(Run((max(self.scenario.sizes),), 1))
        for model in (self.model, self.oracle):
            setattr(model, event.name, old)
        self.switched = False


class Direct(Campaign):
    """Through the functions below the runner, at sizes that were captured, where rows may depend on each other."""

    def capture_once(self) -> None:
        s = self.scenario
        pool = pcg.GraphPool(self.device)
        self.static = {size: self.inputs(size, 3) for size in s.sizes}
        self.replays = {}
        with self.state_restored():
            if s.strategy == "tc_piecewise":
                self.piecewise = pcg.PiecewiseModel(
                    pcg.trace(self.model, *self.inputs(EXAMPLE, 2)), SPLIT_OPS, s.compiler, s.sizes, pool=pool
                )
            for size in s.sizes:
                with pcg.forward_context(pcg.PackedBatch(self.static[size][0].clone(), [size])), torch.no_grad():
                    self.replays[size] = self.captured(size, pool)

    def captured(self, size: int, pool):
        static, strategy = self.static[size], self.scenario.strategy
        if strategy == "tc_piecewise":
            sequence = self.piecewise.capture(*static)
            return sequence.replay if self.scenario.replay == "flat" else lambda: self.piecewise(*static)
        with pool.on_stream():
            self.model(*static)  # warm-up
        if strategy == "breakable":
            return capture_breakable(self.model, *static, pool=pool).replay
        graph = pcg.capture(self.model, *static, pool=pool)
        return lambda: graph.replay() or graph.output

    def inputs(self, size: int, seed: int) -> list[torch.Tensor]:
        tokens = ints(size, seed=seed, device=self.device, dtype=torch.int64, low=0, high=50)
        return [tokens, torch.arange(size, device=self.device)]

    @contextmanager
    def state_restored(self):
        """Below the runner, capture leaves behind what its runs have done."""
        before = state(self.model)
        try:
            yield
        finally:
            with torch.no_grad():
                for mine, value in zip(tensors(self.model), before):
                    mine.copy_(value)

    def replay(self, batch) -> object:
        size = batch.num_tokens
        with pcg.forward_context(batch), torch.no_grad():
            if not self.outcome.captured:
                return self.model(batch.tokens, batch.positions)
            if size not in self.replays:
                if self.scenario.strategy == "tc_piecewise":  # a size that was not captured runs the pieces
                    return self.piecewise(batch.tokens, batch.positions)
                return self.model(batch.tokens, batch.positions)
            static = self.static[size]
            static[0].copy_(batch.tokens), static[1].copy_(batch.positions)
            return tree_map_only(torch.Tensor, torch.clone, self.replays[size]())
