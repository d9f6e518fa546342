"""The loss of a step is the weighted mean over the supervised tokens of all ranks."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from aligned_ranks import TIMEOUT_S, on_ranks
from gradients import SIZES, LanguageModel, gradient_of, relative_error, samples_of
from refusals import refuses
from torch.nn.functional import cross_entropy

from odb_nodes import Observation, ODBDataLoader, SampleError, TokenBudget, pop_step_info
from odb_nodes.training.tasks import TaskWeights

pytestmark = pytest.mark.filterwarnings("ignore:no token of the optimizer step:UserWarning")
TASKS = ("a", "b", "c")
WEIGHTS = {"a": 3.0, "b": 1.0, "c": 0.25}


def task_of(sample):
    return TASKS[sample["id"] % 3]


def observe(sample):
    return Observation(len(sample["input_ids"]), task=task_of(sample))


def loader_of(data, **options):
    arguments = {"token_budget": 96, "window": 16, "observe": observe, "tasks": TASKS, **options}
    return ODBDataLoader(
        data, **{name: value for name, value in arguments.items() if value is not None}
    )


def token_losses(model, batch):
    inputs = [batch[key] for key in ("input_ids", "position_ids") if key in batch]
    logits = model(*inputs)[:, :-1]
    return cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:], reduction="none")


def expected_gradient(samples, weights):
    """The weighted mean by hand, a sample at a time."""
    model, total, weighed = LanguageModel(), 0.0, 0.0
    for sample in samples:
        batch = {key: torch.as_tensor(sample[key])[None] for key in ("input_ids", "labels")}
        weight = weights[task_of(sample)]
        total = total + weight * token_losses(model, batch).sum()
        weighed += weight * int((batch["labels"][:, 1:] != -100).sum())
    (total / weighed).backward()
    return gradient_of(model)


def gradients_of_rank(loader, model, weights):
    """Yield this rank's gradient of each optimizer step, and the ids of its samples."""
    task_weights, gradients, ids = TaskWeights(weights), [], []
    for batch in loader:
        info, options = pop_step_info(batch), {"position_ids": batch.get("position_ids")}
        losses = token_losses(model, batch)
        by_task = task_weights.by_task(losses, info, **options)
        assert sum(targets for _, targets in by_task.values()) == info.local_targets
        total = sum(total.item() for total, _ in by_task.values())
        assert info.is_filler or total == pytest.approx(losses.sum().item())
        task_weights.loss(losses, info, **options).backward()
        ids += [] if info.is_filler else batch["id"].tolist()
        if info.ends_optimizer_step:
            gradients.append((gradient_of(model), ids))
            model.zero_grad()
            ids = []
    return gradients


@pytest.mark.parametrize(
    ("ranks", "budget", "accumulate", "weights"),
    [
        (1, TokenBudget(96), 1, WEIGHTS),
        (1, TokenBudget(96, layout="packed"), 3, dict.fromkeys(TASKS, 2.5)),
        (1, TokenBudget(96, shapes=3), 2, WEIGHTS),  # with rows of padding
        (2, TokenBudget(96, layout="packed"), 1, WEIGHTS),
        (4, TokenBudget(96), 3, WEIGHTS),
    ],
)
def test_the_gradient_is_that_of_the_weighted_mean(ranks, budget, accumulate, weights):
    of_ranks = [samples_of(rank, max(size, 1)) for rank, size in enumerate(SIZES[ranks])]
    data = {sample["id"]: sample for samples in of_ranks for sample in samples}
    models = [LanguageModel() for _ in of_ranks]  # which seed the generator that threads share

    def run(exchange):
        rank = exchange.rank
        options = {"sharded": True, "accumulate": accumulate, "timeout_s": TIMEOUT_S}
        loader = loader_of(of_ranks[rank], token_budget=budget, process_group=exchange, **options)
        return gradients_of_rank(loader, models[rank], weights)

    compared = 0
    for step in zip(*on_ranks(ranks, run), strict=True):
        samples = [data[index] for _, ids in step for index in ids]
        if any((sample["labels"][1:] != -100).any() for sample in samples):
            mean = torch.stack([gradient for gradient, _ in step]).mean(0)
            assert relative_error(mean, expected_gradient(samples, weights)) < 1e-12
            compared += 1
    assert compared > 1


