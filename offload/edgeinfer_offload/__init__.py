"""Offloading: measure the machine, plan the memory, place the weights."""
