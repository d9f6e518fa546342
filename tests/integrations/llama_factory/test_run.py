"""Arguments in the manner of LLaMA-Factory, and what they come to."""

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
from refusals import refuses
from torch.utils.data import IterableDataset

from odb_nodes import PackedCollate, TokenBudget
from odb_nodes.integrations.llama_factory import DynamicBatches


@dataclass
class DataArguments:
    cutoff_len: int = 2048
    packing: bool | None = None
    neat_packing: bool = False
    streaming: bool = False


def arguments(**changed):
    """Three objects, as the command line of LLaMA-Factory makes them."""
    data, training, finetuning = (
        DataArguments(),
        SimpleNamespace(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            group_by_length=False,
            dataloader_drop_last=False,
        ),
        SimpleNamespace(stage="sft", disable_shuffling=False),
    )
    for name, value in changed.items():
        holder = next(
            candidate for candidate in (data, training, finetuning) if hasattr(candidate, name)
        )
        setattr(holder, name, value)
    return data, training, finetuning


def test_the_budget_is_what_fixed_batches_take_at_most():
    batches = DynamicBatches.of(*arguments())
    assert batches.budget == TokenBudget(2048 * 4)
    assert batches.accumulate == 2
    assert batches.shuffle
    # One mapping, as of a YAML file.
    mapping = {"cutoff_len": 128, "per_device_train_batch_size": 2, "stage": "sft", "lora_rank": 8}
    batches = DynamicBatches.of(mapping)
    assert batches.budget == TokenBudget(256)
    assert batches.accumulate == 1
    assert batches.data_args["lora_rank"] == 8
    assert DynamicBatches.of({"cutoff_len": 10}, token_budget=300).budget == TokenBudget(300)
    assert DynamicBatches.of(*arguments(stage="pt", packing=False)).budget.layout == "padded"


def test_neat_packing_becomes_a_packed_budget_over_whole_samples():
    holders = arguments(neat_packing=True, packing=True)
    batches = DynamicBatches.of(*holders)
    assert batches.budget == TokenBudget(2048 * 4, layout="packed")
    assert not batches.data_args.packing and not batches.data_args.neat_packing
    assert holders[0].packing and holders[0].neat_packing  # not changed


REFUSED = [
    ({"packing": True}, "`packing` must be False, or `neat_packing` True"),
    ({"packing": False, "neat_packing": True}, "`packing` must not be False if"),
    ({"stage": "pt"}, "`packing` must be given"),
    ({"stage": "dpo"}, "`stage` must be one of"),
    ({"group_by_length": True}, "`group_by_length` must be False"),
    ({"dataloader_drop_last": True}, "`dataloader_drop_last` must be False"),
    ({"cutoff_len": 0}, "`cutoff_len` must be in"),
    ({"per_device_train_batch_size": 0}, "`per_device_train_batch_size` must be in"),
    ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be in"),
    ({"neat_packing": "yes"}, "`neat_packing` must be True or False"),
]
test_what_contradicts_is_refused = refuses(
    REFUSED, lambda changed: DynamicBatches.of(*arguments(**changed)), error=(TypeError, ValueError)
)


def test_what_is_missing_given_twice_or_too_small_is_refused():
    with pytest.raises(ValueError, match="`per_device_train_batch_size` must be given"):
        DynamicBatches.of({"cutoff_len": 10})
    with pytest.raises(ValueError, match="`cutoff_len` is given twice, as 2048 and as 10"):
        DynamicBatches.of(*arguments(), {"cutoff_len": 10})
    with pytest.raises(ValueError, match=r"at least `cutoff_len` \(2048\), but is 1000"):
        DynamicBatches.of(*arguments(), token_budget=1000)


# --- a trainer ------------------------------------------------------------------------------------


@pytest.fixture
def configured(monkeypatch):
    """Stands in for the integration with transformers, and notes its arguments."""
    calls = []

    def configure_trainer(trainer, **options):
        calls.append(options)
        return trainer

    module = ModuleType("odb_nodes.integrations.huggingface")
    module.configure_trainer = configure_trainer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return calls


def trainer_of(training, **changed):
    fields = {
        "args": training,
        "train_dataset": [{"input_ids": [1, 2], "attention_mask": [1, 1]}],
        "data_collator": SimpleNamespace(pad_to_multiple_of=None),
    }
    return SimpleNamespace(**{**fields, **changed})


def test_a_trainer_of_any_class_is_configured(configured):
    holders = arguments()
    trainer = trainer_of(holders[1])
    assert DynamicBatches.of(*holders).configure(trainer, window=64) is trainer
    assert configured == [{"token_budget": TokenBudget(2048 * 4), "window": 64}]


def test_the_budget_counts_what_the_collator_pads(configured):
    holders = arguments(cutoff_len=2047, per_device_train_batch_size=1)
    collator = SimpleNamespace(pad_to_multiple_of=8)
    DynamicBatches.of(*holders).configure(trainer_of(holders[1], data_collator=collator))
    # A sample of 2047 tokens, padded to 2048, does not exceed it.
    assert configured == [{"token_budget": TokenBudget(2048, pad_to_multiple_of=8)}]


def test_packed_batches_are_made_by_our_collator(configured):
    holders = arguments(neat_packing=True)
    trainer = trainer_of(holders[1])
    DynamicBatches.of(*holders).configure(trainer)
    ((options),) = configured
    collate = options.pop("collate_fn")
    assert options == {"token_budget": TokenBudget(2048 * 4, layout="packed")}
    assert trainer.data_collator is not collate  # which evaluation uses
    text = {"input_ids": [1, 2], "labels": [1, 2], "images": None, "videos": [], "audios": None}
    assert not {"images", "videos", "audios"} & {*collate([text, text])}
    with pytest.raises(ValueError, match="must be False if samples have `images`"):
        collate([text, {**text, "images": ["a.png"]}])

    collate = PackedCollate()
    DynamicBatches.of(*holders).configure(trainer, collate_fn=collate)
    assert configured[1]["collate_fn"] is collate


def test_data_that_is_not_to_be_shuffled_is_not(configured):
    holders = arguments(disable_shuffling=True)
    DynamicBatches.of(*holders).configure(trainer_of(holders[1]))
    assert holders[1].train_sampling_strategy == "sequential"


def test_a_trainer_that_contradicts_is_refused(configured):
    holders = arguments()
    training = SimpleNamespace(gradient_accumulation_steps=5)
    with pytest.raises(ValueError, match="of the trainer must be 2, as in the arguments, but is 5"):
        DynamicBatches.of(*holders).configure(trainer_of(training))
    numbered = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 2]}
    alike = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 0]}
    for row in (numbered, alike):
        for packed in ([row], Stream([row]), {"one": [{"input_ids": [1]}], "two": [row]}):
            with pytest.raises(ValueError, match="is packed already"):
                DynamicBatches.of(*holders).configure(trainer_of(holders[1], train_dataset=packed))
    assert configured == []


class Stream(IterableDataset):
    """Rows without a length, which has `__getitem__` all the same, as streams of `datasets`."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize("rows", [[], [{"input_ids": [1, 2], "attention_mask": [1, 1]}]])
def test_a_stream_is_taken(configured, rows):
    holders = arguments()
    DynamicBatches.of(*holders).configure(trainer_of(holders[1], train_dataset=Stream(rows)))
    once = iter(rows)  # which is not read: its rows would be lost
    DynamicBatches.of(*holders).configure(trainer_of(holders[1], train_dataset=once))
    assert len(configured) == 2
    assert list(once) == rows
