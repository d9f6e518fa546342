"""Warnings of batches that are not what they were planned as: each once, with its remedy."""

import re
import warnings

import pytest
import torch

from odb_nodes import Observation, ODBDataLoader, PaddingCollate, TokenBudget, pop_step_info

TEXT = [{"input_ids": [1] * (n % 60 + 4)} for n in range(150)]
LABELS = [{**sample, "labels": sample["input_ids"]} for sample in TEXT]
NOTED = [{**sample, "label": n % 3} for n, sample in enumerate(TEXT)]
ANSWERS = [{**sample, "labels": [1] * (n % 9 + 2)} for n, sample in enumerate(TEXT)]
SHORT = [sample for sample in ANSWERS if len(sample["labels"]) <= len(sample["input_ids"])]
SILENT = [{**sample, "labels": [-100] * len(sample["input_ids"])} for sample in TEXT]
PADDED = [
    dict.fromkeys(("input_ids", "attention_mask"), ([1] * (n % 60 + 4) + [0] * 512)[:512])
    for n in range(150)
]


def warned(dataset, epochs=2, trusts_labels=False, **options):
    """The warnings of some epochs."""
    loader = ODBDataLoader(dataset, **{"token_budget": 512, "window": 64, **options})
    if trusts_labels:
        loader.trust_labels()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for _ in loader:
                pass
    return [str(warning.message) for warning in caught]


def padded_to_128(samples):
    rows = PaddingCollate()(samples)["input_ids"]
    return {"input_ids": torch.nn.functional.pad(rows, (0, 128 - rows.shape[1]))}


def masked(samples):
    """Masked language modelling: a label for every seventh token or so."""
    batch = PaddingCollate()(samples)
    chosen = torch.rand(batch["input_ids"].shape) < 0.15
    return {**batch, "labels": batch["input_ids"].masked_fill(~chosen, -100)}


def causal(samples):
    batch = PaddingCollate()(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def renamed(samples):
    batch = PaddingCollate()(samples)
    return {"labels": batch.pop("label"), **batch}


def seq2seq(samples):
    """As `DataCollatorForSeq2Seq`: labels are padded to a length of their own."""
    labels = [torch.tensor(sample["labels"]) for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    batch = PaddingCollate()([{"input_ids": sample["input_ids"]} for sample in samples])
    return {**batch, "labels": padded}


def with_decoder(samples):
    """Labels that are as long as the texts, so that only a key shows what they are for."""
    batch = seq2seq(samples)
    missing = batch["input_ids"].shape[1] - batch["labels"].shape[1]
    batch["labels"] = torch.nn.functional.pad(batch["labels"], (0, missing), value=-100)
    return {**batch, "decoder_input_ids": batch["labels"].clamp(min=0)}


def one_target(sample):
    return Observation(len(sample["input_ids"]), targets=1)


def all_labels(sample):
    return Observation(len(sample["input_ids"]), sum(label != -100 for label in sample["labels"]))


ATTENTION = {"token_budget": TokenBudget(1024, attention_tokens=64)}
WITH_PACKED = {"token_budget": TokenBudget(1024, attention_tokens=64, layout="packed")}
WEIGHED = {"accumulate": 3}  # One batch of one rank weighs 1 anyway.


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (TEXT, {"observe": len}, "above the budget of 512.*pad_to_multiple_of"),
        (TEXT, {"collate_fn": padded_to_128}, "above the budget of 512.*pad_to_multiple_of"),
        (
            TEXT,
            {**ATTENTION, "collate_fn": padded_to_128},
            r"a cost of \d+ with attention\),",
        ),
        (PADDED, {"token_budget": 4096}, "padded already.*process_fn"),
        ([*TEXT, {"input_ids": [1] * 600}], {}, "exceeds the budget on its own"),
        (TEXT, {"collate_fn": masked, **WEIGHED}, "Observation"),
        (NOTED, WEIGHED, "has a number as `label`.*rename `label` to `labels`"),
        (NOTED, {"collate_fn": causal, **WEIGHED}, "the samples have one label each"),
        (SHORT, {"collate_fn": seq2seq, **WEIGHED}, "as for an encoder-decoder"),
        (SHORT, {"collate_fn": with_decoder, **WEIGHED}, "as for an encoder-decoder"),
        (
            [*LABELS[:75], *({**sample, "labels": 1} for sample in TEXT[:75])],
            {"collate_fn": lambda group: {"ids": [*map(len, group)]}},
            r"labels\+samples",
        ),
        (SILENT, {}, "step 0 of epoch 0 is supervised"),
        (SILENT, WEIGHED, "step 0 of epoch 0 is supervised"),
        (SILENT, {"trusts_labels": True}, "step 0 of epoch 0 is supervised"),
        (
            TEXT,
            {"observe": lambda sample: Observation(len(sample["input_ids"]), targets=0)},
            "is supervised, on any rank",
        ),
    ],
)
def test_a_batch_that_differs_from_its_plan_is_warned_of_once(data, options, message):
    (warning,) = warned(data, **options)
    assert re.search(message, warning), warning


@pytest.mark.parametrize(
    ("data", "options"),
    [
        *((data, options) for data in (TEXT, LABELS) for options in ({}, WEIGHED, ATTENTION)),
        (LABELS, {"collate_fn": causal, **WEIGHED}),
        (TEXT, WITH_PACKED),
        # Tokens that the model makes of an image are not taken for padding.
        (
            [{**sample, "attention_mask": [1] * len(sample["input_ids"])} for sample in TEXT],
            {"observe": lambda sample: len(sample["input_ids"]) + 576, "token_budget": 4096},
        ),
        # Labels that the collate function makes are right where nothing goes by their number.
        (TEXT, {"collate_fn": masked}),
        (TEXT, {"collate_fn": masked, **WEIGHED, "loss_scaling": "none"}),
        (TEXT, {"collate_fn": masked, **WEIGHED, "loss_scaling": "approx"}),
        (TEXT, {"collate_fn": masked, **WEIGHED, "observe": one_target}),
        (TEXT, {"collate_fn": masked, **WEIGHED, "trusts_labels": True}),
        (NOTED, {}),
        (NOTED, {"collate_fn": renamed, **WEIGHED}),
        ([{**sample, "labels": 1} for sample in TEXT], WEIGHED),
        ([{**sample, "label": 1} for sample in LABELS], WEIGHED),
        (SHORT, {"collate_fn": seq2seq}),
        (SHORT, {"collate_fn": seq2seq, **WEIGHED, "observe": all_labels}),
        (
            [{**sample, "labels": [-100, *sample["labels"][1:]]} for sample in SHORT],
            {"collate_fn": seq2seq, **WEIGHED},
        ),
        (SILENT, {"loss_scaling": "none"}),  # The loss may be one over samples.
        (SILENT[:4] + LABELS[4:], {"token_budget": 10**5, "window": 300}),
        ([{"input_ids": [1]}] * 150, {}),  # Without labels.
    ],
)
def test_good_batches_are_not_warned_of(data, options):
    assert warned(data, **options) == []


def test_with_that_count_batches_are_weighed_by_all_labels():
    options = {"token_budget": 512, "window": 64, "accumulate": 4, "collate_fn": seq2seq}
    for batch in ODBDataLoader(ANSWERS, **options, observe=all_labels):
        info = pop_step_info(batch)
        if not info.is_filler:
            labels = int(batch["labels"].ne(-100).sum())
            assert info.loss_scale == pytest.approx(labels / info.optimizer_targets)
