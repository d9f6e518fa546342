"""Memory of a loader over images of 12 megapixels, over three epochs.

    python examples/benchmarks/benchmark_images.py               # 1,000 images
    python examples/benchmarks/benchmark_images.py --images 30   # a quick look

A few photographs of 4000 x 3000 pixels are rendered and written as JPEG files, which are read again
and again. The resident memory of this process and its workers is measured ten times a second, with
shared memory counted once. The output is the peak in each epoch, above the memory before the first
batch, and the memory that the samples in the loader may take: in the pool, in flight, in the round
of the aligner and in the batches made ahead. A worker shares Python's own memory with this process
at first, and gets a copy of it little by little.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from odb_nodes import ODBDataLoader, TokenBudget, WorkerOptions, pop_step_info
from odb_nodes.vision import VisionLanguageCollate

sys.path.append(str(Path(__file__).parents[1]))  # tiny_vlm.py is among the examples
from tiny_vlm import Record, build_processor

WIDTH, HEIGHT = 4000, 3000
FILES = 8
CHUNK, ROUND_STEPS, PREFETCH = 4, 8, 2  # small: what is held ahead takes memory
MEBIBYTE = 2**20


class Photographs:
    """A map-style dataset of conversations about a few large JPEG files.

    Args:
        paths: the image files.
        size: number of conversations.
    """

    def __init__(self, paths: list[Path], size: int) -> None:
        self._paths, self._size = paths, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Record:
        """Return a record with the path of its image."""
        content = [{"type": "image"}, {"type": "text", "text": "What do you see?"}]
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": "I see a red circle. " * (index % 7 + 1)},
        ]
        path = self._paths[index % len(self._paths)]
        return {"images": [path], "messages": messages}


def render(folder: Path) -> list[Path]:
    """Write a few photographs with smooth gradients, and return their paths."""
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    paths = []
    for number in range(FILES):
        image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
        for channel in range(3):
            image[..., channel] = 127 + 60 * (
                np.sin(rows / (150 + 40 * number) + channel) + np.cos(columns / 200 + number)
            )
        paths.append(folder / f"{number}.jpg")
        Image.fromarray(image).save(paths[-1], quality=85)
    return paths


@dataclass
class Peak:
    """Peak resident memory of this process and its children since it was set to 0."""

    resident_bytes: int = 0


@contextmanager
def measured() -> Iterator[Peak]:
    """Measure memory on a thread while the context lasts."""
    peak, ended = Peak(), threading.Event()

    def measure() -> None:
        while not ended.wait(0.1):
            peak.resident_bytes = max(peak.resident_bytes, resident_bytes())

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    yield peak
    ended.set()
    thread.join()


def resident_bytes() -> int:
    """Return the memory of this process, and the unshared memory of its children."""
    process = psutil.Process()
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            # Without shared memory: a part of it belongs to other jobs on the machine, and varies.
            total += child.memory_full_info().uss
        except psutil.NoSuchProcess:
            pass
    return int(total)


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--images", type=int, default=1000, help="images of an epoch (%(default)s)")
    add("--epochs", type=int, default=3, help="number of epochs (%(default)s)")
    add("--workers", type=int, default=2, help="processes that decode (%(default)s)")
    add("--window", type=int, default=64, help="samples waiting to be grouped (%(default)s)")
    add("--tokens", type=int, default=256, help="most tokens of an image (%(default)s)")
    add("--late-patches", action="store_true", help="make patches with the batch")
    return parser.parse_args()


def make_loader(options: argparse.Namespace, paths: list[Path]) -> ODBDataLoader:
    """Return a loader that holds few samples ahead."""
    processor = replace(
        build_processor(max_pixels=28 * 28 * options.tokens), late_patches=options.late_patches
    )
    patches = 4 * options.tokens
    return ODBDataLoader(
        Photographs(paths, options.images),
        token_budget=TokenBudget(4096, max_patches=8 * patches),
        window=options.window,
        process_fn=processor,
        collate_fn=VisionLanguageCollate(dummy=None, image_processor=processor.image_processor),
        workers=WorkerOptions(
            num_workers=options.workers, chunk_size=CHUNK, in_flight_samples=options.window
        ),
        round_size=ROUND_STEPS,
        prefetch=PREFETCH,
    )


def held(options: argparse.Namespace, batch_samples: int) -> dict[str, tuple[int, float]]:
    """Return how many samples the loader holds in each place, and their MiB.

    Args:
        options: options of the command line.
        batch_samples: samples of the largest batch.
    """
    patches_mib = 4 * options.tokens * 3 * 14 * 14 * 2 * 4 / MEBIBYTE  # float32, two frames
    sample_mib = patches_mib / (8 if options.late_patches else 1)
    samples = {
        "pool": options.window,
        "in flight": options.window + 2 * CHUNK if options.workers else CHUNK,
        "round": (ROUND_STEPS + 1) * batch_samples,
    }
    batches = (PREFETCH + 2) * batch_samples
    return {
        **{name: (count, count * sample_mib) for name, count in samples.items()},
        "batches": (batches, batches * patches_mib),
    }


def main(options: argparse.Namespace) -> None:
    """Run the epochs, and print their memory and speed."""
    with tempfile.TemporaryDirectory() as folder, measured() as peak:
        paths = render(Path(folder))
        size_bytes = paths[0].stat().st_size
        print(f"{FILES} files of {WIDTH} x {HEIGHT} pixels, {size_bytes:,} bytes each.")
        batch_samples = 0
        with make_loader(options, paths) as loader:
            before_mib = resident_bytes() / MEBIBYTE
            print(f"before the first batch: {before_mib:,.0f} MiB")
            for epoch in range(options.epochs):
                peak.resident_bytes = samples = 0
                start_s = time.perf_counter()
                for batch in loader:
                    samples += pop_step_info(batch).local_samples
                    batch_samples = max(batch_samples, len(batch["input_ids"]))
                rate = samples / (time.perf_counter() - start_s)
                more_mib = peak.resident_bytes / MEBIBYTE - before_mib
                print(f"epoch {epoch}: {samples} images, {rate:.1f}/s, peak {more_mib:+,.0f} MiB")
    print("\nthe loader holds up to")
    for name, (count, mib) in held(options, batch_samples).items():
        print(f"{name:>12}{count:>6} samples{mib:>8,.0f} MiB")


if __name__ == "__main__":
    main(parse())
