"""Images and text: decoding with policies for bad images, image tokens, batches, modalities.

Import it as it is: `import odb_nodes` does not. Decoding needs Pillow, and image processors come
from transformers: `pip install 'odb-nodes[vision]'`.
"""

from odb_nodes.vision.chat import ChatTemplate, Part
from odb_nodes.vision.dummy import DummyImage
from odb_nodes.vision.images import ImageError, ImageReader, resized_shape
from odb_nodes.vision.language_collate import VisionLanguageCollate
from odb_nodes.vision.multi_image_collate import MultiImageCollate
from odb_nodes.vision.policy import BadImages
from odb_nodes.vision.processor import VisionLanguageProcessor

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
