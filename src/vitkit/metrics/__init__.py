"""A model to numbers: accuracy, few-shot, cost and speed. Takes callables and tensors."""
