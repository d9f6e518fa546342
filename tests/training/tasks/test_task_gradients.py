"""GradNorm and PCGrad: equal on any number of ranks, and after a resume."""

import json
from dataclasses import replace
from itertools import islice

import pytest
import torch
from gradients import relative_error
from rank_jobs import run_ranks
from task_models import (
    NEAR_FAR,
    NEAR_FAR_WEIGHTS,
    Model,
    balanced,
    flat,
    joint_batches,
    loader_of,
    projected_gradients,
    regression,
)

from odb_nodes import Observation, ODBDataLoader, PeerError, StateError, pop_step_info
from odb_nodes.training.tasks import GradNorm, PCGrad, TaskWeights

KINDS = [GradNorm, PCGrad]


def even():
    return TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))


def added(kind, accumulate=1):
    """The function that adds the batches of an optimizer step, and its arguments for each batch."""
    model = Model()
    tasks = kind(even(), model.trunk.parameters())
    batches = islice(loader_of(regression(), accumulate=accumulate), accumulate)
    arguments = [(model.losses(batch), pop_step_info(batch)) for batch in batches]
    return tasks, tasks.observe if kind is GradNorm else tasks.backward, arguments


# --- the rule -------------------------------------------------------------------------------------


def by_hand(ranks, steps):
    """The weights and pulls of GradNorm, from the batches of all ranks put together."""
    model, first, results = Model(), {}, []
    weights = dict.fromkeys(NEAR_FAR, 1.0)
    for batch in islice(joint_batches(regression(), ranks), steps):
        losses, norms, pulls, means = model.losses(batch), {}, {}, {}
        for number, task in enumerate(NEAR_FAR):
            mean = losses[batch["task"] == number].mean()
            grads = torch.autograd.grad(mean, [*model.trunk.parameters()], retain_graph=True)
            norms[task] = float(torch.cat([grad.flatten() for grad in grads]).norm())
            pulls[task], means[task] = weights[task] * norms[task], float(mean.detach())
            first.setdefault(task, means[task])
        inverse_rates = {task: means[task] / first[task] for task in NEAR_FAR}
        pull = sum(pulls.values()) / 2
        for task in NEAR_FAR:
            wanted = pull * (inverse_rates[task] / (sum(inverse_rates.values()) / 2)) ** 1.5
            side = (pulls[task] > wanted) - (pulls[task] < wanted)
            weights[task] -= 0.01 * side * norms[task] / (sum(norms.values()) / 2)
        total = sum(weights.values())
        weights = {task: max(0.05, 2 * weight / total) for task, weight in weights.items()}
        results.append((dict(weights), pulls))
    return results


RANKS = """
from itertools import islice
from task_models import NEAR_FAR, balanced, loader_of, regression

loader = loader_of(regression()[rank::world_size], sharded=True, shuffle=False, timeout_s=20)
steps = balanced(loader, tasks=NEAR_FAR[:: 1 - 2 * rank])  # named in another order
print(json.dumps([(weights, balance.norms) for balance, weights in islice(steps, 1, 7)]))
"""


def test_two_ranks_have_the_weights_of_one_with_the_joint_batch(tmp_path):
    rank_0, rank_1 = run_ranks(tmp_path, RANKS, 2)
    assert rank_0 == rank_1
    for (weights, norms), (expected, pulls) in zip(rank_0, by_hand(2, 6), strict=True):
        assert weights == pytest.approx(expected, rel=1e-12)
        assert norms == pytest.approx(pulls, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["gradnorm", "ratio"])
def test_gradient_norms_of_ten_to_one_become_nearly_equal(rule):
    data = regression(3200)
    for row in data:  # the same gradient but for its size
        row["y"] = row["y"] / (1.0, 10.0)[row["task"]]

    class Scaled(Model):
        def losses(self, batch):
            return super().losses(batch) * torch.where(batch["task"] == 1, 10.0, 1.0)

    model, weights, ratios = Scaled(), even(), []
    balance = GradNorm(weights, model.trunk.parameters(), rule=rule)
    for batch in loader_of(data, accumulate=4):
        info = pop_step_info(batch)
        balance.observe(model.losses(batch), info)
        if info.ends_optimizer_step:
            balance.step()
            ratios.append(balance.norms["far"] / balance.norms["near"])
            assert sum(weights.values()) == pytest.approx(2.0, rel=1e-12)
            assert min(weights.values()) >= 0.05
    assert ratios[0] > 5 and len(ratios) > 50
    assert 1 / 1.2 < sorted(ratios[-20:])[10] < 1.2


