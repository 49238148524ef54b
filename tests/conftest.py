"""What all tests share: few threads, fixed seeds, and markers that skip by themselves what this machine cannot run."""

import os

# Set before torch is imported, and inherited by the kernels of the notebooks. The tensors here are so small that two threads mostly
# wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import random

import hypothesis
import pytest
import torch

from pcg_ref.check import find_cpp_compiler

# The same examples in every run, and no deadline: a first call may compile.
hypothesis.settings.register_profile("pcg_ref", deadline=None, derandomize=True)
hypothesis.settings.load_profile("pcg_ref")


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")
    config.addinivalue_line("markers", "inductor: compiles with inductor, which needs a C++ compiler; skipped without one")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if item.get_closest_marker("inductor") and not find_cpp_compiler():
        pytest.skip("needs a C++ compiler and Python's headers")


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Every test starts from the same random state, whichever tests ran before it."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler():
    """Every file starts with an empty compile cache: torch counts recompiles per code object, and files share the models' code."""
    torch.compiler.reset()


@pytest.fixture(autouse=True, scope="module")
def fast_garbage_collection():
    """Every capture collects garbage once; without torch's own objects to walk through, that takes a hundredth of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """For tests that hold on the tape as on CUDA."""
    return request.param
