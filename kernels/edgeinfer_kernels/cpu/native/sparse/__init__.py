"""Feed-forwards that read active neurons only."""
