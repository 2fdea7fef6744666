"""Models that memory can't hold: programs that run in a memory cgroup, and their results."""
