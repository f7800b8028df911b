"""The shop as an environment: the instruction first, then pages, until something is bought.

It never sees the goal. The purchase goes into `info["bought"]`, and `task.reward` scores it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from agent_r1.envs.text_env import Reply, TextEnv
from agent_r1.recipes.webshop.data import folder_of
from agent_r1.recipes.webshop.pages import Look, again, choice, page
from agent_r1.recipes.webshop.shop import CannotDo, Place, Shop, open_shop
from agent_r1.types import TaskRow

_LOOK = Look()


class WebShop(TextEnv):
    """`full_pages` shows the whole page after every action, for context policies that hide messages; otherwise, pages
    that are in the conversation are not repeated. The other settings belong to `Shop` and `Look`."""

    deterministic: ClassVar[bool] = True
    if_forgotten: ClassVar[Mapping[str, Any]] = MappingProxyType({"full_pages": True})
    system: ClassVar[str] = (
        "You shop for a customer. Say search[words] to search, click[button] to use a button: they stand in [ ]. "
        "Choose the wanted options, then buy."
    )

    def __init__(
        self,
        *,
        full_pages: bool = False,
        show_attributes: bool = False,
        title_chars: int = _LOOK.title,
        item_title_chars: int = _LOOK.item_title,
        values_chars: int = _LOOK.values,
        text_chars: int = _LOOK.text,
    ) -> None:
        self._full_pages, self._show_attributes = full_pages, show_attributes
        self._look = Look(title=title_chars, item_title=item_title_chars, values=values_chars, text=text_chars)

    def open(self, row: TaskRow) -> Shop:
        return open_shop(folder_of(row), show_attributes=self._show_attributes)

    def begin(self, row: TaskRow) -> str:
        self._shop, self._place = self.open(row), Place()
        self._shown: set[Place] = set()  # pages already in the conversation
        return str(row.prompt[-1]["content"])

    def reply(self, said: str) -> Reply:
        info: dict[str, Any] = {"anchor": self._place.anchor}
        try:
            place = self._shop.go(self._place, said)
        except CannotDo as refusal:
            where = f"\n{page(self._shop, self._place, self._look)}" if self._full_pages else ""
            return Reply(text=f"{refusal}{where}", info=info | {"refused": True})
        text, self._place = self._answer(place), place
        if place.page == "bought":
            info["bought"] = {"asin": place.asin, "options": dict(place.chosen)}
        return Reply(text=text, done=place.page == "bought", info=info)

    def _answer(self, place: Place) -> str:
        if not self._full_pages and place.page in ("results", "item"):
            if self._place.page == place.page == "item":
                return choice(self._shop, place)
            # A product's page counts as the same page, however it was reached and whatever is chosen.
            known = Place(page="item", asin=place.asin) if place.page == "item" else place
            if known in self._shown:
                return again(self._shop, place)
            self._shown.add(known)
        return page(self._shop, place, self._look)
