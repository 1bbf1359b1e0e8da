"""The models of the paper: ViT, hybrids, BiT and axial ResNets, as nn.Modules."""
