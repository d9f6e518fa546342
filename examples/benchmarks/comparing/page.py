"""What pages claim of the comparison, and their tables of it; `check_claims.py` checks both."""

from __future__ import annotations

from collections.abc import Sequence

from comparing import page_names as run
from comparing.claims import Cell, Claim, PageTable
from comparing.page_tables import TABLES

IN_ONE_RUN = ("Training: ", "Quality: ")
"""How the titles of tables begin that are of one run, of several seeds."""


def within(values: Sequence[float], of: float) -> bool:
    """Return whether values differ by so much at most."""
    return max(values) - min(values) <= of


IN_SHORT = [
    Claim(
        "| `odb_nodes`: {ours}, lhotse {lhotse}; in [training on text]",
        lambda ours, lhotse, others: ours < min(lhotse, *others),
        {
            "ours": run.padding(run.PADDED, run.CV1),
            "lhotse": run.padding(run.LHOTSE, run.CV1),
            "others": [
                run.padding(name, run.CV1)
                for name in (run.FIXED, run.GROUPED, run.REBALANCED, run.LHOTSE_LARGE)
            ],
        },
    ),
    Claim(
        "in [training on text](#training) {level} with either |",
        lambda level: within(level, 0.005),
        {"level": [run.batches(name, run.TEXT) for name in (run.PADDED, run.LHOTSE)]},
    ),
    Claim(
        "| `odb_nodes` online and first fit of all lengths: fill {fill} |",
        lambda fill, others: within(fill, 0.001) and min(fill) > max(others),
        {
            "fill": [run.padding(name, run.CV1, 1) for name in (run.PACKED, run.AXOLOTL)],
            "others": [run.padding(name, run.CV1, 1) for name in (run.TRL, run.KNAPSACK, run.VERL)],
        },
    ),
    Claim(
        "| `odb_nodes` and axolotl's first fit: {level}; on 64 ranks **axolotl's** {axolotl}, "
        "**verl's balancer** {verl}, `odb_nodes` {ours}, with known lengths {known} |",
        lambda level, others, axolotl, verl, ours, known: (
            within(level, 0.005) and min(level) > max(others) and known > axolotl > verl > ours
        ),
        {
            "level": [run.balance(name, run.CV2) for name in (run.PACKED, run.AXOLOTL)],
            "others": [run.balance(name, run.CV2) for name in (run.TRL, run.VERL)],
            "axolotl": run.balance_64(run.AXOLOTL),
            "verl": run.balance_64(run.VERL),
            "ours": run.balance_64(run.PACKED),
            "known": run.balance_64(run.PACKED_KNOWN),
        },
    ),
    Claim(
        "| **axolotl's first fit**: {axolotl}, `odb_nodes` {ours}, TRL {trl}; on 2 ranks "
        "{level} with either of the first two |",
        lambda axolotl, ours, trl, level: axolotl > ours > trl and within(level, 0.02),
        {
            "axolotl": run.waits(run.AXOLOTL, run.MEASURED_4),
            "ours": run.waits(run.PACKED, run.MEASURED_4),
            "trl": run.waits(run.TRL, run.MEASURED_4),
            "level": [run.waits(name, run.MEASURED_2) for name in (run.AXOLOTL, run.PACKED)],
        },
    ),
    Claim(
        "| **lhotse**, planned before the clock starts: {lhotse}; `odb_nodes`, `step_time` "
        "{timed}, fixed batches {fixed} |",
        lambda lhotse, timed, fixed, other: lhotse > other and lhotse > timed > fixed,
        {
            "lhotse": run.waits(run.LHOTSE, run.MEASURED_4),
            "timed": run.waits(run.TIMED, run.MEASURED_4),
            "fixed": run.waits(run.FIXED, run.MEASURED_4),
            "other": run.waits(run.LHOTSE_TIME, run.MEASURED_4),
        },
    ),
    Claim(
        "| **lhotse**: {lhotse}, `odb_nodes` {ours}; with "
        "[`step_time`](distributed.md#level-in-time), `odb_nodes`: {timed}; on 64 ranks **lhotse** "
        "{lhotse_64}, `odb_nodes` with `step_time` {timed_64} |",
        lambda lhotse, ours, timed, others, lhotse_64, timed_64: (
            timed > max(lhotse, *others) and lhotse > ours and lhotse_64 > timed_64
        ),
        {
            "lhotse": run.balance(run.LHOTSE, run.CV2),
            "others": [run.balance(name, run.CV2) for name in (run.LHOTSE_TIME, run.LHOTSE_LARGE)],
            "ours": run.balance(run.PADDED, run.CV2),
            "timed": run.balance(run.TIMED, run.CV2),
            "lhotse_64": run.balance_64(run.LHOTSE),
            "timed_64": run.balance_64(run.TIMED),
        },
    ),
    Claim(
        "| `odb_nodes` and TRL, packed: {packed} x fixed batches by CPU time; padded, `odb_nodes` "
        "{ours} x, lhotse {lhotse} x, online-dynamic-batching {odb} x |",
        lambda packed, ours, lhotse, odb, others: min(packed) > ours > max(lhotse, odb, *others),
        {
            "packed": [run.speed(name, run.TEXT) for name in (run.TRL, run.PACKED)],
            "ours": run.speed(run.PADDED, run.TEXT),
            "lhotse": run.speed(run.LHOTSE, run.TEXT),
            "odb": run.speed(run.ODB, run.TEXT),
            "others": [run.speed(name, run.TEXT) for name in (run.FIXED, run.GROUPED)],
        },
    ),
    Claim(
        "| `odb_nodes` and lhotse, padded: {t5} x and {images} x fixed batches |",
        lambda t5, other_t5, images, other_images: (
            min(t5) > max(other_t5) and min(images) > max(other_images)
        ),
        {
            "t5": [run.speed(name, run.T5) for name in (run.PADDED, run.LHOTSE)],
            "other_t5": [run.speed(name, run.T5) for name in (run.FIXED, run.GROUPED, run.ODB)],
            "images": [run.speed(name, run.IMAGES) for name in (run.PADDED, run.LHOTSE)],
            "other_images": [
                run.speed(name, run.IMAGES) for name in (run.FIXED, run.GROUPED, run.ODB)
            ],
        },
    ),
    Claim(
        "| **fixed batches**: {fixed}, at equal CPU time {fixed_cpu}; `odb_nodes` {ours} "
        "and {ours_cpu}, with half the budget and 2 batches a step {halved} and {halved_cpu} |",
        lambda fixed, ours, halved, fixed_cpu, ours_cpu, halved_cpu: (
            fixed < halved < ours and fixed_cpu < halved_cpu < ours_cpu
        ),
        {
            "fixed": run.image_loss(run.FIXED, "epoch"),
            "fixed_cpu": run.image_loss(run.FIXED, run.EQUAL_CPU),
            "ours": run.image_loss(run.PADDED, "epoch"),
            "ours_cpu": run.image_loss(run.PADDED, run.EQUAL_CPU),
            "halved": run.image_loss(run.HALVES, "epoch"),
            "halved_cpu": run.image_loss(run.HALVES, run.EQUAL_CPU),
        },
    ),
    Claim(
        "| **fixed batches**: {fixed}, lhotse {lhotse}, online-dynamic-batching {odb}, `odb_nodes` "
        "{ours}, with half the budget and 2 batches a step {halved}; at equal CPU time "
        "`odb_nodes`: {ours_cpu}, lhotse {lhotse_cpu}, fixed batches {fixed_cpu} |",
        lambda fixed, lhotse, odb, ours, halved, ours_cpu, lhotse_cpu, fixed_cpu: (
            fixed < halved < min(lhotse, odb)
            and ours > max(lhotse, odb)
            and ours_cpu < lhotse_cpu < fixed_cpu
        ),
        {
            "fixed": run.short_loss(run.FIXED, "epoch"),
            "lhotse": run.short_loss(run.LHOTSE, "epoch"),
            "odb": run.short_loss(run.ODB, "epoch"),
            "ours": run.short_loss(run.PADDED, "epoch"),
            "halved": run.short_loss(run.HALVES, "epoch"),
            "ours_cpu": run.short_loss(run.PADDED, run.EQUAL_CPU),
            "lhotse_cpu": run.short_loss(run.LHOTSE, run.EQUAL_CPU),
            "fixed_cpu": run.short_loss(run.FIXED, run.EQUAL_CPU),
        },
    ),
    Claim(
        "| `odb_nodes` under a budget {ours} s, Grain and LitData with fixed batches {fixed} s; "
        "Grain's packing {grain} s, lhotse {lhotse} s, where it knows the lengths {lhotse_known} "
        "s; on 4 ranks `odb_nodes` {ours_4} s, Grain with fixed batches {grain_4} s |",
        lambda ours, fixed, grain, lhotse, lhotse_known, grain_4, ours_4: (
            max(ours) <= min(*fixed, lhotse_known) + 0.3
            and max(ours) < min(grain, lhotse)
            and max(ours_4) < grain_4 + 0.3
        ),
        {
            "ours": [run.first(name, run.RESUME) for name in (run.LIST, run.STREAM)],
            "fixed": [run.first(name, run.RESUME) for name in (run.GRAIN, run.LITDATA)],
            "grain": run.first(run.GRAIN_PACKED, run.RESUME),
            "lhotse": run.first(run.LHOTSE_START, run.RESUME),
            "lhotse_known": run.first(run.LHOTSE_KNOWN, run.RESUME),
            "grain_4": run.on_ranks(run.GRAIN, run.RESUME),
            "ours_4": [run.on_ranks(name, run.RESUME) for name in (run.LIST, run.STREAM)],
        },
    ),
    Claim(
        "| with known lengths **lhotse** {lhotse} s, `odb_nodes` {known} s; Grain with fixed "
        "batches, which fill no pool, {grain} s; `odb_nodes` {early} s with "
        '`window_start="early"`, {full} s in a full window; Grain\'s packing {packed} s |',
        lambda lhotse, known, grain, early, full, packed: (
            lhotse < min(known, grain) and max(known, grain) < early < min(full, packed)
        ),
        {
            "grain": run.first(run.GRAIN, run.START),
            "known": run.first(run.LIST_KNOWN, run.START),
            "lhotse": run.first(run.LHOTSE_KNOWN, run.START),
            "early": run.first(run.LIST_EARLY, run.START),
            "full": run.first(run.LIST, run.START),
            "packed": run.first(run.GRAIN_PACKED, run.START),
        },
    ),
    Claim(
        "| `odb_nodes`: {ours} samples / s and {ours_cpu} us of CPU time a text, `DataLoader` "
        "{torch} and {torch_cpu}; lists and a `collate_fn` of yours: **`DataLoader`** {lists}, "
        "`odb_nodes` {our_lists} |",
        lambda ours, ours_cpu, torch, torch_cpu, others, others_cpu, lists, our_lists: (
            ours > max(torch, *others)
            and ours_cpu < min(torch_cpu, *others_cpu)
            and lists > our_lists
        ),
        {
            "ours": run.rate(run.OUR_MEMORY, run.RATE_2),
            "ours_cpu": run.rate(run.OUR_MEMORY, run.CPU_2),
            "torch": run.rate(run.TORCH_MEMORY, run.RATE_2),
            "torch_cpu": run.rate(run.TORCH_MEMORY, run.CPU_2),
            "others": [
                run.rate(name, run.RATE_2) for name in (run.STATEFUL_MEMORY, "Grain, memory")
            ],
            "others_cpu": [
                run.rate(name, run.CPU_2) for name in (run.STATEFUL_MEMORY, "Grain, memory")
            ],
            "lists": run.own_collate(run.TORCH_LISTS, run.RATE),
            "our_lists": run.own_collate(run.LISTS, run.RATE),
        },
    ),
    Claim(
        "| by CPU time `odb_nodes` {ours} us a text, LitData {litdata}, WebDataset {web}; "
        "**WebDataset** by the first batch, {web_first} s, where `odb_nodes` takes {our_first} s, "
        "and by memory |",
        lambda ours, litdata, web, web_first, our_first, web_memory, our_memory: (
            max(*ours, litdata) < web
            and web_first < min(our_first)
            and web_memory < min(our_memory)
        ),
        {
            "ours": [run.store(name, run.CPU) for name in run.OUR_STORES],
            "litdata": run.store(run.LITDATA, run.CPU),
            "web": run.store(run.WEB_STORE, run.CPU),
            "web_first": run.store(run.WEB_STORE, run.FIRST),
            "our_first": [run.store(name, run.FIRST) for name in run.OUR_STORES],
            "web_memory": run.store(run.WEB_STORE, run.MEMORY, 1),
            "our_memory": [run.store(name, run.MEMORY, 1) for name in run.OUR_STORES],
        },
    ),
]

