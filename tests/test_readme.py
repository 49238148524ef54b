"""The README's code runs as it stands, block after block."""

import json
import re
from pathlib import Path

from pcg_ref.bench.record import summary

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_runs(capsys):
    namespace = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)  # its asserts are its checks
    printed = capsys.readouterr().out
    assert "strategy tc_piecewise" in printed and "'EagerSegment', 'GraphSegment'" in printed


def test_the_reading_order_names_every_module_of_the_spine():
    text = README.read_text(encoding="utf-8")
    spine = {path.name for path in (README.parent / "pcg_ref").glob("*.py")} - {"__init__.py", "__main__.py"}
    beside = {name for name in spine if name.startswith("demo")}
    assert [name for name in sorted(spine - beside) if f"`{name}`" not in text] == []


def test_the_numbers_are_those_of_the_record():
    text, folder = README.read_text(encoding="utf-8"), README.parent / "figures" / "h200"
    run = json.loads((folder / "bench-qwen3-0.6b-shape.json").read_text(encoding="utf-8"))
    assert summary(run) in text
    rows = [line.split("|")[2:-1] for line in text.splitlines() if re.match(r"\| (as they are|by inductor) ", line)]
    recorded = [(folder / name).read_text(encoding="utf-8") for name in ("demo.txt", "demo-inductor.txt")]
    for index, row in enumerate(rows):
        requests, tokens, bucket, eager, replay = (cell.strip() for cell in row)
        assert re.search(rf"\b{requests} +{tokens} +{bucket} +30 +{eager} +{replay}\n", recorded[index // 3]), row


def test_the_readmes_layer_is_equal_to_eager(capsys):
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL):
        exec(compile(block, str(README), "exec"), namespace)
    pcg, torch = namespace["pcg"], namespace["torch"]
    layer = namespace["Layer"]()
    piecewise = pcg.PiecewiseModel(pcg.trace(layer, torch.zeros(67, 32)), capture_sizes=[8])
    x = torch.zeros(8, 32)
    with pcg.forward_context(pcg.PackedBatch(torch.zeros(8, dtype=torch.int64), [8])):
        sequence = piecewise.capture(x)
    for lengths in ([3, 5], [1, 6, 1]):
        x.normal_()
        with pcg.forward_context(pcg.PackedBatch(torch.zeros(8, dtype=torch.int64), lengths)):
            torch.testing.assert_close(sequence.replay(), layer(x))
