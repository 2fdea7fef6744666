"""Feed-forwards that read only active neurons."""
