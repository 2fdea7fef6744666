"""Phases of the MoE block: the selection of experts, and the sums of their results."""
