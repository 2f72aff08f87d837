"""Named data sets, and the small language model whose training run makes some of them."""
