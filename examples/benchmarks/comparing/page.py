"""What pages claim of the comparison, and their tables of it; `check_claims.py` checks both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from comparing.claims import Cell, Claim, PageTable

FIXED, GROUPED = "fixed batches", "`group_by_length` of transformers"
REBALANCED = "`batch_rebalance` of transformers"
LHOTSE, LHOTSE_TIME = "lhotse, buffer as our window", "lhotse, `quadratic_duration`"
TRL, AXOLOTL = "TRL, best fit decreasing", "axolotl's first fit, written anew"
PADDED, PACKED = "odb_nodes, padded", "odb_nodes, packed"
TIMED, PADDED_KNOWN, PACKED_KNOWN = (
    f"{PADDED}, `step_time`",
    f"{PADDED}, lengths known",
    f"{PACKED}, lengths known",
)
GRAIN_PACKED, LHOTSE_START = "Grain, packed first fit", "lhotse, lengths from processing"
LIST, STREAM = "odb_nodes, list", "odb_nodes, stream"
LIST_EARLY, LIST_KNOWN = "odb_nodes, list, `window_start`", "odb_nodes, list, lengths known"
STATEFUL, STREAM_OF_DATASETS = "`StatefulDataLoader`, list", "datasets, stream"

padding = partial(Cell, "Padding")
balance = partial(Cell, "Balance over 4 ranks")
waits = partial(Cell, "Waiting")
first = partial(Cell, "First batch")
resumed = partial(Cell, "Resume")
on_ranks = partial(Cell, "Resume on 4 ranks")
store = partial(Cell, "Object store")
rate = partial(Cell, "Loader rate")
speed = partial(Cell, "Training: speed")
batches = partial(Cell, "Training: batches")  # its last number is the held-out loss
quality = partial(Cell, "Quality: text")

CV1, LARGEST = "CV 1.0: padding, fill", "largest batch / budget"
TEXT, IMAGES, LOSS = "text", "images and text, short epoch", 3
MEASURED = "balance, measured"
RATE_2, RATE_4 = "samples / s, 2 workers", "samples / s, 4 workers"
OUR_STORES = ("odb_nodes, Parquet", "odb_nodes, tar")
START, RESUME, AGAIN = "start, s", "resume, s", "made again"


BATCH_ROWS = {
    FIXED: FIXED,
    GROUPED: GROUPED,
    REBALANCED: REBALANCED,
    "lhotse": LHOTSE,
    LHOTSE_TIME: LHOTSE_TIME,
    PADDED: PADDED,
    TIMED: TIMED,
    PADDED_KNOWN: PADDED_KNOWN,
    TRL: TRL,
    AXOLOTL: AXOLOTL,
    PACKED: PACKED,
    PACKED_KNOWN: PACKED_KNOWN,
}
RESUME_ROWS = {
    STATEFUL: STATEFUL,
    "Grain": "Grain",
    "LitData": "LitData",
    STREAM_OF_DATASETS: STREAM_OF_DATASETS,
    "Energon": "Energon",
    GRAIN_PACKED: GRAIN_PACKED,
    LHOTSE_START: LHOTSE_START,
    LIST: LIST,
    'odb_nodes, list, `window_start="early"`': LIST_EARLY,
    LIST_KNOWN: LIST_KNOWN,
    STREAM: STREAM,
}


def within(values: Sequence[float], of: float) -> bool:
    """Return whether values differ by so much at most."""
    return max(values) - min(values) <= of


IN_SHORT = [
    Claim(
        "| `odb_nodes`: {ours}, lhotse {lhotse} |",
        lambda ours, lhotse, others: ours < min(lhotse, *others),
        {
            "ours": padding(PADDED, CV1),
            "lhotse": padding(LHOTSE, CV1),
            "others": [padding(name, CV1) for name in (FIXED, GROUPED, REBALANCED)],
        },
    ),
    Claim(
        "| `odb_nodes` online and first fit of all lengths: {fill} full |",
        lambda fill, others: within(fill, 0.001) and min(fill) > max(others),
        {
            "fill": [padding(PACKED, CV1, 1), padding(AXOLOTL, CV1, 1)],
            "others": [
                padding(TRL, CV1, 1),
                padding("Energon's greedy knapsack, written anew", CV1, 1),
            ],
        },
    ),
    Claim(
        "| `odb_nodes` and axolotl's first fit: {level} |",
        lambda level, trl: within(level, 0.005) and min(level) > trl,
        {
            "level": [balance(PACKED, "CV 2.0"), balance(AXOLOTL, "CV 2.0")],
            "trl": balance(TRL, "CV 2.0"),
        },
    ),
    Claim(
        "| **lhotse**: {lhotse}, `odb_nodes` {ours}; with "
        "[`step_time`](distributed.md#level-in-time), `odb_nodes`: {timed} |",
        lambda lhotse, ours, timed, other: timed > max(lhotse, other) and lhotse > ours,
        {
            "lhotse": balance(LHOTSE, "CV 2.0"),
            "other": balance(LHOTSE_TIME, "CV 2.0"),
            "ours": balance(PADDED, "CV 2.0"),
            "timed": balance(TIMED, "CV 2.0"),
        },
    ),
    Claim(
        "| packed rows: {packed} x fixed batches by CPU time; `odb_nodes` padded, "
        "online-dynamic-batching and lhotse {padded} x |",
        lambda packed, padded, others: min(packed) > max(padded) and min(padded) > max(others),
        {
            "packed": [speed(name, TEXT) for name in (TRL, PACKED)],
            "padded": [speed(name, TEXT) for name in (PADDED, "online-dynamic-batching", LHOTSE)],
            "others": [speed(name, TEXT) for name in (FIXED, GROUPED)],
        },
    ),
    Claim(
        "| **fixed batches** by loss: {fixed}, `odb_nodes` {ours}; with half the budget and 2 "
        "batches a step {halved} |",
        lambda fixed, ours, halved: fixed < ours and halved < ours,
        {
            "fixed": batches(FIXED, IMAGES, LOSS),
            "ours": batches(PADDED, IMAGES, LOSS),
            "halved": batches(f"{PADDED}, 2 batches a step", IMAGES, LOSS),
        },
    ),
    Claim(
        "| `odb_nodes` by CPU time: {ours} us a text, `DataLoader` {torch} |",
        lambda ours, torch: ours < torch,
        {
            "ours": rate("odb_nodes, memory", "CPU us a sample, 2"),
            "torch": rate("`DataLoader`, memory", "CPU us a sample, 2"),
        },
    ),
    Claim(
        "| `odb_nodes`, `step_time`: {timed}; lhotse {lhotse}, fixed batches {fixed} |",
        lambda timed, lhotse, fixed, other: timed > max(lhotse, fixed, other),
        {
            "timed": waits(TIMED, MEASURED),
            "lhotse": waits(LHOTSE, MEASURED),
            "fixed": waits(FIXED, MEASURED),
            "other": waits(LHOTSE_TIME, MEASURED),
        },
    ),
    Claim(
        "| `odb_nodes` under a budget: {ours} s, Grain's packing {grain} s, lhotse {lhotse} s; "
        "**Grain** with fixed batches: {fixed} s |",
        lambda ours, grain, lhotse, fixed: fixed < ours < min(grain, lhotse),
        {
            "ours": first(LIST, RESUME),
            "grain": first(GRAIN_PACKED, RESUME),
            "lhotse": first(LHOTSE_START, RESUME),
            "fixed": first("Grain", RESUME),
        },
    ),
    Claim(
        "| **Grain** with fixed batches, which fill no pool: {grain} s; `odb_nodes` {known} s with "
        'known lengths, {early} s with `window_start="early"`, {full} s in a full window; Grain\'s '
        "packing {packed} s |",
        lambda grain, known, early, full, packed: grain < known < early < min(full, packed),
        {
            "grain": first("Grain", START),
            "known": first(LIST_KNOWN, START),
            "early": first(LIST_EARLY, START),
            "full": first(LIST, START),
            "packed": first(GRAIN_PACKED, START),
        },
    ),
    Claim(
        "| **LitData** by CPU time: {litdata} us a text, `odb_nodes` {ours}, WebDataset {web}; "
        "**WebDataset** by the first batch: {web_first} s, `odb_nodes` {our_first} |",
        lambda litdata, ours, web, web_first, our_first: (
            litdata < min(web, *ours) and web_first < min(our_first)
        ),
        {
            "litdata": store("LitData", "CPU us a sample"),
            "ours": [store(name, "CPU us a sample") for name in OUR_STORES],
            "web": store("WebDataset, tar", "CPU us a sample"),
            "web_first": store("WebDataset, tar", "first batch, s"),
            "our_first": [store(name, "first batch, s") for name in OUR_STORES],
        },
    ),
]

SECTIONS = [
    Claim(
        "Fixed batches hold two samples, so that the longest fit, and fill a tenth of their "
        "memory.",
        lambda fill: 0.08 < fill < 0.12,
        {"fill": padding(FIXED, CV1, 1)},
    ),
    Claim(
        "At CV 2, the largest batch of lhotse is {lhotse} x the budget, the largest of `odb_nodes` "
        "{ours} x.",
        lambda lhotse, ours: lhotse > 1 >= max(ours),
        {
            "lhotse": padding(LHOTSE, LARGEST),
            "ours": [
                padding(name, LARGEST) for name in (PADDED, PADDED_KNOWN, PACKED, PACKED_KNOWN)
            ],
        },
    ),
    Claim(
        "From a source that reads by key, `odb_nodes` makes {ours} samples besides those of the "
        "first batch. Energon, Grain's packing and lhotse make {others}.",
        lambda ours, others: ours < min(others) / 10,
        {
            "ours": resumed(LIST, AGAIN),
            "others": [resumed(name, AGAIN) for name in ("Energon", GRAIN_PACKED, LHOTSE_START)],
        },
    ),
    Claim(
        "All resume exactly but the stream of datasets, which loses {lost} samples and repeats "
        "{repeated}.",
        lambda exact, lost, repeated: all(exact) and lost > 0 and repeated > 0,
        {
            "exact": [
                resumed(name, "same batches")
                for name in RESUME_ROWS.values()
                if name != STREAM_OF_DATASETS
            ],
            "lost": resumed(STREAM_OF_DATASETS, "lost"),
            "repeated": resumed(STREAM_OF_DATASETS, "repeated"),
        },
    ),
    Claim(
        "`odb_nodes` {ours} (list) and {stream} (stream), `StatefulDataLoader` {stateful}, Grain "
        "{grain}, lhotse {lhotse}; datasets {datasets}, which loses {lost} samples and repeats "
        "{repeated}.",
        lambda ours, stream, lhotse, lost, exact, **_: (
            max(ours, stream) < lhotse and lost > 0 and all(exact)
        ),
        {
            "ours": on_ranks(LIST, RESUME),
            "stream": on_ranks(STREAM, RESUME),
            "stateful": on_ranks(STATEFUL, RESUME),
            "grain": on_ranks("Grain", RESUME),
            "lhotse": on_ranks(LHOTSE_START, RESUME),
            "datasets": on_ranks(STREAM_OF_DATASETS, RESUME),
            "lost": on_ranks(STREAM_OF_DATASETS, "lost"),
            "repeated": on_ranks(STREAM_OF_DATASETS, "repeated"),
            "exact": [
                on_ranks(name, "same batches")
                for name in (LIST, STREAM, STATEFUL, "Grain", LHOTSE_START)
            ],
        },
    ),
    Claim(
        "By wall-clock time, `DataLoader` ({torch} x), `StatefulDataLoader` ({stateful} x) and "
        "WebDataset ({web} x) were **ahead** with 4 workers on 2 cores",
        lambda torch, stateful, web: min(torch, stateful, web) > 1,
        {
            "torch": rate("`DataLoader`, memory", RATE_4, per=rate("odb_nodes, memory", RATE_4)),
            "stateful": rate(
                "`StatefulDataLoader`, memory", RATE_4, per=rate("odb_nodes, memory", RATE_4)
            ),
            "web": rate("WebDataset, tar files", RATE_4, per=rate("odb_nodes, tar files", RATE_4)),
        },
    ),
    Claim(
        "After as many CPU seconds, the loss on text is {ours} with `odb_nodes`, {fixed} with "
        "fixed batches.",
        lambda ours, fixed: ours < fixed,
        {"ours": quality(PADDED, "equal CPU s"), "fixed": quality(FIXED, "equal CPU s")},
    ),
]

README = [
    Claim(
        "| {ours} | {lhotse} lhotse |",
        lambda ours, lhotse: ours < lhotse,
        {"ours": padding(PADDED, CV1), "lhotse": padding(LHOTSE, CV1)},
    ),
    Claim(
        "| {ours} s | {grain} s Grain, packed |",
        lambda ours, grain: ours < grain,
        {"ours": first(LIST, RESUME), "grain": first(GRAIN_PACKED, RESUME)},
    ),
]

TABLES = [
    PageTable(
        {
            "padding, fill": ("Padding", CV1),
            "balance, 4 ranks, CV 2": ("Balance over 4 ranks", "CV 2.0"),
            "balance, 64 ranks": ("Balance over 64 ranks", "CV 1.0"),
        },
        BATCH_ROWS,
    ),
    PageTable(
        {
            "waiting, %, 2 ranks": ("Waiting", "waiting, %, 2 ranks"),
            "waiting, %, 4 ranks": ("Waiting", "waiting, %, 4 ranks"),
            "epoch, s, 4 ranks": ("Waiting", "epoch, s, 4 ranks"),
            "balance, simulated": ("Waiting", "balance, simulated, 4 ranks"),
            "balance, measured": ("Waiting", "balance, measured, 4 ranks"),
        },
        {title: name for title, name in BATCH_ROWS.items() if title != GROUPED},
    ),
    PageTable(
        {
            "batches": ("First batch", "batches"),
            "start, s": ("First batch", START),
            "resume, s": ("First batch", RESUME),
            "made again": ("Resume", AGAIN),
        },
        RESUME_ROWS,
    ),
    PageTable(
        {
            "samples / s": ("Loader rate", RATE_2),
            "CPU us a sample": ("Loader rate", "CPU us a sample, 2"),
        },
        {
            "odb_nodes, memory": "odb_nodes, memory",
            "`DataLoader`, memory": "`DataLoader`, memory",
            "`StatefulDataLoader`, memory": "`StatefulDataLoader`, memory",
            "Grain, memory (mostly its start)": "Grain, memory",
            "odb_nodes, tar files": "odb_nodes, tar files",
            "WebDataset, tar files": "WebDataset, tar files",
            "LitData, chunks on disk": "LitData, chunks on disk",
        },
    ),
    PageTable(
        {
            "first batch, s": ("Object store", "first batch, s"),
            "resume, s": ("Object store", "resume, s"),
            "samples / s": ("Object store", "samples / s"),
            "CPU us a sample": ("Object store", "CPU us a sample"),
            "memory, MiB": ("Object store", "memory, MiB"),
        },
        {
            "odb_nodes, Parquet": "odb_nodes, Parquet",
            "odb_nodes, tar files": "odb_nodes, tar",
            "WebDataset, tar files": "WebDataset, tar",
            "LitData": "LitData",
        },
    ),
]

PAGES: dict[str, tuple[list[Claim], list[PageTable]]] = {
    "docs/comparison.md": ([*IN_SHORT, *SECTIONS], TABLES),
    "README.md": (README, []),
}
