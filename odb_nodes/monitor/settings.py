"""What a run was made with: the options of its loader, versions, and what the user adds."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from platform import python_version
from typing import Any

from odb_nodes._core.checks import check_named, check_type
from odb_nodes.loader.dataloader import ODBDataLoader

_PACKAGES = ("odb_nodes", "torch", "torchdata", "numpy")
_MAYBE_PACKAGES = ("transformers", "accelerate", "lightning", "datasets")
_ALWAYS = ("token_budget", "window", "seed", "accumulate")
_MOST_ITEMS = 100  # of a list that is written out
_LEFT_OUT = ("exclude", "process_group")  # keys of samples, of which there may be many; an object


def checked_config(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a copy of the user's own settings as JSON data; text in place of other values."""
    remedy = 'Pass values by name, such as {"lr": 1e-4}, or `vars(args)`.'
    check_type("config", config, Mapping | None, remedy)
    check_named("config", config or {})
    found: dict[str, Any] = {}
    for name, value in (config or {}).items():
        try:
            found[name] = json.loads(json.dumps(value, default=_name_of, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`config[{name!r}]` must be data that JSON can hold, but: {error}. {remedy}"
            ) from None
    return found


def _name_of(value: Any) -> str:
    """Return what an object is called: the same in a run that resumes, so without its address."""
    if name := getattr(value, "__qualname__", ""):
        return f"{value.__module__}.{name}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def loader_settings(loader: Any) -> dict[str, Any]:
    """Return the main options of a loader, and those that differ from their defaults, as JSON."""
    if not isinstance(loader, ODBDataLoader):
        return {}
    differing = _differing(loader.options)
    main = {name: _plain(getattr(loader.options, name)) for name in _ALWAYS}
    return main | {name: one for name, one in differing.items() if name not in _LEFT_OUT}


def versions() -> dict[str, str]:
    """Return the versions of Python, and of the packages that take part."""
    found = {"python": python_version()}
    for name in (*_PACKAGES, *_MAYBE_PACKAGES):
        if version := getattr(sys.modules.get(name), "__version__", None):
            found[name] = str(version)
    return found


def _differing(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults, by name, as JSON data."""
    found = {}
    for field in fields(options):
        value = getattr(options, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if type(value) is not type(default) or value != default:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Return a value as JSON data: functions and objects are their names."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):  # of indices there may be millions
        many = len(value) > _MOST_ITEMS
        return f"{len(value)} items" if many else [_plain(one) for one in value]
    if is_dataclass(value) and not isinstance(value, type):
        found = _differing(value)
        return found["tokens"] if [*found] == ["tokens"] else found  # a budget of nothing else
    return getattr(value, "__name__", type(value).__name__)
