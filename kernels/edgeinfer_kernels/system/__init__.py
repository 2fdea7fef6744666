"""Files and locks shared by several processes."""
