"""Every sample has a key, which is in the step that it is in, or in what was left out."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from aligned_ranks import on_ranks
from torchdata.nodes import IterableWrapper, ParallelMapper, Prefetcher, Unbatcher
from toys import Stream
from worker_functions import SkipSome

from odb_nodes import (
    GroupCollator,
    ItemKey,
    IterableSource,
    LengthObserver,
    Loader,
    Mixing,
    ODBDataLoader,
    ParallelProcessor,
    PerSource,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceMixer,
    StateError,
    TokenBudget,
    WeightedSampler,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.core.contract import EpochNode, EpochState
from odb_nodes.core.nodes.exclusions import ExcludedKeys

BUDGET = TokenBudget(64, oversize="drop")
SKIPPED = [(n, "", "seventeenth") for n in range(5, 120, 17)]
DROPPED = [(n, "", "dropped") for n in (40, 41, 80)]

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* (is|were) (skipped|dropped)",
    "ignore:.*Further samples",
    "ignore:`weights` are not given",
    "ignore:.*not emitted",
)


def text(index):
    """A sample that knows its number; every 17th is skipped, and 3 of them exceed 64 tokens."""
    if index % 17 == 5:
        return Skipped("seventeenth")
    length = 90 if index in (40, 41, 80) else 5 + index * 7 % 23
    return {"input_ids": [index + 1] * length, "id": index}


def steps_of(loader):
    """Per step: what its `StepInfo` says of it, and the numbers that the model would see."""
    return [(pop_step_info(batch), batch["id"].tolist()) for batch in loader]


def check(steps, expected, left_out=()):
    """The keys of the steps are those of their rows; each comes once, in a step or left out."""
    for info, ids in steps:
        assert len(info.keys) == len(info.row_sources) == len(info.row_repeats)
        assert len(info.keys) == info.local_samples
        assert info.is_filler or list(info.keys) == ids
    out = [sample for info, _ in steps for sample in info.left_out]
    assert Counter(out) == Counter(left_out)
    keys = [key for info, _ in steps for key in info.keys] + [sample.key for sample in out]
    assert sorted(keys) == sorted(expected)


def collate_ids(group):
    return {"id": torch.tensor([sample["id"] for sample in group])}


def test_of_a_map_style_dataset_they_are_the_indices():
    options = {"window": 8, "process_fn": text, "collate_fn": collate_ids}
    loader = ODBDataLoader(range(120), token_budget=BUDGET, **options)
    epochs = [steps_of(loader) for _ in range(2)]
    for steps in epochs:
        check(steps, range(120), SKIPPED + DROPPED)
    assert [info.keys for info, _ in epochs[0]] != [info.keys for info, _ in epochs[1]]


DATA = [{"input_ids": [1] * (n % 9 + 1), "id": n} for n in range(50)]
ORDER = [49, 3, 3, 17]


@pytest.mark.parametrize(
    ("dataset", "options", "expected"),
    [
        (Stream(DATA), {}, range(50)),
        (DATA, {"sampler": ORDER}, ORDER),
        (DATA, {"sampler": WeightedSampler([1.0] * 50, 200)}, [*WeightedSampler([1.0] * 50, 200)]),
    ],
    ids=["iterable", "sampler", "weighted"],
)
def test_of_an_iterable_they_are_numbers_and_of_a_sampler_indices(dataset, options, expected):
    check(steps_of(ODBDataLoader(dataset, token_budget=32, window=8, **options)), expected)


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_indices_of_numpy_or_torch_stand_for_the_same_samples_as_plain_ones(kind):
    order = random.Random(5).sample(range(50), 50)
    options = {"token_budget": 32, "window": 8}

    def loader_of(order, **further):
        return ODBDataLoader(DATA, sampler=order, **options, **further)

    loaders = loader_of(order), loader_of(kind(order))
    plain, other = ([pop_step_info(batch).keys for batch in loader] for loader in loaders)
    assert plain == other and {type(key) for keys in other for key in keys} == {int}

    first = loader_of(kind(order))
    batches = iter(first)
    seen = [pop_step_info(next(batches)).keys for _ in range(3)]
    resumed = loader_of(order)  # by plain ones
    resumed.load_state_dict(first.state_dict())
    assert seen + [pop_step_info(batch).keys for batch in resumed] == plain

    excluding = loader_of(kind(order), exclude=kind([7]))
    assert 7 not in [key for batch in excluding for key in pop_step_info(batch).keys]
    assert excluding.excluded_samples == 1


def test_indices_that_are_no_integers_reach_the_dataset_unchanged():
    letters = {"a": {"input_ids": [1, 2]}, "b": {"input_ids": [3]}}

    class Letters:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return letters[index]

    loader = ODBDataLoader(Letters(), sampler=["b", "a"], token_budget=32)
    assert [pop_step_info(batch).keys for batch in loader] == [(None, None)]


class Pages(EpochNode):
    """A source of a user's own, whose keys are page numbers."""

    def begin_epoch(self):
        self.page = 0

    def restore(self, state):
        self.page = 0

    def save(self):
        return EpochState()

    def next(self):
        if self.page == 9:
            raise StopIteration
        self.page += 1
        return {"input_ids": [1] * self.page, "id": 100 + self.page}

    def item_key(self):
        return ItemKey("", 100 + self.page, world_size=1)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_custom_node_may_give_keys(mixed):
    node = SourceMixer({"book": Pages()}) if mixed else Pages()
    steps = steps_of(Loader(GroupCollator(WindowBucketer(LengthObserver(node), 64, 4))))
    check(steps, range(101, 110))
    assert {*steps[0][0].row_sources} == ({"book"} if mixed else {""})


