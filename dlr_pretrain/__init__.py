"""Pre-training of low-rank LLaMA models with Duplicated Latent Residuals (DLR)."""
