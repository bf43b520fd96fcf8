"""Turns a source of text into the batches of training steps."""

from dlr_pretrain.data.loader import Batch, TrainLoader, ValidationSet, validation_set, validation_sets
from dlr_pretrain.data.packing import inputs_and_targets
from dlr_pretrain.data.prepare import tokenised_once
from dlr_pretrain.data.sources import Source, open_source
from dlr_pretrain.data.tokenizer import Tokenizer, embedding_rows, load_tokenizer, open_tokenizer

__all__ = ["Batch", "Source", "Tokenizer", "TrainLoader", "ValidationSet", "embedding_rows",
           "inputs_and_targets", "load_tokenizer", "open_source", "open_tokenizer", "tokenised_once",
           "validation_set", "validation_sets"]  # fmt: skip