def test_sources_without_keys_give_none():
    plain = IterableWrapper([{"input_ids": [1, 2], "id": n} for n in range(9)])
    many = Unbatcher(
        ParallelProcessor(ShardedSampler(3), lambda n: [{"input_ids": [n], "id": n}] * 2)
    )
    for node in (plain, many):
        for info, _ in steps_of(Loader(GroupCollator(WindowBucketer(LengthObserver(node), 8, 4)))):
            assert set(info.keys) == {None}


# --- on ranks -------------------------------------------------------------------------------------


def graph_of(exchange, source, process_fn=text, **options):
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    node = LengthObserver(ParallelProcessor(source, process_fn, **shard))
    aligner = RankAligner(WindowBucketer(node, BUDGET, 8), exchange, timeout_s=20.0, **options)
    return Loader(GroupCollator(aligner))


def sharded(exchange, size, seed=0):
    return ShardedSampler(size, seed=seed, rank=exchange.rank, world_size=exchange.world_size)


@pytest.mark.parametrize("is_own", [True, False])
def test_step_info_names_sources_with_data_per_rank(is_own):
    def run(exchange):
        sampler = ShardedSampler(60) if is_own else sharded(exchange, 60)
        mixer = SourceMixer({"a": sampler, "b": sharded(exchange, 60)})
        return steps_of(graph_of(exchange, mixer, PerSource({"a": text, "b": text})))

    for steps in on_ranks(2, run):
        assert {source for info, _ in steps for source in info.row_sources} == {"a", "b"}
        for info, _ in steps:
            assert info.per_rank_sources == ({*info.row_sources} & {"a"} if is_own else set())


# --- random numbers -------------------------------------------------------------------------------


def augmented(index):
    drawn = [random.random(), np.random.random(), torch.rand(()).item()]
    return {"input_ids": [1] * (1 + int(drawn[0] * 9)), "id": index, "drawn": torch.tensor(drawn)}


def test_a_sample_that_comes_twice_in_an_epoch_is_drawn_anew():
    node = ParallelProcessor(IterableSource([3, 3, 3], yields_indices=True), augmented)
    assert len({tuple(sample["drawn"].tolist()) for sample in Loader(node)}) == 3
    mixer = SourceMixer({"a": ShardedSampler(2), "b": ShardedSampler(40)}, stop="cycle")
    everything = [*Loader(ParallelProcessor(mixer, lambda routed: (routed, random.random())))]
    of_a = [number for routed, number in everything if routed.source == "a"]
    assert len(of_a) == len({*of_a}) > 10
    assert len({number for _, number in everything}) == len(everything)  # nor are they shared


