"""Weights that follow the gradients of their tasks, alike on any number of ranks, and resume."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from gradients import relative_error
from rank_jobs import run_ranks
from task_models import NEAR_FAR, Model, joint_batches, loader_of, regression, train

from odb_nodes import PeerError, StateError, pop_step_info
from odb_nodes.tasks import GradNorm, PCGrad, TaskWeights


def test_observing_is_before_and_leaves_the_gradients_alone():
    def gradients(observes):
        model, weights = Model(), TaskWeights({"near": 1.3, "far": 0.7})
        balance = GradNorm(weights, model.trunk.parameters())
        batch = next(iter(loader_of(regression())))
        info = pop_step_info(batch)
        losses = model.losses(batch)
        if observes:
            balance.observe(losses, info)
        weights.loss(losses, info).backward()
        return torch.cat([one.grad.flatten() for one in model.parameters()])

    assert relative_error(gradients(True), gradients(False)) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["gradnorm", "ratio"])
def test_norms_of_ten_to_one_come_to_within_a_fifth(rule):
    data = regression()
    for row in data:  # the same gradient but for its size
        row["task"], row["y"] = row["task"], row["y"] / (1.0, 10.0)[row["task"]]

    class Scaled(Model):
        def losses(self, batch):
            scale = torch.where(batch["task"] == 1, 10.0, 1.0)
            return super().losses(batch) * scale

    model, weights = Scaled(), TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    balance = GradNorm(weights, model.trunk.parameters(), rule=rule)
    ratios = []
    loader = loader_of(data, accumulate=4)
    while len(ratios) < 200:
        for batch in loader:
            info = pop_step_info(batch)
            losses = model.losses(batch)
            balance.observe(losses, info)
            if info.ends_optimizer_step:
                balance.step()
                ratios.append(balance.norms["far"] / balance.norms["near"])
                assert sum(weights.values()) == pytest.approx(2.0, rel=1e-12)
                assert min(weights.values()) >= 0.05
    assert ratios[0] > 5
    last = sorted(ratios[180:200])
    assert 1 / 1.2 < last[10] < 1.2


def test_a_task_that_trains_slowly_gains():
    found = train(loader_of(regression()), 60, learning_rate=0.05)
    assert found[-1][0] != found[0][0]
    assert all(sum(one.values()) == pytest.approx(2.0, rel=1e-12) for one, _ in found)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_resume_at_every_step_has_the_same_weights_bit_for_bit(every, accumulate):
    states: list = []
    options = {"learning_rate": 0.01, "every": every}
    whole = train(loader_of(regression(120), accumulate=accumulate), 12, states=states, **options)
    for place in range(11):
        loader = loader_of(regression(120), accumulate=accumulate)
        rest = train(loader, 11 - place, state=states[place], **options)
        assert [weights for weights, _ in rest] == [weights for weights, _ in whole[place + 1 :]]


RANKS = """
from task_models import NEAR_FAR, loader_of, regression, train

data = regression(240)[rank::world_size]
loader = loader_of(data, sharded=True, shuffle=False, timeout_s=20)
found = train(loader, 6, tasks=NEAR_FAR[:: 1 - 2 * rank])  # named in another order
print(json.dumps([found, r.gathered([len(data)])]))
"""


def test_two_ranks_have_the_weights_of_one_with_the_joint_batch(tmp_path):
    one, other = run_ranks(tmp_path, RANKS, 2)
    assert one[0] == other[0]
    # The joint batch: the samples of both ranks, weighed in one process.
    hand = by_hand(2, 6)
    for (weights, norms), (expected, pulls) in zip(one[0], hand, strict=True):
        assert weights == pytest.approx(expected, rel=1e-12)
        assert norms == pytest.approx(pulls, rel=1e-12)


DIFFERENT = """
import time
from dataclasses import replace
from task_models import NEAR_FAR, Model, loader_of, regression
from odb_nodes import PeerError, StateError, pop_step_info
from odb_nodes.tasks import GradNorm, PCGrad, TaskWeights

batch = next(iter(loader_of(regression(120)[rank::2], sharded=True, timeout_s=20)))
info = pop_step_info(batch)


