"""The benchmarks' own harness: suites, runs of split and sparse models, planted drafts. Not in the wheel."""
