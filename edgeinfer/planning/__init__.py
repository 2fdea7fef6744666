"""Device planning: the plan that `load` executes and `edgeinfer plan` prints."""