def test_observing_leaves_the_gradients_alone():
    model = Model()
    batch = next(iter(loader_of(regression())))
    info, losses, trunk = pop_step_info(batch), model.losses(batch), [*model.trunk.parameters()]
    expected = torch.autograd.grad(losses.sum(), trunk, retain_graph=True)
    GradNorm(even(), trunk).observe(losses, info)
    losses.sum().backward()
    assert all(weight.grad.equal(grad) for weight, grad in zip(trunk, expected, strict=True))


@pytest.mark.parametrize(("place", "rule"), [(0, "gradnorm"), (3, "ratio")])
def test_a_loss_that_is_not_finite_moves_no_weight_and_leaves_no_trace(place, rule):
    def weights_of(**options):
        return [weights for _, weights in balanced(loader_of(regression()), rule=rule, **options)]

    whole = weights_of()
    broken = weights_of(spoil=lambda number: float("nan") if number == place else 1.0)
    assert broken[: place + 1] == whole[: place + 1]
    assert broken[place + 1] == broken[place] != broken[-1]
    assert all(weight == weight for weight in broken[-1].values())


# --- its state ------------------------------------------------------------------------------------


def test_a_resume_has_the_same_weights_bit_for_bit():
    def run():
        loader = loader_of(regression(), accumulate=2)
        return loader, balanced(loader, every=3)

    loader, steps = run()
    states, whole = [], []
    for balance, weights in steps:
        states.append((loader.state_dict(), json.dumps(balance.state_dict())))
        whole.append(weights)
    assert len({json.dumps(weights) for weights in whole}) > 3
    for place in range(0, len(whole) - 1, 4):
        loader, steps = run()
        balance, _ = next(steps)
        loader.load_state_dict(states[place][0])
        balance.load_state_dict(json.loads(states[place][1]))
        assert [weights for _, weights in steps] == whole[place + 1 :]


def test_there_is_no_state_within_an_optimizer_step_also_of_one_that_measures_nothing():
    model = Model()
    balance = GradNorm(even(), model.trunk.parameters(), every=2)
    for batch in islice(loader_of(regression(), accumulate=3), 6):
        info = pop_step_info(batch)
        balance.observe(model.losses(batch), info)
        with pytest.raises(StateError, match="no state within an optimizer step"):
            balance.state_dict()
        if info.ends_optimizer_step:
            balance.step()
            assert balance.state_dict()["steps"] == info.step // 3 + 1


def test_a_state_that_is_loaded_within_an_optimizer_step_begins_it_again():
    balance, observe, arguments = added(GradNorm, accumulate=3)
    state = balance.state_dict()
    observe(*arguments[0])
    balance.load_state_dict(state)
    for batch_arguments in arguments:
        observe(*batch_arguments)
    balance.step()
    assert balance.state_dict()["steps"] == 1


def test_bad_states_are_refused():
    balance = GradNorm(even(), Model().trunk.parameters())
    state = balance.state_dict()
    for steps in (-1, "2", None):
        with pytest.raises(StateError, match=f"`steps` must be .* is {steps!r}"):
            balance.load_state_dict({**state, "steps": steps})
    with pytest.raises(StateError, match="`steps` must .* saved with `TaskWeights` or `PCGrad`"):
        balance.load_state_dict(balance.weights.state_dict())
    with pytest.raises(StateError, match="of a `GradNorm`, whose weights move"):
        balance.weights.load_state_dict(state)
    with pytest.raises(StateError, match="`first` must be a `Mapping`"):
        balance.load_state_dict({"steps": 1})
    assert balance.state_dict() == state


def test_a_step_in_which_a_rank_is_lost_is_not_counted(monkeypatch):
    balance, observe, ((losses, info),) = added(GradNorm)
    before = balance.state_dict()
    observe(losses, info)

    def lost(*_):
        raise PeerError("rank 1 did not come")

    with monkeypatch.context() as patch:
        patch.setattr("odb_nodes.training.tasks.task_gradients.Meeting.gather", lost)
        with pytest.raises(PeerError, match="rank 1 did not come"):
            balance.step()
    assert balance.state_dict() == before
    observe(losses, replace(info, step=1))
    balance.step()
    assert balance.state_dict()["steps"] == 1


