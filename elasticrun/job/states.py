"""The states that scripts make: `State`, `register`, `Variables`."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO
from zlib import crc32

from torch import Tensor, nn
from torch.optim import Optimizer

from elasticrun.checkpoint.states.copies import StateCopier
from elasticrun.checkpoint.states.expected import MAPPING, TEXT, WHOLE, check_values
from elasticrun.checkpoint.states.metrics import MetricState, find_metrics
from elasticrun.checkpoint.states.optimizer import OptimizerState
from elasticrun.checkpoint.states.state import BaseState, CannotRescueError
from elasticrun.checkpoint.states.stateful import Stateful, StatefulState, has_shards
from elasticrun.checkpoint.states.values import (
    begin_to_save,
    check_loads_safely,
    load_values,
    load_values_of,
    save_values,
    save_values_of,
)
from elasticrun.job.current import current_job
from elasticrun.job.stepping import act_once_per_global_batch
from elasticrun.logger import Logger
from elasticrun.replicas.gathering import own_rank

logger = Logger(__name__)


class _RegisteredWhenMade(ABCMeta):
    """Registers and loads an object when its constructor has returned.

    Not in `State.__init__`: what a subclass sets after that would overwrite the loaded
    values.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        state = super().__call__(*args, **kwargs)
        current_job().register(state)
        return state


class State(BaseState, metaclass=_RegisteredWhenMade):
    """One named thing in every checkpoint; subclass it with `save` and `load`.

    It is registered, and loaded if a checkpoint has it, as soon as it is constructed.
    It is shared: written by rank 0, loaded by all. With `is_per_replica = True`, each
    rank writes and loads its own, and a rank that is new loads nothing.

        class Tokens(State):
            def __init__(self):
                super().__init__("tokens")
                self.seen = 0

            def save(self, fileobj):
                fileobj.write(str(self.seen).encode())

            def load(self, fileobj):
                self.seen = int(fileobj.read())

    Collective: make it on every replica, in the same order; `sync` is called on every
    replica before `save`.
    Replay: made again in each generation, and loads the newest checkpoint; once more
    where the replay ends, if its attributes have changed since the first loop began.

    Raises:
        StateNameError: The name is taken, or is not a plain file name.
        CheckpointError: The file in the checkpoint is damaged.
    """

    def current(self) -> Any:
        return vars(self)

    def put_back(self, values: Any) -> None:
        vars(self).update(values)

    def remember(self) -> Callable[[], None] | None:
        if vars(self).keys() <= {"name", "trusts_pickle"}:
            raise CannotRescueError(
                f"what {self.name!r} saves is elsewhere",
                "keep it in attributes of the State",
            )
        return None


def register(**objects: Stateful) -> None:
    """Keep each object in every checkpoint under its keyword; load it if it is there.

    Anything with `state_dict` and `load_state_dict`: modules, optimizers, schedulers,
    `GradScaler`, `AveragedModel`, objects of your own. Of modules that are sharded
    (`fully_shard`, DTensors) and their optimizers, each replica saves its shards.

    Optimizers, schedulers, scalers and averaged models then act once for each global
    batch, also when `max_local_batch_size` cuts it into micro-batches.

    Collective: call it on every replica, in the same order.
    Replay: registers again in each generation and loads the newest checkpoint. What the
    program changes of an object before its first loop stays; what it changes after that
    in replayed code is undone where the replay ends. Changes of large tensors through
    `tensor.data` are not seen.

    Raises:
        TypeError: An object lacks one of the two methods, or is a class.
        StateNameError: A name is taken, or is not a plain file name.
        CheckpointError: The saved state does not fit the object (the differing keys and
            shapes are listed), or the module of a sharded optimizer is not registered.
    """
    for name, target in objects.items():
        if isinstance(target, type):
            raise TypeError(
                f"register({name}={target.__name__}): it is a class, which has no "
                f"state of its own. Make one: {target.__name__}(...)."
            )
        if not isinstance(target, Stateful):
            raise TypeError(
                f"register({name}={type(target).__name__}): it has no state_dict() and "
                "load_state_dict(). Give it both, use Variables for plain values, or "
                "write a State with save and load."
            )
    # Modules first: a sharded optimizer's state goes by its parameters' names in them.
    in_order = sorted(
        objects.items(), key=lambda item: not isinstance(item[1], nn.Module)
    )
    for name, target in in_order:
        current_job().register(state_of(name, target))
        act_once_per_global_batch(target)


def state_of(name: str, target: Stateful) -> StatefulState:
    """Return the state that keeps an object."""
    if not has_shards(target):
        if isinstance(target, Optimizer):
            return OptimizerState(name, target)
        if isinstance(target, nn.Module) and find_metrics(target):
            return MetricState(name, target)
        return StatefulState(name, target)
    # Only here: they import torch.distributed.checkpoint.
    from elasticrun.checkpoint.states.dtensors import (
        ShardedModuleState,
        ShardedOptimizerState,
    )

    if isinstance(target, nn.Module):
        return ShardedModuleState(name, target)
    assert isinstance(target, Optimizer)
    return ShardedOptimizerState(name, target)


