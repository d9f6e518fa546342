"""Tables of the pages, each made of tables of `compare.py`."""

from __future__ import annotations

from comparing import page_names as run
from comparing.claims import PageTable

LOSSES = ("epoch", "half the samples", "equal steps", run.EQUAL_CPU)
BATCH_ROWS = {
    run.FIXED: run.FIXED,
    run.GROUPED: run.GROUPED,
    run.REBALANCED: run.REBALANCED,
    "lhotse": run.LHOTSE,
    run.LHOTSE_LARGE: run.LHOTSE_LARGE,
    run.LHOTSE_TIME: run.LHOTSE_TIME,
    run.PADDED: run.PADDED,
    run.TIMED: run.TIMED,
    run.PADDED_KNOWN: run.PADDED_KNOWN,
    run.TRL: run.TRL,
    run.AXOLOTL: run.AXOLOTL,
    run.VERL: run.VERL,
    run.PACKED: run.PACKED,
    run.PACKED_KNOWN: run.PACKED_KNOWN,
}
NOT_ON_REAL_RANKS = (run.GROUPED, run.LHOTSE_LARGE, run.VERL)
WAITING_ROWS = {title: name for title, name in BATCH_ROWS.items() if name not in NOT_ON_REAL_RANKS}
TRAINED_ROWS = {
    run.FIXED: run.FIXED,
    run.GROUPED: run.GROUPED,
    run.ODB: run.ODB,
    "lhotse": run.LHOTSE,
    run.PADDED: run.PADDED,
    f"{run.PADDED}, half the budget, 2 batches a step": run.HALVES,
    f"{run.TRL}, packed": run.TRL,
    run.PACKED: run.PACKED,
}
IMAGE_ROWS = {title: name for title, name in TRAINED_ROWS.items() if name != run.TRL}
IMAGE_ROWS[f"{run.PADDED}, `LrScaling`"] = run.SCALED

TABLES = [
    PageTable(
        {
            "padding, fill": ("Padding", run.CV1),
            "balance, 4 ranks, CV 2": ("Balance over 4 ranks", run.CV2),
            "balance, 64 ranks": ("Balance over 64 ranks", "CV 1.0"),
        },
        BATCH_ROWS,
    ),
    PageTable(
        {
            "balance, 2 ranks": ("Waiting", run.MEASURED_2),
            "balance, 4 ranks": ("Waiting", run.MEASURED_4),
            "simulated, 4 ranks": ("Waiting", "balance, simulated, 4 ranks"),
            "epoch, s, 4 ranks": ("Waiting", "epoch, s, 4 ranks"),
        },
        WAITING_ROWS,
    ),
    PageTable(
        {
            "batches": ("First batch", "batches"),
            "start, s": ("First batch", run.START),
            "resume, s": ("First batch", run.RESUME),
            "made again": ("Resume", run.AGAIN),
        },
        {
            run.STATEFUL: run.STATEFUL,
            run.GRAIN: run.GRAIN,
            run.LITDATA: run.LITDATA,
            run.STREAM_OF_DATASETS: run.STREAM_OF_DATASETS,
            "Energon": "Energon",
            run.GRAIN_PACKED: run.GRAIN_PACKED,
            run.LHOTSE_START: run.LHOTSE_START,
            run.LHOTSE_KNOWN: run.LHOTSE_KNOWN,
            run.LIST: run.LIST,
            'odb_nodes, list, `window_start="early"`': run.LIST_EARLY,
            run.LIST_KNOWN: run.LIST_KNOWN,
            run.STREAM: run.STREAM,
        },
    ),
    PageTable(
        {run.RATE: ("Loader rate", run.RATE_2), run.CPU: ("Loader rate", run.CPU_2)},
        {
            run.OUR_MEMORY: run.OUR_MEMORY,
            run.TORCH_MEMORY: run.TORCH_MEMORY,
            run.STATEFUL_MEMORY: run.STATEFUL_MEMORY,
            "Grain, memory (mostly its start)": "Grain, memory",
            run.OUR_TAR: run.OUR_TAR,
            run.WEB_TAR: run.WEB_TAR,
            "LitData, chunks on disk": "LitData, chunks on disk",
        },
    ),
    PageTable(
        {run.RATE: ("Own collate function", run.RATE), run.CPU: ("Own collate function", run.CPU)},
        {
            run.ARRAYS: run.ARRAYS,
            run.TORCH_ARRAYS: run.TORCH_ARRAYS,
            run.LISTS: run.LISTS,
            f"{run.LISTS}, [made arrays](performance.md#who-collates)": run.LISTS_TO_ARRAYS,
            run.TORCH_LISTS: run.TORCH_LISTS,
        },
        corner="own `collate_fn`",
    ),
    PageTable(
        {
            "index, s": ("Object store", "index, s"),
            run.FIRST: ("Object store", run.FIRST),
            run.RESUME: ("Object store", run.RESUME),
            run.RATE: ("Object store", run.RATE),
            run.CPU: ("Object store", run.CPU),
            run.MEMORY: ("Object store", run.MEMORY),
        },
        {
            "odb_nodes, Parquet": run.OUR_STORES[0],
            run.OUR_TAR: run.OUR_STORES[1],
            run.WEB_TAR: run.WEB_STORE,
            run.LITDATA: run.LITDATA,
        },
    ),
    PageTable(
        {
            title: ("Training: speed", title)
            for title in (run.TEXT, run.TEXT_2, run.TEXT_4, run.IMAGES, run.T5)
        },
        TRAINED_ROWS,
        corner="speed",
    ),
    PageTable(
        {
            title: ("Training: batches", title)
            for title in (run.TEXT, run.TEXT_2, run.TEXT_4, run.IMAGES, run.T5)
        },
        TRAINED_ROWS,
        corner="padding, largest batch, steps, loss",
    ),
    PageTable(
        {title: (f"Quality: {run.TEXT}", title) for title in LOSSES}, TRAINED_ROWS, corner=run.TEXT
    ),
    PageTable(
        {title: (f"Quality: {run.IMAGES}", title) for title in LOSSES},
        IMAGE_ROWS,
        corner=run.IMAGES,
    ),
    PageTable(
        {title: (f"Quality: {run.IMAGES_SHORT}", title) for title in LOSSES},
        IMAGE_ROWS,
        corner=run.IMAGES_SHORT,
    ),
]
