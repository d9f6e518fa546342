"""The loss of a step is the weighted mean over the supervised tokens of all ranks."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from aligned_ranks import TIMEOUT_S, on_ranks
from gradients import SIZES, LanguageModel, gradient_of, relative_error, samples_of
from rank_jobs import run_ranks
from task_models import TASKS, WEIGHTS, observe, task_of, token_losses
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ODBDataLoader,
    RankAligner,
    SampleError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.tasks import TaskWeights


def expected_gradient(samples, weights):
    """By hand, a sample at a time."""
    model, total, weighed = LanguageModel(), 0.0, 0.0
    for sample in samples:
        batch = {key: torch.as_tensor(sample[key])[None] for key in ("input_ids", "labels")}
        weight = weights[task_of(sample)]
        total = total + weight * token_losses(model, batch).sum()
        weighed += weight * int((batch["labels"][:, 1:] != -100).sum())
    (total / weighed).backward()
    return gradient_of(model)


def gradients_of_rank(exchange, model, sizes, weights, layout, accumulate, budget=96):
    """Of each optimizer step: this rank's gradient, and the ids of its samples."""
    samples = samples_of(exchange.rank, sizes[exchange.rank])
    source = LengthObserver(IterableWrapper(samples), observe)
    bucketer = WindowBucketer(source, TokenBudget(budget, layout=layout), 16)
    options = {"timeout_s": TIMEOUT_S, "accumulate": accumulate, "tasks": TASKS}
    aligner = RankAligner(bucketer, exchange, **options)
    weigh, found, ids = TaskWeights(weights), [], []
    for batch in Loader(GroupCollator(aligner, rank=exchange.rank)):
        info = pop_step_info(batch)
        losses = token_losses(model, batch)
        weigh.loss(losses, info, position_ids=batch.get("position_ids")).backward()
        ids += [] if info.is_filler else batch["id"].tolist()
        if info.ends_optimizer_step:
            found.append((gradient_of(model), ids))
            model.zero_grad()
            ids = []
    return found


@pytest.mark.parametrize("weights", [dict.fromkeys(TASKS, 1.0), WEIGHTS])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_gradient_is_that_of_the_weighted_mean(ranks, layout, accumulate, weights):
    sizes = SIZES[ranks]
    data = {one["id"]: one for rank, size in enumerate(sizes) for one in samples_of(rank, size)}

    models = [LanguageModel() for _ in sizes]  # which seed the generator that threads share

    def run(exchange):
        model = models[exchange.rank]
        return gradients_of_rank(exchange, model, sizes, weights, layout, accumulate)

    compared = 0
    for of_ranks in zip(*on_ranks(ranks, run), strict=True):
        samples = [data[index] for _, ids in of_ranks for index in ids]
        if not any((one["labels"][1:] != -100).any() for one in samples):
            continue
        found = torch.stack([gradient for gradient, _ in of_ranks]).mean(0)
        assert relative_error(found, expected_gradient(samples, weights)) < 1e-12
        compared += 1
    assert compared > 1


def test_equal_weights_are_the_plain_mean():
    loader = ODBDataLoader(
        samples_of(0, 40), token_budget=96, window=16, observe=observe, tasks=TASKS
    )
    model, weigh = LanguageModel(), TaskWeights(dict.fromkeys(TASKS, 2.5))
    for batch in loader:
        info = pop_step_info(batch)
        losses = token_losses(model, batch)
        weigh.loss(losses, info).backward()
        found = gradient_of(model)
        model.zero_grad()
        targets = max(1, int((batch["labels"][:, 1:] != -100).sum()))
        (token_losses(model, batch).sum() / targets * info.loss_scale).backward()
        assert relative_error(found, gradient_of(model)) < 1e-12
        model.zero_grad()
        by_task = weigh.by_task(losses, info)
        assert sum(targets for _, targets in by_task.values()) == info.local_targets
        assert float(sum(total for total, _ in by_task.values())) == pytest.approx(
            float(losses.sum())
        )


DDP = """
import sys
from gradients import SIZES, LanguageModel, gradient_of, samples_of
from task_models import TASKS, WEIGHTS, observe, token_losses
from odb_nodes import ODBDataLoader, pop_step_info
from odb_nodes.tasks import TaskWeights
from torch.nn.parallel import DistributedDataParallel

data = samples_of(rank, SIZES[2][rank])
options = {"token_budget": 96, "window": 16, "sharded": True, "timeout_s": 20, "shuffle": False}
loader = ODBDataLoader(data, observe=observe, tasks=TASKS, accumulate=2, **options)
model, weigh, found, ids = DistributedDataParallel(LanguageModel()), TaskWeights(WEIGHTS), [], []
for batch in loader:
    info = pop_step_info(batch)
    weigh.loss(token_losses(model, batch), info).backward()
    ids += [] if info.is_filler else batch["id"].tolist()
    if info.ends_optimizer_step:
        found.append((gradient_of(model).tolist(), r.gathered([ids])))
        model.zero_grad()
        ids = []
print(json.dumps(found))
"""


