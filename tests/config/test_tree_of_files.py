"""Every file under configs/ composes, alone and with the others."""

import itertools

import pytest
import yaml

from dlr_pretrain.config import CONFIG_DIR, GROUPS
from dlr_pretrain.config.composition import build, default_choices, session

FILES = sorted(CONFIG_DIR.rglob("*.yaml"))
OPTIONS = {group: sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml")) for group in GROUPS}
COMPOSED = [group for group in GROUPS if group != "experiment"]


def ids(paths):
    return [str(path.relative_to(CONFIG_DIR)) for path in paths]


@pytest.fixture(scope="module")
def hydra():
    with session():
        yield


def unquoted_switches(text: str) -> list[str]:
    """Where a bare on or off stands in the place of a name: YAML reads it as a boolean, and Hydra then crashes."""
    tree = yaml.safe_load(text) or {}
    places = [("name", tree.get("name"))]
    for entry in tree.get("defaults", []):
        places += entry.items() if isinstance(entry, dict) else [("defaults", entry)]
    return [place for place, value in places if isinstance(value, bool)] + [key for key in tree if key is True]


@pytest.mark.parametrize("path", FILES, ids=ids(FILES))
def test_on_and_off_are_quoted(path):
    assert unquoted_switches(path.read_text()) == []


@pytest.mark.parametrize("text", ["name: off", "defaults:\n  - dlr: off", "defaults:\n  - override /dlr: on", "on: 1"])
def test_an_unquoted_switch_is_noticed(text):
    assert unquoted_switches(text) != []


@pytest.mark.parametrize("group", COMPOSED)
def test_every_option_is_named_as_its_file(group):
    for option in OPTIONS[group]:
        tree = yaml.safe_load((CONFIG_DIR / group / f"{option}.yaml").read_text())
        assert tree[{"data": "source", "logger": "view"}.get(group, "name")] == option


def test_every_group_has_a_default():
    assert list(default_choices()) == [*COMPOSED, "experiment"]


def test_every_shape_composes(hydra):
    """Knobs of a backbone follow from the scale: their whole product, and the options of dlr in turn."""
    shapes = itertools.product(OPTIONS["scale"], OPTIONS["backbone"])
    for (scale, backbone), dlr in zip(shapes, itertools.cycle(OPTIONS["dlr"]), strict=False):
        cfg, problems = build("train", [f"scale={scale}", f"backbone={backbone}", f"dlr={dlr}"])
        assert problems == []
        assert (cfg.scale.name, cfg.backbone.name, cfg.dlr.name) == (scale, backbone, dlr)
        assert cfg.run.dir == f"runs/{scale}-{backbone}-dlr_{dlr}-s42"


def test_every_pair_of_options_composes(hydra):
    """The product of all groups grows beyond what a test can compose; two files at a time is how they can clash."""
    for row in rows_that_cover_all_pairs():
        cfg, problems = build("train", [f"{group}={option}" for group, option in row.items()])
        assert problems == [], row
        assert cfg.data.source == row["data"]


def rows_that_cover_all_pairs() -> list[dict[str, str]]:
    left = {
        frozenset([(one, a), (other, b)])
        for one, other in itertools.combinations(COMPOSED, 2)
        for a, b in itertools.product(OPTIONS[one], OPTIONS[other])
    }
    rows = []
    while left:
        row = dict(min(left, key=sorted))
        for group in COMPOSED:
            if group not in row:
                row[group] = max(
                    OPTIONS[group],
                    key=lambda option, g=group, r=row: sum(
                        frozenset([(g, option), pair]) in left for pair in r.items()
                    ),
                )
        rows.append(row)
        left -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
    return rows
