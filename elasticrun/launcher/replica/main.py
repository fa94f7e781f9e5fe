"""One replica, from the moment it is forked to the end of its process.

1. It waits for its order.
2. It becomes the program's process: variables, arguments, threads, its rank in `ps`.
3. If it is a successor, it imports ahead and rehearses (rehearsal.py): it pauses where
   the program needs the job, until its generation begins.
4. It runs the program, reports what that raises, and calls what is to be called then.
5. It finalizes what the program has left, tells the launcher, and exits.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import Any

from elasticrun.errors import BY_SIGNAL, ElasticRunError, is_of_program
from elasticrun.launcher import environment, interpreter, processes
from elasticrun.launcher.replica.functions import call_function, save_result
from elasticrun.launcher.replica.rehearsal import (
    ProgramImports,
    Rehearsal,
    import_ahead,
    modules_of_program,
)
from elasticrun.launcher.replica.reporter import (
    Reporter,
    code_of_stop,
    last_words,
)
from elasticrun.replicas.process_end import (
    close_files,
    find_young_files,
    flush_files,
    wait_for_threads,
)
from elasticrun.replicas.signals import take_no_more_stop_signals
from elasticrun.replicas.wire import Channel, Message, to_line

_LAUNCHER = str(Path(__file__).parents[1])
_MOST_SUMMARY, _MOST_TRACE, _MOST_FULL = 2_000, 20_000, 200_000  # Characters.
_BARRED = (
    b"a forked replica could not use GPUs, so it starts an interpreter of its own "
    b"instead, which takes longer; --start exec does so at once\n"
)


def execute(control: int, listeners: list[int]) -> None:
    """Replace this process with a new interpreter; programs may not bear a fork."""
    for descriptor in (control, *listeners):
        os.set_inheritable(descriptor, True)
    os.execv(
        sys.executable,
        interpreter.command("launcher.replica.main", "begin", control, *listeners),
    )


def begin() -> None:
    """Continue in the new interpreter that `execute` has started."""
    main(int(sys.argv[1]), [int(number) for number in sys.argv[2:]])


def main(control: int, listeners: list[int]) -> None:
    """Do what the head of this module says; the process ends with it."""
    # 1. Wait for the order; a fork that cannot use GPUs waits as a new interpreter.
    for descriptor in (control, *listeners):
        os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=control))
    if _is_barred_from_gpus():
        os.write(2, _BARRED)
        execute(control, listeners)
    order = channel.receive_one()
    if order is None:  # The launcher has hung up, so this replica is not needed.
        os._exit(0)

    # 2. Become the program's process. Modules that come from here on are its own.
    _prepare_process(order)
    stores = [] if order["is_rehearsed"] else [_serve_store(order, listeners)]
    last = next(reversed(sys.modules))
    imports = ProgramImports(order, after=last)

    # 3. A successor pauses where it needs the job, and says so. Only when its
    # generation begins its rank is known, and with it whether it serves the store.
    def take_up(begun: Message) -> None:
        known = order["environment"].items()
        environment.apply_changes(dict(begun["environment"].items() - known))
        order.update(begun)
        _show_rank(order)
        stores.append(_serve_store(order, listeners))

    rehearsal = Rehearsal(order, channel, take_up)
    if order["is_rehearsed"]:
        rehearsal.begin()
    reporter = Reporter(channel, imports=imports.describe, on_begun=rehearsal.end)
    reporter.start()

    # 4. Run the program, then what Python would at its end.
    code = _run(lambda: _program(order, rehearsal), channel, reporter, rehearsal)
    take_no_more_stop_signals()
    code = _end_threads(code)
    reporter.end()
    end = to_line(last_words())

    # 5. Leave, in this order: files are flushed before what they write to may be
    # finalized in a cycle with them; what the program has replaced fails once its
    # modules are gone; others may need the store until here. A look at all objects is a
    # large part of a rescaling, so there is one, and then the collector runs only when
    # it is told to: what finalizers open is found among what was made since.
    gc.disable()
    files = flush_files()
    _release([*modules_of_program(after=last)])
    files += find_young_files()
    gc.collect()
    files += find_young_files()
    close_files(files)
    stores.clear()
    channel.send_line(end)
    os._exit(code)


def _is_barred_from_gpus() -> bool:
    """Return whether this process can use no GPU because of what it was forked from.

    It may have asked for GPUs as it imported torch, as a plug-in can, or a library's
    hook of forks does. That leaves CUDA uninitialized there and out of reach here.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not (torch.version.cuda or torch.version.hip):
        return False  # A new interpreter, or a build for no GPU.
    return bool(torch.cuda._is_in_bad_fork())


def _prepare_process(order: Message) -> None:
    processes.die_with_parent(order["launcher"])
    environment.replace_variables_of_forkserver(order["environment"])
    sys.path[:0] = order["path"]
    sys.argv = list(order["argv"])
    _show_rank(order)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # Else all would draw what the forkserver would.
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(order["num_threads"])


