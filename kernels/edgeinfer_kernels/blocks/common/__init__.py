"""What several block kinds share."""
