"""A guarded step has the gradients of the whole, whatever has run out of memory in it."""

import re
import weakref
from dataclasses import replace

import pytest
import torch
from gradients import LanguageModel, OneProcess, gradient_of, relative_error, samples_of
from memory_faults import PLACES, FailingModel, above, at_call, loss_of, never
from torch import nn
from torch.utils.data import DataLoader
from torchdata.nodes import IterableWrapper

from odb_nodes import (
    GroupCollator,
    Ledger,
    LengthObserver,
    Loader,
    ODBDataLoader,
    PaddingCollate,
    RankAligner,
    SampleError,
    StateError,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
    audit,
)
from odb_nodes.contract.graph import walk
from odb_nodes.errors import StepMemoryError
from odb_nodes.memory import MemoryModel, OomGuard
from odb_nodes.memory.gradients import check_is_whole, kind_of
from odb_nodes.testing import SavedTensorMeter

SAMPLES = 60
LAYOUTS = ("padded", "packed")


def loader_of(layout="padded", accumulate=1, **options):
    budget = TokenBudget(96, layout=layout)
    options = {"token_budget": budget, "window": 16, "accumulate": accumulate, **options}
    return ODBDataLoader(samples_of(0, SAMPLES), **options)


def epoch(loader, model, ledger=None, **options):
    """Of each optimizer step: gradient, loss, keys, and the loader's state after it."""
    guard, found = OomGuard(loader, **options), []
    for step in guard:
        loss = float(step.backward(model, loss_of(model)))
        keys = [info.keys for info in step.infos]
        found.append((gradient_of(model), loss, keys, loader.state_dict()))
        for info in step.infos if ledger else ():
            ledger.record(info)
        model.zero_grad()
    return guard, found


def check_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one[0], other[0]) < 1e-12
        assert one[1] == pytest.approx(other[1], rel=1e-12)
        assert one[2:] == other[2:]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [70, 40, 25])
def test_what_does_not_fit_is_computed_in_parts(layout, accumulate, place, most):
    _, expected = epoch(loader_of(layout, accumulate), FailingModel(never))
    guard, found = epoch(loader_of(layout, accumulate), FailingModel(above(most), place))
    check_equal(found, expected)
    assert guard.ooms > 0 < guard.split_steps <= len(found)
    assert guard.skipped_samples == 0


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [1, 3])
def test_at_every_step_memory_may_run_out_by_chance(accumulate, place, sampled):
    model = FailingModel(never)
    _, expected = epoch(loader_of(accumulate=accumulate), model)
    several = [number for number, (rows, _) in enumerate(model.calls) if rows > 1]
    for number in several[:: sampled(every=7).get("every", 1)]:
        guard, found = epoch(
            loader_of(accumulate=accumulate), FailingModel(at_call({number}), place)
        )
        check_equal(found, expected)
        assert guard.ooms == 1


def test_a_sample_alone_is_tried_twice_since_memory_may_have_been_in_pieces():
    _, expected = epoch(loader_of(), FailingModel(never))
    failed = []

    def once(rows, width):
        failed.append((rows, width))
        return rows == 1 and failed.count((rows, width)) == 1

    guard, found = epoch(loader_of(), FailingModel(once), limit=8)
    check_equal(found, expected)
    assert guard.ooms > 0


def test_batches_that_are_made_ahead_by_workers_keep_their_samples():
    workers = WorkerOptions(num_workers=1, method="thread")
    _, expected = epoch(loader_of(), FailingModel(never))
    with loader_of(workers=workers) as loader:
        _, found = epoch(loader, FailingModel(above(40)))
    check_equal(found, expected)


def test_a_run_that_resumes_goes_on_alike():
    _, expected = epoch(loader_of(), FailingModel(never))
    for place in range(0, len(expected), 4):
        loader = loader_of()
        loader.load_state_dict(expected[place][3])
        for one, other in zip(
            epoch(loader, FailingModel(above(40)))[1], expected[place + 1 :], strict=True
        ):
            assert relative_error(one[0], other[0]) < 1e-12
            assert one[2] == other[2]


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


