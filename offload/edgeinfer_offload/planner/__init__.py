"""The memory planner: a pure function from sizes, a machine and options to a plan."""
