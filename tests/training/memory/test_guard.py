"""A guarded step has the gradients of the whole step, wherever memory has run out in it."""

import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from gradients import (
    LanguageModel,
    OneProcess,
    gradient_of,
    mean_loss,
    relative_error,
    samples_of,
)
from memory_faults import PLACES, FailingModel, above, at_call, loss_of, never
from refusals import refuses
from torch import nn
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    Ledger,
    LengthObserver,
    Loader,
    ODBDataLoader,
    PaddingCollate,
    SampleError,
    StateError,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
    audit,
)
from odb_nodes.core.contract.graph import walk
from odb_nodes.errors import StepMemoryError
from odb_nodes.testing import SavedTensorMeter
from odb_nodes.training.memory import OomGuard
from odb_nodes.training.memory.gradients import kind_of

pytestmark = pytest.mark.filterwarnings("ignore:no token of the optimizer step:UserWarning")
SAMPLES = 60


def loader_of(layout="padded", data=None, **options):
    data = samples_of(0, SAMPLES) if data is None else data
    return ODBDataLoader(
        data, **{"token_budget": TokenBudget(96, layout=layout), "window": 16, **options}
    )


def graph():
    """A graph without an aligner."""
    source = LengthObserver(IterableWrapper(samples_of(0, SAMPLES)))
    return Loader(GroupCollator(WindowBucketer(source, 96, 16)))


class StepResult(NamedTuple):
    """Results of an optimizer step."""

    gradient: torch.Tensor
    loss: float
    keys: list[tuple[int, ...]]  # of each batch
    state: Any = None  # of the loader after the step


def epoch(loader, model=None, loss=mean_loss, ledger=None, **options):
    """Return the guard, and the results of each optimizer step."""
    model = FailingModel(never) if model is None else model
    guard, steps = OomGuard(loader, **options), []
    for step in guard:
        value = float(step.backward(model, lambda batch: loss(model, batch)))
        keys = [info.keys for info in step.infos]
        steps.append(StepResult(gradient_of(model), value, keys, loader.state_dict()))
        for info in step.infos if ledger else ():
            ledger.record(info)
        model.zero_grad()
    return guard, steps


def check_equal(steps, expected):
    for step, expected_step in zip(steps, expected, strict=True):
        assert relative_error(step.gradient, expected_step.gradient) < 1e-12
        assert step.loss == pytest.approx(expected_step.loss, rel=1e-12)
        assert (step.keys, step.state) == (expected_step.keys, expected_step.state)


def keys_of(steps):
    return sorted(key for step in steps for keys in step.keys for key in keys)


def once_alone():
    """Samples alone run out of memory, but not the second time."""
    seen = set()
    return lambda *shape: shape[0] == 1 and shape not in seen and not seen.add(shape)


@pytest.mark.parametrize(
    ("make", "options", "fails", "place", "limits"),
    [
        (loader_of, {}, above(70), "forward", {}),
        (loader_of, {"accumulate": 3}, above(40), "backward", {}),
        (loader_of, {"layout": "packed"}, above(25), "backward", {}),
        (loader_of, {"layout": "packed", "accumulate": 3}, above(40), "forward", {}),
        (loader_of, {}, once_alone(), "forward", {"limit": 8}),  # memory was in pieces
        (loader_of, {"workers": WorkerOptions(num_workers=1, method="thread")}, above(40),
         "forward", {}),
        (graph, {}, above(40), "forward", {}),
        (loader_of, {}, above(40), "forward", {"limit": 40}),  # in parts from the beginning
    ],
)  # fmt: skip
def test_a_step_that_does_not_fit_is_computed_in_parts(make, options, fails, place, limits):
    _, expected = epoch(make(**options))
    loader = make(**options)
    guard, steps = epoch(loader, FailingModel(fails, place), **limits)
    check_equal(steps, expected)
    assert 0 < guard.split_steps <= len(steps)
    assert (guard.ooms == 0) == (limits == {"limit": 40})
    assert guard.skipped_samples == 0
    if make is loader_of:
        loader.close()


