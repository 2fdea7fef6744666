"""Running compiled kernels: the thread pool, argument blocks, schedules, measured speeds."""
