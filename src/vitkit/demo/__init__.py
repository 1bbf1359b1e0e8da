"""The demonstrations behind `vitkit demo`: the models and formats, and the main job on embedded digits."""
