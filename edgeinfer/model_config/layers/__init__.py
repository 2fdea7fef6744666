"""The config of layers that only one architecture has."""
