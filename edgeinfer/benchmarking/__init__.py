"""Speed measurement: files with the shapes of real models, repeated and interleaved runs, tables."""