@pytest.mark.parametrize(("place", "accumulate"), [(PLACES[0], 3), (PLACES[1], 1)])
def test_memory_may_run_out_in_any_call(accumulate, place, sampled):
    model = FailingModel(never)
    _, expected = epoch(loader_of(accumulate=accumulate), model)
    failing_calls = [number for number, (rows, _) in enumerate(model.calls) if rows > 1]
    for number in failing_calls[:: sampled(every=5).get("every", 1)]:
        failing = FailingModel(at_call({number}), place)
        guard, steps = epoch(loader_of(accumulate=accumulate), failing)
        check_equal(steps, expected)
        assert guard.ooms == 1


class FailsOnce:
    """Collates, but for the first time that a batch of a step is made."""

    draws_random_numbers = False

    def __init__(self, step):
        self.step, self.failed = step, False

    def __call__(self, samples):
        return PaddingCollate()(samples)

    def collate_step(self, samples, info):
        if info.step == self.step and not self.failed:
            self.failed = True
            raise ValueError("as the test wants it")
        return self(samples)


@pytest.mark.parametrize("failing_step", [0, 4])  # the first of an optimizer step, and a later one
def test_batches_of_a_step_in_which_the_loader_raises_are_kept(failing_step):
    _, expected = epoch(loader_of(accumulate=3))
    model, steps = FailingModel(above(40)), []
    guard = OomGuard(loader_of(accumulate=3, collate_fn=FailsOnce(failing_step)))
    for _ in range(2):
        try:
            for step in guard:
                loss = float(step.backward(model, loss_of(model)))
                keys = [info.keys for info in step.infos]
                steps.append(StepResult(gradient_of(model), loss, keys))
                model.zero_grad()
        except ValueError:
            continue
    check_equal(steps, [step._replace(state=None) for step in expected])


def plain_mean(model, batch):
    """A mean that is NaN over no targets."""
    losses = nn.functional.cross_entropy(
        model(batch["input_ids"])[:, :-1].flatten(0, 1),
        batch["labels"][:, 1:].flatten(),
        reduction="none",
    )
    mask = (batch["labels"][:, 1:] != -100).flatten()
    return (losses * mask).sum() / mask.sum()


def test_a_mean_over_no_targets_leaves_no_nan_in_the_gradients_of_a_split_batch():
    (_, whole), (guard, steps) = (
        epoch(loader_of(token_budget=250), FailingModel(fails), plain_mean)
        for fails in (never, above(60))
    )
    has_targets = [number for number, step in enumerate(whole) if step.gradient.isfinite().all()]
    check_equal([steps[number] for number in has_targets], [whole[n] for n in has_targets])
    assert guard.split_steps > 2 and len(has_targets) > 2


def row_means(model, batch):
    mask = batch["attention_mask"][:, :, None]
    hidden = model(batch["input_ids"]) * mask
    return (hidden.square().sum((1, 2)) / mask.sum((1, 2))).mean()


@pytest.mark.parametrize("scaling", ["none", "approx"])
def test_batches_without_targets_are_weighed_by_samples_where_the_loss_is(scaling):
    data = [{**sample, "labels": [-100] * len(sample["labels"])} for sample in samples_of(0, 20)]
    options = {"data": data, "loss_scaling": scaling}
    (_, whole), (_, parts) = (epoch(loader_of(**options), None, row_means, limit=limit)
                              for limit in (None, 30))  # fmt: skip
    check_equal(parts, whole)
    assert all(step.gradient.abs().max() > 0 for step in whole)


def test_parts_of_a_batch_draw_different_random_numbers():
    def draws(**options):
        drawn = []

        def loss(model, batch):
            drawn.append(float(batch.pop("draw")))
            return mean_loss(model, batch)

        collate = lambda samples: PaddingCollate()(samples) | {"draw": torch.rand(())}  # noqa: E731
        epoch(loader_of(collate_fn=collate), None, loss, **options)
        return drawn

    whole, parts = draws(), draws(limit=24)
    assert len(parts) == len({*parts}) > len(whole) == len({*whole})


