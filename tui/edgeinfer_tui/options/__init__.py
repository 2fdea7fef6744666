"""Command-line options, and the settings that fill them."""
