"""A restore makes the samples again that it needs, and no others; and it notices what changed."""

import json
import random
import time
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
from aligned_ranks import on_ranks
from rank_jobs import RankJob

from odb_nodes import (
    ItemKey,
    IterableSource,
    JsonlSource,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ParallelProcessor,
    PeerError,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    SourceMixer,
    StateError,
    WindowBucketer,
    WorkerOptions,
    pop_step_info,
)
from odb_nodes.core.contract import EpochNode, EpochState, can_restore, snapshot
from odb_nodes.core.contract.config import loading_with
from odb_nodes.core.nodes import sample_store

ROUND = 8


def length(n):
    return 1 + n * 7919 % 61


class Counting:
    """A `process_fn` that counts its calls."""

    def __init__(self, data=None):
        self.data = data
        self.calls = 0

    def __call__(self, item):
        self.calls += 1
        if self.data is not None:
            return {"input_ids": self.data[item]}
        return {"input_ids": [item] * length(item)}


def graph_of(exchange, source, process_fn, window, num_workers=0):
    shard = {"rank": exchange.rank, "world_size": exchange.world_size}
    workers = WorkerOptions(num_workers=num_workers, chunk_size=5, method="thread")
    node = LengthObserver(ParallelProcessor(source(**shard), process_fn, workers=workers, **shard))
    bucketer = WindowBucketer(node, 256, window)
    return RankAligner(bucketer, exchange, ROUND, timeout_s=20.0)


@pytest.mark.parametrize(("has_keys", "num_workers"), [(True, 0), (False, 2)])
def test_a_restore_processes_at_most_the_window_and_the_round(has_keys, num_workers):
    window, world_size = 64, 2
    size = 6 * window * world_size
    source = partial(ShardedSampler, size) if has_keys else partial(IterableSource, range(size))

    def run(exchange):
        loader = Loader(graph_of(exchange, source, Counting(), window))
        states, sizes = [], []
        for item in loader:
            sizes.append(len(item[0]))
            states.append(loader.state_dict())
        return states, max(sum(sizes[n : n + ROUND]) for n in range(len(sizes)))

    def resume(exchange):
        states, of_round = ranks[exchange.rank]
        most = 0
        for state in states[: -1 : max(1, len(states) // 4)]:
            process_fn = Counting()
            root = graph_of(exchange, source, process_fn, window, num_workers)
            if has_keys and not num_workers:
                root.reset(state["root"])
                assert process_fn.calls == 0  # each is made before the step that holds it
            with loading_with(makes_all=True):
                root.reset(state["root"])
            replayed = root.replayed_samples + root.source.replayed_samples
            # As steps of the round are out, groups of the next one are formed.
            assert replayed <= window + 1.5 * of_round
            assert num_workers or process_fn.calls < replayed + 10  # the rest of a chunk
            assert num_workers or not has_keys or process_fn.calls == replayed
            most = max(most, replayed)
            root.source.source.source.close()
        return most

    ranks = on_ranks(world_size, run)
    assert min(on_ranks(world_size, resume)) > window // 2


@dataclass(kw_only=True)
class ShelfState(EpochState):
    at: int


class Shelf(EpochNode):
    """A source of a user's own that can read at a key."""

    STATE = ShelfState

    def __init__(self, size=300):
        super().__init__()
        self.size, self.position, self.nexts, self.reads = size, 0, 0, []

    def begin_epoch(self):
        self.position = 0

    def restore(self, state):
        self.position = state.at

    def save(self):
        return ShelfState(at=self.position)

    def next(self):
        if self.position == self.size:
            raise StopIteration
        self.position += 1
        self.nexts += 1
        return self.position * 3

    def item_key(self):
        return ItemKey("", self.position * 3, world_size=1)

    def read(self, key):
        self.reads.append(key)
        return key


@pytest.mark.parametrize("mixed", [False, True])
def test_a_custom_source_is_read_at_the_needed_keys(mixed):
    def make(shelf):
        node = SourceMixer({"a": shelf, "b": ShardedSampler(300)}) if mixed else shelf
        processed = ParallelProcessor(node, lambda item: getattr(item, "item", item))
        named = LengthObserver(processed, lambda n: 1 + n % 40)
        return WindowBucketer(named, 256, 32)

    first = make(Shelf())
    first.reset(None)
    for _ in range(15):
        next(first)
    shelf = Shelf()
    again = make(shelf)
    again.reset(first.state_dict())
    pooled = [sample.key for sample in again.store.look(again.store.ordinals())]
    assert shelf.nexts < WorkerOptions().nominal_chunk_samples  # of the chunk that it stands in
    assert len(shelf.reads) == len(pooled) or (mixed and 8 < len(shelf.reads) < len(pooled))
    assert {*shelf.reads} <= {*pooled}
    rest = [[sample.data for sample in group] for group in again]
    assert rest == [[sample.data for sample in group] for group in first]


# --- what changed ---------------------------------------------------------------------------------


def data_of(seed, size=200):
    rng = random.Random(seed)
    return [[rng.randrange(1000) for _ in range(rng.randrange(2, 40))] for _ in range(size)]


def over(data, state=None, strict=True, verify="lazy", **options):
    """A loader over samples of these tokens, begun where a state stands."""
    arguments = {"token_budget": 200, "window": 24, "process_fn": Counting(data), **options}
    loader = ODBDataLoader(range(len(data)), **arguments)
    if state is not None:
        loader.load_state_dict(state, strict=strict, verify=verify)
        iter(loader)
    return loader


def keys_of(batches):
    return [pop_step_info(batch).keys for batch in batches]


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 5))]
)
def test_an_item_that_was_edited_or_swapped_is_found_before_the_batch_that_holds_it(seed):
    rng, data = random.Random(seed), data_of(seed)
    it = iter(loader := over(data, seed=seed))
    for _ in range(rng.randrange(1, 15)):
        next(it)
    state = loader.state_dict()
    store = over(data, state, seed=seed)._graphs[0].bucketer.store
    pooled = store.look(store.ordinals())
    key = rng.choice([sample.key for sample in pooled])
    changed, other = [list(tokens) for tokens in data], key
    if seed % 2:
        changed[key][rng.randrange(len(data[key]))] += 1
    else:
        other = rng.choice([n for n in range(200) if n != key])
        changed[key], changed[other] = data[other], data[key]
    message = r"\(key \d+\) (has other content|had \d+ tokens)"
    with pytest.raises(StateError, match=message):
        over(changed, state, verify="eager", seed=seed)
    rest, seen = keys_of(over(data, state, seed=seed)), []
    loader = over(changed, state, seed=seed)
    for _ in range(2):  # The state after the error still has the group.
        with pytest.raises(StateError, match=message):
            for batch in loader:
                seen.append(pop_step_info(batch).keys)
        assert seen == rest[: len(seen)] and {key, other} & {*rest[len(seen)]}
    if key == other:  # else the run has read the other one changed
        assert keys_of(over(data, loader.state_dict(), seed=seed)) == rest[len(seen) :]


