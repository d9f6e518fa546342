"""Samples are left out by their keys, in mid-run too, and all that is counted stays exact."""

import json
import random
import warnings
from collections import Counter
from pathlib import Path

import pytest
from aligned_ranks import on_ranks
from rank_jobs import run_ranks
from torchdata.nodes import ParallelMapper, Prefetcher

from odb_nodes import (
    GroupCollator,
    IterableSource,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    StateError,
    TokenBudget,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.nodes.excluded_keys import ExcludedKeys
from odb_nodes.testing import assert_resumes_exactly

SIZE = 72
UNFIT = {40, 60, *range(5, SIZE, 17)}  # which are dropped or skipped


def text(index):
    """A sample; every 17th is skipped, and some exceed the budget; some labels are masked."""
    if isinstance(index, tuple):  # of a mixture
        return {**text(index.item), "source": index.source}
    if index % 17 == 5:
        return Skipped("seventeenth")
    length = 90 if index in (40, 60) else 5 + index * 7 % 23
    labels = [-100 if (index + place) % 3 == 0 else 1 for place in range(length)]
    return {"input_ids": [1] * length, "labels": labels, "id": index}


def targets_of(index):
    return sum(label != -100 for label in text(index)["labels"][1:])


def plain(index):
    return text(index if index % 17 != 5 else index + 1) | {"id": index}


def collate(group):
    return {"id": [sample["id"] for sample in group]}


def permuted(**shard):
    return ShardedSampler(SIZE, **shard)


def iterable(**shard):
    return IterableSource(range(SIZE), **shard)


def uneven(rank, world_size):
    """The first rank has little, and the last one most."""
    return Few(rank, world_size)


class Few(IterableSource):
    """Ranks with data of unlike size, each index on one rank."""

    def __init__(self, rank, world_size):
        limits = [0, *(SIZE * (n + 1) ** 2 // world_size**2 for n in range(world_size))]
        super().__init__(range(limits[rank], limits[rank + 1]), rank=0, world_size=1)
        self.first = limits[rank]

    def item_key(self):
        key = super().item_key()
        return key._replace(key=key.key + self.first, world_size=1)


KINDS = {
    "replay": {},
    "packed": {"layout": "packed"},
    "payload": {"state": "payload"},
    "iterable": {"source": iterable},
    "uneven": {"source": uneven, "round_size": 8},
    "stop": {"uneven": "stop"},
    "stop-iterable": {"source": iterable, "uneven": "stop", "round_size": 12},
}
FAST = ("replay", "iterable")


def make(
    exchange,
    exclude=None,
    *,
    source=permuted,
    layout="padded",
    state="replay",
    round_size=6,
    **options,
):
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    node = LengthObserver(ParallelProcessor(source(**shard), text, **shard))
    budget = TokenBudget(64, oversize="drop", layout=layout)
    bucketer = WindowBucketer(node, budget, 8, state, exclude)
    aligner = RankAligner(bucketer, exchange, round_size, timeout_s=20.0, **options)
    return Loader(GroupCollator(aligner, collate))


def taken(loader, states=None, excluded=()):
    """What the rest of an epoch says of each step; not even a filler is excluded."""
    steps = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in loader:
            info = pop_step_info(batch)
            assert info.is_filler or list(info.keys) == batch["id"]
            assert not {*excluded} & {*batch["id"]}
            steps.append(info)
            if states is not None:
                states.append(loader.state_dict())
    return steps


def aligner_of(loader):
    return loader.root.source


def excluded_samples(loader):
    return aligner_of(loader).excluded_samples + aligner_of(loader).source.excluded_samples


def check_counts(ranks):
    """The sums that each rank is told are those of the rows of all ranks."""
    assert len({len(steps) for steps in ranks}) == 1
    optimizer_step = []
    for infos in zip(*ranks, strict=True):
        rows = [key for info in infos for key in info.keys]
        optimizer_step.append(infos)
        for info in infos:
            assert info.all_samples_this_step == len(rows)
            assert info.all_targets == sum(map(targets_of, rows))
            assert info.local_targets == sum(map(targets_of, info.keys))
            assert info.is_filler == (not info.keys)
            assert info.ends_optimizer_step == infos[0].ends_optimizer_step
        if not infos[0].ends_optimizer_step:
            continue
        rows = [key for infos in optimizer_step for info in infos for key in info.keys]
        targets = sum(map(targets_of, rows))
        assert rows
        for micro_step, infos in enumerate(optimizer_step):
            for info in infos:
                assert (info.micro_step, info.micro_steps) == (micro_step, len(optimizer_step))
                assert info.optimizer_samples == len(rows)
                assert info.optimizer_targets == targets
                local = sum(map(targets_of, info.keys))
                assert info.loss_scale == pytest.approx(len(infos) * local / targets)
        optimizer_step = []
    assert not optimizer_step


def check_once(before, after, keys, excluded, stops=False):
    """Each key comes once over both runs, and none that is excluded comes in the second.

    Where the ranks stop with the first that has ended, some are not even read.
    """
    infos_after = [info for steps in after for info in steps]
    infos = [info for steps in before for info in steps] + infos_after
    rows = [key for info in infos for key in info.keys]
    left_out = [one for info in infos for one in info.left_out]
    gone = {one.key for one in left_out if one.reason == "excluded"}
    assert not excluded & {key for info in infos_after for key in info.keys}
    assert gone <= excluded
    counts = Counter([*rows, *(one.key for one in left_out)])
    assert set(counts.values()) == {1}
    assert stops or not set(keys) - excluded - set(counts)
    assert stops or not infos_after or not set(keys) - set(counts)
    return gone


def excluded_at(at, first, how):
    """A few keys, half of them, or all that a rank has left, or that any has, or all but one."""
    rng = random.Random(f"{at} {len(first)} {how}")
    if how == "few":
        return set(rng.sample(range(SIZE), rng.choice((1, 2, 3))))
    if how == "half":
        return set(rng.sample(range(SIZE), SIZE // 2))
    ranks = first if how == "rest" else [rng.choice(first)]
    left = [key for steps in ranks for info in steps[at:] for key in info.keys]
    trained = [key for steps in first for info in steps[:at] for key in info.keys]
    return {*left[bool(rng.randrange(2)) :], *trained[1 : 2 * rng.randrange(9)], *UNFIT}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("how", ["few", "half", "rank", "rest"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    "kind", [one if one in FAST else pytest.param(one, marks=pytest.mark.slow) for one in KINDS]
)
def test_a_run_that_resumes_leaves_them_out_wherever_they_are(
    kind, world_size, accumulate, how, exhaustive
):
    options = {**KINDS[kind], "accumulate": accumulate}
    stops = "uneven" in options
    goes_on = not stops or how in ("few", "half")  # else a rank may have no sample in epoch 1

    def whole(exchange):
        loader = make(exchange, **options)
        states = [loader.state_dict()]
        return taken(loader, states), states

    def resumed(exchange):
        rank, states = exchange.rank, []
        loader = make(exchange, sorted(excluded), **options)
        loader.load_state_dict(runs[rank][1][at])
        iter(loader)
        if at % 2:  # saved before it goes on, too, and then nobody names them again
            again = loader.state_dict()
            loader = make(exchange, **options)
            loader.load_state_dict(again)
            iter(loader)
        states = [loader.state_dict()]
        steps = taken(loader, states, excluded)
        count = excluded_samples(loader)
        return steps, states, count, taken(loader, excluded=excluded) if goes_on else []

    def resumed_later(exchange):
        loader = make(exchange, **options)
        loader.load_state_dict(second[exchange.rank][1][later])
        rest = taken(loader, excluded=excluded)
        return rest, taken(loader, excluded=excluded) if goes_on else []

    runs = on_ranks(world_size, whole)
    first = [steps for steps, _ in runs]
    check_counts(first)
    places = range(len(first[0]) + 1)
    rng = random.Random(f"{kind} {world_size} {accumulate} {how}")
    if how in ("rank", "rest"):
        places = places[1:]
    for at in places if exhaustive else sorted(rng.sample(places, min(2, len(places)))):
        excluded = excluded_at(at, first, how)
        before = [steps[:at] for steps in first]
        if at and not before[0][-1].ends_optimizer_step:
            with pytest.raises(StateError, match=r"it is within an optimizer step of 3 steps"):
                on_ranks(world_size, resumed)
            continue
        second = on_ranks(world_size, resumed)
        after = [steps for steps, *_ in second]
        check_counts(after)
        gone = check_once(before, after, range(SIZE), excluded, stops)
        count = sum(count for *_, count, _ in second)
        # Where ranks stop, what the last one has read may be in no step.
        assert count == len(gone) or not any(after) or (stops and count > len(gone))
        next_epoch = [steps for *_, steps in second]
        if goes_on:
            check_counts(next_epoch)
            gone = check_once([], next_epoch, range(SIZE), excluded, stops)
            assert stops or gone == excluded
        ends = list(range(len(after[0]) + 1))
        for later in ends if exhaustive else rng.sample(ends, 1):
            for rank, (rest, epoch) in enumerate(on_ranks(world_size, resumed_later)):
                assert rest == after[rank][later:]
                assert epoch == next_epoch[rank]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_may_exclude_more_each_time_that_it_resumes(kind, world_size, exhaustive):
    options = KINDS[kind]

    def steps_of(exchange):
        loader = make(exchange, excluded[-1:], **options)
        if states:
            loader.load_state_dict(states[exchange.rank])
        it, steps = iter(loader), []
        for _ in range(2):
            steps += taken_of(it, excluded)
        return steps, loader.state_dict()

    def taken_of(it, excluded):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            batch = next(it, None)
        if batch is None:
            return []
        assert not {*excluded} & {*batch["id"]}
        return [pop_step_info(batch)]

    for seed in range(20 if exhaustive else 2):
        order = random.Random(f"{kind} {world_size} {seed}").sample(range(SIZE), SIZE)
        excluded, states, infos, ended = [], None, [], False
        while not ended:
            ranks = on_ranks(world_size, steps_of)
            check_counts([steps for steps, _ in ranks])
            states = [state for _, state in ranks]
            ended = len(ranks[0][0]) < 2
            infos += [info for steps, _ in ranks for info in steps]
            excluded.append(order.pop())
        counts = Counter(key for info in infos for key in info.keys)
        counts.update(one.key for info in infos for one in info.left_out)
        assert set(counts.values()) == {1}
        assert "uneven" in options or counts.keys() >= set(range(SIZE)) - {*excluded} - UNFIT


@pytest.mark.parametrize("accumulate", [1, 3])
def test_where_each_rank_ends_with_its_own_data(accumulate):
    options = {"source": uneven, "uneven": "join", "round_size": 6, "accumulate": accumulate}

    def whole(exchange):
        loader = make(exchange, **options)
        states = [loader.state_dict()]
        return taken(loader, states), states

    def resumed(exchange):
        loader = make(exchange, excluded, **options)
        loader.load_state_dict(runs[exchange.rank][1][at])
        return taken(loader, excluded=excluded)

    runs = on_ranks(3, whole)
    shortest = min(len(steps) for steps, _ in runs)
    assert shortest < max(len(steps) for steps, _ in runs) - 3
    for at in range(0, shortest + 1, accumulate):
        for excluded in ({1, 9, 30}, set(range(8)), set(range(20, 50)), {50, 70, 71}):
            after = on_ranks(3, resumed)
            before = [steps[:at] for steps, _ in runs]
            # A rank that has no step any more says nothing of what it left out.
            check_once(before, after, range(SIZE), excluded, stops=len(excluded) == 8)
            for number in range(max(map(len, after))):
                infos = [steps[number] for steps in after if number < len(steps)]
                rows = [key for info in infos for key in info.keys]
                assert {info.all_samples_this_step for info in infos} == {len(rows)}
                assert {info.all_targets for info in infos} == {sum(map(targets_of, rows))}


# --- without ranks --------------------------------------------------------------------------------


def alone(exclude=None, source=permuted, state="replay", above=lambda node: node):
    node = LengthObserver(ParallelProcessor(source(rank=0, world_size=1), text))
    bucketer = WindowBucketer(node, TokenBudget(64, oversize="drop"), 8, state, exclude)
    return Loader(above(GroupCollator(bucketer, collate)))


@pytest.mark.parametrize("above", [lambda node: node, lambda node: Prefetcher(node, 3)])
@pytest.mark.parametrize("state", ["replay", "payload"])
@pytest.mark.parametrize("source", [permuted, iterable])
def test_a_bucketer_needs_no_aligner(source, state, above, sampled):
    loader = alone(None, source, state, above)
    states = [loader.state_dict()]
    steps = taken(loader, states)
    for at in range(0, len(states), sampled(every=3).get("every", 1)):
        excluded = excluded_at(at, [steps], "few")
        loader = alone(excluded, source, state, above)
        loader.load_state_dict(states[at])
        later = []
        after = taken(loader, later, excluded)
        gone = check_once([steps[:at]], [after], range(SIZE), excluded)
        bucketer = loader.root.source if above(0.5) == 0.5 else loader.root.source.source
        assert bucketer.excluded_samples == len(gone) or not after
        assert bucketer.skipped_samples.get("seventeenth", 0) + len(gone & UNFIT) <= len(UNFIT)
        for place, kept in enumerate(later[::5]):
            loader = alone(None, source, state, above)
            loader.load_state_dict(kept)
            assert taken(loader) == after[5 * place + 1 :]


@pytest.mark.parametrize("state", ["replay", "payload"])
def test_a_graph_that_excludes_resumes_exactly(state, sampled):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_resumes_exactly(
            lambda: alone({1, 7, 22, 40}, state=state).root, **sampled(every=3, horizon=12)
        )


@pytest.mark.parametrize(
    "above",
    [
        lambda node: Prefetcher(node, 3, snapshot_frequency=2),
        lambda node: ParallelMapper(node, dict, 1, prebatch=2),
    ],
)
def test_a_node_that_takes_batches_once_more_is_refused_above(above):
    alone(None, above=above)
    with pytest.raises(ValueError, match="`exclude` must be empty below a `.*` that takes items"):
        alone({3}, above=above)


# --- the loader -----------------------------------------------------------------------------------


def loader_of(data=range(SIZE), **options):
    given = {"token_budget": TokenBudget(64, oversize="drop"), "window": 8, "process_fn": text}
    return ODBDataLoader(data, **given, **{"collate_fn": collate, **options})


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_loader_counts_them_and_keeps_them_in_its_state(num_workers):
    with loader_of(num_workers=num_workers) as loader:
        it = iter(loader)
        before = [pop_step_info(next(it)) for _ in range(5)]
        state = loader.state_dict()
    excluded = [key for key in range(SIZE) if key not in before[0].keys][::9]
    with loader_of(num_workers=num_workers, exclude=excluded) as loader:
        loader.load_state_dict(state)
        it = iter(loader)
        middle = [pop_step_info(next(it)) for _ in range(3)]
        state = loader.state_dict()
    with loader_of(num_workers=num_workers) as loader:
        loader.load_state_dict(state)
        after = taken(loader, excluded=excluded)
        gone = check_once([before], [middle + after], range(SIZE), {*excluded})
        assert loader.excluded_samples == len(gone) > 3
        for _ in range(2):
            gone = check_once([], [taken(loader)], range(SIZE), {*excluded})
            assert gone == {*excluded}
            assert loader.excluded_samples == len(excluded)


def test_of_a_mixture_those_of_one_source_go_however_often_they_come():
    data = {"long": range(60), "short": range(7)}
    options = {"weights": Mixing(stop="cycle"), "exclude": {"short": [3]}}
    steps = taken(loader_of(data, **options))
    rows = Counter(pair for info in steps for pair in zip(info.row_sources, info.keys, strict=True))
    assert rows["short", 4] > 3
    assert rows["long", 3] == 1
    assert not rows["short", 3]
    gone = [one for info in steps for one in info.left_out if one.reason == "excluded"]
    assert {(one.source, one.key) for one in gone} == {("short", 3)}
    assert abs(len(gone) - rows["short", 4]) <= 1


def test_a_file_names_keys_and_sources(tmp_path):
    path = tmp_path / "exclude.jsonl"
    lines = [17, {"source": "ocr", "key": 4, "reason": "NaN"}, {"key": 2**63 - 1}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    expected = ExcludedKeys({"": [17, 2**63 - 1], "ocr": [4]})
    for given in (path, str(path), expected, {"": iter([17, 2**63 - 1]), "ocr": {4}}):
        assert ExcludedKeys.of(given) == expected
    assert ExcludedKeys.from_state(expected.to_state()) == expected
    assert not ExcludedKeys.of(None)
    path.write_text("\ufeff17\n" + json.dumps({"key": 4, "note": "a\u2028b"}, ensure_ascii=False))
    assert ExcludedKeys.of(path) == ExcludedKeys({"": [17, 4]})
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.warns(UserWarning, match="keys of source 'ocr', but `dataset` is no dict"):
        taken(loader_of(exclude=path), excluded=[17])


BAD_ARGUMENTS = [
    (3, TypeError, r"`exclude` must be integers, a mapping .* but is 3 instead"),
    (b"x", TypeError, r"`exclude` must be integers"),
    ([1, "x"], TypeError, r"`exclude\[1\]` must be an integer, but is 'x'"),
    ([True], TypeError, r"`exclude\[0\]` must be an integer, but is True"),
    ([-1], ValueError, r"`exclude\[0\]` must be in 0\.\.\d+, but is -1"),
    ([2**63], ValueError, r"`exclude\[0\]` must be in 0"),
    ({"ocr": 3}, TypeError, r"`exclude\['ocr'\]` must be integers"),
    ({"ocr": [1.5]}, TypeError, r"`exclude\['ocr'\]\[0\]` must be an integer, but is 1.5"),
    ({3: [1]}, TypeError, r"a source in `exclude` must be a string, but is 3 instead"),
    (
        "not-there.jsonl",
        ValueError,
        r"`exclude` .* but 'not-there.jsonl' cannot be read: .*No such",
    ),
]


@pytest.mark.parametrize(("exclude", "error", "rule"), BAD_ARGUMENTS)
def test_what_is_not_valid_is_named(exclude, error, rule):
    with pytest.raises(error, match=rule):
        loader_of(exclude=exclude)
    with pytest.raises(error, match=rule):
        alone(exclude)


@pytest.mark.parametrize(
    "line",
    ["x", '"x"', "1.5", "-1", "true", "{}", '{"key": "3"}', '{"source": 3, "key": 3}', "[1]"],
)
def test_a_line_that_is_not_valid_is_named(tmp_path, line):
    path = tmp_path / "exclude.jsonl"
    path.write_text(f"3\n\n{line}\n4\n")
    with pytest.raises(ValueError, match=r"^`exclude`, line 3 of '.*exclude.jsonl': must be a key"):
        loader_of(exclude=path)


def test_an_epoch_of_which_nothing_is_left_says_why():
    with pytest.raises(SampleError, match=f"`exclude` leaves out {SIZE} samples"):
        taken(loader_of(exclude=range(SIZE)))
    with pytest.raises(SampleError, match="all 4 samples of the epoch were left out: .*skipped"):
        taken(loader_of(exclude=set(range(SIZE)) - set(range(5, SIZE, 17))))


# --- what ranks must do alike ---------------------------------------------------------------------


def test_ranks_that_exclude_other_keys_are_an_error_on_all():
    def run(exchange):
        with pytest.raises(StateError) as caught:
            taken(make(exchange, range(3 + exchange.rank)))
        return str(caught.value)

    for message in on_ranks(2, run):
        assert '`exclude` is "[0, 1, 2]" on rank 0, "[0, 1, 2, 3]" on rank 1' in message
    assert repr(ExcludedKeys({"": range(9)})) != repr(ExcludedKeys({"": [*range(8), 9]}))


def test_in_mid_epoch_too():
    def whole(exchange):
        it = iter(loader := make(exchange))
        for _ in range(5):
            next(it)
        return loader.state_dict()

    def resumed(exchange):
        loader = make(exchange, [71] if exchange.rank else None)
        loader.load_state_dict(states[exchange.rank])
        with pytest.raises(StateError, match="`exclude` is"):
            taken(loader)

    states = on_ranks(2, whole)
    on_ranks(2, resumed)


def test_a_node_between_pool_and_aligner_may_hold_samples():
    def graph(exclude=None):
        node = LengthObserver(ParallelProcessor(ShardedSampler(SIZE), text))
        bucketer = WindowBucketer(node, TokenBudget(64, oversize="drop"), 8, exclude=exclude)
        aligner = RankAligner(Prefetcher(bucketer, 2), accumulate=2)
        return Loader(GroupCollator(aligner, collate))

    assert not {3} & {key for info in taken(graph([3])) for key in info.keys}
    it = iter(loader := graph())
    for _ in range(4):
        next(it)
    resumed = graph([3])
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="its source must be the `WindowBucketer` itself"):
        iter(resumed)
    taken(loader)
    resumed.load_state_dict(loader.state_dict())
    assert not {3} & {key for info in taken(resumed) for key in info.keys}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_over_real_ranks(tmp_path, num_workers):
    body = """
        sys.path.append(sys.argv[1])
        import test_exclude as t
        import warnings
        warnings.simplefilter("ignore")
        options = {"num_workers": int(sys.argv[2]), "round_size": 4, "accumulate": 2}
        with t.loader_of(**options) as loader:
            it = iter(loader)
            before = [pop_step_info(next(it)) for _ in range(6)]
            state, rest = loader.state_dict(), [pop_step_info(batch) for batch in it]
        keys = {*rest[0].keys[:1], *before[0].keys[:1], *rest[-1].keys[:1]}
        excluded = {key for some in r.gathered(keys) for key in some}
        with t.loader_of(exclude=excluded, **options) as loader:
            loader.load_state_dict(state)
            after = t.taken(loader, excluded=excluded)
        ranks, befores = r.gathered(after), r.gathered(before)
        t.check_counts(ranks)
        gone = t.check_once(befores, ranks, range(t.SIZE), excluded)
        assert gone == excluded - {key for steps in befores for info in steps for key in info.keys}
        assert sum(r.gathered(loader.excluded_samples)) == len(gone) >= 3
        r.finish(len(after))
    """
    steps = run_ranks(tmp_path, body, 2, Path(__file__).parent, num_workers)
    assert steps[0] == steps[1] > 3


@pytest.mark.parametrize(
    ("data", "exclude"),
    [
        ({"a": range(9), "b": range(9)}, [3]),
        ({"a": range(9), "b": range(9)}, {"A": [3]}),
    ],
)
def test_keys_of_a_source_that_there_is_not_are_an_error(data, exclude):
    with pytest.raises(ValueError, match="`exclude` has keys of source .*, but the sources are"):
        ODBDataLoader(data, token_budget=64, exclude=exclude)
