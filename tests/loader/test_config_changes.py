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
    ParallelProcessor,
    ShardedSampler,
    StateError,
    TokenBudget,
    WindowBucketer,
    WorkerOptions,
    reshard,
)
from odb_nodes._core.fingerprints import stable_name
from odb_nodes.sources import IterableSource


def by_ids(item):
    return Observation(len(item["input_ids"]), task=f"task {item['id'] % 3}")


def by_id(item):
    return 1 + item["id"]


def bucketed(window=24, state="replay", observe=by_ids, dearest_first=0, diversity=0.0, **fields):
    observed = LengthObserver(Mapper(sampler(), process), observe)
    budget = TokenBudget(**{"tokens": 256, "oversize": "alone", **fields})
    return WindowBucketer(observed, budget, window, state, None, dearest_first, diversity)


def sampled(**fields):
    base = {"size": 120, "shuffle": True, "seed": 0, "rank": 0, "world_size": 2}
    return ShardedSampler(**{**base, **fields})


def processed(process_fn=augment, **fields):
    base = {"seed": 0, "rank": 0, "world_size": 2}
    return ParallelProcessor(sampler(), process_fn, **{**base, **fields})


def iterated(**fields):
    return IterableSource(list(range(50)), **{"rank": 0, "world_size": 2, **fields})


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
    (bucketed, "dearest_first", {"dearest_first": 8}),
    (bucketed, "diversity", {"diversity": 0.5}),
    (bucketed, "window", {"window": 25}),
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
def test_a_changed_field_is_refused_by_name(make, field, change):
    changed = make(**change)
    loader = Loader(changed)
    loader.load_state_dict(saved(make()))
    with pytest.raises(StateError) as caught:
        next(iter(loader))
    message = str(caught.value)
    assert f"`{field}` was " in message
    assert "when saved, but is " in message
    assert "strict=False" in message
    with pytest.raises(StateError):  # the state stays loaded: no fresh epoch by accident
        next(iter(loader))


# Another `observe` or `process_fn` gives other lengths, which no replay can take.
KNOWINGLY = [change for change in CHANGES if change[1] not in ("observe", "process_fn")]


@pytest.mark.parametrize(("make", "field", "change"), KNOWINGLY)
def test_a_field_that_is_changed_knowingly_is_warned_of(make, field, change):
    loader = Loader(make(**change))
    loader.load_state_dict(saved(make()), strict=False)
    with pytest.warns(UserWarning, match=f"`{field}` was "):
        next(iter(loader))


def test_every_field_of_every_configuration_is_in_the_table():
    for make in (bucketed, sampled, processed, iterated):
        node, tested = make(), {field for other, field, _ in CHANGES if other is make}
        fields = set(node.fingerprint()) | ({"observe"} if make is bucketed else set())
        assert fields <= tested


def test_several_changes_are_named_together():
    loader = Loader(bucketed(window=30, tokens=300))
    loader.load_state_dict(saved(bucketed()))
    with pytest.raises(StateError, match="`budget.tokens` was 256 .*; `window` was 24 "):
        next(iter(loader))


class TestASmallerBudget:
    def resumed(self, before, after, **options):
        loader = Loader(after)
        loader.load_state_dict(saved(before), **options)
        return next(iter(loader))

    def message(self, tokens, **options):
        with pytest.raises(StateError, match="`budget.tokens` was 256 when saved") as caught:
            self.resumed(bucketed(), bucketed(tokens=tokens), **options)
        return str(caught.value)

    def test_its_own_argument_is_named(self):
        remedy = "To go on with a smaller budget, load with `change_budget=True`"
        assert remedy in self.message(200)
        assert "change_budget" not in self.message(300)
        assert self.resumed(bucketed(), bucketed(tokens=200), change_budget=True)

    def test_that_argument_allows_no_larger_one(self):
        message = self.message(300, change_budget=True)
        assert "With `change_budget=True` the limits of a budget may only become smaller" in message

    def test_with_shapes_it_is_refused_before_the_first_batch(self):
        before, after = bucketed(shapes=4), bucketed(shapes=4, tokens=200)
        with pytest.raises(StateError, match="With `shapes` a budget cannot become smaller"):
            self.resumed(before, after, change_budget=True)

    @pytest.mark.parametrize("value", ["yes", 1, None])
    def test_the_argument_is_a_bool(self, value):
        loader = Loader(bucketed())
        with pytest.raises(TypeError, match="`change_budget` must be True or False, but is"):
            loader.load_state_dict(saved(bucketed()), change_budget=value)

    def test_it_is_no_change_beside_those_of_other_nodes(self):
        options = {"window": 24, "seed": 0}
        run = ODBDataLoader(Dataset(), **options, token_budget=256)
        next(iter(run))
        for change_budget in (False, True):
            loader = ODBDataLoader(
                Dataset(), token_budget=200, window=30, seed=1, accumulate=1 + change_budget
            )
            loader.load_state_dict(run.state_dict(), change_budget=change_budget)
            with pytest.raises(StateError, match="`seed` was 0") as caught:
                next(iter(loader))
            assert ("budget.tokens" in str(caught.value)) is not change_budget
            assert ("`change_budget=True`" in str(caught.value)) is not change_budget


