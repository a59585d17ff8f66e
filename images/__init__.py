"""What images are made from. The only Python here is what `images/build` runs."""
