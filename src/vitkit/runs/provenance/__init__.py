"""The data that a run was trained on, image by image, and how other data differs from it."""
