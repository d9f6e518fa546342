"""Images and text: decoding with policies for bad images, image tokens, batches, modalities.

`import odb_nodes` does not import this package. Decoding needs Pillow, and image processors come
from transformers: `pip install 'odb-nodes[vision]'`.
"""

from odb_nodes.training.vision.collate import DummyImage, VisionLanguageCollate
from odb_nodes.training.vision.images import BadImages, ImageError, ImageReader, resized_shape
from odb_nodes.training.vision.multi_image_collate import MultiImageCollate
from odb_nodes.training.vision.processor import ChatTemplate, Part, VisionLanguageProcessor

__all__ = [
    "BadImages",
    "ChatTemplate",
    "DummyImage",
    "ImageError",
    "ImageReader",
    "MultiImageCollate",
    "Part",
    "VisionLanguageCollate",
    "VisionLanguageProcessor",
    "resized_shape",
]