# --- what does not fit at all ---------------------------------------------------------------------


def with_targets():
    """Samples with targets: parts without targets are not computed, so they fit."""
    return [sample for sample in samples_of(0, SAMPLES) if (sample["labels"][1:] != -100).any()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_skipped_samples_are_left_out_of_the_mean(accumulate, tmp_path):
    samples, whole = samples_of(0, SAMPLES), OneProcess([SAMPLES])
    loader, model = loader_of(accumulate=accumulate), FailingModel(above(12))
    with Ledger(tmp_path) as ledger:
        guard, steps = epoch(loader, model, ledger=ledger, on_oom="skip")
    for step in steps:
        if ids := [samples[key]["id"] for key in keys_of([step])]:
            assert relative_error(step.gradient, whole.gradient([ids], "exact")) < 1e-12
    skipped = {*range(SAMPLES)} - {*keys_of(steps)}
    assert len(skipped) == guard.skipped_samples
    assert skipped == {sample["id"] for sample in with_targets() if len(sample["input_ids"]) > 12}
    report = audit(tmp_path, SAMPLES)
    assert report.ok and f"{len(skipped)} skipped (out of memory)" in str(report)


def test_a_sample_that_does_not_fit_alone_is_an_error_that_names_it():
    tokens = max(len(sample["input_ids"]) for sample in with_targets())
    message = rf"step \d+ of epoch 0, rank 0: a sample \(key \d+\) with {tokens} tokens .* alone"
    with pytest.raises(StepMemoryError, match=message):
        epoch(loader_of(), FailingModel(above(tokens - 1)))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_skipping_whole_steps_in_a_row_is_an_error(accumulate):
    model, done = FailingModel(never), []
    guard = OomGuard(loader_of(accumulate=accumulate), on_oom="skip")
    with pytest.raises(StepMemoryError, match="none of the last [34][0-9] samples of all ranks"):
        for step in guard:
            step.backward(model, loss_of(model))
            model.zero_grad()
            done.append(step.infos[0].optimizer_targets)
            model.fails = above(0)
    assert done[0] > 0 == sum(done[1:])
    assert 0 < guard.skipped_samples < SAMPLES


def raises(error):
    def fails(*_):
        raise error

    return fails


@pytest.mark.parametrize(
    ("options", "fails", "on_oom", "error", "ooms"),
    [
        ({}, above(40), "raise", torch.OutOfMemoryError, 1),
        ({}, raises(KeyError("of the model")), "raise", KeyError, 0),
        ({}, raises(KeyError("of the model")), "split", KeyError, 0),
        ({"collate_fn": raises(SampleError("bad"))}, never, "split", SampleError, 0),
    ],
)
def test_other_errors_are_raised_unchanged(options, fails, on_oom, error, ooms):
    guard, model = OomGuard(loader_of(**options), on_oom=on_oom), FailingModel(fails)
    for epochs in (1, 2):
        with pytest.raises(error):
            for step in guard:
                step.backward(model, loss_of(model))
                model.zero_grad()
        assert (guard.ooms, guard.split_steps) == (ooms * epochs, 0)
        model.zero_grad()


# --- smaller budgets ------------------------------------------------------------------------------


def limit_of(loader):
    (bucketer,) = (node for node in walk(loader.root) if isinstance(node, WindowBucketer))
    return bucketer.limits.tokens


def test_a_budget_shrinks_when_memory_runs_out_and_states_keep_it():
    _, before = epoch(loader_of(round_size=1))
    loader = loader_of(round_size=1)
    guard, steps = epoch(loader, FailingModel(above(60)), shrink=0.9)
    assert keys_of(steps) == [*range(SAMPLES)]
    assert len(before) < len(steps) - 3
    assert 0 < guard.ooms <= 2
    shrunk, state = limit_of(loader), loader.state_dict()
    assert 40 < shrunk <= 0.9 * 96
    _, later = epoch(loader)
    resumed, fresh = loader_of(round_size=1), loader_of(round_size=1)
    resumed.load_state_dict(state)
    assert [step.keys for step in epoch(resumed)[1]] == [step.keys for step in later]
    assert limit_of(loader) == limit_of(resumed) == shrunk
    fresh.set_epoch(1)
    _, steps = epoch(fresh)
    assert limit_of(fresh) == 96 and len(steps) < len(later)
    assert keys_of(steps) == keys_of(later) == [*range(SAMPLES)]


def test_a_sample_that_fits_at_the_second_attempt_does_not_shrink_the_budget():
    def failing(fails):
        loader = loader_of(token_budget=TokenBudget(96, max_samples=1), round_size=1)
        guard, _ = epoch(loader, FailingModel(fails), on_oom="skip", shrink=0.5)
        assert guard.ooms > 0
        return guard.skipped_samples, limit_of(loader)

    assert failing(once_alone()) == (0, 96)
    skipped, tokens = failing(above(20))
    assert skipped > 0 and tokens < 96


# --- what it measures -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_peak_is_that_of_the_largest_part(layout):
    limit_bytes = 120_000
    guard, _ = epoch(loader_of(layout), meter=SavedTensorMeter(limit_bytes))
    parts, _ = epoch(loader_of(layout), limit=40, meter=SavedTensorMeter(limit_bytes))
    assert 0 < parts.peak_share < 0.8 * guard.peak_share < 0.8
    assert epoch(loader_of(layout))[0].peak_share == 0


# --- what is kept ---------------------------------------------------------------------------------


def test_samples_are_kept_only_while_a_guard_iterates():
    loader = loader_of()
    steps = iter(OomGuard(loader))
    first = next(steps)
    next(iter(loader))
    with pytest.raises(StateError, match="the samples of step 9 of epoch 1 are not kept"):
        loader.root.take_samples(replace(first.infos[0], step=9, epoch=1))
    assert len(loader.root._kept) == 1  # of the batch that is out, and not one more
    steps.close()
    assert loader.root._kept is None


def test_a_model_does_not_live_on_with_its_guard():
    guard, model = OomGuard(loader_of()), FailingModel(never)
    next(iter(guard)).backward(model, loss_of(model))
    gone = weakref.ref(model)
    del model
    assert gone() is None


# --- what is refused ------------------------------------------------------------------------------


class Holder:
    loader = loader_of()


NO_GROUPS = Loader(WindowBucketer(LengthObserver(IterableWrapper([])), 96, 16))
REFUSALS = [
    (loader_of, {"on_oom": "halve"}, ValueError, "`on_oom` must be one of .*halve"),
    (loader_of, {"guard_above": 2}, ValueError, "`guard_above` must be in .0, 1., but is 2"),
    (loader_of, {"limit": 0}, ValueError, "`limit` must be"),
    (loader_of, {"shrink": 1.0}, ValueError, "`shrink` must be in .0, 1.,"),
    (loader_of, {"shrink": "0.9"}, TypeError, "`shrink` must be a number in"),
    (loader_of, {"meter": 3}, TypeError, "`meter` must have `reset"),
    (lambda: loader_of(token_budget=TokenBudget(96, shapes=4)), {"shrink": 0.5}, ValueError,
     "budget with `shapes`"),
    (lambda: loader_of(virtual_ranks=2), {}, TypeError, "must not have `virtual_ranks`"),
    (lambda: NO_GROUPS, {}, TypeError, "its graph has 0"),
    (Holder, {}, TypeError, "Pass the `.loader` of this `Holder`"),
    (lambda: [1], {}, TypeError, "`loader` must be an `ODBDataLoader`"),
]  # fmt: skip
test_bad_arguments_of_the_guard_are_refused = refuses(
    REFUSALS, lambda make, options: OomGuard(make(), **options)
)


def test_bad_calls_of_backward_are_refused():
    model = LanguageModel()
    steps = iter(OomGuard(loader_of()))
    step = next(steps)
    with pytest.raises(TypeError, match="`model` must be an `nn.Module`, but is `function`"):
        step.backward(loss_of, loss_of(model))
    with pytest.raises(TypeError, match="`loss_fn` must return the mean loss"):
        step.backward(model, lambda batch: 1.0)
    with pytest.raises(RuntimeError, match="was called before for this step"):
        step.backward(model, loss_of(model))
    next(steps).backward(model, loss_of(model))
    with pytest.raises(RuntimeError, match="the parameters have gradients before"):
        next(steps).backward(model, loss_of(model))
    model.zero_grad(set_to_none=False)
    next(steps).backward(model, loss_of(model))

    class Engine(nn.Linear):
        def backward(self, loss):
            """A model with its own `backward`, like DeepSpeed's engine."""

    with pytest.raises(TypeError, match="`Engine` overrides `backward`"):
        next(steps).backward(Engine(1, 1), loss_of(model))
    batches = iter(loader := loader_of(accumulate=3))
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="step 1 of epoch 0 is micro-step 1 of 3"):
        next(iter(OomGuard(loader)))


