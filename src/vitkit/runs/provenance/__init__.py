"""Which data a run learned from, image by image, and how another data set differs from it."""