@pytest.mark.sampled(3)
@pytest.mark.parametrize("step", range(8))
def test_batches_of_a_step_in_which_the_loader_raises_are_kept(step):
    _, expected = epoch(loader_of(accumulate=3), FailingModel(never))
    model, found = FailingModel(above(40)), []
    loader = loader_of(accumulate=3, collate_fn=FailsOnce(step))
    guard = OomGuard(loader)
    for _ in range(2):
        try:
            for one in guard:
                loss = float(one.backward(model, loss_of(model)))
                keys = [info.keys for info in one.infos]
                found.append((gradient_of(model), loss, keys))
                model.zero_grad()
        except ValueError:
            continue
    check_equal(found, [one[:3] for one in expected])


def test_a_state_within_an_optimizer_step_is_refused():
    batches = iter(loader := loader_of(accumulate=3))
    next(batches)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="step 1 of epoch 0 is micro-step 1 of 3"):
        next(iter(OomGuard(loader)))


def test_steps_above_the_limit_are_computed_in_parts_from_the_beginning():
    _, expected = epoch(loader_of(), FailingModel(never))
    guard, found = epoch(loader_of(), FailingModel(above(40)), limit=40)
    check_equal(found, expected)
    assert guard.ooms == 0 < guard.split_steps


def with_targets():
    """The samples that have targets: others need not be computed in parts, and fit so."""
    return [one for one in samples_of(0, SAMPLES) if (one["labels"][1:] != -100).any()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_samples_that_do_not_fit_alone_are_left_out_of_the_mean(accumulate, tmp_path):
    samples = samples_of(0, SAMPLES)
    whole = OneProcess([SAMPLES])
    loader = loader_of(accumulate=accumulate)
    with Ledger(tmp_path) as ledger:
        guard, found = epoch(loader, FailingModel(above(12)), ledger, on_oom="skip")
    seen = []
    for gradient, _, keys, _ in found:
        ids = [samples[key]["id"] for some in keys for key in some]
        seen += ids
        if ids:
            assert relative_error(gradient, whole.gradient([ids], "exact")) < 1e-12
    left = {one["id"] for one in samples} - {*seen}
    assert len(left) == guard.skipped_samples
    assert left == {one["id"] for one in with_targets() if len(one["input_ids"]) > 12}
    report = audit(tmp_path, SAMPLES)
    assert report.ok
    assert f"{len(left)} skipped (out of memory)" in str(report)


def test_a_sample_that_does_not_fit_alone_is_an_error_that_names_it():
    tokens = max(len(one["input_ids"]) for one in with_targets())
    message = rf"step \d+ of epoch 0, rank 0: a sample \(key \d+\) with {tokens} tokens .* alone"
    with pytest.raises(StepMemoryError, match=message):
        epoch(loader_of(), FailingModel(above(tokens - 1)))


@pytest.mark.parametrize("accumulate", [1, 3])
def test_it_does_not_go_on_where_no_sample_fits_any_more(accumulate):
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


def test_a_step_without_its_backward_is_warned_of_once():
    model = FailingModel(never)
    with pytest.warns(UserWarning, match="not called for step 1 of epoch 0") as caught:
        for number, step in enumerate(OomGuard(loader_of())):
            if number not in (1, 2):
                step.backward(model, loss_of(model))
                model.zero_grad()
    assert [one.filename for one in caught] == [__file__]


def test_the_models_own_error_is_raised_where_that_is_asked_for():
    guard = OomGuard(loader_of(), on_oom="raise")
    model = FailingModel(above(40))
    for ooms in (1, 2):
        with pytest.raises(torch.OutOfMemoryError):
            for step in guard:
                step.backward(model, loss_of(model))
                model.zero_grad()
        assert (guard.ooms, guard.split_steps) == (ooms, 0)
        model.zero_grad()


def test_where_the_error_is_raised_another_error_is_no_lack_of_memory():
    guard, model = OomGuard(loader_of(), on_oom="raise"), LanguageModel()
    with pytest.raises(KeyError):
        next(iter(guard)).backward(model, lambda batch: {}["loss"])
    assert guard.ooms == 0


def test_it_says_how_it_was_made():
    guard = OomGuard(loader_of(), shrink=0.9, memory=MemoryModel(), meter=SavedTensorMeter(5))
    shown = (
        "'split', guard_above=0.8, limit=None, shrink=0.9, meter=<.*Meter.*>, memory=MemoryModel"
    )
    assert re.match(rf"OomGuard\(ODBDataLoader\(list, .*\), on_oom={shown}", repr(guard))


def test_another_error_is_raised_as_it_is():
    def fails(rows, width):
        raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        epoch(loader_of(), FailingModel(fails))


def test_after_it_ran_out_later_batches_are_smaller():
    guard, found = epoch(loader_of(round_size=1), FailingModel(above(60)), shrink=0.9)
    sizes = [keys for _, _, keys, _ in found]
    assert sorted(key for keys in sizes for some in keys for key in some) == [*range(SAMPLES)]
    _, before = epoch(loader_of(), FailingModel(never))
    assert len(before) < len(found) - 3
    assert 0 < guard.ooms <= 2
    limits = {one[3]["root"]["source"]["next_limits"][0] for one in found[-5:]}
    assert len(limits) == 1
    assert 40 < limits.pop() <= 0.9 * 96


def limit_of(loader):
    (bucketer,) = (node for node in walk(loader.root) if isinstance(node, WindowBucketer))
    return bucketer.limits.tokens


def test_a_budget_that_has_shrunk_stays_so_but_for_an_epoch_without_a_state():
    loader = loader_of(round_size=1)
    epoch(loader, FailingModel(above(60)), shrink=0.9)
    shrunk, state = limit_of(loader), loader.state_dict()
    assert shrunk < 96
    _, later = epoch(loader, FailingModel(never))
    assert limit_of(loader) == shrunk
    resumed = loader_of(round_size=1)
    resumed.load_state_dict(state)
    assert [one[2] for one in epoch(resumed, FailingModel(never))[1]] == [one[2] for one in later]
    assert limit_of(resumed) == shrunk
    fresh = loader_of(round_size=1)
    fresh.set_epoch(1)
    _, found = epoch(fresh, FailingModel(never))
    assert limit_of(fresh) == 96 and len(found) < len(later)
    keys = [
        sorted(key for one in each for some in one[2] for key in some) for each in (found, later)
    ]
    assert keys == [[*range(SAMPLES)]] * 2


def test_of_a_graph_without_an_aligner_too():
    def make():
        source = LengthObserver(IterableWrapper(samples_of(0, SAMPLES)))
        return Loader(GroupCollator(WindowBucketer(source, 96, 16)))

    _, expected = epoch(make(), FailingModel(never))
    _, found = epoch(make(), FailingModel(above(40)))
    check_equal(found, expected)


def test_what_is_not_for_a_guard_is_refused():
    loader = loader_of()
    with pytest.raises(ValueError, match="`on_oom` must be one of .*but is \"?'?halve"):
        OomGuard(loader, "halve")
    with pytest.raises(ValueError, match="`guard_above` must be in 0..1, but is 2 instead"):
        OomGuard(loader, guard_above=2)
    with pytest.raises(ValueError, match="`limit` must be"):
        OomGuard(loader, limit=0)
    for shrink in (0, 1.0, "0.9"):
        with pytest.raises(ValueError, match="`shrink` must be above 0 and below 1"):
            OomGuard(loader, shrink=shrink)
    with pytest.raises(ValueError, match="a budget with `shapes` has no smaller batches"):
        OomGuard(loader_of(token_budget=TokenBudget(96, shapes=4)))
    with pytest.raises(ValueError, match='`uneven` must be "fill" or "stop" with a guard'):
        OomGuard(loader_of(uneven="join"))
    source = WindowBucketer(LengthObserver(IterableWrapper(samples_of(0, 9))), 96, 16)
    with pytest.raises(ValueError, match="`cost_fn` of the `RankAligner` must be the default"):
        OomGuard(Loader(GroupCollator(RankAligner(source, cost_fn=len))))
    with pytest.raises(TypeError, match="its graph has 0"):
        OomGuard(Loader(WindowBucketer(LengthObserver(IterableWrapper([])), 96, 16)))


@pytest.mark.parametrize("other", [None, [1], DataLoader([1]), iter([])])
def test_what_is_no_loader_is_refused(other):
    with pytest.raises(TypeError, match="`loader` must be an `ODBDataLoader` or a `Loader`, but"):
        OomGuard(other)


def test_of_what_holds_a_loader_the_loader_is_asked_for():
    class Holder:
        loader = loader_of()

    with pytest.raises(TypeError, match="Pass the `.loader` of this `Holder`"):
        OomGuard(Holder())


def test_what_is_not_for_a_step_is_refused():
    model = LanguageModel()
    steps = iter(OomGuard(loader_of()))
    step = next(steps)
    with pytest.raises(TypeError, match="`model` must be an `nn.Module`, but is `function`"):
        step.backward(loss_of, loss_of(model))
    with pytest.raises(TypeError, match="`loss_fn` must return the mean loss"):
        step.backward(model, lambda batch: 1.0)
    with pytest.raises(RuntimeError, match="was called before for this step"):
        step.backward(model, loss_of(model))
    step = next(steps)
    step.backward(model, loss_of(model))
    with pytest.raises(RuntimeError, match="the parameters have gradients before"):
        next(steps).backward(model, loss_of(model))
    model.zero_grad(set_to_none=False)
    next(steps).backward(model, loss_of(model))

    class Engine(nn.Linear):
        def backward(self, loss):
            """As DeepSpeed's has."""

    with pytest.raises(TypeError, match="`Engine` has a `backward` of its own"):
        next(steps).backward(Engine(1, 1), loss_of(model))


def test_samples_are_kept_only_while_a_guard_asks_for_them():
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
    for step in guard:
        step.backward(model, loss_of(model))
        break
    gone = weakref.ref(model)
    del model
    assert gone() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_model_of_memory_learns_from_the_steps_of_a_run(layout):
    memory, meter = MemoryModel(), SavedTensorMeter(120_000)
    guard, found = epoch(loader_of(layout), LanguageModel(), meter=meter, memory=memory)
    assert 0 < guard.peak_share <= 1
    accuracy = memory.accuracy()
    assert accuracy.steps.steps >= len(found) - 9
    assert accuracy.steps.mean_error < 0.05
    with pytest.raises(ValueError, match="`memory` needs a `meter`"):
        OomGuard(loader_of(), memory=memory)
    with pytest.raises(TypeError, match="`meter` must have `reset"):
        OomGuard(loader_of(), meter=3)


class Noted(MemoryModel):
    """Notes the shapes that it is told."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def add(self, rows, width, *rest):
        self.shapes.append((rows, width))
        super().add(rows, width, *rest)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_model_of_memory_learns_from_the_second_optimizer_step_on(accumulate):
    memory, model = Noted(), FailingModel(never)
    epoch(loader_of(accumulate=accumulate), model, meter=SavedTensorMeter(10**9), memory=memory)
    assert memory.shapes == model.calls[accumulate:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_whose_attention_is_within_samples_are_measured_alone(layout):
    budget = TokenBudget(96, layout=layout, attention_tokens=50)
    options = {"meter": SavedTensorMeter(10**9), "memory": (memory := Noted())}
    guard, found = epoch(loader_of(token_budget=budget), LanguageModel(), **options)
    assert guard.peak_share > 0
    assert len(memory.shapes) == (len(found) - 1 if layout == "padded" else 0)


def test_memory_in_pieces_does_not_shrink_the_budget():
    def failing(times):
        failed = []

        def fails(rows, width):
            failed.append((rows, width))
            return rows == 1 and failed.count((rows, width)) <= times

        loader = loader_of(token_budget=TokenBudget(96, max_samples=1), round_size=1)
        guard, _ = epoch(loader, FailingModel(fails), on_oom="skip", shrink=0.5)
        assert guard.ooms > 0
        return guard.skipped_samples, limit_of(loader)

    assert failing(times=1) == (0, 96)
    skipped, tokens = failing(times=2)
    assert skipped > 0 and tokens < 96


def test_each_lack_of_memory_is_logged_with_what_is_done(caplog):
    guard, _ = epoch(loader_of(), FailingModel(above(15)), on_oom="skip")
    lines = [record.getMessage() for record in caplog.records if record.name == "odb_nodes"]
    assert len(lines) == guard.ooms
    assert lines[0].startswith("rank 0 ran out of memory in step 0 of epoch 0, with ")
    ends = {line.rpartition(": ")[2].partition(",")[0] for line in lines}
    assert ends == {
        "batches that cost as much are halved",
        "the step is computed again",
        "the sample is left out",
    }


def test_a_mean_over_no_targets_leaves_no_nan_in_the_gradients_of_a_split_batch():
    def own_mean(model):
        def loss(batch):
            logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            )
            mask = (labels != -100).flatten()
            return (losses * mask).sum() / mask.sum()

        return loss

    def gradients(fails):
        found, model = [], FailingModel(fails)
        for step in OomGuard(loader_of(token_budget=250)):
            step.backward(model, own_mean(model))
            found.append((step.infos[0].local_targets, gradient_of(model)))
            model.zero_grad()
        return found

    for (targets, whole), (_, found) in zip(gradients(never), gradients(above(60)), strict=True):
        if targets:
            assert relative_error(found, whole) < 1e-12


def test_a_model_of_memory_does_not_end_a_run_of_one_shape():
    memory, meter = MemoryModel(), SavedTensorMeter(10**9)
    data = [{"input_ids": [1] * 12, "labels": [1] * 12} for _ in range(80)]
    with meter:
        steps = 0
        for step in OomGuard(ODBDataLoader(data, token_budget=48), meter=meter, memory=memory):
            step.backward(model := LanguageModel(), loss_of(model))
            steps += 1
    assert steps == 80 * 12 / 48


def test_ranks_that_share_their_statistics_compute_together():
    assert kind_of(nn.Linear(2, 2)) == "local"
    assert kind_of(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))) == "sharded"


def test_parts_of_a_batch_draw_random_numbers_of_their_own():
    def collate(samples):
        return PaddingCollate()(samples) | {"draw": torch.rand(())}

    def draws(**options):
        model, found = LanguageModel(), []

        def loss_fn(batch):
            found.append(float(batch.pop("draw")))
            return loss_of(model)(batch)

        for step in OomGuard(loader_of(collate_fn=collate), **options):
            step.backward(model, loss_fn)
            model.zero_grad()
        return found

    whole, parts = draws(), draws(limit=24)
    assert len(parts) == len({*parts}) > len(whole) == len({*whole})


@pytest.mark.parametrize("scaling", ["none", "approx"])
def test_batches_without_targets_are_weighed_by_samples_where_the_loss_is(scaling):
    def epoch_of(**options):
        samples = [{**one, "labels": [-100] * len(one["labels"])} for one in samples_of(0, 20)]
        model, gradients = LanguageModel(), []
        loader = ODBDataLoader(samples, token_budget=96, window=8, loss_scaling=scaling)
        for step in OomGuard(loader, **options):
            step.backward(model, lambda batch: row_means(model, batch))
            gradients.append(gradient_of(model))
            model.zero_grad()
        return gradients

    def row_means(model, batch):
        mask = batch["attention_mask"][:, :, None]
        hidden = model(batch["input_ids"]) * mask
        return (hidden.square().sum((1, 2)) / mask.sum((1, 2))).mean()

    for whole, parts in zip(epoch_of(), epoch_of(limit=30), strict=True):
        assert whole.abs().max() > 0
        assert relative_error(parts, whole) < 1e-12


def test_a_loss_that_trains_what_the_model_does_not_have_is_refused():
    body, head = LanguageModel(), nn.Linear(33, 33, dtype=torch.float64)

    def loss_fn(batch):
        return head(body(batch["input_ids"])).square().mean()

    (step, *_) = OomGuard(loader_of())
    with pytest.raises(TypeError, match="trains 2 parameters that `model` does not have"):
        step.backward(body, loss_fn)
    both = nn.ModuleList([body, head])
    (step, *_) = OomGuard(loader_of())
    step.backward(both, loss_fn)


def test_a_part_of_what_ranks_train_together_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        inner = nn.Linear(2, 2)
        model = nn.Sequential(nn.parallel.DistributedDataParallel(inner))
        with pytest.raises(TypeError, match="Wrap the whole model by DDP"):
            kind_of(model)
        with pytest.raises(TypeError, match="Pass the model as it is wrapped"):
            check_is_whole(inner, among_ranks=True)
        check_is_whole(inner, among_ranks=False)
        with pytest.warns(UserWarning, match="weights differ after the first step"):
            check_is_whole(nn.Linear(2, 2), among_ranks=True)
    finally:
        torch.distributed.destroy_process_group()


def test_a_collate_function_that_fails_is_not_taken_for_a_lack_of_memory():
    def collate(samples):
        raise SampleError("bad")

    with pytest.raises(SampleError):
        epoch(loader_of(collate_fn=collate), FailingModel(never))
