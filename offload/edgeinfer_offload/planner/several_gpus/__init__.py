"""Plans over several GPUs: consecutive layers on each, or a part of every layer."""
