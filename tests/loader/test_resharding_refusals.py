"""States that cannot be those of other ranks, and what stands beside those of a loader."""

import copy
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from aligned_ranks import TIMEOUT_S
from elastic import (
    SAMPLES,
    infos,
    job,
    resharded,
    states_at,
    tokens_of,
    whole,
)

from odb_nodes import (
    GroupCollator,
    IterableSource,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ShardedSampler,
    StateError,
    StepInfo,
    WindowBucketer,
    reshard,
)
from odb_nodes.contract import NodeState
from odb_nodes.contract.state import add_digest, seal_whole, unseal_whole
from odb_nodes.monitor import Monitor

pytestmark = pytest.mark.filterwarnings("ignore")


def iterable(exchange, **options):
    data = [tokens_of(index) for index in range(SAMPLES)]
    return ODBDataLoader(
        IterableSource(data, exchange.rank, exchange.world_size),
        token_budget=80,
        window=16,
        process_group=exchange,
        timeout_s=TIMEOUT_S,
        **options,
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"make": iterable}, "the source cannot read samples by keys"),
        ({"state": "payload"}, 'saved with `state="payload"`'),
    ],
    ids=["iterable", "payload"],
)
def test_what_no_other_rank_can_read_goes_on_with_others_between_epochs(how, message):
    begun = job(2, **how)
    with pytest.raises(StateError, match=message):
        resharded(begun, 3, 3)
    for step, epoch in ((0, 0), (-1, 1)):
        rest = job(3, resharded(begun, step, 3), epochs=1 + epoch, **how)
        expected = job(3, epochs=1 + epoch, **how)
        assert infos(rest) == [
            [one for one in found if one[0].epoch == epoch] for found in infos(expected)
        ]


def test_data_that_a_rank_has_for_itself_is_not_another_ranks():
    begun = job(2, steps=3, sharded=True)
    with pytest.raises(StateError, match="each rank has data of its own"):
        resharded(begun, -1, 3)


def test_states_of_all_ranks_are_needed():
    states = states_at(whole(4), 2)
    with pytest.raises(StateError, match=r"those of ranks \[1, 3\] are missing"):
        reshard([states[0], states[2]], 2)
    with pytest.raises(StateError, match=r"one of each rank, but are of ranks \[0, 0, 1, 2, 3\]"):
        reshard([*states, states[0]], 2)
    with pytest.raises(StateError, match=r"of jobs of \[3, 4\] ranks"):
        reshard([*states[:3], states_at(whole(3), 2)[0]], 2)
    with pytest.raises(ValueError, match="`states` must have the state of each rank"):
        reshard([], 2)
    with pytest.raises(StateError, match="hold none of a loader"):
        reshard([{"step": 3}], 2)


RANK = ("rank", "world_size")


def ranks_in(state):
    """The configurations in a state that say which rank it is of."""
    for key, one in state.items():
        if key == "config" and "world_size" in one:
            yield one
        elif isinstance(one, dict):
            yield from ranks_in(one)


@pytest.mark.parametrize("options", [{}, {"virtual_ranks": 4}], ids=["ranks", "virtual"])
def test_a_damaged_rank_or_number_of_ranks_is_refused(options):
    first, second = states_at(job(2, steps=2, **options), 2)
    places = [(n, name) for n, one in enumerate(ranks_in(second)) for name in one if name in RANK]
    for (place, name), value in product(places, (None, [], "x", 1.5, 10**30)):
        damaged = copy.deepcopy(second)
        [*ranks_in(damaged)][place][name] = value
        for world_size in (1, 2):
            with pytest.raises(StateError, match="digest"):
                reshard([first, damaged], world_size)
            if place == 0:  # which says whose the state is, also where its digest was made again
                del damaged["digest"]
                with pytest.raises(StateError):
                    reshard([first, damaged := add_digest(damaged)], world_size)
                damaged["digest"] += 1


def test_states_of_other_steps_or_arguments_are_refused():
    states = states_at(whole(2), 2)
    with pytest.raises(StateError, match="`step` is 2 on rank 0, but 3 on rank 1"):
        reshard([states[0], states_at(whole(2), 3)[1]], 3)
    other = states_at(job(2, steps=2, window=8), 2)
    with pytest.raises(StateError, match="of different graphs: `WindowBucketer` with"):
        reshard([states[0], other[1]], 3)


