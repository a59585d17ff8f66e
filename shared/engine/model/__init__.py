"""A decoder in torch: blocks, weights and their names, rotary positions, and the ops they are made of."""