def test_sources_are_the_default_tasks():
    data = {name: [{"input_ids": [1] * (n % 5 + 2)} for n in range(12)] for name in ("a", "b")}
    loader = ODBDataLoader(data, token_budget=40, window=8, tasks=["a", "b"])
    infos = [pop_step_info(batch) for batch in loader]
    assert len(infos) > 2
    for info in infos:
        assert info.row_tasks == info.row_sources
        assert sum(info.task_targets.values()) == info.optimizer_targets
        assert info.local_task_targets == {k: v for k, v in info.task_targets.items() if v}


def test_a_loss_that_is_not_finite_stays_with_its_task():
    losses, info = one_batch()
    spoiled = info.row_tasks[0]
    assert len({*info.row_tasks}) > 1
    losses[0] = float("nan")
    for task, (total, _) in TaskWeights(WEIGHTS).by_task(losses, info).items():
        assert total.isnan() == (task == spoiled)


def test_a_state_keeps_the_weights_in_the_order_of_names():
    weights = TaskWeights({"c": np.float32(0.25), "b": 1, "a": np.int64(3)})
    weights.set({"b": 2.0})
    restored = TaskWeights(dict.fromkeys(TASKS, 1.0))
    restored.load_state_dict(json.loads(json.dumps(weights.state_dict())))
    assert [*restored.items()] == [*weights.items()] == [("a", 3.0), ("b", 2.0), ("c", 0.25)]
    assert all(type(weight) is float for weight in weights.values())


# --- what is refused ------------------------------------------------------------------------------


def one_batch(**options):
    """(losses, info) of a batch with targets."""
    for batch in loader_of(samples_of(0, 20), **options):
        if (info := pop_step_info(batch)).local_targets:
            return torch.ones(batch["input_ids"].shape), info


def moved():
    """An info whose rank has more targets of a task than all ranks have."""
    losses, info = one_batch()
    task = max(info.task_targets, key=info.task_targets.get)
    no_targets = {name: 0 for name in TASKS if name != task}
    targets = {**no_targets, TASKS[task == TASKS[0]]: info.optimizer_targets, task: 0}
    return losses, replace(info, task_targets=targets)


def loss(weights, losses=slice(None), **options):
    all_losses, info = one_batch(**options)
    return TaskWeights(weights).loss(all_losses[losses], info)


REFUSALS = [
    *[
        (lambda weight=weight: TaskWeights({"a": weight}), ValueError, "'a' must be .* above 0")
        for weight in (0, float("nan"), "1", 10**400)
    ],
    (lambda: TaskWeights({}), ValueError, "must name a task"),
    (lambda: TaskWeights({1: 1.0}), TypeError, "`weights` must have names as keys"),
    (lambda: TaskWeights(WEIGHTS).set([1.0]), TypeError, "`weights` must be a `Mapping`"),
    (lambda: TaskWeights(WEIGHTS).set({"d": 1.0}), ValueError, "must be among the tasks"),
    (lambda: TaskWeights({"a": 1.0}).load_state_dict(TaskWeights(WEIGHTS).state_dict()),
     ValueError, "weights of the tasks"),
    (lambda: loss({"a": 1.0, "b": 1.0}), ValueError, r"\['c'\] have no"),
    (lambda: loss(WEIGHTS, slice(1, None)), ValueError, "`losses` must be of"),
    (lambda: loss(WEIGHTS, [0] * 99), ValueError, "and 0 in rows of padding behind them"),
    (lambda: loss(WEIGHTS, tasks=None), ValueError, "Pass `tasks="),
    (lambda: TaskWeights(WEIGHTS).loss(*moved()), ValueError, "in step .*, but all ranks"),
    (lambda: one_batch(tasks=["a"]), SampleError, "the task of a sample .* is none of"),
    (lambda: loader_of([1], tasks="ab"), TypeError, "`tasks` must be a list of names"),
    (lambda: loader_of([1], tasks=["a", "a"]), ValueError, "names that differ"),
]  # fmt: skip
test_bad_weights_and_losses_are_refused = refuses(REFUSALS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": [1.0]}, "`losses` must be a `Tensor`"),
        ({"info": None}, "`info` must be a `StepInfo`, but is None"),
        ({"position_ids": [0, 1]}, "`position_ids` must be a `Tensor` or None"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(change, message):
    losses, info = one_batch()
    with pytest.raises(TypeError, match=message):
        TaskWeights(WEIGHTS).loss(**{"losses": losses, "info": info, **change})
