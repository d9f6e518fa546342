"""What `ODBDataLoader` makes of arguments that it does not have, or that came too late."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from odb_nodes.loader.options import LoaderOptions

_OF_DATALOADER = {
    "batch_size": "`token_budget=` bounds a batch, and `TokenBudget(max_samples=)` its samples",
    "batch_sampler": "batches are formed here: pass a `sampler`",
    "drop_last": "`uneven=` says what becomes of the last batches",
    "generator": "pass a `seed`",
    "multiprocessing_context": "pass `workers=WorkerOptions(start_method=)`",
    "persistent_workers": "workers always persist",
    "prefetch_factor": "pass `prefetch=`, in batches, or `WorkerOptions(in_flight_samples=)`",
    "timeout": "pass `workers=WorkerOptions(timeout_s=)`",
    "worker_init_fn": "pass `workers=WorkerOptions(worker_init_fn=)`",
}


class OptionGuard:
    """Base of `ODBDataLoader`: names what is wrong with an argument, and shows editors all of them.

    A class below that has an `__init__` of its own answers for its own arguments.
    """

    _guarded: ClassVar[type]  # the class with the arguments
    _has_them: ClassVar[bool]  # and none of its own

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        if OptionGuard in cls.__bases__:
            cls._guarded, cls._has_them = cls, True
        elif "__init__" in vars(cls):
            cls._has_them = False
        shown = inspect.signature(cls.__init__)  # and not that of `__new__`
        parameters = [*shown.parameters.values()][1:]
        cls.__signature__ = shown.replace(parameters=parameters)  # type: ignore[attr-defined]

    def __new__(cls, *_: Any, **given: Any) -> Any:
        """Name what there is in place of an argument of torch's `DataLoader`.

        Raises:
            TypeError: dynamic batches do not have it.
        """
        for name in given if cls._has_them else ():
            if name in _OF_DATALOADER:
                raise TypeError(
                    f"`{name}` is an argument of `DataLoader` that `{cls.__name__}` does not have: "
                    f"{_OF_DATALOADER[name]}."
                )
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        is_made = self._has_them and "_loader" in vars(self)
        # A subclass may have a property of that name.
        is_own = getattr(type(self), name, None) is not getattr(self._guarded, name, None)
        if is_made and not is_own and name in ("dataset", *LoaderOptions.__dataclass_fields__):
            raise AttributeError(
                f"`{name}` cannot be set on a loader that is made, and would change nothing. Make "
                f"another with `{name}=`; to go on where this one stands, load its state there "
                "(`strict=False` lets some options change)."
            )
        super().__setattr__(name, value)
