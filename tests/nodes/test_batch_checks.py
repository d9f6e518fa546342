"""Warnings of batches that are not what they were planned as: each once, with its remedy."""

import re
import warnings
from dataclasses import replace

import pytest
import torch

from odb_nodes import Observation, ODBDataLoader, PaddingCollate, TokenBudget, pop_step_info

TEXT = [{"input_ids": [1] * (n % 60 + 4)} for n in range(300)]
LABELS = [{**one, "labels": one["input_ids"]} for one in TEXT]


def warned(dataset, epochs=2, **options):
    """The warnings of some epochs."""
    loader = ODBDataLoader(dataset, **{"token_budget": 512, "window": 64, **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            for _ in loader:
                pass
    return [str(one.message) for one in caught]


def padded_to(length):
    def collate(samples):
        batch = PaddingCollate()(samples)
        rows = batch["input_ids"]
        return {"input_ids": torch.nn.functional.pad(rows, (0, length - rows.shape[1]))}

    return collate


def masked(samples):
    """Masked language modelling: a label for every seventh token or so."""
    batch = PaddingCollate()(samples)
    chosen = torch.rand(batch["input_ids"].shape) < 0.15
    return {**batch, "labels": batch["input_ids"].masked_fill(~chosen, -100)}


def causal(samples):
    batch = PaddingCollate()(samples)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


@pytest.mark.parametrize(
    "options",
    [{"observe": len}, {"observe": lambda _: 1}, {"collate_fn": padded_to(128)}],
    ids=["keys of the dict", "one", "padded to 128"],
)
def test_batches_that_exceed_the_budget_are_told_of(options):
    (message,) = warned(TEXT, **options)
    assert "above the budget of 512" in message and "pad_to_multiple_of" in message


def test_with_attention_a_batch_that_is_wider_than_planned_costs_more_than_its_tokens():
    budget = TokenBudget(1024, attention_tokens=64)
    (message,) = warned(TEXT, token_budget=budget, collate_fn=padded_to(128))
    assert re.search(
        r"128 = \d+ tokens \(a cost of \d+ with attention\), above the budget", message
    )
    for layout in ("padded", "packed"):
        assert warned(TEXT, token_budget=replace(budget, layout=layout)) == []


def test_samples_that_are_padded_already_are_told_of():
    padded = [
        {
            "input_ids": one["input_ids"] + [0] * (512 - len(one["input_ids"])),
            "attention_mask": one["input_ids"] + [0] * (512 - len(one["input_ids"])),
        }
        for one in TEXT
    ]
    (message,) = warned(padded, token_budget=4096)
    assert "the samples are padded already" in message and "process_fn" in message


def test_tokens_that_the_model_makes_of_an_image_are_not_taken_for_padding():
    masks = [{**one, "attention_mask": [1] * len(one["input_ids"])} for one in TEXT]
    options = {"observe": lambda one: len(one["input_ids"]) + 576, "token_budget": 4096}
    assert warned(masks, **options) == []


@pytest.mark.parametrize("data", [TEXT, LABELS], ids=["text", "labels"])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 3}, {"collate_fn": causal}],
    ids=["plain", "accumulated", "collated"],
)
def test_good_batches_are_not_warned_of(data, options):
    assert warned(data, **options) == []


def test_a_sample_that_exceeds_the_budget_on_its_own_is_warned_of_by_the_bucketer_alone():
    messages = warned([*TEXT, {"input_ids": [1] * 600}], epochs=1)
    assert len(messages) == 1 and "exceeds the budget on its own" in messages[0]


def test_labels_that_the_collate_function_makes_are_told_of_where_the_weight_is_wrong():
    (message,) = warned(TEXT, collate_fn=masked, accumulate=3)
    assert "Make the labels in `process_fn`" in message and "Observation" in message
    assert warned(TEXT, collate_fn=masked) == []  # One batch of one rank weighs 1 anyway.
    for scaling in ("none", "approx"):
        assert warned(TEXT, collate_fn=masked, accumulate=3, loss_scaling=scaling) == []

    def observe(sample):
        return Observation(len(sample["input_ids"]), targets=1)

    assert warned(TEXT, collate_fn=masked, accumulate=3, observe=observe) == []


