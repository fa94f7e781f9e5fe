"""What states were like at several places of the program, in forms that are saved."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from functools import partial
from typing import Any

from elasticrun.checkpoint.states.expected import MAPPING, Kind, check_values, misfit

# Finished epochs and loops, and whether an epoch is running.
Place = tuple[int, int, bool]
_MOST_PLACES = 1000
_MOST_BYTES = 16 << 20
_PLACE = Kind(
    "a place of the program",
    lambda place: type(place) is tuple and [*map(type, place)] == [int, int, bool],
)


def exact(form: Any) -> bytes:
    """Return bytes that two forms have in common only if all values and types are."""
    return marshal.dumps(form, 2)  # Later versions tell which objects are the same.


class AnchorNotes:
    """What was noted at the places of an epoch, or outside of epochs, by names.

    Above 1,000 places or 16 MB nothing at all is noted.
    """

    def __init__(self) -> None:
        # With all that is known of a place, and the bytes of what has changed up to
        # there. Never changed in place: see `remember`. None above the bound.
        self._places: tuple[tuple[Place, dict[Any, Any], int], ...] | None = ()

    def clear(self) -> None:
        self._places = ()

    @property
    def is_over(self) -> bool:
        """Whether it was too much."""
        return self._places is None

    def add(self, place: Place, forms: dict[Any, Any]) -> None:
        """Note forms at a place; forget later ones, which the program comes to anew."""
        if self._places is None:
            return
        while self._places and self._places[-1][0] >= place:
            self._places = self._places[:-1]
        _, before, size = self._places[-1] if self._places else (None, {}, 0)
        known = dict(before)
        for name, form in forms.items():
            now = exact(form)
            if name not in before or exact(before[name]) != now:
                known[name] = form
                size += len(now)
        self._places = (*self._places, (place, known, size))
        if len(self._places) > _MOST_PLACES or size > _MOST_BYTES:
            self._places = None

    def change(self, name: Any, change: Callable[[Any], Any]) -> None:
        """Change the forms that a name has at all places."""
        if self._places is not None:
            encoded, self._places = self.encode(), ()
            for place, forms in encoded:
                changed = {key: change(forms[key]) for key in forms if key == name}
                self.add(place, {**forms, **changed})

    @property
    def places(self) -> list[Place]:
        return [place for place, _, _ in self._places or ()]

    def at(self, place: Place) -> dict[Any, Any]:
        """Return all that is known of a place; nothing if it was not noted."""
        return next((known for at, known, _ in self._places or () if at == place), {})

    def remember(self) -> Callable[[], None]:
        return partial(setattr, self, "_places", self._places)

    def encode(self, most_bytes: int = _MOST_BYTES) -> Any:
        """Return plain values: of each place what has changed since the one before.

        Args:
            most_bytes: Above these it is as if nothing had been noted.
        """
        if self._places is None:
            return None
        if self._places and self._places[-1][2] > most_bytes:
            return ()
        befores = [{}, *(known for _, known, _ in self._places)]
        return tuple(
            (place, {k: v for k, v in known.items() if before.get(k, self) is not v})
            for (place, known, _), before in zip(self._places, befores, strict=False)
        )

    def decode(self, values: Any, *, name: str) -> None:
        try:
            exact(values)
        except ValueError:
            raise misfit(name, values, "plain values") from None
        self._places = None
        if values is not None:
            check_values(values, [(_PLACE, MAPPING)], name=name)
            self._places = ()
            for place, changed in values:
                self.add(place, changed)