def test_a_step_without_its_backward_is_warned_of_once():
    model = FailingModel(never)
    with pytest.warns(UserWarning, match="not called for step 1 of epoch 0") as caught:
        for number, step in enumerate(OomGuard(loader_of())):
            if number not in (1, 2):
                step.backward(model, loss_of(model))
                model.zero_grad()
    ours = [warning for warning in caught if "not called" in str(warning.message)]
    assert [warning.filename for warning in ours] == [__file__]


def test_a_loss_that_trains_other_parameters_is_refused():
    body, head = LanguageModel(), nn.Linear(33, 33, dtype=torch.float64)

    def loss_fn(batch):
        return head(body(batch["input_ids"])).square().mean()

    with pytest.raises(TypeError, match="trains 2 parameters that `model` does not have"):
        next(iter(OomGuard(loader_of()))).backward(body, loss_fn)
    both = nn.ModuleList([body, head])
    assert next(iter(OomGuard(loader_of()))).backward(both, loss_fn) > 0


def test_kind_of_tells_how_ranks_train_a_model(tmp_path):
    assert kind_of(nn.Linear(2, 2)) == "local"
    assert kind_of(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))) == "sharded"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        model = nn.Sequential(nn.parallel.DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(TypeError, match="Wrap the whole model by DDP"):
            kind_of(model)
    finally:
        torch.distributed.destroy_process_group()


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_a_gpu_that_runs_out_of_memory_gives_the_same_gradients():
    vocabulary, loader_options = 8192, {"token_budget": 8192, "window": 64, "seed": 3}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(vocabulary, 64), nn.Linear(64, vocabulary)).cuda()
    texts = [torch.randint(vocabulary, (50 + 37 * n % 900,)) for n in range(200)]
    data = [{"input_ids": text, "labels": text} for text in texts]

    def loss(batch):
        ids, labels = batch["input_ids"].cuda(), batch["labels"].cuda()
        logits = model(ids)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())

    def gradients(**options):
        per_step, guard = [], OomGuard(ODBDataLoader(data, **loader_options), **options)
        for step in guard:
            step.backward(model, loss)
            per_step.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
            model.zero_grad()
        return guard, per_step

    torch.cuda.reset_peak_memory_stats()
    _, expected = gradients()
    expected = [gradient.cpu() for gradient in expected]
    peak, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.6 * peak / total)
    try:
        guard, actual = gradients()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert guard.ooms > 0 == guard.skipped_samples
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        assert relative_error(gradient.cpu(), expected_gradient) < 1e-5