def test_changes_of_several_nodes_are_named_together():
    def make(**changed):
        options = {"token_budget": TokenBudget(256), "window": 24, "accumulate": 1, "seed": 0}
        return ODBDataLoader(Dataset(), **{**options, **changed})

    run = make()
    next(iter(run))
    budget = TokenBudget(256, layout="packed")
    loader = make(token_budget=budget, accumulate=2, seed=1, collate_fn=list)
    loader.load_state_dict(run.state_dict())
    with pytest.raises(StateError) as caught:
        next(iter(loader))
    for part in (
        "RankAligner: `accumulate` was 1 when saved, but is 2 now",
        "WindowBucketer: `budget.layout` was 'padded' when saved",
        "ShardedSampler: `seed` was 0",
        "strict=False",
    ):
        assert part in str(caught.value)


def test_another_number_of_ranks_is_told_what_to_do():
    states = elastic.states_at(elastic.job(3, steps=2), 2)
    for strict in (True, False):
        loader = elastic.make(None)
        loader.load_state_dict(states[0], strict=strict)
        with pytest.raises(StateError, match=r"the states of all 3: by `reshard\(states, 1\)`"):
            next(iter(loader))
    loader.load_state_dict(reshard(states, 1)[0])
    assert next(iter(loader))


@pytest.mark.filterwarnings("ignore:the state does not fit")
def test_other_ranks_of_a_node_alone_are_not_those_of_the_job():
    loader = Loader(sampled(world_size=3))
    loader.load_state_dict(saved(sampled()))
    with pytest.raises(StateError, match="`world_size` was 2 when saved") as caught:
        next(iter(loader))
    assert "reshard" not in str(caught.value)


@pytest.mark.parametrize(("before", "after"), [("replay", "payload"), ("payload", "replay")])
def test_a_change_of_what_a_state_holds_loses_nothing(before, after):
    reference = list(Loader(bucketed(state=before)))
    loader = Loader(bucketed(state=after))
    loader.load_state_dict(saved(bucketed(state=before)), strict=False)
    if before == "payload":  # whose source is past the pool: a replay could not reach it
        with pytest.raises(StateError, match="Change this between epochs"), pytest.warns():
            next(iter(loader))
        return
    with pytest.warns(UserWarning, match="`state`"):
        groups = [next(iter(loader))]
    again = Loader(bucketed(state=after))
    again.load_state_dict(loader.state_dict())
    assert ids(groups + list(again)) == ids(reference[3:])


def ids(groups):
    return [[sample.data["id"] for sample in group] for group in groups]


def test_the_knowing_change_holds_for_one_load_only():
    loader = Loader(bucketed(window=30))
    loader.load_state_dict(saved(bucketed()), strict=False)
    with pytest.warns(UserWarning):
        next(iter(loader))
    loader.load_state_dict(saved(bucketed()))
    with pytest.raises(StateError):
        next(iter(loader))


@pytest.mark.parametrize(
    "change", [{"num_workers": 2}, {"prefetch": 9}, {"workers": WorkerOptions(chunk_size=3)}]
)
def test_what_decides_no_group_may_change(change):
    def make(**options):
        return ODBDataLoader(Dataset(), token_budget=256, window=24, **options)

    reference = make()
    it = iter(reference)
    for _ in range(4):
        next(it)
    state = reference.state_dict()
    expected = [batch["id"].tolist() for batch in it]
    with warnings.catch_warnings(), make(**change) as loader:
        warnings.simplefilter("error")
        loader.load_state_dict(state)
        assert [batch["id"].tolist() for batch in loader] == expected


def crop(sample, tokens=40, side="left", **_):
    return {**sample, "input_ids": sample["input_ids"][:tokens]}


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ({}, {"observe": by_id}, r"'sample\(\)' when saved, but is 'sample\(observe=by_id\)'"),
        ({"process_fn": crop}, {}, r"'sample\(process_fn=crop\)' when saved, but is 'sample\(\)'"),
        (
            {"process_fn": partial(crop, tokens=40)},
            {"process_fn": partial(crop, side="right", tokens=30)},
            r"crop\(tokens=40\)\)' when saved, but is .*crop\(side='right', tokens=30\)\)",
        ),
    ],
)
def test_a_change_of_what_the_workers_do_says_what_changed(before, after, message):
    def make(options):
        return ODBDataLoader(Dataset(), token_budget=256, window=24, **options)

    reference = make(before)
    next(iter(reference))
    loader = make(after)
    loader.load_state_dict(reference.state_dict())
    with pytest.raises(StateError, match=message):
        next(iter(loader))


class Tokenizer:
    def __init__(self, *words):
        self._vocabulary = {word: index for index, word in enumerate(words)}

    def get_vocab(self):
        return dict(reversed(self._vocabulary.items()))


def test_a_tokenizer_is_named_by_its_vocabulary():
    one, same, other = (
        stable_name(partial(crop, Tokenizer(*words))) for words in ("ab", "ab", "ba")
    )
    assert one == same != other
    assert one.startswith("crop(<Tokenizer of 2 tokens, ")


def test_of_long_values_the_part_that_differs_is_shown():
    long = partial(crop, "x" * 5000)
    loader = Loader(processed(partial(crop, "x" * 5000, tokens=3)))
    loader.load_state_dict(saved(processed(long), steps=0))
    shown = r"""\.\.\.x+'\)" when saved, but is \.\.\.x+', tokens=3\)" now"""
    with pytest.raises(StateError, match=shown) as caught:
        next(iter(loader))
    assert len(str(caught.value)) < 600


def test_a_partial_is_named_with_its_plain_arguments():
    assert (
        stable_name(partial(crop, 5, side="left", other=[1]))
        == "crop(5, other=<list>, side='left')"
    )
    assert stable_name(partial(partial(crop, 5), None)) == "crop(5, None)"
    assert stable_name(partial(crop)) == "crop()"
