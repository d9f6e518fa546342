"""`estimate_training_memory`: near what autograd saves, for models of several families."""

import pytest
import torch
from refusals import refuses
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from odb_nodes import TokenBudget
from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import enable_checkpointing, estimate_training_memory

VOCABULARY, WIDTH = 96, 64
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
COMMON = {"vocab_size": VOCABULARY, "max_position_embeddings": 128}
WIDE = {**SIZES, **COMMON, "intermediate_size": 160}
OF_GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": VOCABULARY}
OF_GPT2 |= {"bos_token_id": None, "eos_token_id": None}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {**WIDE, "num_key_value_heads": 2}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {**WIDE, "num_key_value_heads": 4, "head_dim": 16}),
    "neox": (GPTNeoXForCausalLM, GPTNeoXConfig, WIDE),
    "bert": (BertForMaskedLM, BertConfig, WIDE),
    "gpt2": (GPT2LMHeadModel, GPT2Config, OF_GPT2),
}


def make(family, attention="sdpa"):
    """A model without dropout, whose masks a CPU saves in another dtype than a GPU."""
    model, config, options = FAMILIES[family]
    network = model(config(**options, attn_implementation=attention)).train()
    for module in network.modules():
        for name in ("p", "dropout", "attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return network


def saved_bytes(model, rows, dtype):
    """The bytes that autograd saves for a batch with padding, without the log-probabilities."""
    ids = torch.randint(5, VOCABULARY, (rows, WIDTH))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    with SavedTensorMeter(2**40) as meter:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        peak_bytes = meter.peak_bytes()
        loss.backward()
    return peak_bytes - rows * WIDTH * VOCABULARY * 4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_are_near_what_autograd_saves(family, dtype, attention):
    model = make(family, attention)
    few, many = (
        estimate_training_memory(model, (rows, WIDTH), dtype=dtype).activation_bytes
        for rows in (2, 6)
    )
    measured = saved_bytes(model, 6, dtype) - saved_bytes(model, 2, dtype)  # without the weights
    assert -0.1 < (many - few) / measured - 1 < 0.2


def test_checkpointing_keeps_the_inputs_of_the_layers_and_computes_one_at_a_time():
    model = make("llama")
    plain, saving = (
        estimate_training_memory(model, (6, WIDTH), checkpointing=on).activation_bytes
        for on in (False, True)
    )
    inputs = 6 * WIDTH * SIZES["hidden_size"] * 4
    of_layer = (plain - saving + 3 * inputs) / 2  # of three, one is computed again at a time
    enable_checkpointing(model)
    measured = 6 / 4 * (saved_bytes(model, 6, None) - saved_bytes(model, 2, None))
    assert saving - of_layer == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_gradients_and_states_are_exact_also_of_a_model_without_memory(dtype):
    def frozen_model():
        model = make("gpt2").to(dtype)
        model.transformer.wte.weight.requires_grad_(False)
        return model

    model = frozen_model()
    estimate = estimate_training_memory(model, (2, 8))
    with torch.device("meta"):
        assert estimate_training_memory(frozen_model(), (2, 8)) == estimate
    weights = [torch.zeros_like(weight, device="cpu") for weight in model.parameters()]
    assert estimate.parameter_bytes == sum(zeros.nbytes for zeros in weights)
    trained = [zeros for zeros, weight in zip(weights, model.parameters(), strict=True)
               if weight.requires_grad]  # fmt: skip
    for weight in trained:
        weight.requires_grad_().grad = torch.ones_like(weight)
    assert estimate.gradient_bytes == sum(weight.grad.nbytes for weight in trained)
    for name, make_optimizer in {
        "adamw": torch.optim.AdamW,
        "rmsprop": torch.optim.RMSprop,
        "sgd_momentum": lambda weights: torch.optim.SGD(weights, momentum=0.9),
        "sgd": torch.optim.SGD,
    }.items():
        (optimizer := make_optimizer(trained)).step()
        states = (value for state in optimizer.state.values() for value in state.values())
        kept = sum(value.nbytes for value in states if torch.is_tensor(value) and value.ndim)
        of_optimizer = estimate_training_memory(model, (2, 8), optimizer=name)
        assert of_optimizer.optimizer_bytes == kept
    assert estimate.logits_bytes == 2 * 8 * VOCABULARY * (dtype.itemsize + 8)
    parts = [value for name, value in vars(estimate).items() if name.endswith("_bytes")]
    assert estimate.total_bytes == sum(parts) > 0


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        ((3, 50), (3, 50)),
        (512, (4, 128)),  # of the widest rows that the model takes
        (100, (1, 100)),
        (TokenBudget(512, max_samples=2), (2, 128)),
        (TokenBudget(512, attention_tokens=128), (2, 128)),
        (TokenBudget(512, layout="packed"), (1, 512)),
        (TokenBudget(512, pad_to_multiple_of=48), (3, 144)),
    ],
)
def test_a_budget_stands_for_its_batch_of_the_widest_rows(batch, shape):
    estimate = estimate_training_memory(make("llama"), batch)
    assert (estimate.rows, estimate.width) == shape


T5 = T5ForConditionalGeneration(T5Config(num_layers=1, d_model=8, d_ff=8, num_heads=1))
test_a_model_that_cannot_be_estimated_is_an_error = refuses(
    [
        (nn.Linear(2, 2), {}, ValueError, "`model.config` must be .* has no .*hidden_size or"),
        (T5, {}, ValueError, "an encoder with a decoder"),
        (None, {}, TypeError, "`model` must be"),
        (make("llama"), {"batch": (0, 5)}, ValueError, "`batch` must be in 1"),
        (make("llama"), {"batch": "5"}, TypeError, "`batch` must be"),
        (make("llama"), {"optimizer": "shampoo"}, ValueError, "`optimizer` must be one of"),
    ],
    lambda model, options: estimate_training_memory(model, **{"batch": 64, **options}),
)
