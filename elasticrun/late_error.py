"""An error from where none can be raised, kept until one can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class LateError:
    """For code that runs while Python closes a generator, out of which nothing comes.

    After `break`, that the job could not be saved would otherwise be swallowed.
    """

    def __init__(self) -> None:
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return self._error is not None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is raised within."""
        try:
            yield
        except BaseException as error:
            self._error = self._error or error

    def raise_once(self) -> None:
        """Raise what was kept, if anything was."""
        error, self._error = self._error, None
        if error is not None:
            raise error
