"""Shards on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from dlr_pretrain.data import hub
from dlr_pretrain.data.sources import TextSource, fingerprint_of
from dlr_pretrain.errors import UserError

OFFLINE = "Offline, use data=sample, or data=c4_local data.root=<folder of the shards>"


class HubSource(TextSource):
    """C4-layout shards of a dataset on the hub, streamed through ``datasets``; each file is a shard.

    The commit is fixed when the source is opened, so that a run sees one version of the dataset.
    """

    tokenizer_path = None

    def __init__(self, dataset: str, train_files: str, validation_files: str, text_key: str):
        self._dataset = dataset
        self._text_key = text_key
        patterns = {"data.train_files": train_files, "data.validation_files": validation_files}
        self._commit, found = hub.list_files(dataset, list(patterns.values()), OFFLINE)
        for (key, pattern), files in zip(patterns.items(), found, strict=True):
            if not files:
                raise UserError(f"{key}={pattern}: matches no file of {dataset} on the hub. Correct the glob")
        self.train_shards, self.validation_shards = map(tuple, found)
        self.fingerprint = fingerprint_of(text_key, [dataset, *found])

    def read(self, shard: str, start: int = 0, step: int = 1) -> Iterator[str]:
        address = f"hf://datasets/{self._dataset}@{self._commit}/{shard}"
        return islice(read_with_datasets(address, self._text_key, start), 0, None, step)

    def describe(self) -> str:
        shards = f"{len(self.train_shards)} train and {len(self.validation_shards)} validation shards"
        return f"{self._dataset}@{self._commit[:7]} on the hub: {shards}"


def read_with_datasets(address: str, text_key: str, start: int = 0) -> Iterator[str]:
    """The texts of a JSON-lines file at any address that ``datasets`` can stream, from document ``start`` on."""
    from datasets import load_dataset

    document = start
    try:
        rows = load_dataset("json", data_files=[address], split="train", streaming=True)
        for row in rows.select_columns([text_key]).skip(start):
            text = row[text_key]
            if not isinstance(text, str):
                raise UserError(f"{address}: document {document} has no text {text_key!r}. Set data.text_key")
            yield text
            document += 1
    except UserError:
        raise
    except Exception as error:  # datasets, its reader and its network layers raise types of their own
        mend = "Start again to continue from the last checkpoint"
        raise UserError(f"{address}: reading failed after document {document} ({error}). {mend}") from error
