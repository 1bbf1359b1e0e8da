"""Models of segmentation and detection: DenseModel, its architectures, and the losses they learn by."""
