"""The pictures and texts, compared as DOT text and numbers with the structures they are drawn from; never as drawings."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pcg_ref as pcg
from pcg_ref.show import boundary_text, draw_boundaries, draw_split, print_split, split_text
from pcg_ref.show.dot import dot_programs

ROOT = Path(__file__).resolve().parent.parent


@pcg.register_custom_op(mutates_args=["x"])
def show_barrier(x: torch.Tensor) -> None:
    x.add_(1)


@pcg.register_custom_op(fake=lambda x: torch.empty_like(x))
def show_fresh(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def traced_decoder(layers):
    return pcg.trace(pcg.TinyDecoder(layers=layers), *(torch.zeros(7, dtype=torch.int64) for _ in range(2)))


def split_function(fn, ops):
    return pcg.split_graph(pcg.trace(fn, torch.zeros(7, 4)).graph_module, ops)


@pytest.fixture(scope="module")
def two_layers():
    return pcg.split_graph(traced_decoder(2).graph_module)


@pytest.fixture(scope="module")
def six_layers():
    return pcg.split_graph(traced_decoder(6).graph_module)


def nodes_of(dot):
    """The nodes of a drawing with their attributes, in order."""
    return dict(re.findall(r"^  (\w+) \[(.*)\];$", dot, flags=re.MULTILINE))


def edges_of(dot):
    """The edges of a drawing, each with the lines of its label."""
    found = re.findall(r'^  (\w+) -> (\w+) \[label="([^"]*)"(.*)\];$', dot, flags=re.MULTILINE)
    return {(producer, consumer): label.split(r"\n") for producer, consumer, label, _ in found}


def test_importing_show_brings_no_drawing_library():
    code = "import sys, pcg_ref.show; print({'matplotlib', 'graphviz', 'IPython', 'numpy.testing'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"


# The picture.


def test_pieces_are_drawn_in_order_and_told_apart_by_colour_shape_and_word(two_layers):
    _, items = two_layers
    nodes = nodes_of(str(draw_split(*two_layers)))
    drawn = [name for name in nodes if name.startswith("submod")]
    assert drawn == [item.submod_name for item in items]
    for item in items:
        color, shape, word = ("#E69F00", "octagon", "eager") if item.is_splitting_graph else ("#56B4E9", "box", "CUDA graph")
        assert f"shape={shape}," in nodes[item.submod_name]
        assert f'fillcolor="{color}"' in nodes[item.submod_name]
        assert f"piece {item.graph_id}: {word}" in nodes[item.submod_name]


def test_edges_are_the_tensors_that_cross(two_layers):
    assert edges_of(str(draw_split(*two_layers))) == {
        ("input", "submod_0"): ["positions [T]", "tokens [T]"],
        ("submod_0", "submod_1"): ["query_1 [T, 4, 8]", "key_1 [T, 2, 8]", "value [T, 2, 8]", "attended [T, 4, 8]"],
        # What attention wrote comes from attention, although piece 0 allocated it.
        ("submod_1", "submod_2"): ["attended [T, 4, 8]"],
        ("submod_0", "submod_2"): ["hidden [T, 32]", "cos_1 [T, 1, 4]", "sin_1 [T, 1, 4]"],
        ("submod_2", "submod_3"): ["query_3 [T, 4, 8]", "key_3 [T, 2, 8]", "value_1 [T, 2, 8]", "attended_1 [T, 4, 8]"],
        ("submod_3", "submod_4"): ["attended_1 [T, 4, 8]"],
        ("submod_2", "submod_4"): ["hidden_2 [T, 32]"],
        ("submod_4", "output"): [edges_of(str(draw_split(*two_layers)))["submod_4", "output"][0]],
    }


def test_every_crossing_tensor_is_drawn_once_for_each_reader(six_layers):
    rows = [row for row in pcg.boundaries(*six_layers) if row.owner not in ("parameter", "buffer")]
    drawn = [name for labels in edges_of(str(draw_split(*six_layers, layers=99))).values() for name in labels]
    assert len(drawn) == sum(len(row.consumers) for row in rows)


def test_parameters_and_torchs_symbols_are_folded_away(two_layers):
    for text in (str(draw_split(*two_layers)), split_text(*two_layers, layers=9)):
        assert not re.search(r"\bs\d+\b|l_self|_parameters_", text)
    assert "3 parameters, 1 buffer" in nodes_of(str(draw_split(*two_layers)))["submod_0"]
    assert "weight" not in str(draw_split(*two_layers))


@pytest.mark.parametrize(("layers", "drawn", "more"), [(1, 3, "9 more pieces (5 eager)"), (2, 5, "7 more pieces (4 eager)")])
def test_a_deep_model_is_collapsed(six_layers, layers, drawn, more):
    split_gm, items = six_layers
    dot = str(draw_split(split_gm, items, layers))
    assert [name for name in nodes_of(dot) if "submod" in name] == [f"submod_{i}" for i in [*range(drawn), len(items) - 1]]
    assert more in nodes_of(dot)["more"]
    assert {name for edge in edges_of(dot) for name in edge} <= set(nodes_of(dot))
    assert ("more", f"submod_{len(items) - 1}") in edges_of(dot)


@pytest.mark.parametrize("layers", [5, 6, 99])
def test_nothing_is_collapsed_that_would_take_no_less_room(six_layers, layers):
    assert "more" not in nodes_of(str(draw_split(*six_layers, layers=layers)))


def test_a_fresh_tensor_and_a_piece_that_launches_nothing_stand_out():
    fresh = str(draw_split(*split_function(lambda x: show_fresh(x * 2) + 1, [show_fresh])))
    assert re.search("submod_1 -> submod_2 .*style=dashed", fresh)
    assert not re.search("submod_0 -> submod_1 .*style=dashed", fresh)

    def allocates(x):
        show_barrier(x)
        out = torch.empty_like(x)
        show_barrier(out)
        return out * 2

    constant = nodes_of(str(draw_split(*split_function(allocates, [show_barrier]))))
    assert "shape=note" in constant["submod_1"] and "piece 1: no launch, not captured" in constant["submod_1"]


def test_numbers_of_the_drawing_are_those_of_the_graph():
    trace = traced_decoder(2)
    nodes = nodes_of(str(draw_split(*pcg.split_graph(trace.graph_module))))
    counted = sum(int(n) for attributes in nodes.values() for n in re.findall(r"(\d+) nodes?", attributes))
    assert counted == sum(node.op.startswith("call") for node in trace.graph_module.graph.nodes)


def test_the_drawing_does_not_depend_on_whether_pieces_were_captured():
    model = pcg.PiecewiseModel(traced_decoder(1), capture_sizes=[4])
    before = str(draw_split(model.split_module, model.items)), split_text(model.split_module, model.items)
    tokens, positions = (torch.zeros(4, dtype=torch.int64) for _ in range(2))
    with pcg.forward_context(pcg.PackedBatch(tokens, [4])):
        model.capture(tokens, positions)
    assert (str(draw_split(model.split_module, model.items)), split_text(model.split_module, model.items)) == before


def test_the_alternative_text_says_how_many_pieces_and_which(two_layers, six_layers):
    alt = draw_split(*two_layers).alt
    assert "5 pieces (2 eager), in order: 0 CUDA graph, 1 eager, 2 CUDA graph, 3 eager, 4 CUDA graph" in alt
    assert len(draw_split(*six_layers).alt) < 250


@pytest.mark.skipif(not dot_programs(), reason="nothing draws DOT here")
def test_the_drawing_can_be_drawn(six_layers):
    assert draw_split(*six_layers).svg.startswith('<svg role="img" aria-label="The FX graph cut into 13 pieces')


# The text.


def test_text_shows_the_first_layer_as_code(two_layers):
    split_gm, items = two_layers
    text = split_text(split_gm, items)
    pieces = re.findall(r"^piece (\d), ([\w ]+): ", text, flags=re.MULTILINE)
    assert pieces == [("0", "CUDA graph"), ("1", "eager"), ("2", "CUDA graph")]
    assert "\n    linear = F.linear(rms_norm, layers.0.qkv.weight, None)" in text
    assert re.search(r"hidden = F\.embedding\(tokens, embed\.weight, .*\) +# \[T, 32\]", text)
    assert re.search(r"    torch\.ops\.pcg_ref\.unified_attention_with_output\.default\(query_1, key_1, value, attended, ", text)
    assert text.splitlines()[-1] == "... 2 more pieces (1 eager)"
    code = [line for line in text.splitlines() if line.startswith("    ")]
    assert len(code) == sum(node.op.startswith("call") for item in items[:3] for node in item.graph.graph.nodes)


def test_text_says_what_a_piece_takes_writes_and_gives(two_layers):
    piece = split_text(*two_layers).split("\n\n")[1]
    assert "  takes query_1 [T, 4, 8], key_1 [T, 2, 8], value [T, 2, 8], attended [T, 4, 8]\n  writes attended [T, 4, 8]\n" in piece
    assert "gives" not in piece


def test_text_of_all_pieces_has_no_line_of_more(two_layers, capsys):
    print_split(*two_layers, layers=9)
    printed = capsys.readouterr().out
    assert printed == split_text(*two_layers, layers=9) + "\n"
    assert "more piece" not in printed and printed.count("piece ") == 5


def test_two_tensors_never_share_a_name():
    def model(x):
        y = x
        for _ in range(2):
            show_barrier(y)
            x = y + x
            y = x * 2
        return y

    text = split_text(*split_function(model, [show_barrier]), layers=9)
    assert not re.search(r"\b(\w+) = \1\b", text)
    assert not re.search(r"\b(\w+) = \w+ \+ \1\b", text)


def test_several_dynamic_sizes_have_letters_of_their_own():
    def model(x, y):
        show_barrier(x)
        return x.sum(0), y * 2

    trace = pcg.trace(model, torch.zeros(5, 4), torch.zeros(7, 4))
    text = split_text(*pcg.split_graph(trace.graph_module, [show_barrier]))
    letters = dict(re.findall(r"\b([xy]) \[(T2?), 4\]", text))
    assert sorted(letters) == ["x", "y"] and sorted(letters.values()) == ["T", "T2"]


# --- what crosses


def test_every_crossing_tensor_is_a_node_with_its_bytes_and_owner(two_layers):
    dot = str(draw_boundaries(*two_layers, layers=0))
    rows = [row for row in pcg.boundaries(*two_layers) if not (row.producer == "input" and row.owner in ("parameter", "buffer"))]
    tensors = {name: attributes for name, attributes in nodes_of(dot).items() if name.startswith("tensor")}
    assert len(tensors) == len(rows)
    for row, attributes in zip(rows, tensors.values()):
        assert f"{row.owner}: stays" in attributes and row.bytes.replace(row.shape[0], "T") + " bytes" in attributes
    arrows = re.findall(r"^  (\w+) -> (\w+)", dot, flags=re.MULTILINE)
    expected = [(row.producer, f"tensor{i}") for i, row in enumerate(rows) if row.producer != "input"]
    expected += [(f"tensor{i}", consumer) for i, row in enumerate(rows) for consumer in row.consumers if consumer != "output"]
    assert sorted(arrows) == sorted(expected)
    assert re.findall(r"(tensor\d+) -> submod_1 \[dir=both", dot) == [f"tensor{[r.name for r in rows].index('attended')}"]


def test_fresh_memory_is_dashed_and_a_bridge_is_not():
    fresh = split_function(lambda x: show_fresh(x * 2) + 1, [show_fresh])
    assert "fresh: new each time" in str(draw_boundaries(*fresh)) and "style=dashed" in str(draw_boundaries(*fresh))
    assert "would read the old address" in boundary_text(*fresh)
    piecewise = pcg.PiecewiseModel(pcg.trace(lambda x: show_fresh(x * 2) + 1, torch.zeros(7, 4)), [show_fresh], capture_sizes=[4])
    bridged = str(draw_boundaries(piecewise.split_module, piecewise.items))
    assert "bridge: stays" in bridged and "dashed" not in bridged and "1 bridge" in draw_boundaries(*_split(piecewise)).alt
    assert "copied to a buffer that stays" in boundary_text(*_split(piecewise))


def _split(piecewise):
    return piecewise.split_module, piecewise.items


def test_the_boundaries_of_the_first_layers(six_layers):
    dot = str(draw_boundaries(*six_layers, layers=1))
    assert [name for name in nodes_of(dot) if name.startswith("submod")] == ["submod_0", "submod_1", "submod_2"]
    table = boundary_text(*six_layers, layers=1).split("\n\n")[0].splitlines()
    rows = pcg.boundaries(*six_layers)
    folded = sum(row.producer == "input" and row.owner in ("parameter", "buffer") for row in rows)
    shown = len(table) - 1 - 3  # the heading, two folded lines and the count
    assert shown + int(table[-1].split()[1]) + folded == len(rows)
