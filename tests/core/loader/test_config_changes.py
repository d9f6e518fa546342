"""Each field that decides the groups is refused when it changes between save and load."""

import warnings
from functools import partial

import elastic
import pytest
from graphs import Dataset, augment, process, sampler
from torchdata.nodes import Mapper

from odb_nodes import (
    LengthObserver,
    Loader,
    Observation,
    ODBDataLoader,
    PackedCollate,
    ParallelProcessor,
    ShardedSampler,
    StateError,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
)
from odb_nodes.collate import RowsObserve
from odb_nodes.core.sources import IterableSource


def by_ids(item):
    return Observation(len(item["input_ids"]), task=f"task {item['id'] % 3}")


def by_id(item):
    return 1 + item["id"]


def bucketed(window=24, state="replay", observe=by_ids, options=None, **fields):
    observed = LengthObserver(Mapper(sampler(), process), observe)
    budget = TokenBudget(**{"tokens": 256, "oversize": "alone", **fields})
    return WindowBucketer(observed, budget, window, state, **options or {})


def sampled(**fields):
    base = {"size": 120, "shuffle": True, "seed": 0, "rank": 0, "world_size": 2}
    return ShardedSampler(**base | fields)


def processed(process_fn=augment, **fields):
    return ParallelProcessor(
        sampler(), process_fn, **{"seed": 0, "rank": 0, "world_size": 2} | fields
    )


def iterated(**fields):
    return IterableSource(list(range(50)), **{"rank": 0, "world_size": 2} | fields)


CHANGES = [
    (bucketed, "budget.tokens", {"tokens": 255}),
    (bucketed, "budget.max_samples", {"max_samples": 7}),
    (bucketed, "budget.max_patches", {"max_patches": 7}),
    (bucketed, "budget.pad_to_multiple_of", {"pad_to_multiple_of": 8}),
    (bucketed, "budget.layout", {"layout": "packed"}),
    (bucketed, "budget.oversize", {"oversize": "drop"}),
    (bucketed, "budget.shapes", {"shapes": 60}),
    (bucketed, "budget.attention_tokens", {"attention_tokens": 64}),
    (bucketed, "budget.row_sizes", {"row_sizes": "even"}),
    (bucketed, "largest_first", {"options": {"largest_first": 8}}),
    (bucketed, "diversity", {"options": {"diversity": 0.5}}),
    (bucketed, "window", {"window": 25}),
    (bucketed, "window_start", {"options": {"window_start": "early"}}),
    (bucketed, "state", {"state": "payload"}),
    (bucketed, "observe", {"observe": by_id}),
    (sampled, "size", {"size": 121}),
    (sampled, "shuffle", {"shuffle": False}),
    (sampled, "seed", {"seed": 1}),
    (sampled, "rank", {"rank": 1}),
    (sampled, "world_size", {"world_size": 3}),
    (processed, "process_fn", {"process_fn": process}),
    (processed, "seed", {"seed": 1}),
    (processed, "rank", {"rank": 1}),
    (processed, "world_size", {"world_size": 3}),
    (iterated, "rank", {"rank": 1}),
    (iterated, "world_size", {"world_size": 3}),
]


def saved(node, steps=3):
    loader = Loader(node)
    it = iter(loader)
    for _ in range(steps):
        next(it)
    return loader.state_dict()


@pytest.mark.parametrize(("make", "field", "change"), CHANGES)
def test_a_changed_field_is_refused_by_name_and_warned_of_if_it_is_meant(make, field, change):
    state, loader = saved(make()), Loader(make(**change))
    loader.load_state_dict(state)
    for _ in range(2):  # the state stays loaded: no fresh epoch by accident
        with pytest.raises(StateError, match=f"`{field}` was .* when saved, but is .*strict=False"):
            next(iter(loader))
    if field in ("observe", "process_fn"):  # gives other lengths, which no replay can take
        return
    loader.load_state_dict(state, strict=False)
    with pytest.warns(UserWarning, match=f"`{field}` was "):
        next(iter(loader))
    loader.load_state_dict(state)  # the knowing change holds for one load only
    with pytest.raises(StateError):
        next(iter(loader))


def test_every_field_of_every_configuration_is_in_the_table():
    for make in (bucketed, sampled, processed, iterated):
        tested = {field for other, field, _ in CHANGES if other is make}
        assert {*make().fingerprint()} <= tested


def crop(sample, tokens=40, side="left", **_):
    return {**sample, "input_ids": sample["input_ids"][:tokens]}


NAMED = [
    ({}, {"observe": by_id}, r"'sample\(\)' when saved, but is 'sample\(observe=by_id\)'"),
    ({"process_fn": crop}, {}, r"'sample\(process_fn=crop\)' when saved, but is 'sample\(\)'"),
    (
        {"process_fn": partial(crop, tokens=40)},
        {"process_fn": partial(crop, side="right", tokens=30)},
        r"crop\(tokens=40\)\)' when saved, but is .*crop\(side='right', tokens=30\)\)",
    ),
    (
        {},
        {"token_budget": TokenBudget(256, layout="packed"), "accumulate": 2, "seed": 1},
        "RankAligner: `accumulate` was .*WindowBucketer: `budget.layout` .*Sampler: `seed`",
    ),
    ({"token_budget": 300, "window": 30}, {}, "`budget.tokens` was 300 .*; `window` was 30 "),
    (
        {"observe": RowsObserve()},
        {"observe": RowsObserve(by_id)},
        r"'sample\(observe=RowsObserve\)' when saved, but is .*observe=RowsObserve\(by_id\)",
    ),
    ({"observe": RowsObserve(layout="padded")}, {"observe": RowsObserve()}, r"layout=\"padded\""),
]


