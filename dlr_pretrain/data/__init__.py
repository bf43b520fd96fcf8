"""Turns a source of text into the batches of a training step."""

from dlr_pretrain.data.loader import Batch, TrainLoader
from dlr_pretrain.data.packing import inputs_and_targets
from dlr_pretrain.data.sources import Listing, Source, list_files, open_source
from dlr_pretrain.data.streams import ORDER_VERSION, DocumentStream, Place, uneven
from dlr_pretrain.data.tokenizer import Tokenizer, embedding_rows, load_tokenizer, open_tokenizer
from dlr_pretrain.data.validation import ValidationSet, validation_set

__all__ = [
    "ORDER_VERSION",
    "Batch",
    "DocumentStream",
    "Listing",
    "Place",
    "Source",
    "Tokenizer",
    "TrainLoader",
    "ValidationSet",
    "embedding_rows",
    "inputs_and_targets",
    "list_files",
    "load_tokenizer",
    "open_source",
    "open_tokenizer",
    "uneven",
    "validation_set",
]
