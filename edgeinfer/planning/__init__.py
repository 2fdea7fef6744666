"""Which devices a model runs on: the plan that `load` carries out and `edgeinfer plan` prints."""