# --- its ranks ------------------------------------------------------------------------------------

DIFFERENT = """
import time
from dataclasses import replace
from task_models import Model, loader_of, regression
from odb_nodes import PeerError, StateError, pop_step_info
from odb_nodes.training.tasks import GradNorm, PCGrad, TaskWeights

batch = next(iter(loader_of(regression()[rank::2], sharded=True, timeout_s=20)))
info = pop_step_info(batch)


def error(kind, weight=1.0, late=0, steps=1, loads=None, **options):
    model, weights = Model(), TaskWeights({"far": weight, "near": 1.0})
    balance = kind(weights, model.trunk.parameters(), **{"timeout_s": 20, **options})
    add = balance.observe if kind is GradNorm else balance.backward
    try:
        for number in range(steps):
            if number and loads is not None:
                balance.load_state_dict({**balance.state_dict(), "steps": loads})
            add(model.losses(batch), replace(info, step=info.step + number + late * number))
            if "timeout_s" not in options or rank == 0:
                balance.step()
    except (PeerError, StateError) as error:
        return str(error)


errors = [
    error(GradNorm, weight=1.0 + rank),
    error(GradNorm, rule=("gradnorm", "ratio")[rank]),
    error(GradNorm, every=1 + rank),
    error(GradNorm, rate=0.01 + 0.01 * rank),
    error(GradNorm, alpha=1.0 + rank),
    error(GradNorm, least=0.1 + 0.1 * rank),
    error(GradNorm, steps=2, loads=5 + rank),
    error(PCGrad, weight=1.0 + rank),
    error(PCGrad, seed=rank),
    error(PCGrad, late=rank, steps=2),
    error(GradNorm, late=rank, steps=2),
]
start_s = time.monotonic()
errors.append(error(GradNorm, timeout_s=2))  # rank 1 does not come
assert time.monotonic() - start_s < 15
print(json.dumps(errors))
"""


def test_ranks_that_differ_or_end_other_steps_are_an_error_on_all(tmp_path):
    (*messages, late), (*other_messages, _) = run_ranks(tmp_path, DIFFERENT, 2)
    assert messages == other_messages
    expected = (
        *("GradNorm.weights", "GradNorm.rule", "GradNorm.every", "GradNorm.rate"),
        *("GradNorm.alpha", "GradNorm.least", "GradNorm.steps", "PCGrad.weights", "PCGrad.seed"),
    )
    for name, message in zip(expected, messages[:-2], strict=True):
        assert f"`{name}` is " in message and "on rank 0" in message and "on rank 1" in message
    for message in messages[-2:]:
        assert "must call" in message and "[(0, 1), (0, 2)]" in message
    assert "rank 1 did not come" in late


# --- each batch once ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("micro_steps", "message"),
    [
        ([], "on all ranks and in filler steps too, but came after none"),
        ([0, 1], "`step` must come .*, but came after micro-step 1 of 0..2"),
        ([0, 2], "for micro-step 2 of 0..2 .step 2 of epoch 0. after micro-step 0 of 0..2 .step 0"),
        ([0, 1, 1, 2], "for micro-step 1 of .* after micro-step 1"),
        ([0, 1, 2, 3], "for micro-step 0 of .* after micro-step 2"),
    ],
)
def test_each_micro_step_is_added_once_and_the_step_is_after_the_last(kind, micro_steps, message):
    tasks, add, arguments = added(kind, accumulate=3)
    arguments.append((arguments[0][0], replace(arguments[0][1], step=3)))

    def run():
        for number in micro_steps:
            add(*arguments[number])
        tasks.step()

    with pytest.raises(RuntimeError, match=message):
        run()


