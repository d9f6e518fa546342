"""Groups of samples whose lengths are known before they are read."""

import os
import random
import re
import threading
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from damaged_states import resealed
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from sampling import fewer

from odb_nodes import (
    GroupCollator,
    Loader,
    Sample,
    SampleError,
    Skipped,
    StateError,
    TokenBudget,
    WorkerError,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.nodes.planned_groups import PlannedGroups
from odb_nodes.core.nodes.whole_batch import GroupMaker, WholeBatch, whole_batch_of
from odb_nodes.core.planning.known_lengths import plan_known
from odb_nodes.core.sample import data_of
from odb_nodes.core.sample_block import SampleBlock
from odb_nodes.testing import assert_resumes_exactly

SIZE = 60
LENGTHS = np.random.default_rng(2).integers(1, 40, SIZE).tolist()


class Process:
    """Makes samples of other lengths, skipped ones and errors, by their numbers."""

    def __init__(self, lengths=LENGTHS, *, others=(), skips=(), fails=(), draws=False):
        self.lengths, self.others, self.draws = lengths, dict(others), draws
        self.skips, self.fails = {*skips}, {*fails}
        self.calls = []

    def __call__(self, number):
        self.calls.append(number)
        if number in self.fails:
            raise ValueError(f"no file for {number}")
        if number in self.skips:
            return Skipped("missing", f"no file for {number}.")
        tokens = self.others.get(number, self.lengths[number])
        data = {"input_ids": [1] * tokens, "id": number}
        if self.draws:
            data["drawn"] = (random.random(), float(torch.rand(())), float(np.random.rand()))
        return Sample(data, tokens, max(0, tokens - 1))


def nodes_of(process=None, budget=100, lengths=LENGTHS, **options):
    """A node, which is not reset."""
    arguments = {"rank": 0, "world_size": 1, **options}
    return PlannedGroups(lengths, process or Process(lengths), budget, **arguments)


def planned(*arguments, **options):
    node = nodes_of(*arguments, **options)
    node.reset(None)
    return node


def ids(groups):
    return [[sample.data["id"] for sample in group] for group in groups]


def epoch_of(node, epoch=None):
    """The samples of the groups of the next epoch."""
    if epoch is not None:
        node.set_epoch(epoch)
    node.reset(None)
    return ids(node)


def numbers(groups):
    return sorted(sum(groups, []))


def quiet(node):
    """The groups of an epoch, without warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ids(node)


def with_lengths(*changes):
    """Processing whose samples differ from the known lengths: (number, tokens) of each."""
    return Process(others=changes)


# --- epochs ---------------------------------------------------------------------------------------


def test_an_epoch_has_each_sample_once_in_the_groups_of_the_plan():
    node = nodes_of()
    first, second = epoch_of(node), epoch_of(node)
    assert numbers(first) == numbers(second) == [*range(SIZE)]
    assert first != second
    assert epoch_of(node, epoch=0) == first
    assert epoch_of(nodes_of(seed=1)) != first
    for group in first:
        assert TokenBudget(100).cost([LENGTHS[number] for number in group]) <= 100
    assert len(node) == SIZE


def test_the_groups_are_those_of_the_plan_of_all_ranks():
    """A rank has its groups in the steps of the plan, which is the same on every rank."""
    plan = plan_known(np.arange(SIZE), np.array(LENGTHS), TokenBudget(100), world_size=3, window=9)
    by_rank = [
        epoch_of(nodes_of(shuffle=False, window=9, rank=rank, world_size=3)) for rank in range(3)
    ]
    assert numbers(sum(by_rank, [])) == [*range(SIZE)]
    cut = [[plan.group(step, rank).tolist() for step in range(len(plan))] for rank in range(3)]
    by_content = [sorted(map(str, groups)) for groups in (sum(by_rank, []), sum(cut, []))]
    assert by_content[0] == by_content[1]
    assert len({*map(len, by_rank)}) == 1
    assert sum(len(nodes_of(rank=rank, world_size=7)) for rank in range(7)) == SIZE


def test_all_numbers_tell_how_far_an_epoch_is():
    node, left = planned(), [SIZE]
    for group in node:
        left.append(node.remaining_samples)
        assert left[-1] == left[-2] - len(group)
    assert left[-1] == 0
    assert node.replayed_samples == 0


# --- samples that are left out --------------------------------------------------------------------


def left_out_of(node):
    return sorted((sample.key, sample.reason) for sample in node.take_left_out())


def test_a_skipped_sample_is_counted_and_its_group_goes_on_without_it():
    node = planned(Process(skips=[7]))
    shown = (
        r"sample 7 \(key 7\) is skipped .*no file for 7.*: see `skipped_samples` of the loader, or"
    )
    with pytest.warns(UserWarning, match=shown):
        groups = ids(node)
    assert numbers(groups) == [number for number in range(SIZE) if number != 7]
    plain = epoch_of(nodes_of())
    assert groups == [[number for number in group if number != 7] for group in plain]
    assert node.skipped_samples == {"missing": 1}
    assert left_out_of(node) == [(7, "missing")]
    assert left_out_of(node) == []


def test_a_group_all_of_whose_samples_are_skipped_is_no_group():
    plain = epoch_of(nodes_of())
    gone = max(plain[1:-1], key=len)
    node = planned(Process(skips=gone))
    assert quiet(node) == [group for group in plain if group != gone]
    assert node.skipped_samples == {"missing": len(gone)}
    assert left_out_of(node) == [(number, "missing") for number in sorted(gone)]


def test_an_epoch_all_of_whose_samples_are_skipped_is_an_error():
    node = planned(Process(skips=range(SIZE)))
    with warnings.catch_warnings(), pytest.raises(SampleError, match="all 60 samples .*60. skip"):
        warnings.simplefilter("ignore")
        next(node)


def test_excluded_samples_are_not_even_read():
    process = Process()
    node = planned(process, exclude=[3, 4, 4, 59])
    assert numbers(ids(node)) == [number for number in range(SIZE) if number not in (3, 4, 59)]
    assert node.excluded_samples == 3
    assert left_out_of(node) == [(3, "excluded"), (4, "excluded"), (59, "excluded")]
    assert not {3, 4, 59} & {*process.calls}
    epoch_of(node)
    assert node.excluded_samples == 3
    shares = [planned(exclude=range(9), rank=rank, world_size=4) for rank in range(4)]
    assert sum(node.excluded_samples for node in shares) == 9
    keys = [sample.key for node in shares for sample in node.take_left_out()]
    assert sorted(keys) == [*range(9)]
    assert [*range(9, SIZE)] == numbers(sum(map(ids, shares), []))


@pytest.mark.parametrize("has_items", [True, False])
def test_an_oversize_sample_is_alone(has_items):
    others = {7: 130, 9: 101}
    lengths = [others.get(number, length) for number, length in enumerate(LENGTHS)]
    node = planned(Process(lengths), lengths=lengths if has_items else LENGTHS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        groups = ids(node)
    first, summary = [str(warning.message) for warning in caught]
    assert re.match(r"sample [79] \(key [79]\), with 1.* alone in its group", first)
    assert summary.startswith("of the 60 samples read for this epoch, 2 exceed the budget")
    assert numbers(groups) == [*range(SIZE)]
    assert [7] in groups and [9] in groups
    assert node.oversize_samples == 2 and node.dropped_samples == 0


@pytest.mark.parametrize("has_items", [True, False])
def test_an_oversize_sample_may_be_dropped(has_items):
    lengths = [130 if number == 7 else length for number, length in enumerate(LENGTHS)]
    node = planned(
        Process(lengths), TokenBudget(100, oversize="drop"), lengths if has_items else LENGTHS
    )
    with pytest.warns(UserWarning, match="It is dropped.*`oversize_samples` of the loader, or"):
        groups = ids(node)
    assert numbers(groups) == [number for number in range(SIZE) if number != 7]
    assert (node.oversize_samples, node.dropped_samples) == (1, 1)
    assert left_out_of(node) == [(7, "dropped")]
    only = planned(Process([130]), TokenBudget(100, oversize="drop"), [130])
    with pytest.warns(UserWarning), pytest.raises(SampleError, match="all 1 samples .* exceed"):
        next(only)


@pytest.mark.parametrize("has_items", [True, False])
def test_an_oversize_sample_may_be_an_error(has_items):
    lengths = [130 if number == 7 else length for number, length in enumerate(LENGTHS)]
    budget, known_lengths = TokenBudget(100, oversize="error"), lengths if has_items else LENGTHS
    node, groups = planned(Process(lengths), budget, known_lengths), []
    with pytest.raises(SampleError, match=r"^sample 7 \(key 7\), with 130 tokens"):
        groups += map(list, node)
    before = node.state_dict()
    with pytest.raises(SampleError, match="sample 7 "):
        next(node)
    # Nothing is counted twice, and nothing is lost.
    node.reset(before)
    with pytest.raises(SampleError, match="sample 7 "):
        next(node)
    assert node.state_dict() == before


# --- errors ---------------------------------------------------------------------------------------


def test_an_error_in_processing_names_the_sample_and_nothing_is_lost():
    process = Process(fails=[7])
    node, groups = planned(process), []

    def take_all():
        for group in node:
            groups.append([sample.data["id"] for sample in group])

    with pytest.raises(SampleError, match=r"item 7, sample 7 in epoch 0, .*no file for 7"):
        take_all()
    process.fails.clear()
    with pytest.raises(SampleError, match="item 7, "):  # until a reset
        next(node)
    state = node.state_dict()
    node.reset(state)
    take_all()
    assert groups == epoch_of(nodes_of())


def test_a_state_after_an_error_counts_nothing_twice():
    """Also where the group that raised has samples that are skipped or do not fit."""
    plain = epoch_of(nodes_of())
    first, last = plain[2][0], plain[2][-1]
    process = Process(skips=[first], others={last: 150})
    node = planned(process, TokenBudget(100, oversize="error"))
    states = [node.state_dict()]
    with warnings.catch_warnings(), pytest.raises(SampleError, match="150 tokens"):
        warnings.simplefilter("ignore")
        for _ in node:
            states.append(node.state_dict())
    assert node.state_dict() == states[-1]
    process.others.clear()
    node.reset(node.state_dict())
    rest = quiet(node)
    assert numbers(rest + plain[:2]) == [number for number in range(SIZE) if number != first]
    assert node.skipped_samples == {"missing": 1}


def batches_of(node, collate=None, **options):
    return Loader(GroupCollator(node, collate, rank=0, **options))


def keep_ids(samples):
    return {"id": torch.tensor([sample["id"] for sample in samples])}


class Draws:
    """A collate function that draws from all global generators, and one of its own."""

    def __init__(self):
        self.own = random.Random(3)

    def __call__(self, samples):
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(())), self.own.random()]
        return {**keep_ids(samples), "drawn": torch.tensor(drawn, dtype=torch.float64)}


class FailsOnce:
    """A collate function that fails for a sample until it is mended."""

    def __init__(self, number):
        self.number, self.calls = number, 0

    def __call__(self, samples):
        self.calls += 1
        batch = keep_ids(samples)
        if self.number in batch["id"]:
            raise ValueError("bad batch")
        return batch


def values_of(loader):
    """The batches of an epoch, as plain data."""
    values = []
    for batch in loader:
        info = pop_step_info(batch)
        values.append((info.step, {name: value.tolist() for name, value in batch.items()}))
    return values


def test_an_error_in_collating_names_the_step_and_its_group_is_kept():
    collate = FailsOnce(7)
    loader, ids_of_batches = batches_of(nodes_of(collate=collate), collate), []
    step = next(number for number, group in enumerate(epoch_of(nodes_of())) if 7 in group)
    with pytest.raises(SampleError, match=rf"collate_fn.* at step {step} of epoch 0") as caught:
        for batch in loader:
            ids_of_batches.append(batch["id"].tolist())
    assert "bad batch" in str(caught.value)
    collate.number = -1
    for batch in loader:
        ids_of_batches.append(batch["id"].tolist())
    assert ids_of_batches == epoch_of(nodes_of())


@pytest.mark.parametrize("collate", [Draws(), keep_ids])
def test_batches_are_made_by_who_processes_the_samples_or_in_the_trainer_the_same(collate):
    by_workers, here = nodes_of(collate=collate), nodes_of()
    assert values_of(batches_of(by_workers, collate)) == values_of(batches_of(here, collate))


def test_a_batch_that_is_made_again_draws_the_same_numbers():
    collate = Draws()
    loader = batches_of(nodes_of(collate=collate), collate)
    collator = loader.root
    collator.keep_samples()
    for epoch in range(2):
        for batch in loader:
            info = pop_step_info(batch)
            samples = collator.take_samples(info)
            assert info.epoch == epoch
            assert collator.collate(samples, info)["drawn"].tolist() == batch["drawn"].tolist()
            if len(samples) > 1:
                parts = [collator.collate(samples[:1], info, part)["drawn"] for part in (1, 2)]
                assert parts[0].tolist() != parts[1].tolist() != batch["drawn"].tolist()


class WithStep:
    """A collate function that takes the step."""

    def __call__(self, samples):
        raise AssertionError("`collate_step` is there")

    def collate_step(self, samples, info):
        return {**keep_ids(samples), "step": torch.tensor(info.step)}


def test_a_function_that_takes_the_step_is_called_where_the_step_is_known():
    collate = WithStep()
    batches = values_of(batches_of(nodes_of(collate=collate), collate))
    assert [batch["id"] for _, batch in batches] == epoch_of(nodes_of())
    assert [batch["step"] for _, batch in batches] == [step for step, _ in batches]


# --- lengths that differ from the known lengths ---------------------------------------------------


def test_a_sample_that_does_not_fit_comes_at_the_end_of_the_epoch():
    plain = epoch_of(nodes_of())
    for longer in next(group for group in plain if len(group) > 2):
        node = planned(with_lengths((longer, 90)))
        groups = ids(node)
        without = [[number for number in group if number != longer] for group in plain]
        assert groups == [*without, [longer]]
        assert node.skipped_samples == {} and node.oversize_samples == 0


def test_shorter_samples_leave_the_groups_as_they_are():
    assert epoch_of(nodes_of(Process([1] * SIZE))) == epoch_of(nodes_of())


changed_lengths = st.lists(st.tuples(st.integers(0, 39), st.integers(1, 130)), max_size=40)
fields = st.sampled_from(
    [
        {},
        {"shapes": 6},
        {"row_sizes": "friendly"},
        {"row_sizes": "even"},
        {"max_samples": 3},
        {"layout": "packed"},
        {"layout": "packed", "attention_tokens": 90, "pad_to_multiple_of": 8},
    ]
)


@given(
    changes=changed_lengths,
    fields=fields,
    oversize=st.sampled_from(["alone", "drop"]),
    skips=st.sets(st.integers(0, 39), max_size=5),
    options=st.fixed_dictionaries(
        {
            "window": st.sampled_from([None, 7]),
            "largest_first": st.sampled_from([0, 2]),
            "shuffle": st.booleans(),
        }
    ),
    world_size=st.sampled_from([1, 3]),
)
@pytest.mark.filterwarnings("ignore:.*(exceed|skipped).*")
@fewer(4)
def test_wrong_lengths_break_no_budget_and_lose_no_sample(
    changes, fields, oversize, skips, options, world_size
):
    budget, lengths = TokenBudget(100, oversize=oversize, **fields), LENGTHS[:40]
    process = Process(lengths, others=changes, skips=skips)
    shares, left_out = [], []
    for rank in range(world_size):
        node = planned(process, budget, lengths, rank=rank, world_size=world_size, **options)
        shares.append([*node])
        left_out += [sample.key for sample in node.take_left_out()]
    groups = sum(shares, [])
    assert sorted([*sum(ids(groups), []), *left_out]) == [*range(40)]
    for group in groups:
        tokens = group.lengths
        assert len(group) == 1 or budget.cost(tokens) <= budget.tokens
        assert len(group) <= (budget.max_samples or len(group))
        if oversize == "drop":
            assert not any(map(budget.is_oversize, tokens))


@given(
    changes=changed_lengths,
    fields=fields,
    oversize=st.sampled_from(["alone", "drop"]),
    skips=st.sets(st.integers(0, 39), max_size=5),
    window=st.sampled_from([None, 7]),
    rank=st.sampled_from([0, 1]),
)
@pytest.mark.filterwarnings("ignore:.*(exceed|skipped).*")
@fewer(25)
def test_planned_groups_resume_exactly_for_any_lengths(
    changes, fields, oversize, skips, window, rank
):
    budget, lengths = TokenBudget(100, oversize=oversize, **fields), LENGTHS[:40]

    def make():
        process = Process(lengths, others=changes, skips=skips, draws=True)
        return nodes_of(process, budget, lengths, window=window, rank=rank, world_size=2)

    assert_resumes_exactly(make, horizon=8, every=2, chain=1)


def many(wrong, size=1200, world_size=1, rank=0):
    """A node of many samples; `wrong` of each 100 are far longer than their known lengths."""
    lengths = np.random.default_rng(0).integers(1, 40, size).tolist()
    process = Process([90 if n % 100 < wrong else length for n, length in enumerate(lengths)])
    return planned(process, 400, lengths, rank=rank, world_size=world_size)


def test_lengths_of_which_many_are_wrong_are_refused_by_name():
    node, count = many(90), 0
    with pytest.raises(SampleError, match=r"`lengths` must be .* did not fit .* in place of"):
        for group in node:
            count += len(group)
    seen = node.state_dict()["seen"]
    assert seen < 1024 + 40  # as soon as enough are seen, and no group of it is lost
    with pytest.raises(SampleError, match="save-lengths"):
        next(node)
    state = node.state_dict()
    node.reset(state)
    with pytest.raises(SampleError, match="of the first"):
        next(node)
    assert node.state_dict() == state


def test_processing_that_is_longer_each_time_is_an_error_that_names_it():
    calls = dict.fromkeys(range(SIZE), 40)

    def grows(number):
        calls[number] += 10
        return Sample({"id": number}, calls[number], 1)

    with pytest.raises(SampleError, match=r"had 50 tokens when .* but has 60 now.*determinis"):
        list(planned(grows))


# --- states ---------------------------------------------------------------------------------------


def test_a_state_says_how_many_groups_are_out_and_what_comes_later():
    group = max(epoch_of(nodes_of()), key=len)
    node = planned(with_lengths((group[-1], 90)))
    sizes = []
    for taken, _ in enumerate(node, 1):
        state = node.state_dict()
        assert state["taken"] <= taken
        sizes.append(len(state["later"] or b""))
    assert {*sizes} == {0, 32} and sizes[-1] == 0
    assert (state["seen"], state["moved"]) == (SIZE, 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_state_after_the_last_group_is_at_the_end_also_of_a_rank_without_a_last_step(rank):
    """The last window has a sample for one of the ranks."""
    known_lengths, options = [10] * 9, {"rank": rank, "world_size": 2, "window": 4}
    process = with_lengths(*((number, 60) for number in range(9)))
    node, ends = planned(process, lengths=known_lengths, **options), []
    for _ in node:
        ends.append(node.state_dict()["is_at_end"])
    assert len(ends) > 2 and ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": [1, *LENGTHS[1:]]}, "lengths"),
        ({"budget": 101}, "budget.tokens"),
        ({"window": 9}, "window"),
        ({"seed": 4}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"largest_first": 1}, "largest_first"),
        ({"rank": 1, "world_size": 2}, "rank"),
    ],
)
def test_a_state_of_another_configuration_is_refused_by_name(change, words):
    node = planned()
    next(node)
    with pytest.raises(StateError, match=words):
        nodes_of(**change).reset(node.state_dict())


@pytest.mark.parametrize(
    "changes",
    [
        {"taken": -1},
        {"taken": 61},
        {"later": b"\1"},
        {"later": np.array([[60], [9], [0]], "<i8").tobytes()},
        {"later": np.array([[-1], [9], [0]], "<i8").tobytes()},
    ],
)
def test_a_state_that_no_epoch_has_is_refused(changes):
    """Its digest is right: as of a fault of the writer, not of the disk."""
    node = planned()
    next(node)
    with pytest.raises(StateError, match="PlannedGroups is damaged"):
        node.reset(resealed({**node.state_dict(), **changes}))


# --- what changes within an epoch -----------------------------------------------------------------


THREADS = WorkerOptions(num_workers=2, method="thread", timeout_s=60)  # which run ahead


def lowered(node, taken, tokens):
    """The groups before the budget is lower, and after."""
    before = ids([next(node) for _ in range(taken)])
    node.lower_tokens(tokens)
    return before, node


@pytest.mark.parametrize(("rank", "taken", "workers"), [(0, 3, None), (1, 0, THREADS)])
def test_a_lower_budget_regroups_what_a_rank_has_left(rank, taken, workers):
    options = {"rank": rank, "world_size": 2, "workers": workers}
    own = numbers(epoch_of(nodes_of(**options)))
    before, node = lowered(planned(with_lengths((5, 70), (6, 50)), **options), taken, 60)
    rest = [*node]
    assert numbers(before + ids(rest)) == own
    for group in rest:
        assert len(group) == 1 or TokenBudget(60).cost(group.lengths) <= 60
    node.reset(None)
    assert all(len(group) == 1 or TokenBudget(60).cost(group.lengths) <= 60 for group in node)
    node.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lower_budget_is_resumed_exactly(rank):
    def make():
        return planned(with_lengths((5, 70), (6, 50)), rank=rank, world_size=2)

    _, node = lowered(make(), 3, 60)
    states, groups = [node.state_dict()], []
    for group in node:
        groups += ids([group])
        states.append(node.state_dict())
    for taken, state in enumerate(states):
        other = make()
        other.reset(state)
        assert ids(other) == groups[taken:]


@pytest.mark.parametrize("workers", [THREADS])
def test_a_budget_that_is_lowered_twice_at_the_end_of_an_epoch_loses_nothing(workers):
    node, groups = (
        planned(with_lengths(*((number, 40) for number in range(12))), workers=workers),
        [],
    )
    while not node.state_dict()["later"] or node.state_dict()["taken"] < len(epoch_of(nodes_of())):
        groups.append(next(node))
    for tokens in (90, 60):
        node.lower_tokens(tokens)
        groups.append(next(node))
        assert TokenBudget(tokens).cost(groups[-1].lengths) <= tokens
    rest = [*node]
    assert all(TokenBudget(60).cost(group.lengths) <= 60 for group in rest)
    assert numbers(ids([*groups, *rest])) == [*range(SIZE)]
    node.close()


@pytest.mark.parametrize(("more", "workers"), [(1, THREADS), (3, None)])
def test_samples_that_are_put_back_come_again_also_among_the_last(more, workers):
    node, groups = (
        planned(with_lengths(*((number, 60) for number in range(8))), workers=workers),
        [],
    )
    steps = len(epoch_of(nodes_of()))
    while len(groups) < steps + more:  # The last are longer than their known lengths.
        groups.append(next(node))
    for _ in range(2):
        node.put_back(groups.pop())
    state = node.state_dict()
    rest = ids(node)
    assert numbers(ids(groups) + rest) == [*range(SIZE)]
    node.reset(state)
    assert ids(node) == rest
    node.close()


@pytest.mark.filterwarnings("ignore:.*exceed")
def test_an_oversize_sample_that_is_put_back_is_counted_once():
    node, groups = planned(Process(others={7: 130})), []
    while not node.oversize_samples:
        groups.append(next(node))
    node.put_back(groups.pop())
    for _ in range(2):  # also after a resume
        state = node.state_dict()
        assert numbers(ids(groups) + ids(node)) == [*range(SIZE)]
        assert node.oversize_samples == 1
        node.reset(state)


@pytest.mark.parametrize("rank", [0, 1])
def test_more_samples_may_be_excluded_within_an_epoch(rank):
    options = {"rank": rank, "world_size": 2}
    node = planned(**options)
    before = ids([next(node) for _ in range(3)])
    rest = ids(nodes_after(node, **options))
    gone = [rest[0][0], rest[2][-1], before[0][0]]
    other = nodes_after(node, exclude=gone, **options)
    after = ids(other)
    assert numbers(after) == [number for number in numbers(rest) if number not in gone]
    assert other.excluded_samples == 2
    assert left_out_of(other) == sorted((number, "excluded") for number in gone[:2])


def nodes_after(node, **options):
    """Another node, which goes on where one stands."""
    other = nodes_of(**options)
    other.reset(node.state_dict())
    return other


# --- who may run it -------------------------------------------------------------------------------

test_bad_arguments = refuses(
    [
        ({"lengths": []}, ValueError, "length"),
        ({"lengths": [0, 1]}, ValueError, "1"),
        ({"lengths": [[1, 2]]}, (TypeError, ValueError), "lengths"),
        ({"budget": 0}, ValueError, "budget"),
        ({"window": 0}, ValueError, "`window`"),
        ({"shuffle": 1}, TypeError, "`shuffle`"),
        ({"seed": "x"}, TypeError, "`seed`"),
        ({"largest_first": -1}, ValueError, "`largest_first`"),
        ({"process": 5}, TypeError, "`process_fn`"),
        ({"rank": 3, "world_size": 2}, ValueError, "rank"),
    ],
    call=lambda options: nodes_of(**options),
)


def test_closing_ends_the_epoch_and_a_reset_begins_anew():
    node = planned()
    next(node)
    node.close()
    assert not node.has_workers and node.worker_pids == []
    assert numbers(epoch_of(node)) == [*range(SIZE)]


WORKERS = WorkerOptions(num_workers=2, start_method="fork", timeout_s=60)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["process", "thread"])
def test_workers_make_the_same_groups_and_batches(method):
    collate = Draws()
    workers = WORKERS if method == "process" else WorkerOptions(num_workers=2, method="thread")

    def batches(**options):
        process = Process(draws=True, skips=[5], others={7: 60, 8: 120})
        node = nodes_of(process, collate=collate, **options)
        with batches_of(node, collate) as loader, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [values_of(loader) for _ in range(2)]

    assert batches(workers=workers) == batches()


@pytest.mark.slow
def test_workers_that_cannot_send_a_batch_send_the_samples():
    def locked(samples):
        return {**keep_ids(samples), "lock": threading.Lock()}

    node = nodes_of(collate=locked, workers=WORKERS)
    with batches_of(node, locked) as loader:
        ids_of_batches = [batch["id"].tolist() for batch in loader]
    assert ids_of_batches == epoch_of(nodes_of())


@pytest.mark.slow
def test_workers_resume_after_an_error_and_a_death(tmp_path):
    plain, mended = epoch_of(nodes_of()), tmp_path / "mended"

    def process(how, number):
        if number == 7 and not mended.exists():
            if how == "dies":
                os._exit(3)
            raise ValueError("bad image")
        return Process()(number)

    for how, error, words in [
        ("fails", SampleError, "item 7, .*bad image"),
        ("dies", WorkerError, "exit code 3"),
    ]:
        mended.unlink(missing_ok=True)
        node, groups = planned(partial(process, how), workers=WORKERS), []
        with pytest.raises(error, match=words):
            for group in node:
                groups.append([sample.data["id"] for sample in group])
        mended.touch()
        node.reset(node.state_dict())
        groups += ids(node)
        node.close()
        assert groups == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "name"),
    [("process", "collate_fn"), ("thread", "process_fn")],
)
def test_an_error_names_the_function_that_hangs(method, name):
    ends = threading.Event()

    def hangs(*_):
        ends.wait(600)

    process, collate = (None, hangs) if name == "collate_fn" else (hangs, keep_ids)
    workers = WorkerOptions(num_workers=1, method=method, timeout_s=2.0)
    node = planned(process, collate=collate, workers=workers)
    with pytest.raises(WorkerError, match=f"in a group .*: `{name}` hangs, or needs"):
        next(node)
    ends.set()  # A thread that hangs has the random numbers.
    node.close()


def large(number):
    return Sample({"input_ids": np.zeros(50_000, np.int64), "id": number}, LENGTHS[number], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 4),
        ({"in_flight_bytes": 1_000_000}, 2),  # one for each worker
        (
            {"in_flight_samples": 1_000},
            # All that remain once the fourth is out: each call sends up to four.
            len(plan_known(np.arange(SIZE), np.array(LENGTHS), TokenBudget(100))) - 4,
        ),
    ],
)
def test_groups_in_flight_obey_the_options(options, groups):
    node = planned(large, workers=WorkerOptions(num_workers=2, start_method="fork", **options))
    ahead = []
    while next(node, None) is not None:
        ahead.append(len(node._in_flight) + 1)  # with the group that was taken
    node.close()
    assert max(ahead) == groups


# --- whole batches --------------------------------------------------------------------------------


def made(results, budget=100, collate=keep_ids):
    return GroupMaker(collate)(results, 5, TokenBudget.of(budget))


def sample_of(number, tokens=10, patches=0):
    process = planned(Process([tokens] * (number + 1)), 200, [tokens] * (number + 1))
    (sample,) = [
        candidate for group in process for candidate in group if candidate.data["id"] == number
    ]
    return sample._replace(patches=patches)


@pytest.mark.parametrize(
    ("tokens", "budget", "kept"),
    [
        ([10, 20, 30], TokenBudget(100), [0, 1, 2]),
        ([60, 10, 20], TokenBudget(100), [1, 2]),
        ([10, 60, 20], TokenBudget(100), [0, 2]),
        ([150, 1], TokenBudget(100), [1]),
        ([150, 140], TokenBudget(100), [1]),
        ([10] * 5, TokenBudget(100, max_samples=2), [0, 1]),
        ([30, 10, 40, 20], TokenBudget(60, layout="packed"), [0, 1, 3]),
        ([10] * 7, TokenBudget(100, row_sizes="even"), [*range(7)]),  # as it was planned
        ([10] * 7 + [20], TokenBudget(100, row_sizes="even"), [*range(6)]),
        ([20, *[10] * 7], TokenBudget(100, row_sizes="friendly"), [*range(1, 7)]),
        ([50, 30, 30], TokenBudget(100, shapes=4), [1, 2]),
    ],
)
def test_a_group_keeps_the_shortest_samples_that_its_budget_holds(tokens, budget, kept):
    samples = [sample_of(number, length) for number, length in enumerate(tokens)]
    group = made(samples, budget)
    assert whole_batch_of(group.group)["id"].tolist() == kept
    assert [sample.key for sample in group.later] == [
        number for number in range(len(tokens)) if number not in kept
    ]
    assert whole_batch_of(group.group) is None  # It is out.


def test_a_group_keeps_what_its_patches_hold():
    samples = [sample_of(number, 10, patches=4) for number in range(3)]
    assert len(made(samples, TokenBudget(100, max_patches=8)).group) == 2


def test_a_group_without_samples_has_no_batch():
    group = made([Skipped("missing", "no file.")])
    assert len(group.group) == 0 and len(group.skipped) == 1
    assert whole_batch_of(group.group) is None


def test_a_part_of_a_group_and_another_order_have_no_whole_batch():
    for rows in ([0, 1], [1, 0, 2], [2, 1, 0]):
        group = made([sample_of(number) for number in range(3)]).group
        assert whole_batch_of(group.take(rows)) is None
    group = made([sample_of(number) for number in range(3)]).group
    other = made([sample_of(number) for number in range(3)]).group
    assert whole_batch_of(SampleBlock.joined([group, other])) is None


def test_data_of_a_whole_batch_is_made_again_on_access():
    node = planned(process := Process(draws=True), collate=keep_ids)
    group, plain = next(node), next(planned(Process(draws=True)))
    (holder,) = group.holders.values()
    assert isinstance(holder, WholeBatch) and len(holder) == len(group)
    count = len(process.calls)
    assert [sample.tokens for sample in group] == [sample.tokens for sample in plain]
    assert len(process.calls) == count
    assert [data_of(sample) for sample in group] == [sample.data for sample in plain]
    assert len(process.calls) == count + len(group)
    assert [data_of(sample)["id"] for sample in group.take([1])] == [plain[1].data["id"]]
    assert len(process.calls) == count + len(group)  # once