def error(kind, method, weight=1.0, late=0, steps=1, loads=None, **options):
    model = Model()
    weights = TaskWeights({"far": weight, "near": 1.0})
    found = kind(weights, model.trunk.parameters(), timeout_s=20, **options)
    try:
        for number in range(steps):
            if number and loads is not None:
                found.load_state_dict({**found.state_dict(), "steps": loads})
            place = replace(info, step=info.step + number + late * number)
            getattr(found, method)(model.losses(batch), place)
            found.step()
    except StateError as error:
        return str(error)


found = [
    error(GradNorm, "observe", weight=1.0 + rank),
    error(GradNorm, "observe", rule=("gradnorm", "ratio")[rank]),
    error(GradNorm, "observe", every=1 + rank),
    error(GradNorm, "observe", rate=0.01 + 0.01 * rank),
    error(GradNorm, "observe", alpha=1.0 + rank),
    error(GradNorm, "observe", least=0.1 + 0.1 * rank),
    error(GradNorm, "observe", steps=2, loads=5 + rank),
    error(PCGrad, "backward", weight=1.0 + rank),
    error(PCGrad, "backward", seed=rank),
    error(PCGrad, "backward", late=rank, steps=2),
    error(GradNorm, "observe", late=rank, steps=2),
]
model, start_s = Model(), time.monotonic()
balance = GradNorm(TaskWeights({"far": 1.0, "near": 1.0}), model.trunk.parameters(), timeout_s=2)
balance.observe(model.losses(batch), info)
if rank == 0:
    try:
        balance.step()
    except PeerError as error:
        found.append(str(error))
    assert time.monotonic() - start_s < 15
