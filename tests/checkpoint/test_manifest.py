"""A manifest says what was committed, and every damage to it is seen."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.checkpoint.files.durable import DamagedFileError, FileRecord
from elasticrun.checkpoint.manifest import (
    Manifest,
    check_file_name,
    check_job,
    decode,
    version,
)
from elasticrun.errors import CheckpointError

MANIFEST = Manifest(
    job="digits",
    number=12,
    generation=3,
    world_size=4,
    position={"epoch": 2, "loop": 1, "index": 4096, "finished": False},
    time=1700000000.25,
    torch_version="2.13.0",
    elasticrun_version="0.1.0",
    files=(FileRecord("model", 10, 0x0000BEEF), FileRecord("random.0", 0, 0)),
)
COUNTS = st.integers(0, 2**63)


def is_plain(name: str) -> bool:
    try:
        check_file_name(name)
    except ValueError:
        return False
    return True


manifests = st.builds(
    Manifest,
    job=st.text(),
    number=COUNTS,
    generation=COUNTS,
    world_size=COUNTS,
    position=st.dictionaries(st.text(), COUNTS | st.booleans()),
    time=st.floats(0, 1e11),
    torch_version=st.text(),
    elasticrun_version=st.text(),
    files=st.lists(
        st.builds(
            FileRecord, st.text().filter(is_plain), COUNTS, st.integers(0, 2**32 - 1)
        ),
        unique_by=lambda record: record.name,
    ).map(tuple),
    format=st.sampled_from([1, 2, 3]),
)


def with_checksum(text: str) -> bytes:
    body = text.removesuffix("\n}").encode()
    return body + f',\n  "crc32": "{zlib.crc32(body):08x}"\n}}\n'.encode()


@given(manifest=manifests)
def test_it_comes_back(manifest: Manifest) -> None:
    decoded = decode(manifest.encode())
    assert decoded == manifest
    assert decoded.digest == manifest.digest


def test_a_field_of_an_older_version_is_left_out() -> None:
    text = MANIFEST.encode().decode()
    fields = json.loads(text)
    del fields["crc32"]
    old = with_checksum(json.dumps({**fields, "values": {"loss": 0.5}}, indent=2))
    assert decode(old) == MANIFEST


def test_people_can_read_it() -> None:
    text = MANIFEST.encode().decode()
    assert text.startswith('{\n  "format": 3,\n  "job": "digits",\n  "number": 12,\n')
    fields = json.loads(text)
    assert fields["files"][0] == {"name": "model", "size": 10, "crc32": "0000beef"}
    assert fields["position"] == MANIFEST.position


def test_digest_differs_with_the_content() -> None:
    assert len(MANIFEST.digest) == 16
    assert MANIFEST.digest == replace(MANIFEST).digest
    assert MANIFEST.digest != replace(MANIFEST, time=1.0).digest


@given(manifest=manifests, data=st.data(), flip=st.integers(1, 255))
def test_any_changed_byte_is_seen(
    manifest: Manifest, data: st.DataObject, flip: int
) -> None:
    damaged = bytearray(manifest.encode())
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= flip
    with pytest.raises(DamagedFileError):
        decode(bytes(damaged))


def test_every_flipped_bit_and_every_truncation_is_seen() -> None:
    whole = MANIFEST.encode()
    for position in range(len(whole)):
        with pytest.raises(DamagedFileError):
            decode(whole[:position])
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            with pytest.raises(DamagedFileError):
                decode(bytes(damaged))


def test_damage_is_named() -> None:
    data = MANIFEST.encode()
    with pytest.raises(DamagedFileError) as caught:
        decode(data[:-1], source="/data/manifest.json")
    assert str(caught.value) == (
        "/data/manifest.json is damaged: its checksum does not fit its "
        f"{len(data) - 1} bytes."
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1", "JSONDecodeError"),
        ('{\n  "job": "digits"\n}', r"KeyError\('format'\)"),
        ('{\n  "format": 1\n}', r"KeyError\('files'\)"),
        ('{\n  "format": 1,\n  "files": []\n}', "TypeError"),
    ],
)
def test_text_that_is_no_manifest_is_damaged(text: str, reason: str) -> None:
    with pytest.raises(DamagedFileError, match=f"the manifest is no man.*{reason}"):
        decode(with_checksum(text))


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("job", 5, "5 is no str"),
        ("number", True, "True is no int"),
        ("generation", "x", "'x' is no int"),
        ("generation", -1, "-1 is below 0"),
        ("world_size", None, "None is no int"),
        ("position", None, "None is no dict"),
        ("time", "abc", "'abc' is no float"),
        ("time", 1e300, r"1e\+300 is no time"),
        ("time", -1.0, "-1.0 is no time"),
        ("torch_version", None, "None is no str"),
        ("elasticrun_version", [], "no str"),
        ("files", None, "TypeError"),
        ("files", [{"name": 5, "size": 1, "crc32": "0"}], "TypeError"),
        ("files", [{"name": "model", "size": "1", "crc32": "0"}], "'1' is no int"),
        ("files", [{"name": "model", "size": -1, "crc32": "0"}], "-1 is below 0"),
        ("files", [{"name": "model", "size": 1, "crc32": "zz"}], "ValueError"),
        ("extra", 1, "TypeError"),
    ],
)
def test_a_field_of_another_type_is_damage(
    field: str, value: object, reason: str
) -> None:
    fields = {**json.loads(MANIFEST.encode()), field: value}
    del fields["crc32"]
    with pytest.raises(DamagedFileError, match=f"the manifest is no man.*{reason}"):
        decode(with_checksum(json.dumps(fields, indent=2)))


def test_other_format_says_who_wrote_it() -> None:
    data = replace(MANIFEST, format=4, elasticrun_version="0.9.1").encode()
    with pytest.raises(CheckpointError) as caught:
        decode(data, source="/data/manifest.json")
    assert not isinstance(caught.value, DamagedFileError)
    assert str(caught.value) == (
        "/data/manifest.json has checkpoint format 4, written by elasticrun 0.9.1; "
        "this elasticrun reads formats 1 to 3. Resume with the version of elasticrun "
        "that wrote it, or start anew in another checkpoint directory."
    )


def test_other_format_may_have_other_fields() -> None:
    with pytest.raises(CheckpointError, match="format 7, written by elasticrun of an"):
        decode(with_checksum('{\n  "format": 7\n}'))


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/etc/passwd", "../model", "a\\b", "a\0b"]
)
def test_name_that_leaves_the_directory_is_refused(name: str) -> None:
    record = {"name": name, "size": 1, "crc32": "00000000"}
    fields = json.loads(MANIFEST.encode()) | {"files": [record]}
    del fields["crc32"]
    with pytest.raises(ValueError, match="is not a plain file name"):
        replace(MANIFEST, files=(FileRecord(name, 1, 0),))
    with pytest.raises(DamagedFileError, match="is not a plain file name"):
        decode(with_checksum(json.dumps(fields, indent=2)))


@pytest.mark.parametrize("name", ["manifest.json", "manifest.json.tmp"])
def test_name_of_the_manifest_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is where a checkpoint keeps its manifest"):
        check_file_name(name)


def test_name_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"listed twice in \['model', 'model'\]"):
        replace(MANIFEST, files=(FileRecord("model", 1, 0), FileRecord("model", 2, 0)))


def test_record_is_found_by_name() -> None:
    assert MANIFEST.record("random.0") == FileRecord("random.0", 0, 0)
    with pytest.raises(KeyError, match=r"12 has no 'best', only: model, random\.0"):
        MANIFEST.record("best")


def test_other_job_is_refused() -> None:
    check_job(MANIFEST, "digits", source="/data/checkpoint-00000012")
    with pytest.raises(CheckpointError) as caught:
        check_job(MANIFEST, "text", source="/data/checkpoint-00000012")
    assert str(caught.value) == (
        "/data/checkpoint-00000012 belongs to the job 'digits', but this is the job "
        "'text'. One job cannot resume from the states of another. Give this one its "
        "own directory (ELASTICRUN_CHECKPOINT_DIR), or, if only its name has "
        "changed, set ELASTICRUN_JOB=digits."
    )


@pytest.mark.parametrize("metadata", [None, b"Metadata-Version: 2.1\n", b"\xff\xfe"])
def test_a_package_that_is_being_replaced_has_an_unknown_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: bytes | None
) -> None:
    folder = tmp_path / "elasticrun-0.1.0.dist-info"
    folder.mkdir()
    if metadata is not None:
        (folder / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    version.cache_clear()
    try:
        assert version() == "unknown"
        written = replace(MANIFEST, elasticrun_version=version())
    finally:
        version.cache_clear()
    assert decode(written.encode()) == written


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("elasticrun_version", None),
        ("torch_version", torch.__version__),  # A text of a class of its own.
        ("number", -1),
        ("world_size", 2.0),
        ("position", None),
        ("position", {"index": 0, "unknown": math.inf}),
        ("position", {"index": math.nan}),
        ("time", math.nan),
    ],
)
def test_what_nobody_could_read_is_not_written(field: str, value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        replace(MANIFEST, **{field: value})
