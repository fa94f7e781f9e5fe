"""What Kubernetes does with the pods of one Job, pretended on this machine.

A pod is a process namespace, in which the container's command is process 1, with a host
name, mounts and a `/dev/shm` of its own; all pods share this machine's network. The
rules are those of the Job controller for a Job without `completions`, and of the
kubelet: https://kubernetes.io/docs/concepts/workloads/controllers/job/
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.stage import wait_until

_CONTAINED = ("unshare", "--pid", "--fork", "--mount", "--uts", "--kill-child")


@dataclass
class Pod:
    """A pod that runs.

    Attributes:
        is_disrupted: Whether it has the condition `DisruptionTarget`.
        killed_at: When it gets SIGKILL, since it was to end; None if it was not.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    is_disrupted: bool = False
    is_deleted: bool = False
    killed_at: float | None = None
    is_killed: bool = False

    def signal(self, number: int) -> None:
        """Send a signal to its process 1, which may have ended."""
        self.is_killed |= number == signal.SIGKILL
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.process.pid).children():
                process.send_signal(number)

    def end(self, *, grace: float) -> None:
        """Tell it to end, and kill it when the time is over."""
        if self.killed_at is None:
            self.killed_at = time.monotonic() + grace
            self.signal(signal.SIGTERM)


class PretendedJob:
    """A Job, from its manifest; `step` does what is due.

    Args:
        folder: What stands for the volume of checkpoints; logs are in it, too.
        command: Returns what is run in the place of the container's command.
        variables: Of every pod.

    Attributes:
        state: "Running", "Suspended", "Complete" or "Failed".
        pods: Those that there are now.
        ended: Each pod that has ended, its exit code, and what followed from it.
    """

    def __init__(
        self,
        manifest: Mapping[str, Any],
        folder: Path,
        *,
        command: Callable[[list[str]], list[str]],
        variables: Mapping[str, str],
    ) -> None:
        self._spec = manifest["spec"]
        self._template = self._spec["template"]["spec"]
        [self._container] = self._template["containers"]
        self._folder = folder
        self._command = command(self._container["command"])
        self._variables = variables
        self._num_started = 0
        self._num_failed = 0
        self._parallelism = int(self._spec["parallelism"])
        self.state = "Running"
        self.pods: list[Pod] = []
        self.ended: list[tuple[str, int, str]] = []

    def wait_until(self, condition: Callable[[], Any], what: str) -> None:
        """Let Kubernetes work until something is so."""

        def step() -> Any:
            self.step()
            return condition()

        wait_until(step, what)

    # What people and other controllers do.

    def scale(self, parallelism: int) -> None:
        self._parallelism = parallelism

    def suspend(self) -> None:
        self.state = "Suspended"

    def resume(self) -> None:
        self.state = "Running"

    def evict(self, pod: Pod) -> None:
        pod.is_disrupted = True
        self._end(pod)

    # What the Job controller and the kubelet do.

    def step(self) -> None:
        for pod in list(self.pods):
            if pod.killed_at is not None and time.monotonic() > pod.killed_at:
                pod.signal(signal.SIGKILL)
            if pod.process.poll() is not None:
                self._take_end(pod)
        is_over = any(action == "Succeeded" for _, _, action in self.ended)
        if is_over and not self.pods and self.state == "Running":
            self.state = "Complete"
        wanted = self._parallelism if self.state == "Running" else 0
        staying = [pod for pod in self.pods if not pod.is_deleted]
        for pod in staying[wanted:]:
            if not is_over:
                pod.is_deleted = True
                self._end(pod)
        # Those that are about to end count until they have: podReplacementPolicy.
        for _ in range(0 if is_over else wanted - len(self.pods)):
            self._start()

    def close(self) -> None:
        """Leave nothing running."""
        for pod in self.pods:
            pod.process.kill()
            pod.process.wait()

    def _end(self, pod: Pod) -> None:
        pod.end(grace=float(self._template["terminationGracePeriodSeconds"]))

    def _take_end(self, pod: Pod) -> None:
        code = 137 if pod.is_killed else pod.process.returncode  # unshare says 1.
        self.pods.remove(pod)
        action = self._action(pod, code)
        self.ended.append((pod.name, code, action))
        self._num_failed += action == "Count"
        if action == "FailJob" or self._num_failed > int(self._spec["backoffLimit"]):
            self.state = "Failed"

    def _action(self, pod: Pod, code: int) -> str:
        """Return what follows, by the first rule that fits."""
        if code == 0:
            return "Succeeded"
        if pod.is_deleted:
            return "Deleted"
        for rule in self._spec["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes and (code in codes["values"]) == (codes["operator"] == "In"):
                return str(rule["action"])
            if "onPodConditions" in rule and pod.is_disrupted:
                return str(rule["action"])
        return "Count"

    def _start(self) -> None:
        self._num_started += 1
        name = f"train-{self._num_started}"
        log = self._folder / f"{name}.log"
        lines = [*self._mounts(), f"hostname {name}", "mount -t proc proc /proc"]
        script = " && ".join([*lines, 'exec "$@"'])
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_CONTAINED, "sh", "-ec", script, "sh", *self._command],
                env={**os.environ, **self._variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pods.append(Pod(name, process, log))

    def _mounts(self) -> list[str]:
        """Return the commands that mount the volumes; all but one is below /mnt."""
        volumes = {volume["name"]: volume for volume in self._template["volumes"]}
        paths = {
            each["mountPath"]: volumes[each["name"]]
            for each in self._container["volumeMounts"]
        }
        commands = ["mount -t tmpfs tmpfs /mnt"]
        for path, volume in paths.items():
            if "persistentVolumeClaim" in volume:
                commands += [f"mkdir {path}", f"mount --bind {self._folder} {path}"]
        size = "64m"
        if "/dev/shm" in paths:
            limit = str(paths["/dev/shm"]["emptyDir"]["sizeLimit"])
            size = limit.removesuffix("i").lower()
        return [*commands, f"mount -t tmpfs -o size={size} shm /dev/shm"]


def skip_without_namespaces() -> None:
    """Skip a test where this user may make no pods."""
    script = "mount -t tmpfs tmpfs /mnt && hostname pod && mount -t proc proc /proc"
    done = subprocess.run(
        [*_CONTAINED, "sh", "-ec", script], capture_output=True, check=False, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no pods can be pretended here: {done.stderr.strip()}")
