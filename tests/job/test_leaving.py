"""A generator learns how the `for` around it was left: freely, or by an exception."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import pytest
from tqdm import tqdm

from elasticrun.job.open_loop import is_called_by_for_loop, is_left_by_break

Loop = Callable[[], Iterable[int]]


class Watched:
    """Iterates over a few numbers, and notes how each loop over them was left."""

    def __init__(self) -> None:
        self.endings: list[str] = []

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(1, 6)
            self.endings.append("end")
        except GeneratorExit:
            is_free = is_left_by_break(sys._getframe(1))
            self.endings.append("left" if is_free else "exception")
            raise


# What people put around a loader.


def generator(source: Iterable[int]) -> Generator[int, None, None]:
    for value in source:
        yield value + 0


def generator_in_try(source: Iterable[int]) -> Generator[int, None, None]:
    try:
        yield from source
    finally:
        len("cleaning up")


def generator_with_context(source: Iterable[int]) -> Generator[int, None, None]:
    for value in source:
        with contextlib.nullcontext():
            yield value


def generator_with_finally(source: Iterable[int]) -> Generator[int, None, None]:
    for value in source:
        try:
            yield value
        finally:
            len("cleaning up")


def expression(source: Iterable[int]) -> Iterable[int]:
    return (value for value in source)


def numbered(source: Iterable[int]) -> Iterable[Any]:
    return enumerate(source)


def zipped_first(source: Iterable[int]) -> Iterable[Any]:
    return zip(source, range(100), strict=False)


def zipped_last(source: Iterable[int]) -> Iterable[Any]:
    return zip(range(100), source, strict=False)


def mapped(source: Iterable[int]) -> Iterable[Any]:
    return map(str, source)


def nested(source: Iterable[int]) -> Iterable[Any]:
    return enumerate(generator(generator_in_try(source)))


class HoldsIterator:
    """Hands on what another iterator gives, as prefetchers do."""

    def __init__(self, source: Iterable[int]) -> None:
        self._iterator = iter(source)

    def __iter__(self) -> HoldsIterator:
        return self

    def __next__(self) -> int:
        return next(self._iterator)


def bare(source: Iterable[int]) -> Iterable[int]:
    return source


WRAPPERS = [
    bare,
    generator,
    generator_in_try,
    generator_with_context,
    generator_with_finally,
    expression,
    numbered,
    zipped_first,
    zipped_last,
    mapped,
    nested,
    HoldsIterator,
]


# Loops that are left on purpose.


def breaks(loop: Loop) -> None:
    for _ in loop():
        break


def breaks_later(loop: Loop) -> None:
    for number, _ in enumerate(loop()):
        if number == 2:
            break
    else:
        raise AssertionError


def returns(loop: Loop) -> Any:
    for value in loop():
        return value
    return None


def returns_a_constant(loop: Loop) -> Any:
    for _ in loop():
        return 3
    return None


def returns_a_call(loop: Loop) -> Any:
    for value in loop():
        return str(value)
    return None


def returns_from_with(loop: Loop) -> Any:
    with contextlib.nullcontext():
        for value in loop():
            with contextlib.nullcontext():
                return value
    return None


def returns_through_finally(loop: Loop) -> Any:
    try:
        for value in loop():
            return value
    finally:
        len("cleaning up")
    return None


def breaks_from_with(loop: Loop) -> None:
    with contextlib.nullcontext():
        for _ in loop():
            with contextlib.nullcontext():
                break


def breaks_in_try(loop: Loop) -> None:
    for _ in loop():
        try:
            break
        finally:
            len("cleaning up")


def breaks_in_handler(loop: Loop) -> None:
    for _ in loop():
        try:
            raise ValueError
        except ValueError:
            break


def breaks_the_inner_of_two(loop: Loop) -> None:
    for _ in range(1):
        for _ in loop():
            break


def breaks_and_then_raises(loop: Loop) -> None:
    for _ in loop():
        break
    raise ValueError


def breaks_and_drops_the_iterator(loop: Loop) -> None:
    iterator = iter(loop())
    for _ in iterator:
        break
    del iterator


ON_PURPOSE = [
    breaks,
    breaks_later,
    returns,
    returns_a_constant,
    returns_a_call,
    returns_from_with,
    returns_through_finally,
    breaks_from_with,
    breaks_in_try,
    breaks_in_handler,
    breaks_the_inner_of_two,
    breaks_and_then_raises,
    breaks_and_drops_the_iterator,
]


# Loops that an exception leaves.


def fail() -> None:
    raise ValueError


def raises(loop: Loop) -> None:
    for _ in loop():
        raise ValueError


def raises_in_a_call(loop: Loop) -> None:
    for _ in loop():
        fail()


def raises_in_an_operator(loop: Loop) -> None:
    for _ in loop():
        _ = 1 / 0


def raises_in_an_assertion(loop: Loop) -> None:
    for value in loop():
        assert not value


def raises_in_a_subscript(loop: Loop) -> None:
    for value in loop():
        {}[value]


def raises_in_with(loop: Loop) -> None:
    for _ in loop():
        with contextlib.nullcontext():
            raise ValueError


def raises_through_finally(loop: Loop) -> None:
    for _ in loop():
        try:
            raise ValueError
        finally:
            len("cleaning up")


def raises_again(loop: Loop) -> None:
    for _ in loop():
        try:
            raise ValueError
        except ValueError:
            raise


def raises_and_is_caught_around(loop: Loop) -> None:
    try:
        for _ in loop():
            fail()
    except ValueError:
        return


def is_suppressed_around(loop: Loop) -> None:
    with contextlib.suppress(ValueError):
        for _ in loop():
            fail()


def exits(loop: Loop) -> None:
    for _ in loop():
        sys.exit(3)


def raises_in_the_inner_of_two(loop: Loop) -> None:
    for _ in range(1):
        for _ in loop():
            fail()


BY_EXCEPTION = [
    raises,
    raises_in_a_call,
    raises_in_an_operator,
    raises_in_an_assertion,
    raises_in_a_subscript,
    raises_in_with,
    raises_through_finally,
    raises_again,
    raises_and_is_caught_around,
    is_suppressed_around,
    exits,
    raises_in_the_inner_of_two,
]


def endings(body: Callable[[Loop], Any], wrap: Callable[..., Any]) -> list[str]:
    watched = Watched()
    with contextlib.suppress(Exception, SystemExit):
        body(lambda: wrap(watched))
    return watched.endings


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("body", ON_PURPOSE)
def test_break_and_return_leave_on_purpose(
    body: Callable[[Loop], Any], wrap: Callable[..., Any]
) -> None:
    assert endings(body, wrap) == ["left"]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("body", BY_EXCEPTION)
def test_an_exception_does_not(
    body: Callable[[Loop], Any], wrap: Callable[..., Any]
) -> None:
    assert endings(body, wrap) == ["exception"]


@pytest.mark.parametrize(
    ("body", "ending"), [(breaks, "left"), (raises_in_a_call, "exception")]
)
def test_a_progress_bar_makes_no_difference(
    body: Callable[[Loop], Any], ending: str
) -> None:
    with open("/dev/null", "w") as nowhere:
        assert endings(body, lambda source: tqdm(source, file=nowhere)) == [ending]


@pytest.mark.parametrize(
    ("body", "ending"), [(breaks, "left"), (raises_in_a_call, "exception")]
)
def test_a_debugger_makes_no_difference(
    body: Callable[[Loop], Any], ending: str
) -> None:
    def trace(*event: Any) -> Any:
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        found = endings(body, generator)
    finally:
        sys.settrace(previous)
    assert found == [ending]


def test_an_iterator_that_is_closed_by_hand_counts_as_an_exception() -> None:
    watched = Watched()
    iterator = iter(watched)
    next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    assert watched.endings == ["exception"]


def test_a_wrapper_that_fails_counts_as_an_exception() -> None:
    def failing(source: Iterable[int]) -> Iterator[int]:
        for value in source:
            yield value
            raise ValueError

    def goes_on(loop: Loop) -> None:
        for _ in loop():
            continue

    assert endings(goes_on, failing) == ["exception"]


NUM_LOOPS = 100  # CPython specializes an instruction when it has run some times.


def test_who_asks_is_known_in_each_of_many_loops() -> None:
    asked_by_for: list[bool] = []

    def source() -> Iterator[int]:
        asked_by_for.append(is_called_by_for_loop(sys._getframe(1)))
        yield 0

    def delegating() -> Iterator[int]:
        yield from source()

    def loop() -> None:
        for _ in source():
            break
        for _ in delegating():
            break

    def ask_by_hand() -> None:
        next(source())

    for _ in range(NUM_LOOPS):
        loop()
    assert asked_by_for == [True] * 2 * NUM_LOOPS
    asked_by_for.clear()
    for _ in range(NUM_LOOPS):
        ask_by_hand()
    assert asked_by_for == [False] * NUM_LOOPS
