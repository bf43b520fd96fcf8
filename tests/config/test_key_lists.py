"""Lists of keys outside config/tree.py hold keys that there are: of one that is renamed, they would say nothing."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from dlr_pretrain.analysis import runs
from dlr_pretrain.config import CONFIG_DIR
from dlr_pretrain.config.identity import ORIGIN
from dlr_pretrain.config.parse import KNOWN
from dlr_pretrain.config.tree import GROUPS, OPEN_GROUPS
from dlr_pretrain.deploy import card
from dlr_pretrain.launch.state import FINGERPRINTS
from dlr_pretrain.train import start

KNOBS = {
    f"{group}.{knob}"
    for group in OPEN_GROUPS
    for path in (CONFIG_DIR / group).glob("*.yaml")
    for knob in OmegaConf.load(path)
}
KEYS = {*KNOWN, *KNOBS, *FINGERPRINTS, *GROUPS}
LISTS = {
    "card.PATHS": [".".join(path) for path in card.PATHS],
    "start.MODEL": start.MODEL,
    "start.DATA": start.DATA,
    "start.RATES": start.RATES,
    "start.RECIPE": start.RECIPE,
    "identity.ORIGIN": ORIGIN,
    "runs.TEXT": runs.TEXT,
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_names_keys_or_beginnings_of_keys_that_there_are(name):
    assert [entry for entry in LISTS[name] if not any(key.startswith(entry) for key in KEYS)] == []
