"""Images of any mode, records that hold them, and steps with them: Pillow and numpy are enough."""

import io

import numpy as np
from PIL import Image

from odb_nodes import StepInfo


def noise(width, height, seed=0):
    """An image that no two pixels of are alike."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(values)


def in_mode(mode, width, height):
    """Noise of any mode of Pillow, in every band, alpha included."""
    if mode in ("1", "I", "F", "I;16"):
        return noise(width, height).convert("I").convert(mode)
    if mode == "PA":
        return in_mode("LA", width, height).convert("PA")
    bands = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(1).integers(0, 256, (height, width, bands), np.uint8)
    return Image.frombytes(mode, (width, height), values.tobytes())


def smooth(width, height):
    """An image whose values change slowly, so that it can be shrunk in two ways and compared."""
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / height * 3 + shift) + np.cos(columns / width * 5) for shift in range(3)]
    return Image.fromarray((63 * np.stack(waves, axis=-1) + 127).astype(np.uint8))


def as_bytes(image, format="PNG", **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def asked(*images, question="What is it?", answer="a red circle", **more):
    """A record with these images."""
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": list(images), **more}


def step(*modalities, is_filler=False):
    """The `StepInfo` of a step in which ranks have these."""
    counts = dict.fromkeys(("step", "local_samples", "local_targets", "all_targets"), 1)
    totals = {"all_samples_this_step": 1, "optimizer_samples": 1, "optimizer_targets": 1}
    return StepInfo(**counts, **totals, modalities=modalities, is_filler=is_filler)