SECTIONS = [
    Claim(
        "Fixed batches hold two samples, so that the longest fit, and fill a tenth of their "
        "memory.",
        lambda fill: 0.08 < fill < 0.12,
        {"fill": run.padding(run.FIXED, run.CV1, 1)},
    ),
    Claim(
        "At CV 2, the largest batch of lhotse is {lhotse} x the budget, on 64 ranks {lhotse_64} x, "
        "the largest of `odb_nodes` {ours} x.",
        lambda lhotse, lhotse_64, ours: min(lhotse, lhotse_64) > 1 >= max(ours),
        {
            "lhotse": run.padding(run.LHOTSE, run.LARGEST),
            "lhotse_64": Cell("Balance over 64 ranks", run.LHOTSE, run.LARGEST),
            "ours": [
                run.padding(name, run.LARGEST)
                for name in (run.PADDED, run.PADDED_KNOWN, run.PACKED, run.PACKED_KNOWN)
            ],
        },
    ),
    Claim(
        "By its first batch of a resume, `odb_nodes` has made {ours} samples besides those of this "
        "batch, Grain's packing and lhotse {others}.",
        lambda ours, others: ours < min(others) / 10,
        {
            "ours": run.resumed(run.LIST, run.AGAIN),
            "others": [
                run.resumed(name, run.AGAIN) for name in (run.GRAIN_PACKED, run.LHOTSE_START)
            ],
        },
    ),
    Claim(
        "All resume exactly but the stream of datasets, which loses {lost} samples and repeats "
        "{repeated}.",
        lambda exact, lost, repeated: all(exact) and lost > 0 and repeated > 0,
        {
            "exact": [
                run.resumed(name, "same batches")
                for name in (
                    run.STATEFUL,
                    run.GRAIN,
                    run.LITDATA,
                    "Energon",
                    run.GRAIN_PACKED,
                    run.LHOTSE_START,
                    run.LHOTSE_KNOWN,
                    run.LIST,
                    run.LIST_EARLY,
                    run.LIST_KNOWN,
                    run.STREAM,
                )
            ],
            "lost": run.resumed(run.STREAM_OF_DATASETS, "lost"),
            "repeated": run.resumed(run.STREAM_OF_DATASETS, "repeated"),
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
            "ours": run.on_ranks(run.LIST, run.RESUME),
            "stream": run.on_ranks(run.STREAM, run.RESUME),
            "stateful": run.on_ranks(run.STATEFUL, run.RESUME),
            "grain": run.on_ranks(run.GRAIN, run.RESUME),
            "lhotse": run.on_ranks(run.LHOTSE_START, run.RESUME),
            "datasets": run.on_ranks(run.STREAM_OF_DATASETS, run.RESUME),
            "lost": run.on_ranks(run.STREAM_OF_DATASETS, "lost"),
            "repeated": run.on_ranks(run.STREAM_OF_DATASETS, "repeated"),
            "exact": [
                run.on_ranks(name, "same batches")
                for name in (run.LIST, run.STREAM, run.STATEFUL, run.GRAIN, run.LHOTSE_START)
            ],
        },
    ),
    Claim(
        "Fixed batches of 32 samples have a padding of {fixed}, those of `odb_nodes` under 16,384 "
        "padded tokens {ours}.",
        lambda fixed, ours: min(fixed) > max(ours),
        {
            "fixed": [
                run.rate(name, run.PADDING_2)
                for name in (run.TORCH_MEMORY, run.STATEFUL_MEMORY, "Grain, memory", run.WEB_TAR)
            ],
            "ours": [run.rate(name, run.PADDING_2) for name in (run.OUR_MEMORY, run.OUR_TAR)],
        },
    ),
    Claim(
        "With 4 workers on 2 cores, `odb_nodes` makes {torch} x the samples / s of `DataLoader` "
        "and {web} x those of WebDataset; in an epoch of 2,000 texts, {short} x those of "
        "`DataLoader` and `StatefulDataLoader`, {short_web} x those of WebDataset.",
        lambda torch, web, short, short_web: min(torch, web, *short, short_web) > 1,
        {
            "torch": run.rate(
                run.OUR_MEMORY, run.RATE_4, per=run.rate(run.TORCH_MEMORY, run.RATE_4)
            ),
            "web": run.rate(run.OUR_TAR, run.RATE_4, per=run.rate(run.WEB_TAR, run.RATE_4)),
            "short": [
                run.rate(run.OUR_MEMORY, run.RATE_SHORT, per=run.rate(name, run.RATE_SHORT))
                for name in (run.TORCH_MEMORY, run.STATEFUL_MEMORY)
            ],
            "short_web": run.rate(
                run.OUR_TAR, run.RATE_SHORT, per=run.rate(run.WEB_TAR, run.RATE_SHORT)
            ),
        },
    ),
    Claim(
        "From lists, `DataLoader` is **ahead**, {ratio} x the samples / s, since its workers "
        "collate.",
        lambda ratio, lists, torch: ratio > 1 and torch < lists,
        {
            "ratio": run.own_collate(
                run.TORCH_LISTS, run.RATE, per=run.own_collate(run.LISTS, run.RATE)
            ),
            "lists": run.own_collate(run.LISTS, run.CPU),
            "torch": run.own_collate(run.TORCH_LISTS, run.CPU),
        },
    ),
    Claim(
        "On images, packed rows are slower than padded batches, which have next to no padding.",
        lambda packed, padded, padding: packed < padded and padding < 0.02,
        {
            "packed": run.speed(run.PACKED, run.IMAGES),
            "padded": run.speed(run.PADDED, run.IMAGES),
            "padding": run.batches(run.PADDED, run.IMAGES),
        },
    ),
    Claim(
        "Steps and loss of an epoch on 4 ranks: online-dynamic-batching {steps}, {odb}; lhotse "
        "{lhotse_steps}, {lhotse}; fixed batches {fixed_steps}, {fixed}; `odb_nodes` {our_steps}, "
        "{ours}.",
        lambda steps, odb, lhotse_steps, lhotse, our_steps, ours, fixed_steps, fixed: (
            steps > lhotse_steps > max(*our_steps, fixed_steps) and odb < lhotse < min(*ours, fixed)
        ),
        {
            "steps": run.batches(run.ODB, run.TEXT_4, run.STEPS),
            "lhotse_steps": run.batches(run.LHOTSE, run.TEXT_4, run.STEPS),
            "fixed_steps": run.batches(run.FIXED, run.TEXT_4, run.STEPS),
            "fixed": run.batches(run.FIXED, run.TEXT_4, run.LOSS),
            "our_steps": [
                run.batches(name, run.TEXT_4, run.STEPS) for name in (run.PADDED, run.PACKED)
            ],
            "odb": run.batches(run.ODB, run.TEXT_4, run.LOSS),
            "lhotse": run.batches(run.LHOTSE, run.TEXT_4, run.LOSS),
            "ours": [run.batches(name, run.TEXT_4, run.LOSS) for name in (run.PADDED, run.PACKED)],
        },
    ),
    Claim(
        "At equal CPU time, the loss on text is {packed} with packed rows, {ours} with "
        "padded batches of `odb_nodes`, {lhotse} of lhotse, {odb} of online-dynamic-batching, "
        "{fixed} with fixed batches.",
        lambda packed, ours, lhotse, odb, fixed: max(packed) < ours < lhotse < odb < fixed,
        {
            "packed": [run.text_loss(name, run.EQUAL_CPU) for name in (run.PACKED, run.TRL)],
            "ours": run.text_loss(run.PADDED, run.EQUAL_CPU),
            "lhotse": run.text_loss(run.LHOTSE, run.EQUAL_CPU),
            "odb": run.text_loss(run.ODB, run.EQUAL_CPU),
            "fixed": run.text_loss(run.FIXED, run.EQUAL_CPU),
        },
    ),
    Claim(
        "It costs speed: on images and text {halved} x fixed batches instead of {ours} x.",
        lambda halved, ours: 1 < halved < ours,
        {
            "halved": run.speed(run.HALVES, run.IMAGES),
            "ours": run.speed(run.PADDED, run.IMAGES),
        },
    ),
    Claim(
        "The rate alone does not mend batches of one kind: with `LrScaling`, the loss after the "
        "short epoch is {scaled}.",
        lambda scaled, ours: scaled > ours - 0.05,
        {
            "scaled": run.short_loss(run.SCALED, "epoch"),
            "ours": run.short_loss(run.PADDED, "epoch"),
        },
    ),
]

