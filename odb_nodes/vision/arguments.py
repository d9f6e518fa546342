"""Checks of arguments that several classes of `vision` take."""

from __future__ import annotations

from typing import Any

from odb_nodes._core.checks import describe

ORDER = "The order is `VisionLanguageProcessor(tokenizer, image_processor)`"
PATCHES = ("patch_size", "merge_size", "temporal_patch_size", "size", "resample")


def check_names(name: str, value: object) -> None:
    """Raise a `TypeError` where `value` is no tuple or list of strings."""
    if not isinstance(value, (tuple, list)) or not all(isinstance(one, str) for one in value):
        raise _wrong(name, value, "a tuple of strings", 'Pass `("id",)` for one.')


def check_tokenizer(name: str, value: Any) -> None:
    """Raise a `TypeError` where `value` cannot serve as a tokenizer; says how to come by one."""
    needed = ("__call__", "__len__", "convert_tokens_to_ids")
    if isinstance(value, type) or not all(hasattr(value, one) for one in needed):
        made = "`AutoTokenizer.from_pretrained(...)` makes the tokenizer."
        raise _wrong(name, value, "a tokenizer of transformers", f"{ORDER}; {made}")


def check_image_processor(name: str, value: Any, remedy: str) -> None:
    """Raise an error where `value` cannot cut images into patches."""
    needed = ("__call__", *PATCHES)
    if isinstance(value, type) or not all(hasattr(value, one) for one in needed):
        rule = f"an image processor with {', '.join(f'`{one}`' for one in PATCHES)}"
        raise _wrong(name, value, rule, remedy)
    try:
        found = [value.size[edge] for edge in ("shortest_edge", "longest_edge")]
    except (KeyError, TypeError):
        found = [None]
    if None in found:
        raise ValueError(
            f"the `size` of `{name}` must have `shortest_edge` and `longest_edge`, the bounds of "
            f"an image's pixels, but is {value.size!r} instead. Pass `min_pixels` and `max_pixels` "
            "to the image processor."
        )


def _wrong(name: str, value: object, rule: str, remedy: str) -> TypeError:
    return TypeError(f"`{name}` must be {rule}, but is {describe(value)} instead. {remedy}")
