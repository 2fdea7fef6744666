"""Data exchange between CPU and GPU: stages of a split model, streamed weights, loaded experts."""