# --- samples are left out by their keys: what the resume machine does not see of it --------------


SIZE = 72


def loader_of(data=range(SIZE), **options):
    return ODBDataLoader(
        data, **{"token_budget": BUDGET, "window": 8, "process_fn": text, **options}
    )


def taken(loader):
    return [pop_step_info(batch) for batch in loader]


def keys_of(steps):
    return [key for info in steps for key in info.keys]


def excluded_in(steps):
    return [sample.key for info in steps for sample in info.left_out if sample.reason == "excluded"]


def alone(exclude=None, above=lambda node: node):
    node = LengthObserver(ParallelProcessor(ShardedSampler(SIZE), text))
    return Loader(above(GroupCollator(WindowBucketer(node, BUDGET, 8, exclude=exclude))))


@pytest.mark.parametrize(
    "above",
    [
        lambda node: Prefetcher(node, 3, snapshot_frequency=2),
        lambda node: ParallelMapper(node, dict, 1, prebatch=2),
    ],
)
def test_a_node_that_takes_batches_once_more_is_refused_above(above):
    alone(None, above=above)
    with pytest.raises(ValueError, match="`exclude` must be empty below a `.*` that reads items"):
        alone({3}, above=above)


def test_a_node_between_pool_and_aligner_may_hold_samples():
    def graph(exclude=None):
        node = LengthObserver(ParallelProcessor(ShardedSampler(SIZE), text))
        bucketer = WindowBucketer(node, BUDGET, 8, exclude=exclude)
        return Loader(GroupCollator(RankAligner(Prefetcher(bucketer, 2), accumulate=2)))

    assert 3 not in keys_of(taken(graph([3])))
    it = iter(loader := graph())
    for _ in range(4):
        next(it)
    resumed = graph([3])
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(
        StateError, match="its source must be a `WindowBucketer` or `PlannedGroups` itself"
    ):
        iter(resumed)
    list(it)
    resumed.load_state_dict(loader.state_dict())
    assert 3 not in keys_of(taken(resumed))


# --- the loader -----------------------------------------------------------------------------------


def test_a_loader_counts_them_and_keeps_them_in_its_state():
    excluded = [*range(3, SIZE, 9)]
    loader = loader_of(exclude=excluded)
    next(iter(loader))
    state = loader.state_dict()
    loader = loader_of()
    loader.load_state_dict(state)
    taken(loader)
    for _ in range(2):
        assert sorted(excluded_in(taken(loader))) == excluded
        assert loader.excluded_samples == len(excluded)


@pytest.mark.parametrize("index", [np.int64(-1), True, torch.tensor(False)])
def test_an_index_of_a_sampler_that_is_no_key_is_an_error(index):
    with pytest.raises(SampleError, match="no bool, but `sampler` yields .*index % len"):
        taken(loader_of(sampler=[0, 1, index]))


def test_excluded_keys_of_a_repeated_source_never_come():
    data = {"long": range(60), "short": range(7)}
    steps = taken(loader_of(data, weights=Mixing(stop="cycle"), exclude={"short": [3]}))
    rows = Counter(pair for info in steps for pair in zip(info.row_sources, info.keys, strict=True))
    assert rows["short", 4] > 3
    assert rows["long", 3] == 1
    assert not rows["short", 3]
    assert {*excluded_in(steps)} == {3}
    assert abs(len(excluded_in(steps)) - rows["short", 4]) <= 1


