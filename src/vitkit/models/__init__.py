"""ViTs of the paper and later ones, hybrids and ResNets, and the parts that tasks add, as nn.Modules."""
