"""What a method changes inside a model: an application of the library, as ``python -m scripts.geometry``."""
