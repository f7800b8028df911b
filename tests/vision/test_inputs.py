"""Pictures from outside: every spelling of a part, rows as published, and hostile files, which are never a crash."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from agent_r1.data.rows import load_rows, row_from_record
from agent_r1.errors import DataError
from agent_r1.places import StartedHere
from agent_r1.tools.base import ToolResult, tool
from agent_r1.types import Observation, StopReason
from agent_r1.vision.picture_store import load_picture, store_pictures
from agent_r1.vision.pictures import Picture, as_picture, pictures_of
from tests.vision.played import CALL, play, shown_in
from tests.vision.tiny_models import picture

PIXELS = picture(1, 12, 20).pixels


def encoded(kind: str = "PNG", image: Image.Image | None = None, **options: Any) -> bytes:
    file = io.BytesIO()
    (image or Image.fromarray(PIXELS)).save(file, kind, **options)
    return file.getvalue()


PNG = encoded()
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my picture.png"
    path.write_bytes(PNG)
    return path


def test_every_spelling_of_a_part_is_the_same_picture(file: Path) -> None:
    struct_ = {"bytes": PNG, "path": None}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "image_url", "image_url": {"url": file.as_uri(), "detail": "high"}},
        {"type": "image_url", "image_url": URL},
        {"type": "image", "image": PNG},
        {"type": "image", "image": struct_},
        {"type": "image", "image": {"bytes": None, "path": str(file)}},
        {"type": "image", "image": str(file)},
        {"type": "image", "image": file},
        {"type": "image", "url": file.as_uri()},
        {"type": "image", "path": str(file)},
        {"type": "image", "base64": base64.b64encode(PNG).decode()},
        {"type": "image", "image": PNG, "text": None, "image_url": None},  # as a table fills in what others have
    ]
    words = {"type": "text", "text": "a", "image": None}  # of such a table, too
    messages = Observation(messages=[{"role": "user", "content": [*parts, words]}]).messages or []
    assert messages[0]["content"][-1] == {"type": "text", "text": "a"}
    seen = pictures_of(messages)
    assert len(seen) == len(parts)
    assert set(seen) == {Picture.from_bytes(PNG)}
    pixels = [as_picture(given) for given in (Image.fromarray(PIXELS), PIXELS, Image.open(file))]
    assert {each.name for each in pixels} == {Picture.from_pixels(PIXELS).name}
    assert all((each.pixels == PIXELS).all() for each in (*seen, *pixels))


def test_relative_paths_start_in_the_folder_of_the_rows_or_where_the_program_was_started(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert as_picture(file.name, folder=file.parent) == Picture.from_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    with StartedHere():
        monkeypatch.chdir("/")  # by a tool
        assert as_picture(file.name) == Picture.from_bytes(PNG)


PROMPT = [{"role": "system", "content": "Look."}, {"role": "user", "content": "<image>Find x. <image>"}]


def check_two(row: Any, first: bytes = PNG) -> None:
    assert row.prompt[0]["content"] == "Look."
    parts = row.prompt[1]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image"]
    assert parts[1]["text"] == "Find x. "
    assert parts[0]["image"] == Picture.from_bytes(first)
    assert "images" not in row.extra_info


def test_parquet_rows_as_published_have_their_pictures_where_the_prompt_marks_them(file: Path, tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "prompt": [PROMPT],
            "images": pa.array([[{"bytes": PNG, "path": None}, {"bytes": None, "path": file.name}]], pa.list_(kind)),
            "reward_model": [{"style": "rule", "ground_truth": "4"}],
            "data_source": ["hiyouga/geometry3k"],
        }
    )
    pq.write_table(table, tmp_path / "train.parquet")
    [row] = load_rows(str(tmp_path / "train.parquet"), split="train")
    check_two(row)
    assert row.ground_truth == "4"


def test_a_column_image_is_one_picture_if_the_prompt_marks_it(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"prompt": ["What is it? <image>"], "image": pa.array([{"bytes": PNG, "path": "0.png"}], kind)})
    pq.write_table(table, tmp_path / "test.parquet")
    [row] = load_rows(str(tmp_path), split="test")
    assert pictures_of(row.prompt) == [Picture.from_bytes(PNG)]
    kept = row_from_record({"prompt": "no mark", "image": {"os": "linux"}}, place="row 0")
    assert kept.extra_info["image"] == {"os": "linux"}


@pytest.mark.parametrize("as_array", [False, True])
def test_parts_without_a_picture_take_those_of_the_column(as_array: bool) -> None:
    content: Any = [{"type": "image"}, {"type": "text", "text": "Find x. "}, {"type": "image", "image": None}]
    record = {
        "prompt": [PROMPT[0], {"role": "user", "content": np.array(content) if as_array else content}],
        "images": [Image.open(io.BytesIO(PNG)), {"bytes": PNG}],
    }
    parts = row_from_record(record, place="row 0").prompt[1]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image"]
    assert len(pictures_of([{"content": parts}])) == 2


def test_paths_are_relative_to_the_file_of_json_lines_and_to_the_recipe_of_a_function(
    file: Path, tmp_path: Path
) -> None:
    records = [
        {"prompt": PROMPT, "images": [file.name, URL]},
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": file.name}]}]},
        {"prompt": "only text", "images": []},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    rows = load_rows("{split}.jsonl", split="train", beside=tmp_path)
    check_two(rows[0])
    assert [len(pictures_of(row.prompt)) for row in rows] == [2, 1, 0]
    [row] = load_rows(lambda split: [{"prompt": "<image>", "images": [file.name]}], split="train", beside=tmp_path)
    assert pictures_of(row.prompt) == [Picture.from_bytes(PNG)]


@pytest.mark.parametrize(
    ("prompt", "images", "counts"),
    [
        ("<image>", [], (0, 1)),
        ("<image><image>", [PNG], (1, 2)),
        ("none", [PNG], (1, 0)),
        ([{"role": "user", "content": [{"type": "image"}]}], [PNG, PNG], (2, 1)),
    ],
)
def test_pictures_and_marks_that_disagree_are_an_error(prompt: Any, images: list[Any], counts: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=rf"row 3 has {counts[0]} pictures .* shows {counts[1]}"):
        row_from_record({"prompt": prompt, "images": images}, place="row 3")


def test_a_missing_file_names_row_and_path(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "<image>", "images": ["absent.png"]}))
    with pytest.raises(DataError, match=r"row 0 of .*absent\.png"):
        load_rows(str(tmp_path / "train.jsonl"), split="train")


# what is decoded


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded("JPEG", exif=exif, quality=100)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8, 9, 0, 65535])
def test_a_photograph_is_shown_upright_and_its_size_known_before_it_is_decoded(orientation: int) -> None:
    from_file, from_image = Picture.from_bytes(oriented(orientation)), Image.open(io.BytesIO(oriented(orientation)))
    turned = orientation in (6, 8)
    assert (from_file.width, from_file.height) == ((12, 20) if turned else (20, 12))
    from_file.check()
    assert (as_picture(from_image).pixels == from_file.pixels).all()


def test_a_photograph_that_holds_further_pictures_is_an_upright_jpeg(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    other = Image.fromarray(255 - PIXELS)
    photo = Picture.from_bytes(encoded("MPO", exif=exif, save_all=True, append_images=[other]))
    assert (photo.width, photo.height, photo.pixels.shape) == (12, 20, (20, 12, 3))
    store_pictures(tmp_path, [photo])
    found = load_picture(tmp_path, photo.name)
    assert (found, (tmp_path / f"{photo.name}.jpeg").read_bytes()) == (photo, photo.encoded)


def test_transparent_palette_grey_and_16_bit_pictures_become_rgb() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert Picture.from_bytes(encoded("PNG", clear)).pixels.min() == 255
    grey = Image.fromarray(np.full((4, 4), 51 * 257, np.uint16))
    assert set(Picture.from_bytes(encoded("PNG", grey)).pixels.flat) == {51}
    assert set(as_picture(grey).pixels.flat) == {51}
    for mode in ("L", "P", "1", "LA"):
        assert Picture.from_bytes(encoded("PNG", Image.fromarray(PIXELS).convert(mode))).pixels.shape == PIXELS.shape
    cmyk = Image.fromarray(PIXELS).convert("CMYK")
    assert Picture.from_bytes(encoded("JPEG", cmyk)).pixels.shape == PIXELS.shape


def test_the_first_picture_of_an_animation_is_shown() -> None:
    frames = [Image.fromarray(np.full((8, 8, 3), shade, np.uint8)) for shade in (10, 200)]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True})):
        data = encoded(kind, frames[0], save_all=True, append_images=frames[1:], **options)
        assert set(Picture.from_bytes(data).pixels.flat) == {10}


# hostile


def huge_png(width: int, height: int) -> bytes:
    """A small file that says it has many pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(100_000))) + chunk(b"IEND", b"")