def loader_of(**options):
    return ODBDataLoader(Dataset(), **{"token_budget": 256, "window": 24, "seed": 0} | options)


@pytest.mark.parametrize(("before", "after", "message"), NAMED)
def test_changes_of_several_nodes_and_of_functions_are_named(before, after, message):
    run, loader = loader_of(**before), loader_of(**after)
    next(iter(run))
    loader.load_state_dict(run.state_dict())
    with pytest.raises(StateError, match=message):
        next(iter(loader))


@pytest.mark.parametrize("multiple", [1, 8])
def test_samples_that_are_filled_up_to_another_multiple_are_named_as_the_change(multiple):
    def loader(multiple):
        budget = TokenBudget(256, layout="packed")
        collate = PackedCollate.of(budget, sample_multiple=multiple)
        data = [{"input_ids": [1] * (n % 30 + 2)} for n in range(90)]
        return ODBDataLoader(data, token_budget=budget, collate_fn=collate, window=24)

    before, after = loader(4), loader(multiple)
    next(iter(before))
    after.load_state_dict(before.state_dict())
    with pytest.raises(StateError, match="GroupCollator: `sample_multiple` was 4 when saved, but"):
        iter(after)


SMALLER = [
    (bucketed, {"tokens": 200}, False, "load with `change_budget=True`"),
    (bucketed, {"tokens": 300}, False, "with `strict=False`"),
    (bucketed, {"tokens": 300}, True, "With `change_budget=True` .* may only become smaller"),
    (bucketed, {"tokens": 200, "pad_to_multiple_of": 8}, True, "`budget.pad_to_multiple_of` was 1"),
    (partial(bucketed, shapes=4), {"tokens": 200}, True, "With `shapes` a budget cannot"),
]


@pytest.mark.parametrize(("make", "change", "change_budget", "message"), SMALLER)
def test_a_smaller_budget_has_an_argument_of_its_own(make, change, change_budget, message):
    loader = Loader(make(**change))
    loader.load_state_dict(saved(make()), change_budget=change_budget)
    with pytest.raises(StateError, match=message) as caught:
        next(iter(loader))
    assert change["tokens"] < 256 or change_budget or "change_budget" not in str(caught.value)


def test_a_budget_may_become_smaller_in_samples():
    loader = Loader(bucketed(max_samples=2))
    loader.load_state_dict(saved(bucketed()), change_budget=True)
    assert max(map(len, loader)) == 2


@pytest.mark.parametrize("change_budget", [False, True])
def test_change_budget_allows_no_change_of_another_node(change_budget):
    run, loader = loader_of(), loader_of(token_budget=200, seed=1)
    next(iter(run))
    loader.load_state_dict(run.state_dict(), change_budget=change_budget)
    with pytest.raises(StateError, match="`seed` was 0") as caught:
        next(iter(loader))
    assert ("budget.tokens" in str(caught.value)) is not change_budget


def test_a_state_that_is_refused_leaves_that_argument_of_the_one_before():
    loader = Loader(bucketed(tokens=200))
    loader.load_state_dict(saved(bucketed()))
    with pytest.raises(StateError, match="lacks"):
        loader.load_state_dict({"version": 12, "node": "Loader"}, change_budget=True)
    with pytest.raises(StateError, match="`budget.tokens` was 256"):
        iter(loader)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_that_argument_is_a_bool(value):
    with pytest.raises(TypeError, match="`change_budget` must be True or False, but is"):
        Loader(bucketed()).load_state_dict({}, change_budget=value)


@pytest.mark.filterwarnings("ignore:.*(Further samples|were skipped)")
@pytest.mark.parametrize("strict", [True, False])
def test_a_state_of_another_number_of_ranks_names_reshard(strict):
    state = elastic.states_at(elastic.job(3, steps=2), 2)[0]
    loader = elastic.make(None)
    loader.load_state_dict(state, strict=strict)
    with pytest.raises(StateError, match=r"the states of all 3: by `reshard\(states, 1\)`"):
        next(iter(loader))


@pytest.mark.parametrize(
    "change",
    [
        {"prefetch": 0, "workers": WorkerOptions(chunk_size=3)},
        {"workers": WorkerOptions(num_workers=2, chunk_size=1, in_flight_samples=1)},
    ],
)
def test_options_that_decide_no_group_may_change(change):
    it = iter(reference := loader_of())
    for _ in range(4):
        next(it)
    state = reference.state_dict()
    expected = [batch["id"].tolist() for batch in it]
    with warnings.catch_warnings(), loader_of(**change) as loader:
        warnings.simplefilter("error")
        loader.load_state_dict(state)
        assert [batch["id"].tolist() for batch in loader] == expected
