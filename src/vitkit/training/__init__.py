"""One loop: a model, batches and an objective to a trained model, exactly resumable."""
