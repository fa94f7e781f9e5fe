"""What the system says of processes."""

from __future__ import annotations

from pathlib import Path

from elasticrun.launcher import processes


def test_kills_of_the_own_control_group_count_before_the_machines(
    tmp_path: Path,
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroups / "jobs" / "7").mkdir(parents=True)
    places = {"proc": proc, "cgroups": cgroups}
    assert processes.num_out_of_memory_kills(**places) is None
    (proc / "vmstat").write_text("nr_free_pages 5\noom_kill 12\n")
    assert processes.num_out_of_memory_kills(**places) == 12
    (proc / "self" / "cgroup").write_text("1:cpu:/other\n0::/jobs/7\n")
    assert processes.num_out_of_memory_kills(**places) == 12
    events = cgroups / "jobs" / "7" / "memory.events"
    events.write_text("low 0\noom 9\noom_kill 3\noom_group_kill 0\n")
    assert processes.num_out_of_memory_kills(**places) == 3