def test_a_file_names_keys_and_sources(tmp_path):
    path = tmp_path / "exclude.jsonl"
    lines = [17, {"source": "ocr", "key": 4, "reason": "NaN"}, {"key": 2**63 - 1}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    expected = ExcludedKeys({"": [17, 2**63 - 1], "ocr": [4]})
    for exclude in (path, str(path), expected, {"": iter([17, 2**63 - 1]), "ocr": {4}}):
        assert ExcludedKeys.of(exclude) == expected
    assert ExcludedKeys.from_state(expected.to_state()) == expected
    with pytest.warns(UserWarning, match="keys of source 'ocr', but `dataset` is no dict"):
        assert 17 not in keys_of(taken(loader_of(exclude=path)))
    path.write_text("\ufeff17\n" + json.dumps({"key": 4, "note": "a\u2028b"}, ensure_ascii=False))
    assert ExcludedKeys.of(path) == ExcludedKeys({"": [17, 4]})


REFUSALS = [
    (3, TypeError, "`exclude` must be integers, a mapping"),
    (b"x", TypeError, "`exclude` must be integers"),
    ([1, "x"], TypeError, r"`exclude\[1\]` must be an integer, but is 'x'"),
    ([True], TypeError, r"`exclude\[0\]` must be an integer, but is True"),
    ([-1], ValueError, r"`exclude\[0\]` must be in 0\.\.\d+, but is -1"),
    ([2**63], ValueError, r"`exclude\[0\]` must be in 0"),
    ({"ocr": [1.5]}, TypeError, r"`exclude\['ocr'\]\[0\]` must be an integer"),
    ({"ocr": 3}, TypeError, r"`exclude\['ocr'\]` must be integers"),
    ({3: [1]}, TypeError, "a source in `exclude` must be a string"),
    ("not-there.jsonl", ValueError, "'not-there.jsonl' cannot be read"),
]


@pytest.mark.parametrize(("exclude", "error", "rule"), REFUSALS)
def test_an_invalid_exclude_is_named(exclude, error, rule):
    for make in (lambda: loader_of(exclude=exclude), lambda: alone(exclude)):
        with pytest.raises(error, match=rule):
            make()


@pytest.mark.parametrize("exclude", [[3], {"A": [3]}])
def test_keys_of_a_source_that_there_is_not_are_an_error(exclude):
    with pytest.raises(ValueError, match="`exclude` has keys of source .*, but the sources are"):
        loader_of({"a": range(9), "b": range(9)}, exclude=exclude)


@pytest.mark.parametrize(
    "line", ["x", '"x"', "1.5", "-1", "true", "{}", '{"key": "3"}', '{"source": 3, "key": 3}']
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


def test_keys_are_not_excluded_from_samples_without_keys_in_silence():
    samples = Prefetcher(IterableWrapper([{"input_ids": [1]}] * 30), 2)
    node = WindowBucketer(LengthObserver(samples), 8, 4, exclude=[3])
    with pytest.raises(SampleError, match="`exclude` names keys, .* no key"):
        next(iter(Loader(node)))


def test_ranks_that_exclude_other_keys_are_an_error_on_all():
    def run(exchange):
        loader = loader_of(process_group=exchange)
        for _ in zip(range(5), loader, strict=False):
            pass
        other = loader_of(process_group=exchange, exclude=range(3 + exchange.rank))
        other.load_state_dict(loader.state_dict())
        with pytest.raises(StateError) as caught:
            taken(other)
        return str(caught.value)

    for message in on_ranks(2, run):
        assert '`exclude` is "[0, 1, 2]" on rank 0, "[0, 1, 2, 3]" on rank 1' in message
    assert repr(ExcludedKeys({"": range(9)})) != repr(ExcludedKeys({"": [*range(8), 9]}))


# --- samples that processing skips: left out in order, counted by reason, exact after a resume ---


def skipping(**options):
    return loader_of(process_fn=SkipSome(**options), shuffle=False)


def test_the_first_of_each_reason_is_shown():
    with pytest.warns(UserWarning) as caught:
        taken(skipping())
    shown = [str(warning.message) for warning in caught if "is skipped" in str(warning.message)]
    assert [text.partition(". Further")[0] for text in shown] == [
        "sample 0 of the epoch (key 0) is skipped (missing): no file for 0",
        "sample 3 of the epoch (key 3) is skipped (corrupt): cannot read 3",
    ]


def test_data_that_was_mended_or_lost_between_save_and_resume():
    next(iter(loader := skipping()))
    lost, mended = skipping(also=range(SIZE)), skipping(never=True)
    for loaded in (lost, mended):
        loaded.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="is skipped now .lost.: gone"):
        next(iter(lost))
    # What was skipped stays so, what comes later is good: nothing twice.
    rest = keys_of(taken(mended))
    assert len(rest) == len({*rest})
    taken(loader)
    assert 0 < sum(mended.skipped_samples.values()) < sum(loader.skipped_samples.values())
