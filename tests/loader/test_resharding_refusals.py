"""States that cannot be those of other ranks, and what stands beside those of a loader."""

import copy
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from elastic import LEFT_OUT, job, make, resharded, sample, states_at, whole

from odb_nodes import (
    GroupCollator,
    LengthObserver,
    Loader,
    ShardedSampler,
    StateError,
    WindowBucketer,
    reshard,
)
from odb_nodes.contract import NodeState
from odb_nodes.contract.state import add_digest, seal_whole, unseal_whole

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT)


def states(world_size=2, **options):
    """The state of each rank after two steps."""
    return states_at(job(world_size, steps=2, **options) if options else whole(world_size), 2)


def from_(first):
    """What makes a loader of other data, by a function of the same name."""

    def make_from(exchange, **options):
        def shifted(index):
            return sample(first + index)

        return make(exchange, process_fn=shifted, **options)

    return states(make=make_from)


def without_aligner():
    groups = WindowBucketer(LengthObserver(ShardedSampler(9, rank=0, world_size=1), len), 9)
    return [Loader(GroupCollator(groups)).state_dict()]


def nested():
    deep = 1
    for _ in range(2000):
        deep = {"a": deep}
    return [{"loader": one, "deep": deep} for one in states()]


def paired(left, right):
    return [{"a": one, "b": two} for one, two in zip(left, right, strict=True)]


REFUSALS = [
    (lambda: states(4)[::2], r"ranks \[1, 3\] are missing"),
    (lambda: [*states(), states_at(whole(2), 3)[0]], r"are of ranks \[0, 0, 1\]"),
    (lambda: [*states(4)[:3], states()[0]], r"of jobs of \[2, 4\] ranks"),
    (lambda: [{"step": 3}], "hold none of a loader"),
    (lambda: states(sharded=True), "each rank has data of its own"),
    (lambda: states(state="payload"), 'saved with `state="payload"`'),
    (lambda: [states()[0], states_at(whole(2), 3)[1]], "`step` is 2 on rank 0, but 3 on rank 1"),
    (lambda: [states()[0], states(window=8)[1]], "different graphs: `WindowBucketer`"),
    (lambda: [from_(0)[0], from_(1)[1]], "different places: `totals_digest`"),
    (lambda: [states()[0], states(exclude=[7, 8, 90, 229])[1]], "different places: `excluded`"),
    (lambda: paired(states(3), states(3)[::-1]), "state of rank 0 of a loader is where"),
    (lambda: paired(states(), states(1) * 2), "loaders of 1 ranks with data of their own"),
    (lambda: [states()[0], states()[1] | {"num_yielded": 1}], "digest"),
    (nested, "nested too deeply"),
    (without_aligner, "must be a `RankAligner`"),
]


@pytest.mark.parametrize(("make_states", "message"), REFUSALS, ids=[one[1] for one in REFUSALS])
def test_states_that_are_not_those_of_all_ranks_of_a_run_are_refused(make_states, message):
    given = make_states()
    with pytest.raises(StateError, match=message):
        reshard(given, 5)


def test_an_empty_list_of_states_is_refused():
    with pytest.raises(ValueError, match="`states` must have the state of each rank"):
        reshard([], 2)


def test_what_only_its_rank_can_read_goes_on_with_others_between_epochs():
    begun = job(2, state="payload")
    for step, epoch in ((0, 0), (-1, 1)):
        rest = job(3, resharded(begun, step, 3), epochs=1 + epoch, state="payload")
        expected = job(3, epochs=1 + epoch, state="payload")
        for (found, _), (of_run, _) in zip(rest, expected, strict=True):
            assert found == [one for one in of_run if one[0].epoch == epoch]


def ranks_in(state):
    """The configurations in a state that say which rank it is of."""
    for key, one in state.items():
        if key == "config" and "world_size" in one:
            yield one
        elif isinstance(one, dict):
            yield from ranks_in(one)


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 4}], ids=["ranks", "virtual"])
def test_a_damaged_rank_or_number_of_ranks_is_refused(options):
    first, second = states(**options)
    names = ("rank", "world_size")
    places = [(n, name) for n, one in enumerate(ranks_in(second)) for name in one if name in names]
    for (place, name), value in product(places, (None, [], 1.5, 10**30)):
        damaged = copy.deepcopy(second)
        [*ranks_in(damaged)][place][name] = value
        with pytest.raises(StateError, match="digest"):
            reshard([first, damaged], 1)
        if place == 0:  # which says whose the state is, also where its digest was made again
            del damaged["digest"]
            with pytest.raises(StateError):
                reshard([first, add_digest(damaged)], 1)


# --- what is beside the loader --------------------------------------------------------------------


def beside(*data):
    return [{"loader": one, **some} for one, some in zip(states(), data, strict=True)]


def test_what_is_beside_the_loader_must_be_equal_on_all_ranks():
    nan, ones = torch.tensor([1, float("nan")]), torch.ones(3)
    found = reshard(beside(*[{"ema": ones, "at": nan, "best": float("nan")}] * 2), 3)
    assert [one["loader"] for one in found] == reshard(states(), 3)
    assert all(one["ema"].equal(ones) and one["at"] is nan for one in found)
    assert len(reshard(beside({"at": nan}, {"at": nan.clone()}), 3)) == 3
    for other in (torch.zeros(3), torch.tensor([1, 2.0])):
        with pytest.raises(StateError, match=r"`state\['at'\]` must be equal on all ranks"):
            reshard(beside({"at": nan}, {"at": other}), 3)


@dataclass(kw_only=True)
class RunState(NodeState):
    """What a trainer keeps of a run."""

    samples: int
    loader: dict


def test_what_holds_a_loader_must_be_whole():
    runs = [seal_whole("Run", RunState(samples=9, loader=one)) for one in states()]
    found = reshard(runs, 3)
    assert [unseal_whole(one, "Run", RunState).loader for one in found] == reshard(states(), 3)
    with pytest.raises(StateError, match="of Run in `state` is damaged: its digest"):
        reshard([{**one, "samples": 8} for one in runs], 3)
