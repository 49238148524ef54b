"""The README's code runs as it stands, block after block."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_readme_runs(capsys):
    namespace = {}
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(README), "exec"), namespace)  # its asserts are its checks
    printed = capsys.readouterr().out
    assert "strategy tc_piecewise" in printed and "'EagerSegment', 'GraphSegment'" in printed


def test_the_reading_order_names_every_module_of_the_spine():
    text = README.read_text(encoding="utf-8")
    spine = {path.name for path in (README.parent / "pcg_ref").glob("*.py")} - {"__init__.py", "__main__.py"}
    beside = {name for name in spine if name.startswith("demo")}
    assert [name for name in sorted(spine - beside) if f"`{name}`" not in text] == []
