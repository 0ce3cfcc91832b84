"""Steps of optimizers: hooks, parameters, hyperparameters, clipping and loss scaling."""