def test_ranks_under_ddp_have_it_too(tmp_path):
    data = {one["id"]: one for rank, size in enumerate(SIZES[2]) for one in samples_of(rank, size)}
    one, other = run_ranks(tmp_path, DDP, 2)
    assert one == other
    assert len(one) > 3
    for gradient, ids in one:
        samples = [data[index] for of_rank in ids for of_step in of_rank for index in of_step]
        if any((sample["labels"][1:] != -100).any() for sample in samples):
            expected = expected_gradient(samples, WEIGHTS)
            assert relative_error(torch.tensor(gradient, dtype=torch.double), expected) < 1e-12


def test_tasks_are_those_of_sources_unless_observe_tells():
    data = {name: [{"input_ids": [1] * (n % 5 + 2)} for n in range(12)] for name in ("a", "b")}
    infos = [
        pop_step_info(batch)
        for batch in ODBDataLoader(data, token_budget=40, window=8, tasks=["a", "b"])
    ]
    for info in infos:
        assert info.row_tasks == info.row_sources
        assert sum(info.task_targets.values()) == info.optimizer_targets
        assert info.local_task_targets == {k: v for k, v in info.task_targets.items() if v}


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 0}, "weight of task 'a' must be a number above 0, but is 0"),
        ({"a": -1.0}, "above 0"),
        ({"a": float("nan")}, "above 0"),
        ({"a": "1"}, "above 0"),
        ({"a": 10**400}, "above 0"),
        ({"a": True}, "above 0"),
        ({}, "must name a task"),
    ],
)
def test_bad_weights_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        TaskWeights(weights)


def test_what_has_no_weight_or_is_not_counted_is_an_error():
    loader = ODBDataLoader(samples_of(0, 20), token_budget=96, observe=observe, tasks=TASKS)
    batch = next(iter(loader))
    info, losses = pop_step_info(batch), torch.ones(batch["input_ids"].shape)
    with pytest.raises(ValueError, match=r"the tasks \['c'\] have no weight"):
        TaskWeights({"a": 1.0, "b": 1.0}).loss(losses, info)
    with pytest.raises(ValueError, match="`losses` must be of"):
        TaskWeights(WEIGHTS).loss(losses[1:], info)
    plain = next(iter(ODBDataLoader(samples_of(0, 20), token_budget=96, observe=observe)))
    with pytest.raises(ValueError, match=r"Pass `tasks=\[\*weights\]` to the loader"):
        TaskWeights(WEIGHTS).loss(losses, pop_step_info(plain))
    with pytest.raises(SampleError, match="the task of a sample .* is none of `tasks`"):
        next(iter(ODBDataLoader(samples_of(0, 20), token_budget=96, observe=observe, tasks=["a"])))
    with pytest.raises(TypeError, match="`tasks` must be a list of names"):
        ODBDataLoader(samples_of(0, 20), token_budget=96, tasks="ab")
    with pytest.raises(ValueError, match="names that differ"):
        ODBDataLoader(samples_of(0, 20), token_budget=96, tasks=["a", "a"])


def test_a_state_keeps_the_weights():
    weights = TaskWeights(WEIGHTS)
    weights.set({"b": 2.0})
    restored = TaskWeights(dict.fromkeys(TASKS, 1.0))
    restored.load_state_dict(json.loads(json.dumps(weights.state_dict())))
    assert dict(restored) == {"a": 3.0, "b": 2.0, "c": 0.25}
    with pytest.raises(ValueError, match="weights of the tasks"):
        TaskWeights({"a": 1.0}).load_state_dict(weights.state_dict())
    with pytest.raises(ValueError, match="must be among the tasks"):
        weights.set({"d": 1.0})


def test_weights_are_in_the_order_of_names_and_may_be_of_numpy():
    weights = TaskWeights({"b": np.float32(2), "a": np.int64(1)})
    assert [*weights.items()] == [("a", 1.0), ("b", 2.0)]
    assert all(type(weight) is float for weight in weights.values())
    with pytest.raises(TypeError, match="`weights` must have names as keys, but has 1"):
        TaskWeights({1: 1.0})
    with pytest.raises(TypeError, match="`weights` must be a `Mapping`"):
        weights.set([1.0, 2.0])


@pytest.mark.parametrize("method", ["loss", "by_task"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"losses": [1.0]}, "`losses` must be a `Tensor`"),
        ({"info": None}, "`info` must be a `StepInfo`, but is None"),
        ({"position_ids": [0, 1]}, "`position_ids` must be a `Tensor` or None"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(method, change, message):
    batch = next(iter(ODBDataLoader(samples_of(0, 20), token_budget=96, observe=observe)))
    info, losses = pop_step_info(batch), torch.ones(batch["input_ids"].shape)
    given = {"losses": losses, "info": info, **change}
    with pytest.raises(TypeError, match=message):
        getattr(TaskWeights(WEIGHTS), method)(**given)


def test_more_targets_on_a_rank_than_on_all_are_an_error():
    batch = next(
        iter(ODBDataLoader(samples_of(0, 20), token_budget=96, observe=observe, tasks=TASKS))
    )
    info, losses = pop_step_info(batch), torch.ones(batch["input_ids"].shape)
    task = max(info.task_targets, key=info.task_targets.get)
    others = {name: 0 for name in TASKS if name != task}
    moved = {**others, TASKS[task == TASKS[0]]: info.optimizer_targets, task: 0}
    with pytest.raises(ValueError, match="tokens of the task '[abc]' in step 0, but all ranks"):
        TaskWeights(WEIGHTS).loss(losses, replace(info, task_targets=moved))
