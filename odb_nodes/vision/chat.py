"""Render a conversation with images as parts of text, in the form of ChatML."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from odb_nodes.errors import SampleError

ROLES = ("system", "user", "assistant")
_CONTENT_RULE = (
    '`content` must be a string, or a list of {"type": "text", "text": ...} and '
    '{"type": "image", "image": ...}'
)


class Part(NamedTuple):
    """A part of a rendered conversation.

    Attributes:
        kind: `"text"` to tokenize, a `"special"` token, or an `"image"`.
        content: the text, the token's name, or the image.
        supervised: whether the model learns to write it.
    """

    kind: Literal["text", "special", "image"]
    content: Any
    supervised: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """The conversation format of Qwen2-VL: `<|im_start|>role`, a line, content, `<|im_end|>`.

    Only the assistant's text and the token that ends it are supervised.

    Args:
        system: the system message of a conversation that has none; `None` to add none.
        start: the token that begins a message.
        end: the token that ends a message.
        image_start: the token before an image.
        image_token: the token that stands for one merged patch of an image.
        image_end: the token after an image.
    """

    system: str | None = "You are a helpful assistant."
    start: str = "<|im_start|>"
    end: str = "<|im_end|>"
    image_start: str = "<|vision_start|>"
    image_token: str = "<|image_pad|>"
    image_end: str = "<|vision_end|>"

    def render(
        self, messages: Sequence[Mapping[str, Any]], images: Iterable[Any] = ()
    ) -> list[Part]:
        """Return the parts of a conversation, text that belongs together joined.

        Args:
            messages: one or more, each with `role`, `"system"`, `"user"` or `"assistant"`, and
                `content`: a string, or a list of `{"type": "text", "text": ...}` and
                `{"type": "image", "image": ...}`.
            images: the images of the image parts without `image`, in order.

        Raises:
            SampleError: a message is not like that, there is none, or there are more or fewer
                images than parts.
        """
        if not _is_list(messages) or not messages:
            raise SampleError(
                f"`messages` must be a list of one message or more, but is {messages!r:.100} "
                'instead. Pass [{"role": "user", "content": ...}, {"role": "assistant", ...}].'
            )
        for message in messages:
            _check_message(message)
        is_one = isinstance(images, (str, bytes, Mapping)) or getattr(images, "ndim", 1) in (2, 3)
        if not isinstance(images, Iterable) or is_one:
            shown = f"an array {images.shape}" if hasattr(images, "shape") else f"{images!r:.100}"
            raise SampleError(
                f"`images` must be a list of images, but is {shown} instead. Put a single one in a "
                "list: `[image]`."
            )
        left = iter(images)
        parts = list(self._parts(messages, left))
        if (unused := sum(1 for _ in left)) > 0:
            raise SampleError(
                f"`images` must have one image per image part without one, but has {unused} more. "
                'Put {"type": "image"} where they belong.'
            )
        return _joined(parts)

    def _parts(
        self, messages: Sequence[Mapping[str, Any]], images: Iterator[Any]
    ) -> Iterator[Part]:
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        for message in messages:
            supervised = message["role"] == "assistant"
            yield Part("special", self.start)
            yield Part("text", f"{message['role']}\n")
            for part in self._content(message["content"], images):
                yield part._replace(supervised=supervised and part.kind == "text")
            yield Part("special", self.end, supervised)
            yield Part("text", "\n")

    def _content(self, content: Any, images: Iterator[Any]) -> Iterator[Part]:
        for entry in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            kind = entry.get("type") if isinstance(entry, Mapping) else None
            if kind == "text" and isinstance(entry.get("text"), str):
                yield Part("text", entry["text"])
            elif kind == "image":
                yield Part("special", self.image_start)
                yield Part("image", self._image(entry, images))
                yield Part("special", self.image_end)
            else:
                raise SampleError(f"{_CONTENT_RULE}, but holds {entry!r:.100} instead.")

    def _image(self, entry: Mapping[str, Any], images: Iterator[Any]) -> Any:
        if (image := entry.get("image")) is not None:
            return image
        for image in images:
            return image
        raise SampleError(
            "`images` has fewer images than the messages have image parts without an `image`. Add "
            "what is missing, or remove those parts."
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _check_message(message: Any) -> None:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise SampleError(
            f"a message must have `role` and `content`, but is {message!r:.100} instead."
        )
    if (role := message["role"]) not in ROLES:
        raise SampleError(
            f"the `role` of a message must be one of {', '.join(ROLES)}, but is {role!r:.100} "
            "instead. Rename it, or leave the message out."
        )
    if not isinstance(content := message["content"], str) and not _is_list(content):
        raise SampleError(
            f"{_CONTENT_RULE}, but is {content!r:.100} instead. Pass an empty string for no text, "
            "or leave the message out."
        )


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Join neighbouring texts, so that they are tokenized as what they are: one text."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and part.kind == last.kind == "text":
            if part.supervised == last.supervised:
                joined[-1] = last._replace(content=last.content + part.content)
                continue
        joined.append(part)
    return joined
