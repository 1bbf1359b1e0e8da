"""Device, precision and processes: where and how a model runs, which is no part of a recipe."""
