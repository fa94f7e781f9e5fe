"""The launcher, with the job's checkpoints in an S3-compatible store."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from elasticrun.checkpoint.events import local_directory, read_events
from elasticrun.checkpoint.storage.claim import Claim
from elasticrun.checkpoint.storage.place import OwnerProcess, RemotePath
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import PROGRAM, elasticrun, run, running, scaled
from tests.launcher.test_rescue import end_of, mortal, resumed_at
from tests.support.object_store import Bucket
from tests.support.places import Content
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow


@pytest.mark.slow(50)
@pytest.mark.wide
def test_a_job_is_killed_rescaled_and_finished(stage: Stage, bucket: Bucket) -> None:
    options = [
        *("--replicas", 2, "--checkpoint-dir", bucket.url),
        *("--", "--at", "0:1:8:kill", "--hold", "1:20"),
    ]
    with running(stage, *options, ELASTICRUN_SAVE_EVERY=5) as job:
        job.wait_until_held(1, 2)
        assert job.status()["checkpoint_dir"] == bucket.url
        wait_until(lambda: job.status()["checkpoint"] >= 3, "checkpoint 3")
        assert scaled(job, 1, job.pid, held=1).returncode == 0
        assert job.wait() == 0, job.events
    assert f"checkpoints in {bucket.url}" in job.events
    assert "finished with 1" in job.output
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))
    last = bucket.manifests()[-1]
    assert (last["generation"], last["world_size"]) == (2, 1)
    # What only the launcher needs is on this machine, what others need is not.
    (local,) = stage.root.glob("digits-launcher-*")
    assert sorted(path.name for path in local.iterdir()) == [
        *("events.jsonl", "launcher.lock", "logs")
    ]
    kinds = {event["event"] for event in read_events(local)}
    assert kinds >= {"start", "begin", "checkpoint", "crash", "rescaling", "end"}
    assert elasticrun(stage, "status", bucket.url).stdout.startswith("test: finished")
    assert not stage.checkpoints.exists()
    note = json.loads(Content(bucket.url).read("finished.json"))
    assert note["checkpoint"] == last["number"]
    again = run(stage, *options)
    assert "is finished: this program came to its end on" in again.events
    assert f"with checkpoint {last['number']} in {bucket.url}." in again.events


@pytest.mark.wide
def test_a_second_launcher_here_is_refused_before_it_starts_anything(
    stage: Stage, bucket: Bucket
) -> None:
    options = ["--replicas", 1, "--checkpoint-dir", bucket.url]
    with running(stage, *options, "--", "--hold", "0:3") as job:
        job.wait_until_held(0, 1)
        second = elasticrun(stage, "run", *options, PROGRAM, stage.root)
        assert second.returncode == 2
        assert f"process {job.pid} on" in second.stderr
        stage.mark("go-0")
        assert job.wait() == 0


def test_what_cannot_be_done_with_a_url_is_said(stage: Stage, bucket: Bucket) -> None:
    job = run(stage, "--fresh", "--checkpoint-dir", bucket.url)
    assert job.process.returncode == 2
    assert f"--fresh would move {bucket.url} aside, but in an object" in job.events
    job = run(stage, "--checkpoint-dir", "nosuch://bucket/job", name="unknown")
    assert job.process.returncode == 2
    assert "nosuch://bucket/job cannot be opened: Protocol not known" in job.events
    job = run(stage, "--checkpoint-dir", "s3://", name="empty")
    assert job.process.returncode == 2
    assert "'s3://' names no place for a job's checkpoints" in job.events


def test_a_job_that_cannot_reach_its_store_is_not_started(
    stage: Stage, bucket: Bucket
) -> None:
    bucket.door.shut()
    job = run(stage, "--replicas", 1, "--checkpoint-dir", bucket.url)
    assert job.process.returncode == 2
    assert f"cannot find out what is in {bucket.url}" in job.events
    assert not list(stage.root.glob("digits-launcher-*"))


SILENCE = 3.0
# Takes over what is silent for seconds instead of a minute.
SOON = f"""
from elasticrun.checkpoint.storage.claim import ClaimTiming, StoreClaim
StoreClaim.__init__.__kwdefaults__["timing"] = ClaimTiming(silence={SILENCE})
from tests.launcher.program import main
main()
"""


@pytest.mark.wide
def test_a_job_of_a_machine_that_is_gone_is_taken_over_after_a_while(
    stage: Stage, bucket: Bucket
) -> None:
    owner = OwnerProcess("gone", 12, 0.0, "2026-01-01 00:00:00 UTC")
    claim = Claim("token", "gone", owner, time=time.time())
    Content(bucket.url).write("claim-00000001", claim.encode())
    script = stage.root / "digits.py"
    script.write_text(SOON)
    begun = time.monotonic()
    options = ["--replicas", 2, "--checkpoint-dir", bucket.url, "--", stage.root]
    job = run(stage, *options, script=script)
    assert job.process.returncode == 0, job.events
    assert time.monotonic() - begun > SILENCE
    assert f"{bucket.url} is taken over from process 12 on gone" in job.events
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_two_urls_have_two_local_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = (local_directory(RemotePath(f"s3://{name}/digits")) for name in "ab")
    assert one != two
    assert {one.parent, two.parent} == {tmp_path}
    assert one.name.startswith("digits-launcher-")
    assert local_directory(tmp_path) == tmp_path


@pytest.mark.wide
def test_what_was_trained_is_saved_there_after_a_death(
    stage: Stage, bucket: Bucket
) -> None:
    deaths = [(0, "backward", 0, 4), (1, "step", 1, 2)]
    job = mortal(stage, deaths, "--checkpoint-dir", bucket.url, num_replicas=2)
    assert end_of(job).endswith(" 600 600 600 3 0")
    assert resumed_at(job) == [
        "epoch 0, loop 0, sample 100 of `loader-0`",
        "epoch 1, loop 0, sample 60 of `loader-0`",
    ]
