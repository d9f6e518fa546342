"""Batches of bounded shapes: a compiled model is compiled for each shape once, and never again."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from odb_nodes import ODBDataLoader, PackedCollate, PaddingCollate, TokenBudget, pop_step_info

transformers = pytest.importorskip("transformers")

LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 300), 2, 200).astype(int)


def sample(index):
    ids = np.full(LENGTHS[index], index % 50)
    return {"input_ids": ids, "labels": ids}


def compiled_model(limit):
    torch.compiler.reset()
    counters.clear()
    torch._dynamo.config.recompile_limit = limit
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaForCausalLM(config)
    return torch.compile(model, backend="eager", dynamic=False, fullgraph=True)


@pytest.fixture(autouse=True)
def restored_limit():
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch.compiler.reset()


@pytest.mark.parametrize(
    "budget",
    [
        TokenBudget(512, layout="packed", shapes=1, max_samples=40, pad_to_multiple_of=64),
        TokenBudget(512, shapes=8, max_samples=16),
    ],
    ids=str,
)
def test_nothing_is_compiled_again_after_the_warm_up(budget):
    ladder = budget.shape_ladder()
    model = compiled_model(limit=len(ladder))
    kind = PackedCollate if budget.layout == "packed" else PaddingCollate
    collate = kind.of(budget)
    for _, width in ladder:
        model(**collate([{"input_ids": [0] * width, "labels": [0] * width}])).loss.backward()
    assert counters["stats"]["unique_graphs"] == len(ladder)

    shapes = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        loader = ODBDataLoader(range(300), token_budget=budget, process_fn=sample, window=64)
        for batch in loader:
            pop_step_info(batch)
            shapes.add(tuple(batch["input_ids"].shape))
            model(**batch).loss.backward()
    assert counters["stats"]["unique_graphs"] == len(ladder)
    assert shapes <= set(ladder)
    assert len(shapes) > 3 or budget.layout == "packed"
    unbounded = ODBDataLoader(range(300), token_budget=512, process_fn=sample, window=64)
    assert len({tuple(batch["input_ids"].shape) for batch in unbounded}) > 15
