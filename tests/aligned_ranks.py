"""Small graphs of several ranks in one process, a thread for each rank."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from in_process import InProcessHub
from torchdata.nodes import IterableWrapper

from odb_nodes import LengthObserver, RankAligner, WindowBucketer

TIMEOUT_S = 20.0


def shard(rank, size):
    """Samples of one rank, whose lengths come from their ids; every third is masked in part."""
    samples = []
    for index in range(1000 * rank, 1000 * rank + size):
        length = 2 + 7 * index % 23
        labels = ([-100] * (index % 3) + [1] * length)[:length]
        samples.append({"input_ids": [1] * length, "labels": labels, "id": index})
    return samples


def graph(exchange, samples, *, budget=60, window=8, **options):
    source = LengthObserver(IterableWrapper(samples))
    bucketer = WindowBucketer(source, budget, window)
    return RankAligner(bucketer, exchange, **{"timeout_s": TIMEOUT_S, **options})


def on_ranks(world_size, run, timeout_s=TIMEOUT_S):
    """What `run(exchange)` returns on each rank, all at once; raises what one of them raised."""
    hub = InProcessHub(world_size, timeout_s)
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run, hub.exchange(rank)) for rank in range(world_size)]
        return [future.result(120) for future in futures]


def errors_on_ranks(world_size, run, timeout_s=TIMEOUT_S):
    """The error that `run(exchange)` raises on each rank; None where it returns."""

    def caught(exchange):
        try:
            run(exchange)
        except Exception as error:
            return error
        return None

    return on_ranks(world_size, caught, timeout_s)


class Step(NamedTuple):
    """What a rank gets in a step, but for its tensors."""

    step: int
    is_filler: bool
    ids: list
    left_out: tuple
    ends_epoch: bool
    optimizer_samples: int


def described(item):
    info, ids = item.info, [sample.data["id"] for sample in item.samples]
    return Step(
        *(info.step, info.is_filler, ids, info.left_out),
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
