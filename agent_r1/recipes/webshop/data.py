"""The files of WebShop's set of 1,000 products, and the catalogue and goals built from them.

A folder holds the products, as `items_shuffle_1000.json` (downloaded by WebShop's own setup) or `documents_1k.jsonl`
(the same from its search index), the attributes (`items_ins_v2_1000.json`) and, optionally, instructions written by
people (`items_human_ins.json`). Each may be gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

from agent_r1.data.downloads import Report, data_folder, fetch
from agent_r1.data.files import json_lines, plain_or_gzipped, read_json
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.webshop.goals import Goal, draw_prices, human_goals, synthetic_goals
from agent_r1.recipes.webshop.products import Product, read_products
from agent_r1.types import TaskRow

FOLDER = "webshop"  # name of the data directory
FOLDER_KEY = "folder"  # key in a row's extra_info
PACKAGES = ("bm25s", "Stemmer", "rapidfuzz")  # packages that search and score need
ITEMS, DOCUMENTS = "items_shuffle_1000.json", "documents_1k.jsonl"  # the products, in either form
ATTRIBUTES, HUMAN = "items_ins_v2_1000.json", "items_human_ins.json"
NUM_GOALS, GOALS_SHA256 = 6910, "b4f63d12959f636907cb474bdbffc724e57316e3cf073cb5ea4183eec6edfc2e"

_MINIMAL = (
    "https://raw.githubusercontent.com/ZihanWang314/webshop-minimal/ec82552d2458efb486701b138c9d038e1759489c/"
    "webshop_minimal/data/small"
)
_DRIVE = "https://drive.google.com/uc?export=download&id="
ATTRIBUTES_URL = f"{_MINIMAL}/{ATTRIBUTES}"
ATTRIBUTES_SHA256 = "f88a36314a397b53b3d9c3fa5878e5f7b26d35019a51ec83fbedeca61a948f6f"
# The file has no published hash; it is right if it gives the goals with the known hash.
ITEMS_URLS = (f"{_MINIMAL}/{ITEMS}", f"{_DRIVE}1EgHdxQ_YxqIQlvvq5iKlCrkEKR6-j0Ib")

_OPENING = Lock()  # read a catalogue once, even if many episodes start at the same time


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All products and goals. Immutable."""

    products: Mapping[str, Product]  # by asin (Amazon's product id), in the order of the file
    prices: Mapping[str, float]  # price charged
    goals: tuple[Goal, ...]  # synthetic goals, in the order of the original
    human: tuple[Goal, ...]

    @staticmethod
    def of(products: Iterable[Product]) -> Catalogue:
        _require_packages()
        sold = list(products)
        prices = draw_prices(sold)
        return Catalogue(
            products={product.asin: product for product in sold},
            prices=prices,
            goals=tuple(synthetic_goals(sold, prices)),
            human=tuple(human_goals(sold, prices)),
        )


def catalogue_folder(path: str | None) -> Path:
    return data_folder(FOLDER, path).resolve()  # carried by the rows


def folder_of(row: TaskRow) -> Path:
    """Return the folder of a row's products, for the env and the reward."""
    if not row.extra_info.get(FOLDER_KEY):
        raise DataError(
            f"row {row.row_id!r} does not say where its products are (extra_info.{FOLDER_KEY}): make rows with "
            "webshop's task.rows"
        )
    return Path(row.extra_info[FOLDER_KEY])


def open_catalogue(folder: Path) -> Catalogue:
    """Read once per process."""
    with _OPENING:
        return _read_catalogue(folder)


def prepare(directory: Path, report: Report) -> None:
    """Download missing files and verify that they give the 6,910 goals."""
    if plain_or_gzipped(directory / ATTRIBUTES) is None:
        fetch(ATTRIBUTES_URL, directory / ATTRIBUTES, sha256=ATTRIBUTES_SHA256, report=report)
    if _products_file(directory) is None:
        _fetch_items(directory, report)
    catalogue = open_catalogue(directory)
    _check_goals(catalogue, directory)
    report(f"{directory}: {len(catalogue.products):,} products, {len(catalogue.goals):,} goals")


def goals_hash(goals: Iterable[Goal]) -> str:
    digest = hashlib.sha256()
    for goal in goals:
        digest.update(f"{goal.asin} {goal.text}\n".encode())
    return digest.hexdigest()


def _fetch_items(directory: Path, report: Report) -> None:
    for url in ITEMS_URLS:
        try:
            fetch(url, directory / ITEMS, sha256=None, report=report)
            _check_goals(_read_catalogue.__wrapped__(directory), directory)
            return
        except DataError as error:
            (directory / ITEMS).unlink(missing_ok=True)
            report(str(error))
    raise DataError(
        f"cannot download the products. Get {ITEMS} as WebShop's own setup.sh does (gdown "
        f"{ITEMS_URLS[-1].rpartition('=')[2]}) and put it into {directory}, or set data.path to a folder with that "
        f"file, or {DOCUMENTS}, and {ATTRIBUTES}"
    )


def _check_goals(catalogue: Catalogue, directory: Path) -> None:
    found = goals_hash(catalogue.goals)
    if found != GOALS_SHA256:
        raise DataError(
            f"{directory} gives {len(catalogue.goals):,} goals with hash {found[:12]}, not the {NUM_GOALS:,} with "
            f"{GOALS_SHA256[:12]} of WebShop's 1,000 products: results would not be comparable. To "
            "use them anyway, set data.path to the folder"
        )


@lru_cache(maxsize=4)
def _read_catalogue(folder: Path) -> Catalogue:
    file, mined = _products_file(folder), plain_or_gzipped(folder / ATTRIBUTES)
    if file is None or mined is None:
        missing = f"{ITEMS} or {DOCUMENTS}" if file is None else ATTRIBUTES
        where = str(folder) if folder.is_dir() else f"{folder}, which is not a folder"
        raise DataError(
            f"there is no {missing} (or the same with .gz) in {where}. Fetch it: agent-r1 data recipe {FOLDER}, or "
            f"set data.path to a folder that has the products and {ATTRIBUTES}"
        )
    human = plain_or_gzipped(folder / HUMAN)
    if file.name.startswith(DOCUMENTS):
        records: Iterable[Any] = (_product_in(document) for document in json_lines(file))
    else:
        records = _json(file, list)
    return Catalogue.of(read_products(records, _json(mined, dict), _json(human, dict) if human else {}, str(file)))


def _require_packages() -> None:
    """Check for required packages before the first episode; otherwise only episodes that buy something would fail."""
    for name in PACKAGES:  # find without importing: bm25s would start JAX, see import_bm25s
        if find_spec(name) is None:
            raise ConfigError(f"the shop needs the package {name}: pip install 'agent-r1[webshop]'")


def _product_in(document: Any) -> Any:
    """Return the product of a document, or None if the document is malformed."""
    return document.get("product") if isinstance(document, dict) else None


def _products_file(folder: Path) -> Path | None:
    return plain_or_gzipped(folder / DOCUMENTS) or plain_or_gzipped(folder / ITEMS)


def _json(path: Path, kind: type) -> Any:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            found = read_json(file.read().decode("utf-8"))
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not JSON: {error}. Is it a web page, or only part of the file?") from error
    if not isinstance(found, kind):
        raise DataError(f"{path} holds a {type(found).__name__}, not a {kind.__name__}: is it the right file?")
    return found
