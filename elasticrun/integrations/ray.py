"""`elasticrun run` on a Ray cluster, on as many nodes as Ray gives.

Each launcher is the child process of an actor. There is an actor for every node that
may take part; actors without a node wait for one, and Ray's autoscaler sees them wait.
The launchers find each other through the checkpoint directory, so none of them is
special.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from elasticrun.errors import STOP_CODES, ElasticRunError
from elasticrun.launcher import environment
from elasticrun.launcher.interpreter import command

# What is not public of Ray, and what it is needed for.
INTERNALS = {
    "_private.state.state.get_draining_nodes": "says which nodes Ray will take away",
}
_TESTED = "Ray 2.60"
_LOOK_SECONDS = 1.0
# A launcher whose actor ends can save; by default Ray kills it then.
_SURVIVAL = {"RAY_kill_child_processes_on_worker_exit": "0"}
# Actors have options for these; all others are a dict.
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}


def run(
    program: Sequence[str],
    checkpoint_dir: str | os.PathLike[str],
    *,
    nodes: tuple[int, int],
    resources: Mapping[str, float],
) -> None:
    """Train on as many nodes as Ray gives, until the program has come to its end.

    A launcher runs on each. A node that is drained leaves first, as after SIGTERM; new
    ones join; after the death of one the others go on. The job ends with this process,
    however that ends: it saves first, and at Ctrl-C this process waits for that.

    Args:
        program: What stands after `elasticrun run`: options, the script, its arguments.
        checkpoint_dir: A path that all nodes have in common, or a URL.
        nodes: The least and the most that may take part.
        resources: What Ray gives each launcher, by Ray's names: "GPU", "CPU", "memory"
            in bytes, your own. Name what a node has, or two share one.

    Raises:
        ElasticRunError: The job has failed, or was stopped.
        ValueError: `nodes` is no such pair.
    """
    from elasticrun.integrations.checks import check_internals  # It imports torch.

    least, most = nodes
    if not 1 <= least <= most:
        raise ValueError(f"nodes={nodes}: give (MIN, MAX) with 1 <= MIN <= MAX")
    check_internals(f"Ray {ray.__version__}", ray, INTERNALS, tested=_TESTED)
    own = ["--nodes", f"{least}:{most}", "--checkpoint-dir", os.fspath(checkpoint_dir)]
    crew = _Crew([*own, *program], resources)
    try:
        code = crew.follow(most)
    except (KeyboardInterrupt, SystemExit):
        crew.end(is_told=True)
        raise
    finally:
        crew.close()
    if code in STOP_CODES:
        raise ElasticRunError(
            f"the job was stopped (exit code {code}); the same call goes on"
        )
    if code != 0:
        raise ElasticRunError(
            f"the job failed (exit code {code}). Its launchers have said why; what its "
            f"replicas printed is in {checkpoint_dir}/logs, unless --log-dir or a URL "
            "says otherwise."
        )


class _Launcher:
    """A launcher, as Ray sees it: an actor that holds its place."""

    def __init__(self, words: Sequence[str]) -> None:
        reader, self._lifeline = os.pipe()  # Ends with this process, however it ends.
        own = ["--address", ray.util.get_node_ip_address(), "--lifeline", reader]
        self._process = subprocess.Popen(
            command("__main__", "main", "run", *own, *words),
            env=_variables(),
            stdin=subprocess.DEVNULL,
            pass_fds=[reader],
            start_new_session=True,
        )
        os.close(reader)
        self._is_told = False
        self._is_drained = False

    def wait(self) -> tuple[int, bool]:
        """Wait for its end; return its exit code, and whether its node is to go."""
        node = ray.get_runtime_context().get_node_id()
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(_LOOK_SECONDS), self._is_drained
            if node in ray._private.state.state.get_draining_nodes():
                self._is_drained = True
                self.leave()

    def leave(self) -> None:
        """Let it save and end; once, as a second signal would hurry it."""
        if not self._is_told:
            self._is_told = True
            self._process.terminate()


def _variables() -> dict[str, str]:
    """Return this process's variables, without the number of threads that Ray has set.

    It is meant for the code of an actor; replicas share what there is.
    """
    variables = environment.variables()
    cpus = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    if variables.get("OMP_NUM_THREADS") == str(max(int(cpus), 1)):
        del variables["OMP_NUM_THREADS"]
    return variables


class _Member(NamedTuple):
    """An actor, and what comes when its launcher runs, and when that has ended."""

    actor: Any
    started: Any
    ended: Any

    def has_started(self) -> bool:
        try:
            ray.get(self.started, timeout=0)
        except (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError):
            return False
        return True


class _Crew:
    """The actors of one run.

    Args:
        words: Of `elasticrun run`.
        resources: Of one launcher.
    """

    def __init__(self, words: Sequence[str], resources: Mapping[str, float]) -> None:
        others = dict(resources)
        options = {
            option: others.pop(name)
            for name, option in _OPTIONS.items()
            if name in others
        }
        self._class = ray.remote(_Launcher).options(
            **options,
            resources=others,
            scheduling_strategy="SPREAD",
            max_concurrency=2,  # `leave` comes while it waits.
            runtime_env={"env_vars": _SURVIVAL},
        )
        self._words = list(words)
        self._members: list[_Member] = []
        self._left: list[_Member] = []  # By themselves. They keep their places.

    def follow(self, number: int) -> int:
        """Keep so many actors until the job is over; return its exit code."""
        for _ in range(number):
            self._add()
        while True:
            refs = [each.ended for each in self._members]
            [ended], _ = ray.wait(refs)
            member = self._members.pop(refs.index(ended))
            code = _end_of(member)
            if code is None:
                ray.kill(member.actor)
                self._add()
                continue
            self._left.append(member)
            if code not in STOP_CODES:
                self.end(is_told=code != 0)
                return code
            if not any(each.has_started() for each in self._members):
                return code

    def end(self, *, is_told: bool) -> None:
        """Wait for the end of the launchers that run, and start no other one.

        Args:
            is_told: Whether they are to be told; else they end by themselves.
        """
        running = [each for each in self._members if each.has_started()]
        for member in self._members:
            if member not in running:
                ray.kill(member.actor)
            elif is_told:
                member.actor.leave.remote()
        if running:
            ray.wait([each.ended for each in running], num_returns=len(running))

    def close(self) -> None:
        """Give back all places."""
        for member in (*self._members, *self._left):
            ray.kill(member.actor)

    def _add(self) -> None:
        actor = self._class.remote(self._words)
        self._members.append(
            _Member(actor, actor.__ray_ready__.remote(), actor.wait.remote())
        )


def _end_of(member: _Member) -> int | None:
    """Return a launcher's exit code; None if another one is to take its place.

    Raises:
        ElasticRunError: It could not be started.
    """
    try:
        code, is_drained = ray.get(member.ended)
    except ray.exceptions.RayActorError as error:
        if error.actor_init_failed:
            raise ElasticRunError(f"no launcher can be started: {error}") from error
        return None  # It was killed, or its node died.
    is_replaced = code < 0 or (is_drained and code in STOP_CODES)
    return None if is_replaced else code
