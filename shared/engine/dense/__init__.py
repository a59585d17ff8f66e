"""Dense decoder models in plain torch: weights, layers and the forward pass."""