def test_a_change_that_is_meant_is_warned_of_once():
    next(iter(loader := over(data := data_of(1))))
    changed = [[n + 1 for n in tokens] for tokens in data]
    with pytest.warns(UserWarning, match="has other content now.*`process_fn`") as caught:
        rest = [
            pop_step_info(batch).keys for batch in over(changed, loader.state_dict(), strict=False)
        ]
    warnings = [warning for warning in caught if "content" in str(warning.message)]
    assert len(warnings) == 1
    assert len([key for keys in rest for key in keys]) > 150


@pytest.mark.filterwarnings("ignore:.*has other content now")
def test_a_changed_sample_of_a_planned_round_is_an_error_even_if_the_change_is_meant():
    data = data_of(0, 1000)

    def graph(exchange, tokens):
        process_fn = Counting(tokens)
        source = lambda **shard: ShardedSampler(1000, **shard)  # noqa: E731
        return Loader(graph_of(exchange, source, process_fn, 16))

    def run(exchange):
        loader = graph(exchange, data)
        it = iter(loader)
        for _ in range(22):  # 1 + 2 + 3 + 4 + 5 + 6 steps are six rounds
            next(it)
        state = loader.state_dict()
        key = next(it)[0][0].key
        changed = [[token + (index == key) for token in row] for index, row in enumerate(data)]
        resumed = graph(exchange, changed)
        resumed.load_state_dict(state, strict=False)
        with pytest.raises(StateError, match="within a round of steps"):
            next(iter(resumed))

    on_ranks(2, run)


def bucketer(kind=WindowBucketer, process=None, size=900):
    samples = ParallelProcessor(ShardedSampler(size), process or Counting())
    return kind(LengthObserver(samples), 256, 32)


def test_a_state_with_keys_needs_a_source_that_reads_them(monkeypatch):
    def make():
        return RankAligner(bucketer())

    next(node := make())
    states = node.state_dict(), node.source.state_dict()
    monkeypatch.delattr(ShardedSampler, "read")
    with pytest.raises(StateError, match="cannot read items by their keys any more"):
        make().reset(states[0])
    with pytest.raises(StateError, match="cannot read items by their keys any more"):
        make().source.reset(states[1])
    next(node := make())
    without = node.state_dict()
    monkeypatch.undo()
    with pytest.raises(StateError, match="reads items by their keys now"):
        make().reset(without)


