"""Processes as a DataLoader's workers are, which need not import torch."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from elasticrun.replicas.signals import ignore_stop_signals_in_worker


def serve_pings(pipe: Connection) -> None:
    ignore_stop_signals_in_worker()
    while True:
        pipe.send(pipe.recv())


def wait_for_ever(pipe: Connection) -> None:
    ignore_stop_signals_in_worker()
    pipe.send(os.getpid())
    while True:
        time.sleep(3600)
