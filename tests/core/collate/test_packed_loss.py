"""Packed, padded and alone, a sample has the same losses in a model of transformers."""

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

from odb_nodes import ODBDataLoader, PackedCollate, PaddingCollate, TokenBudget, pop_step_info

transformers = pytest.importorskip("transformers")

VOCABULARY = 61
RNG = np.random.default_rng(0)
DATASET = [
    {"input_ids": ids, "labels": np.where(RNG.random(len(ids)) < 0.2, -100, ids), "id": i}
    for i, ids in enumerate(RNG.integers(1, VOCABULARY, n) for n in RNG.integers(1, 50, 24))
]
TOLERANCE = 1e-5


def model(attention):
    torch.manual_seed(0)
    llama = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        attn_implementation=attention,
        initializer_range=0.3,  # so that attention is far from uniform
    )
    return transformers.LlamaForCausalLM(llama)


def token_losses(llama, batch):
    """The loss of every supervised token by its sample, in order."""
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "id")}
    logits = llama(**inputs).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    losses = losses.reshape(targets.shape)
    if len(targets) >= len(batch["id"]) > 1:
        parts = zip(losses, targets, strict=True)
    else:
        stops = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()[1:]
        sizes = np.diff([0, *stops, targets.shape[1]]).tolist()
        parts = zip(losses[0].split(sizes), targets[0].split(sizes), strict=True)
    rows = [loss[target != -100] for loss, target in parts]
    return dict(zip(batch["id"].tolist(), rows, strict=False))


def alone(llama):
    batches = [PaddingCollate()([sample]) for sample in DATASET]
    losses = {}
    for batch in batches:
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        losses |= token_losses(llama, batch)
    return losses


COLLATE = {
    "padded": PaddingCollate(),
    "padded left": PaddingCollate(side="left"),
    "padded, with dummy rows": PaddingCollate(shapes=((30, 24), (30, 64))),
    "packed": PackedCollate(),
    "packed, with padding": PackedCollate(pad_to_multiple_of=64),
    "packed, by a mask": PackedCollate(mask_dtype=torch.float32, pad_to_multiple_of=64),
    "packed, by a boolean mask": PackedCollate(mask_dtype=torch.bool),
    "packed, one shape": PackedCollate(shapes=((1, 1024),), max_samples=30),
}


@pytest.mark.parametrize(
    ("kind", "attention"), [*((kind, "sdpa") for kind in COLLATE), ("packed", "eager")]
)
@torch.no_grad()
def test_every_token_has_the_loss_that_it_has_alone(kind, attention):
    llama = model(attention)
    expected, losses_of = alone(llama), token_losses(llama, COLLATE[kind](DATASET))
    assert sorted(losses_of) == sorted(expected)
    for index, losses in expected.items():
        torch.testing.assert_close(losses_of[index], losses, atol=TOLERANCE, rtol=0)


def test_with_a_cache_samples_would_see_each_other():
    """Why `use_cache=False` is in the batch: this must fail once transformers needs it no more."""
    llama, batch = model("sdpa"), PackedCollate()(DATASET)
    batch["use_cache"] = True
    expected, losses_of = alone(llama), token_losses(llama, batch)
    assert (
        max((losses_of[i] - expected[i]).abs().max() for i in expected if len(expected[i])) > 0.01
    )


@pytest.mark.parametrize(
    "fields", [{"layout": "packed"}, {"layout": "packed", "shapes": 1}, {"shapes": 4}], ids=str
)
def test_the_gradient_of_a_step_is_that_of_the_padded_samples(fields):
    """The losses that the model itself computes, finite and equal, dummy rows or not."""
    llama = model("sdpa")
    budget = TokenBudget(256, pad_to_multiple_of=8, **fields)
    for batch in ODBDataLoader(DATASET, token_budget=budget, window=24):
        info = pop_step_info(batch)
        ids = batch.pop("id").tolist()
        padded = PaddingCollate()([DATASET[i] for i in ids])
        del padded["id"]
        gradients = []
        for inputs in (batch, padded):
            llama.zero_grad()
            llama(**inputs).loss.backward()
            gradients.append([parameter.grad.clone() for parameter in llama.parameters()])
        assert info.local_targets == (padded["labels"][:, 1:] != -100).sum()
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


# --- batches of bounded shapes: a compiled model is compiled for each shape once, and never again -


LENGTHS = np.clip(np.random.default_rng(0).lognormal(3, 1, 300), 2, 200).astype(int)


def sample(index):
    ids = np.full(LENGTHS[index], index % 50)
    return {"input_ids": ids, "labels": ids}


def compiled_model(limit):
    torch.compiler.reset()
    counters.clear()
    torch._dynamo.config.recompile_limit = limit
    return torch.compile(model("sdpa"), backend="eager", dynamic=False, fullgraph=True)


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
    compiled = compiled_model(limit=len(ladder))
    kind = PackedCollate if budget.layout == "packed" else PaddingCollate
    collate = kind.of(budget)
    for _, width in ladder:
        compiled(**collate([{"input_ids": [0] * width, "labels": [0] * width}])).loss.backward()
    assert counters["stats"]["unique_graphs"] == len(ladder)

    shapes = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        loader = ODBDataLoader(range(300), token_budget=budget, process_fn=sample, window=64)
        for batch in loader:
            pop_step_info(batch)
            shapes.add(tuple(batch["input_ids"].shape))
            compiled(**batch).loss.backward()
    assert counters["stats"]["unique_graphs"] == len(ladder)
    assert shapes <= set(ladder)
    assert len(shapes) > 3 or budget.layout == "packed"
    unbounded = ODBDataLoader(range(300), token_budget=512, process_fn=sample, window=64)
    assert len({tuple(batch["input_ids"].shape) for batch in unbounded}) > 15