@pytest.mark.parametrize("kind", KINDS)
def test_an_abandoned_optimizer_step_leaves_nothing(kind):
    def result(broken):
        tasks, add, arguments = added(kind, accumulate=3)
        if broken:
            add(*arguments[0])
        for losses, info in arguments:
            add(losses, replace(info, epoch=1))
        tasks.step()
        return tasks.norms if kind is GradNorm else tasks._parameters[0].grad.tolist()

    assert result(True) == result(False)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_must_have_a_graph_unless_there_are_no_targets(kind):
    tasks, add, ((losses, info),) = added(kind)
    with pytest.raises(
        ValueError, match="`losses` must have a graph, but the losses of '(near|far)'"
    ):
        add(losses.detach(), info)
    tasks, add, ((losses, info),) = added(kind)
    losses.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        add(losses, info)
    no_targets = {"optimizer_targets": 0, "local_targets": 0, "task_targets": {}}
    no_targets["local_task_targets"] = dict.fromkeys(NEAR_FAR, 0)
    tasks, add, _ = added(kind)
    add(losses.detach(), replace(info, **no_targets))
    tasks.step()
    assert getattr(tasks, "norms", {}) == {}


# --- what is refused ------------------------------------------------------------------------------

BOTH = [
    ({"weights": {"a": 1}}, TypeError, "`weights` must be a `TaskWeights`"),
    ({"parameters": []}, ValueError, "must hold trained parameters"),
    ({"parameters": Model()}, TypeError, r"a `Model` instead. Pass `module.parameters\(\)`"),
    ({"parameters": torch.nn.Parameter(torch.ones(2))}, TypeError, "but is a `Parameter`"),
    ({"parameters": [*Model().heads.parameters()] * 2}, ValueError, "has 8 .* 4 differ"),
    ({"process_group": "x"}, TypeError, "`process_group` must be a `ProcessGroup`"),
    ({"timeout_s": 0}, ValueError, "`timeout_s` must be in"),
]
REFUSALS = [
    *[(kind, *row) for kind in KINDS for row in BOTH],
    (GradNorm, {"rule": "ratio", "alpha": 2.5}, ValueError, "`alpha` must be in .0, 2.,"),
    (GradNorm, {"least": 0}, ValueError, "`least` must be in .0, 1.,"),
    (PCGrad, {"seed": "x"}, TypeError, "`seed` must be an integer"),
]


@pytest.mark.parametrize(("kind", "change", "error", "message"), REFUSALS)
def test_bad_arguments_are_refused_by_name(kind, change, error, message):
    arguments = {"weights": even(), "parameters": Model().parameters(), **change}
    with pytest.raises(error, match=message):
        kind(arguments.pop("weights"), arguments.pop("parameters"), **arguments)


def test_shared_parameters_that_the_losses_do_not_use_are_refused():
    balance = GradNorm(even(), [torch.nn.Parameter(torch.ones(2))])
    _, _, ((losses, info),) = added(GradNorm)
    with pytest.raises(
        ValueError, match="depend on, but the losses of '(near|far)' depend on none"
    ):
        balance.observe(losses, info)


# --- gradients that conflict: against the algorithm by hand, on any number of ranks ---------------


def projected_by_hand(data, ranks, accumulate):
    """Algorithm 1 of the paper for two tasks, and in how many steps there was a conflict."""
    model, gradients, conflicts = Model(), [], 0
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    for batch in joint_batches(data, ranks, accumulate):
        factors = torch.tensor([*NEAR_FAR_WEIGHTS.values()], dtype=torch.float64)[batch["task"]]
        weighed = factors * model.losses(batch) / factors.sum()
        totals = [weighed[batch["task"] == task].sum() for task in range(2)]
        first, second = (
            flat(torch.autograd.grad(total, [*model.parameters()], **options)) for total in totals
        )
        inner = first @ second
        if inner < 0:
            conflicts += 1
            first, second = (
                first - inner / (second @ second) * second,
                second - inner / (first @ first) * first,
            )
        gradients.append(first + second)
    return gradients, conflicts


@pytest.mark.parametrize("accumulate", [1, 3])
def test_conflicts_are_projected_away(accumulate):
    data = regression()
    projected = projected_gradients(loader_of(data, shuffle=False, accumulate=accumulate))
    expected, conflicts = projected_by_hand(data, 1, accumulate)
    for (gradient, _), joint in zip(projected, expected, strict=True):
        assert relative_error(gradient, joint) < 1e-12
    assert (
        conflicts
        == sum(relative_error(gradient, plain) > 1e-6 for gradient, plain in projected)
        > 5
    )


