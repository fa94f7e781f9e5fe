"""A Slurm cluster of four nodes on this machine, with daemons and files of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.support.stage import wait_until

NUM_NODES = 4
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
_CONFIGURATION = """
ClusterName=elasticrun
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=1,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=n[1-{num}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """The commands of the cluster."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def run(self, *command: object, **variables: str) -> str:
        """Run one, and return what it says."""
        done = subprocess.run(
            list(map(str, command)),
            env={**self._variables, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def show(self, job: str) -> dict[str, str]:
        """Return the fields of a job."""
        words = self.run("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def hurry(self, job: str) -> None:
        """Let a job begin soon that Slurm has queued again for two minutes later.

        In the second in which it was ended a node refuses it: "credential revoked".
        """
        shown = self.show(job)
        if shown["Reason"] == "BeginTime":
            begin = datetime.fromisoformat(shown["EligibleTime"])
            if begin > datetime.now() + timedelta(seconds=10):
                soon = "StartTime=now+2seconds"
                self.run("scontrol", "update", f"JobId={job}", soon)


@contextmanager
def cluster(folder: Path, variables: dict[str, str]) -> Iterator[Slurm]:
    """Bring a cluster up, and take it down with everything that runs on it.

    Its nodes have the names n1 to n4, which all stand for this machine.
    """
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"Slurm is not installed ({', '.join(missing) or 'or no root'})")
    for name in ("munge", "state", *(f"spool{n + 1}" for n in range(NUM_NODES))):
        (folder / name).mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1] % 20_000 + 10_000
    (folder / "slurm.conf").write_text(
        _CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0],
            folder=folder,
            port=port,
            num=NUM_NODES,
            first=port + 1,
            last=port + NUM_NODES,
        )
    )
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o400)
    names = " ".join(f"n{n + 1}" for n in range(NUM_NODES))
    (folder / "hosts").write_text(
        Path("/etc/hosts").read_text() + f"\n127.0.0.1 {names}\n"
    )
    munged = [f"--{name}={folder}/munge/{name}" for name in ("socket", "key-file")]
    munged[1] = f"--key-file={folder}/munge/key"
    munged += [f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log"]
    munged += [f"--seed-file={folder}/munge/seed", "--force"]
    slurm = Slurm({**variables, "SLURM_CONF": str(folder / "slurm.conf")})
    try:
        slurm.run("munged", *munged)
        slurm.run("slurmctld")
        hosts = f'mount --bind {folder}/hosts /etc/hosts && exec "$@"'
        for number in range(NUM_NODES):
            daemon = ["slurmd", "-N", f"n{number + 1}"]
            slurm.run("unshare", "--mount", "sh", "-c", hosts, "sh", *daemon)
        wait_until(lambda: "idle" in slurm.run("sinfo", "-h", "-o", "%T"), "nodes")
        yield slurm
    finally:
        for path in folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
