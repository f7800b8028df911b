"""The recipe `alfworld`: reading games in every format, rows and evaluation sets, demonstrations."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest

from agent_r1.data.panels import panel_hash
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.alfworld import data, task
from agent_r1.recipes.alfworld.engine import World
from agent_r1.recipes.alfworld.env import AlfWorld
from agent_r1.recipes.alfworld.game import TASK_TYPES
from tests.recipes.alfworld_release import Files, synthetic_release, write_archive, write_tree


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    return synthetic_release(monkeypatch, tmp_path / "cache")


def test_a_tree_and_archives_give_the_same_games_in_the_same_order(released: Files, tmp_path: Path) -> None:
    backwards = dict(reversed(released.items()))
    sources = [
        write_tree(backwards, tmp_path / "tree"),
        write_archive(released, tmp_path / "zip" / "games.zip").parent,
        write_archive(backwards, tmp_path / "games.tar.xz"),
        write_archive(released, tmp_path / "short" / "games.tgz").parent,
        write_archive(released, tmp_path / "games.txz").rename(tmp_path / "no_suffix"),
    ]
    found = [[data.entries(split, data.games_file(str(source))) for split in data.SPLITS] for source in sources]
    assert all(one == found[0] for one in found)
    assert [len(games) for games in found[0]] == [6, 1, 1, 1]
    assert len({data.content_hash(data.games_file(str(source))) for source in sources}) == 1
    train = [entry.name for entry in found[0][0]]
    assert train == sorted(train, key=lambda name: sha256(name.encode()).hexdigest())
    assert train != sorted(train)


def test_the_evaluation_set_does_not_depend_on_where_the_games_are(released: Files, tmp_path: Path) -> None:
    here, there = (str(write_tree(released, tmp_path / name)) for name in ("here", "there"))
    one, other = task.rows("train", path=here), task.rows("train", 3, path=there)
    assert [row.row_id for row in one[:3]] == [row.row_id for row in other]
    assert panel_hash(one[:3]) == panel_hash(other)
    assert {row.data_source for row in one} == {f"alfworld/{kind}" for kind in TASK_TYPES}
    env = AlfWorld(**one[0].env_kwargs)
    assert "go to desk 1" in World(env.game(one[0])).admissible()


def test_games_with_the_same_name_and_other_content_are_told_apart_and_refused(released: Files, tmp_path: Path) -> None:
    here = write_tree(released, tmp_path / "here")
    there = write_tree(
        {name: content.replace(b"(openable Cabinet_bar_1)", b"") for name, content in released.items()},
        tmp_path / "there",
    )
    one, other = (task.rows("train", path=str(path)) for path in (here, there))
    assert [(row.row_id, row.prompt) for row in one] == [(row.row_id, row.prompt) for row in other]
    assert panel_hash(one) != panel_hash(other)
    with pytest.raises(DataError, match=r"has world .* and the row asks for"):
        AlfWorld(**one[0].env_kwargs).game(other[0])


def test_games_other_than_the_benchmarked_ones_cause_one_warning(
    released: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(write_tree(released, tmp_path / "tree"))
    task.rows("train", path=path)
    task.rows("valid_seen", path=path)
    assert [record.getMessage().split(" differ")[1] for record in caplog.records] == [
        " in some text from those of this recipe's published results; compare numbers with care"
    ]
    monkeypatch.setattr(data, "CONTENT", data.content_hash(data.games_file(path)))
    task.rows("train", path=str(write_tree(released, tmp_path / "copy")))
    assert len(caplog.records) == 1


def test_each_call_scans_the_source_once(released: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, looked, signature = str(write_tree(released, tmp_path / "tree")), list[Path](), data._signature

    def counted(source: Path) -> str:
        looked.append(source)
        return signature(source)

    monkeypatch.setattr(data, "_signature", counted)
    task.rows("train", path=path)
    task.both_demos(2, seed=0, path=path)
    assert len(looked) == 2


def test_a_changed_source_or_format_is_read_again(
    released: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(write_tree(released, tmp_path / "tree"))
    first = data.games_file(folder)
    assert data.games_file(folder) == first
    monkeypatch.setattr(data, "FORM", data.FORM + 1)
    assert data.games_file(folder) != first
    next(Path(folder).rglob("train/*/trial_*/*.tw-pddl")).unlink()
    assert [len(data.entries("train", file)) for file in (first, data.games_file(folder))] == [6, 5]


def test_other_rules_and_missing_games_are_errors(released: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'valid_seen'"):
        data.entries("valid_sen", tmp_path / "none")
    with pytest.raises(DataError, match="has no ALFWorld games"):
        data.games_file(str(tmp_path))
    with pytest.raises(DataError, match=r"data\.path='.*none'"):
        data.games_file(str(tmp_path / "none"))
    with pytest.raises(DataError, match="none"):
        data.load_game(str(tmp_path / "none"), "train/some/game", "0" * 12)
    name, content = next(iter(released.items()))
    for key, what in (("pddl_domain", "domain"), ("grammar", "grammar")):
        game = json.loads(content)
        game[key] += " and more"
        folder = write_tree({name: json.dumps(game).encode()}, tmp_path / what)
        with pytest.raises(DataError, match=f"{what} has hash"):
            data.games_file(str(folder))
    for number, broken in enumerate((b"{}", b"[]", b"\xff", b"not JSON")):
        folder = write_tree({name: broken}, tmp_path / f"broken{number}")
        with pytest.raises(DataError, match="is not an ALFWorld game"):
            data.games_file(str(folder))
    folder = write_tree({name.replace("train", "test"): content}, tmp_path / "unknown")
    with pytest.raises(DataError, match="has no solvable game"):
        data.games_file(str(folder))


def test_prepare_uses_a_local_archive_and_reports_its_games(released: Files, tmp_path: Path) -> None:
    write_archive(released, tmp_path / "to" / "release.zip")
    said: list[str] = []
    data.prepare(tmp_path / "to", said.append)
    assert said[0] == "train: 6 games, 3,553 were expected"
    assert "differ in some text" in said[-1]
    assert len(data.entries("train", data.games_file(str(tmp_path / "to")))) == 6
    data.prepare(tmp_path / "to", said.append)  # nothing to do
    assert said[:5] == said[5:]


# Archives that are none, and files that are written


@pytest.mark.parametrize("name", ["games.tar.xz", "games.tgz"])
def test_a_truncated_archive_is_an_error(name: str, released: Files, tmp_path: Path) -> None:
    file = write_archive(released, tmp_path / name)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"cannot be read"):
        data.games_file(str(file))
    assert list((tmp_path / "cache" / "alfworld").iterdir()) == []


def test_a_corrupt_zip_is_an_error(released: Files, tmp_path: Path) -> None:
    file = write_archive(released, tmp_path / "games.zip")
    file.write_bytes(file.read_bytes().replace(b"Mug_bar_1", b"Mug_bar_7", 1))
    with pytest.raises(DataError, match="BadZipFile: Bad CRC-32"):
        data.games_file(str(file))


def test_a_file_that_is_not_an_archive_is_an_error(released: Files, tmp_path: Path) -> None:
    zipped = write_archive(released, tmp_path / "games.zip")
    for name, content in (("cut.zip", zipped.read_bytes()[:-100]), ("foo.txt", b"hello"), ("empty.tar", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name):
            data.games_file(str(tmp_path / name))
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / data.SOURCE.rpartition("/")[2]).write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="cannot be read"):
        data.prepare(tmp_path / "to", lambda line: None)


def test_rebuilding_does_not_disturb_readers_of_the_old_file(released: Files, tmp_path: Path) -> None:
    source, to = write_tree(released, tmp_path / "tree"), tmp_path / "made" / "games.sqlite"
    data.build(source, to)
    os.link(to, tmp_path / "old")  # as an open file: the same content, whatever its name comes to mean
    before = to.read_bytes()
    next(source.rglob("train/*/trial_*/*.tw-pddl")).unlink()
    data.build(source, to)
    assert (tmp_path / "old").read_bytes() == before
    assert data.count_games(to)["train"] == 5
    with pytest.raises(DataError):
        data.build(tmp_path / "cache", to)
    assert [file.name for file in to.parent.iterdir()] == ["games.sqlite"]


def test_concurrent_builds_of_the_same_file_succeed(released: Files, tmp_path: Path) -> None:
    source, to = write_tree(released, tmp_path / "tree"), tmp_path / "made" / "games.sqlite"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: data.build(source, to), range(8)))
    assert data.count_games(to)["train"] == 6
    assert [file.name for file in to.parent.iterdir()] == ["games.sqlite"]


# Demonstrations


def test_demonstrations_come_from_training_games(released: Files, tmp_path: Path) -> None:
    path = str(write_tree(released, tmp_path / "tree"))
    walked, searched = task.demos(9, seed=0, path=path), task.explorer_demos(9, seed=0, path=path)
    assert [texts for _, texts in walked] == [["go to countertop 1"]] * 6
    # There is but one mug, so that two cannot be brought.
    assert {row.row_id for row, _ in walked} - {row.row_id for row, _ in searched} == {
        row.row_id for row, _ in walked if "pick_two" in row.row_id
    }
    assert all(row.row_id.startswith("train/") for row, _ in walked + searched)
    assert len(task.explorer_demos(2, seed=0, path=path)) == 2


def test_the_explorers_priors_come_from_training_games_alone(released: Files, tmp_path: Path) -> None:
    priors = task.train_priors(data.games_file(str(write_tree(released, tmp_path / "tree"))))
    assert priors.found["mug"] == {"countertop": 1.0}


@pytest.mark.parametrize(("count", "walked"), [(2, 1), (3, 1), (4, 2)])
def test_mixed_demonstrations_are_half_of_each_kind_and_of_different_games(
    count: int, walked: int, released: Files, tmp_path: Path
) -> None:
    demos = task.both_demos(count, seed=0, path=str(write_tree(released, tmp_path / "tree")))
    assert len({row.row_id for row, _ in demos}) == len(demos) == count
    assert sum(texts == ["go to countertop 1"] for _, texts in demos) == walked


def test_games_longer_than_the_step_limit_are_not_demonstrated(released: Files, tmp_path: Path) -> None:
    file = data.games_file(str(write_tree(released, tmp_path / "tree")))
    [entry] = [entry for entry in data.entries("train", file) if entry.task_type == "pick_heat_then_place_in_recep"]
    game, priors = data.load_game(str(file), entry.name, entry.world), task.train_priors(file)
    said = task.explored(World(game), priors)
    assert said is not None
    assert said[-1] == "move mug 1 to desk 1"
    assert task.explored(World(game), priors, max_steps=len(said)) == said
    assert task.explored(World(game), priors, max_steps=len(said) - 1) is None
