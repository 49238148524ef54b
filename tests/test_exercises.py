"""The notebooks' exercises: every check passes its solution, and neither the stub nor an answer that is nearly right."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
import torch

import pcg_ref as pcg
from pcg_ref.exercises import hazard_lab, trace_and_split, two_graphs

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def exercises():
    """(notebook, module, check, name of the solution) of every exercise, from the cells that call a check."""
    found = []
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        source = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code")
        for module in re.findall(r"^from pcg_ref\.exercises import (\w+)$", source, flags=re.MULTILINE):
            calls = re.findall(rf"^{module}\.(check_\w+)\((\w+)\)", source, flags=re.MULTILINE)
            found += [(path.name, module, check, name) for check, name in calls]
    return found


def solution(module, name):
    spec = importlib.util.spec_from_file_location(f"solutions_{module}", NOTEBOOKS / "solutions" / f"{module}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def verdict(check, answer, capsys):
    check(answer)
    (line,) = capsys.readouterr().out.splitlines()
    return line


@pytest.mark.parametrize(("notebook", "module", "check", "name"), exercises(), ids=lambda value: str(value))
def test_solution_is_accepted_and_stub_is_not(notebook, module, check, name, capsys):
    check = getattr(importlib.import_module(f"pcg_ref.exercises.{module}"), check)
    for seed in range(3):
        torch.manual_seed(seed)
        assert verdict(check, solution(module, name), capsys).startswith("solved: ")

    def stub(*args):
        raise NotImplementedError

    assert verdict(check, stub, capsys) == verdict(check, lambda *args: None, capsys) == "not solved yet"


@pytest.mark.parametrize("notebook", ["01_two_graphs_by_hand.ipynb", "02_trace_and_split.ipynb", "06_hazard_lab.ipynb"])
def test_a_notebook_has_three_exercises(notebook):
    assert sum(entry[0] == notebook for entry in exercises()) == 3


# Answers that are nearly right, and what the check says to them.


def submit_without_clone(graph, static_x, x):
    static_x[: len(x)].copy_(x)
    graph.replay()
    return graph.output[: len(x)]


def submit_rebound(graph, static_x, x):
    static_x = x  # noqa: F841
    graph.replay()
    return graph.output[: len(x)].clone()


def submit_all_rows(graph, static_x, x):
    static_x[: len(x)].copy_(x)
    graph.replay()
    return graph.output.clone()


def submit_without_replay(graph, static_x, x):
    static_x[: len(x)].copy_(x)
    return graph.output[: len(x)].clone()


SHARED = torch.zeros(two_graphs.T, two_graphs.D, device=two_graphs.device())


def bridged_shared(step):
    return lambda h, lengths: SHARED.copy_(step(h, lengths))


def bridged_once(step):
    results = []

    def fixed(h, lengths):
        results.append(results[0] if results else step(h, lengths))
        return results[0]

    return fixed


def build_eagerly(parts, step, static_x, pool):
    pcg.capture(parts[0], static_x, pool=pool)

    def run(x, lengths):
        for part in parts[:2]:
            h = part(x)
            x = torch.empty_like(h)
            step(h, lengths, x)
        return parts[2](x)

    return run


def build(parts, step, static_x, pool, keep, rebind):
    graphs, inputs = [], [static_x, *(torch.zeros_like(static_x) for _ in parts[1:])]
    for part, tensor in zip(parts, inputs):
        graphs.append(pcg.capture(part, tensor, pool=pool))

    def run(x, lengths):
        n = len(x)
        static_x[:n].copy_(x)
        graphs[0].replay()
        for before, bridge, graph in zip(graphs, inputs[1:], graphs[1:]):
            step(before.output, lengths, bridge.clone() if rebind else bridge)
            graph.replay()
        return graphs[-1].output[:n].clone() if keep else graphs[-1].output[:n]

    return run


def numbers_each_split_alone(is_split):
    numbers = [0]
    for before, now in zip(is_split, is_split[1:]):
        numbers.append(numbers[-1] + (before or now))
    return numbers


def operator_that_is_no_boundary():
    @pcg.register_custom_op(mutates_args=["output"])
    def wrong_no_boundary(values: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(values)

    return wrong_no_boundary


def operator_with_frozen_lengths():
    frozen = []

    @pcg.register_split_op()
    @pcg.register_custom_op(mutates_args=["output"])
    def wrong_frozen_lengths(values: torch.Tensor, output: torch.Tensor) -> None:
        frozen.append(pcg.current_context().lengths)
        rows = (frozen[0] * len(values))[: len(values)] if sum(frozen[0]) != len(values) else frozen[0]
        start = 0
        for n in rows:
            output[start : start + n] = values[start : start + n].mean(0)
            start += n

    return wrong_frozen_lengths


def operator_over_the_batch():
    @pcg.register_split_op()
    @pcg.register_custom_op(mutates_args=["output"])
    def wrong_over_the_batch(values: torch.Tensor, output: torch.Tensor) -> None:
        output.copy_(values.mean(0).expand_as(values))

    return wrong_over_the_batch


def operator_left_out():
    return lambda values, output: output.copy_(values)


def bounds_without_the_padding(lengths, slots, rows):
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    return ends + [ends[-1]] * (slots + 1 - len(ends))


LEFT_OVER = [0] * 7


def bounds_with_left_overs(lengths, slots, rows):
    ends = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    LEFT_OVER[: len(ends) + (len(ends) <= slots)] = [*ends, rows][: slots + 1]
    return list(LEFT_OVER)


def watch_by_identity(module):
    before = dict(module.named_parameters())

    def check():
        for name, parameter in module.named_parameters():
            if parameter is not before[name]:
                raise RuntimeError(name)

    return check


def watch_by_value(module):
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def check():
        for name, tensor in module.state_dict().items():
            if not torch.equal(tensor, before[name]):
                raise RuntimeError(name)

    return check


def watch_without_buffers(module):
    before = {name: tensor.data_ptr() for name, tensor in module.named_parameters()}

    def check():
        for name, tensor in module.named_parameters():
            if tensor.data_ptr() != before[name]:
                raise RuntimeError(name)

    return check


def store(cache, capture, stale=False, clobber=False):
    rows, slots = cache.new_zeros(8, cache.shape[1]), torch.full((8,), len(cache) - 1, device=cache.device)
    graph = capture(lambda rows, slots: cache.index_copy_(0, slots, rows), rows, slots)

    def run(new_rows, new_slots):
        if not stale:
            slots.fill_(0 if clobber else len(cache) - 1)
        rows[: len(new_rows)], slots[: len(new_rows)] = new_rows, new_slots
        graph.replay()

    return run


def store_eagerly(cache, capture):
    capture(lambda cache: cache + 1, cache)
    return lambda rows, slots: cache.index_copy_(0, slots, rows)


def store_per_size(cache, capture):
    def run(rows, slots):
        capture(lambda rows, slots: cache.index_copy_(0, slots, rows), rows, slots).replay()

    return run


WRONG = [
    (hazard_lab.check_bounds, bounds_without_the_padding, "the padding behind lengths"),
    (hazard_lab.check_bounds, bounds_with_left_overs, "the padding behind lengths [5]"),
    (hazard_lab.check_bounds, lambda lengths, slots, rows: [0, *lengths], "and the buffer has 7"),
    (hazard_lab.check_watch, lambda module: lambda: None, "1.bias has moved, and nothing was raised"),
    (hazard_lab.check_watch, watch_by_identity, "0.weight has moved, and nothing was raised"),
    (hazard_lab.check_watch, watch_by_value, "changed in place"),
    (hazard_lab.check_watch, watch_without_buffers, "2.running_mean has moved, and nothing was raised"),
    (hazard_lab.check_store, lambda *args: store(*args, stale=True), "slots"),
    (hazard_lab.check_store, lambda *args: store(*args, clobber=True), "slots of other requests changed"),
    (hazard_lab.check_store, store_eagerly, "is the write in the graph"),
    (hazard_lab.check_store, store_per_size, "expected 1"),
    (two_graphs.check_submit, submit_without_clone, "overwritten by a later replay"),
    (two_graphs.check_submit, submit_rebound, "was x written into static_x"),
    (two_graphs.check_submit, submit_all_rows, "must be a [5, 32] tensor"),
    (two_graphs.check_submit, submit_without_replay, "wrong for 5 rows"),
    (two_graphs.check_submit, lambda graph, static_x, x: torch.zeros_like(x), "wrong for 5 rows"),
    (two_graphs.check_bridged, lambda step: step, "another address"),
    (two_graphs.check_bridged, bridged_shared, "share one buffer"),
    (two_graphs.check_bridged, bridged_once, "does not see the result"),
    (two_graphs.check_build, build_eagerly, "Python of the parts ran"),
    (two_graphs.check_build, lambda *args: build(*args, keep=False, rebind=False), "overwritten by a later run"),
    (two_graphs.check_build, lambda *args: build(*args, keep=True, rebind=True), "wrong for lengths"),
    (two_graphs.check_build, lambda *args: lambda x, lengths: torch.zeros_like(x), "pool was not used"),
    (trace_and_split.check_branchless, lambda x: x * 2 if x.sum() > 0 else x - 1, "cannot be traced as one graph"),
    (trace_and_split.check_branchless, lambda x: x * 2, "wrong for"),
    (trace_and_split.check_branchless, lambda x: torch.where(x > 0, x * 2, x - 1), "wrong for"),
    (trace_and_split.check_branchless, torch.zeros_like, "wrong for"),
    (trace_and_split.check_request_mean, operator_that_is_no_boundary, "not as a split operator"),
    (trace_and_split.check_request_mean, operator_with_frozen_lengths, "read when the body runs"),
    (trace_and_split.check_request_mean, operator_over_the_batch, "wrong for lengths"),
    (trace_and_split.check_request_mean, operator_left_out, "must return the operator"),
    (trace_and_split.check_piece_numbers, lambda is_split: [0] * len(is_split), "split_graph cuts"),
    (trace_and_split.check_piece_numbers, lambda is_split: list(range(len(is_split))), "split_graph cuts"),
    (trace_and_split.check_piece_numbers, numbers_each_split_alone, "split_graph cuts"),
]


@pytest.mark.parametrize(("check", "answer", "says"), WRONG, ids=[f"{c.__name__}-{i}" for i, (c, _, _) in enumerate(WRONG)])
def test_an_answer_that_is_nearly_right_is_not_accepted(check, answer, says, capsys):
    line = verdict(check, answer, capsys)
    assert line.startswith("not yet right: ") and says in line
