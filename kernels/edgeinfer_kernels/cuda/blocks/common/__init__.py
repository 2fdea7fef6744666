"""What several block kinds on a GPU share."""
