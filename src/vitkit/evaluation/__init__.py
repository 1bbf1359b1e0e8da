"""A function of images to numbers. Takes callables and tensors; imports no other room of ours."""
