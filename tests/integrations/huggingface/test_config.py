"""The options of dynamic batches, and the trainers and arguments that they refuse."""

from types import SimpleNamespace

import language_models as lm
import pytest
import trainers
from transformers import Trainer
from transformers.trainer_utils import HPSearchBackend

from odb_nodes.integrations.huggingface import (
    ODBConfig,
    ODBTrainer,
    ODBTrainerMixin,
    configure_trainer,
)
from odb_nodes.integrations.huggingface.config import check_trainer

# --- what is refused ------------------------------------------------------------------------------

GROUPED = {"train_sampling_strategy": "group_by_length"}
REFUSED = [
    ({"auto_find_batch_size": True}, "`auto_find_batch_size` must be False"),
    (
        {"group_by_length": True} if trainers.BEFORE_5 else GROUPED,
        "`train_sampling_strategy` must be",
    ),
    ({"max_steps": 3, "odb": {"schedule": "samples"}}, "`schedule` must be"),
    ({"model": trainers.encoder_decoder()}, r"`DataCollatorForSeq2Seq\(tokenizer"),
]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("accumulate", "gradient_accumulation_steps"),
        ("num_workers", "dataloader_num_workers"),
        ("seed", "data_seed"),
    ],
)
def test_an_argument_of_the_loader_that_the_trainer_has_is_explained(name, remedy):
    with pytest.raises(TypeError, match=f"`{name}` .*`{remedy}`"):
        ODBConfig(token_budget=64, **{name: 2})


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together_is_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        trainers.make_trainer(tmp_path, **options)


@pytest.mark.parametrize("name", ["num_train_epochs", "gradient_accumulation_steps"])
def test_a_search_over_what_the_batches_are_made_of_is_refused(tmp_path, name):
    trainer = trainers.make_trainer(tmp_path)
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer.hp_space = lambda trial: {"learning_rate": 0.1, name: 5}
    with pytest.raises(ValueError, match=f"`{name}` must not change after"):
        trainer.train(trial=SimpleNamespace(params={}))


def test_a_schedule_of_deepspeed_that_would_be_told_a_bound_is_refused(tmp_path, monkeypatch):
    by_epochs, by_steps = (
        trainers.make_trainer(tmp_path),
        trainers.make_trainer(tmp_path, max_steps=1),
    )
    plugin = SimpleNamespace(deepspeed_config={"scheduler": {"type": "WarmupDecayLR"}})
    monkeypatch.setattr(type(by_steps.accelerator.state), "deepspeed_plugin", plugin)
    check_trainer(by_steps, by_steps.odb)
    with pytest.raises(ValueError, match="DeepSpeed config has a `scheduler`"):
        by_epochs.train()


def test_a_trainer_that_makes_its_own_batches_is_refused(tmp_path):
    def own_batches(self):
        return [lm.sample_of(0)]

    stock = type("Stock", (Trainer,), {"get_train_dataloader": own_batches})
    arguments = (lm.Normalizing(), trainers.arguments(tmp_path, max_steps=1))
    for kind, message in (
        (stock, "`Stock` must not override `get_train_dataloader`: "),
        (type("Derived", (stock,), {}), "`Stock` must not override"),
    ):
        trainer = kind(*arguments, train_dataset=lm.Texts(40))
        with pytest.raises(ValueError, match=message):
            configure_trainer(trainer, token_budget=64)
        assert type(trainer) is kind
        with pytest.raises(ValueError, match=message):
            trainers.make_trainer(tmp_path, kind=type("Below", (ODBTrainerMixin, kind), {}))
    above = type("Above", (ODBTrainer,), {"get_train_dataloader": own_batches})
    with pytest.raises(ValueError, match="`get_train_dataloader` of `Above` must return"):
        trainers.make_trainer(tmp_path, kind=above).train()
    plain = Trainer(*arguments, train_dataset=lm.Texts(40))
    assert configure_trainer(plain, token_budget=64) is plain
    with pytest.raises(ValueError, match="has dynamic batches already"):
        configure_trainer(plain, token_budget=64)


# --- the config -----------------------------------------------------------------------------------


INVALID = [
    ("token_budget", 0, ValueError),
    ("shift_labels", "x", TypeError),
    ("loss_is", "x", ValueError),
    ("steps_per_epoch", 0, ValueError),
    ("schedule", "x", ValueError),
    ("lr_scaling", "sqrt", TypeError),
    ("log_metrics", 1, TypeError),
    ("ledger", 3, TypeError),
    ("monitor", 3, TypeError),
    ("task_weights", {"chat": 1.0}, TypeError),
    ("on_oom", "x", ValueError),
    ("guard_above", 2, ValueError),
    ("shrink", 2.0, ValueError),
    ("change_budget", 1, TypeError),
    ("memory_share", 1.1, ValueError),
    ("memory_meter", 3, TypeError),
    ("window", 0, ValueError),  # an option of all loaders
]


@pytest.mark.parametrize(("field", "value", "error"), INVALID)
def test_a_field_of_the_config_that_is_not_valid_is_named(field, value, error):
    with pytest.raises(error, match=rf"^`{field}` must .*but is {value!r}"):
        ODBConfig(**{"token_budget": 64, field: value})


def test_each_field_of_its_own_is_checked():
    assert {field for field, *_ in INVALID} == {*vars(ODBConfig)["__annotations__"], "window"}
