"""A `Trainer` that finds its budget trains as one that is given it."""

import gc
import json

import language_models as lm
import pytest
import torch
import trainers

from odb_nodes import JsonlSource, PackedCollate, PaddingCollate, TokenBudget
from odb_nodes.integrations.huggingface import auto_budget
from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import ShapeTooLargeError

pytestmark = [
    pytest.mark.filterwarnings(trainers.OF_TRANSFORMERS),
    pytest.mark.filterwarnings("ignore:no token of the optimizer step:UserWarning"),
    pytest.mark.filterwarnings("ignore:the run (continues|ends) after:UserWarning"),
]

LIMIT_BYTES = 60_000


class Counting(SavedTensorMeter):
    """Counts the steps that are measured."""

    number = 0

    def reset(self):
        self.number += 1
        super().reset()


def auto(**options):
    return {"token_budget": "auto", "memory_meter": SavedTensorMeter(LIMIT_BYTES), **options}


def trainer_of(folder, odb, model="Normalizing", optimizer=None, **options):
    options = {"num_train_epochs": 1, "logging_steps": 1, "optim": "adamw_torch", **options}
    if model == "decoder":
        model = trainers.decoder(attention_dropout=0.2)
        model.seen = []
    trainer = trainers.make_trainer(folder, model=model, odb=odb, **options)
    if optimizer is not None:
        trainer.optimizer = optimizer(trainer.model.parameters(), lr=0.01)
    return trainer


def outcome(trainer):
    """The result of a run: weights, losses, the optimizer's state, and the next random number."""
    logs = [
        trainers.logs_of(trainer, name) for name in ("loss", "grad_norm", "odb/samples_per_step")
    ]
    state = [value for values in trainer.optimizer.state.values() for value in values.values()]
    return lm.weights_of(trainer.model), state, logs, torch.rand(2), trainer.state.global_step


def check_same(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_accumulation_steps": 3, "model": "Averaging"},
        {"model": "decoder", "bf16": True, "gradient_checkpointing": True},
        {"optimizer": torch.optim.AdamW},
        {"model": "Plain", "compute_loss_func": lm.sum_over_items},
    ],
)
def test_a_run_is_that_with_the_budget_that_was_found(tmp_path, options):
    trainer = trainer_of(tmp_path / "auto", auto(), **options)
    assert trainer.odb_budget is None
    trainer.train()
    automatic, budget = outcome(trainer), trainer.odb_budget
    assert budget.tokens > 24
    configured = trainer_of(tmp_path / "given", {"token_budget": budget}, **options)
    assert configured.odb_budget == budget
    configured.train()
    check_same(automatic, outcome(configured))
    assert automatic[-1] > 2


def test_evaluations_and_runs_before_change_nothing(tmp_path):
    def run(name, odb):
        data = {"eval_dataset": lm.Texts(5), "label_names": ["labels"]}
        trainer = trainer_of(tmp_path / name, odb, model="decoder", bf16=True, **data)
        losses = [trainer.evaluate()["eval_loss"]]
        for _ in range(2):
            trainer.train()
            losses.append(trainer.evaluate()["eval_loss"])
        return trainer, losses, outcome(trainer)

    trainer, *automatic = run("auto", auto())
    _, *expected = run("given", {"token_budget": trainer.odb_budget})
    check_same(automatic, expected)


@pytest.mark.parametrize("options", [{}, {"model": "decoder", "gradient_checkpointing": True}])
def test_steps_of_the_run_take_what_was_predicted(tmp_path, options):
    trainer = trainer_of(tmp_path, auto(on_oom="split"), size=200, **options)
    trainer.train()
    assert sum(trainers.logs_of(trainer, "odb/ooms")) == 0
    shares = trainers.logs_of(trainer, "odb/peak_memory_share")
    assert len(shares) == trainer.state.global_step
    assert 0.75 < max(shares) <= 1
    assert len({*shares}) > 2  # each belongs to its step


