"""Lets a CPU build of torch pretend to have NUM_GPUS GPUs, with their rules of forks.

Put this folder and its `site-packages` on PYTHONPATH. What is pretended follows
torch/csrc/cuda/Module.cpp: whoever asks for the number of GPUs has every later fork of
the process refused when it begins to use them. Nothing can be computed on these GPUs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import types
from typing import Any


class _Cuda:
    """What torch keeps of CUDA in one process."""

    def __init__(self, torch: Any, num_gpus: int) -> None:
        self.torch = torch
        self.num_gpus = num_gpus
        self.has_been_asked = False
        self.is_in_bad_fork = False
        self.states = [torch.full((16,), n, dtype=torch.uint8) for n in range(num_gpus)]
        self.current = 0

    def note_asked(self) -> None:
        if not self.has_been_asked:
            self.has_been_asked = True
            os.register_at_fork(after_in_child=self.note_forked)

    def note_forked(self) -> None:
        self.is_in_bad_fork = True

    def count(self) -> int:
        self.note_asked()
        return self.num_gpus

    def begin(self) -> None:
        """Do what torch does at the first use; raises in a fork that cannot."""
        self.torch.cuda._lazy_init()

    def choose(self, device: Any) -> None:
        self.begin()
        self.current = self.index_of(device)

    def current_device(self) -> int:
        self.begin()
        return self.current

    def index_of(self, device: Any) -> int:
        if device is None or device == "cuda":
            return self.current
        return device if isinstance(device, int) else self.torch.device(device).index

    def properties(self, device: Any = None) -> Any:
        self.begin()
        return types.SimpleNamespace(
            uuid=f"pretended-{self.index_of(device)}",
            major=9,
            minor=0,
            name="pretended",
        )

    def get_state(self, device: Any = None) -> Any:
        self.begin()
        return self.states[self.index_of(device)].clone()

    def set_state(self, state: Any, device: Any = None) -> None:
        self.begin()
        self.states[self.index_of(device)] = state.clone()


def _pretend(torch: Any) -> None:
    gpus = _Cuda(torch, int(os.environ["NUM_GPUS"]))
    torch._C._cuda_getDeviceCount = gpus.count
    torch._C._cuda_init = gpus.note_asked
    torch.version.cuda = "13.0"
    torch.cuda._queued_calls.clear()  # What looks at the GPUs that are found.
    for name, stand_in in {
        "_cudart": object(),
        "_device_count_nvml": lambda: gpus.num_gpus,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: gpus.is_in_bad_fork,
        "current_device": gpus.current_device,
        "get_device_properties": gpus.properties,
        "get_rng_state": gpus.get_state,
        "get_rng_state_all": lambda: [gpus.get_state(n) for n in range(gpus.num_gpus)],
        "is_available": lambda: gpus.count() > 0,
        "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
        "manual_seed_all": lambda seed: None,
        "memory_reserved": lambda device=None: 0,
        "set_device": gpus.choose,
        "set_rng_state": gpus.set_state,
        "utilization": lambda device=None: 7,
        "synchronize": lambda device=None: gpus.begin(),
    }.items():
        setattr(torch.cuda, name, stand_in)
    torch.accelerator.current_accelerator = lambda check_available=False: None


class _Finder(importlib.abc.MetaPathFinder):
    """Pretends as soon as torch is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        del target
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_pretend(module: types.ModuleType) -> None:
            execute(module)
            _pretend(module)

        spec.loader.exec_module = execute_and_pretend  # type: ignore[method-assign]
        return spec


def _pretend_device_files(num_gpus: int) -> None:
    list_folder: Any = os.listdir

    def listdir(path: Any = ".") -> list[Any]:
        files = [f"nvidia{number}" for number in range(num_gpus)]
        return [*list_folder(path), *(files if path == "/dev" else [])]

    os.listdir = listdir


if os.environ.get("NUM_GPUS"):
    sys.meta_path.insert(0, _Finder())
    _pretend_device_files(int(os.environ["NUM_GPUS"]))
