"""The harness of the benchmarks: suites, split and sparse runs, planted drafts. Not in the wheel."""
