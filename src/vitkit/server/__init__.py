"""A trained model behind HTTP: bounded in size, time and memory, and replaced without a lost answer."""