# --- what does not go well ------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["bits_of", "records_of"])
def test_a_state_that_was_interrupted_leaves_the_next_one_right(function, monkeypatch):
    node = bucketer()
    for _ in range(9):
        next(node)
        node.state_dict()
    for _ in range(3):
        next(node)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(sample_store, function, interrupt)
            node.state_dict()
    again = bucketer()
    again.reset(node.state_dict())
    assert [next(again) for _ in range(20)] == [next(node) for _ in range(20)]


def interrupt(*_, **__):
    raise KeyboardInterrupt


def shelf_with_key(key):
    """A source whose items all have this key."""
    node = Shelf()
    node.item_key = lambda: key(node) if callable(key) else key
    return node


KEYS = [(-5, 1), (5, 0), (2**63, 1), (5, 1, -1), ("5", 1)]


@pytest.mark.parametrize("key", [*(ItemKey("", *key) for key in KEYS), ItemKey(None, 5, 1), 5])
def test_an_invalid_key_is_an_error_that_names_its_node(key):
    for node in (shelf_with_key(key), ParallelProcessor(shelf_with_key(key), int)):
        with pytest.raises(SampleError, match=r"`item_key\(\)` of `Shelf` must return an"):
            next(LengthObserver(node, lambda n: 30))


def test_a_key_may_be_a_numpy_integer_but_not_none_for_a_readable_source():
    node = shelf_with_key(lambda node: ItemKey("", np.int64(node.position * 3), 1))
    assert type(next(LengthObserver(node, lambda n: 30)).key) is int
    node = WindowBucketer(LengthObserver(shelf_with_key(None), lambda n: 30), 64, 8)
    next(node)
    with pytest.raises(SampleError, match=r"`item_key\(\)` returned None"):
        node.get_state()


def test_a_method_that_is_called_read_makes_no_source_readable():
    class Reader(Shelf):
        item_key = EpochNode.item_key

    assert can_restore(Shelf()) and not can_restore(Reader())


@pytest.mark.filterwarnings("ignore:.*Further samples")
@pytest.mark.filterwarnings("ignore:of the .* skipped by processing")
def test_a_state_after_a_failed_round_resumes_like_the_state_before_it():
    """What is left out comes once, also where a round is tried again."""

    def text(index):
        return Skipped("third") if index % 3 == 0 else {"input_ids": [index] * length(index)}

    def graph(exchange):
        shard = {"rank": exchange.rank, "world_size": exchange.world_size}
        node = LengthObserver(ParallelProcessor(ShardedSampler(900, **shard), text, **shard))
        return RankAligner(WindowBucketer(node, 256, 16), exchange, ROUND, timeout_s=1.0)

    def run(exchange):
        node, states = graph(exchange), []
        node.reset(None)
        if exchange.rank == 1:
            for _ in range(15):  # all of three rounds: it comes to no further one
                next(node)
            return [node.state_dict()] * 2
        with pytest.raises(PeerError):
            while True:
                states.append(node.state_dict())
                next(node)
        assert len(states) == 16
        return [states[-1], node.state_dict()]

    def resume(exchange, which):
        node = graph(exchange)
        node.reset(ranks[exchange.rank][which])
        return [(info.keys, info.left_out) for _, info in node]

    ranks = on_ranks(2, run, 1.0)
    before, after = (on_ranks(2, partial(resume, which=which)) for which in (0, 1))
    assert before == after
    assert any(left_out for _, left_out in after[0])


