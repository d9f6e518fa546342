"""A `Trainer` that finds its budget trains as one that is given it."""

import gc
import sys
import textwrap
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import language_models as lm  # noqa: E402
import trainer_jobs as t  # noqa: E402
from rank_jobs import RankJob, run_ranks  # noqa: E402
from torch.utils.data import IterableDataset  # noqa: E402
from trainer_memory_jobs import logs_of  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, Trainer  # noqa: E402

from odb_nodes import PackedCollate, PaddingCollate, TokenBudget  # noqa: E402
from odb_nodes.integrations.huggingface import (  # noqa: E402
    ODBConfig,
    auto_budget,
    configure_trainer,
)
from odb_nodes.memory import ShapeTooLargeError  # noqa: E402
from odb_nodes.testing import SavedTensorMeter  # noqa: E402

LIMIT_BYTES = 60_000


class Counting(SavedTensorMeter):
    """Counts the steps that are measured."""

    number = 0

    def reset(self):
        self.number += 1
        super().reset()


def decoder():
    """A Llama with dropout."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=lm.VOCABULARY,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
        attention_dropout=0.2,
    )
    model = LlamaForCausalLM(config)
    model.seen = []
    return model


def auto(**options):
    return {"token_budget": "auto", "memory_meter": SavedTensorMeter(LIMIT_BYTES), **options}


def trainer_of(folder, odb, model="Normalizing", optimizer=None, **options):
    options = {"num_train_epochs": 1, "logging_steps": 1, "optim": "adamw_torch", **options}
    model = decoder() if model == "decoder" else model
    trainer = t.make_trainer(folder, model=model, odb=odb, **options)
    if optimizer is not None:
        trainer.optimizer = optimizer(trainer.model.parameters(), lr=0.01)
    return trainer


def outcome(trainer):
    """What a run has come to: weights, losses, the optimizer's state, and what is drawn next."""
    logs = [logs_of(trainer, name) for name in ("loss", "grad_norm", "odb/samples_per_step")]
    state = [one for each in trainer.optimizer.state.values() for one in each.values()]
    return lm.weights_of(trainer.model), state, logs, torch.rand(2), trainer.state.global_step


def check_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 3, "model": "Averaging"},
        {"model": "decoder", "gradient_checkpointing": True},
        {"model": "decoder", "bf16": True},
        {"optimizer": torch.optim.AdamW},
        {"model": "Plain", "compute_loss_func": lm.sum_over_items},
    ],
)
def test_a_run_is_that_with_the_budget_that_was_found(tmp_path, options):
    trainer = trainer_of(tmp_path / "auto", auto(), **options)
    assert trainer.odb_budget is None
    trainer.train()
    found, budget = outcome(trainer), trainer.odb_budget
    assert budget.tokens > 24
    given = trainer_of(tmp_path / "given", {"token_budget": budget}, **options)
    assert given.odb_budget == budget
    given.train()
    check_same(found, outcome(given))
    assert found[-1] > 2


def test_evaluations_and_runs_before_change_nothing(tmp_path):
    def run(name, odb):
        data = {"eval_dataset": lm.Texts(5), "label_names": ["labels"]}
        trainer = trainer_of(tmp_path / name, odb, model="decoder", bf16=True, **data)
        losses = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            losses.append(trainer.evaluate()["eval_loss"])
        return trainer, losses, outcome(trainer)

    trainer, *found = run("auto", auto())
    _, *expected = run("given", {"token_budget": trainer.odb_budget})
    check_same(found, expected)


