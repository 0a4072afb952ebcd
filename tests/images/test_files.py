"""Images as people have them: read with the right size and colours, or refused with what they are and the fix."""

import base64
import io
import random
import struct
import zlib

import pytest
from PIL import Image, ImageOps

from rloo_kit.errors import DataError
from rloo_kit.images.files import read_picture, thumbnail

pytestmark = pytest.mark.filterwarnings("error")  # none of Pillow's warnings reaches a user

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)
CORNER = Image.new("RGB", (40, 30), BLUE)  # a red corner, top left
CORNER.paste(RED, (0, 0, 12, 12))
UPRIGHT = {(2, 2): RED, (37, 27): BLUE}
TURNED = {(27, 2): RED, (2, 37): BLUE}  # after orientation 6
NOISE = Image.frombytes("RGB", (64, 48), random.Random(0).randbytes(64 * 48 * 3))


def encode(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def exif(orientation):
    data = Image.Exif()
    data[0x0107], data[0x0112] = 7, orientation
    return data.tobytes()


def row(mode, fmt, *values, width=0):
    """One row of pixels."""
    return Image.frombytes(mode, (width or len(values), 1), struct.pack(fmt, *values))


def greys(*values):
    return {(x, 0): (value,) * 3 for x, value in enumerate(values)}


def palette():
    """Index 0 is transparent, 1 is green."""
    image = Image.new("P", (8, 8), 0)
    image.putpalette([0, 0, 0, *GREEN])
    image.putpixel((5, 5), 1)
    return encode(image, transparency=0)


def with_alpha():
    image = Image.new("RGBA", (8, 8), (*GREEN, 255))
    image.putpixel((1, 1), (0, 0, 0, 0))
    image.putpixel((2, 2), (0, 0, 0, 51))  # a fifth black over white
    return image


def header(width, height):
    """A PNG of 1 bit a pixel that ends before its pixels: whoever decodes it fails."""
    body = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunk = struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT"


PNG, NOISY = encode(CORNER), encode(NOISE)
URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
ODD = exif(6)[:19] + b"\1" + exif(6)[20:]  # a tag of bytes: `exif_transpose` reads it but cannot write it
ALPHA = {(1, 1): WHITE, (2, 2): (204, 204, 204), (5, 5): GREEN}
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (40, 30), GREEN)]}
# A file's name: its bytes; or a name: a value, next to photo.png. Then the size, and colours of some pixels.
READ = {
    "photo.jpg": (lambda: encode(CORNER, "JPEG", quality=95), (40, 30), UPRIGHT),
    "WRONG SUFFIX.PNG": (lambda: encode(CORNER, "JPEG", quality=95), (40, 30), UPRIGHT),
    "grüne Wiese 1.png": (lambda: PNG, (40, 30), UPRIGHT),
    "no suffix": (lambda: encode(CORNER, "BMP"), (40, 30), UPRIGHT),
    "cmyk.jpg": (lambda: encode(CORNER.convert("CMYK"), "JPEG", quality=95), (40, 30), UPRIGHT),
    "phone.jpg": (lambda: encode(CORNER, "JPEG", quality=95, exif=exif(6)), (30, 40), TURNED),
    "phone.tif": (lambda: encode(CORNER, "TIFF", exif=exif(6)), (30, 40), TURNED),
    "odd-exif.jpg": (lambda: encode(CORNER, "JPEG", quality=95, exif=ODD), (30, 40), TURNED),
    "broken-exif.jpg": (lambda: encode(CORNER, "JPEG", quality=95, exif=exif(6)[:-9]), (40, 30), UPRIGHT),
    "no-exif.jpg": (lambda: encode(CORNER, "JPEG", quality=95, exif=b"Exif\0\0garbage!"), (40, 30), UPRIGHT),
    "palette.png": (palette, (8, 8), {(0, 0): WHITE, (5, 5): GREEN}),
    "rgba.webp": (lambda: encode(with_alpha(), "WEBP", lossless=True), (8, 8), ALPHA),
    "la.png": (lambda: encode(row("LA", "4B", 90, 255, 0, 0, width=2)), (2, 1), greys(90, 255)),
    "scan.png": (lambda: encode(row("1", "B", 0b01000000, width=2)), (2, 1), greys(0, 255)),
    "16bit.png": (lambda: encode(row("I;16", "<3H", 0, 100 * 257, 65535)), (3, 1), greys(0, 100, 255)),
    "dark.png": (lambda: encode(row("I;16", "<2H", 0, 257)), (2, 1), greys(0, 1)),
    "16bit.pgm": (lambda: encode(row("I", "=3i", 0, 100 * 257, 65535), "PPM"), (3, 1), greys(0, 100, 255)),
    "share.tif": (lambda: encode(row("F", "=3f", 0, 0.2, 1), "TIFF"), (3, 1), greys(0, 51, 255)),
    "signed.tif": (lambda: encode(row("F", "=3f", -10, 0, 10), "TIFF"), (3, 1), greys(0, 128, 255)),
    "film.gif": (lambda: encode(CORNER, "GIF", **FRAMES), (40, 30), UPRIGHT),
    "film.png": (lambda: encode(CORNER, "PNG", **FRAMES), (40, 30), UPRIGHT),
    "film.webp": (lambda: encode(CORNER, "WEBP", lossless=True, **FRAMES), (40, 30), UPRIGHT),
    "pages.tif": (lambda: encode(CORNER, "TIFF", compression="tiff_lzw", **FRAMES), (40, 30), UPRIGHT),
    "icon.ico": (lambda: encode(Image.new("RGBA", (64, 64), RED), "ICO"), (64, 64), {(9, 9): RED}),
    "scene.jp2": (lambda: encode(CORNER, "JPEG2000"), (40, 30), UPRIGHT),
    "one.png": (lambda: encode(Image.new("RGB", (1, 1), GREEN)), (1, 1), {(0, 0): GREEN}),
    "narrow.png": (lambda: encode(Image.new("L", (1, 200), 7)), (1, 200), greys(7)),
    "relative": ("photo.png", (40, 30), UPRIGHT),
    "file URI": ("file://{folder}/photo.png", (40, 30), UPRIGHT),
    "home": ("~/photo.png", (40, 30), UPRIGHT),
    "data URI": (URI, (40, 30), UPRIGHT),
    "data URI with line ends": (URI[:60] + "\n" + URI[60:], (40, 30), UPRIGHT),
    "bytes": (PNG, (40, 30), UPRIGHT),
    "dict bytes": ({"bytes": PNG, "path": "gone.png"}, (40, 30), UPRIGHT),
    "dict path": ({"bytes": None, "path": "photo.png"}, (40, 30), UPRIGHT),
    "PIL": (CORNER, (40, 30), UPRIGHT),
    "PIL RGBA": (CORNER.convert("RGBA"), (40, 30), UPRIGHT),
}
# The same, and words of the error; that about a file also names it.
REFUSED = {
    "cut.jpg": (lambda: encode(NOISE, "JPEG")[:-900], "truncated", "replace it"),
    "cut.png": (lambda: NOISY[:-900], "truncated", "replace it"),
    "cut.webp": (lambda: encode(NOISE, "WEBP")[:-900], "damaged", "replace it"),
    "cut.tif": (lambda: encode(NOISE, "TIFF", compression="tiff_lzw")[:-900], "damaged", "leave its row out"),
    "crc.png": (lambda: NOISY[:30] + b"\0\0" + NOISY[32:], "damaged", "leave its row out"),
    "bit.png": (lambda: NOISY[:900] + bytes(9) + NOISY[909:], "damaged", "replace it"),
    "pixels-crc.png": (lambda: NOISY[:-16] + bytes(4) + NOISY[-12:], "damaged", "checksum", "replace it"),
    "huge.png": (lambda: header(10_000, 10_000), "10,000 x 10,000 pixels", "89,478,485", "scale it down"),
    "bomb.png": (lambda: header(20_000, 20_000), "400,000,000 pixels", "89,478,485", "scale it down"),
    "strip.png": (lambda: encode(Image.new("L", (1, 500))), "1 x 500 pixels", "200", "crop or pad"),
    "plot.svg": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "is an SVG", "PNG or JPEG"),
    "plot.png": (lambda: b'\xef\xbb\xbf<?xml version="1.0"?>\n<!-- a -->\n<svg/>', "is an SVG", "PNG or JPEG"),
    "paper.pdf": (lambda: b"%PDF-1.7\n%\xe2\xe3\n", "is a PDF", "PNG or JPEG"),
    "paper.eps": (lambda: encode(NOISE, "EPS"), "is an EPS", "PNG or JPEG"),
    "phone.HEIC": (lambda: b"\0\0\0\x24ftypheic\0\0\0\0mif1heic" + bytes(99), "is a HEIC", "PNG or JPEG"),
    "clip.mp4": (lambda: b"\0\0\0\x20ftypisom\0\0\2\0isomiso2" + bytes(99), "is a video", "a frame"),
    "failed.jpg": (lambda: b"\n<!DOCTYPE html><html>404</html>", "is an HTML page", "save the image"),
    "lfs.png": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer", "git lfs pull"),
    "notes.txt": (lambda: "ein Wörtchen\n".encode(), "is a text file", "path of the image"),
    "empty.png": (lambda: b"", "is empty", "replace it"),
    "data.bin": (lambda: bytes(range(1, 200)), "is in no format", "PNG or JPEG"),
    "missing": ("gone.png", "no file 'gone.png'", "{folder}/gone.png", "relative path begins in {folder}"),
    "folder": ("..", "is a folder", "an image in it"),
    "URL": ("https://example.com/a.png", "'https://example.com/a.png' is a URL", "next to the data"),
    "broken base64": (URI[:-3], "data:image/png", "broken base64", "encode"),
    "not base64": ("data:image/svg+xml,<svg/>", "data:image/svg+xml", "base64", "encode"),
    "another file's base64": ("data:image/png;base64,JVBERi0=", "data URI", "is a PDF", "PNG or JPEG"),
    "bare base64": (URI[22:] * 9, "base64", "write data:image/png;base64,"),
    "broken bytes": ({"bytes": PNG[:60], "path": "cut.png"}, "cut.png", "truncated", "replace it"),
    "None": (None, "None is no image", "give a path"),
    "PIL without pixels": (Image.new("RGB", (0, 0)), "PIL image", "0 x 0"),
}


