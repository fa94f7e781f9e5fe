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


def test_memory_that_control_groups_leave_is_what_they_do_not_keep_of_files(
    tmp_path: Path,
) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    group = cgroups / "jobs" / "7"
    (proc / "self").mkdir(parents=True)
    group.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/jobs/7\n")
    places = {"proc": proc, "cgroups": cgroups}
    assert processes.available_memory(**places) > 1 << 50  # Nothing says how much.
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    assert processes.available_memory(**places) == 8000 << 10
    for each, most, used in ((group, "max", 100), (group.parent, "5000", 4000)):
        (each / "memory.max").write_text(f"{most}\n")
        (each / "memory.current").write_text(f"{used}\n")
        stat = "anon 2000\nfile 2000\ninactive_file 900\nactive_file 1000\nshmem 100\n"
        (each / "memory.stat").write_text(stat)
    assert processes.available_memory(**places) == 5000 - 4000 + 900 + 1000
    (group / "memory.max").write_text("1500\n")
    (group / "memory.current").write_text("1400\n")
    (group / "memory.stat").write_text("")
    assert processes.available_memory(**places) == 100
