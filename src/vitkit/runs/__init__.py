"""A recipe to a run folder: data, model, training, evaluation, artifacts."""
