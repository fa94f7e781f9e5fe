"""Numbers by which values are known again, made of all that is in them."""

from __future__ import annotations

import io
import logging
import pickle
import threading
import warnings
import zlib
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

_MOST_BYTES = 1 << 26  # Of a value that is compared.
_BYTES_OF_TENSOR = 1 << 12  # That take as long as one without any.
_OTHERS = ("elasticrun", "lightning", "torch", "torchmetrics")  # Packages.
_CONTAINERS = (dict, list, tuple, set, frozenset, nn.Module)
_OPAQUE = (
    type,
    ModuleType,
    Dataset,
    DataLoader,
    logging.Logger,
    type(threading.Lock()),
    type(threading.RLock()),
)


class Digests:
    """Makes of values what is equal as long as they, and all in them, stay the same.

    Of data sets, and of what is torch's or Lightning's own and no container, it is
    known only which ones they are. The others are pickled into a checksum.

    Args:
        known: What is to be known by its `id`, too.
    """

    def __init__(self, known: Collection[Any] = ()) -> None:
        self._known = {id(each) for each in known}
        # So that no other object is where one was.
        self._alive: dict[int, Any] = {id(each): each for each in known}

    def of(self, value: Any) -> object:
        """Return a digest; if it cannot be had, one that is equal to nothing."""
        total = _Checksum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of what pickle is to lose.
            try:
                _Pickler(self, total).dump(value)
            except Exception:  # Whatever a user's class raises.
                return object()
        return total.num_bytes, total.value

    def is_opaque(self, value: Any) -> bool:
        """Say whether it is only known which object it is."""
        if isinstance(value, _OPAQUE) or id(value) in self._known:
            return True
        kind: Any = value if isinstance(value, FunctionType) else type(value)
        return is_of_others(kind) and not isinstance(value, _CONTAINERS)

    def by_id(self, value: Any) -> int:
        """Return an object's `id`, which is no other's from now on."""
        self._alive[id(value)] = value
        return id(value)


class _Checksum:
    """A file that keeps a checksum of what is written."""

    def __init__(self) -> None:
        self.value = self.num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raise if these are too many more."""
        if self.num_bytes + num_bytes > _MOST_BYTES:
            raise ValueError("It is too large to be compared.")

    def write(self, data: Any) -> int:
        num_bytes = memoryview(data).nbytes
        self.check(num_bytes)
        self.num_bytes += num_bytes
        self.value = zlib.crc32(data, self.value)
        return num_bytes


class _Pickler(pickle.Pickler):
    def __init__(self, digests: Digests, file: Any) -> None:
        super().__init__(file, protocol=5)
        self._digests = digests
        self._file = file

    def reducer_override(self, value: Any) -> Any:
        if value is list:  # It is what all others are made to be.
            return NotImplemented
        if isinstance(value, nn.Parameter) and not value.is_inference():
            content: Any = [self._digests.by_id(value), value._version]
        elif isinstance(value, torch.Tensor):
            num_bytes = value.nbytes + _BYTES_OF_TENSOR
            self._file.check(num_bytes)
            self._file.num_bytes += num_bytes
            content = _of_tensor(value)
        elif isinstance(value, torch.Generator):
            content = [value.get_state().numpy().tobytes()]
        elif isinstance(value, Iterator) and is_of_others(type(value)):
            raise ValueError("How far it is cannot be told.")
        elif self._digests.is_opaque(value):
            content = [self._digests.by_id(value)]
        elif isinstance(value, FunctionType):
            around = [cell.cell_contents for cell in value.__closure__ or ()]
            content = [self._digests.by_id(value), vars(value), around]
            content += [value.__defaults__, value.__kwdefaults__]
        elif isinstance(value, io.IOBase) and not isinstance(
            value, io.StringIO | io.BytesIO
        ):
            content = [self._digests.by_id(value), value.closed or value.tell()]
        else:
            if isinstance(value, np.ndarray):
                self._file.check(value.nbytes)
            return NotImplemented
        return list, (), None, iter(content)  # Which may lead back to the value.


def is_of_others(kind: Any) -> bool:
    """Say whether a class or function is torch's, Lightning's or elasticrun's."""
    return str(kind.__module__).partition(".")[0] in _OTHERS


def _of_tensor(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype), tuple(tensor.shape), zlib.crc32(content.data)]


def digest_of_weight(weight: torch.Tensor) -> object:
    """Return by what other values in a tensor are told, however large it is.

    That is its sum and its norm, which are computed where it is.
    """
    try:
        value = weight.detach()
        value = torch.view_as_real(value) if value.is_complex() else value
        value = value if value.is_floating_point() else value.double()
        total = value.sum(dtype=torch.float64)
        norm = torch.linalg.vector_norm(value, dtype=torch.float64)
    except Exception:  # As of a sparse one, or one without a size yet.
        return object()
    return repr(torch.stack((total, norm)).tolist())  # NaN is itself as text.