PROJECTING_RANKS = """
from task_models import NEAR_FAR, loader_of, projected_gradients, regression

data = regression()[rank::world_size]
loader = loader_of(data, sharded=True, shuffle=False, timeout_s=20)
projected = projected_gradients(loader, NEAR_FAR[:: 1 - 2 * rank])  # named in another order
print(json.dumps([gradient.tolist() for gradient, _ in projected]))
"""


def test_two_ranks_project_the_gradient_of_the_joint_batch(tmp_path):
    rank_0, rank_1 = run_ranks(tmp_path, PROJECTING_RANKS, 2)
    assert rank_0 == rank_1
    expected, _ = projected_by_hand(regression(), 2, 1)
    for gradient, joint in zip(rank_0, expected, strict=True):
        assert relative_error(torch.tensor(gradient, dtype=torch.float64), joint) < 1e-12


def test_the_order_of_projections_depends_on_seed_and_step_alone():
    pulls = {"a": [1.0, 2.0], "b": [-2.0, 1.0], "c": [0.5, -3.0]}
    options = {"observe": lambda task: Observation(4, task=task), "tasks": [*pulls]}
    loader = ODBDataLoader([*pulls], token_budget=12, collate_fn=lambda rows: {}, **options)
    info = pop_step_info(next(iter(loader)))
    assert {*info.row_tasks} == {*pulls}

    def gradient(seed, step):
        weight = torch.nn.Parameter(torch.zeros(2))
        conflicts = PCGrad(TaskWeights(dict.fromkeys(pulls, 1.0)), [weight], seed=seed)
        losses = torch.tensor([pulls[task] for task in info.row_tasks]) @ weight
        conflicts.backward(losses, replace(info, step=step))
        conflicts.step()
        return tuple(weight.grad.tolist())

    assert gradient(0, 1) == gradient(0, 1)
    assert len({gradient(0, step) for step in range(20)}) > 2
    assert len({gradient(seed, 1) for seed in range(20)}) > 2


def test_a_gradient_whose_square_is_zero_in_float32_still_conflicts():
    info = pop_step_info(next(iter(loader_of(regression()))))
    pulls = torch.tensor([[1.0, 1.0], [-1e-25, 0.0]])
    weight = torch.nn.Parameter(torch.zeros(2))
    projected = PCGrad(TaskWeights(dict.fromkeys(NEAR_FAR_WEIGHTS, 1.0)), [weight])
    rows = [pulls[[*NEAR_FAR_WEIGHTS].index(task)] for task in info.row_tasks]
    projected.backward(torch.stack(rows) @ weight, info)
    projected.step()
    first, second = weight.grad.tolist()
    assert abs(first) < 1e-20 < second < 100


def test_without_a_conflict_sums_are_plain_and_of_half_precision_kept_in_float32():
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    projected = PCGrad(TaskWeights(NEAR_FAR_WEIGHTS), [weight])
    batch = next(iter(loader_of([row for row in regression() if row["task"] == 0])))
    info = pop_step_info(batch)
    for number in range(1000):
        place = {"step": number, "micro_step": number, "micro_steps": 1000}
        projected.backward(weight.expand(len(info.row_tasks)) + 1, replace(info, **place))
    projected.step()
    assert weight.grad.dtype == torch.bfloat16
    assert float(weight.grad) == 1000.0


def test_a_loss_beside_the_losses_of_the_tasks_is_an_error():
    weight = torch.nn.Parameter(torch.ones(1))
    projected = PCGrad(TaskWeights(NEAR_FAR_WEIGHTS), [weight])
    loader = iter(loader_of(regression()))
    for step in range(2):
        info = pop_step_info(next(loader))
        loss = projected.loss(weight.expand(len(info.row_tasks)) + 1, info)
        if not step:  # `step` overwrites its own gradients, which need not be zeroed.
            loss.backward()
            projected.step()
    with pytest.raises(RuntimeError, match="was multiplied by 2, which would change no"):
        (2 * loss).backward()
    weight.grad = None
    (loss + weight.square().sum()).backward()
    with pytest.raises(RuntimeError, match="a parameter has a gradient before `PCGrad.step`"):
        projected.step()
