"""Pre-training of low-rank LLaMA models with Duplicated Latent Residuals (DLR)."""

import sys

if sys.platform == "win32":  # before a module imports fcntl or resource, which Windows lacks
    print("error: dlr_pretrain runs on Linux and macOS. On Windows, install and start it in WSL", file=sys.stderr)
    sys.exit(3)