README = [
    Claim(
        "| {ours} | {lhotse} lhotse |",
        lambda ours, lhotse: ours < lhotse,
        {
            "ours": run.padding(run.PADDED, run.CV1),
            "lhotse": run.padding(run.LHOTSE, run.CV1),
        },
    ),
    Claim(
        "| {ours} s | {grain} s Grain, packed |",
        lambda ours, grain: ours < grain,
        {
            "ours": run.first(run.LIST, run.RESUME),
            "grain": run.first(run.GRAIN_PACKED, run.RESUME),
        },
    ),
]

PERFORMANCE = [
    Claim(
        "A function that pads row by row then takes {arrays} us of CPU time a text in all "
        "processes, from lists {lists}; `DataLoader(32)`, which collates in its workers, "
        "{torch_arrays} and {torch}",
        lambda arrays, lists, torch_arrays, torch: torch_arrays <= arrays < torch < lists,
        {
            "arrays": run.own_collate(run.LISTS_TO_ARRAYS, run.CPU),
            "lists": run.own_collate(run.LISTS, run.CPU),
            "torch_arrays": run.own_collate(run.TORCH_ARRAYS, run.CPU),
            "torch": run.own_collate(run.TORCH_LISTS, run.CPU),
        },
    ),
]

INDEX = [
    Claim(
        "TRL's rows are {trl} full, axolotl's {axolotl}",
        lambda trl, axolotl: 0.98 < trl < axolotl,
        {
            "trl": run.padding(run.TRL, run.CV1, 1),
            "axolotl": run.padding(run.AXOLOTL, run.CV1, 1),
        },
    ),
]

PAGES: dict[str, tuple[list[Claim], list[PageTable]]] = {
    "docs/comparison.md": ([*IN_SHORT, *SECTIONS], TABLES),
    "docs/performance.md": (PERFORMANCE, []),
    "docs/index.md": (INDEX, []),
    "README.md": (README, []),
}
