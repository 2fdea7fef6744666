"""What the compiled blocks of several kinds share."""
