"""Small graphs of several ranks in one process, a thread for each rank."""

from concurrent.futures import ThreadPoolExecutor

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
