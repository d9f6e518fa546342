"""Packed, padded and alone, a sample has the same losses in a model of transformers."""

import itertools

import numpy as np
import pytest
import torch
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
        max_position_embeddings=64,
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
    expected, got = alone(llama), token_losses(llama, COLLATE[kind](DATASET))
    assert sorted(got) == sorted(expected)
    for index, losses in expected.items():
        torch.testing.assert_close(got[index], losses, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("mask_dtype", [None, torch.float32], ids=["positions", "mask"])
def test_no_gradient_flows_from_one_sample_to_another(mask_dtype):
    llama = model("sdpa")
    batch = PackedCollate(mask_dtype=mask_dtype, pad_to_multiple_of=32)(DATASET[:6])
    embedded = llama.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    bounds = batch["cu_seq_lens_q"].tolist()
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "id")}
    logits = llama(inputs_embeds=embedded, **inputs).logits
    for start, stop in itertools.pairwise(bounds[:7]):
        (grad,) = torch.autograd.grad(
            logits[:, start:stop].square().sum(), embedded, retain_graph=True
        )
        touched = grad[0].abs().sum(1).nonzero().flatten().tolist()
        assert touched == list(range(start, stop))


def test_with_a_cache_samples_would_see_each_other():
    """Why `use_cache=False` is in the batch: this must fail once transformers needs it no more."""
    llama, batch = model("sdpa"), PackedCollate()(DATASET)
    batch["use_cache"] = True
    expected, got = alone(llama), token_losses(llama, batch)
    assert max((got[i] - expected[i]).abs().max() for i in expected if len(expected[i])) > 0.01


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