@pytest.mark.parametrize(("accumulate", "bf16"), [(1, True), (3, False)])
def test_steps_that_are_tried_are_as_those_of_training(tmp_path, accumulate, bf16):
    """Trial steps have the run's precision, padding, and gradients if batches accumulate."""

    class Noting(lm.Normalizing):
        def forward(self, input_ids, attention_mask=None, labels=None, id=None, **kwargs):
            if len(input_ids) > 1:  # once the trials run
                has_gradient = self.head.weight.grad is not None
                is_full = bool(attention_mask.all())
                noted.append((torch.is_autocast_enabled("cpu"), is_full, has_gradient))
            return super().forward(input_ids, attention_mask, labels, id, **kwargs)

    class Before(trainers.TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            tried.extend(noted)

    noted, tried = [], []
    options = {"gradient_accumulation_steps": accumulate, "bf16": bf16, "callbacks": [Before()]}
    trainer_of(tmp_path, auto(loss_is="divided"), Noting(), **options).train()
    assert len(tried) > 3
    assert {*tried} == {(bf16, False, accumulate > 1)}


def test_steps_that_are_tried_leave_room_for_the_buckets_of_ddp(tmp_path):
    class Live(SavedTensorMeter):
        """Counts the tensors of the hidden layer's shape beside the weights, before each step."""

        counts = ()

        def reset(self):
            shape = (lm.HIDDEN, lm.HIDDEN)
            tensors = (tensor for tensor in gc.get_objects() if type(tensor) is torch.Tensor)
            self.counts += (sum(tensor.shape == shape for tensor in tensors),)
            super().reset()

    meter = Live(LIMIT_BYTES)
    trainer = trainer_of(tmp_path, auto(memory_meter=meter))
    first_counts = []
    for ranks in (1, 2, 1):
        gc.collect()
        number = len(meter.counts)
        auto_budget.calibrate_alone(trainer, ranks)
        first_counts.append(meter.counts[number])
    alone, with_ddp, again = first_counts
    assert alone == again == with_ddp - 1


# --- resuming -------------------------------------------------------------------------------------


def test_a_run_resumes_with_the_budget_of_its_checkpoint(tmp_path):
    odb = auto(memory_meter=(meter := Counting(LIMIT_BYTES)), on_oom=None)
    saving = {"save_steps": 1, "num_train_epochs": 2}
    whole = trainer_of(tmp_path, odb, **saving)
    whole.train()
    expected, tried = outcome(whole), meter.number
    assert tried > 5
    odb["memory_meter"] = meter = Counting(LIMIT_BYTES // 3)  # would find a smaller one
    steps = whole.state.global_step
    for step in (1, steps // 2, steps):
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
    whole = trainer_of(tmp_path, odb, save_steps=2)
    whole.train()
    resumed = trainer_of(tmp_path / "resumed", auto())
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.odb_budget == budget
    check_same(lm.weights_of(resumed.model), lm.weights_of(whole.model))


# --- what is refused ------------------------------------------------------------------------------


REFUSED = [
    ({"token_budget": "auto"}, {}, "`CudaMeter` needs a GPU"),
    ({"token_budget": "most"}, {}, "`token_budget` must be .*\"auto\".* is 'most'"),
    (auto(), {"optim": "lomo"}, '`optim` must not be "lomo" .* `token_budget` of "auto"'),
    (auto(collate_fn=PackedCollate()), {}, "that packs or has `shapes`"),
    (auto(collate_fn=PaddingCollate(shapes=((4, 8), (2, 16)))), {}, "that packs or has `shapes`"),
]


@pytest.mark.parametrize(("odb", "options", "message"), REFUSED)
def test_what_leaves_no_budget_to_be_found_is_refused(tmp_path, odb, options, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, odb, **options)


@pytest.mark.parametrize("name", ["is_fsdp_enabled", "is_deepspeed_enabled", "is_model_parallel"])
def test_models_on_several_devices_are_refused(tmp_path, name):
    trainer = trainer_of(tmp_path, auto())
    setattr(trainer, name, True)
    with pytest.raises(ValueError, match='`token_budget` must not be "auto" .* Give a number'):
        trainer.train()


def test_there_are_no_batches_before_a_budget_is_found(tmp_path):
    with pytest.raises(ValueError, match='`token_budget` is "auto", and only `train` finds'):
        trainer_of(tmp_path, auto()).get_train_dataloader()


def test_json_lines_have_the_budget_of_a_list_of_the_records(tmp_path):
    data = [{"input_ids": [1] * (n % 20 + 2), "id": n} for n in range(40)]
    data = [{**sample, "labels": sample["input_ids"]} for sample in data]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps(sample)}\n" for sample in data))
    budgets = []
    for dataset in (data, JsonlSource(path)):
        trainer = trainer_of(tmp_path, auto(), max_steps=1, train_dataset=dataset)
        trainer.train()
        budgets.append(trainer.odb_budget)
    assert budgets[0] == budgets[1]


@pytest.mark.parametrize(
    "dataset, error, message",
    [
        (
            trainers.Stream(),
            TypeError,
            "a budget can be found .* only where the dataset is map-style",
        ),
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


@pytest.mark.parametrize("place", ["collate_fn", "data_collator"])
def test_rows_are_padded_as_the_collate_function_pads(tmp_path, place):
    collate = PaddingCollate(pad_to_multiple_of=8)
    config = auto(**{place: collate} if place == "collate_fn" else {})
    more = {} if place == "collate_fn" else {place: collate}
    trainer = trainer_of(tmp_path, config, **more)
    trainer.train()
    assert trainer.odb_budget.pad_to_multiple_of == 8


# --- two ranks ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_ranks_train_with_the_smallest_budget(tmp_path):
    body = """
        from odb_nodes.testing import SavedTensorMeter
        folder = sys.argv[1]

        def run(name, resume=None, **odb):
            options = {"num_train_epochs": 1, "gradient_accumulation_steps": 2, "logging_steps": 1}
            options |= {"save_steps": 1, "optim": "adamw_torch"}
            odb = {"token_budget": "auto", "on_oom": "split", "guard_above": 0.0, **odb}
            meter = SavedTensorMeter((60_000, 90_000)[rank])
            odb["memory_meter"] = meter
            trainer = trainers.make_trainer(f"{folder}/{name}", odb=odb, size=80, **options)
            trainer.train(resume_from_checkpoint=resume)
            logged = trainer.state.log_history[:-1]
            shares = [entry["odb/peak_memory_share"] for entry in logged]
            budget, weights = trainer.odb_budget, lm.weights_of(trainer.model).tolist()
            return budget, weights, trainer.state.global_step, shares

        automatic = run("auto")
        configured = run("given", token_budget=automatic[0])
        resumed = run("resumed", resume=f"{folder}/auto/checkpoint-1")
        runs = (automatic, configured, resumed)
        r.finish([[vars(budget), *figures] for budget, *figures in runs])
    """
    first, second = trainers.results_of(tmp_path, body, str(tmp_path))
    (automatic, configured, resumed), steps = first, first[0][2]
    assert first == second
    assert automatic == configured and automatic[:3] == resumed[:3]
    assert steps > 2 and 0.3 < max(automatic[3]) <= 1
    alone = trainer_of(tmp_path / "alone", auto(), gradient_accumulation_steps=2, size=80)
    alone.train()
    assert alone.odb_budget == TokenBudget(**automatic[0])


NO_BUDGET = """
from odb_nodes.testing import SavedTensorMeter
meter = SavedTensorMeter((60_000, 6_000)[rank])
trainers.make_trainer(sys.argv[1], odb={"token_budget": "auto", "memory_meter": meter}).train()
"""


@pytest.mark.slow
def test_where_one_rank_finds_no_budget_both_end(tmp_path):
    with trainers.on_ranks(tmp_path, 2, NO_BUDGET, str(tmp_path)) as job:
        (_, _, first), (_, _, second) = job.results(100)
    assert "PeerError: rank 1 failed in finding the budget: ShapeTooLargeError" in first
    assert "ShapeTooLargeError: a single row of" in second