@pytest.mark.parametrize("name", READ)
def test_what_is_read(name, tmp_path, monkeypatch, capfd):
    """Without care a phone's photo lies on its side, a 16-bit scan is white, and a logo's transparent ground is black;
    each library hands images on in another form."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "photo.png").write_bytes(PNG)
    value, size, colours = READ[name]
    if callable(value):
        (tmp_path / name).write_bytes(value())
        value = name
    value = value.format(folder=tmp_path) if isinstance(value, str) else value
    picture = read_picture(value, None if name == "home" else tmp_path)
    image = picture.open()
    assert picture.size == image.size == size and image.mode == "RGB"
    for place, colour in colours.items():
        assert max(abs(a - b) for a, b in zip(image.getpixel(place), colour, strict=True)) <= 4, (place, colour)
    assert ImageOps.exif_transpose(image).size == size  # transformers' load_image would turn it again
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, tmp_path, capfd):
    """One SVG in 10,000 rows must not end in "cannot identify image file <_io.BytesIO object at 0x7f>", and a mistyped
    path shows where it was looked for."""
    value, *words = REFUSED[name]
    if callable(value):
        (tmp_path / name).write_bytes(value())
        value, words = name, [*words, f"{tmp_path / name} "]
    with pytest.raises(DataError) as refused:
        read_picture(value, tmp_path)
    text = str(refused.value)
    assert all(word.format(folder=tmp_path) in text for word in words), text
    assert "\n" not in text and "object at" not in text and len(text) < 600
    assert name == "cut.tif" or capfd.readouterr() == ("", "")  # libtiff writes to the terminal by itself


def test_digests_are_of_the_content(tmp_path):
    """Prompts with the same image are one group, and a changed pixel makes another prompt."""
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(PNG)
    other = CORNER.copy()
    other.putpixel((20, 20), (0, 0, 254))
    pictures = [read_picture(value, tmp_path) for value in ("a.png", "b.png", PNG, URI, {"bytes": PNG})]
    assert len({one.digest for one in pictures}) == 1 and len(pictures[0].digest) == 14
    assert [one.content for one in pictures] == [tmp_path / "a.png", tmp_path / "b.png", PNG, PNG, PNG]
    assert read_picture(encode(other), None).digest != pictures[0].digest
    digests = [read_picture(image, None).digest for image in (CORNER, CORNER.copy(), other)]
    assert digests[0] == digests[1] != digests[2]


def test_a_content_is_decoded_once(monkeypatch):
    """A page that a thousand rows ask about would be decoded a thousand times."""
    data, opened, real = encode(NOISE.rotate(90)), [], Image.open
    monkeypatch.setattr(Image, "open", lambda *args, **options: opened.append(1) or real(*args, **options))
    assert read_picture(data, None).size == (64, 48) and (once := len(opened))
    assert read_picture(data, None).size == (64, 48) and len(opened) == once


def test_a_file_that_changes_is_noticed(tmp_path):
    """A plot that is drawn again during a run would go on under the digest, and the features, of the old one."""
    path = tmp_path / "plot.png"
    path.write_bytes(PNG)
    picture = read_picture(path, None)
    path.write_bytes(NOISY)
    with pytest.raises(DataError, match=r"plot\.png has changed.*start the run again"):
        picture.open()


def test_thumbnails():
    """A page with the photos themselves would have hundreds of megabytes."""
    uri = thumbnail(read_picture(Image.new("RGB", (1200, 600), RED), None), side=48)
    assert read_picture(uri, None).size == (48, 24) and uri.startswith("data:image/jpeg;base64,") and len(uri) < 2000
