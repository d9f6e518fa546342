"""Weights that follow the gradients of their tasks, alike on any number of ranks, and resume."""

from itertools import islice

import pytest
import torch
from gradients import relative_error
from rank_jobs import run_ranks
from task_models import NEAR_FAR, Model, joint_batches, loader_of, regression, train

from odb_nodes import StateError, pop_step_info
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
from task_models import loader_of, regression, train
from torch.nn.parallel import DistributedDataParallel

data = regression(240)[rank::world_size]
loader = loader_of(data, sharded=True, shuffle=False, timeout_s=20)
found = train(loader, 6)
print(json.dumps([found, r.gathered([len(data)])]))
"""


@pytest.mark.ranks
def test_two_ranks_have_the_weights_of_one_with_the_joint_batch(tmp_path):
    one, other = run_ranks(tmp_path, RANKS, 2)
    assert one[0] == other[0]
    # The joint batch: the samples of both ranks, weighed in one process.
    hand = by_hand(2, 6)
    for (weights, norms), (expected, pulls) in zip(one[0], hand, strict=True):
        assert weights == pytest.approx(expected, rel=1e-12)
        assert norms == pytest.approx(pulls, rel=1e-12)


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
    for _ in range(1000):
        projected.backward(at.expand(len(info.row_tasks)) + 1, info)
    projected.step()
    assert at.grad.dtype == torch.bfloat16
    assert float(at.grad) == 1000.0
