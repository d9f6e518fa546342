"""What tables of a run call their rows and columns, for the claims and tables of the pages."""

from __future__ import annotations

from functools import partial

from comparing.claims import Cell

FIXED, GROUPED = "fixed batches", "`group_by_length` of transformers"
REBALANCED = "`batch_rebalance` of transformers"
LHOTSE, LHOTSE_TIME = "lhotse, buffer as our window", "lhotse, `quadratic_duration`"
LHOTSE_LARGE = "lhotse, its buffer of 20,000"
TRL, AXOLOTL = "TRL, best fit decreasing", "axolotl's first fit, written anew"
VERL, KNAPSACK = "verl's balancer, written anew", "Energon's greedy knapsack, written anew"
PADDED, PACKED = "odb_nodes, padded", "odb_nodes, packed"
TIMED = f"{PADDED}, `step_time`"
PADDED_KNOWN, PACKED_KNOWN = f"{PADDED}, lengths known", f"{PACKED}, lengths known"
ODB = "online-dynamic-batching"
HALVES, SCALED = f"{PADDED}, 2 batches a step", f"{PADDED}, rate by samples"

GRAIN, GRAIN_PACKED, LITDATA = "Grain", "Grain, packed first fit", "LitData"
LHOTSE_START, LHOTSE_KNOWN = "lhotse, lengths from processing", "lhotse, lengths known"
LIST, STREAM = "odb_nodes, list", "odb_nodes, stream"
LIST_EARLY, LIST_KNOWN = "odb_nodes, list, `window_start`", "odb_nodes, list, lengths known"
STATEFUL, STREAM_OF_DATASETS = "`StatefulDataLoader`, list", "datasets, stream"
START, RESUME, AGAIN = "start, s", "resume, s", "made again"

CV1, CV2, LARGEST = "CV 1.0: padding, fill", "CV 2.0", "largest batch / budget"
MEASURED_2, MEASURED_4 = "balance, measured, 2 ranks", "balance, measured, 4 ranks"

TEXT, IMAGES, T5 = "text", "images and text", "encoder-decoder"
IMAGES_SHORT, TEXT_2, TEXT_4 = "images and text, short epoch", "text, 2 ranks", "text, 4 ranks"
STEPS, LOSS = 2, 3  # places in a cell of "Training: batches"
EQUAL_CPU = "equal CPU s"

RATE, CPU = "samples / s", "CPU us a sample"
RATE_2, CPU_2, PADDING_2 = f"{RATE}, 2 workers", f"{CPU}, 2 workers", "padding, 2 workers"
RATE_4, RATE_SHORT = f"{RATE}, 4 workers", f"{RATE_2}, 2,000 texts"
OUR_MEMORY, TORCH_MEMORY = "odb_nodes, memory", "`DataLoader`, memory"
STATEFUL_MEMORY = "`StatefulDataLoader`, memory"
OUR_TAR, WEB_TAR = "odb_nodes, tar files", "WebDataset, tar files"
LISTS, LISTS_TO_ARRAYS = "odb_nodes, lists", "odb_nodes, lists, arrays by `process_fn`"
ARRAYS, TORCH_ARRAYS = "odb_nodes, arrays", "`DataLoader`, arrays"
TORCH_LISTS = "`DataLoader`, lists"
OUR_STORES, WEB_STORE = ("odb_nodes, Parquet", "odb_nodes, tar"), "WebDataset, tar"
FIRST, MEMORY = "first batch, s", "memory, MiB"

padding = partial(Cell, "Padding")
balance = partial(Cell, "Balance over 4 ranks")
balance_64 = partial(Cell, "Balance over 64 ranks", column="CV 1.0")
waits = partial(Cell, "Waiting")
first = partial(Cell, "First batch")
resumed = partial(Cell, "Resume")
on_ranks = partial(Cell, "Resume on 4 ranks")
store = partial(Cell, "Object store")
rate = partial(Cell, "Loader rate")
own_collate = partial(Cell, "Own collate function")
speed = partial(Cell, "Training: speed")
batches = partial(Cell, "Training: batches")
text_loss = partial(Cell, f"Quality: {TEXT}")
image_loss = partial(Cell, f"Quality: {IMAGES}")
short_loss = partial(Cell, f"Quality: {IMAGES_SHORT}")
