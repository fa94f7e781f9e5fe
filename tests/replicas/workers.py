"""Processes as a DataLoader's workers are, which need not import torch."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from elasticrun.replicas.signals import leave_stops_to_parent


def serve_pings(pipe: Connection) -> None:
    leave_stops_to_parent()
    while True:
        pipe.send(pipe.recv())


def wait_for_ever(pipe: Connection) -> None:
    leave_stops_to_parent()
    pipe.send(os.getpid())
    while True:
        time.sleep(3600)
