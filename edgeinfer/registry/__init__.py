"""Models by name: models.toml, the models folder, and what other programs have stored."""
