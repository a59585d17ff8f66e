"""The engine of models that no family fits: transformers' own code, with attention over our pages."""
