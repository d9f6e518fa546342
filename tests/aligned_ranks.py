"""Small graphs of several ranks in one process, a thread for each rank."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from torchdata.nodes import IterableWrapper

from odb_nodes import LengthObserver, RankAligner, WindowBucketer
from odb_nodes.alignment.exchange.in_process import InProcessHub

TIMEOUT_S = 20.0


def shard(rank, size):
    """Samples of one rank, whose lengths come from their ids; every third is masked in part."""
    ids = range(1000 * rank, 1000 * rank + size)
    return [
        {"input_ids": [1] * (2 + 7 * i % 23), "labels": [-100] * (i % 3) + [1] * 30, "id": i}
        for i in ids
    ]


def cut(sample):
    length = len(sample["input_ids"])
    return {**sample, "labels": sample["labels"][:length]}


def graph(exchange, samples, *, budget=60, window=8, **options):
    source = LengthObserver(IterableWrapper([cut(sample) for sample in samples]))
    bucketer = WindowBucketer(source, budget, window)
    return RankAligner(bucketer, exchange, **{"timeout_s": TIMEOUT_S, **options})


def on_ranks(world_size, run, timeout_s=TIMEOUT_S):
    """What `run(exchange)` returns on each rank, all at once; raises what one of them raised."""
    hub = InProcessHub(world_size, timeout_s)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, hub.exchange(rank)) for rank in range(world_size)]
        return [future.result(120) for future in futures]


def ids(items):
    return [sample.data["id"] for item in items if not item.info.is_filler for sample in item[0]]


class Step(NamedTuple):
    """What a rank gets in a step, but for its tensors."""

    step: int
    is_filler: bool
    ids: list
    left_out: tuple
    ends_epoch: bool
    optimizer_samples: int


def described(item):
    info, found = item.info, [sample.data["id"] for sample in item.samples]
    return Step(
        *(info.step, info.is_filler, found, info.left_out),
        *(info.ends_epoch, info.optimizer_samples),
    )


def epoch_of(loader):
    """The steps of an epoch, and the states before and after them."""
    steps, states = [], [loader.state_dict()]
    for item in loader:
        steps.append(described(item))
        states.append(loader.state_dict())
    return steps, states


def ids_of(steps):
    return [index for step in steps if not step.is_filler for index in step.ids]


def places_before_the_last_round(states):
    """Those of the round before the one in which ranks share out what is left; none without."""
    return [at for at, state in enumerate(states) if state["root"].get("shares_rest")]
