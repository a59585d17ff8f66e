"""Dense decoder models in plain torch: configuration, weights, layers and the forward pass."""