class Variables:
    """Plain values as attributes, kept in every checkpoint.

        best = Variables(accuracy=0.0)
        best.accuracy = max(best.accuracy, accuracy)

    Values may be numbers, text, tensors, and lists, tuples, sets and dictionaries of
    them. Rank 0's are saved, and all replicas load them, so keep them the same on all
    replicas. For a sum over a loop use an `Accumulator`.

    Collective: make it on every replica, in the same order.
    Replay: made again in each generation; loads the saved values over the initial ones.
    What replayed code changes is undone where the replay ends.

    Args:
        name: What checkpoints call it; one per name.
        initial: The attributes. Saved ones that are not among them come back too.

    Raises:
        StateNameError: The name is taken.
        CheckpointError: A value could not be loaded safely again.
    """

    def __init__(self, *, name: str = "variables", **initial: Any) -> None:
        vars(self).update(initial)
        if name not in current_job().settings.trust_pickle:
            check_loads_safely(vars(self), name=name)
        current_job().register(_VariablesState(name, self))

    if TYPE_CHECKING:  # What the attributes are is the user's matter.

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def __repr__(self) -> str:
        values = ", ".join(f"{key}={value!r}" for key, value in vars(self).items())
        return f"Variables({values})"


def once(key: str) -> bool:
    """Return True the first time in this epoch, or in the job outside of epochs.

    For effects that a replay must not repeat. All replicas get the same answer, so test
    the rank for what one of them is to do:

        if once("announce") and rank() == 0:
            send_mail(...)

    That it has been returned is remembered in the next checkpoint: a kill between the
    effect and that checkpoint repeats the effect. Call `request_checkpoint()` or
    `save_all_states()` after it to keep that time short.

    Collective: call it on every replica in the same order, so test the rank behind it.
    Replay: False, if a checkpoint was written since.
    """
    job = current_job()
    epoch = job.progress.finished_epochs if job.is_in_epoch else -1
    return job.get_or_make(_KeysSeen).add(key, epoch)


class _KeysSeen(BaseState):
    """What `once` was asked: outside of epochs (epoch -1), and in the latest one."""

    def __init__(self) -> None:
        super().__init__("once")
        self._keys: dict[int, list[str]] = {-1: []}

    def add(self, key: str, epoch: int) -> bool:
        if epoch not in self._keys:
            self._keys = {-1: self._keys[-1], epoch: []}
        if key in self._keys[epoch]:
            return False
        self._keys[epoch].append(key)
        return True

    def remember(self) -> Callable[[], None]:
        keys = {epoch: list(keys) for epoch, keys in self._keys.items()}
        return lambda: setattr(self, "_keys", keys)

    def save(self, fileobj: BinaryIO) -> None:
        save_values({"keys": self._keys}, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        keys = load_values(fileobj)["keys"]
        check_values(keys, MAPPING, name=f"{self.name}.keys")
        for epoch, asked in keys.items():
            check_values((epoch, asked), (WHOLE, [TEXT]), name=f"{self.name}.keys")
        found = {int(epoch): list(keys_of) for epoch, keys_of in keys.items()}
        self._keys = {-1: [], **found}


class _VariablesState(BaseState):
    def __init__(self, name: str, variables: Variables) -> None:
        super().__init__(name)
        self._variables = variables
        self._copies = StateCopier()

    def values(self) -> Mapping[str, Any]:
        return vars(self._variables)

    def checksums(self) -> Mapping[str, int]:
        return {
            key: crc32(repr(value).encode())
            for key, value in vars(self._variables).items()
            if isinstance(value, (int, float, str))
            or (type(value) is Tensor and value.dim() == 0)
        }

    def current(self) -> Any:
        return vars(self._variables)

    def put_back(self, values: Any) -> None:
        vars(self._variables).update(values)

    def save(self, fileobj: BinaryIO) -> None:
        save_values_of(self, dict(vars(self._variables)), fileobj)

    def begin_save(self) -> tuple[Callable[[BinaryIO], object], bool]:
        return begin_to_save(self, dict(vars(self._variables)), self._copies)

    def load(self, fileobj: BinaryIO) -> None:
        own, saved = vars(self._variables), load_values_of(self, fileobj)
        new = [name for name in own if name not in saved]
        left = [name for name in saved if name not in own]
        if new and left and own_rank() == 0:
            logger.warning(
                "%r has nothing for %s in the checkpoint, which keeps the value of "
                "here, and nobody has asked for its %s. Was one renamed? Then stop the "
                "job, give it its old name, and start again.",
                self.name,
                ", ".join(new),
                ", ".join(left),
            )
        own.update(saved)
