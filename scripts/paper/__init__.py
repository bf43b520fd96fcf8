"""The DLR paper, table by table and figure by figure: an application of the library, as ``python -m scripts.paper``."""