def test_an_existing_trainer_may_find_its_budget(tmp_path):
    trainer = Trainer(lm.Normalizing(), t.arguments(tmp_path, max_steps=3))
    trainer.train_dataset = lm.Texts(40)
    configure_trainer(trainer, window=12, **auto()).train()
    assert trainer.odb_budget.tokens > 24
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model": "decoder"},
        {"model": "decoder", "gradient_checkpointing": True},
        {"model": "decoder", "bf16": True},
    ],
)
def test_steps_of_the_run_take_what_was_predicted(tmp_path, options):
    trainer = trainer_of(tmp_path, auto(on_oom="split"), size=200, **options)
    trainer.train()
    assert sum(logs_of(trainer, "odb/ooms")) == 0
    shares, errors = logs_of(trainer, "odb/peak_memory_share"), logs_of(trainer, "odb/memory_error")
    assert len(shares) == len(errors) + 1 == trainer.state.global_step
    assert 0.75 < max(shares) <= 1
    assert 0 < max(errors) < 0.2
    assert len({*shares}) > 2  # each is of its own step


def test_without_a_meter_a_guard_logs_no_memory(tmp_path):
    trainer = trainer_of(tmp_path, {"on_oom": "split"})
    trainer.train()
    assert logs_of(trainer, "odb/ooms")
    assert not logs_of(trainer, "odb/peak_memory_share") + logs_of(trainer, "odb/memory_error")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_steps_that_are_tried_have_gradients_where_batches_accumulate(tmp_path, accumulate):
    class Noting(lm.Normalizing):
        def features(self, input_ids):
            if input_ids.shape[0] > 1:  # once the trials run
                noted.append(self.head.weight.grad is not None)
            return super().features(input_ids)

    noted = []
    options = {"model": Noting(), "gradient_accumulation_steps": accumulate}
    trainer = trainer_of(tmp_path, auto(loss_is="divided"), **options)
    trainer.add_callback(tried := NotedBefore(noted))
    trainer.train()
    assert len(tried.noted) > 3
    assert {*tried.noted} == {accumulate > 1}


def test_steps_that_are_tried_are_padded_as_those_of_training_are(tmp_path):
    class Noting(lm.Normalizing):
        def forward(self, input_ids, attention_mask=None, labels=None, id=None, **kwargs):
            if len(input_ids) > 1:
                noted.append(bool(attention_mask.all()))
            return super().forward(input_ids, attention_mask, labels, id, **kwargs)

    noted = []
    trainer = trainer_of(tmp_path, auto(loss_is="divided"), Noting())
    trainer.add_callback(tried := NotedBefore(noted))
    trainer.train()
    assert len(tried.noted) > 3 and not any(tried.noted)


@pytest.mark.parametrize("bf16", [True, False])
def test_steps_that_are_tried_have_the_precision_of_training(tmp_path, bf16):
    class Noting(lm.Normalizing):
        def features(self, input_ids):
            noted.append(torch.is_autocast_enabled("cpu"))
            return super().features(input_ids)

    noted = []
    trainer = trainer_of(tmp_path, auto(loss_is="divided"), Noting(), bf16=bf16)
    trainer.add_callback(tried := NotedBefore(noted))
    trainer.train()
    assert len(tried.noted) > 3
    assert {*tried.noted} == {*noted} == {bf16}


class NotedBefore(t.TrainerCallback):
    """Keeps what was noted before a run began."""

    def __init__(self, noted):
        self.all = noted

    def on_train_begin(self, *args, **kwargs):
        self.noted = [*self.all]


def test_steps_that_are_tried_leave_room_for_the_buckets_of_ddp(tmp_path):
    class Live(SavedTensorMeter):
        """Counts the tensors of the hidden layer's shape beside the weights, before each step."""

        def reset(self):
            shape = (lm.HIDDEN, lm.HIDDEN)
            tensors = (one for one in gc.get_objects() if type(one) is torch.Tensor)
            alive.append(sum(one.shape == shape for one in tensors))
            super().reset()

    trainer = trainer_of(tmp_path, auto(memory_meter=Live(LIMIT_BYTES)))
    counts = []
    for ranks in (1, 2, 1):
        alive = []
        gc.collect()
        auto_budget._calibrate(trainer, ranks)
        counts.append(alive[0])
    assert counts[1] == counts[0] + 1 == counts[2] + 1


