"""Models by name: models.toml, the models folder, and files of other programs."""
