"""Past conversations on the disk: written as they come, continued, searched, exported."""