def huge_gif() -> bytes:
    data = bytearray(encoded("GIF"))
    data[6:10] = struct.pack("<HH", 65535, 65535)
    return bytes(data)


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script><image href="file:///etc/passwd"/></svg>'
HOSTILE: dict[str, Any] = {
    "a bomb": huge_png(40_000, 40_000),
    "a wide bomb": huge_png(500_000, 1),
    "a bomb beyond Pillow's limit": huge_png(2**31 - 1, 2**31 - 1),
    "a huge gif": huge_gif(),
    "svg": SVG,
    "svg as a data url": f"data:image/svg+xml;base64,{base64.b64encode(SVG).decode()}",
    "svg as text": f"data:image/svg+xml,{SVG.decode()}",
    "truncated": PNG[: len(PNG) // 2],
    "only a header": PNG[:33],
    "a truncated photograph": encoded("JPEG")[:-100],
    "another format": encoded("TIFF"),
    "a program": b"#!/bin/sh\necho",
    "empty": b"",
    "no base64": "data:image/png;base64,%%%",
    "not ascii": "data:image/png;base64,é",
    "a web address": "https://example.com/a.png",
    "no address": "http://[",
    "a missing file": "no/such/file.png",
    "a folder": "/",
    "a device": "/dev/zero",
    "a null byte": "a\0b",
    "a number": 7,
    "nothing": None,
    "floats": np.zeros((4, 4, 3)),
    "no colours": np.zeros((4, 4), np.uint8),
    "a line": np.zeros((1, 4000, 3), np.uint8),
    "no pixels": np.zeros((0, 4, 3), np.uint8),
    "a name without pixels": "0" * 32,
    "a lazy damaged image": None,  # made below: opening it keeps the file
}


def hostile(name: str) -> Any:
    if name == "a lazy damaged image":
        return Image.open(io.BytesIO(PNG[: len(PNG) // 2]))
    return HOSTILE[name]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_of_a_tool_is_an_error_that_the_model_reads(name: str) -> None:
    @tool(name="look")
    def show(at: int) -> ToolResult:
        """Look at a place."""
        return ToolResult("here", images=[hostile(name)])

    trajectory = play([CALL % 1, "done"], tools=[show])
    assert trajectory.stop is StopReason.ANSWERED
    [call] = trajectory.steps[0].calls
    assert call.fault == "failed"
    assert "picture" in str(call.error)
    assert call.pictures == ()
    assert len(str(call.error)) < 600
    assert len(shown_in(trajectory.steps[1])) == 1  # the row's


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_of_a_row_fails_when_it_is_read_or_fails_its_episode(name: str) -> None:
    content = [{"type": "image", "image": hostile(name)}, {"type": "text", "text": "?"}]
    try:
        row = row_from_record({"prompt": [{"role": "user", "content": content}], "row_id": "r"}, place="row 0")
    except DataError as error:
        assert "row 0" in str(error)  # noqa: PT017 (both ways are right)
        return
    trajectory = play(["never"], row)
    assert trajectory.stop is StopReason.ERROR
    assert trajectory.failure is not None
    assert trajectory.failure.kind == "DataError"
    assert not trajectory.steps


def test_too_many_pictures_are_an_error_of_the_tool() -> None:
    @tool(name="look")
    def show(at: int) -> ToolResult:
        """Look at a place."""
        return ToolResult("here", images=[PIXELS] * 65)

    [call] = play([CALL % 1, "done"], tools=[show]).steps[0].calls
    assert call.fault == "failed"
    assert "65 pictures" in str(call.error)


def test_damaged_files_raise_nothing_but_data_errors() -> None:
    rng = random.Random(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        whole = encoded(kind)
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 3, 20))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            cut = rng.choice((len(data), rng.randrange(len(data))))
            try:
                Picture.from_bytes(bytes(data[:cut])).check()
            except DataError:
                continue
