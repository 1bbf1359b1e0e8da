"""What self-supervised tasks train around a ViT: decoders, projection heads and students."""