@pytest.mark.parametrize("key", ["label", "label_ids"])
def test_a_number_beside_the_tokens_that_may_not_be_what_the_loss_is_of_is_told_of(key):
    noted = [{**one, key: n % 3} for n, one in enumerate(TEXT)]
    (message,) = warned(noted, accumulate=3)
    assert f"has a number as `{key}`" in message and "name it `labels`" in message
    assert warned(noted) == []  # One batch of one rank weighs 1 anyway.
    assert warned([{**one, "labels": 1} for one in TEXT], accumulate=3) == []
    assert warned([{**one, key: 1} for one in LABELS], accumulate=3) == []


def test_labels_per_token_of_samples_with_a_class_are_told_of():
    noted = [{**one, "label": n % 3} for n, one in enumerate(TEXT)]
    (message,) = warned(noted, collate_fn=causal, accumulate=3)
    assert "the samples have one label each" in message and "process_fn" in message

    def renamed(samples):
        batch = PaddingCollate()(samples)
        return {"labels": batch.pop("label"), **batch}

    assert warned(noted, collate_fn=renamed, accumulate=3) == []


ANSWERS = [{**one, "labels": [1] * (n % 9 + 2)} for n, one in enumerate(TEXT)]


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


def all_labels(s):
    """Counts them as the warning says."""
    return Observation(len(s["input_ids"]), sum(label != -100 for label in s["labels"]))


@pytest.mark.parametrize("collate", [seq2seq, with_decoder])
def test_labels_of_a_decoder_are_told_of_where_the_first_was_not_counted(collate):
    data = [one for one in ANSWERS if len(one["labels"]) <= len(one["input_ids"])]
    (message,) = warned(data, collate_fn=collate, accumulate=3)
    assert "as those of an encoder-decoder" in message and "Observation" in message
    assert warned(data, collate_fn=collate) == []  # One batch of one rank weighs 1 anyway.
    assert warned(data, collate_fn=collate, accumulate=3, observe=all_labels) == []
    unsupervised = [{**one, "labels": [-100, *one["labels"][1:]]} for one in data]
    assert warned(unsupervised, collate_fn=collate, accumulate=3) == []


def test_with_that_count_batches_are_weighed_by_all_labels():
    options = {"token_budget": 512, "window": 64, "accumulate": 4, "collate_fn": seq2seq}
    for batch in ODBDataLoader(ANSWERS, **options, observe=all_labels):
        info = pop_step_info(batch)
        if not info.is_filler:
            found = int(batch["labels"].ne(-100).sum())
            assert info.loss_scale == pytest.approx(found / info.optimizer_targets)


def test_a_trainer_that_counts_the_labels_itself_is_not_warned():
    loader = ODBDataLoader(TEXT, token_budget=512, window=64, collate_fn=masked, accumulate=3)
    loader.trust_labels()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(loader)


def test_a_class_of_each_sample_is_one_target():
    classes = [{**one, "labels": n % 2} for n, one in enumerate(TEXT)]
    for batch in ODBDataLoader(classes, token_budget=512, window=32, accumulate=2):
        info = pop_step_info(batch)
        assert info.counted == "samples"
        assert info.local_targets == info.local_samples
        assert info.loss_scale == info.local_samples / info.optimizer_samples


def test_samples_with_one_label_beside_others_are_told_of():
    mixed = [*LABELS[:150], *({**one, "labels": 1} for one in TEXT[:150])]
    messages = warned(mixed, collate_fn=lambda group: {"ids": [len(one) for one in group]})
    assert len(messages) == 1 and "labels+samples" in messages[0]


SILENT = [{**one, "labels": [-100] * len(one["input_ids"])} for one in TEXT]


@pytest.mark.parametrize(
    ("data", "options", "count"),
    [
        (SILENT, {}, 1),
        (SILENT, {"accumulate": 3}, 1),
        (SILENT, {"observe": lambda one: Observation(len(one["input_ids"]), targets=0)}, 1),
        (SILENT, {"loss_scaling": "none"}, 0),  # The loss may be one over samples.
        ([{"input_ids": [1]}] * 300, {}, 0),  # Without labels.
        (SILENT[:4] + LABELS[4:], {"token_budget": 10**5, "window": 300}, 0),
    ],
)
def test_steps_that_no_token_is_supervised_in_are_told_of_once(data, options, count):
    found = [text for text in warned(data, **options) if "is supervised, on any rank" in text]
    assert len(found) == count


def test_a_trainer_that_counts_the_labels_itself_is_told_of_them_too():
    loader = ODBDataLoader(SILENT, token_budget=512, window=64)
    loader.trust_labels()
    with pytest.warns(UserWarning, match="step 0 of epoch 0 is supervised"):
        list(loader)
