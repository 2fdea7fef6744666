"""Command-line options, and the settings that provide their defaults."""
