"""One life of a job for tests of crashes: it starts, saves and prunes."""

from __future__ import annotations

from pathlib import Path

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.capture_buffers import CaptureBuffers
from elasticrun.checkpoint.store import CheckpointStore
from tests.support.stores import manifest

REPOSITORY = Path(durable.__file__).parents[3]


def states(number: int) -> dict[str, bytes]:
    """Return content that tells which save it is from; `model` exceeds a buffer."""
    return {"model": b"parameters %d " % number * 2000, "small": b"%d" % number}


def start(directory: Path) -> tuple[CheckpointStore, int, Checkpoint | None]:
    store = CheckpointStore(directory, job="digits", keep=2)
    store.acquire(timeout=0)
    try:
        generation = store.next_generation()
        store.remove_uncommitted()
        return store, generation, store.find_newest()
    except BaseException:
        store.release()
        raise


def save(
    store: CheckpointStore,
    *,
    generation: int,
    carry: Checkpoint | None,
    is_forced: bool = True,
) -> None:
    """Save as a job does: `model` from memory, the others by writing themselves."""
    draft = store.begin(store.next_number(), is_forced=is_forced)
    contents = states(draft.number)
    model = CaptureBuffers().capture(lambda file: file.write(contents["model"]))
    try:
        records = [
            draft.write_captured("model", model),
            draft.write("small", lambda file: file.write(contents["small"])),
        ]
        if carry is not None and carry.has("carried"):
            records.append(draft.copy(carry, "carried"))
        else:
            records.append(draft.write("carried", lambda file: file.write(b"carried")))
        draft.commit(manifest(draft.number, *records, generation=generation))
    except OSError:
        draft.abandon()
        raise
    store.prune()


def live(directory: Path, *, is_forced: bool = True) -> None:
    store, generation, newest = start(directory)
    try:
        save(store, generation=generation, carry=newest, is_forced=is_forced)
    finally:
        store.release()


def make_old(directory: Path) -> None:
    """Leave checkpoints 2 and 3, so that the next save makes 4 and prunes 2."""
    for _ in range(3):
        live(directory)


def assert_whole(checkpoint: Checkpoint) -> None:
    expected = states(checkpoint.number) | {"carried": b"carried"}
    assert set(checkpoint.names()) == set(expected)
    for name, data in expected.items():
        with checkpoint.open(name) as file:
            assert file.read() == data


def assert_survived(directory: Path, *, newest: tuple[int, ...] = (3, 4)) -> int:
    """Start the job again, see the old or the new checkpoint, save; return which.

    A checkpoint found damaged would warn, and so fail: a crash leaves none.
    """
    store, generation, found = start(directory)
    try:
        assert found is not None
        assert found.number in newest
        assert_whole(found)
        assert generation > found.manifest.generation
        save(store, generation=generation, carry=found)
        again = store.find_newest()
        assert again is not None
        assert again.number > found.number
        assert_whole(again)
    finally:
        store.release()
    left = sorted(path.name for path in directory.iterdir())
    assert left == [
        *(path.name for path in (found.path, again.path)),
        "generation",
        "lock",
    ]
    return found.number
