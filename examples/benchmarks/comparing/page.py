"""What pages claim of the comparison, and their tables of it; `check_claims.py` checks both."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from comparing.claims import Cell, Claim, PageTable

FIXED, GROUPED = "fixed batches", "`group_by_length` of transformers"
REBALANCED = "`batch_rebalance` of transformers"
LHOTSE, LHOTSE_TIME = "lhotse, buffer as our window", "lhotse, `quadratic_duration`"
TRL, AXOLOTL = "TRL, best fit decreasing", "axolotl's first fit, written anew"
VERL = "verl's balancer, written anew"
PADDED, PACKED = "odb_nodes, padded", "odb_nodes, packed"
TIMED, PADDED_KNOWN, PACKED_KNOWN = (
    f"{PADDED}, `step_time`",
    f"{PADDED}, lengths known",
    f"{PACKED}, lengths known",
)
ODB, SCALED = "online-dynamic-batching", f"{PADDED}, rate by samples"
HALVES = f"{PADDED}, 2 batches a step"
GRAIN_PACKED, LHOTSE_START = "Grain, packed first fit", "lhotse, lengths from processing"
LIST, STREAM = "odb_nodes, list", "odb_nodes, stream"
LIST_EARLY, LIST_KNOWN = "odb_nodes, list, `window_start`", "odb_nodes, list, lengths known"
STATEFUL, STREAM_OF_DATASETS = "`StatefulDataLoader`, list", "datasets, stream"

padding = partial(Cell, "Padding")
balance = partial(Cell, "Balance over 4 ranks")
balance_64 = partial(Cell, "Balance over 64 ranks")
waits = partial(Cell, "Waiting")
first = partial(Cell, "First batch")
resumed = partial(Cell, "Resume")
on_ranks = partial(Cell, "Resume on 4 ranks")
store = partial(Cell, "Object store")
rate = partial(Cell, "Loader rate")
own_collate = partial(Cell, "Own collate function")
speed = partial(Cell, "Training: speed")
batches = partial(Cell, "Training: batches")  # its last number is the held-out loss
quality = partial(Cell, "Quality: text")

CV1, LARGEST = "CV 1.0: padding, fill", "largest batch / budget"
TEXT, IMAGES, LOSS = "text", "images and text, short epoch", 3
TASKS = (TEXT, "images and text", "encoder-decoder")
MEASURED = "balance, measured, 4 ranks"
RATE_2, RATE_4, CPU_2 = (
    "samples / s, 2 workers",
    "samples / s, 4 workers",
    "CPU us a sample, 2 workers",
)
CPU = "CPU us a sample"
LISTS, LISTS_TO_ARRAYS = "odb_nodes, lists", "odb_nodes, lists, arrays by `process_fn`"
RATE_SHORT = f"{RATE_2}, 2,000 texts"
OTHER_LOADERS = ("`StatefulDataLoader`", "Grain")
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
    VERL: VERL,
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
TRAINED_ROWS = {
    FIXED: FIXED,
    GROUPED: GROUPED,
    ODB: ODB,
    "lhotse": LHOTSE,
    PADDED: PADDED,
    f"{PADDED}, half the budget, 2 batches a step": HALVES,
    f"{TRL}, packed": TRL,
    PACKED: PACKED,
}
IMAGE_ROWS = {title: name for title, name in TRAINED_ROWS.items() if name != TRL}
IMAGE_ROWS[f"{PADDED}, `LrScaling`"] = SCALED


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
        "| `odb_nodes` and axolotl's first fit: {level}; on 64 ranks **axolotl's** {axolotl}, "
        "`odb_nodes` {ours}, with known lengths {known} |",
        lambda level, axolotl, ours, known, others, others_64: (
            within(level, 0.005)
            and min(level) > max(others)
            and known > axolotl > max(ours, *others_64)
        ),
        {
            "level": [balance(PACKED, "CV 2.0"), balance(AXOLOTL, "CV 2.0")],
            "others": [balance(name, "CV 2.0") for name in (TRL, VERL)],
            "axolotl": balance_64(AXOLOTL, "CV 1.0"),
            "ours": balance_64(PACKED, "CV 1.0"),
            "known": balance_64(PACKED_KNOWN, "CV 1.0"),
            "others_64": [balance_64(name, "CV 1.0") for name in (TRL, VERL)],
        },
    ),
    Claim(
        "| **axolotl's first fit**: {axolotl}, `odb_nodes` {ours}, TRL {trl}; on 2 ranks "
        "{level} with either |",
        lambda axolotl, ours, trl, level: axolotl > ours > trl and within(level, 0.02),
        {
            "axolotl": waits(AXOLOTL, MEASURED),
            "ours": waits(PACKED, MEASURED),
            "trl": waits(TRL, MEASURED),
            "level": [waits(name, "balance, measured, 2 ranks") for name in (AXOLOTL, PACKED)],
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
        "| `odb_nodes` and TRL, packed: {packed} x fixed batches by CPU time; padded, `odb_nodes` "
        "{ours} x, lhotse {lhotse} x, online-dynamic-batching {odb} x |",
        lambda packed, ours, lhotse, odb, others: min(packed) > ours > max(lhotse, odb, *others),
        {
            "packed": [speed(name, TEXT) for name in (TRL, PACKED)],
            "ours": speed(PADDED, TEXT),
            "lhotse": speed(LHOTSE, TEXT),
            "odb": speed(ODB, TEXT),
            "others": [speed(name, TEXT) for name in (FIXED, GROUPED)],
        },
    ),
    Claim(
        "| `odb_nodes` and lhotse, padded: {t5} x and {images} x fixed batches |",
        lambda t5, images, other_t5, other_images: (
            min(t5) > max(other_t5) and min(images) > max(other_images)
        ),
        {
            f"{prefix}{name}": [speed(contender, task) for contender in contenders]
            for prefix, contenders in (("", (PADDED, LHOTSE)), ("other_", (FIXED, GROUPED, ODB)))
            for name, task in (("t5", "encoder-decoder"), ("images", "images and text"))
        },
    ),
    Claim(
        "| **fixed batches** by loss: {fixed}, `odb_nodes` {ours}; with half the budget and 2 "
        "batches a step {halved} |",
        lambda fixed, ours, halved: fixed < ours and halved < ours,
        {
            "fixed": batches(FIXED, IMAGES, LOSS),
            "ours": batches(PADDED, IMAGES, LOSS),
            "halved": batches(HALVES, IMAGES, LOSS),
        },
    ),
    Claim(
        "| `odb_nodes`: {ours} samples / s and {ours_us} us of CPU time a text, `DataLoader` "
        "{torch} and {torch_us} |",
        lambda ours, ours_us, torch, torch_us, others, others_us: (
            ours > max(torch, *others) and ours_us < min(torch_us, *others_us)
        ),
        {
            "ours": rate("odb_nodes, memory", RATE_2),
            "ours_us": rate("odb_nodes, memory", CPU_2),
            "torch": rate("`DataLoader`, memory", RATE_2),
            "torch_us": rate("`DataLoader`, memory", CPU_2),
            "others": [rate(f"{name}, memory", RATE_2) for name in OTHER_LOADERS],
            "others_us": [rate(f"{name}, memory", CPU_2) for name in OTHER_LOADERS],
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
        "| `odb_nodes` under a budget {ours} s, Grain and LitData with fixed batches {fixed} s; "
        "Grain's packing {grain} s, lhotse {lhotse} s |",
        lambda ours, fixed, grain, lhotse: (
            max(ours) < min(fixed) + 0.3 and max(ours) < min(grain, lhotse)
        ),
        {
            "ours": [first(LIST, RESUME), first(STREAM, RESUME)],
            "fixed": [first("Grain", RESUME), first("LitData", RESUME)],
            "grain": first(GRAIN_PACKED, RESUME),
            "lhotse": first(LHOTSE_START, RESUME),
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
        "| `odb_nodes` and LitData by CPU time: {level} us a text, WebDataset {web}; "
        "**WebDataset** by the first batch: {web_first} s, `odb_nodes` {our_first} |",
        lambda level, web, web_first, our_first: max(level) < web and web_first < min(our_first),
        {
            "level": [store(name, "CPU us a sample") for name in (*OUR_STORES, "LitData")],
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
        "With 4 workers on 2 cores, `odb_nodes` makes {torch} x the samples / s of `DataLoader` "
        "and {web} x those of WebDataset; in an epoch of 2,000 texts, {short_torch} x and "
        "{short_web} x.",
        lambda **ratios: min(ratios.values()) > 1,
        {
            f"{prefix}{name}": rate(
                f"odb_nodes, {place}", column, per=rate(f"{rival}, {place}", column)
            )
            for prefix, column in (("", RATE_4), ("short_", RATE_SHORT))
            for name, rival, place in (
                ("torch", "`DataLoader`", "memory"),
                ("web", "WebDataset", "tar files"),
            )
        },
    ),
    Claim(
        "From lists, `DataLoader` is **ahead**, {ratio} x the samples / s, since its workers "
        "collate.",
        lambda ratio, lists, arrays: ratio > 1 and lists > arrays,
        {
            "ratio": own_collate(
                "`DataLoader`, lists", "samples / s", per=own_collate(LISTS, "samples / s")
            ),
            "lists": own_collate(LISTS, CPU),
            "arrays": own_collate(LISTS_TO_ARRAYS, CPU),
        },
    ),
    Claim(
        "After as many CPU seconds, the loss on text is {ours} with `odb_nodes`, {fixed} with "
        "fixed batches.",
        lambda ours, fixed: ours < fixed,
        {"ours": quality(PADDED, "equal CPU s"), "fixed": quality(FIXED, "equal CPU s")},
    ),
    Claim(
        "On images, packed rows are no faster than padded batches, which have next to no padding.",
        lambda packed, padded, padding: packed < padded + 0.1 and padding < 0.02,
        {
            "packed": speed(PACKED, "images and text"),
            "padded": speed(PADDED, "images and text"),
            "padding": batches(PADDED, "images and text"),
        },
    ),
    Claim(
        "In an epoch of 2,048 samples the losses are {fixed} (fixed), {ours}, and {halved} (2 "
        "batches a step).",
        lambda fixed, ours, halved: fixed < halved < ours,
        {
            "fixed": batches(FIXED, "images and text", LOSS),
            "ours": batches(PADDED, "images and text", LOSS),
            "halved": batches(HALVES, "images and text", LOSS),
        },
    ),
    Claim(
        "The rate alone does not mend batches of one kind: with `LrScaling`, the loss after the "
        "short epoch is {scaled}.",
        lambda scaled, ours: abs(scaled - ours) < 0.1,
        {"scaled": batches(SCALED, IMAGES, LOSS), "ours": batches(PADDED, IMAGES, LOSS)},
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

PERFORMANCE = [
    Claim(
        "A function that pads row by row then takes {arrays} us of CPU time a text in all "
        "processes, from lists {lists}; `DataLoader(32)`, which collates in its workers, {torch}",
        lambda arrays, lists, torch: arrays < torch < lists,
        {
            "arrays": own_collate(LISTS_TO_ARRAYS, CPU),
            "lists": own_collate(LISTS, CPU),
            "torch": own_collate("`DataLoader`, lists", CPU),
        },
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
        {title: name for title, name in BATCH_ROWS.items() if name not in (GROUPED, VERL)},
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
            "CPU us a sample": ("Loader rate", CPU_2),
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

TABLES += [
    PageTable(
        {title: ("Own collate function", title) for title in ("samples / s", CPU)},
        {
            "odb_nodes, arrays": "odb_nodes, arrays",
            "`DataLoader`, arrays": "`DataLoader`, arrays",
            LISTS: LISTS,
            "odb_nodes, lists, of which [`process_fn` makes arrays](performance.md#who-collates)": (
                LISTS_TO_ARRAYS
            ),
            "`DataLoader`, lists": "`DataLoader`, lists",
        },
        corner="own `collate_fn`",
    ),
    PageTable(
        {
            title: ("Training: speed", title)
            for title in (TEXT, "text, 2 ranks", "text, 4 ranks", *TASKS[1:])
        },
        TRAINED_ROWS,
        corner="speed",
    ),
    PageTable(
        {title: ("Training: batches", title) for title in TASKS},
        TRAINED_ROWS,
        corner="padding, largest batch, steps, loss",
    ),
    *(
        PageTable(
            {
                title: (f"Quality: {task}", title)
                for title in ("epoch", "half the samples", "equal steps", "equal CPU s")
            },
            rows,
            corner=task,
        )
        for task, rows in ((TEXT, TRAINED_ROWS), (IMAGES, IMAGE_ROWS))
    ),
]

PAGES: dict[str, tuple[list[Claim], list[PageTable]]] = {
    "docs/comparison.md": ([*IN_SHORT, *SECTIONS], TABLES),
    "docs/performance.md": (PERFORMANCE, []),
    "README.md": (README, []),
}