def test_states_of_two_runs_are_refused():
    def run(first, **options):
        def make(exchange, **options):
            data = [tokens_of(index) for index in range(first, first + SAMPLES)]
            given = {"token_budget": 80, "window": 16, "timeout_s": TIMEOUT_S}
            return ODBDataLoader(data, process_group=exchange, **given | options)

        return states_at(job(2, steps=2, make=make, **options), 2)

    states = run(0)
    with pytest.raises(StateError, match="of different places: `totals_digest`"):
        reshard([states[0], run(1)[1]], 3)
    with pytest.raises(StateError, match="of different places: `excluded`"):
        reshard([states[0], run(0, exclude=[229])[1]], 3)


def test_each_loader_of_a_dict_must_be_of_the_same_ranks():
    states = states_at(whole(3), 2)
    (alone,) = states_at(whole(1), 0)
    with pytest.raises(StateError, match="state of rank 0 of a loader is where that of rank 2"):
        reshard([{"a": one, "b": two} for one, two in zip(states, states[::-1], strict=True)], 2)
    with pytest.raises(StateError, match=r"are of ranks \[0, 0, 0\] of 1"):
        reshard([{"a": one, "b": alone} for one in states], 2)


def test_a_damaged_state_is_refused():
    states = states_at(whole(2), 2)
    damaged = {**states[1], "num_yielded": 1}
    with pytest.raises(StateError, match="digest"):
        reshard([states[0], damaged], 3)
    deep = 1
    for _ in range(2000):
        deep = {"a": deep}
    with pytest.raises(StateError, match="nested too deeply"):
        reshard([{"loader": one, "deep": deep} for one in states], 3)


def test_a_state_without_ranks_is_refused():
    groups = WindowBucketer(LengthObserver(ShardedSampler(9, rank=0, world_size=1), len), 9)
    with pytest.raises(StateError, match="below the `GroupCollator` must be a `RankAligner`"):
        reshard([Loader(GroupCollator(groups)).state_dict()], 2)


def test_what_is_beside_the_loader_must_be_equal_on_all_ranks():
    states = states_at(whole(2), 2)
    beside = [{"loader": one, "step": 2, "ema": torch.ones(3)} for one in states]
    found = reshard(beside, 3)
    assert [one["loader"] for one in found] == reshard(states, 3)
    assert all(one["step"] == 2 and one["ema"].equal(torch.ones(3)) for one in found)
    beside[1]["ema"] = torch.zeros(3)
    with pytest.raises(StateError, match=r"`state\['ema'\]` must be equal on all ranks"):
        reshard(beside, 3)


def test_what_is_no_number_is_equal_to_itself():
    states = states_at(whole(2), 2)
    nan, other = ({"best": float("nan"), "at": torch.tensor([1, x])} for x in (float("nan"), 2.0))
    beside = [{"loader": one, **data} for one, data in zip(states, ({**nan}, {**nan}), strict=True)]
    beside[1]["at"] = nan["at"].clone()
    assert all(one["at"] is nan["at"] for one in reshard(beside, 3))
    with pytest.raises(StateError, match=r"`state\['at'\]` must be equal on all ranks"):
        reshard([beside[0], beside[1] | {"at": other["at"]}], 3)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_a_monitor_goes_on_beside_a_loader(before, after, tmp_path):
    states = states_at(whole(before), 2)
    beside = []
    for rank, state in enumerate(states):
        with Monitor(tmp_path / str(rank)) as monitor:
            for step in range(2):
                info = StepInfo.of_one_rank([], step)
                monitor.step({"input_ids": torch.ones(rank + 1, 2)}, info)
            beside.append({"loader": state, "monitor": monitor.state_dict()})
            monitor.close(write=False)
    assert beside[0]["monitor"]["share"]["shapes"] == {"1x2": 2}
    found, monitors = reshard(beside, after), [one["monitor"] for one in beside]
    assert [one["monitor"] for one in found] == Monitor.reshard_states(monitors, after)
    assert [one["loader"] for one in found] == reshard(states, after)


@dataclass(kw_only=True)
class RunState(NodeState):
    """What a trainer keeps of a run."""

    samples: int
    loader: dict


def test_what_holds_a_loader_must_be_whole():
    states = states_at(whole(2), 2)
    runs = [seal_whole("Run", RunState(samples=9, loader=one)) for one in states]
    found = reshard(runs, 3)
    assert [unseal_whole(one, "Run", RunState).loader for one in found] == reshard(states, 3)
    with pytest.raises(StateError, match="`state` is damaged: its digest"):
        reshard([{**one, "samples": 8} for one in runs], 3)
