"""What two runs are compared by."""

from __future__ import annotations

from elasticrun.check.comparing import Mask, compare_fields, compare_files


def test_ignored_fields_are_not_compared() -> None:
    one, other = {"a.b": 1, "a.c": 2}, {"a.b": 3, "a.c": 4}
    assert [d.name for d in compare_fields(one, other, Mask(("*.b",)), None)] == ["a.c"]


def test_files_are_compared_as_far_as_they_can_be() -> None:
    one = {"log": {"lines": 2, "size": 9, "hash": "x"}, "net": {"size": 5, "hash": "y"}}
    other = {
        "log": {"lines": 3, "size": 12, "hash": "z"},
        "net": {"size": 5, "hash": "u"},
    }

    def names(**options: bool) -> list[str]:
        return [d.name for d in compare_files(one, other, Mask(), **options)]

    assert names() == ["file:log", "file:net"]
    assert names(is_rounded=True) == ["file:log"]
    assert names(is_killed=True) == []
    assert compare_files(one, one, Mask()) == []
    (gone,) = compare_files(
        one, {"log": None, "net": one["net"]}, Mask(), is_killed=True
    )
    assert gone.name == "file:log"
