"""Lengths that are counted, and samples that are broken."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from elasticrun import (
    AdaptiveDataLoader,
    CheckpointError,
    ElasticRunError,
    Endless,
    Packed,
    TextLines,
    Uncounted,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.data.streams import index as counting
from elasticrun.data.streams.index import Index, Scan
from tests.support.generations import generation, run_once
from tests.support.numbered_streams import flat


class Counted(TextLines):
    counted: ClassVar[list[int]] = []

    def scan(self, stream: int) -> Any:
        self.counted.append(stream)
        return super().scan(stream)


def test_lengths_are_counted_once_and_kept(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("x\n" * ord(name))

    def count() -> list[int]:
        Counted.counted.clear()
        lines = Counted([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
        assert [scan.length for scan in lines.scans] == [97, 98, len(content)]
        return sorted(Counted.counted)

    content = "x" * 99
    directory = tmp_path / "checkpoints"
    assert run_once(count) == [0, 1, 2]  # There is nowhere to keep them.
    assert run_once(count, directory) == [0, 1, 2]
    assert run_once(count, directory) == []
    content = "y" * 17
    (tmp_path / "c").write_text("y\n" * 17)
    assert run_once(count, directory) == [2]
    [index] = (directory / "streams").iterdir()
    lines = index.read_bytes()
    index.write_bytes(lines[:-30])  # A process died while it wrote.
    assert run_once(count, directory) == [2]
    index.write_bytes(index.read_bytes().replace(b"[98, ", b"[89, "))
    assert run_once(count, directory) == [1]


def test_an_index_is_made_anew_where_most_of_it_has_passed(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text("x\n" * 50_000)

    def count(second: int) -> int:
        os.utime(tmp_path / "a", (second, second))
        return TextLines(tmp_path / "[ab]", index=tmp_path / "kept").num_broken

    sizes = []
    for second in range(30):
        run_once(lambda at=second: count(at))
        sizes.append(os.path.getsize(next((tmp_path / "kept").iterdir())))
    assert max(sizes) < 100_000
    assert len(Counted(tmp_path / "[ab]", index=tmp_path / "kept").scans) == 2


def test_replicas_share_the_work_of_counting(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}").write_text("x\n" * number)
    names = [str(path) for path in sorted(tmp_path.iterdir())]
    one, other = (Index(tmp_path / "kept", "lines") for _ in range(2))
    for number, name in enumerate(names):
        assert other.find(name, "") is None
        one.add(name, "", Scan(number, np.arange(number)))
        found = other.find(name, "")
        assert found is not None
        assert (found.length, *found.marks) == (number, *range(number))
    assert other.find(names[3], "another time") is None
    assert Index(tmp_path / "kept", "shards").find(names[3], "") is None


def test_a_file_that_changes_is_an_error(job: Any, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x\n" * 10)
    for content, match in [
        ("x\n" * 9, "ends after 9 samples, but the count says 10"),
        ("x\n" * 11, "goes on after its 10 samples"),
    ]:
        lines = TextLines(path, window=1)
        assert len(lines) == 10
        path.write_text(content)
        with pytest.raises(ElasticRunError, match=match):
            [lines[number] for number in range(10)]
        path.write_text("x\n" * 10)


def first_word(line: str) -> list[int]:
    return list(line.partition(" ")[0].encode())


def test_another_tokenizer_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one word\ntwo words\n")
    kept_in = tmp_path / "job" / "streams"

    def packed() -> list[bytes]:
        sequences = Packed(TextLines(tmp_path / "a"), tokens, 2)
        return [bytes(sequences[n]["tokens"].tolist()) for n in range(len(sequences))]

    tokens = first_word
    expected = [b"on", b"et", b"wo"]
    assert run_once(packed, tmp_path / "job") == expected
    kept = [path.read_bytes() for path in kept_in.iterdir()]
    assert run_once(packed, tmp_path / "job") == expected
    assert [path.read_bytes() for path in kept_in.iterdir()] == kept

    def longer(line: str) -> list[int]:
        return [*first_word(line), 0]

    longer.__qualname__ = tokens.__qualname__
    tokens = longer
    assert run_once(packed, tmp_path / "job") == [b"on", b"e\0", b"tw", b"o\0"]


def test_a_document_without_tokens_is_named(job: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\nthree\n")
    packed = Packed(TextLines(tmp_path / "a", parse=int), lambda n: [n], 1)
    with pytest.raises(ElasticRunError, match="document 2 of .*a has no tokens"):
        len(packed)


# Broken samples.


parsed: list[str] = []


def integer(line: str) -> int:
    parsed.append(line)
    return int(line)


def write_broken(folder: Path) -> list[int]:
    """Write two files with broken lines; return the good ones in their order."""
    good = []
    for name, begin in {"a": 0, "b": 2000}.items():
        numbers = range(begin, begin + 1100)
        lines = ["?" if n % 5 < 2 or n % 512 == 0 else str(n) for n in numbers]
        (folder / name).write_text("\n".join(lines))
        good += [int(line) for line in lines if line != "?"]
    return good


def test_broken_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    good = write_broken(tmp_path)

    def read() -> list[int]:
        lines = TextLines(tmp_path / "[ab]", parse=integer, skip_broken=True, window=9)
        assert lines.num_broken == 2200 - len(good)
        parsed.clear()
        in_order = [lines[number] for number in range(len(lines))]
        for number in (600, 3, len(good) - 1):
            lines._open = None
            assert lines[number] == good[number]
        assert lines.describe(0) == f"line 3 of {tmp_path / 'a'}"
        return in_order

    parsed.clear()
    assert run_once(read, tmp_path / "job") == good
    again = run_once(lambda: (len(parsed), read())[0], tmp_path / "job")
    assert again == len(good) + 3  # No line was tried a second time.
    with generation(tmp_path / "job"):
        assert len(TextLines(tmp_path / "[ab]", parse=integer)) == 2200


class Field:
    def __init__(self, key: str) -> None:
        self.key = key

    def __call__(self, line: str) -> int:
        parsed.append(line)
        return int(dict(pair.split("=") for pair in line.split())[self.key])


def local(key: str) -> Any:
    def parse(line: str) -> int:
        return Field(key)(line)

    return parse


def of_local_class(key: str) -> Any:
    class Own(Field):
        pass

    return Own(key)


@pytest.mark.parametrize(
    ("of", "is_kept"),
    [
        (lambda key: lambda line: Field(key)(line), True),
        (lambda key: eval(f"lambda line: Field('{key}')(line)", globals()), True),
        (
            lambda key: eval(
                "lambda line: Field(key)(line)", {**globals(), "key": key}
            ),
            True,
        ),
        (lambda key: partial(lambda line, key: Field(key)(line), key=key), True),
        (local, True),
        (Field, True),
        (lambda key: Field(key).__call__, True),
        (of_local_class, False),
    ],
)
def test_each_function_has_broken_samples_of_its_own(
    tmp_path: Path, of: Any, is_kept: bool
) -> None:
    (tmp_path / "a").write_text("id=1 label=0\nid=2\nid=3 label=5\n")

    def read(key: str, transform: Any = None) -> list[int]:
        lines = TextLines(
            tmp_path / "a", parse=of(key), transform=transform, skip_broken=True
        )
        return [lines[number] for number in range(len(lines))]

    def script() -> None:
        parsed.clear()
        assert read("label") == [0, 5]
        assert read("id") == [1, 2, 3]
        assert read("id", lambda n: 6 // (n - 1)) == [6, 3]

    run_once(script, tmp_path / "job")
    run_once(script, tmp_path / "job")
    assert len(parsed) == (7 if is_kept else 16)  # No line was tried a second time.


def test_broken_samples_are_told(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_broken(tmp_path)
    len(TextLines(tmp_path / "a", parse=int, skip_broken=True))
    assert "442 broken samples left out, for which int raises" in caplog.text


def test_a_loop_without_broken_samples_goes_on(tmp_path: Path) -> None:
    good = write_broken(tmp_path)

    def script(stop_in: int = -1) -> list[int]:
        lines = TextLines(tmp_path / "[ab]", parse=int, skip_broken=True)
        for batch in AdaptiveDataLoader(lines, 100, shuffle=True):
            delivered.extend(batch.tolist())
            stop_in -= 1
            if stop_in == 0:
                request_stop()
        return delivered

    delivered: list[int] = []
    calm = run_once(script)
    assert sorted(calm) == good
    delivered = []
    run_once(lambda: script(4), tmp_path / "job")
    assert run_once(script, tmp_path / "job") == calm


def test_threads_read_an_index_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    @contextmanager
    def opened(*args: Any, **options: Any) -> Iterator[Any]:
        with open(*args, **options) as file:
            yield file
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)  # Without a lock both have read the same.

    mine, other = Index(tmp_path, "lines"), Index(tmp_path, "lines")
    other.add("a", "1", Scan(1))
    monkeypatch.setattr(counting, "open", opened, raising=False)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(mine.find, "bb", "11")] == [None, None]
    other.add("c", "1", Scan(3))
    for index in (mine, pickle.loads(pickle.dumps(mine))):
        found = index.find("c", "1")
        assert found is not None
        assert found.length == 3


def test_other_broken_samples_are_no_resume(tmp_path: Path) -> None:
    def script(text: str) -> None:
        (tmp_path / "a").write_text(text)
        lines = TextLines(tmp_path / "a", parse=int, skip_broken=True)
        for _ in AdaptiveDataLoader(lines, 1):
            request_stop()

    run_once(lambda: script("?\n1\n22\n"), tmp_path / "job")
    with pytest.raises(CheckpointError, match="a checksum of the order"):
        run_once(lambda: script("1\n?\n222\n"), tmp_path / "job")
    with pytest.raises(CheckpointError, match="had 2 samples in a, but now 3. With ot"):
        run_once(lambda: script("1\n2\n222\n"), tmp_path / "job")


def test_files_that_were_written_anew_are_told_within_an_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(text: str, num_batches: int) -> list[int]:
        (tmp_path / "a").write_text(text)
        found = []
        loader = AdaptiveDataLoader(lines(), 1, name="train")
        for _ in remaining_epochs_until(2):
            for batch in loader:
                found.extend(batch.tolist())
                if len(found) == num_batches:
                    request_stop()
        return found

    def lines() -> TextLines:
        return TextLines(tmp_path / "[ab]*", parse=int)

    (tmp_path / "b").write_text("8\n9\n")
    run_once(lambda: script("1\n2\n3\n", 2), tmp_path / "job")
    assert "written anew" not in caplog.text
    run_once(lambda: script("1\n2\n333\n", 3), tmp_path / "job")
    said = "`train` reads a, written anew since the checkpoint, or copied without"
    assert said in caplog.text
    (tmp_path / "b2").write_text("8\n")
    with pytest.raises(
        CheckpointError,
        match=r"had 3 samples in a, but now 4; no samples in b2, but now 1\. With",
    ):
        run_once(lambda: script("1\n2\n3\n4\n", 2), tmp_path / "job")

    def epochs(text: str, number: int) -> None:
        (tmp_path / "a").write_text(text)
        loader = AdaptiveDataLoader(lines(), 1, name="train")
        for _ in remaining_epochs_until(number):
            list(loader)

    caplog.clear()
    run_once(lambda: epochs("1\n2\n3\n", 1), tmp_path / "epochs")
    run_once(lambda: epochs("1\n2\n33\n", 2), tmp_path / "epochs")
    assert not caplog.text


def test_files_of_one_name_are_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(german: str) -> None:
        (tmp_path / "de" / "train").write_text(german)
        os.utime(tmp_path / "de" / "train", (len(german), len(german)))
        lines = TextLines([tmp_path / "de" / "train", tmp_path / "en" / "train"])
        for _ in AdaptiveDataLoader(lines, 1):
            request_stop()

    for language in ("de", "en"):
        (tmp_path / language).mkdir()
        (tmp_path / language / "train").write_text("3\n4\n")
    run_once(lambda: script("1\n2\n"), tmp_path / "job")
    run_once(lambda: script("1\n2\n"), tmp_path / "job")
    assert "written anew" not in caplog.text
    run_once(lambda: script("1\n22\n"), tmp_path / "job")
    assert "reads train, written anew since the checkpoint, or" in caplog.text
    with pytest.raises(CheckpointError, match="had 2 samples in train, but now 3"):
        run_once(lambda: script("1\n2\n3\n"), tmp_path / "job")


def test_packed_and_endless_leave_broken_samples_out(job: Any, tmp_path: Path) -> None:
    good = write_broken(tmp_path)
    lines = TextLines(tmp_path / "a", parse=int, skip_broken=True)
    packed = Packed(lines, lambda number: [number], 3)
    assert packed[1]["tokens"].tolist() == good[3:6]
    packed._open = None
    assert packed[200]["tokens"].tolist() == good[600:603]
    loader = AdaptiveDataLoader(Endless(lines, seed=None), 700)
    own = [number for number in good if number < 2000]
    assert flat(loader.batches(1)) == [*own, *own][:700]


breaks_at: list[str] = []


def number(line: str) -> int:
    if line in breaks_at:
        raise ValueError("it breaks")
    return int(line)


def test_a_sample_that_breaks_later_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("1\n2\nx\n")

    def read() -> Any:
        lines = TextLines(tmp_path / "a", parse=number, skip_broken=True)
        return [lines[n] for n in range(len(lines))]

    assert run_once(read, tmp_path / "job") == [1, 2]
    monkeypatch.setattr(sys.modules[__name__], "breaks_at", ["2"])
    with pytest.raises(
        ElasticRunError, match=r"line 2 of .*a: .*number raised .*It did"
    ):
        run_once(read, tmp_path / "job")


def test_a_storage_that_fails_makes_no_sample_broken(job: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n")

    def fetch(line: str) -> int:
        raise ConnectionError("gone")

    with pytest.raises(ElasticRunError, match=r"a cannot be read through: .*gone"):
        len(TextLines(tmp_path / "a", parse=fetch, skip_broken=True))


class Longer(IterableDataset[int]):
    """Has one sample more in each epoch."""

    epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(3 + self.epoch))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_streams_of_another_length_in_each_epoch_are_read_uncounted(
    num_workers: int,
) -> None:
    data = Longer()
    workers: dict[str, Any] = {
        "num_workers": num_workers,
        "persistent_workers": num_workers > 0,
    }
    counted = AdaptiveDataLoader(data, 2, name="counted", **workers)
    uncounted = AdaptiveDataLoader(Uncounted(data), 2, name="uncounted", **workers)
    for data.epoch in range(2):
        seen = [sample for batch in uncounted for sample in batch.tolist()]
        assert seen == list(range(3 + data.epoch))
        if data.epoch == 0:
            list(counted)
    with pytest.raises(ElasticRunError, match=r"goes on .* AdaptiveDataLoader\(Uncou"):
        list(counted)


def test_a_planted_link_leads_no_index_elsewhere(tmp_path: Path) -> None:
    victim, directory = tmp_path / "victim", tmp_path / "checkpoints"
    (tmp_path / "a").write_text("x\n" * 5)

    def count() -> int:
        return TextLines([tmp_path / "a"]).scans[0].length

    run_once(count, directory)
    [index] = (directory / "streams").iterdir()
    victim.write_bytes(index.read_bytes())
    index.unlink()
    index.symlink_to(victim)
    (tmp_path / "a").write_text("x\n" * 7)
    before = victim.read_bytes()
    assert run_once(count, directory) == 7
    assert victim.read_bytes() == before
    assert not index.is_symlink()
    assert run_once(count, directory) == 7


def test_lengths_that_cannot_be_kept_are_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    (directory / "streams").touch()  # No folder can be made there.
    for name in "abc":
        (tmp_path / name).write_text("x\n" * 5)

    def count() -> int:
        lines = TextLines([tmp_path / name for name in "abc"])
        return sum(scan.length for scan in lines.scans)

    assert run_once(count, directory) == 15
    assert caplog.text.count("cannot keep the lengths of streams") == 1