# --- resuming -------------------------------------------------------------------------------------


def test_a_run_resumes_with_the_budget_of_its_checkpoint(tmp_path):
    odb = auto(memory_meter=(meter := Counting(LIMIT_BYTES)), on_oom=None)
    saving = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2}
    whole = trainer_of(tmp_path, odb, **saving)
    whole.train()
    expected, tried = outcome(whole), meter.number
    assert tried > 5
    odb["memory_meter"] = meter = Counting(LIMIT_BYTES // 3)  # would find a smaller one
    steps = whole.state.global_step
    for step in (1, steps // 2, steps // 2 + 1, steps):
        resumed = trainer_of(tmp_path / f"from-{step}", odb, num_train_epochs=2)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert resumed.odb_budget == whole.odb_budget
        check_same(lm.weights_of(resumed.model), expected[0])
    assert meter.number == 0


@pytest.mark.parametrize(
    "budget",
    [
        TokenBudget(64, attention_tokens=50, max_samples=4, row_sizes="even"),
        TokenBudget(64, pad_to_multiple_of=8, oversize="drop"),
    ],
)
def test_a_run_that_was_given_a_budget_resumes_with_it(tmp_path, budget):
    odb = {"token_budget": budget}
    whole = trainer_of(tmp_path, odb, save_strategy="steps", save_steps=2)
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", auto())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.odb_budget == budget
    check_same(lm.weights_of(resumed.model), lm.weights_of(whole.model))


# --- what is refused ------------------------------------------------------------------------------


def test_without_a_meter_for_the_device_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`CudaMeter` needs a GPU .* Give a `memory_meter`"):
        trainer_of(tmp_path, {"token_budget": "auto"})


@pytest.mark.parametrize("name", ["is_fsdp_enabled", "is_deepspeed_enabled", "is_model_parallel"])
def test_models_on_several_devices_are_refused(tmp_path, name):
    trainer = trainer_of(tmp_path, auto())
    setattr(trainer, name, True)
    with pytest.raises(ValueError, match='`token_budget` must not be "auto" w.* Give a number'):
        trainer.train()


@pytest.mark.parametrize("word", ["most", "Auto"])
def test_another_word_than_auto_is_refused(word):
    message = f"`token_budget` must be .*\"auto\".* is '{word}' instead. Or give a number of tokens"
    with pytest.raises(ValueError, match=message):
        ODBConfig(token_budget=word)


def test_an_optimizer_that_steps_within_backward_is_refused(tmp_path):
    with pytest.raises(ValueError, match='`optim` must not be "lomo" .* `token_budget` is "auto"'):
        trainer_of(tmp_path, auto(), optim="lomo")


def test_there_are_no_batches_before_a_budget_is_found(tmp_path):
    with pytest.raises(ValueError, match='`token_budget` is "auto", and no budget is found yet'):
        trainer_of(tmp_path, auto()).get_train_dataloader()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(lm.Texts(5))


@pytest.mark.parametrize(
    "dataset, error, message",
    [
        (Stream(), TypeError, "a budget can be found .* only where the dataset is map-style"),
        ([{"input_ids": [1, 2], "pixel_values": torch.ones(3, 4)}], ValueError, "have images"),
    ],
)
def test_data_that_cannot_be_tried_are_refused(tmp_path, dataset, error, message):
    trainer = trainer_of(tmp_path, auto(), max_steps=2)
    trainer.train_dataset = dataset
    with pytest.raises(error, match=message):
        trainer.train()


def test_a_sample_that_does_not_fit_is_an_error_and_nothing_is_changed(tmp_path):
    trainer = trainer_of(tmp_path, auto(memory_meter=SavedTensorMeter(6_000)))
    before = lm.weights_of(trainer.model)
    with pytest.raises(ShapeTooLargeError, match="a single row of 2. tokens does not fit"):
        trainer.train()
    assert torch.equal(lm.weights_of(trainer.model), before)
    assert trainer.optimizer is None


# --- two ranks ------------------------------------------------------------------------------------

WARM = ("transformers.trainer_seq2seq", "odb_nodes.integrations.huggingface")
BEGIN = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import language_models as lm
import trainer_jobs as t
from odb_nodes.testing import SavedTensorMeter
folder = sys.argv[1]
"""


@pytest.mark.parametrize("place", ["collate_fn", "data_collator"])
def test_rows_are_padded_as_the_collate_function_pads(tmp_path, place):
    collate = PaddingCollate(pad_to_multiple_of=8)
    config = auto(**{place: collate} if place == "collate_fn" else {})
    more = {} if place == "collate_fn" else {place: collate}
    trainer = trainer_of(tmp_path, config, **more)
    trainer.train()
    assert trainer.odb_budget.pad_to_multiple_of == 8
    for bad in (PackedCollate(), PaddingCollate(shapes=((4, 8), (2, 16)))):
        with pytest.raises(ValueError, match="that packs or has `shapes`"):
            trainer_of(tmp_path / "bad", auto(collate_fn=bad))


def test_two_ranks_train_with_the_smallest_budget(tmp_path):
    body = """
        def run(name, resume=None, **odb):
            options = {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "logging_steps": 1}
            options |= {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
            odb = {"token_budget": "auto", "on_oom": "split", "guard_above": 0.0, **odb}
            meter = SavedTensorMeter((60_000, 90_000)[rank])
            odb["memory_meter"] = meter
            trainer = t.make_trainer(f"{folder}/{name}", odb=odb, size=80, **options)
            trainer.train(resume_from_checkpoint=resume)
            logged = trainer.state.log_history[:-1]
            shares = [one["odb/peak_memory_share"] for one in logged]
            budget, weights = trainer.odb_budget, t.weights_of(trainer.model).tolist()
            return budget, weights, trainer.state.global_step, shares

        found = run("auto")
        given = run("given", token_budget=found[0])
        resumed = run("resumed", resume=f"{folder}/auto/checkpoint-1")
        r.finish([[vars(one[0]), *one[1:]] for one in (found, given, resumed)])
    """
    how = (BEGIN + textwrap.dedent(body), 2, str(tmp_path))
    own, others = run_ranks(tmp_path, *how, timeout_s=200, warm=WARM)
    (found, given, resumed), steps = own, own[0][2]
    assert own == others
    assert found == given and found[:3] == resumed[:3]
    assert steps > 2 and 0.3 < max(found[3]) <= 1
    alone = trainer_of(tmp_path / "alone", auto(), gradient_accumulation_steps=2, size=80)
    alone.train()
    assert alone.odb_budget == TokenBudget(**found[0])


def test_where_one_rank_finds_no_budget_both_end(tmp_path):
    body = """
        meter = SavedTensorMeter((60_000, 6_000)[rank])
        t.make_trainer(folder, odb={"token_budget": "auto", "memory_meter": meter}).train()
    """
    how = (BEGIN + textwrap.dedent(body), 2, str(tmp_path))
    with RankJob(tmp_path, *how, warm=WARM) as job:
        first, second = (errors for _, _, errors in job.results(100))
    assert "PeerError: rank 1 failed in finding the budget: ShapeTooLargeError" in first
    assert "ShapeTooLargeError: a single row of" in second


def test_a_loss_that_gathers_cannot_be_tried_by_each_rank_alone(tmp_path):
    body = """
        from trainer_memory_jobs import Gathering
        odb = {"token_budget": "auto", "memory_meter": SavedTensorMeter(60_000)}
        t.make_trainer(folder, odb=odb, kind=Gathering).train()
    """
    how = (BEGIN + textwrap.dedent(body), 2, str(tmp_path))
    with RankJob(tmp_path, *how, warm=WARM) as job:
        for _, _, errors in job.results(100):
            assert "`compute_loss` of `Gathering` gathers from other ranks, which try" in errors