print(json.dumps(found))
"""


def test_ranks_that_differ_or_end_other_steps_are_an_error_on_all(tmp_path):
    one, other = run_ranks(tmp_path, DIFFERENT, 2)
    (*found, late) = one
    assert found == other
    expected = (
        *("GradNorm.weights", "GradNorm.rule", "GradNorm.every", "GradNorm.rate"),
        *("GradNorm.alpha", "GradNorm.least", "GradNorm.steps", "PCGrad.weights", "PCGrad.seed"),
    )
    for name, message in zip(expected, found[:-2], strict=True):
        assert f"`{name}` is " in message and "on rank 0" in message and "on rank 1" in message
        assert "with the same weights and options" in message
    for message in found[-2:]:
        assert "must call" in message and "[(0, 1), (0, 2)]" in message
    assert "rank 1 did not come" in late


def by_hand(ranks, steps):
    """The weights and pulls of GradNorm, from the batches of both ranks put together."""
    model, first, found = Model(), {}, []
    weights = dict.fromkeys(NEAR_FAR, 1.0)
    for batch in islice(joint_batches(regression(240), ranks), steps):
        losses, norms, pulls = model.losses(batch), {}, {}
        means = {}
        for number, task in enumerate(NEAR_FAR):
            mean = losses[batch["task"] == number].mean()
            grads = torch.autograd.grad(mean, [*model.trunk.parameters()], retain_graph=True)
            norms[task] = float(torch.cat([one.flatten() for one in grads]).norm())
            pulls[task], means[task] = weights[task] * norms[task], float(mean.detach())
            first.setdefault(task, means[task])
        left = {task: means[task] / first[task] for task in NEAR_FAR}
        pull = sum(pulls.values()) / 2
        for task in NEAR_FAR:
            wanted = pull * (left[task] / (sum(left.values()) / 2)) ** 1.5
            side = (pulls[task] > wanted) - (pulls[task] < wanted)
            weights[task] -= 0.01 * side * norms[task] / (sum(norms.values()) / 2)
        total = sum(weights.values())
        weights = {task: max(0.05, 2 * one / total) for task, one in weights.items()}
        found.append((dict(weights), pulls))
    return found


def test_what_cannot_be_is_refused():
    weights = TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    parameters = [*Model().trunk.parameters()]
    with pytest.raises(ValueError, match="`shared` must hold a parameter"):
        GradNorm(weights, [])
    with pytest.raises(ValueError, match="`alpha` must be at least 0 and below 2"):
        GradNorm(weights, parameters, rule="ratio", alpha=2.5)
    with pytest.raises(ValueError, match="`least` must be above 0"):
        GradNorm(weights, parameters, least=0)
    balance = GradNorm(weights, parameters)
    batch = next(iter(loader_of(regression())))
    info = pop_step_info(batch)
    model = Model()
    balance = GradNorm(weights, model.trunk.parameters())
    balance.observe(model.losses(batch), info)
    with pytest.raises(StateError, match="no state within an optimizer step"):
        balance.state_dict()


@pytest.mark.parametrize("rule", ["gradnorm", "ratio"])
@pytest.mark.parametrize("place", [0, 3])
def test_a_loss_that_is_not_finite_moves_no_weight_and_leaves_no_trace(place, rule):
    def weights_of(broken):
        model, weights = Model(), TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
        balance = GradNorm(weights, model.trunk.parameters(), rule=rule)
        found = []
        for number, batch in enumerate(loader_of(regression(120))):
            info = pop_step_info(batch)
            losses = model.losses(batch)
            if number == place and broken:
                losses = losses * float("nan")
            balance.observe(losses, info)
            balance.step()
            found.append(dict(weights))
        return found

    whole, broken = weights_of(False), weights_of(True)
    assert broken[:place] == whole[:place]
    assert broken[place] == (broken[place - 1] if place else dict.fromkeys(NEAR_FAR, 1.0))
    assert broken[-1] != broken[place]
    assert all(weight == weight for weight in broken[-1].values())


def test_shared_parameters_that_the_losses_do_not_use_are_refused():
    model, weights = Model(), TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    balance = GradNorm(weights, [torch.nn.Parameter(torch.ones(2))])
    batch = next(iter(loader_of(regression(120))))
    with pytest.raises(ValueError, match="depend on, but those of '(near|far)' depend on none"):
        balance.observe(model.losses(batch), pop_step_info(batch))


@pytest.mark.parametrize(("kind", "method"), [(GradNorm, "observe"), (PCGrad, "backward")])
def test_losses_whose_graph_a_backward_has_freed_are_refused(kind, method):
    model, weights = Model(), TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    batch = next(iter(loader_of(regression(120))))
    info, losses = pop_step_info(batch), model.losses(batch)
    weights.loss(losses, info).backward()
    with pytest.raises(RuntimeError, match=f"`{method}` must come before `backward` of the same"):
        getattr(kind(weights, model.trunk.parameters()), method)(losses, info)


@pytest.mark.parametrize("steps", [-1, 1.5, "2", None, True])
def test_a_state_whose_steps_are_no_count_is_refused(steps):
    balance = GradNorm(TaskWeights(dict.fromkeys(NEAR_FAR, 1.0)), Model().trunk.parameters())
    state = balance.state_dict()
    with pytest.raises(StateError, match=f"`steps` must be .* is {steps!r}"):
        balance.load_state_dict({**state, "steps": steps})
    with pytest.raises(StateError, match="the state has no 'first'"):
        balance.load_state_dict({"steps": 1})
    assert balance.state_dict() == state


@pytest.mark.parametrize("kind", [GradNorm, PCGrad])
def test_a_step_without_its_batches_is_an_error(kind):
    weights = TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    found = kind(weights, Model().trunk.parameters())
    with pytest.raises(RuntimeError, match="on all ranks and in filler steps too"):
        found.step()


def test_sums_of_half_precision_are_kept_in_float32():
    weights = TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    at = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    projected = PCGrad(weights, [at])
    batch = next(iter(loader_of([row for row in regression(120) if row["task"] == 0])))
    info = pop_step_info(batch)
    for number in range(1000):
        place = {"step": number, "micro_step": number, "micro_steps": 1000}
        projected.backward(at.expand(len(info.row_tasks)) + 1, replace(info, **place))
    projected.step()
    assert at.grad.dtype == torch.bfloat16
    assert float(at.grad) == 1000.0


def added(kind, accumulate=1):
    """What adds the batches of one optimizer step, and the arguments for each."""
    model, weights = Model(), TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    found = kind(weights, model.trunk.parameters())
    batches = islice(loader_of(regression(120), accumulate=accumulate), accumulate)
    given = [(model.losses(batch), pop_step_info(batch)) for batch in batches]
    return found, found.observe if kind is GradNorm else found.backward, given


@pytest.mark.parametrize("kind", [GradNorm, PCGrad])
@pytest.mark.parametrize(
    ("micro_steps", "message"),
    [
        ([0, 1], "last called for micro-step 1 of 3.*was not called for the micro-steps after it"),
        ([0, 2], "came for micro-step 2 of step 2 where 1 was next"),
        ([1, 2], "came for micro-step 1 of step 1 where 0 was next"),
        ([0, 1, 1, 2], "called twice for step 1 of epoch 0"),
        ([0, 0, 1, 2], "called twice for step 0 of epoch 0"),
    ],
)
def test_each_micro_step_is_added_once_and_the_step_is_after_the_last(kind, micro_steps, message):
    found, add, given = added(kind, accumulate=3)

    def run():
        for number in micro_steps:
            add(*given[number])
        found.step()

    with pytest.raises(RuntimeError, match=message):
        run()


@pytest.mark.parametrize("kind", [GradNorm, PCGrad])
def test_a_step_that_is_left_out_is_noticed_at_the_next_batch(kind):
    _, add, ((losses, info),) = added(kind)
    add(losses, info)
    with pytest.raises(RuntimeError, match="but `step` not after step 0"):
        add(losses, replace(info, step=1))


@pytest.mark.parametrize("kind", [GradNorm, PCGrad])
def test_an_optimizer_step_that_was_broken_off_leaves_nothing(kind):
    def result(broken):
        found, add, given = added(kind, accumulate=3)
        if broken:
            add(*given[0])
        for losses, info in given:
            add(losses, replace(info, epoch=1))
        found.step()
        return found.norms if kind is GradNorm else found._gradients.parameters[0].grad.tolist()

    assert result(True) == result(False)


@pytest.mark.parametrize("kind", [GradNorm, PCGrad])
def test_losses_without_a_graph_are_an_error_unless_there_are_no_targets(kind):
    found, add, ((losses, info),) = added(kind)
    with pytest.raises(ValueError, match="`losses` must have a graph, but those of '(near|far)'"):
        add(losses.detach(), info)
    found, add, _ = added(kind)
    none = {"optimizer_targets": 0, "local_targets": 0, "task_targets": {}}
    none["local_task_targets"] = dict.fromkeys(NEAR_FAR, 0)
    add(losses.detach(), replace(info, **none))
    found.step()


def test_there_is_no_state_within_an_optimizer_step_also_of_one_that_measures_nothing():
    model, weights = Model(), TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    balance = GradNorm(weights, model.trunk.parameters(), every=2)
    for batch in islice(loader_of(regression(240), accumulate=3), 9):
        info = pop_step_info(batch)
        balance.observe(model.losses(batch), info)
        with pytest.raises(StateError, match="no state within an optimizer step"):
            balance.state_dict()
        if info.ends_optimizer_step:
            balance.step()
            assert balance.state_dict()["steps"] == info.step // 3 + 1


def test_a_step_in_which_a_rank_is_lost_is_not_counted(monkeypatch):
    balance, observe, ((losses, info),) = added(GradNorm)
    observe(losses, info)
    before = {"steps": 0, "first": {}, "weights": dict.fromkeys(NEAR_FAR, 1.0)}

    def lost(*_):
        raise PeerError("rank 1 did not come")

    with monkeypatch.context() as patch:
        patch.setattr("odb_nodes.tasks.step_meeting.StepMeeting.meet", lost)
        with pytest.raises(PeerError, match="rank 1 did not come"):
            balance.step()
    assert balance.state_dict() == before
    observe(losses, replace(info, step=1))
    balance.step()
    assert balance.state_dict()["steps"] == 1


@pytest.mark.parametrize("kind", [GradNorm, PCGrad])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"weights": {"a": 1}}, TypeError, "`weights` must be a `TaskWeights`"),
        ({"parameters": Model()}, TypeError, r"Pass `module.parameters\(\)`"),
        ({"parameters": torch.nn.Sequential(Model())}, TypeError, "but holds a `Model`"),
        ({"parameters": [*Model().named_parameters()]}, TypeError, "but holds"),
        ({"parameters": torch.nn.Parameter(torch.ones(2))}, TypeError, "but is one tensor"),
        ({"parameters": [*Model().heads.parameters()] * 2}, ValueError, "one of them twice"),
        ({"process_group": "x"}, TypeError, "`process_group` must be a `ProcessGroup`"),
        ({"timeout_s": 0}, ValueError, "`timeout_s` must be seconds"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(kind, change, error, message):
    weights = TaskWeights(dict.fromkeys(NEAR_FAR, 1.0))
    given = {"weights": weights, "parameters": Model().parameters(), **change}
    with pytest.raises(error, match=message):
        kind(given.pop("weights"), given.pop("parameters"), **given)


def test_a_seed_is_an_integer():
    with pytest.raises(TypeError, match="`seed` must be an integer, but is 'x'"):
        PCGrad(TaskWeights({"a": 1.0}), Model().parameters(), seed="x")