def test_a_restore_that_is_refused_leaves_no_worker_behind():
    with over(data := data_of(2), num_workers=2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with over([[n + 1 for n in tokens] for tokens in data], num_workers=2) as again:
        for verify in "lazy", "eager":
            again.load_state_dict(state, verify=verify)
            for _ in range(2):
                with pytest.raises(StateError, match="has other content"):
                    list(again)
                assert again.worker_pids == []


def test_a_reset_discards_samples_to_reprocess():
    started = []

    def slow(item):
        started.append(item)
        time.sleep(0.01)
        return {"input_ids": [item]}

    workers = WorkerOptions(num_workers=1, chunk_size=2, in_flight_samples=200, method="thread")
    node = ParallelProcessor(ShardedSampler(200, shuffle=False), slow, seed=None, workers=workers)
    node.reset(None)
    node.make_again([ItemKey("", n, 1) for n in range(200)]).take([0])
    node.reset(None)
    assert next(node)["input_ids"] == [0]
    assert len(started) < 100
    node.close()


# --- states that are kept: whenever they are made, they are what they would have been at once ----


def unmade_in(state):
    """How many values of a state are not made yet."""
    parts = state.values() if isinstance(state, dict) else state
    if hasattr(state, "to_state"):
        return 1
    return sum(map(unmade_in, parts)) if isinstance(state, (dict, list, tuple)) else 0


def test_samples_do_not_stay_for_the_sake_of_a_state():
    class Data(dict):
        alive = 0

        def __init__(self, index):
            super().__init__(input_ids=[index] * length(index))
            Data.alive += 1

        def __del__(self):
            Data.alive -= 1

    aligner = RankAligner(bucketer(process=Data, size=150))
    aligner.reset(None)
    kept = []
    for group, _ in aligner:
        kept.append(snapshot(aligner))
        del group
    assert unmade_in(kept) > 20
    assert Data.alive <= 2  # the sample to fill with, and the last one of the processor


class SavesOtherwise(WindowBucketer):
    def save(self):
        return replace(super().save(), dropped_samples=99)


class SaysOtherwise(WindowBucketer):
    def get_state(self):
        return {**super().get_state(), "dropped_samples": 99}


@pytest.mark.parametrize("kind", [SavesOtherwise, SaysOtherwise])
def test_a_snapshot_of_a_subclass_uses_its_own_save(kind):
    next(node := bucketer(kind))
    assert snapshot(node)["dropped_samples"] == 99
    assert bool(unmade_in(snapshot(node))) is (kind is SavesOtherwise)


# --- real ranks that are killed -------------------------------------------------------------------

KILLED = """
from pathlib import Path
import time
from odb_nodes import WorkerOptions, load_state, save_state
folder, pause_s, lengths = Path(sys.argv[1]), float(sys.argv[2]), json.loads(sys.argv[3])
workers = WorkerOptions(num_workers=1, start_method="fork", chunk_size=2)
loader = r.make_dataloader(400, window=64, workers=workers, lengths=lengths)
saved = [{int(one.stem) for one in folder.glob(f"{rank}/*.pt")} for rank in range(world_size)]
done = max(set.intersection(*saved), default=0)
lines = folder / f"{rank}.jsonl"
before = lines.read_text().splitlines()[:done] if done else []
if done:
    loader.load_state_dict(load_state(folder / f"{rank}/{done}.pt")["loader"])
(folder / str(rank)).mkdir(exist_ok=True)
dist.barrier()
with lines.open("w") as out:
    out.writelines(f"{line}\\n" for line in before)
    for step, batch in enumerate(loader, done + 1):
        time.sleep(pause_s)
        out.write(json.dumps(r.describe(batch)) + "\\n")
        out.flush()
        save_state({"loader": loader.state_dict()}, folder / f"{rank}/{step}.pt")
loader.close()
dist.barrier()
(folder / f"{rank}.done").touch()
"""


WRONG_LENGTHS = [3 + 7 * n % 29 + n % 3 - 1 for n in range(400)]  # of two samples of three


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lengths", [None, WRONG_LENGTHS], ids=["lengths=None", "lengths=wrong"])
def test_killed_ranks_resume_with_the_same_batches(tmp_path, lengths, world_size=2):
    def lines(folder):
        paths = [folder / f"{rank}.jsonl" for rank in range(world_size)]
        return [path.read_text().splitlines() if path.exists() else [] for path in paths]

    def start(folder, pause_s):
        folder.mkdir(exist_ok=True)
        jobs = tmp_path / f"jobs{time.monotonic_ns()}"
        jobs.mkdir()
        return RankJob(jobs, KILLED, world_size, str(folder), str(pause_s), json.dumps(lengths))

    with start(tmp_path / "whole", 0.0) as job:
        job.finish(120)
    folder, kills = tmp_path / "killed", 0
    for target in (3, 13):
        with start(folder, 0.02) as job:  # and is killed
            deadline = time.monotonic() + 60
            while min(map(len, lines(folder))) < target and time.monotonic() < deadline:
                time.sleep(0.005)
            kills += not (folder / "0.done").exists()
    with start(folder, 0.0) as job:
        job.finish(120)
    assert kills and lines(folder) == lines(tmp_path / "whole")


def test_a_key_that_is_not_there_any_more_is_an_error(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(f"{json.dumps({'n': n})}\n" for n in range(100, 400)))
    source = JsonlSource(path)
    assert source.read(len('{"n": 100}\n')) == {"n": 101}
    for key in (3, 10**6, 1 << 40):
        with pytest.raises(StateError, match=r"there is no record at byte \d+ of "):
            source.read(key)
    source.close()
    path.unlink()
    with pytest.raises(StateError, match="there is no record at byte 0 of .*No such file"):
        source.read(0)
    with pytest.raises(StateError, match="there is no sample 50: the data have 50 now"):
        ShardedSampler(50).read(50)
