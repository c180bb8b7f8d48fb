"""Model definitions and checkpoint loaders, in torch."""
