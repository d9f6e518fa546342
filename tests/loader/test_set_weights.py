"""Weights of a mixture that are set for the next epoch.

That a run which has set them goes on exactly is tested by the resume machine.
"""

from collections import Counter

import pytest
from aligned_ranks import TIMEOUT_S, on_ranks

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    PeerError,
    ShardedSampler,
    SourceMixer,
    StateError,
    WeightSchedule,
    WindowBucketer,
    pop_step_info,
)

NAMES = ("a", "b", "c")
FIRST = {"a": 3, "b": 2, "c": 1}
OTHER, LATER = {"a": 1, "b": 1, "c": 8}, {"a": 8, "b": 1, "c": 1}
SIZE = 180

pytestmark = pytest.mark.filterwarnings("ignore:.*of the tokens of the first")


def loader_of(exchange=None, by="samples", weights=FIRST, **options):
    data = {n: [{"input_ids": [i] * (3 + 7 * i % 29)} for i in range(SIZE)] for n in NAMES}
    given = {"token_budget": 160, "window": 12, "seed": 1, "round_size": 8, "timeout_s": TIMEOUT_S}
    given |= {"weights": Mixing(weights=weights, by=by), "process_group": exchange}
    return ODBDataLoader(data, **given | options)


def rows_of(loader):
    return [batch["input_ids"].tolist() for batch in loader]


def drawn(loader, by="samples"):
    """What an epoch has of each source, and the shares of those early in it."""
    seen, early = Counter(), Counter()
    for batch in loader:
        info = pop_step_info(batch)
        rows = [*zip(info.row_sources, info.keys, strict=True)]
        if sum(early.values()) < (90 if by == "samples" else 1800):
            early.update({name: getattr(one, by) for name, one in info.local_sources.items()})
        seen.update([] if info.is_filler else rows)
    return seen, {name: early[name] / early.total() for name in NAMES}


def shares(weights):
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 2}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_next_epochs_are_drawn_by_what_was_set_last_and_each_sample_comes_once(
    ranks, options, by
):
    def run(exchange):
        loader, found = loader_of(exchange, by, **options), []
        for calls in ([], [], [LATER, OTHER], [LATER], []):
            for weights in calls:
                loader.set_weights(weights)
            found.append(drawn(loader, by))
        return found

    epochs = zip(*on_ranks(ranks, run), strict=True)
    for weights, of_ranks in zip((FIRST, FIRST, OTHER, LATER, LATER), epochs, strict=True):
        seen = sum((seen for seen, _ in of_ranks), Counter())
        assert seen == Counter((name, key) for name in NAMES for key in range(SIZE))
        for _, early in of_ranks:
            assert early == pytest.approx(shares(weights), abs=0.1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_present_epoch_goes_on_as_it_began(num_workers):
    options = {"workers": None, "num_workers": num_workers}
    with loader_of(**options) as loader, loader_of(**options) as other:
        expected = rows_of(loader)
        found = []
        for step, batch in enumerate(other):
            found.append(batch["input_ids"].tolist())
            if step in (0, 7):
                other.set_weights(LATER)
        assert found == expected
        with loader_of(weights=LATER) as third:
            next(iter(third))  # leaves its first epoch
            assert rows_of(other) == rows_of(third)


@pytest.mark.parametrize("other", [LATER, None])
@pytest.mark.parametrize("within", [False, True])
def test_ranks_that_set_different_weights_all_raise_when_the_epoch_begins(within, other):
    def run(exchange):
        loader = loader_of(exchange)
        weights = OTHER if exchange.rank == 0 else other
        it = iter(loader) if within else None
        if it is not None:
            next(it)
        if weights:
            loader.set_weights(weights)
        for _ in it or ():
            pass
        with pytest.raises((StateError, PeerError)) as caught:
            next(iter(loader))
        return str(caught.value)

    for message in on_ranks(2, run):
        assert '`SourceMixer.weights` is {"a": 1.0, "b": 1.0, "c": 8.0} on rank 0, {"' in message
        assert f'"a": {(other or FIRST)["a"]:.1f}' in message


REFUSALS = [
    (lambda: loader_of().set_weights({"a": 1, "b": 1}), ValueError, "the names of `sources`"),
    (lambda: loader_of().set_weights({**FIRST, "d": 1}), ValueError, "but has .*'d'"),
    (lambda: loader_of().set_weights({**FIRST, "a": 0}), ValueError, r"`weights\['a'\]`.* is 0"),
    (lambda: loader_of().set_weights({**FIRST, "a": "x"}), ValueError, "but is 'x'"),
    (lambda: loader_of().set_weights([1, 2, 3]), TypeError, "must be a dict by name"),
    (
        lambda: ODBDataLoader([{"input_ids": [1]}], token_budget=9).set_weights(FIRST),
        ValueError,
        "`set_weights` needs a mixture",
    ),
    (
        lambda: loader_of(weights=WeightSchedule([(0, FIRST)])).set_weights(FIRST),
        ValueError,
        "they follow a `WeightSchedule`",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSALS)
def test_what_cannot_be_set_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_refused_call_changes_nothing():
    loader = loader_of()
    loader.set_weights(OTHER)
    with pytest.raises(ValueError, match="weights"):
        loader.set_weights({**FIRST, "a": -1})
    assert rows_of(loader) == rows_of(loader_of(weights=OTHER))


def test_the_outermost_mixture_of_a_graph_of_nodes_has_them():
    def graph(weights):
        inner = SourceMixer(
            {name: ShardedSampler(90, seed=1, rank=0, world_size=1) for name in "ab"}, world_size=1
        )
        last = ShardedSampler(90, seed=1, rank=0, world_size=1)
        mixed = SourceMixer({"in": inner, "c": last}, weights, world_size=1)
        samples = LengthObserver(mixed, lambda item: 3)
        return Loader(GroupCollator(WindowBucketer(samples, 30, 12), collate_fn=lambda rows: {}))

    def keys(loader):
        return [pop_step_info(batch).keys for batch in loader]

    loader = graph({"in": 1, "c": 1})
    loader.set_weights({"in": 5, "c": 1})
    assert keys(loader) == keys(graph({"in": 5, "c": 1}))