def _show_rank(order: Message) -> None:
    """Let `ps` show the rank, and what is run."""
    name = os.path.basename(order["argv"][0])
    processes.call_this_process(f"rank {order['rank']} of {name} (elasticrun)")


def _serve_store(order: Message, listeners: list[int]) -> Any:
    """On rank 0, serve the store at which the replicas of this generation meet.

    The launcher has bound the port, so that nobody can take it, and others who come
    earlier wait in its queue. It has bound one on loopback and, if there may be other
    nodes, one that they reach.
    """
    if order["rank"] != 0 or not listeners:
        for descriptor in listeners:
            os.close(descriptor)
        return None
    from elasticrun.replicas.store import serve_store

    chosen = listeners.pop(-1 if order["is_outward"] else 0)
    for descriptor in listeners:
        os.close(descriptor)
    return serve_store(order["host"], order["port"], chosen)


def _program(order: Message, rehearsal: Rehearsal) -> None:
    if order["is_rehearsed"]:
        if not import_ahead(order):
            rehearsal.end_unlike()
        if not order["runs_ahead"]:
            rehearsal.wait()
        rehearsal.begin_program()
    if "observer" in order:  # `elasticrun check` looks on; by name, since it is above.
        importlib.import_module(order["observer"]).observe(order)
    if order["kind"] == "module":
        runpy.run_module(order["target"], run_name="__main__", alter_sys=True)
    elif order["kind"] == "function":
        folder = Path(order["target"])
        result = call_function(folder)
        rehearsal.wait()  # Results of the other generation are forgotten then.
        save_result(
            folder,
            result,
            generation=order["generation"],
            rank=order["rank"],
            world_size=order["world_size"],
        )
    else:
        _run_script(order["target"])


def _run_script(path: str) -> None:
    """Run a file as Python itself would: as the module `__main__`.

    A script may change the working directory, and must still be found after that.
    """
    path = os.path.abspath(path)
    module = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = SourceFileLoader("__main__", path)
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _run(
    program: Callable[[], None],
    channel: Channel,
    reporter: Reporter,
    rehearsal: Rehearsal,
) -> int:
    """Run the program; print and report what it raises; return the exit code.

    One that needs no job may come to its end before its generation has begun.
    """
    try:
        program()
        rehearsal.wait()
        reporter.look()
    except SystemExit as error:
        rehearsal.wait()
        reporter.look()
        return _exit_code(error)
    except BaseException as error:
        reporter.look()
        when = time.monotonic()
        trace = _without_launcher(error.__traceback__)
        error.__traceback__ = trace
        text = "".join(traceback.format_exception(type(error), error, trace))
        summary = traceback.format_exception_only(type(error), error)
        hook = sys.excepthook  # torch.distributed has one, which only adds the rank.
        is_torchs = (getattr(hook, "__module__", None) or "").startswith("torch.")
        has_own_hook = not (hook is sys.__excepthook__ or is_torchs)
        if has_own_hook:
            hook(type(error), error, trace)
        for stream in (sys.stdout, sys.stderr):
            # Before the launcher hears of it, which writes `text` into the log.
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        channel.send(
            {
                "type": "failure",
                "summary": "".join(summary).strip()[:_MOST_SUMMARY],
                "trace": "" if has_own_hook else _shown(error, text)[-_MOST_TRACE:],
                "full": "" if has_own_hook else text[-_MOST_FULL:],
                "time": when,
            }
        )
        channel.send({"type": "failed"})
        is_interrupt = isinstance(error, KeyboardInterrupt)
        return BY_SIGNAL[signal.SIGINT] if is_interrupt else 1
    return code_of_stop()


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _shown(error: BaseException, text: str) -> str:
    """Return what a terminal shows of a traceback below the error's own text.

    What elasticrun has refused needs the program's lines alone, none of elasticrun's.
    """
    if not isinstance(error, ElasticRunError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    return "".join(
        traceback.format_list([each for each in frames if is_of_program(each.filename)])
    )


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """Leave out the frames between the interpreter's start and the script.

    Nothing is left if the script did not begin, as one that cannot be compiled.
    """
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith(_LAUNCHER + os.sep) and "runpy" not in name:
            return trace
        trace = trace.tb_next
    return None


def _end_threads(code: int) -> int:
    """Wait for the program's threads, and call what is to be called at its end."""
    atexit.unregister(wait_for_threads)  # Nothing that they need goes away.
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:
        traceback.print_exc()
    return code


def _release(modules: list[str]) -> None:
    """Let go of the program's modules, so that what these hold can be finalized.

    Libraries stay: taking torch apart takes longer than all else of a rescaling, and
    leaves no trace.
    """
    for name in modules:
        sys.modules.pop(name, None)  # A finalizer of another one may have done it.
    # As Python does: a stream of the program's own would keep its module.
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
